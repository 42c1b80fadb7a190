"""A program runs on the devices of this process and, through the other processes, on those of the job.

Comes in: a lowered program and the user's arguments. Goes out: their results, with the state where the plan keeps it
(`function`, `execute`).
Read `execute` first, then `bind` (one instruction), `run_transfers` and `exchange` (between submeshes and processes).
"""
