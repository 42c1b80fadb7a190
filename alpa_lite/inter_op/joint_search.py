"""The joint search: micro-batches, stages, submeshes, logical meshes and shardings together.

    numbers    of micro-batches: all that divide the batch                                       `microbatch_counts`
    survey     a few layers, solved at a few of these numbers: what all layers would take        `inter_op.survey`
    guess      the time of the best stages at each number, as far as the survey tells            `JointSearch._guess_at`
    order      the number that is likely the best, then those around it while they are better;
               one micro-batch in any case                                                       `microbatch_counts`
    search     of one number: guesses become costs where the best stages depend on them          `inter_op.stage_search`

With one micro-batch a pipeline has nothing to overlap, but it may send less than one stage does, between hosts above
all: so stages are searched at every number.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from alpa_lite.errors import (
    AlpaLiteError,
    BatchError,
    InfeasibleError,
    NonAdditiveError,
    PlanError,
    TraceError,
    without_frames,
)
from alpa_lite.inter_op.assembly import StagedStep, assembled, bytes_over, too_large
from alpa_lite.inter_op.boundaries import inflows, slower_inflows
from alpa_lite.inter_op.microbatch_counts import (
    MAX_IN_VAIN,
    MAX_SEARCHED,
    NEAR,
    Guess,
    Searched,
    numbers_left,
    numbers_to_search,
    surveyed_numbers,
)
from alpa_lite.inter_op.plan_request import PlanRequest
from alpa_lite.inter_op.refine import Found, agreeing, made_to_fit, refined, rescheduled, with_less_memory
from alpa_lite.inter_op.shared_devices import MAX_ROUNDS
from alpa_lite.inter_op.space import Space, StageEquality, hosts_of_groups
from alpa_lite.inter_op.stage_cost_cache import StageCostCache
from alpa_lite.inter_op.stage_costs import PlacedStage, StageCosts, StagePlace
from alpa_lite.inter_op.stage_dp import StageChoice
from alpa_lite.inter_op.stage_search import PipelinedBatch, PolicyCosts, StageGuesses, StageLimits, StageSearch
from alpa_lite.inter_op.survey import Beyond, Profile, Survey
from alpa_lite.inter_op.what_would_fit import tightest_stage
from alpa_lite.intra_op.solve import RELATIVE_GAP
from alpa_lite.plan.plan import Plan
from alpa_lite.program.phases import weight_gradient_ops
from alpa_lite.schedule import Schedule
from alpa_lite.sharding.meshes import place_in_groups
from alpa_lite.step.layers import Cut, op_flops
from alpa_lite.step.recomputation import Remat

CLOSE = 0.02
"""Relative excess by the stage DP up to which the stages of a number may be faster under their best schedule."""

SEARCH_GAP = 0.05
SEARCH_SECONDS = 3.0
"""Relative gap and time limit of a stage during the search, while others may still turn out to be better."""

PATIENT_SECONDS = 60.0
"""Time limit of a stage if `SEARCH_SECONDS` gave no plan."""


@dataclass(kw_only=True)
class JointSearch:
    """The search for the plans of a request.

    Attributes:
        schedules: schedules of pipelines. Stages are searched for the first, which needs the least memory, and for the
            second where transfers take long; then all of them are tried.
        space: submeshes and logical meshes; the search narrows it down.
        name: name of the plans.
        steps: stage costs of the step.
        policies: policies of rematerialisation that layers may follow.
        num_stages: number of stages; None for the best number.
        equal: the quantities that stages have equally much of.
        at_most: the seconds of a step from which on plans are of no use.
        problems: errors of numbers of micro-batches that cannot be planned; filled by the search.
        too_large: numbers of micro-batches at which these do not fit into memory; filled by the search.
    """

    request: PlanRequest
    schedules: Sequence[Schedule]
    space: Space
    name: str
    steps: StageCostCache
    policies: Sequence[Remat] = (Remat.NONE,)
    num_stages: int | None = None
    equal: Collection[StageEquality] = ()
    at_most: float = math.inf
    problems: list[AlpaLiteError] = field(default_factory=list[AlpaLiteError])
    too_large: set[int] = field(default_factory=set[int])
    _profiles: dict[Remat, Profile] = field(default_factory=dict[Remat, Profile])
    _excess: dict[int, NDArray[np.float64]] = field(default_factory=dict[int, NDArray[np.float64]])

    def plans(self) -> Iterator[Plan]:
        """Yield the best plan of each number of micro-batches, the most promising number first; finally the best one
        refined."""
        found = list[Found]()
        with (progress := self.request.progress).during("layers", "layers"):
            survey, guesses = self._surveyed()
        progress.expect("refine", 1)
        fitting = {number: guess for number, guess in guesses.items() if guess.at_best < math.inf}
        # The largest numbers need the least memory: if nothing is found, they are tried again with more time.
        hopeful = {number: fitting[number] for number in sorted(fitting)[-MAX_SEARCHED:]}
        for seconds, numbers in ((SEARCH_SECONDS, fitting), (PATIENT_SECONDS, hopeful)):
            # Without a plan that is fast enough more time would find none.
            if not found and (seconds == SEARCH_SECONDS or self.at_most == math.inf):
                self.steps.let_take(seconds)
                for better in self._found(survey, numbers):
                    progress.expect("refine", len(better.stages))
                    if (plan := self._plan(better)) is not None:
                        found.append(better)
                        yield plan
        progress.expect("stages", 0)
        if found:
            with progress.during("refine", "refine"):
                # Interleaving changes schedule and number of stages, which the user may have fixed.
                dealt_out = len(self.schedules) > 1 and self.num_stages is None
                best = self._plan(refined(self.request, found, self.steps, self.schedules, dealt_out=dealt_out))
            if best is not None:
                yield best
        elif not fitting:
            number = max(guesses)
            # Nothing fits: either no stages of this kind exist at all, or memory is short.
            impossible = self._search_for(self.schedules[0], number, survey, "more shared").why_impossible()
            self.problems.append(PlanError(impossible) if impossible else InfeasibleError(self._infeasible(number)))

    def _found(self, survey: Survey, guesses: Mapping[int, Guess]) -> Iterator[Found]:
        """Yield the best stages of numbers of micro-batches, as long as the guesses at further ones are better."""
        searched: Searched = Searched(at_most=self.at_most)
        known: dict[int, Guess] = dict(guesses)
        open_, at_most, solved_at = set(guesses), self.at_most, self._batch / survey.first_size

        def guess(number: int) -> Guess:
            if number not in known:
                known[number] = self._guess_at(number, survey)
            return known[number]

        while ways := numbers_left(open_, guess, searched, solved_at):
            # A later number takes half the work, as some stages are known.
            further = min(max(0, MAX_IN_VAIN - searched.in_vain), len(ways)) / 2
            number = ways[0]
            open_.remove(number)
            try:
                with self.request.progress.during("stages", f"stages at {number} micro-batches"):
                    better = self._best_at(number, survey, at_most * (1 + CLOSE), further)
            except (PlanError, NonAdditiveError, BatchError, TraceError) as error:
                self.problems.append(without_frames(error))
                if isinstance(error, InfeasibleError):
                    self.too_large.add(number)
                continue
            searched = replace(searched, numbers={*searched.numbers, number})
            # What was learned holds for larger micro-batches too (`_of_layers`): the guesses at these are outdated.
            known = {n: other for n, other in known.items() if n > number}
            if better is not None and better.trusted_seconds < at_most:
                at_most = better.trusted_seconds
                searched = replace(searched, best=number, at_most=at_most * (1 - RELATIVE_GAP), in_vain=0)
            elif searched.best is not None:
                searched = replace(searched, in_vain=searched.in_vain + 1)
            if better is not None:
                yield better

    def _plan(self, found: Found) -> Plan | None:
        """Return the plan of some stages, solved with less memory where their program needs more than there is.

        The search sees stages one by one, without the arrays that are on the way between them. None if no stages fit.
        """
        costs = found.costs
        try:
            plan = self._assembled(found)
            for _ in range(MAX_ROUNDS):
                if not (over := bytes_over(plan)):
                    return costs.recomputed.recorded_in(plan)
                found = with_less_memory(found, over)
                plan = self._assembled(found)
            raise too_large(plan)
        except InfeasibleError as error:
            self.problems.append(without_frames(error))
            self.too_large.add(costs.step.num_microbatches)
            return None

    def _assembled(self, found: Found) -> Plan:
        costs = found.costs
        staged = StagedStep(step=costs.step, layers=costs.layers, stages=found.stages, schedule=found.schedule)
        return assembled(self.name, self.request, staged, time.perf_counter())

    # ----------------------------------------------------------------------------------------------- the order

    def _surveyed(self) -> tuple[Survey, dict[int, Guess]]:
        """Return a survey, and its guess of the seconds of a step at each number of micro-batches."""
        numbers = numbers_to_search(self.request)
        # A whole batch says little about micro-batches: it is surveyed where there is no other number.
        several = [n for n in numbers if n > 1] or numbers
        samples = surveyed_numbers(
            several,
            self._batch,
            self.space.cluster.devices_per_host,
            lambda samples: int(self.space.divides(samples).sum()),
        )
        costs: list[StageCosts] = []
        for number in samples:
            try:
                costs.append(self.steps.of(number, self.steps.natural))
            except (NonAdditiveError, BatchError, TraceError) as error:
                if self.request.num_microbatches != "auto":
                    raise
                self.problems.append(without_frames(error))
                alone = isinstance(error, NonAdditiveError)  # it would fail at any other number too
                numbers = tuple(n for n in numbers if n == 1 or not (alone or n == number))
            # Workers survey the first step while the next one is traced.
            if len(costs) == 1:
                profile, worthwhile = self._measured(costs[0])
                space = self.space.where(np.logical_or.reduce(worthwhile, axis=(0, 1)))
                Survey(space, profile, costs[0].structure_of_layers()).expect(costs[0], later=True)
        if not costs:
            costs, numbers = [self.steps.of(1, self.steps.natural)], (1,)
        survey = self._begun(costs[0], numbers)
        for count, each in enumerate(costs, start=1):
            with self.request.progress.during("survey", f"survey at {each.step.num_microbatches} micro-batches"):
                survey.add(each, further=len(costs) - count)
        guesses = {n: self._guess_at(n, survey) for n in numbers}
        if self._looks_further(survey, guesses):
            guesses = {n: self._guess_at(n, survey) for n in numbers}
        return survey, guesses

    def _looks_further(self, survey: Survey, guesses: Mapping[int, Guess]) -> bool:
        """Survey larger micro-batches if they may be better than any likely plan; return True if any were surveyed.

        The largest of these are surveyed, on the submeshes of their stages; sizes in between are interpolated.
        """
        fitting = {n: guess for n, guess in guesses.items() if guess.at_best < math.inf}
        known = [guess.likely for guess in fitting.values() if guess.likely < math.inf]
        at_most = (1 - NEAR) * min(known or [guess.at_best for guess in fitting.values()], default=0.0)
        for number in sorted(fitting):
            size = self._batch / number
            stages = self._search_for(self.schedules[0], number, survey, "all shared").best_known()
            kinds = {stage.submesh for stage in stages.stages if not survey.reaches(stage.submesh, size)}
            if kinds and stages.seconds < at_most:
                looking = self.request.progress.during("survey", f"survey at {number} micro-batches")
                with suppress(NonAdditiveError, BatchError, TraceError), looking:
                    survey.add(self.steps.of(number, self.steps.natural), kinds=kinds)
                return True
        return False

    def _begun(self, costs: StageCosts, numbers: Sequence[int]) -> Survey:
        """Return an empty survey of the submeshes on which stages make sense and fit at any number of micro-batches."""
        profile, worthwhile = self._measured(costs)
        self._profiles = self._profiled(costs.step.num_microbatches, numbers, worthwhile, profile)
        profiles = self._profiles.values()
        fits = [each.holds(self.space, self._batch / n, n, [1]) > 0 for n in numbers for each in profiles]
        kept = (worthwhile & np.logical_or.reduce(fits)).any(axis=(0, 1))
        if kept.any():
            self.space = self.space.where(kept)
        return Survey(self.space, profile, costs.structure_of_layers())

    def _measured(self, costs: StageCosts) -> tuple[Profile, NDArray[np.bool_]]:
        """Return the profile of the layers, and [layers, layers, kinds]: the stages that make sense."""
        # Equal stages lie on equal submeshes.
        if self._all_equal(costs):
            self.space = self.space.equal_parts()
        profile = Profile.of(costs)
        return profile, self.space.worthwhile(profile.shares)

    def _profiled(
        self, number: int, numbers: Sequence[int], worthwhile: NDArray[np.bool_], written: Profile
    ) -> dict[Remat, Profile]:
        """Return the policies that are worth searching, each with the profile of layers under it.

        `written`: the profile without a policy. If all worthwhile stages fit so, no other policy is of use.
        """
        if self.policies == (Remat.NONE,):
            return {Remat.NONE: written}
        if Remat.NONE in self.policies and all(self._fits(written, n, worthwhile) for n in numbers):
            return {Remat.NONE: written}
        cut, found = self.steps.natural, {Remat.NONE: written} if Remat.NONE in self.policies else {}
        for policy in sorted(self.policies, key=[*reversed(Remat)].index):
            # The policies come with the one first that keeps least. If even that one is no better than the layers as
            # written, those that keep more are no better either.
            own = found.get(policy) or Profile.of(self.steps.of(number, cut, policy))
            if not any(other.beats(own) for other in found.values()):
                found[policy] = own
            elif policy is Remat.FULL:
                break
        return found

    def _fits(self, profile: Profile, number: int, worthwhile: NDArray[np.bool_]) -> bool:
        """Return True if all worthwhile stages have memory for the most micro-batches in flight."""
        held = self._held(number, self.schedules[0])
        return bool((profile.holds(self.space, self._batch / number, number, held)[worthwhile] == len(held)).all())

    @property
    def _batch(self) -> int:
        return self.request.batch_size or 1

    def _guess_at(self, number: int, survey: Survey) -> Guess:
        """Return the guessed seconds of a step with the best stages, by a survey."""
        at_best = likely = self._searches_at(number, survey)
        if not all(survey.reaches(kind, self._batch / number) for kind in range(len(self.space.kinds))):
            likely = self._searches_at(number, survey, "as before")
        return Guess(
            at_best=min(search.best_known().seconds for search in at_best),
            likely=min(search.best_likely().seconds for search in likely),
        )

    def _searches_at(self, number: int, survey: Survey, beyond: Beyond = "more shared") -> list[StageSearch]:
        """Return the stage searches at a number of micro-batches, by the guesses of a survey.

        The search for the schedule with the least memory comes last.
        """
        first = self._search_for(self.schedules[0], number, survey, beyond)
        found = [first]
        # On mixed clusters both kinds of stages are searched: equal ones move no rows.
        if self.steps.known.has_rows and not first.all_equal:
            found.insert(0, self._search_for(self.schedules[0], number, survey, beyond, all_equal=True))
        seconds = first.best_known().seconds
        if math.isinf(seconds):
            return found
        # Other schedules hide transfers or wait less, at the cost of memory: they are searched where that may be worth
        # it.
        waits = 2 * float(first.inflow_seconds.max()) * (number + first.num_layers)
        deepest = min(first.num_layers, max(self.space.devices))
        for schedule in self._other_schedules:
            hidden = waits if schedule.overlaps_transfers else 0.0
            hidden += (1 - schedule.waiting_share(self._postponed)) * seconds * (deepest - 1) / (number + deepest - 1)
            if hidden > CLOSE * seconds:
                other = self._search_for(schedule, number, survey, beyond)
                if other.best_known().seconds < (1 - CLOSE) * seconds:
                    found.insert(0, other)
        return found

    def _search_for(
        self, schedule: Schedule, number: int, survey: Survey, beyond: Beyond, *, all_equal: bool = False
    ) -> StageSearch:
        """Return the stage search for a schedule; `all_equal`: for equal stages alone, even if others are searched."""
        known, natural = self.steps.known, self.steps.natural
        size, held, profiles = self._batch / number, self._held(number, schedule), self._profiles.values()
        guesses = StageGuesses(
            layer_seconds=self._of_layers(survey, number, beyond),
            # What crosses a boundary is proportional to the samples of a micro-batch.
            inflow_seconds=self._inflows[0] * known.step.num_microbatches / number,
            slower_seconds=self._inflows[1] * known.step.num_microbatches / number,
            following=np.stack([profile.holds(self.space, size, number, held) - 1 for profile in profiles]),
            roomy=np.stack([survey.holds(size, number, held, profile) - 1 for profile in profiles]),
            worthwhile=self.space.worthwhile(survey.profile.shares),
        )
        limits = StageLimits(
            num_stages=self.num_stages,
            all_equal=all_equal or self._all_equal(known),
            equal=self.equal,
        )
        costs = PolicyCosts(
            any_number=known,
            policies=tuple(self._profiles),
            under=lambda policy, count: self.steps.of(number, Cut.into(count) if count else natural, policy),
        )
        batch = PipelinedBatch(schedule, number, self._postponed)
        return StageSearch(costs, batch, self.space, guesses, limits)

    def _all_equal(self, costs: StageCosts) -> bool:
        """Return True if equal stages alone are searched, so that no rows move between steps.

        Not where hosts differ: equal stages would wait for the slowest.
        """
        return costs.has_rows and not self.space.cluster.groups

    def _of_layers(self, survey: Survey, number: int, beyond: Beyond) -> NDArray[np.float64]:
        """Return [policies, layers, kinds, shapes]: guessed seconds of each layer, by a survey."""
        size, profiles = self._batch / number, self._profiles.values()
        of_policies = [survey.guess(size, number, profile, beyond=beyond) for profile in profiles]
        # Stages that took longer than guessed for lack of memory do so with larger micro-batches too.
        guess = np.stack(of_policies)
        for excess in [known for searched, known in self._excess.items() if searched >= number]:
            guess = np.maximum(guess, np.stack(of_policies) * excess[:, None])
        return guess

    def _held(self, number: int, schedule: Schedule) -> list[int]:
        """Return the micro-batches in flight on a stage that is followed by none, by one, and so on."""
        batch = PipelinedBatch(schedule, number)
        return [batch.in_flight(following) for following in range(self.steps.known.layers.num_layers)]

    @cached_property
    def _other_schedules(self) -> Sequence[Schedule]:
        """The schedules whose best stages may be others than those of the first, by what the DP sees of them."""
        alike: dict[tuple[bool, float], Schedule] = {}
        for schedule in self.schedules:
            alike.setdefault((schedule.overlaps_transfers, schedule.waiting_share(self._postponed)), schedule)
        return [*alike.values()][1:]

    @cached_property
    def _postponed(self) -> float:
        """The share of the work of a micro-batch that no other stage waits for, by its FLOPs."""
        step = self.steps.known.step
        flops = op_flops(step)
        loop = [op for op, phase in enumerate(step.phases) if phase.in_loop]
        whole = sum(flops[op] for op in loop)
        return sum(flops[op] for op in weight_gradient_ops(step, loop)) / whole if whole else 0.0

    @cached_property
    def _inflows(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        known, model = self.steps.known, self.request.cost_model
        of = (model, known.step, known.layers, self.space)
        return inflows(*of), slower_inflows(*of)

    # ------------------------------------------------------------------------------------------------ one number

    def _best_at(self, number: int, survey: Survey, at_most: float, further: float) -> Found | None:
        """Return the best stages for a number of micro-batches by the stage DP; None if they take at least `at_most` s.

        `further`: how many searches of this size are still to follow. Raises `InfeasibleError` if nothing fits.
        """
        best, fits, refused = None, False, None
        for search in self._searches_at(number, survey):
            choice = search.run(at_most, further=further)
            # Guesses for other numbers are corrected by what this search has learned (`_of_layers`).
            self._excess[number] = search.excess()
            fits |= bool(choice.stages) and choice.seconds >= at_most
            while choice.stages and choice.seconds < at_most:
                try:
                    found = self._priced(search, choice)
                except InfeasibleError as error:
                    # A schedule may hold more than the DP counts: stages searched for another one may fit.
                    refused = error
                    break
                fits = True
                best = found if best is None or found.seconds < best.seconds else best
                at_most = min(at_most, found.trusted_seconds)
                # The DP spreads the update over the micro-batches. If a long one comes after the others, stages with a
                # shorter update may be faster.
                if not found.may_wait_for(search.longest_update(choice)):
                    break
                search.refuse_updates_like(choice)
                choice = search.run(at_most, further=further)
        if not fits:
            raise refused or InfeasibleError(self._infeasible(number))
        return best

    def _priced(self, search: StageSearch, choice: StageChoice) -> Found:
        """Return the stages of a choice under the fastest schedule that their memory allows."""
        # The DP knows stages by kinds of submesh only; here they get devices of their own.
        costs, stages = self._placed(search, choice)
        schedule = search.batch.schedule
        stages = made_to_fit(costs, stages, schedule)
        ways = [stages, *agreeing(costs, stages, schedule)] if search.all_equal else [stages]
        priced = (Found.of(self.request, costs, way, schedule) for way in ways)
        best = rescheduled(self.request, min(priced, key=lambda way: way.seconds), self.schedules)
        return replace(best, sum_seconds=choice.seconds)

    def _placed(self, search: StageSearch, found: StageChoice) -> tuple[StageCosts, list[PlacedStage]]:
        """Return the stages of a choice on their devices, and the costs of the step with their policies."""
        cluster, cut = self.request.cluster, Cut.into(len(found.stages)) if search.all_equal else self.steps.natural
        kinds = [search.space.kinds[stage.submesh] for stage in found.stages]
        submeshes = place_in_groups(kinds, hosts_of_groups(cluster), cluster.devices_per_host)
        ranges = [(i, i) if search.all_equal else (s.first_layer, s.last_layer) for i, s in enumerate(found.stages)]
        configurations = [search.configurations[stage.configuration] for stage in found.stages]
        of_layers = [
            configuration.policy
            for configuration, (first, last) in zip(configurations, ranges, strict=True)
            for _ in range(first, last + 1)
        ]
        costs, parts = self.steps.mixed(search.batch.num_microbatches, cut, of_layers)
        stages: list[PlacedStage] = []
        for number, ((start, end), submesh) in enumerate(zip(ranges, submeshes, strict=True)):
            mesh = search.space.mesh(found.stages[number].submesh, configurations[number].shape)
            # Under policies of recomputation each layer of the search consists of several.
            first, last = start * parts, (end + 1) * parts - 1
            place = StagePlace(first, last, submesh, mesh)
            stages.append(place.with_solution(costs.solution(place, in_flight=configurations[number].in_flight)))
        return costs, stages

    def _infeasible(self, number: int) -> str:
        """Return a sentence that says why nothing fits; in detail only once, since that takes time."""
        if any(isinstance(problem, InfeasibleError) for problem in self.problems):
            return f"No plan fits into memory at num_microbatches={number}."
        return tightest_stage(self.steps, self.space, number, self._profiles.values())
