"""The fastest program, among numbers of stages and schedules.

    stages     the best ones by the stage DP, of a range of numbers of stages                         `StageRange`
    schedules  these stages under each that their memory allows, and in an order of their own         `_estimated`
    estimate   the tasks under a schedule, with transfers as one and all updates at the end           `refine.Found`
    program    of stages under a schedule, simulated, which takes far longer than an estimate             `_fitting`

Ranges wait by the seconds of the stage DP, stages under a schedule by their estimate, in one queue. The first of them
is looked at: the best stages of a range are solved and estimated, and the numbers above and below theirs wait in its
place; the program of an estimate is simulated. The search ends when all that waits is expected to take longer than the
fastest program, or at most `WORTH` less. Estimates are no bounds: a few more are simulated where that was asked for.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count
from typing import NamedTuple

from alpa_lite.errors import InfeasibleError, without_frames
from alpa_lite.inter_op.assembly import StagedStep, assembled, bytes_over, too_large
from alpa_lite.inter_op.best_stages import StageCounts
from alpa_lite.inter_op.plan_request import PlanRequest
from alpa_lite.inter_op.refine import WORTH, Found, agreeing, made_to_fit, reordered, under_each, with_less_memory
from alpa_lite.inter_op.shared_devices import MAX_ROUNDS
from alpa_lite.inter_op.solved_stages import PlacedStage, StagePlace
from alpa_lite.inter_op.space import hosts_of_groups
from alpa_lite.inter_op.stage_cost_cache import StageCostCache
from alpa_lite.inter_op.stage_costs import StageCosts
from alpa_lite.inter_op.stage_dp import StageChoice
from alpa_lite.inter_op.stage_search import StageSearch
from alpa_lite.inter_op.surveyed_searches import CLOSE
from alpa_lite.plan.plan import Plan
from alpa_lite.schedule import Schedule
from alpa_lite.sharding.meshes import place_in_groups
from alpa_lite.step.layers import Cut

ESTIMATE_ERROR = 0.05
"""The relative error by which estimates were seen to be too high, against the programs of stages in chunks."""


class StageRange(NamedTuple):
    """A range of numbers of stages in a stage search; None for all that it allows."""

    search: StageSearch
    counts: StageCounts | None = None

    def around(self, number: int) -> list[StageRange]:
        """Return the ranges of more and of fewer stages than `number`, if there are any."""
        counts = self.counts or StageCounts()
        others = (counts.more_than(number), counts.fewer_than(number)) if self.search.num_stages is None else ()
        return [self._replace(counts=other) for other in others if not other.is_empty]


class Priced(NamedTuple):
    """Stages under a schedule, and their plan, whose program has been simulated.

    Attributes:
        by_dp: the seconds of the stages by the stage DP; 0 where it did not choose them.
    """

    found: Found
    plan: Plan
    by_dp: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of one step, by the simulation of the program."""
        return self.plan.prediction.step_seconds


