"""The garbage collector runs rarely while something is planned, and as before afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from alpa_lite.garbage import rare_collection


@pytest.fixture(autouse=True)
def own_thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_collections_are_rare_inside_and_as_before_outside() -> None:
    gc.set_threshold(700, 10, 10)
    with rare_collection():
        assert gc.get_threshold()[0] > 700
        with rare_collection():
            assert gc.get_threshold()[0] > 700
        assert gc.get_threshold()[0] > 700
    assert gc.get_threshold() == (700, 10, 10)


def test_an_exception_restores_what_was_there() -> None:
    gc.set_threshold(500, 5, 5)
    with pytest.raises(KeyError), rare_collection():
        raise KeyError("planning failed")
    assert gc.get_threshold() == (500, 5, 5)


@pytest.mark.parametrize("given", [(0, 10, 10), (1_000_000, 50, 50)])
def test_a_collector_that_is_off_or_runs_more_rarely_is_left_alone(given: tuple[int, int, int]) -> None:
    gc.set_threshold(*given)
    with rare_collection():
        assert gc.get_threshold() == given
    assert gc.get_threshold() == given
