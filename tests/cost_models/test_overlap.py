import random
from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.overlap import NUM_PARTS, Stream, StreamTask, loop_seconds, serial_seconds, simulate


def kernel(seconds: float, *needs: int, streams: bool = False) -> StreamTask:
    return StreamTask(seconds=seconds, needs=needs, streams=streams)


def sends(seconds: float, *needs: int) -> StreamTask:
    return StreamTask(seconds=seconds, stream="communication", needs=needs)


@st.composite
def task_lists(draw: st.DrawFn, *, max_size: int = 12) -> list[StreamTask]:
    count = draw(st.integers(0, max_size))
    streams: tuple[Stream, ...] = ("compute", "communication", "both")
    return [
        StreamTask(
            seconds=draw(st.sampled_from((0.0, 1.0, 2.0, 3.5))),
            stream=draw(st.sampled_from(streams)),
            needs=tuple(draw(st.sets(st.integers(0, i - 1), max_size=3))) if i else (),
        )
        for i in range(count)
    ]


def longest_way(tasks: Sequence[StreamTask]) -> float:
    @cache
    def end(i: int) -> float:
        return tasks[i].seconds + max((end(n) for n in tasks[i].needs), default=0.0)

    return max(map(end, range(len(tasks))), default=0.0)


def test_a_collective_hides_behind_kernels_that_do_not_need_it():
    found = simulate([kernel(1), sends(3, 0), kernel(4, 0), kernel(1, 1, 2)])
    assert found.seconds == 6 and found.exposed_seconds == 0
    assert (found.compute_seconds, found.communication_seconds) == (6, 3)


def test_a_collective_that_the_next_kernel_needs_is_exposed():
    found = simulate([kernel(1), sends(3, 0), kernel(2, 1)])
    assert found.seconds == 6 and found.exposed_seconds == 3


def test_what_leads_to_a_collective_comes_first():
    """The gradient of the input starts an all_reduce; that of the weight, listed before it, hides it."""
    assert simulate([kernel(2), kernel(2), sends(2, 1), kernel(1, 2)]).seconds == 5


def test_both_streams_slow_each_other_down():
    assert simulate([kernel(2), sends(2)], contention=0.5).seconds == 3
    assert simulate([kernel(2), sends(1)], contention=0.5).seconds == pytest.approx(1.5 + 1)
    assert simulate([kernel(2), sends(1, 0)], contention=0.5).seconds == 3


def test_products_take_results_in_parts():
    whole, parts = (simulate([sends(4), kernel(2, 0, streams=streams)]).seconds for streams in (False, True))
    assert whole == 6 and parts == 4 + 2 / NUM_PARTS
    assert simulate([sends(4), kernel(8, 0, streams=True)]).seconds == 1 + 8
    # It does not keep the device from other work while it waits.
    assert simulate([sends(4), kernel(2, 0, streams=True), kernel(2)]).seconds == 4.5


def test_a_loop_prefetches_one_trip_ahead():
    incoming = kernel(0)
    body = [incoming, sends(3), kernel(4, 0, 1)]  # gather weights, then compute with what is carried
    assert loop_seconds(body, [(2, 0)], 10) == 3 + 10 * 4
    dear = [incoming, sends(5), kernel(4, 0, 1)]
    assert loop_seconds(dear, [(2, 0)], 10) == 10 * 5 + 4
    chained = [incoming, sends(3, 0), kernel(4, 1)]  # it needs what the last trip made
    assert loop_seconds(chained, [(2, 0)], 10) == 70


def test_what_a_loop_sends_off_hides_behind_its_next_trip():
    body = [kernel(0), kernel(4, 0), sends(3, 1)]
    assert loop_seconds(body, [(1, 0)], 10) == 10 * 4 + 3


@given(task_lists())
def test_between_the_longest_way_and_one_after_the_other(tasks: list[StreamTask]):
    seconds = simulate(tasks).seconds
    busy = {
        stream: sum(t.seconds for t in tasks if t.stream in (stream, "both")) for stream in ("compute", "communication")
    }
    assert max(longest_way(tasks), *busy.values()) - 1e-9 <= seconds <= serial_seconds(tasks) + 1e-9


