"""The classic manual plans that `Auto` prices too, with numbers of micro-batches as a user would tune them.

    the best plan has one micro-batch     each planner decides on the number
    the best plan has m micro-batches     m for pipelines, and fewer while that is faster; for the others, which have no
                                          bubble, the fewest that fit, and more while that is faster, up to m

Planners whose plan takes much longer than the best are given up (`HOPELESS`), and numbers at which a plan certainly
takes longer are not planned at all (`Planner.slowdown`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from alpa_lite.errors import AlpaLiteError, InfeasibleError, PlanError, without_frames
from alpa_lite.inter_op.microbatch_counts import divisors
from alpa_lite.inter_op.plan_request import PlanRequest, SentSteps
from alpa_lite.inter_op.work_floor import least_loop_seconds
from alpa_lite.inter_op.workers import Likely, Workers
from alpa_lite.plan.plan import Plan
from alpa_lite.plan.progress import Progress
from alpa_lite.planners.convolution_parallel import OneWeirdTrick
from alpa_lite.planners.data_parallel import FSDP, DataParallel, GShard, Zero
from alpa_lite.planners.hybrid import Hybrid
from alpa_lite.planners.karma import Karma, KarmaBlocks
from alpa_lite.planners.megatron import Megatron
from alpa_lite.planners.pipeline import Pipeline
from alpa_lite.planners.planner import Planner
from alpa_lite.program.phases import StepGraph
from alpa_lite.text import show_count, show_seconds
from cost_models.cluster import Cluster, with_memory

MANUAL_PLANNERS: tuple[Planner, ...] = (
    DataParallel(),
    # Of all splits the fastest, which is never slower than the canonical one.
    Megatron(relaxed=True),
    Zero(stage=2),
    FSDP(),
    Pipeline(pipeline=2),
    Pipeline(pipeline=4),
    OneWeirdTrick(where_it_pays=True),
    GShard(zero=1),
)
"""The classic plans that `Auto` always prices."""

ON_HOST = Hybrid(zero=3, remat="selective", host_optimizer=True)
KARMA = Karma(zero=3)
"""The planners whose arrays may wait in the memory of the host, which `Auto` asks where memory is short.

The blocks of the second keep, swap or recompute what their backward pass reads, and its state waits where it should.
"""

_AMPLE_BYTES = 2.0**60
"""More memory than any plan needs of a device."""

HOPELESS = 1.1
"""No further numbers of micro-batches are tried for a planner whose plan takes so many times as long as the best.

