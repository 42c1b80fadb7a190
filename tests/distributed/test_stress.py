"""What runs rely on: with the turns that are taken, programs that share a device run in the order of their launches."""

from __future__ import annotations

import pytest

from tests.distributed.launched import run


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(("processes", "devices"), [(2, 1), (4, 1), (2, 2), (3, 2), (4, 2)])
def test_overlapping_groups_in_one_order(processes: int, devices: int, seed: int) -> None:
    done = run(processes, devices, "-m", "tests.distributed.stress", str(seed))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("all pieces arrived") == done.stdout.count("all groups agree") == processes