@given(task_lists(), st.floats(0, 1))
def test_nothing_starts_before_what_it_needs(tasks: list[StreamTask], contention: float):
    found = simulate(tasks, contention=contention)
    for task, end in zip(tasks, found.ends, strict=True):
        assert end - task.seconds >= max((found.ends[n] for n in task.needs), default=0.0) - 1e-9
    assert found.seconds >= simulate(tasks).seconds - 1e-9 or contention > 0


def best_order(tasks: Sequence[StreamTask]) -> float:
    """The shortest end over all orders in which the tasks can be started, each as early as possible."""

    def search(done: dict[int, float], idle: dict[str, float]) -> float:
        if len(done) == len(tasks):
            return max(done.values(), default=0.0)
        best = float("inf")
        for i, task in enumerate(tasks):
            if i in done or any(n not in done for n in task.needs):
                continue
            streams = ("compute", "communication") if task.stream == "both" else (task.stream,)
            start = max([done[n] for n in task.needs] + [idle[s] for s in streams], default=0.0)
            end = start + task.seconds
            best = min(best, search(done | {i: end}, idle | dict.fromkeys(streams, end)))
        return best

    return search({}, {"compute": 0.0, "communication": 0.0})


def test_the_order_is_close_to_the_best():
    """List scheduling by longest way: on small cases within a quarter of the best order, and mostly it."""
    draw, exact, cases = random.Random(0), 0, 60
    for _ in range(cases):
        tasks = [
            StreamTask(
                seconds=float(draw.randint(1, 4)),
                stream=draw.choice(("compute", "communication")),
                needs=tuple(n for n in range(i) if draw.random() < 0.3),
            )
            for i in range(6)
        ]
        found, best = simulate(tasks).seconds, best_order(tasks)
        assert best - 1e-9 <= found <= 1.25 * best + 1e-9
        exact += found <= best + 1e-9
    assert exact >= 0.9 * cases


def test_a_collective_scatters_the_sums_of_a_kernel_in_parts():
    """It starts with the first part, and not so early that it waits for the last."""

    def scatters(seconds: float) -> list[StreamTask]:
        return [kernel(8), StreamTask(seconds=seconds, stream="communication", needs=(0,), streams=True)]

    assert simulate(scatters(4)).seconds == pytest.approx(8 + 4 / NUM_PARTS)
    assert simulate(scatters(16)).seconds == pytest.approx(8 / NUM_PARTS + 16)
    # A kernel reads whole results of kernels.
    assert simulate([kernel(8), kernel(4, 0, streams=True)]).seconds == 12


def test_copies_to_the_host_and_back_run_beside_everything_else():
    """The link is full duplex: each direction takes its copies one after the other, and slows nothing down."""
    kernels = [StreamTask(seconds=1.0, needs=(i - 1,) if i else ()) for i in range(4)]
    out = [StreamTask(seconds=1.5, stream="to_host", needs=(i,)) for i in range(2)]
    back = [StreamTask(seconds=1.5, stream="to_device", needs=(i,)) for i in range(2)]
    found = simulate([*kernels, *out, *back], contention=0.5)
    # Copies start at 1 and 2.5, in both directions at once.
    assert found.ends == pytest.approx((1, 2, 3, 4, 2.5, 4.0, 2.5, 4.0))
    loop = StreamTask(seconds=2.0, stream="both", needs=(3,))
    assert simulate([*kernels, *out, loop]).seconds == pytest.approx(6.0)
    long = [StreamTask(seconds=9.0, stream="to_host"), StreamTask(seconds=1.0, stream="both")]
    assert simulate(long).ends == pytest.approx((9.0, 1.0))
    waiting = [StreamTask(seconds=3.0, stream="to_device"), StreamTask(seconds=1.0, needs=(0,))]
    assert (simulate(waiting).seconds, simulate(waiting).exposed_seconds) == pytest.approx((4.0, 3.0))
