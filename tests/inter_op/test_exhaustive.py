"""The search finds the best plan of spaces whose plans can all be priced, and no lower bound is above it."""

from __future__ import annotations

import pytest

from alpa_lite.planners.fewer_devices import AS_FAST
from benchmarks.exhaustive import compared, cuts

CASES = [
    pytest.param(2, 69, id="perceptron"),
    pytest.param(3, 45, id="uneven perceptron on two hosts with little memory"),
    pytest.param(5, 189, id="convolutions on three devices"),
    # Its best sharding has more collectives than the one with the least sum, which run beside kernels.
    pytest.param(17, 60, id="convolutions on two devices"),
    pytest.param(7, 117, id="transformer with little memory"),
    pytest.param(13, 444, id="deeper transformer on three devices", marks=pytest.mark.long),
]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "num_plans"), CASES)
def test_the_search_finds_the_best_of_all_plans(number: int, num_plans: int) -> None:
    row = compared(number)
    # Fewer would mean that the enumeration lost plans.
    assert row.num_plans >= num_plans
    assert row.behind <= AS_FAST
    assert row.over <= 1e-9


def test_all_cuts_are_enumerated() -> None:
    found = set(cuts(4))
    # Each of the three borders is cut or not.
    assert len(found) == 2**3
    for cut in found:
        assert [layer for first, last in cut for layer in range(first, last + 1)] == [0, 1, 2, 3]
