"""The scoring rule, against numbers worked out by hand."""

from __future__ import annotations

import pytest

from benchmarks.published.score import Outcome, left_out, score


def outcome(group: str, predicted: float | None, measured: float | None, hardware: str = "a") -> Outcome:
    reason = "" if predicted else "no plan"
    return Outcome(
        id="x", group=group, hardware=hardware, predicted_seconds=predicted, measured_seconds=measured, reason=reason
    )


#: Errors of g: +50 %, -50 %, +10 %; of h: +100 %.
ROWS = [
    outcome("g", 1.5, 1.0),
    outcome("g", 1.0, 2.0),
    outcome("g", 1.1, 1.0),
    outcome("g", None, 1.0),
    outcome("h", 4.0, 2.0),
    outcome("h", 3.0, None),
]


def test_groups_count_alike_however_many_rows_they_have() -> None:
    found = score(ROWS)
    g, h = found.groups
    assert (g.group, g.num_rows, g.num_failed) == ("g", 4, 1) and (h.num_rows, h.num_failed) == (2, 0)
    assert g.error == pytest.approx((0.5 + 0.5 + 0.1) / 3) and g.bias == pytest.approx(0.1 / 3)
    assert g.largest == pytest.approx(0.5) and h.error == 1.0
    assert found.error == pytest.approx((1.1 / 3 + 1.0) / 2)


def test_one_constant_per_device_is_taken_from_other_groups() -> None:
    # Of h: predicted is twice the measured; a constant of 1/2 from there makes 0.75, 0.25 and 0.55 of g's measured.
    assert left_out("g", ROWS) == pytest.approx((0.25 + 0.75 + 0.45) / 3)
    # Of g: measured / predicted are 1/1.5, 2 and 1/1.1, their median 1/1.1.
    assert left_out("h", ROWS) == pytest.approx(2 / 1.1 - 1)
    other = [*ROWS, outcome("k", 1.2, 1.0, hardware="b")]
    assert left_out("k", other) == pytest.approx(0.2), "nothing else ran on b"


def test_without_measurements_there_is_no_score() -> None:
    found = score([outcome("g", 1.0, None)])
    assert found.error is None and found.left_out_error is None and found.groups[0].num_failed == 0
    assert score([]).groups == ()
