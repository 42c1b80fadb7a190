"""Why a plan is as it is, and what else would cost.

Comes in: a plan and what is asked about: a parameter, an op, a line of the source. Goes out: sentences with numbers;
alternatives are priced by solving the rest of a stage again (`repricing`).
Read `explain` first.
"""
