"""Workers answer what was expected, in order; what goes wrong with them changes no plan and leaves no process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import pytest

import alpa_lite as al
from alpa_lite.cli.models.alpa_cases import CASES
from alpa_lite.errors import PlanError
from alpa_lite.inter_op import workers as module
from alpa_lite.inter_op.workers import Likely, Workers, num_workers
from alpa_lite.plan.plan import Plan
from alpa_lite.planners import Auto

PATIENCE_SECONDS = 120.0


def count(memory: dict[str, int], first: int, rest: int) -> tuple[int, int, int]:
    """How often this worker was asked, a sum, and its process."""
    memory["asked"] = memory.get("asked", 0) + 1
    return memory["asked"], first + rest, os.getpid()


def fail(memory: Any, rest: Any) -> None:
    """No answer."""
    raise LookupError(rest)


def end(memory: Any, rest: int) -> None:
    """No process any more."""
    os._exit(rest)


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Workers]:
    monkeypatch.setattr(module, "START_SECONDS", 0.0)
    with Workers(1) as some:
        _wait(lambda: some.at_work)
        yield some


def _wait(until: Callable[[], object]) -> None:
    ends = time.monotonic() + PATIENCE_SECONDS
    while not until():
        assert time.monotonic() < ends
        time.sleep(0.01)


def _answer(workers: Workers, question: Likely) -> Any:
    """The answer, once a worker has begun with it; None once there are no workers."""
    found: list[Any] = []

    def taken() -> bool:
        workers.expect({"question": question})
        time.sleep(0.05)
        found.append(workers.take("question"))
        return found[-1] is not None or not workers.at_work

    _wait(taken)
    return found[-1]


def test_a_worker_keeps_what_it_was_told_and_is_gone_at_the_end(workers: Workers) -> None:
    asked, total, process = _answer(workers, Likely(count, (10,), 1))
    assert total == 11 and process != os.getpid()
    assert _answer(workers, Likely(count, (10,), 2)) == (asked + 1, 12, process)
    assert not workers.problems
    workers.__exit__()
    assert not workers.at_work
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_what_comes_later_waits_for_what_comes_soon(workers: Workers) -> None:
    late: dict[Hashable, Likely] = {i: Likely(count, (0,), i) for i in (3, 4, 5)}
    soon: dict[Hashable, Likely] = {i: Likely(count, (0,), i) for i in (0, 1, 2)}
    workers.expect(late, later=True)
    workers.expect(soon)
    order = dict[Hashable, int]()

    def all_taken() -> bool:
        for key in [*soon, *late]:
            answer = workers.take(key) if key not in order else None
            if answer is not None:
                order[key] = answer[0]
            workers.expect({k: q for k, q in late.items() if k not in order}, later=True)
            workers.expect({k: q for k, q in soon.items() if k not in order})
            time.sleep(0.02)
        return len(order) == 6

    _wait(all_taken)
    # One of those that come later may have been begun with before anything else was expected.
    assert max(order[key] for key in soon) <= 4


def test_nothing_is_expected_of_workers_that_are_not_there() -> None:
    with Workers(0) as none:
        none.expect({1: Likely(count, (0,), 1)})
        assert not none.at_work and none.take(1) is None


@pytest.mark.parametrize(
    ("question", "problem"), [(Likely(fail, (), 7), "LookupError(7)"), (Likely(end, (), 7), "EOF")]
)
def test_a_worker_that_fails_is_done_without(workers: Workers, question: Likely, problem: str) -> None:
    assert _answer(workers, question) is None
    assert [problem in each for each in workers.problems] == [True]
    workers.expect({1: Likely(count, (0,), 1)})
    assert workers.take(1) is None


def test_what_cannot_be_sent_is_no_question(workers: Workers) -> None:
    assert _answer(workers, Likely(count, (0,), lambda: 1)) is None
    assert not workers.at_work


def test_one_worker_for_each_further_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ALPA_LITE_WORKERS")
    for cores, number in {1: 0, 2: 1, 3: 2, 64: 3}.items():
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)), raising=False)
        assert num_workers() == number
    monkeypatch.setenv("ALPA_LITE_WORKERS", "5")
    assert num_workers() == 5
    monkeypatch.setattr(module, "only_own_rules", lambda: False)
    assert num_workers() == 0
    monkeypatch.setenv("ALPA_LITE_WORKERS", "two")
    with pytest.raises(PlanError, match=r"ALPA_LITE_WORKERS='two' .* must be a number of processes, 0 for none\."):
        num_workers()


def _plan(number: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Plan, int]:
    """A plan with so many workers, and how many of their answers it was made of."""
    taken, take = list[object](), Workers.take

    def count_taken(self: Workers, key: Any) -> Any:
        assert not self.problems
        answer = take(self, key)
        taken.extend([key] if answer is not None else [])
        return answer

    monkeypatch.setenv("ALPA_LITE_WORKERS", str(number))
    monkeypatch.setattr(module, "START_SECONDS", 0.0)
    monkeypatch.setattr(Workers, "take", count_taken)
    case = CASES["gpt-760M"]
    traced = al.parallelize(case.train_step()).trace(*case.arguments())
    return Auto().plan(traced.request(case.cluster)), len(taken)


def test_a_plan_is_the_same_with_workers_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, none = _plan(0, monkeypatch)
    helped, taken = _plan(1, monkeypatch)
    assert taken > none == 0
    assert helped.stages == alone.stages
    assert helped.alternatives == alone.alternatives
    assert helped.prediction == alone.prediction
