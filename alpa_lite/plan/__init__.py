"""A plan: the value that every planner returns, and its interpretation.

Input: solved stages from a planner, or a plan file (`codec`). Output: a checked `Plan` (`plan`, `parts`),
the ops and collectives that it makes each device run (`walk`), and their prices (`pricing`).
Read `parts` first, then `plan` and `walk`.
"""
