"""The evaluation of Alpa (Zheng et al., OSDI 2022): its models, its plans and baselines, and its measurements."""
