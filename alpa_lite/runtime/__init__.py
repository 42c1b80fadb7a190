"""Run programs on devices, or simulate them on a cost model.

Input: a program of instructions. Output: the results and times of a step, measured (`execute/`) or simulated
(`simulate`). The package also describes a cluster by measuring it (`calibrate/`), compares a step with `jax.jit`
(`compare`), saves states (`checkpoint/`) and manages the processes of a job (`job/`). Read `execute/execute` first.
"""
