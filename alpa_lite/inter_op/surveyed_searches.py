"""The stage searches at each number of micro-batches, with guesses from a survey and from what was searched before."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from alpa_lite.errors import BatchError, NonAdditiveError, PlanError, TraceError
from alpa_lite.inter_op.best_stages import PipelinedBatch
from alpa_lite.inter_op.boundaries import Inflows
from alpa_lite.inter_op.microbatch_counts import Guess
from alpa_lite.inter_op.solved_stages import StagePlace
from alpa_lite.inter_op.space import Space, StageEquality
from alpa_lite.inter_op.stage_cost_cache import StageCostCache
from alpa_lite.inter_op.stage_costs import StageCosts, expect
from alpa_lite.inter_op.stage_search import PolicyCosts, StageGuesses, StageLimits, StageSearch
from alpa_lite.inter_op.survey import MEMORY_SLACK, Beyond, Profile, Survey
from alpa_lite.intra_op.problem import Status
from alpa_lite.program.ir import wiring_of
from alpa_lite.program.phases import weight_gradient_ops
from alpa_lite.schedule import Schedule
from alpa_lite.step.layers import Cut, forward_loops, op_flops
from alpa_lite.step.recomputation import Remat

CLOSE = 0.02
"""Relative difference by the stage DP below which stages may turn out faster or slower as they are simulated."""

LEAST_SHARE = 0.05
"""The least share of the waiting of 1F1B that an order is expected to leave."""

_ROUNDING = 1e-6


def only_equal(costs: StageCosts) -> bool:
    """Return True if equal stages alone are searched, so that no rows move between steps.

    Not where hosts differ: equal stages would wait for the slowest.
    """
    return costs.has_rows and not costs.cost_model.cluster.groups


class _EqualStages(NamedTuple):
    """Equal stages at a number of micro-batches, by the seconds of a step.

    Attributes:
        number: of micro-batches.
        kind, shape: the submesh of each stage, and the logical mesh on it.
        share: of all layers that the largest stage has.
        layer_seconds: [layers], of both passes of a micro-batch, as surveyed.
    """

    seconds: float
    number: int
    policy: Remat
    kind: int
    shape: int
    share: float
    layer_seconds: NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class SurveyedSearches:
    """The stage searches of a request.

    Attributes:
        steps: stage costs of the step.
        space: the submeshes and logical meshes on which stages make sense and fit at some number of micro-batches.
        survey: the times of a few layers.
        profiles: the policies of rematerialisation that are worth searching, each with the profile of layers under it.
        inflows, slower_seconds: see `StageGuesses`, at the usual number of micro-batches.
        schedules, num_stages, equal: see `JointSearch`.
        excess: by number of micro-batches, [policies, kinds, shapes]: how many times as long as guessed stages took at
            least that lack memory (`StageSearch.excess`).
    """

    steps: StageCostCache
    space: Space
    survey: Survey
    profiles: Mapping[Remat, Profile]
    inflows: Inflows
    slower_seconds: NDArray[np.float64]
    schedules: Sequence[Schedule]
    num_stages: int | None
    equal: Collection[StageEquality]
    excess: Mapping[int, NDArray[np.float64]] = field(default_factory=dict[int, NDArray[np.float64]])

    def having_seen(self, number: int, excess: NDArray[np.float64]) -> SurveyedSearches:
        """Return the searches with what was learned at a number of micro-batches."""
        return replace(self, excess={**self.excess, number: excess})

    def taking(self, seconds: float) -> SurveyedSearches:
        """Return the searches with another time limit for solving a stage."""
        effort = replace(self.steps.effort, time_limit_seconds=seconds)
        return self if effort == self.steps.effort else replace(self, steps=replace(self.steps, effort=effort))

    def survey_at(self, number: int) -> bool:
        """Survey layers where none were with micro-batches as large as at this number, which are larger than those of
        the first survey; return True if there is such a submesh.
        """
        survey, size = self.survey, self.size(number)
        kinds = [kind for kind in range(len(self.space.kinds)) if not survey.reaches(kind, size)]
        if not kinds or size <= survey.first_size:
            return False
        with suppress(PlanError, NonAdditiveError, BatchError, TraceError):
            costs = self.steps.of(number, self.steps.natural)
            with self.steps.request.progress.during("survey", f"survey at {number} micro-batches"):
                survey.add(costs, kinds=kinds)
            return True
        return False

    def guess_at(self, number: int) -> Guess:
        """Return the guessed seconds of a step with the best stages at a number of micro-batches."""
        at_best = likely = self.at(number)
        if not all(self.survey.reaches(kind, self.size(number)) for kind in range(len(self.space.kinds))):
            likely = self.at(number, "as before")
        return Guess(
            at_best=min(search.best_known().seconds for search in at_best),
            likely=min(search.best_likely().seconds for search in likely),
        )

    def tried_at(self, number: int) -> float:
        """Return the seconds of a step at a number of micro-batches with the best guessed stages, solved roughly."""
        searches = self.at(number)
        # Each solves its stages in their order, and workers meet it from the other end.
        expect(question for search in reversed(searches) for question in reversed(search.tried_questions))
        return min(search.tried() for search in searches)

    def at(self, number: int, beyond: Beyond = "more shared") -> list[StageSearch]:
        """Return the stage searches at a number of micro-batches; the one for the least memory comes last."""
        first = self.search_for(self.schedules[0], number, beyond)
        found = [first]
        # On mixed clusters both kinds of stages are searched: equal ones move no rows.
        if self.steps.known.has_rows and not first.all_equal:
            found.insert(0, self.search_for(self.schedules[0], number, beyond, all_equal=True))
        seconds = first.best_known().seconds
        if math.isinf(seconds):
            return found
        # Other schedules hide transfers or wait less, at the cost of memory: they are searched where that may be worth
        # it.
        for schedule in self._other_schedules(number):
            # Orders that are made for the tasks of a plan need room for more micro-batches than 1F1B holds.
            forward = self._forward_share if schedule.overlaps_transfers else None
            other = self.search_for(schedule, number, beyond, forward_share=forward)
            if other.best_known().seconds < (1 - CLOSE) * seconds:
                found.insert(0, other)
        return found

    def in_equal_stages(
        self, space: Space, counts: Collection[int], numbers: Iterable[int], at_most: float
    ) -> dict[int, dict[int, float]]:
        """Return about the least seconds of a step in numbers of equal stages that do not divide the layers.

        Layers are surveyed on the submeshes of such stages, and then solved with the memory that a stage has. A stage
        of whole trips of the loop over layers takes its share of them, rounded up.

        Args:
            space: the submeshes of the request.
            counts: numbers of stages.
            numbers: numbers of micro-batches to look at.
            at_most: the seconds from which on plans are of no use.

        Returns:
            For each number of stages the seconds at the numbers of micro-batches at which they are below `at_most`.
        """
        known, devices = self.steps.known, space.cluster.num_devices
        space = space.where([devices % n == 0 and devices // n in counts for n in space.devices])
        survey = Survey(space, self.survey.profile, known.structure_of_layers())
        for number in self.survey.numbers:
            survey.add(self.steps.of(number, self.steps.natural))
        ways = [way for way in self._equal_ways(survey, numbers) if way.seconds < at_most]
        found = {count: dict[int, float]() for count in counts}
        # What memory makes of a guess is not known before layers are solved within it: the most promising ones first.
        for way in sorted(ways, key=lambda way: way.seconds):
            of_numbers = found[devices // space.devices[way.kind]]
            if way.seconds < of_numbers.get(way.number, at_most):
                seconds = way.seconds * self._times_as_long_within_memory(space, way)
                if seconds < of_numbers.get(way.number, at_most):
                    of_numbers[way.number] = seconds
        return found

    def _equal_ways(self, survey: Survey, numbers: Iterable[int]) -> Iterator[_EqualStages]:
        """Yield the equal stages on each submesh and logical mesh of a survey, where all devices together have memory.

        Their seconds are guessed as if each had the memory that it likes.
        """
        space, devices = survey.space, survey.space.cluster.num_devices
        # Loops are whole there, where parts of one trip are none.
        whole = self.steps.request.step_at(1, 0)
        wirings = (wiring_of(whole.graph.ops[op]) for op in forward_loops(whole))
        trips = sum(wiring.trips for wiring in wirings if wiring is not None)
        for number, (policy, profile) in product(numbers, self.profiles.items()):
            size = self.size(number)
            of_layers, updates = survey.guess(size, profile, beyond="more shared")
            for kind, of_stage in enumerate(space.devices):
                count = devices // of_stage
                if profile.least_bytes(size, number, devices, count) > MEMORY_SLACK * space.room_bytes[kind]:
                    continue
                share = math.ceil(trips / count) / trips if trips else 1 / count
                loop, update = of_layers[:, kind].sum(axis=0), updates[:, kind].sum(axis=0)
                for shape, seconds in enumerate((share * ((number + count - 1) * loop + update)).tolist()):
                    yield _EqualStages(seconds, number, policy, kind, shape, share, of_layers[:, kind, shape])

    def _times_as_long_within_memory(self, space: Space, way: _EqualStages) -> float:
        """Return how many times as long as surveyed the layers of the first stage take with its memory, at least."""
        try:
            costs = self.steps.of(way.number, self.steps.natural, way.policy)
        except (PlanError, NonAdditiveError, BatchError, TraceError):
            return math.inf
        count, shares = space.cluster.num_devices // space.devices[way.kind], self.survey.profile.shares
        # Layers in the middle that are at least as large as a stage, with as much more memory.
        size = min(shares.size, math.ceil(way.share / np.median(shares) - _ROUNDING))
        first = (shares.size - size) // 2
        layers = slice(first, first + size)
        room = space.room_bytes[way.kind] * max(1.0, shares[layers].sum() / way.share)
        in_flight = PipelinedBatch(self.schedules[0], way.number).in_flight(count - 1)
        place = StagePlace(first, first + size - 1, space.submesh(way.kind), space.mesh(way.kind, way.shape))
        solution = costs.solution(place, in_flight=in_flight, limit_bytes=float(room))
        if solution.choice is None:
            # Out of time is not out of memory.
            return math.inf if solution.status is Status.INFEASIBLE else 1.0
        return max(1.0, solution.cost.loop_seconds * (1 - solution.gap) / float(way.layer_seconds[layers].sum()))

    def search_for(
        self,
        schedule: Schedule,
        number: int,
        beyond: Beyond,
        *,
        all_equal: bool = False,
        forward_share: float | None = None,
    ) -> StageSearch:
        """Return the stage search for a schedule.

        `all_equal`: for equal stages alone, even if others are searched. `forward_share`: see `PipelinedBatch`.
        """
        known, natural, survey = self.steps.known, self.steps.natural, self.survey
        batch, profiles = PipelinedBatch(schedule, number, self._postponed, forward_share), self.profiles.values()
        size, held = self.size(number), batch.held(known.layers.num_layers)
        # What crosses a boundary is proportional to the samples of a micro-batch.
        scale = known.step.num_microbatches / number
        layer_seconds, layer_updates = self._of_layers(number, beyond)
        guesses = StageGuesses(
            layer_seconds=layer_seconds,
            layer_updates=layer_updates,
            inflows=self.inflows.times(scale),
            slower_seconds=self.slower_seconds * scale,
            following=np.stack([profile.holds(self.space, size, number, held) - 1 for profile in profiles]),
            roomy=np.stack([survey.holds(size, number, held, profile) - 1 for profile in profiles]),
            worthwhile=self.space.worthwhile(survey.profile.shares),
        )
        limits = StageLimits(
            num_stages=self.num_stages,
            all_equal=all_equal or only_equal(known),
            equal=self.equal,
        )
        costs = PolicyCosts(
            any_number=known,
            policies=tuple(self.profiles),
            under=lambda policy, count: self.steps.of(number, Cut.into(count) if count else natural, policy),
        )
        return StageSearch(costs, batch, self.space, guesses, limits)

    def size(self, number: int) -> float:
        """Return the samples of a micro-batch."""
        return (self.steps.request.batch_size or 1) / number

    def _of_layers(self, number: int, beyond: Beyond) -> list[NDArray[np.float64]]:
        """Return [policies, layers, kinds, shapes] twice: guessed seconds of each layer, and of its update."""
        of_policies = [self.survey.guess(self.size(number), each, beyond=beyond) for each in self.profiles.values()]
        # Stages that took longer than guessed for lack of memory do so with larger micro-batches too.
        worse = [excess[:, None] for searched, excess in self.excess.items() if searched >= number]
        longer = reduce(np.maximum, worse, np.ones(1))
        return [np.stack(parts) * longer for parts in zip(*of_policies, strict=True)]

    def _other_schedules(self, number: int) -> Sequence[Schedule]:
        """Return the schedules whose best stages may be others than those of the first, by what the DP sees of them."""
        alike: dict[tuple[bool, float], Schedule] = {}
        for schedule in self.schedules:
            share = schedule.waiting_share(self._postponed, 2, number)
            alike.setdefault((schedule.overlaps_transfers, share), schedule)
        return [*alike.values()][1:]

    @cached_property
    def _forward_share(self) -> float:
        """The least share of the forward pass in the seconds of a micro-batch, under any policy.

        No order of tasks lets the last stage begin before the forward passes of the others.
        """
        # The stage DP divides by it, and a step may have no work at all.
        return max(LEAST_SHARE, min(profile.forward_share for profile in self.profiles.values()))

    @cached_property
    def _postponed(self) -> float:
        """The share of the work of a micro-batch that no other stage waits for, by its FLOPs."""
        step = self.steps.known.step
        flops = op_flops(step)
        loop = [op for op, phase in enumerate(step.phases) if phase.in_loop]
        whole = sum(flops[op] for op in loop)
        return sum(flops[op] for op in weight_gradient_ops(step, loop)) / whole if whole else 0.0
