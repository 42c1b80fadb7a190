"""The table of exports on the page is that of the results, and the results are what the targets do."""

from __future__ import annotations

from pathlib import Path

import pytest

from alpa_lite.export.targets import TARGETS
from benchmarks.exports import MODELS, PLANS, Export, exports, reasons, stored, table

PAGE = Path(__file__).parents[2] / "docs" / "export.md"


def test_the_table_is_that_of_the_results() -> None:
    rows = stored()
    assert table(rows) in PAGE.read_text(encoding="utf-8"), "put what table(stored()) returns there"
    assert {(row.model, row.plan, row.target) for row in rows} == {
        (model, plan, target) for model in MODELS for plan in PLANS for target in TARGETS
    }


@pytest.mark.parametrize("plan", PLANS)
def test_results_are_what_the_targets_do(plan: str) -> None:
    found = exports("mlp-tiny", plan)
    assert found == [row for row in stored() if (row.model, row.plan) == ("mlp-tiny", plan)]


def test_reasons_are_counted_without_what_differs_between_models() -> None:
    rows = [
        Export(model=name, plan="FSDP", target="nemo", refused=why) for name, why in (("a", ""), ("b", "x"), ("c", "x"))
    ]
    assert reasons(rows) == {("nemo", "FSDP", "x"): 2}
    assert table(rows).splitlines()[-1] == '| `"nemo"` | 1 of 3 |'
