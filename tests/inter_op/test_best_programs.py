"""Numbers of stages and schedules are compared by programs, of which few are simulated."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import alpa_lite as al
from alpa_lite.errors import InfeasibleError
from alpa_lite.inter_op import best_programs
from alpa_lite.inter_op.assembly import StagedStep, simulated_step
from alpa_lite.inter_op.best_programs import BestPrograms
from alpa_lite.inter_op.best_stages import StageCounts
from alpa_lite.inter_op.refine import WORTH, Found
from alpa_lite.planners.auto import SCHEDULES
from tests.inter_op.test_stage_costs import chain_step

Numbers = Mapping[int, tuple[float, Sequence[tuple[float, float | None]]]]
"""Of each number of stages the seconds by the stage DP, and of each schedule the estimate and what the program takes in
addition, relative to it; None where it does not fit.
"""


class _Search:
    """A stage search whose best stages are known. Each call yields a bound first, as with stages that are unsolved."""

    num_stages = None

    def __init__(self, seconds: Mapping[int, float]) -> None:
        self.seconds = seconds

    def _among(self, counts: StageCounts | None) -> dict[int, float]:
        counts = counts or StageCounts()
        most = math.inf if counts.most is None else counts.most
        return {count: seconds for count, seconds in self.seconds.items() if counts.least <= count <= most}

    def best_known(self) -> SimpleNamespace:
        return SimpleNamespace(seconds=0.9 * min(self.seconds.values()))

    def run(self, at_most: float, *, further: float, counts: StageCounts | None) -> SimpleNamespace:
        among = self._among(counts)
        if not among:
            return SimpleNamespace(stages=(), seconds=math.inf)
        count = min(among, key=among.__getitem__)
        return SimpleNamespace(stages=(None,) * count, seconds=among[count])


class _Programs(BestPrograms):
    """The queue over given numbers of stages."""

    def __init__(self, numbers: Numbers) -> None:
        super().__init__(request=cast(Any, None), name="", schedules=())
        self.numbers, self.simulated = numbers, list[float]()

    def _estimated(self, search: object, choice: Any, steps: object) -> Iterator[Found]:
        count = len(choice.stages)
        for number, (seconds, _) in enumerate(self.numbers[count][1]):
            stage = SimpleNamespace(first=0, last=count, submesh=number, mesh=None)
            estimate = SimpleNamespace(step_seconds=seconds)
            yield cast(Found, SimpleNamespace(stages=(stage,), estimate=("of", number), seconds=estimate.step_seconds))

    def _fitting(self, found: Any) -> Any:
        (stage,) = found.stages
        seconds, more = self.numbers[stage.last][1][stage.submesh]
        self.simulated.append(seconds)
        if more is None:
            raise InfeasibleError("It does not fit.")
        return SimpleNamespace(prediction=SimpleNamespace(step_seconds=seconds * (1 + more)))


def _numbers() -> st.SearchStrategy[Numbers]:
    more = st.one_of(st.none(), st.floats(0.0, 0.2))
    schedules = st.lists(st.tuples(st.floats(0.0, 0.3), more), min_size=1, max_size=4)

    def of_count(drawn: tuple[float, list[tuple[float, float | None]]]) -> Any:
        least, ways = drawn
        return least, [(least * (1 + above), more) for above, more in ways]

    one = st.tuples(st.floats(1.0, 2.0), schedules).map(of_count)
    return st.dictionaries(st.integers(1, 9), one, min_size=1, max_size=6)


@given(st.lists(_numbers(), min_size=1, max_size=1))
def test_the_program_is_the_best_of_all_within_the_gain_that_counts(drawn: list[Numbers]) -> None:
    """Where the DP and estimates are bounds: the same as if all programs were simulated, each at most once."""
    (numbers,) = drawn
    programs = _Programs(numbers)
    search = _Search({count: least for count, (least, _) in numbers.items()})
    left = programs.search([cast(Any, search)], cast(Any, None), math.inf, 0.0)
    all_ = [(seconds, more) for _, ways in numbers.values() for seconds, more in ways]
    taken = [seconds * (1 + more) for seconds, more in all_ if more is not None]
    if not taken:
        assert programs.best is None and programs.refused is not None and left == math.inf
        return
    assert programs.best is not None
    assert (1 - WORTH) * programs.best.seconds <= min(taken)
    assert len(programs.simulated) <= len(all_)
    # No program was simulated whose estimate is above that of the best, except until there was one.
    known = math.inf
    for seconds in programs.simulated:
        assert seconds < known
        of_it = [seconds * (1 + more) for s, more in all_ if s == seconds and more is not None]
        known = min([known, *of_it])


def test_stages_that_the_dp_excludes_are_not_solved() -> None:
    numbers: Numbers = {1: (1.0, [(1.05, 0.01)]), 2: (1.2, [(1.2, 0.0)]), 4: (0.98, [(1.3, 0.0), (1.04, 0.2)])}
    programs = _Programs(numbers)
    search = _Search({count: least for count, (least, _) in numbers.items()})
    left = programs.search([cast(Any, search)], cast(Any, None), math.inf, 0.0)
    assert programs.best is not None and programs.best.seconds == 1.05 * 1.01
    assert programs.simulated == [1.04, 1.05] and left == 1.2


@pytest.mark.slow
def test_no_number_of_stages_is_faster_under_any_schedule() -> None:
    """All numbers of stages under all schedules, one by one: none has a program that is faster."""
    shape = jax.ShapeDtypeStruct
    params, rows = [shape((1024, 1024), jnp.float32)] * 6, shape((48, 1024), jnp.float32)
    traced = al.parallelize(chain_step, cache=False).trace(params, rows)
    # Three hosts that take long to start a program: stages on one or on both devices of a host.
    cluster = replace(al.cluster("p3.16xlarge"), num_hosts=3, devices_per_host=2)

    def seconds(planner: al.planners.Auto) -> float:
        try:
            plan = traced.plan(cluster=cluster, planner=planner, num_microbatches=3, cache=False).last_plan
        except InfeasibleError:
            return math.inf
        assert plan is not None
        return plan.prediction.step_seconds

    searched = al.planners.Auto(manual=(), idle_devices=False)
    best = seconds(searched)
    every = [replace(searched, pipeline=count, schedule=schedule) for count in range(1, 7) for schedule in SCHEDULES]
    assert best * (1 - WORTH) <= min(map(seconds, every))


@pytest.mark.slow
def test_estimates_count_the_programs_that_a_host_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where stages take less time than to start their programs, the estimate is what the program takes."""
    shape = jax.ShapeDtypeStruct
    params, rows = [shape((64, 64), jnp.float32)] * 6, shape((48, 64), jnp.float32)
    traced = al.parallelize(chain_step, cache=False).trace(params, rows)
    cluster = replace(al.cluster("p3.16xlarge"), num_hosts=3, devices_per_host=2)
    ratios = dict[int, list[float]]()
    of = BestPrograms._fitting

    def fitting(self: BestPrograms, found: Found) -> al.Plan:
        staged = StagedStep(
            step=found.costs.step, layers=found.costs.layers, stages=found.stages, schedule=found.schedule
        )
        taken = simulated_step(self.request, staged).step_seconds
        ratios.setdefault(len(found.stages), []).append(taken / found.seconds)
        return of(self, found)

    monkeypatch.setattr(best_programs.BestPrograms, "_fitting", fitting)
    for count in range(3, 7):
        planner = al.planners.Auto(manual=(), idle_devices=False, pipeline=count)
        traced.plan(cluster=cluster, planner=planner, num_microbatches=4, cache=False)
    assert sorted(ratios) == [3, 4, 5, 6]
    assert all(abs(ratio - 1) < 0.02 for each in ratios.values() for ratio in each)
