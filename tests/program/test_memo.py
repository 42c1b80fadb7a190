"""Memoisation: bounds, emptying, lifetimes and threads."""

import gc
import threading
import time
import weakref
from dataclasses import dataclass

import pytest

from alpa_lite.program.memo import clear_caches, memoized


@dataclass(frozen=True, eq=False)
class Subject:
    number: int


def test_results_by_arguments_are_bounded_and_the_oldest_go_first() -> None:
    made: list[int] = []

    @memoized(entries=2)
    def square(n: int) -> int:
        made.append(n)
        return n * n

    assert [square(n) for n in (1, 2, 1, 3, 2, 1)] == [1, 4, 1, 9, 4, 1]
    assert made == [1, 2, 3, 1]


def test_results_in_a_subject_end_with_it() -> None:
    @memoized
    def pair(subject: Subject, other: int) -> Subject:
        return Subject(subject.number + other)

    subject = Subject(1)
    result = weakref.ref(pair(subject, other=2))
    assert pair(subject, other=2) is result() and pair(subject, 3).number == 4
    del subject
    gc.collect()
    assert result() is None


def test_all_results_are_forgotten_on_request() -> None:
    made: list[object] = []

    @memoized(entries=10)
    def by_value(n: int) -> list[int]:
        made.append(n)
        return [n]

    @memoized
    def in_subject(subject: Subject) -> list[int]:
        made.append(subject)
        return [subject.number]

    subject = Subject(5)
    first = by_value(1), in_subject(subject)
    assert (by_value(1), in_subject(subject)) == first and len(made) == 2
    clear_caches()
    again = by_value(1), in_subject(subject)
    assert again == first and again[0] is not first[0] and again[1] is not first[1] and len(made) == 4


@pytest.mark.parametrize("where", ["arguments", "subject"])
def test_threads_share_one_result(where: str) -> None:
    both = threading.Barrier(2)

    def slow(_: Subject) -> object:
        both.wait(timeout=10)
        time.sleep(0.01)
        return object()

    function = memoized(slow) if where == "subject" else memoized(entries=5)(slow)
    subject, found = Subject(1), list[object]()
    threads = [threading.Thread(target=lambda: found.append(function(subject))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] is found[1]


def test_a_failure_is_not_stored() -> None:
    outcomes = iter([ValueError("not yet"), None])

    @memoized(entries=5)
    def sometimes(n: int) -> int:
        error = next(outcomes)
        if error is not None:
            raise error
        return n

    with pytest.raises(ValueError, match="not yet"):
        sometimes(1)
    assert sometimes(1) == 1
