"""The range of a predicted step."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.uncertainty import LikelyRange, indistinguishable, likely_range

seconds = st.floats(1e-6, 1e4)
shares = st.floats(0, 2)
counts = st.integers(1, 10_000)


@given(seconds, shares, counts)
def test_a_range_holds_its_prediction_and_grows_with_what_is_uncertain(step: float, share: float, count: int) -> None:
    found = likely_range(step, collective_seconds=share * step, num_devices=count)
    assert found.low < step < found.high and found.contains(step)
    assert found.low >= step / 1.5 and found.high <= 2.2 * step
    more = likely_range(step, collective_seconds=min(1.0, share + 0.1) * step, num_devices=count)
    assert share > 0.9 or (more.low < found.low and more.high > found.high)
    larger = likely_range(step, collective_seconds=share * step, num_devices=2 * count)
    # What grows with the number of devices makes a step slower, never faster.
    assert larger.low == found.low and (larger.high > found.high or 2 * count <= 8)


def test_the_range_of_a_host_without_communication_is_that_of_its_kernels() -> None:
    low, high = likely_range(2.0, collective_seconds=0.0, num_devices=8)
    assert math.log(2.0 / low) == pytest.approx(0.11) and math.log(high / 2.0) == pytest.approx(0.11)
    assert likely_range(0.0, collective_seconds=0.0, num_devices=8) == (0.0, 0.0)


def test_steps_are_indistinguishable_only_if_each_lies_in_the_range_of_the_other() -> None:
    wide, narrow = LikelyRange(0.5, 2.0), LikelyRange(1.4, 1.6)
    assert indistinguishable(1.0, wide, 1.5, LikelyRange(0.9, 2.0))
    assert not indistinguishable(1.0, wide, 1.5, narrow) and not indistinguishable(1.5, narrow, 1.0, wide)
    assert not indistinguishable(1.0, None, 1.0, wide) and not indistinguishable(1.0, wide, 1.0, None)
