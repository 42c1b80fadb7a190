"""The front end: a train step is traced to the programs that all later phases work on.

Input: the user's function with its arguments, which `call` tells apart into arrays, constants and modules that the step
updates. Output: its graph at any number of micro-batches (`step_programs`),
rewritten by the passes in `passes/`, with the dim of every argument that holds the batch (`batch`).
Read `trace` first, then `from_jaxpr` and `step_programs`.
"""
