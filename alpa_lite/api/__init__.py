"""The functions that users call: `parallelize`, `plan`, `check`, and each step between a function and its execution.

Input: a train step, a cluster and options (`options`). Output: the values of the pipeline, each made from the one
before: traced, planned, lowered, compiled (`parallelize`). Plans are cached and shared by the processes of a job
(`plan_cache`). Read `parallelize` first.
"""
