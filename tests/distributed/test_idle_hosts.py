"""Plans that leave the devices of a process idle give all processes their results."""

from __future__ import annotations

import pytest

from tests.distributed.launched import answers, run


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 2])
def test_a_process_without_devices_of_the_plan_takes_part(first: int) -> None:
    found = answers(run(2, 2, "-m", "tests.distributed.idle_hosts", str(first)))
    assert set(found) == {0, 1} and found[0] == found[1] and len(found[0]) == 6
    assert all(each["loss"] == pytest.approx(each["wanted"], rel=1e-5) for each in found[0])
