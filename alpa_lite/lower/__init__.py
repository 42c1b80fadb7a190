"""Lower a plan to a program of instructions.

Input: a plan and the step that it was made for. Output: the tasks of each stage (`slices`), the instructions that run
them in the order of the schedule (`instructions`), and one compiled function for each task (`emission`), which runs
each op on the blocks of its operands (`run_local`). Read `instructions` first, then `slices` and `emission`.
"""
