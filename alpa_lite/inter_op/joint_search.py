"""The joint search: micro-batches, stages, submeshes, logical meshes and shardings together.

    numbers    of micro-batches: all that divide the batch                                       `microbatch_counts`
    survey     a few layers, solved at a few of these numbers: what all layers would take        `inter_op.survey`
    guess      the time of the best stages at each number, as far as the survey tells            `surveyed_searches`
    order      the number that is likely the best, then those around it while they are better;
               one micro-batch in any case                                                       `microbatch_counts`
    search     of one number: guesses become costs where the best stages depend on them          `inter_op.stage_search`
    programs   of numbers of stages and of schedules at this number, most promising first    `inter_op.best_programs`

With one micro-batch a pipeline has nothing to overlap, but it may send less than one stage does, between hosts above
all: so stages are searched at every number.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

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
from alpa_lite.inter_op.best_programs import BestPrograms, Priced
from alpa_lite.inter_op.best_stages import PipelinedBatch
from alpa_lite.inter_op.boundaries import inflows, slower_inflows
from alpa_lite.inter_op.microbatch_counts import (
    ABOUT,
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
from alpa_lite.inter_op.refine import refined
from alpa_lite.inter_op.space import Space, StageEquality, equal_parts
from alpa_lite.inter_op.stage_cost_cache import StageCostCache
from alpa_lite.inter_op.stage_costs import StageCosts
from alpa_lite.inter_op.survey import Profile, Survey
from alpa_lite.inter_op.surveyed_searches import CLOSE, SurveyedSearches, only_equal
from alpa_lite.inter_op.what_would_fit import tightest_stage
from alpa_lite.intra_op.solve import RELATIVE_GAP
from alpa_lite.plan.plan import Plan
from alpa_lite.schedule import Schedule
from alpa_lite.step.recomputation import Remat

SEARCH_GAP = 0.05
SEARCH_SECONDS = 3.0
"""Relative gap and time limit of a stage during the search, while others may still turn out to be better."""

PATIENT_SECONDS = 60.0
"""Time limit of a stage if `SEARCH_SECONDS` gave no plan."""

MOST_CLOSE = 2
"""The most programs of refined stages that are simulated although their estimates promise no gain."""


class Unplanned(NamedTuple):
    """A number of micro-batches at which the search found no plan, and why."""

    num_microbatches: int
    error: AlpaLiteError

    @property
    def is_too_large(self) -> bool:
        """Whether micro-batches are too large for the memory of devices."""
        return isinstance(self.error, InfeasibleError)


@dataclass(frozen=True, kw_only=True)
class JointSearch:
    """The search for the plans of a request.

    Attributes:
        schedules: schedules of pipelines. Stages are searched for the first, which needs the least memory, and for the
            others that hide transfers or wait less, where these may be faster; then all of them are tried.
        space: submeshes and logical meshes that stages may take.
        name: name of the plans.
        steps: stage costs of the step.
        policies: policies of rematerialisation that layers may follow.
        num_stages: number of stages; None for the best number.
        equal: the quantities that stages have equally much of.
        at_most: the seconds of a step from which on plans are of no use.
        gap: where given, numbers of micro-batches are searched until none is left at which the work of a step alone
            (`work_floor`) is closer than this to the best plan, relative to that plan.
        numbers: the numbers of micro-batches to look at, of those that divide the batch; None for all.
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
    gap: float | None = None
    numbers: Collection[int] | None = None

    def plans(self) -> Iterator[Plan | Unplanned]:
        """Yield the best plan of each number of micro-batches, the most promising number first, or why there is none;
        finally the best one refined.
        """
        progress = self.request.progress
        with progress.during("layers", "layers"):
            searches, guesses, refused = self._surveyed()
        yield from refused
        progress.expect("refine", 1)
        fitting = {number: guess for number, guess in guesses.items() if guess.at_best < math.inf}
        # The largest numbers need the least memory: if nothing is found, they are tried again with more time.
        hopeful = {number: fitting[number] for number in sorted(fitting)[-MAX_SEARCHED:]}
        found, too_large, fastest = list[Priced](), list[int](), self.at_most
        for seconds, numbers in ((SEARCH_SECONDS, fitting), (PATIENT_SECONDS, hopeful)):
            # Without a plan that is fast enough more time would find none.
            if found or (seconds > SEARCH_SECONDS and self.at_most < math.inf):
                break
            searches = searches.taking(seconds)
            for better in self._found(searches, numbers):
                if isinstance(better, Priced):
                    progress.expect("refine", len(better.found.stages))
                    found.append(better)
                    fastest = min(fastest, better.seconds)
                    yield better.plan
                    continue
                if better.is_too_large:
                    too_large.append(better.num_microbatches)
                yield better
        progress.expect("stages", 0)
        if found:
            with progress.during("refine", "refine"):
                if (better := self._refined(searches, found, fastest)) is not None:
                    fastest = min(fastest, better.seconds)
                    yield better.plan
        elif not fitting or (too_large and self.at_most == math.inf):
            yield self._why_none(searches, (too_large or [max(guesses)])[0], fits=bool(fitting))
        if self.num_stages is None and only_equal(searches.steps.known):
            yield from self._of_other_counts(searches, guesses, fastest)

    def _refined(self, searches: SurveyedSearches, found: Sequence[Priced], fastest: float) -> Priced | None:
        """Return the fastest plan of stages that are refined; None if none of them fits."""
        programs, ways = self._programs(fastest), [each.found for each in sorted(found, key=lambda each: each.seconds)]
        more = refined(
            self.request,
            ways,
            searches.steps,
            self.schedules,
            any_schedule=self._any_schedule,
            policies=self.policies,
        )
        programs.add(more)
        programs.simulate(close=MOST_CLOSE)
        return programs.best

    def _why_none(self, searches: SurveyedSearches, number: int, *, fits: bool) -> Unplanned:
        """Return why there is no plan: either no stages of this kind exist at all, or memory is short.

        `fits`: whether stages seem to fit at some number of micro-batches.
        """
        impossible = searches.search_for(self.schedules[0], number, "more shared").why_impossible()
        if impossible and not fits:
            return Unplanned(number, PlanError(impossible))
        why = tightest_stage(searches.steps, searches.space, number, searches.profiles.values())
        return Unplanned(number, InfeasibleError(why))

    def _of_other_counts(self, searches: SurveyedSearches, numbers: Iterable[int], at_most: float) -> Iterator[Plan]:
        """Yield plans with the numbers of equal stages into which the natural layers cannot be dealt, if they take less
        than `at_most` seconds.
        """
        layering, natural = self.steps.layering, searches.steps.natural
        counts = [n for n in self.space.equal_stages if natural.num_layers % n] if layering.num_layers is None else ()
        guesses = searches.in_equal_stages(self.space, counts, numbers, at_most) if counts else {}
        # More stages than trips leave some with little to do.
        space = replace(self.space, fair=False)
        # Fewer stages first: more of them take longer to search.
        for count in counts:
            if promising := [number for number, seconds in guesses[count].items() if seconds < at_most]:
                steps = replace(self.steps, layering=replace(layering, stages=[count]))
                others = replace(self, steps=steps, space=space, num_stages=count, at_most=at_most, numbers=promising)
                # Fewer ops than stages, for one.
                with suppress(AlpaLiteError):
                    for plan in others.plans():
                        if isinstance(plan, Plan) and plan.prediction.step_seconds < at_most:
                            at_most = plan.prediction.step_seconds
                            yield plan

    def _found(self, searches: SurveyedSearches, guesses: Mapping[int, Guess]) -> Iterator[Priced | Unplanned]:
        """Yield the best plans of numbers of micro-batches, or why there is none, while guesses at further ones are
        better.
        """
        searched: Searched = Searched(at_most=self.at_most)
        known: dict[int, Guess] = self._tried(searches, guesses)
        open_, at_most, solved_at = set(guesses), self.at_most, self._batch / searches.survey.first_size
        # Where the stage DP takes the best stages to be slower than their program is, it does so with others, too.
        by_dp = self.at_most
        left_at = dict[int, float]()

        def guess(number: int) -> Guess:
            if number not in known:
                known[number] = searches.guess_at(number)
            return known[number].no_less_than(left_at.get(number, 0.0))

        while ways := numbers_left(open_, guess, searched, solved_at) or self._not_excluded(open_, at_most):
            # A later number takes half the work, as some stages are known.
            further = min(max(0, MAX_IN_VAIN - searched.in_vain), len(ways)) / 2
            number = ways[0]
            # Guesses at larger micro-batches than those that were surveyed are far off.
            if guess(number).at_best < _limit(by_dp) and searches.survey_at(number):
                known = {n: other for n, other in known.items() if n > number}
                continue
            open_.remove(number)
            others = [] if at_most < math.inf else [guess(n) for n in open_]
            limit = _limit(by_dp, guess(number), others)
            try:
                with self.request.progress.during("stages", f"stages at {number} micro-batches"):
                    better, excess, reached = self._best_at(number, searches, limit, further, at_most)
            except (PlanError, NonAdditiveError, BatchError, TraceError) as error:
                yield Unplanned(number, without_frames(error))
                continue
            # What was learned holds for larger micro-batches too: the guesses at these are outdated.
            searches = searches.having_seen(number, excess)
            if better is None and limit <= reached < _limit(by_dp):
                open_.add(number)
                left_at[number] = reached
                known = {n: other for n, other in known.items() if n > number}
                continue
            if isinstance(better, InfeasibleError):
                yield Unplanned(number, without_frames(better))
                continue
            known = {n: other for n, other in known.items() if n > number}
            if better is not None and better.seconds < at_most:
                at_most = better.seconds
                by_dp: float = max(better.seconds, better.by_dp)
                searched = searched.better_at(number, at_most * (1 - RELATIVE_GAP))
            else:
                searched = searched.no_better_at(number)
            if better is not None:
                yield better

    def _not_excluded(self, open_: Collection[int], at_most: float) -> list[int]:
        """Return the numbers whose work does not exclude a plan that is better by the gap, the least work first."""
        if self.gap is None:
            return []
        work = dict[int, float]()
        for number in open_:
            # Steps that cannot be cut so have no plan at this number.
            with suppress(PlanError, NonAdditiveError, BatchError, TraceError):
                work[number] = self.request.floor_at(number)
        better = [number for number, seconds in work.items() if seconds < (1 - self.gap) * at_most]
        return sorted(better, key=work.__getitem__)

    def _best_at(
        self, number: int, searches: SurveyedSearches, at_most: float, further: float, fastest: float
    ) -> tuple[Priced | InfeasibleError | None, NDArray[np.float64], float]:
        """Return the best stages for a number of micro-batches with their plan, what the last search learned
        (`StageSearch.excess`), and the seconds by the stage DP of the best stages that were left.

        Args:
            number: of micro-batches.
            searches: the stage searches.
            at_most: the seconds by the stage DP from which on stages are of no use; None is returned if all take more.
            further: how many searches of this size are still to follow.
            fastest: the seconds of the fastest plan at other numbers.
        """
        of_schedules, programs = searches.at(number), self._programs(fastest)
        reached = programs.search(of_schedules, searches.steps, at_most, further)
        best: Priced | InfeasibleError | None = programs.best or programs.refused
        if best is None and reached == math.inf:
            best = InfeasibleError(f"No plan fits into memory at num_microbatches={number}.")
        return best, of_schedules[-1].excess(), reached

    def _programs(self, fastest: float) -> BestPrograms:
        return BestPrograms(request=self.request, name=self.name, schedules=self.schedules, at_most=fastest)

    def _tried(self, searches: SurveyedSearches, guesses: Mapping[int, Guess]) -> dict[int, Guess]:
        """Return the guesses, where those that memory alone makes unlikely are replaced by what a rough solution takes.

        The survey knows what layers take with all the memory that they like. That a stage has less may cost next to
        nothing or too much, and then the search would begin far from the best number.
        """
        found = dict(guesses)
        least = min((guess.likely for guess in guesses.values()), default=math.inf)
        if self.at_most < math.inf or least == math.inf:
            return found
        # The fewer micro-batches, the more memory they need: once these do not fit, fewer do not either.
        for number in sorted(guesses, reverse=True):
            guess = found[number]
            if guess.at_best < (1 - NEAR) * min(least, guess.likely):
                try:
                    with self.request.progress.during("stages", f"trying {number} micro-batches"):
                        seconds = searches.tried_at(number)
                except (NonAdditiveError, BatchError, TraceError):
                    break
                if seconds == math.inf:
                    break
                found[number] = replace(guess, likely=seconds)
                least = min(least, seconds)
        return found

    # ----------------------------------------------------------------------------------------------- the order

    def _surveyed(self) -> tuple[SurveyedSearches, dict[int, Guess], list[Unplanned]]:
        """Return the searches by a survey, their guesses at each number of micro-batches, and the numbers at which the
        step cannot be surveyed.
        """
        numbers = tuple(n for n in numbers_to_search(self.request) if self.numbers is None or n in self.numbers)
        # A whole batch says little about micro-batches: it is surveyed where there is no other number.
        several = [n for n in numbers if n > 1] or numbers
        samples = surveyed_numbers(
            several,
            self._batch,
            self.space.cluster.devices_per_host,
            lambda samples: int(self.space.divides(samples).sum()),
        )
        steps, costs, refused = self.steps, list[StageCosts](), list[Unplanned]()
        for number in samples:
            # The first step that can be surveyed gives the layers of all.
            steps = steps if costs else replace(steps, usual=number)
            try:
                costs.append(steps.of(number, steps.natural))
            except (NonAdditiveError, BatchError, TraceError) as error:
                if self.request.num_microbatches != "auto":
                    raise
                refused.append(Unplanned(number, without_frames(error)))
                alone = isinstance(error, NonAdditiveError)  # it would fail at any other number too
                numbers = tuple(n for n in numbers if n == 1 or not (alone or n == number))
            # Workers survey the first step while the next one is traced.
            if len(costs) == 1:
                profile = Profile.of(costs[0])
                space = self.space.where(np.logical_or.reduce(self._worthwhile(costs[0], profile), axis=(0, 1)))
                Survey(space, profile, costs[0].structure_of_layers()).expect(costs[0], later=True)
        if not costs:
            steps, numbers = replace(steps, usual=1), (1,)
            costs = [steps.known]
        searches = self._begun(steps, numbers)
        for count, each in enumerate(costs, start=1):
            with self.request.progress.during("survey", f"survey at {each.step.num_microbatches} micro-batches"):
                searches.survey.add(each, further=len(costs) - count)
        return searches, {n: searches.guess_at(n) for n in numbers}, refused

    def _begun(self, steps: StageCostCache, numbers: Sequence[int]) -> SurveyedSearches:
        """Return searches on the submeshes on which stages make sense and fit at any number of micro-batches; nothing
        is surveyed yet.
        """
        costs = steps.known
        space, profile, model = self.space, Profile.of(costs), self.request.cost_model
        worthwhile = self._worthwhile(costs, profile)
        profiles = self._profiled(steps, numbers, profile)
        fits = [each.holds(space, self._batch / n, n, [1]) > 0 for n in numbers for each in profiles.values()]
        kept = (worthwhile & np.logical_or.reduce(fits)).any(axis=(0, 1))
        space = space.where(kept) if kept.any() else space
        return SurveyedSearches(
            steps=steps,
            space=space,
            survey=Survey(space, profile, costs.structure_of_layers()),
            profiles=profiles,
            inflows=inflows(model, costs.step, costs.layers, space),
            slower_seconds=slower_inflows(model, costs.step, costs.layers, space),
            schedules=self.schedules,
            num_stages=self.num_stages,
            equal=self.equal,
        )

    def _worthwhile(self, costs: StageCosts, profile: Profile) -> NDArray[np.bool_]:
        """Return [layers, layers, kinds]: which stages make sense, and can be equal ones where these are wanted."""
        found = self.space.worthwhile(profile.shares)
        equal = found & equal_parts(self.space, profile.num_layers, self.num_stages) if only_equal(costs) else found
        # Without equal stages there is no plan: the search then says why.
        return equal if equal.any() else found

    def _profiled(self, steps: StageCostCache, numbers: Sequence[int], written: Profile) -> dict[Remat, Profile]:
        """Return the policies that are worth searching, each with the profile of layers under it.

        `written`: the profile without a policy. If all worthwhile stages fit so, no other policy is of use.
        """
        if self.policies == (Remat.NONE,):
            return {Remat.NONE: written}
        if Remat.NONE in self.policies and all(self._fits(written, n) for n in numbers):
            return {Remat.NONE: written}
        found = {Remat.NONE: written} if Remat.NONE in self.policies else {}
        for policy in sorted(self.policies, key=[*reversed(Remat)].index):
            # The policies come with the one first that keeps least. If even that one is no better than the layers as
            # written, those that keep more are no better either.
            own = found.get(policy) or Profile.of(steps.of(steps.usual, steps.natural, policy))
            if not any(other.beats(own) for other in found.values()):
                found[policy] = own
            elif policy is Remat.FULL:
                break
        return found

    def _fits(self, profile: Profile, number: int) -> bool:
        """Return True if all worthwhile stages have memory for the most micro-batches in flight."""
        held = PipelinedBatch(self.schedules[0], number).held(profile.num_layers)
        holds = profile.holds(self.space, self._batch / number, number, held)
        # This is optimistic: devices share all bytes equally. Where equal stages alone are searched, uneven ones, which
        # need more, have to fit too, so that there is memory to spare.
        return bool((holds[self.space.worthwhile(profile.shares)] == len(held)).all())

    @property
    def _any_schedule(self) -> bool:
        """Whether plans may follow schedules that are not searched.

        Interleaving changes schedule and number of stages, which the user may have fixed.
        """
        return len(self.schedules) > 1 and self.num_stages is None

    @property
    def _batch(self) -> int:
        return self.request.batch_size or 1


def _limit(at_most: float, guess: Guess | None = None, others: Iterable[Guess] = ()) -> float:
    """Return the seconds by the stage DP at which a search ends that is to find less than `at_most` seconds.

    While nothing is found, a number of micro-batches of this guess is left for others that are clearly better by then.
    """
    if guess is None or guess.likely == math.inf:
        others = ()
    return min([at_most * (1 + CLOSE), *((1 + ABOUT) * other.likely for other in others)])
