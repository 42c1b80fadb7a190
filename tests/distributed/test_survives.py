"""A worker of a parameter server is killed: under asynchronous updates the others go on, else the job ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launched import answers, run

PROCESSES, DIED = 4, 3
DEATH = f"alpa_lite: process {DIED} has died. The others go on without its workers."


@pytest.mark.slow
@pytest.mark.parametrize(("consistency", "when"), [("async", "between"), ("1", "within")])
def test_others_go_on_without_a_worker_that_was_killed(consistency: str, when: str, tmp_path: Path) -> None:
    """The state is compared with the equations of the order, without the lost gradients, by process 0."""
    done = run(PROCESSES, 1, "--recoverable", "-m", "tests.distributed.survives", consistency, when, "1", str(tmp_path))
    told = answers(done)
    assert done.stderr.count(DEATH) == 1 and f"process {DIED} was ended by SIGKILL" in done.stderr
    assert len(told[DIED]) == 1 and all(len(told[living]) == 5 for living in (1, 2))
    assert all(told[living][-1] == {"saved": 3} for living in range(DIED))
    equations, losses = told[0][:-1:2], told[0][1:-1:2]
    for expected, found in zip(equations, losses, strict=True):
        # Another worker's copy of the loss is that of the servers.
        assert found in told[1] and abs(found["loss"] - expected["equations"]) < 1e-5
    mine = set(range(DIED - 1, 12, 3))
    assert equations[0]["applied"] == [*range(12)]
    # Its first micro-batch was applied if it began its second one.
    assert mine & {*equations[1]["applied"]} <= ({DIED - 1} if when == "within" else set())
    for later in equations[2:]:
        assert {*later["applied"]} == {*range(12)} - mine
    assert losses[-1]["loss"] < losses[0]["loss"]


@pytest.mark.slow
@pytest.mark.parametrize(("consistency", "when"), [("async", "within"), ("1", "between")])
def test_a_worker_on_two_processes_ends_with_one_of_them(consistency: str, when: str, tmp_path: Path) -> None:
    """Two workers of two processes each: of the second one, the last process is killed and the other one ends."""
    done = run(5, 1, "--recoverable", "-m", "tests.distributed.survives", consistency, when, "2", str(tmp_path))
    told = answers(done)
    assert "process 4 has died, with which process 3 shares a worker. This one ends, too." in done.stderr
    assert all(done.stderr.count(f"alpa_lite: process {each} has died. The others go on") == 1 for each in (3, 4))
    assert all(told[living][-1] == {"saved": 3} for living in range(3)) and {"saved": 3} not in told[3]
    equations, losses = told[0][:-1:2], told[0][1:-1:2]
    for expected, found in zip(equations, losses, strict=True):
        assert found in told[1] and found in told[2] and abs(found["loss"] - expected["equations"]) < 1e-5
    assert equations[0]["applied"] == [*range(8)]
    assert all(later["applied"] == [*range(0, 8, 2)] for later in equations[2:])
    assert losses[-1]["loss"] < losses[0]["loss"]


@pytest.mark.slow
def test_synchronous_servers_need_all_workers(tmp_path: Path) -> None:
    done = run(PROCESSES, 1, "--recoverable", "-m", "tests.distributed.survives", "bsp", "between", "1", str(tmp_path))
    assert done.returncode == 137
    assert "the job ends when a process is lost that step needs: under" in done.stderr
    assert f"process {DIED} has died, and the steps of this job cannot go on without it. The job ends." in done.stderr
