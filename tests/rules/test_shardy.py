"""Our factor rules against those of the Shardy pass in the jaxlib wheel, op by op.

Intended differences are listed with their reason, which the rule's structure must bear out; a listed row that agrees
after all is an error too. Drawn calls may differ for the same reasons and no others.
"""

from __future__ import annotations

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("jaxlib.mlir.dialects.sdy")

from tests.lower.draws import calls
from tests.lower.pick import CALLS
from tests.rules.row import names
from tests.rules.rows import ROWS
from tests.rules.shardy import COMBINER, CROPPED, HALO, MINOR, NO_RULE, SUBTRACTED, WINDOW, WRITTEN, reasons

ORACLE_ROWS = tuple(row for row in ROWS if row.oracle)
COMPARED = sorted(set(CALLS) - set(NO_RULE))
EXAMPLES, MANY = 4, 100

#: Why rows differ on purpose, and which.
REASONS = {
    MINOR: [
        "reshape merge",
        "reshape split",
        "reshape heads",
        "reshape mixed",
        "reshape without common major",
        "reshape coprime",
        "conv_general_dilated grouped",
        "conv_general_dilated grouped to input",
        "conv_general_dilated grouped to kernel",
        "conv_general_dilated batch groups",
        "conv_general_dilated batch groups to input",
        "conv_general_dilated batch groups to kernel",
    ],
    HALO: [
        "conv_general_dilated strided",
        "conv_general_dilated dilated",
        "conv_general_dilated dilated to kernel",
        "conv_general_dilated strided to kernel",
        "conv_general_dilated valid",
        "conv_general_dilated valid to input",
        "conv_general_dilated valid to kernel",
        "conv_general_dilated patches",
        "conv_general_dilated patches to kernel",
        "reduce_window_sum overlapping",
    ],
    WINDOW: [
        "reduce_window_sum",
        "reduce_window_max",
        "reduce_window",
        "select_and_scatter_add",
        "conv_general_dilated point",
        "conv_general_dilated point to input",
        "conv_general_dilated point strided",
        "conv_general_dilated point strided to input",
        "conv_general_dilated patches",
        "conv_general_dilated patches to input",
    ],
    COMBINER: [
        "argmax",
        "argmin",
        "reduce",
    ],
    SUBTRACTED: ["scatter-sub"],
    CROPPED: ["pad negative"],
    WRITTEN: (
        ["dynamic_update_slice", "dynamic_update_slice from below", "dynamic_update_slice clamped"]
        if jax.__version_info__ >= (0, 11)
        else []
    ),
}
if jax.__version_info__ >= (0, 12):
    # Its rules split the windows of kernels too, and neither what is cropped nor coprime dims that are merged.
    windows = (row.name for row in ORACLE_ROWS if row.primitive == "conv_general_dilated" and " point" not in row.name)
    REASONS[HALO] = [*windows, "reduce_window_sum overlapping"]
    REASONS[MINOR].remove("reshape coprime")
    del REASONS[CROPPED]
DIFFERENCES = {name for rows in REASONS.values() for name in rows}


@pytest.mark.parametrize("row", ORACLE_ROWS, ids=names(ORACLE_ROWS))
def test_rule_agrees_with_shardy(row):
    expected = {reason for reason, rows in REASONS.items() if row.name in rows}
    assert reasons(row) == expected, str(row.case.rule)


def test_differences_name_rows():
    assert DIFFERENCES <= {row.name for row in ORACLE_ROWS}


def compare(primitive: str, count: int) -> None:
    """Draw calls of a primitive; each agrees with Shardy or differs for a known reason."""

    @settings(max_examples=count, report_multiple_bugs=False)
    @given(st.data())
    def agree(data: st.DataObject) -> None:
        row = data.draw(calls(primitive))
        if row.oracle:
            reasons(row)

    agree()


@pytest.mark.parametrize("primitive", COMPARED)
def test_rules_of_drawn_calls_agree_with_shardy(primitive):
    compare(primitive, EXAMPLES)


@pytest.mark.long
@pytest.mark.parametrize("primitive", COMPARED)
def test_rules_of_many_drawn_calls_agree_with_shardy(primitive):
    compare(primitive, MANY)


def test_primitives_without_a_rule_in_shardy_have_no_row_to_compare():
    assert not [row.name for row in ORACLE_ROWS if row.primitive in NO_RULE]
    assert set(NO_RULE) <= set(CALLS)
