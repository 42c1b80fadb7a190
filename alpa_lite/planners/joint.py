"""The joint search: micro-batches, stages, submeshes, logical meshes and shardings together.

    numbers    of micro-batches that divide the batch, each well above the one before            `microbatch_numbers`
    survey     a few layers, solved at a few of these numbers: what all layers would take        `inter_op.survey`
    order      the numbers by the time of the best stages as far as the survey tells             `JointSearch._ordered`
    search     of one number: guesses become costs where the best stages depend on them          `inter_op.stage_search`
    stop       when the next number is not even guessed to be faster than what was found         `JointSearch.plans`

With one micro-batch a pipeline has nothing to overlap: then the step is one stage. (Virtual devices of one processor
do not overlap anyway.)
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alpa_lite.errors import AlpaLiteError, BatchError, InfeasibleError, NonAdditiveError, PlanError, TraceError
from alpa_lite.graph.phases import StepGraph
from alpa_lite.graph.recomputation import read_originals_across
from alpa_lite.inter_op.profile import Profile
from alpa_lite.inter_op.space import Space, flops_shares, hosts_of_groups
from alpa_lite.inter_op.stage_costs import Kind, StageCosts, state_bytes
from alpa_lite.inter_op.stage_dp import StageChoice, StageTable, solve
from alpa_lite.inter_op.stage_search import StageSearch, overhead_seconds, stage_seconds
from alpa_lite.inter_op.survey import Survey
from alpa_lite.intra_op.catalogue import Catalogue
from alpa_lite.layers import Cut, make_layers, natural_cut
from alpa_lite.mesh import place_in_groups
from alpa_lite.plan import Plan
from alpa_lite.planners.agreement import agreeing
from alpa_lite.planners.pins import Pins, pinned_specs
from alpa_lite.planners.planner import (
    PlacedStage,
    PlanRequest,
    assemble,
    boundary_values,
    inflow_seconds,
    stacks_seconds,
)
from alpa_lite.planners.refine import Found, interleaved, polished, rescheduled
from alpa_lite.planners.relax import show_bytes, show_shortage
from alpa_lite.schedule import Interleaved1F1B, Schedule
from alpa_lite.sharding import Spec

RATIO = 1.5
"""A number of micro-batches is considered when it is at least so many times the one before."""

MAX_SEARCHED = 3
"""For how many numbers of micro-batches the stages are searched, at most."""

CLOSE = 0.02
"""A number whose stages are this much slower by the stage DP may still be faster under its best schedule."""

CHUNKS = 2
"""Of interleaved pipelines, the chunks of each group of devices."""

BUBBLE = 0.03
"""Idle part of a pipeline from which on interleaving is tried."""

SEARCH_GAP = 0.05
SEARCH_SECONDS = 3.0
"""How close to the best a stage is to be proven while others may still turn out to be better, and the time for that."""

PATIENT_SECONDS = 60.0
"""The time for a stage where nothing was found in less."""

ONE_LAYER = Cut.into(1)


def microbatch_numbers(batch_size: int) -> tuple[int, ...]:
    """Divisors of a batch that lie well apart, from 1 on."""
    chosen = [1]
    for number in range(2, batch_size + 1):
        if batch_size % number == 0 and number >= RATIO * chosen[-1]:
            chosen.append(number)
    return tuple(chosen)


@dataclass(kw_only=True)
class JointSearch:
    """Searches the plans of a request; what cannot be planned is noted in `problems`."""

    request: PlanRequest
    schedule: Schedule
    schedules: Sequence[Schedule] = ()
    space: Space
    name: str
    num_layers: int | None = None
    num_stages: int | None = None
    pins: Pins = field(default_factory=dict[str, Sequence[Any]])
    problems: list[AlpaLiteError] = field(default_factory=list[AlpaLiteError])
    _seconds: float = SEARCH_SECONDS
    _costs: dict[tuple[int, Cut], StageCosts] = field(default_factory=dict[tuple[int, Cut], StageCosts])
    _catalogues: dict[Kind, Catalogue] = field(default_factory=dict[Kind, Catalogue])

    def plans(self) -> Iterator[Plan]:
        """The best plan of one number of micro-batches after the other, the most promising number first; at last the
        best of them, refined."""
        found = list[Found]()
        survey, ordered = self._ordered()
        fitting = [(number, guessed) for number, guessed in ordered if guessed < math.inf]
        # The largest numbers need the least memory: of those of which nothing was found they are tried with patience.
        hopeful = sorted(fitting, reverse=True)[:MAX_SEARCHED]
        for seconds, numbers in ((SEARCH_SECONDS, fitting), (PATIENT_SECONDS, hopeful)):
            if not found:
                self._let_take(seconds)
                for better in self._found(survey, numbers):
                    found.append(better)
                    yield self._plan(better)
        if found:
            yield self._plan(self._refined(min(found, key=lambda each: each.seconds)))
        elif not fitting:
            self.problems.append(InfeasibleError(self._infeasible(max(number for number, _ in ordered))))

    def _found(self, survey: Survey, numbers: Sequence[tuple[int, float]]) -> Iterator[Found]:
        """The best stages of numbers of micro-batches in turn, while the guesses at them are better than these."""
        count, at_most = 0, math.inf
        for number, guessed in numbers:
            if count == MAX_SEARCHED or guessed >= at_most:
                return
            try:
                better = self._best_at(number, survey, at_most * (1 + CLOSE))
            except (PlanError, NonAdditiveError, BatchError, TraceError) as error:
                self.problems.append(error)
            else:
                if better is not None:
                    count, at_most = count + 1, min(at_most, better.sum_seconds)
                    yield better

    def _let_take(self, seconds: float) -> None:
        """Let stages take so many seconds each to solve; those that were not solved in less may be now."""
        self._seconds = seconds
        self._costs = {key: replace(costs, time_limit_seconds=seconds) for key, costs in self._costs.items()}
        for costs in self._costs.values():
            costs.forget_unsolved()

    def _plan(self, found: Found) -> Plan:
        costs = found.costs
        return assemble(
            self.name, self.request, costs.step, costs.layers, found.stages, found.schedule, time.perf_counter()
        )

    def _refined(self, found: Found) -> Found:
        """What was found, solved closer to the best, and in chunks if that is faster."""
        self.request.progress("refine")
        best = self._scheduled(polished(self.request, found))
        count = len(best.stages) * CHUNKS
        if self.schedules and best.prediction.bubble_fraction > BUBBLE and len(best.stages) > 1:
            with suppress(PlanError):  # too few ops for so many layers
                costs = self._costs_of(best.costs.step.num_microbatches, Cut.into(count))
                ways = interleaved(self.request, best, costs, Interleaved1F1B(num_chunks=CHUNKS))
                best = min((best, *ways), key=lambda way: way.seconds)
        return best

    def _scheduled(self, found: Found) -> Found:
        """The same stages under the fastest schedule that their memory allows."""
        ways = rescheduled(self.request, found, self.schedules)
        return min((found, *ways), key=lambda way: way.seconds)

    # ----------------------------------------------------------------------------------------------- the order

    def _ordered(self) -> tuple[Survey, list[tuple[int, float]]]:
        """What a survey tells, and numbers of micro-batches with the seconds it guesses for a step, by these."""
        numbers = self.request.microbatch_choices(self._numbers())
        samples = _samples([n for n in numbers if self._overlaps(n)], self._batch, self.space.cluster.num_devices)
        costs: list[StageCosts] = []
        for number in samples or numbers[:1]:
            try:
                costs.append(self._costs_at(number))
            except (NonAdditiveError, BatchError, TraceError) as error:
                if self.request.num_microbatches != "auto":
                    raise
                self.problems.append(error)
                alone = isinstance(error, NonAdditiveError)  # at any other number too
                numbers = tuple(n for n in numbers if n == 1 or not (alone or n == number))
        if not costs:
            costs, numbers = [self._costs_at(1)], (1,)
        survey = self._begun(costs[0], numbers)
        for each in costs:
            self.request.progress(f"survey at {each.step.num_microbatches} micro-batches")
            survey.add(each)
        guessed = [(number, self._guessed(survey, number)) for number in numbers]
        return survey, sorted(guessed, key=lambda pair: pair[1])

    def _begun(self, costs: StageCosts, numbers: Sequence[int]) -> Survey:
        """A survey of the submeshes that are worth it at some number of micro-batches."""
        profile = Profile.of(costs)
        if _has_stacks(costs):
            self.space = self.space.equal_parts()
        fits = [profile.holds(self.space, self._batch / number, [1]) > 0 for number in numbers]
        useful = self.space.worthwhile(flops_shares(costs.step, costs.layers)) & np.logical_or.reduce(fits)
        kept = useful.any(axis=(0, 1))
        if kept.any():
            self.space = self.space.where(kept)
        return Survey(self.space, profile, costs.structures())

    def _numbers(self) -> tuple[int, ...]:
        # Virtual devices of one processor gain nothing from overlap, so that one micro-batch is best when it fits.
        return (1,) if self.space.cluster.shared_processor else microbatch_numbers(self._batch)

    @property
    def _batch(self) -> int:
        return self.request.batch_size or 1

    def _overlaps(self, number: int) -> bool:
        """Whether several stages make sense at a number of micro-batches."""
        return number > 1 or self.space.cluster.shared_processor

    def _guessed(self, survey: Survey, number: int) -> float:
        """Seconds of a step with the best stages, as far as a survey tells."""
        costs, cluster = next(iter(self._costs.values())), self.space.cluster
        alone = self._guess(survey, number, costs.layers.num_layers)
        inflow = self._inflow_seconds(costs) * costs.step.num_microbatches / number
        following = self._following(survey, number)
        possible = self.space.worthwhile(flops_shares(costs.step, costs.layers)) & (following >= 0)
        seconds = stage_seconds(alone, overhead_seconds(cluster, inflow, number), possible)
        table = StageTable(
            seconds=seconds,
            max_following_stages=np.where(np.isfinite(seconds), following[..., None], -1),
            submesh_devices=self.space.devices,
            submesh_groups=self.space.groups,
        )
        most = self.num_stages if self._overlaps(number) else 1
        dispatched = self.request.cost_model.launch_seconds() * 2 * number
        found = solve(
            table,
            num_devices=self.space.devices_of_groups,
            num_microbatches=number,
            min_stages=most if self.num_stages and most else 1,
            max_stages=most,
            serialized=cluster.shared_processor,
        )
        return max(found.seconds, dispatched)

    def _guess(self, survey: Survey, number: int, num_layers: int) -> NDArray[np.float64]:
        """[layers, kinds, shapes]: seconds of each layer by a survey."""
        guess = survey.guess(self._batch / number, number)
        return guess if guess.shape[0] == num_layers else guess.sum(axis=0, keepdims=True)

    def _following(self, survey: Survey, number: int) -> NDArray[np.int64]:
        """[layers, layers, kinds]: how many stages may follow one given its memory, by a survey; -1 for none."""
        held = [self.schedule.in_flight(0, n + 1, number) for n in range(survey.profile.num_layers)]
        return survey.profile.holds(self.space, self._batch / number, held) - 1

    # ------------------------------------------------------------------------------------------------ one number

    def _best_at(self, number: int, survey: Survey, at_most: float) -> Found | None:
        """The best stages with a number of micro-batches, by the stage DP; None if they take `at_most` seconds or more.

        Raises `InfeasibleError` when nothing fits.
        """
        self.request.progress(f"stages at {number} micro-batches")
        known = next(iter(self._costs.values()))
        stacked = _has_stacks(known)
        # Of equal stages the layers that they are made of need not be seen at this number.
        costs = known if stacked and self._overlaps(number) else self._costs_at(number)
        following = self._following(survey, number)
        search = StageSearch(
            costs,
            number,
            self.schedule,
            self._inflow_seconds(costs) * costs.step.num_microbatches / number,
            self.space,
            self._guess(survey, number, costs.layers.num_layers),
            following if following.shape[0] == costs.layers.num_layers else following[:1, -1:],
            num_stages=self.num_stages,
            coarse=(lambda count: self._costs_of(number, Cut.into(count))) if stacked else None,
        )
        found = search.run(at_most)
        if found.stages and found.seconds >= at_most:
            return None
        if not found.stages:
            raise InfeasibleError(self._infeasible(number))
        stages = _placed(self.request, search, found)
        if search.coarse is not None:
            costs = search.coarse(len(stages))
            stages = [replace(stage, first=i, last=i) for i, stage in enumerate(stages)]
        ways = [stages, *self._agreeing(costs, stages)] if stacked else [stages]
        priced = (Found.of(self.request, costs, way, self.schedule) for way in ways)
        best = self._scheduled(min(priced, key=lambda way: way.seconds))
        return replace(best, sum_seconds=found.seconds)

    def _infeasible(self, number: int) -> str:
        """The part of the step that needs the most memory even at its best, as a sentence."""
        if any(isinstance(problem, InfeasibleError) for problem in self.problems):
            # One explanation is enough, and it takes time.
            return f"No plan fits into memory at num_microbatches={number}."
        cluster, device = self.request.cluster, self.request.cluster.device
        have = f"at num_microbatches={number}; {device.name} has {show_bytes(device.memory_bytes)}."
        if not any(costs.tightest_tried for costs in self._costs_at_number(number)):
            self._try_hardest(number)
        for costs in sorted(self._costs_at_number(number), key=lambda costs: -costs.layers.num_layers):
            tight = costs.tightest(explain=self.request.advise)
            if tight is not None:
                where = f"layer {tight.first}" if tight.first == tight.last else f"layers {tight.first}..{tight.last}"
                why = show_shortage(tight.shortage)
                return (
                    f"No plan fits into memory. The tightest stage is {where} of {costs.layers.num_layers} layers, "
                    f"which needs at least {show_bytes(tight.peak_bytes)} per device of {cluster.name} {have} {why}"
                ).rstrip()
        return f"No plan fits into memory, though every stage that was tried does in some way, {have}"

    def _try_hardest(self, number: int) -> None:
        """Solve the layer with the most state on the largest submesh that is worth it, to see what it needs."""
        costs = self._costs_at(number)
        layer = int(state_bytes(costs.step, costs.layers).argmax())
        useful = np.flatnonzero(self.space.worthwhile(flops_shares(costs.step, costs.layers))[layer, layer])
        kind = max(useful.tolist() or range(len(self.space.kinds)), key=lambda k: self.space.devices[k])
        costs.solution(layer, layer, self.space.submesh(kind), self.space.mesh(kind, 0))

    def _costs_at_number(self, number: int) -> list[StageCosts]:
        return [costs for (of_number, _), costs in self._costs.items() if of_number == number]

    def _agreeing(self, costs: StageCosts, stages: Sequence[PlacedStage]) -> Iterator[list[PlacedStage]]:
        """The same stages, if they disagree on how stacked arguments lie, with the same forms on all."""
        if stacks_seconds(self.request, costs.step, costs.layers, stages):
            number = costs.step.num_microbatches
            held = [self.schedule.in_flight(i, len(stages), number) for i in range(len(stages))]
            yield from agreeing(costs, stages, held)

    def _pins(self, step: StepGraph) -> dict[int, Spec]:
        return pinned_specs(step, self.pins)

    def _costs_at(self, number: int) -> StageCosts:
        return self._costs_of(number, self._cut if self._overlaps(number) else ONE_LAYER)

    @property
    def _cut(self) -> Cut:
        if self.num_layers is not None:
            return Cut(loop_parts=self.num_layers, num_layers=self.num_layers)
        return natural_cut(self.request.step_at(1, 0))

    def _costs_of(self, number: int, cut: Cut) -> StageCosts:
        if (number, cut) not in self._costs:
            step = self.request.step_at(number, cut.loop_parts)
            layers = make_layers(step, cut.num_layers)
            self._costs[number, cut] = StageCosts(
                step=read_originals_across(step, layers.of_op),
                layers=layers,
                cost_model=self.request.cost_model,
                seeks_peaks=False,
                relative_gap=SEARCH_GAP,
                time_limit_seconds=self._seconds,
                cost_model_for=self.request.cost_model_for,
                pins=self._pins(step),
                progress=self.request.progress,
                catalogues=self._catalogues,
            )
        return self._costs[number, cut]

    def _inflow_seconds(self, costs: StageCosts) -> NDArray[np.float64]:
        """Time to receive what each layer reads from earlier ones, over one pair of devices inside a host."""
        seconds = [0.0]
        for first in range(1, costs.layers.num_layers):
            values = boundary_values(costs.step, costs.layers, first)
            seconds.append(inflow_seconds(self.request.cost_model, values, crosses_hosts=False, num_links=1))
        return np.array(seconds)


def _has_stacks(costs: StageCosts) -> bool:
    """Whether arguments come in rows that loops read: of these a step returns one array, however its stages differ."""
    return any(part.rows is not None for part in costs.step.input_parts)


def _samples(numbers: Sequence[int], batch_size: int, num_devices: int) -> list[int]:
    """Where to survey: near two samples per device and near one for 32 devices, between which the best mostly lie."""
    chosen: dict[int, None] = {}
    for size in (2.0 * num_devices, max(1.0, num_devices / 32)):
        left = [n for n in numbers if n not in chosen]
        if left:
            chosen[min(left, key=lambda n: abs(math.log(batch_size / n / size)))] = None
    return list(chosen)


def _placed(request: PlanRequest, search: StageSearch, found: StageChoice) -> list[PlacedStage]:
    cluster = request.cluster
    kinds = [search.space.kinds[stage.submesh] for stage in found.stages]
    submeshes = place_in_groups(kinds, hosts_of_groups(cluster), cluster.devices_per_host)
    return [
        PlacedStage(
            first=stage.first_layer,
            last=stage.last_layer,
            submesh=submesh,
            mesh=search.mesh(stage.submesh, stage.configuration),
            solution=search.solution(stage.first_layer, stage.last_layer, stage.submesh, stage.configuration),
        )
        for stage, submesh in zip(found.stages, submeshes, strict=True)
    ]
