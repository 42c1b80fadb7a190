"""Programs run on devices, or are simulated on a cost model.

Comes in: a program of instructions. Goes out: the results and times of a step, measured (`execute/`) or simulated
(`simulate`); with it a described cluster (`calibrate/`), a comparison with `jax.jit` (`check/`), saved states
(`checkpoint/`) and the processes of a job (`job/`).
Read `execute/execute` first.
"""
