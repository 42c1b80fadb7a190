"""Compare a parallel step with `jax.jit` of the same function.

Input: a compiled step and arguments, the caller's or random ones. Output: for each leaf of the
results the difference, in units of what rounding explains (`compare`, `check_report`). Read `compare` first.
"""
