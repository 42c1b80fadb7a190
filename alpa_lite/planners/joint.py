"""The joint search: micro-batches, stages, submeshes, logical meshes and shardings together.

    numbers    of micro-batches that divide the batch, each well above the one before            `numbers`
    survey     a few layers, solved at a few of these numbers: what all layers would take        `inter_op.survey`
    order      the numbers by the time of the best stages as far as the survey tells             `JointSearch._ordered`
    search     of one number: guesses become costs where the best stages depend on them          `inter_op.stage_search`
    stop       when the next number is not even guessed to be faster than what was found         `JointSearch._found`

With one micro-batch a pipeline has nothing to overlap: then the step is one stage. (Virtual devices of one processor
do not overlap anyway.)
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alpa_lite.errors import AlpaLiteError, BatchError, InfeasibleError, NonAdditiveError, PlanError, TraceError
from alpa_lite.inter_op.profile import Profile
from alpa_lite.inter_op.space import Space, hosts_of_groups
from alpa_lite.inter_op.stage_costs import StageCosts
from alpa_lite.inter_op.stage_dp import StageChoice, StageTable, solve
from alpa_lite.inter_op.stage_search import Equal, StageSearch, guessed_stages, overhead_seconds
from alpa_lite.inter_op.survey import Survey
from alpa_lite.intra_op.solve import RELATIVE_GAP
from alpa_lite.layers import Cut
from alpa_lite.mesh import place_in_groups
from alpa_lite.plan import Plan
from alpa_lite.planners.agreement import agreeing
from alpa_lite.planners.numbers import microbatch_numbers, surveyed_numbers
from alpa_lite.planners.planner import (
    PlacedStage,
    PlanRequest,
    assemble,
    boundary_values,
    inflow_seconds,
    stacks_seconds,
)
from alpa_lite.planners.refine import Found, interleaved, polished, rescheduled
from alpa_lite.planners.relax import tightest_stage
from alpa_lite.planners.steps import Steps
from alpa_lite.rematerialise import Remat
from alpa_lite.schedule import Interleaved1F1B, Schedule

MAX_SEARCHED, MAX_IN_VAIN = 5, 2
"""For how many numbers of micro-batches the stages are searched, at most, and after the best was found."""

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

SAVES = 1.3
"""A policy of rematerialisation that keeps this many times as much as a faster one is not worth it."""

ONE_LAYER = Cut.into(1)


@dataclass(kw_only=True)
class JointSearch:
    """Searches the plans of a request; what cannot be planned is noted in `problems`."""

    request: PlanRequest
    schedule: Schedule
    schedules: Sequence[Schedule] = ()
    space: Space
    name: str
    steps: Steps
    policies: Sequence[Remat] = (Remat.NONE,)
    num_stages: int | None = None
    equal: Collection[Equal] = ()
    problems: list[AlpaLiteError] = field(default_factory=list[AlpaLiteError])
    _profiles: dict[Remat, Profile] = field(default_factory=dict[Remat, Profile])
    _inflow: dict[tuple[int, int], NDArray[np.float64]] = field(default_factory=dict[tuple[int, int], Any])
    _excess: dict[int, NDArray[np.float64]] = field(default_factory=dict[int, NDArray[np.float64]])

    def plans(self) -> Iterator[Plan]:
        """The best plan of one number of micro-batches after the other, the most promising number first; at last the
        best of them, refined."""
        found = list[Found]()
        with (progress := self.request.progress).during("layers", "layers"):
            survey, ordered = self._ordered()
        progress.expect("refine", 1)
        fitting = [(number, guessed) for number, guessed in ordered if guessed < math.inf]
        # The largest numbers need the least memory: of those of which nothing was found they are tried with patience.
        hopeful = sorted(fitting, reverse=True)[:MAX_SEARCHED]
        for seconds, numbers in ((SEARCH_SECONDS, fitting), (PATIENT_SECONDS, hopeful)):
            if not found:
                self.steps.let_take(seconds)
                for better in self._found(survey, numbers):
                    found.append(better)
                    progress.expect("refine", len(better.stages))
                    yield self._plan(better)
        progress.expect("stages", 0)
        if found:
            with progress.during("refine", "refine"):
                refined = self._refined(min(found, key=lambda each: each.seconds))
            yield self._plan(refined)
        elif not fitting:
            self.problems.append(InfeasibleError(self._infeasible(max(number for number, _ in ordered))))

    def _found(self, survey: Survey, numbers: Sequence[tuple[int, float]]) -> Iterator[Found]:
        """The best stages of numbers of micro-batches in turn, while the guesses at them are better than these."""
        count, in_vain, at_most, open_ = 0, 0, math.inf, dict(numbers)
        while open_ and count < MAX_SEARCHED and in_vain < MAX_IN_VAIN:
            number = min(open_, key=open_.__getitem__)
            if open_.pop(number) >= at_most * (1 - RELATIVE_GAP):
                return
            alike = sum(guessed < at_most for guessed in open_.values())
            further = min(MAX_IN_VAIN - in_vain, alike) / 2  # much is known then
            try:
                with self.request.progress.during("stages", f"stages at {number} micro-batches"):
                    better = self._best_at(number, survey, at_most * (1 + CLOSE), further)
            except (PlanError, NonAdditiveError, BatchError, TraceError) as error:
                self.problems.append(error)
                continue
            open_ = {n: self._guessed(survey, n) for n in open_}
            improves = better is not None and better.sum_seconds < at_most
            count, in_vain = count + 1, 0 if improves else in_vain + (at_most < math.inf)
            if better is not None:
                at_most = min(at_most, better.sum_seconds)
                yield better

    def _plan(self, found: Found) -> Plan:
        costs = found.costs
        plan = assemble(
            self.name, self.request, costs.step, costs.layers, found.stages, found.schedule, time.perf_counter()
        )
        return replace(plan, remat=costs.remat, traced_layers=costs.traced_layers) if costs.remat else plan

    def _refined(self, found: Found) -> Found:
        """What was found, solved closer to the best, and in chunks if that is faster."""
        best = self._scheduled(polished(self.request, found))
        count = len(best.stages) * CHUNKS
        chunks = self.schedules and self.num_stages is None and len(best.stages) > 1
        if chunks and best.prediction.bubble_fraction > BUBBLE:
            with suppress(PlanError):  # too few ops for so many layers
                cut, number = Cut.into(count), best.costs.step.num_microbatches
                costs, per_chunk = self.steps.mixed(number, cut, best.policies * CHUNKS)
                ways = interleaved(self.request, best, costs, per_chunk, Interleaved1F1B(num_chunks=CHUNKS))
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
        samples = surveyed_numbers(
            [n for n in numbers if self._overlaps(n)], self._batch, self.space.cluster.num_devices
        )
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
        for count, each in enumerate(costs, start=1):
            with self.request.progress.during("survey", f"survey at {each.step.num_microbatches} micro-batches"):
                survey.add(each, further=len(costs) - count)
        guessed = [(number, self._guessed(survey, number)) for number in numbers]
        return survey, sorted(guessed, key=lambda pair: pair[1])

    def _begun(self, costs: StageCosts, numbers: Sequence[int]) -> Survey:
        """A survey of the submeshes that are worth it at some number of micro-batches."""
        profile = Profile.of(costs)
        if _has_stacks(costs):
            self.space = self.space.equal_parts()
        worthwhile = self.space.worthwhile(profile.shares)
        self._profiles = self._profiled(costs.step.num_microbatches, numbers, worthwhile, profile)
        profiles = self._profiles.values()
        fits = [each.holds(self.space, self._batch / n, [1]) > 0 for n in numbers for each in profiles]
        kept = (worthwhile & np.logical_or.reduce(fits)).any(axis=(0, 1))
        if kept.any():
            self.space = self.space.where(kept)
        return Survey(self.space, profile, costs.structure_of_layers())

    def _profiled(
        self, number: int, numbers: Sequence[int], worthwhile: NDArray[np.bool_], written: Profile
    ) -> dict[Remat, Profile]:
        """The policies that layers may follow, with what layers take then; none that is not worth it.

        `written`: without a policy. If all that is worthwhile fits so, whatever else may be asked for has no use.
        """
        if self.policies == (Remat.NONE,):
            return {Remat.NONE: written}
        if Remat.NONE in self.policies and all(self._fits(written, n, worthwhile) for n in numbers):
            return {Remat.NONE: written}
        cut, found = self._cut_at(number), {Remat.NONE: written} if Remat.NONE in self.policies else {}
        for policy in sorted(self.policies, key=[*reversed(Remat)].index):
            # What keeps more than the one that keeps least has no use if that keeps no less than what is written.
            own = found.get(policy) or Profile.of(self.steps.of(number, cut, policy))
            if not any(_is_better(other, own) for other in found.values()):
                found[policy] = own
            elif policy is Remat.FULL:
                break
        return found

    def _fits(self, profile: Profile, number: int, worthwhile: NDArray[np.bool_]) -> bool:
        """Whether stages have memory for as many micro-batches in flight as there can be."""
        held = self._held(number)
        return bool((profile.holds(self.space, self._batch / number, held)[worthwhile] == len(held)).all())

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
        costs, cluster = self.steps.known, self.space.cluster
        inflow = self._inflow_seconds(costs) * costs.step.num_microbatches / number
        seconds, following = guessed_stages(
            self._guess(survey, number, costs.layers.num_layers),
            self._following(survey, number),
            overhead_seconds(cluster, inflow, number),
            self.space.worthwhile(survey.profile.shares),
        )
        table = StageTable(
            seconds=seconds,
            max_following_stages=following,
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
        """[policies, layers, kinds, shapes]: seconds of each layer by a survey."""
        of_policies = [survey.guess(self._batch / number, number, profile) for profile in self._profiles.values()]
        # Larger micro-batches need more memory: what was found to take longer than guessed does so with these too.
        guess = np.stack(of_policies)
        for excess in [known for searched, known in self._excess.items() if searched >= number]:
            guess = np.maximum(guess, np.stack(of_policies) * excess[:, None])
        return guess if guess.shape[1] == num_layers else guess.sum(axis=1, keepdims=True)

    def _following(self, survey: Survey, number: int) -> NDArray[np.int64]:
        """[policies, layers, layers, kinds]: how many stages may follow one given its memory; -1 for none."""
        size, held = self._batch / number, self._held(number)
        return np.stack([profile.holds(self.space, size, held) - 1 for profile in self._profiles.values()])

    def _held(self, number: int) -> list[int]:
        """Micro-batches in flight on a stage that is followed by none, by one, and so on."""
        return [self.schedule.in_flight(0, n + 1, number) for n in range(self.steps.known.layers.num_layers)]

    # ------------------------------------------------------------------------------------------------ one number

    def _best_at(self, number: int, survey: Survey, at_most: float, further: float) -> Found | None:
        """The best stages with a number of micro-batches, by the stage DP; None if they take `at_most` seconds or more.

        `further`: how much of such work is to follow. Raises `InfeasibleError` when nothing fits.
        """
        known = self.steps.known
        stacked = _has_stacks(known)
        cut = self._cut_at(number)
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
            following if following.shape[1] == costs.layers.num_layers else following[:, :1, -1:],
            self.space.worthwhile(survey.profile.shares if costs.layers.num_layers > 1 else np.ones(1)),
            num_stages=self.num_stages,
            under=lambda policy, count: self.steps.of(number, Cut.into(count) if count else cut, policy),
            policies=tuple(self._profiles),
            equal_stages=stacked,
            equal=self.equal,
        )
        found = search.run(at_most, further=further)
        self._excess[number] = search.excess()
        if found.stages and found.seconds >= at_most:
            return None
        if not found.stages:
            raise InfeasibleError(self._infeasible(number))
        costs, stages = self._placed(search, found, Cut.into(len(found.stages)) if stacked else cut)
        ways = [stages, *self._agreeing(costs, stages)] if stacked else [stages]
        priced = (Found.of(self.request, costs, way, self.schedule) for way in ways)
        best = self._scheduled(min(priced, key=lambda way: way.seconds))
        return replace(best, sum_seconds=found.seconds)

    def _placed(self, search: StageSearch, found: StageChoice, cut: Cut) -> tuple[StageCosts, list[PlacedStage]]:
        """The stages on their devices, with the step in which each follows its policy and its costs.

        `cut`: the layers of `found`, or as many as there are stages.
        """
        cluster = self.request.cluster
        kinds = [search.space.kinds[stage.submesh] for stage in found.stages]
        submeshes = place_in_groups(kinds, hosts_of_groups(cluster), cluster.devices_per_host)
        ranges = [(i, i) if search.all_equal else (s.first_layer, s.last_layer) for i, s in enumerate(found.stages)]
        policies = [search.policy(stage.configuration) for stage in found.stages]
        of_layers = [policies[i] for i, (first, last) in enumerate(ranges) for _ in range(first, last + 1)]
        costs, parts = self.steps.mixed(search.num_microbatches, cut, of_layers)
        stages: list[PlacedStage] = []
        for stage, (start, end), submesh in zip(found.stages, ranges, submeshes, strict=True):
            mesh, held = search.mesh(stage.submesh, stage.configuration), search.in_flight(stage.configuration)
            first, last = start * parts, (end + 1) * parts - 1
            solution = costs.solution(first, last, submesh, mesh, in_flight=held)
            stages.append(PlacedStage(first=first, last=last, submesh=submesh, mesh=mesh, solution=solution))
        return costs, stages

    def _infeasible(self, number: int) -> str:
        """Why nothing fits, as a sentence; at length once, since that takes time."""
        if any(isinstance(problem, InfeasibleError) for problem in self.problems):
            return f"No plan fits into memory at num_microbatches={number}."
        return tightest_stage(self.request, self.steps, self.space, number, self._cut_at(number))

    def _agreeing(self, costs: StageCosts, stages: Sequence[PlacedStage]) -> Iterator[list[PlacedStage]]:
        """The same stages, if they disagree on how stacked arguments lie, with the same forms on all."""
        if stacks_seconds(self.request, costs.step, costs.layers, stages):
            number = costs.step.num_microbatches
            held = [self.schedule.in_flight(i, len(stages), number) for i in range(len(stages))]
            yield from agreeing(costs, stages, held)

    def _costs_at(self, number: int) -> StageCosts:
        return self.steps.of(number, self._cut_at(number))

    def _cut_at(self, number: int) -> Cut:
        return self.steps.natural if self._overlaps(number) else ONE_LAYER

    def _inflow_seconds(self, costs: StageCosts) -> NDArray[np.float64]:
        """Time to receive what each layer reads from earlier ones, over one pair of devices inside a host."""
        key = (costs.step.num_microbatches, costs.layers.num_layers)
        if key not in self._inflow:
            seconds = [0.0]
            for first in range(1, costs.layers.num_layers):
                values = boundary_values(costs.step, costs.layers, first)
                seconds.append(inflow_seconds(self.request.cost_model, values, crosses_hosts=False, num_links=1))
            self._inflow[key] = np.array(seconds)
        return self._inflow[key]


def _has_stacks(costs: StageCosts) -> bool:
    """Whether arguments come in rows that loops read: of these a step returns one array, however its stages differ."""
    return any(part.rows is not None for part in costs.step.input_parts)


def _is_better(profile: Profile, other: Profile) -> bool:
    """Whether layers are faster and keep hardly more than others, most of them."""
    more = np.median(profile.saved_bytes / np.maximum(other.saved_bytes, 1.0))
    return bool(profile.loop_seconds.sum() < other.loop_seconds.sum() and more < SAVES)
