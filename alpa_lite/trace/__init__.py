"""JAX comes in: a train step is traced to the programs that everything else works on.

Comes in: the user's function with its arguments. Goes out: its graph at any number of micro-batches (`step_programs`),
rewritten by the passes in `passes/`, with the dim of every argument that holds the batch (`batch`).
Read `trace` first, then `from_jaxpr` and `step_programs`.
"""
