"""A parallel step is compared with `jax.jit` of the same function.

Comes in: a compiled step and arguments, the caller's or drawn ones (`trial_arguments`). Goes out: for each leaf of the
results how far both are apart, in units of what rounding explains (`compare`, `check_report`).
Read `compare` first.
"""
