"""The table of rows: every primitive with a rule and its variants, by family."""

from tests.rules import (
    rows_contraction,
    rows_convolution,
    rows_elementwise,
    rows_indexing,
    rows_kernels,
    rows_layout,
    rows_random,
    rows_reduction,
)

FAMILIES = (
    rows_elementwise,
    rows_contraction,
    rows_convolution,
    rows_reduction,
    rows_layout,
    rows_indexing,
    rows_kernels,
    rows_random,
)
ROWS = tuple(row for family in FAMILIES for row in family.ROWS)
