"""Compute an op of the step on one device's blocks of its operands.

Input: an op with the placement that the plan chose (`block`). Output: the blocks of its results, combined over devices
by the collectives that `alpa_lite.plan.walk` names (`run_local.combine`). Read `block` first, then `run_local`.
"""