Nor are KARMA's plans made where its blocks do by themselves: in a plan collectives also hide behind other blocks.
"""


def sparing_planners(cluster: Cluster) -> tuple[Hybrid, ...]:
    """Return planners that need little memory and hardly any search: all state is split, and layers are recomputed.

    Batches that have not a sample for each device are split over hosts alone.
    """
    per_host = cluster.devices_per_host
    return Hybrid(zero=3, remat="full"), *([Hybrid(tensor=per_host, zero=3, remat="full")] if per_host > 1 else [])


def plans_that_fit(planners: Sequence[Planner], request: PlanRequest) -> Iterator[Plan | NoPlan]:
    """Yield the plan of each planner with the fewest micro-batches that fit, or the reason why there is none.

    Where all state is split, fewer micro-batches gather it less often, so that they are the fastest.
    """
    for planner in planners:
        yield next(_from_the_fewest(planner, request))


def plans_on_host(request: PlanRequest, *, thorough: bool, at_most: float = math.inf) -> Iterator[Plan | NoPlan]:
    """Yield plans whose arrays wait on the host: `ON_HOST`, and KARMA's with the micro-batches that fit there.

    `thorough`: whether KARMA's are made with more micro-batches too, as long as these are faster: larger ones let more
    blocks be recomputed or swapped. `at_most`: the seconds of a step from which on plans are of no use; those of KARMA
    are not made where its blocks alone take far longer.
    """
    (first,) = plans_that_fit((ON_HOST,), request)
    yield first
    last, least = math.inf, first.num_microbatches if isinstance(first, Plan) else 1
    known, alone = dict[int, KarmaBlocks](), 0.0
    if at_most < math.inf:
        with suppress(AlpaLiteError):
            known[least] = KARMA.blocks_of(replace(request, num_microbatches=least, advise=False))
            alone = known[least].least_seconds()
    # Where they do not fit, more micro-batches may.
    if HOPELESS * at_most <= alone < math.inf:
        why = f"Its blocks alone take {show_seconds(alone)} at {show_count(least, 'micro-batch')}."
        yield NoPlan(KARMA.name, PlanError(why))
        return

    def make(asked: PlanRequest) -> Plan:
        number = asked.num_microbatches
        return KARMA.plan(asked, known.get(number) if isinstance(number, int) else None)

    for plan in _from_the_fewest(KARMA, request, least, make):
        if isinstance(plan, Plan) or last == math.inf:
            yield plan
        if not thorough or isinstance(plan, NoPlan) or plan.prediction.step_seconds >= last:
            return
        last = plan.prediction.step_seconds


def _from_the_fewest(
    planner: Planner, request: PlanRequest, least: int = 1, make: Callable[[PlanRequest], Plan] | None = None
) -> Iterator[Plan | NoPlan]:
    """Yield the plans of a planner with at least so many micro-batches, the fewest that fit first; at the end the
    reason why there are no others.

    `make`: plans a request with a number of micro-batches; None: the planner itself.
    """
    asked = replace(request, advise=False)
    why: AlpaLiteError = PlanError("There is no number of micro-batches to try.")
    for number in asked.microbatch_choices(divisors(asked.batch_size or 1)):
        if isinstance(number, int) and number < least:
            continue
        try:
            with request.progress.during("manual", planner.name):
                plan = (make or planner.plan)(replace(asked, num_microbatches=number))
        except AlpaLiteError as error:
            why = without_frames(error)
        else:
            yield plan
    yield NoPlan(planner.name, why)


def least_seconds_on_host(request: PlanRequest) -> float:
    """Return a lower bound on the seconds of the plans on the host; infinite if there are none.

    Each of them does the work of `Hybrid(zero=3)`, and copies or recomputes something in addition. So none is faster
    than that plan on devices with memory for everything, with the fewest micro-batches.
    """
    ample = replace(request, cluster=with_memory(request.cluster, _AMPLE_BYTES))
    (free,) = plans_that_fit((Hybrid(zero=3),), ample)
    return free.prediction.step_seconds if isinstance(free, Plan) else math.inf


class NoPlan(NamedTuple):
    """A planner, by its name, that has no plan, and why."""

    name: str
    error: AlpaLiteError


class ManualPlans:
    """Plans of each planner for a request.

    Workers make some plans in advance: the last ones first, as the first ones are made in this process.
    """

    def __init__(self, planners: Sequence[Planner], request: PlanRequest) -> None:
        """Make no plan yet."""
        self._planners, self._request = planners, replace(request, advise=False)
        # The request without the fields that cannot be pickled; workers get the steps that they need separately.
        self._apart = replace(self._request, steps=SentSteps(), measure=None, progress=Progress(), workers=Workers())
        # Pairs of planner and number that this process plans itself, which workers need not do again.
        self._asked = set[tuple[int, int | str]]()

    def plans(self, best: Plan | None, *, too_large: Collection[int] = ()) -> Iterator[Plan | NoPlan]:
        """Yield plans with about as many micro-batches as the best plan so far, if there is one.

        Of each planner without a plan comes the reason.

        `too_large`: numbers of micro-batches at which these do not fit into memory.
        """
        if best is None or best.num_microbatches == 1:
            number = self._request.num_microbatches
            for which, planner in enumerate(self._planners):
                self._asked.add((which, number))
                if best is not None:
                    self.expect(best)
                plan = self._plan(which, number)
                yield plan if isinstance(plan, Plan) else NoPlan(planner.name, plan)
            return
        # Numbers at which the search found no fit are left out: its shardings need less memory than these plans.
        for which, planner in enumerate(self._planners):
            numbers = [n for n in self._numbers(planner, best) if n > max(too_large, default=0)]
            yield from self._while_faster(which, numbers, best)

    def _numbers(self, planner: Planner, best: Plan) -> Sequence[int]:
        """Return the numbers of micro-batches for a planner if this is the best plan, in the order to try them."""
        choices = self._request.microbatch_choices(divisors(self._request.batch_size or 1))
        numbers = [number for number in choices if number <= best.num_microbatches]
        return numbers[::-1] if _has_bubble(planner) else numbers

    def _while_faster(self, which: int, numbers: Sequence[int], best: Plan) -> Iterator[Plan | NoPlan]:
        """Yield the plans of one planner with these numbers of micro-batches, while they get faster."""
        planner, last = self._planners[which], math.inf
        why: AlpaLiteError = PlanError("Nothing fits at the numbers of micro-batches of the chosen plan and below.")
        for number in numbers:
            # Fewer micro-batches have longer bubbles, and what has none is bounded by its work: no later number can do
            # better.
            if (least := self._least_seconds(planner, number)) >= best.prediction.step_seconds:
                # A problem at a larger number tells more.
                if number == numbers[0]:
                    at = show_count(number, "micro-batch")
                    why = PlanError(f"It takes at least {show_seconds(least)} with {at}, longer than the chosen plan.")
                break
            self._asked.add((which, number))
            self.expect(best)
            plan = self._plan(which, number)
            if isinstance(plan, AlpaLiteError):
                why = plan
                # Fewer micro-batches need more memory.
                if isinstance(plan, InfeasibleError) and _has_bubble(planner):
                    break
                # Degrees that do not divide these micro-batches may divide larger ones.
                continue
            if plan.prediction.step_seconds >= last:
                break
            yield plan
            last = plan.prediction.step_seconds
            if last > HOPELESS * best.prediction.step_seconds:
                break
        if last == math.inf:
            yield NoPlan(planner.name, why)

    def expect(self, best: Plan) -> None:
        """Let workers make plans with the first numbers of micro-batches for this best plan, or those tried so far."""
        if not (self._planners and self._request.workers.at_work):
            return
        questions = dict[Hashable, Likely]()
        # This process starts with the first planner, so that workers start with the last. Those without a bubble come
        # before: they begin with the same numbers, whatever the best plan will be.
        for which, planner in sorted(reversed([*enumerate(self._planners)]), key=lambda each: _has_bubble(each[1])):
            for number in self._numbers_like(planner, best):
                if (which, number) in self._asked or self._is_hopeless(planner, number, best):
                    continue
                try:
                    whole = self._request.step_at(1, 0)
                    # Of the planners that decide on the number most choose one, whose step is at hand.
                    cut = self._request.step_at(number, 0) if isinstance(number, int) else whole
                except AlpaLiteError:
                    continue  # planning raises the error too
                questions[_key(which, number)] = Likely(_plan, (self._apart, whole, cut), (planner, number))
        self._request.workers.expect(questions, later=True)

    def _numbers_like(self, planner: Planner, best: Plan) -> Iterable[int | str]:
        """Return the numbers of micro-batches that a planner is asked for if this is the best plan, as far as known."""
        if best.num_microbatches == 1:
            return (self._request.num_microbatches,)
        # Planners with and without a bubble begin at opposite ends.
        alike = [n for which, n in self._asked if _has_bubble(self._planners[which]) == _has_bubble(planner)]
        # Without a bubble the second number is tried, too, be it that the first does not fit.
        first = self._numbers(planner, best)[: 1 if _has_bubble(planner) else 2]
        return dict.fromkeys((*first, *(n for n in alike if isinstance(n, int))))

    def _is_hopeless(self, planner: Planner, number: int | str, best: Plan) -> bool:
        return isinstance(number, int) and self._least_seconds(planner, number) >= best.prediction.step_seconds

    def _plan(self, which: int, number: int | str) -> Plan | AlpaLiteError:
        """Return the plan of a planner with a number of micro-batches, or the error that says why there is none."""
        planner = self._planners[which]
        try:
            with self._request.progress.during("manual", planner.name):
                found = self._request.workers.take(_key(which, number))
                if isinstance(found, AlpaLiteError):
                    raise found
                if isinstance(found, Plan):
                    return found
                return planner.plan(replace(self._request, num_microbatches=number))
        except AlpaLiteError as error:
            return without_frames(error)

    def _least_seconds(self, planner: Planner, number: int) -> float:
        """Return a lower bound on the seconds of a step, however the planner shards it."""
        loop, at_best = self._bounds
        # The bound on waiting assumes equal devices that work independently.
        alike = not (self._request.cluster.groups or self._request.cluster.shared_processor)
        return at_best + (loop * (planner.slowdown(number) - 1) if alike else 0.0)

    @cached_property
    def _bounds(self) -> tuple[float, float]:
        asked = self._request
        loop = least_loop_seconds(asked.step_at(1, 0), asked.cluster, asked.cost_model_for)
        return loop, asked.floor_seconds


def _has_bubble(planner: Planner) -> bool:
    return planner.slowdown(1) > 1.0


def _key(which: int, number: int | str) -> Hashable:
    return "manual", which, number


def _plan(
    memory: dict[object, object],
    request: PlanRequest,
    whole: StepGraph,
    cut: StepGraph,
    likely: tuple[Planner, int | str],
) -> Plan | AlpaLiteError | None:
    """Make a plan in a worker from the step as a whole and in micro-batches; None if it needs other steps."""
    del memory
    planner, number = likely
    steps = SentSteps(known={(step.num_microbatches, 0): step for step in (whole, cut)})
    try:
        return planner.plan(replace(request, steps=steps, num_microbatches=number))
    # The planner needs a step that was not sent: the main process makes this plan.
    except LookupError:
        return None
    except AlpaLiteError as error:
        return without_frames(error)
