"""What one device computes: an op of the step on the device's blocks of its operands.

Comes in: an op with the placement that the plan chose (`block`). Goes out: the blocks of its results, with the
collectives that `alpa_lite.plan.walk` names (`combine`).
Read `block` first, then `run_local`.
"""
