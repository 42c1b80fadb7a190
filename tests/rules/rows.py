"""The table of rows: every primitive with a rule and its variants, by family."""

from tests.rules import rows_contraction, rows_convolution, rows_elementwise, rows_kernels, rows_layout

FAMILIES = (rows_elementwise, rows_contraction, rows_convolution, rows_layout, rows_kernels)
ROWS = tuple(row for family in FAMILIES for row in family.ROWS)