@dataclass(kw_only=True)
class BestPrograms:
    """The queue of the module, and the fastest program so far.

    Attributes:
        name: name of the plans.
        schedules: schedules of pipelines.
        at_most: the seconds of a plan that programs are to be faster than, once there is one.
        best: the fastest program; None before there is one.
        refused: why stages do not fit into memory that were expected to be the best, if some do not.
    """

    request: PlanRequest
    name: str
    schedules: Sequence[Schedule]
    at_most: float = math.inf
    best: Priced | None = None
    refused: InfeasibleError | None = None
    _estimates: list[tuple[float, int, float, Found]] = field(default_factory=list[tuple[float, int, float, Found]])
    _seen: set[object] = field(default_factory=set[object])

    def add(self, ways: Iterable[Found], by_dp: float = 0.0) -> None:
        """Let stages under schedules wait for their programs. `by_dp`: see `Priced`."""
        for way in ways:
            # Stages may run their tasks in the same order under several schedules: then the first of these is taken.
            key = tuple((stage.first, stage.last, stage.submesh, stage.mesh) for stage in way.stages), way.estimate
            if key not in self._seen:
                self._seen.add(key)
                heappush(self._estimates, (way.seconds, len(self._seen), by_dp, way))

    def simulate(self, at_most: float = math.inf, *, close: int = 0) -> None:
        """Simulate the programs of estimates below `at_most` seconds, until none of these promises a faster one.

        `close`: how many further ones are simulated whose estimates are at most `ESTIMATE_ERROR` above the fastest.
        """
        while self._estimates and (least := self._estimates[0][0]) < at_most:
            if least >= self._worthwhile:
                if not close or self.best is None or least >= (1 + ESTIMATE_ERROR) * self.best.seconds:
                    break
                close -= 1
            *_, by_dp, found = heappop(self._estimates)
            with self._refusing():
                priced = Priced(found, self._fitting(found), by_dp)
                if self.best is None or priced.seconds < self.best.seconds:
                    self.best = priced

    def search(self, searches: Sequence[StageSearch], steps: StageCostCache, at_most: float, further: float) -> float:
        """Look at the numbers of stages of searches, and return the seconds by the stage DP of the best that were left.

        Args:
            searches: stage searches at one number of micro-batches.
            steps: the stage costs of the step.
            at_most: the seconds by the stage DP from which on stages are of no use.
            further: how many searches of this size are still to follow.
        """
        ranges = [(search.best_known().seconds, n, StageRange(search)) for n, search in enumerate(searches)]
        heapify(ranges)
        numbers = count(len(ranges))
        while ranges:
            least = ranges[0][0]
            self.simulate(least)
            limit = min(at_most, self._worthwhile)
            if least >= limit:
                break
            *_, way = heappop(ranges)
            rivals = [seconds for seconds, *_ in (*ranges[:1], *self._estimates[:1])]
            # Stages are solved while nothing else is clearly better; seconds of 0 tell nothing apart.
            until = min(limit, (1 + CLOSE) * max(least, min(rivals))) if rivals and least else limit
            choice = way.search.run(until, further=further, counts=way.counts)
            left = [way]
            if choice.seconds < until:
                left = way.around(len(choice.stages))
                with self._refusing():
                    self.add(self._estimated(way.search, choice, steps), choice.seconds)
            for each in left if choice.stages else ():
                heappush(ranges, (choice.seconds, next(numbers), each))
        self.simulate()
        return ranges[0][0] if ranges else math.inf

    @property
    def _worthwhile(self) -> float:
        """The seconds that an estimate has to be below."""
        # Without a program there is nothing to compare estimates with.
        return math.inf if self.best is None else (1 - WORTH) * min(self.best.seconds, self.at_most)

    @contextmanager
    def _refusing(self) -> Generator[None]:
        """Keep why stages do not fit into memory."""
        try:
            yield
        except InfeasibleError as error:
            self.refused = self.refused or without_frames(error)

    # ------------------------------------------------------------------------------------------------ estimates

    def _estimated(self, search: StageSearch, choice: StageChoice, steps: StageCostCache) -> Iterator[Found]:
        """Yield the stages of a choice under each schedule that their memory allows, and in an order of their own,
        which the DP counts on.
        """
        # The DP knows stages by kinds of submesh only; here they get devices of their own.
        costs, stages = self._placed(search, choice, steps)
        schedule = search.batch.schedule if len(stages) > 1 else self.schedules[0]
        stages = made_to_fit(costs, stages, schedule)
        ways = [stages, *agreeing(costs, stages, schedule)] if search.all_equal else [stages]
        found = min((Found.of(self.request, costs, way, schedule) for way in ways), key=lambda way: way.seconds)
        under = [*under_each(self.request, found, self.schedules)]
        yield from under
        if len(self.schedules) > 1:
            yield reordered(self.request, min(under, key=lambda way: way.seconds), self._worthwhile)

    def _placed(
        self, search: StageSearch, found: StageChoice, steps: StageCostCache
    ) -> tuple[StageCosts, list[PlacedStage]]:
        """Return the stages of a choice on their devices, and the costs of the step with their policies."""
        cluster, cut = self.request.cluster, Cut.into(len(found.stages)) if search.all_equal else steps.natural
        kinds = [search.space.kinds[stage.submesh] for stage in found.stages]
        submeshes = place_in_groups(kinds, hosts_of_groups(cluster), cluster.devices_per_host)
        ranges = [(i, i) if search.all_equal else (s.first_layer, s.last_layer) for i, s in enumerate(found.stages)]
        configurations = [search.configurations[stage.configuration] for stage in found.stages]
        of_layers = [
            configuration.policy
            for configuration, (first, last) in zip(configurations, ranges, strict=True)
            for _ in range(first, last + 1)
        ]
        costs, parts = steps.mixed(search.batch.num_microbatches, cut, of_layers)
        stages: list[PlacedStage] = []
        for number, ((start, end), submesh) in enumerate(zip(ranges, submeshes, strict=True)):
            mesh = search.space.mesh(found.stages[number].submesh, configurations[number].shape)
            # Under policies of recomputation each layer of the search consists of several.
            first, last = start * parts, (end + 1) * parts - 1
            place = StagePlace(first, last, submesh, mesh)
            costs, asked = costs.fitting(costs.question(place, in_flight=configurations[number].in_flight))
            stages.append(StagePlace(asked.first, asked.last, submesh, mesh).with_solution(costs.answer(asked)))
        return costs, stages

    # ------------------------------------------------------------------------------------------------- programs

    def _fitting(self, found: Found) -> Plan:
        """Return the plan of some stages, solved with less memory as needed. Raises `InfeasibleError` if none fits.

        The search sees stages one by one, without the arrays that are on the way between them.
        """
        plan, limits = self._assembled(found), dict[int, float]()
        for _ in range(MAX_ROUNDS):
            if not (over := bytes_over(plan)):
                return found.costs.recomputed.recorded_in(plan)
            found, limits = with_less_memory(found, over, limits)
            plan = self._assembled(found)
        raise too_large(plan)

    def _assembled(self, found: Found) -> Plan:
        costs = found.costs
        staged = StagedStep(step=costs.step, layers=costs.layers, stages=found.stages, schedule=found.schedule)
        return assembled(self.name, self.request, staged, time.perf_counter())
