"""In a job of several processes, too, segments run in the order in which results arrive, the same on all of them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.launched import answers, run


def told(*arguments: str, processes: int) -> list[Any]:
    """What all processes print, which must be the same."""
    found = answers(run(processes, 1, "-m", "tests.distributed.arrives", *arguments))
    assert set(found) == {*range(processes)} and all(rows == found[0] for rows in found.values()), found
    return found[0]


@pytest.mark.slow
def test_updates_follow_arrivals_and_bounded_delay_is_exact() -> None:
    """Numbers are compared with the equations of the order by each process."""
    bounded, free = told("served", "1", "async", processes=4)
    for run_of in (bounded, free):
        workers, staleness = run_of["workers"], run_of["staleness"]
        assert len(staleness) == 4 * workers
        # How late the slow worker is depends on the load of the machine, but not how late it may be.
        assert max(staleness) == 1 if run_of is bounded else max(staleness) > 1


@pytest.mark.slow
def test_stages_compute_what_has_arrived_with_equal_numbers() -> None:
    (found,) = told("messages", processes=3)
    assert found["under way"] <= 3 and len(found["orders"]) == 2
