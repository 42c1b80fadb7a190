"""What users call: `parallelize`, `plan`, `check`, and each step between a function and its execution.

Comes in: a train step, a cluster and options (`options`). Goes out: values that lead from one to the next: traced,
planned, lowered, compiled (`parallelize`); plans are cached (`plan_cache`) and shared by the processes of a job (`job`).
Read `parallelize` first.
"""
