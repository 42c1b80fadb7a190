"""The scoring rule, against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest

from benchmarks.published.score import Outcome, covered, left_out, score, width
from cost_models.uncertainty import LikelyRange


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


def ranged(group: str, measured: float, low: float = 0.8, high: float = 1.5) -> Outcome:
    """A prediction of one second with its range."""
    return Outcome(
        id="x",
        group=group,
        hardware="a",
        predicted_seconds=1.0,
        measured_seconds=measured,
        likely_seconds=LikelyRange(low, high),
    )


@pytest.mark.parametrize(("measured", "stretch"), [(1.5, 1.0), (0.8, 1.0), (1.5**2, 2.0), (0.8**0.5, 0.5), (1.0, 0.0)])
def test_ranges_are_stretched_up_to_the_measurement(measured: float, stretch: float) -> None:
    assert ranged("g", measured).stretch == pytest.approx(stretch)


def test_coverage_counts_groups_alike_and_sets_widths_without_the_group() -> None:
    # Stretches: of g 0.5 four times and 3, of h 1 and 2.
    g = [*[ranged("g", math.sqrt(1.5))] * 4, ranged("g", 1.5**3)]
    rows = [*g, ranged("h", 1.4999), ranged("h", 1.5**2)]
    # h needs 2 for 80 % of its rows, g only 0.5.
    assert width(rows[5:]) == pytest.approx(2.0) and width(g) == pytest.approx(0.5)
    # In the mean over both: 0.5 holds 0.4, 1 holds 0.65, 2 holds 0.9.
    assert width(rows) == pytest.approx(2.0)
    found = score(rows)
    assert [group.covered for group in found.groups] == [pytest.approx(0.8), pytest.approx(0.5)]
    assert [group.left_out_covered for group in found.groups] == [pytest.approx(0.8), 0.0]
    assert found.covered == pytest.approx(0.65) and found.left_out_covered == pytest.approx(0.4)


def test_without_ranges_there_is_no_coverage() -> None:
    assert width([]) is None and covered([], 1.0) is None
    assert score([outcome("g", 1.0, 1.0)]).covered is None
    assert score([ranged("g", 1.1)]).left_out_covered is None, "no other group says how wide"
