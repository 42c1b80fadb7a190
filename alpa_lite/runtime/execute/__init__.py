"""Run a program on the devices of this process and, together with the other processes, on those of the job.

Input: a lowered program and the user's arguments. Output: their results, with the state in the plan's shardings
(`function`, `execute`). Read `execute` first, then `bind` (one instruction), `run_transfers` and `crossing`
(between submeshes and processes).
"""
