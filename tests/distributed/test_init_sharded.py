"""State larger than a device may hold is built in its place: no process ever holds the whole of it."""

from __future__ import annotations

from tests.distributed.launched import answers, run


def test_no_process_ever_holds_the_whole_state() -> None:
    megabytes = 512
    found = answers(run(4, 1, "-m", "tests.distributed.builds", str(megabytes)))
    for plan in range(2):
        told = [found[process][plan] for process in range(4)]
        assert sum(each["held"] for each in told) == megabytes * 2**20
        assert all(each["held"] == megabytes * 2**18 for each in told)
        assert max(each["grown"] for each in told) < 0.75 * megabytes * 2**20
