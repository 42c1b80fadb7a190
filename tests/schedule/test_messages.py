"""Message-driven pipelines under random delays: they end, keep to their limit, and run tasks in order."""

import heapq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alpa_lite.errors import PlanError
from alpa_lite.schedule import MessageDriven, OneFOneB, Task, TaskKind, peak_in_flight, simulate
from alpa_lite.schedule.messages import Inboxes


def run(inboxes: Inboxes, delays) -> list[Task]:
    """Run all tasks, each as long as `delays` says; return them in the order in which they began."""
    running: list[tuple[int, int, Task]] = []
    busy, order, now = set[int](), list[Task](), 0
    while not inboxes.is_done or running:
        for stage in {*range(inboxes.num_stages)} - busy:
            if (task := inboxes.next_on(stage)) is not None:
                inboxes.begin(task)
                busy.add(stage)
                order.append(task)
                heapq.heappush(running, (now + next(delays), len(order), task))
        assert running, f"nothing runs, and nothing has arrived, after {order}"
        now, _, ended = heapq.heappop(running)
        busy.discard(ended.stage)
        inboxes.end(ended)
    return order


@given(st.integers(1, 5), st.integers(1, 8), st.integers(1, 9), st.randoms(use_true_random=False))
def test_it_ends_within_its_limit_whatever_the_delays(num_stages, num_microbatches, limit, random):
    inboxes = Inboxes(num_stages=num_stages, num_microbatches=num_microbatches, limit=limit)
    order = run(inboxes, iter(lambda: random.randint(0, 20), None))
    kinds = (TaskKind.FORWARD, TaskKind.BACKWARD)
    for stage in range(num_stages):
        mine = [task for task in order if task.stage == stage]
        # No stage holds more than the first one has let in.
        assert peak_in_flight(mine) <= min(limit, num_microbatches)
        for kind in kinds:
            assert [task.microbatch for task in mine if task.kind is kind] == list(range(num_microbatches))
    place = {task: i for i, task in enumerate(order)}
    for task, at in place.items():
        before = {
            TaskKind.FORWARD: Task(stage=task.stage - 1, microbatch=task.microbatch, kind=TaskKind.FORWARD),
            TaskKind.BACKWARD: Task(stage=task.stage + 1, microbatch=task.microbatch, kind=TaskKind.BACKWARD),
        }[task.kind]
        assert place.get(before, -1) < at


@given(st.integers(1, 5), st.integers(1, 8), st.integers(0, 9))
def test_planned_order_is_no_longer_than_that_of_1f1b_with_as_many_in_flight(num_stages, num_microbatches, limit):
    schedule = MessageDriven(limit=limit)
    lists = schedule.tasks(num_stages, num_microbatches)
    assert all(peak_in_flight(tasks) <= min(limit or num_stages, num_microbatches) for tasks in lists)
    times = ([1.0] * num_stages, [2.0] * num_stages)
    if limit == 0 or limit >= num_stages:
        least = simulate(OneFOneB().tasks(num_stages, num_microbatches), *times).makespan_seconds
        assert simulate(lists, *times).makespan_seconds <= least


def test_limit_of_one_is_one_micro_batch_at_a_time():
    lists = MessageDriven(limit=1).tasks(3, 4)
    assert simulate(lists, [1.0] * 3, [2.0] * 3).makespan_seconds == 4 * 3 * 3


def test_negative_limit_is_refused():
    with pytest.raises(PlanError, match=r"limit=-1\. Give 1 or more, or 0"):
        MessageDriven(limit=-1).tasks(2, 2)
