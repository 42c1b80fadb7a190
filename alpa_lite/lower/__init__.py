"""Lower a plan to a program of instructions.

Input: a plan and the step that it was made for. Output: the tasks of each stage (`slices`), the instructions that run
them in the order of the schedule (`instructions`), and one compiled function for each task (`emission`), which runs
each op on the blocks of its operands (`local_machine`, `run_local`). Read `instructions` first, then `slices` and
`emission`; importing this package registers the local lowerings.
"""

from alpa_lite.lower import local_contraction, local_indexing, local_kernels

LOWERING_MODULES = (local_contraction, local_indexing, local_kernels)
"""The modules that register local lowerings; importing them here registers all."""
