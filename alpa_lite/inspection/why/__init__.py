"""The reasons behind a plan's decisions, and the cost of their alternatives.

Input: a plan and a subject: a parameter, an op, a source line. Output: sentences with numbers; alternatives are priced
by solving the rest of a stage again (`repricing`).
Read `explain` first.
"""
