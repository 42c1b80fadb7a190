"""Refine the stages of the search: solve them closer to the best, and run them under other schedules.

polish      the slowest stages again, to a smaller gap, within a time limit                      `polished`
schedules   the same stages under each schedule that their memory allows                         `rescheduled`
even        the layers cut anew into as many equal parts                                         `_evened`
chunks      the layers in several times as many parts, dealt out over the same submeshes         `dealt_out`
order       the tasks of these stages in the shortest order that is found for their times        `reordered`
write out   loops over layers trip by trip, so that gradients of weights can be put off          `_written_out`
agree       stages solved again so that all hold rows of stacked arguments in one form           `agreeing`

A step returns one array for a stacked argument. If every stage holds equally many of its rows in one form, the array
lies over their devices as it is; if not, the rows are brought together after each step (`boundaries.stacks_at_rest`).
Stages are solved one by one, and of equally good forms each may have another. So the stages that differ are solved
again with the form of one of them given.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from alpa_lite.errors import InfeasibleError, PlanError
from alpa_lite.inter_op.assembly import ROUNDING, StagedStep, StepEstimate, estimate, inflows_between
from alpa_lite.inter_op.boundaries import stacks_at_rest
from alpa_lite.inter_op.plan_request import PlanRequest
from alpa_lite.inter_op.shared_devices import device_peak, solve_together
from alpa_lite.inter_op.solved_stages import PlacedStage, StagePlace
from alpa_lite.inter_op.stage_cost_cache import StageCostCache
from alpa_lite.inter_op.stage_costs import StageCosts
from alpa_lite.intra_op.solve import RELATIVE_GAP
from alpa_lite.intra_op.stage import StageSolution
from alpa_lite.plan.parts import StageCost
from alpa_lite.plan.pricing import dispatch_seconds
from alpa_lite.program.ir import Graph, Op, wiring_of
from alpa_lite.program.phases import Phase, StepGraph
from alpa_lite.rules.dims import batch_dims_of
from alpa_lite.rules.op_info import rule_of_op
from alpa_lite.schedule import (
    Interleaved1F1B,
    OneFOneB,
    Schedule,
    Synthesised,
    Wave,
    ZeroBubbleH1,
    ZeroBubbleV,
    peak_in_flight,
    processors_of,
    splits_backward,
)
from alpa_lite.schedule.clock import simulate
from alpa_lite.sharding.specs import Spec
from alpa_lite.step.layers import Cut, forward_loops, op_flops
from alpa_lite.step.recomputation import Remat

POLISH_SECONDS = 3.0
"""Time limit for solving a stage again."""

ALONE_GAP, ALONE_SECONDS = 1e-3, 6.0
"""Gap and time limit for the only stage of a plan: its time is the step's."""

CHUNKS = (2, 4, 8)
"""Numbers of chunks per group of devices in interleaved pipelines, tried while more are faster."""

THERE_AND_BACK: tuple[Schedule, ...] = (ZeroBubbleV(), Wave())
"""Other schedules with chunks that are tried."""

WORTH = 0.005
"""Relative gain for which tasks are put into an order of their own."""

WORTH_WRITING = 0.01
"""Estimated relative gain for which loops are written out. The estimate is high: memory limits what may wait."""

BUBBLE = 0.03
"""Bubble of a pipeline above which chunks, equal parts and other orders are tried."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """Solved stages of a step under a schedule."""

    costs: StageCosts
    stages: tuple[PlacedStage, ...]
    schedule: Schedule
    estimate: StepEstimate

    @staticmethod
    def of(request: PlanRequest, costs: StageCosts, stages: Sequence[PlacedStage], schedule: Schedule) -> Found:
        """Return the stages under a schedule, with their estimate."""
        stages = scheduled(costs, stages, schedule)
        staged = StagedStep(step=costs.step, layers=costs.layers, stages=stages, schedule=schedule)
        return Found(costs=costs, stages=tuple(stages), schedule=schedule, estimate=estimate(request, staged))

    @property
    def seconds(self) -> float:
        """Estimated seconds of one step."""
        return self.estimate.step_seconds

    @property
    def size(self) -> tuple[int, int]:
        """The numbers of stages and of micro-batches."""
        return len(self.stages), self.costs.step.num_microbatches

    @property
    def has_short_bubble(self) -> bool:
        """Whether stages wait less than under 1F1B: they are chunks, or put gradients of weights off."""
        in_two = any(map(splits_backward, self.schedule.tasks(*self.size)))
        return self.schedule.stages_per_processor > 1 or in_two

    @property
    def policies(self) -> tuple[Remat, ...]:
        """The policy of rematerialisation of each stage."""
        remat = self.costs.recomputed.remat
        return tuple(remat[stage.first] if remat else Remat.NONE for stage in self.stages)

    @property
    def in_flight(self) -> list[int]:
        """Micro-batches in flight on each stage."""
        count = len(self.stages)
        return [self.schedule.in_flight(i, count, self.costs.step.num_microbatches) for i in range(count)]


def refined(
    request: PlanRequest,
    found: Sequence[Found],
    steps: StageCostCache,
    schedules: Sequence[Schedule],
    *,
    any_schedule: bool,
    policies: Collection[Remat],
) -> list[Found]:
    """Return what the fastest of some plans, which come in this order, may become; solved closer to the best.

    `any_schedule`: also under schedules that are not searched, in chunks above all. `policies`: of rematerialisation.
    """
    ways = list[Found]()

    def refine(way: Found) -> Found:
        closer = polished(request, way)
        if not any_schedule or len(closer.stages) == 1:
            ways.extend(under_each(request, closer, schedules))
            return min(ways, key=lambda way: way.seconds)
        # Chunks are compared with stages under the schedules; both may have a better order.
        plain = Found.of(request, closer.costs, closer.stages, schedules[0])
        under = [*under_each(request, plain, schedules)]
        whole = min(under, key=lambda way: way.seconds)
        in_chunks = _in_chunks(request, plain, whole, steps)
        best = min((whole, *in_chunks), key=lambda way: way.seconds)
        even = [*_evened(request, best, plain, steps, schedules)]
        best = min((best, *even), key=lambda way: way.seconds)
        ordered = [reordered(request, each) for each in (whole, best)]
        best = min(ordered, key=lambda way: way.seconds)
        best = _written_out(request, best, whole, steps, schedules, policies)
        ways.extend((*under, *in_chunks, *even, *ordered, best))
        return best

    first, *others = found
    best = refine(first)
    # Chunks and backward passes in two shorten the bubble, so that a plan with a longer one may overtake; without any
    # bubble it has to be faster.
    for other in others if best.has_short_bubble else ():
        chunks, waiting = best.schedule.stages_per_processor > 1, other.seconds * other.estimate.bubble_fraction
        if other.seconds - (waiting if chunks else _gain_of_waiting(request, other)) < best.seconds:
            best = min(best, refine(other), key=lambda way: way.seconds)
    return ways


def _evened(
    request: PlanRequest, best: Found, whole: Found, steps: StageCostCache, schedules: Sequence[Schedule]
) -> Iterator[Found]:
    """Yield what may be faster than the best plan so far: layers cut anew into parts as equal as possible.

    The search makes stages from few layers, for 1F1B. A schedule with little bubble waits for uneven stages. Layers are
    cut where each of them receives little, as stages of several layers need not.
    """
    if best.estimate.bubble_fraction <= BUBBLE:
        return
    if (even := dealt_out(request, whole, steps, OneFOneB())) is not None:
        # `rescheduled` judges other schedules by the bubble under the first one.
        plain = Found.of(request, even.costs, even.stages, schedules[0])
        yield rescheduled(request, plain, schedules)


def _in_chunks(request: PlanRequest, plain: Found, best: Found, steps: StageCostCache) -> list[Found]:
    """Return stages in several numbers of chunks that may be faster than `best`.

    `plain` are the stages under 1F1B, `best` under the best schedule for them.
    """
    made, last = list[Found](), plain
    for chunks in CHUNKS:
        # Twice as many chunks halve the time that stages wait at the beginning and at the end.
        bubble = last.estimate.bubble_fraction
        if bubble <= BUBBLE or last.seconds * (1 - bubble / 2) >= best.seconds:
            break
        found = _dealt_in_chunks(request, plain, best, steps, Interleaved1F1B(num_chunks=chunks))
        made += [found] if found is not None else []
        # More chunks send more often and hold more memory: if these are no better, neither are more.
        if found is None or found.seconds >= best.seconds:
            break
        best = last = found
    for schedule in THERE_AND_BACK:
        if best.estimate.bubble_fraction > BUBBLE:
            found = _dealt_in_chunks(request, plain, best, steps, schedule)
            made += [found] if found is not None else []
            best = min((best, *made), key=lambda way: way.seconds)
    return made


def _dealt_in_chunks(
    request: PlanRequest, plain: Found, best: Found, steps: StageCostCache, schedule: Schedule
) -> Found | None:
    """Return stages in the chunks of a schedule; None if there are none, or they are surely slower than `best`."""
    parts, num_microbatches = len(plain.stages), plain.costs.step.num_microbatches
    chunks = parts * schedule.stages_per_processor
    try:
        tasks = schedule.tasks(chunks, num_microbatches)
    except PlanError:  # it may run other numbers of micro-batches
        return None
    # Chunks are solved only if equal shares of the stages, and the least transfers between these, would be faster.
    in_two = any(map(splits_backward, tasks))
    costs = [plain.costs.in_two_parts(stage, stage.solution, in_two=in_two).cost for stage in plain.stages]
    least = min(inflows_between(request, plain.costs.step, plain.costs.layers, plain.stages))
    homes = [schedule.processor_of(chunk, chunks) for chunk in range(chunks)]

    def shares(of_stages: Sequence[float]) -> list[float]:
        return [of_stages[home] / schedule.stages_per_processor for home in homes]

    timeline = simulate(
        tasks,
        shares([cost.forward_seconds for cost in costs]),
        shares([cost.backward_seconds for cost in costs]),
        weight_seconds=shares([cost.weight_seconds for cost in costs]),
        transfer_seconds=[least if a != b else 0.0 for a, b in pairwise(homes)],
        dispatch_seconds=dispatch_seconds(request.cluster),
    )
    if timeline.makespan_seconds >= best.seconds:
        return None
    return dealt_out(request, plain, steps, schedule)


def _written_out(
    request: PlanRequest,
    best: Found,
    whole: Found,
    steps: StageCostCache,
    schedules: Sequence[Schedule],
    policies: Collection[Remat],
) -> Found:
    """Return the best plan so far, or stages whose loops over layers are written out, whichever is faster.

    In a loop over several layers no part of the backward pass can be put off, since the loop is one op. `whole` are the
    stages of the search, under the best schedule for them. A step that is written out is larger and takes long to plan:
    that is done only if there is room for what waits, and an order that puts gradients of weights off would be faster.
    """
    if best.estimate.bubble_fraction <= BUBBLE or not _has_loops(whole) or not any(_have_room_to_wait(whole)):
        return best
    if whole.seconds - _gain_of_waiting(request, whole) >= best.seconds * (1 - WORTH_WRITING):
        return best
    ways = list[Found]()
    # A loop saves all that its backward pass reads; written out, most of it is fused with what reads it, so that there
    # may be memory without recomputation.
    without = ((Remat.NONE,) * len(whole.stages),) if Remat.NONE in policies else ()
    # The best schedule of the search may leave no memory for gradients that wait.
    for schedule in dict.fromkeys((whole.schedule, ZeroBubbleH1())):
        tried = (
            dealt_out(request, whole, steps, schedule, in_trips=True, policies=under)
            for under in dict.fromkeys((*without, whole.policies))
        )
        found = next((way for way in tried if way is not None), None)
        if found is not None:
            found = reordered(request, rescheduled(request, found, schedules))
            ways += [found, _dealt_in_chunks(request, found, found, steps, ZeroBubbleV()) or found]
    return min((best, *ways), key=lambda way: way.seconds)


def _gain_of_waiting(request: PlanRequest, found: Found) -> float:
    """Return about how many seconds are gained if gradients of weights may wait, with memory for any number of them."""
    times = _order(request, found, in_two=False)
    # Each product with a weight has one in the backward pass that makes a gradient, and is as long.
    put_off = replace(times, weight=tuple(map(min, times.forward, times.backward)))

    def loop_seconds(order: Synthesised, schedule: Schedule) -> float:
        return simulate(
            schedule.tasks(*found.size),
            order.forward,
            order.backward,
            weight_seconds=order.weight,
            transfer_seconds=order.transfer,
        ).makespan_seconds

    in_one_go = OneFOneB() if any(map(splits_backward, found.schedule.tasks(*found.size))) else found.schedule
    return loop_seconds(times, in_one_go) - loop_seconds(put_off, put_off)


def _have_room_to_wait(found: Found) -> Iterator[bool]:
    """Yield for each stage but the first whether it has memory for a micro-batch whose gradients of weights wait.

    They are computed from what products with weights read in the forward pass, and from the gradients of their results:
    these are there at the same time, split over all devices at best. No stage waits for the first one.
    """
    step, layers = found.costs.step, found.costs.layers
    for stage in found.stages[1:]:
        of_stage = [op for layer in range(stage.first, stage.last + 1) for op in layers.ops_of(layer)]
        forward = (step.graph.ops[op] for op in of_stage if step.phases[op] is Phase.FORWARD)
        waiting = sum(_bytes_for_gradients(step, step.graph, op) for op in forward) / stage.submesh.num_devices
        cost = stage.solution.cost
        yield cost.resident_bytes + cost.activation_bytes + waiting <= found.costs.room_bytes(stage.submesh)


def _bytes_for_gradients(step: StepGraph, graph: Graph, op: Op) -> float:
    """Return the bytes from which the gradients of the weights of an op are computed, if it is a product with some."""
    wiring = wiring_of(op)
    if wiring is not None:
        return wiring.trips * sum(_bytes_for_gradients(step, body, o) for body in op.bodies for o in body.ops)
    if op.bodies or len(op.operands) != 2 or rule_of_op(graph, op.id).work_kind == "elementwise":
        return 0.0
    batch = batch_dims_of(step, graph)
    samples = [v for v in (*op.operands, *op.results) if batch[v] is not None]
    # Products of two arrays with samples, as in attention, have no weights.
    return float(sum(graph.values[v].bytes for v in samples)) if len(samples) == 2 else 0.0


def _shares(found: Found) -> list[float]:
    """Return the FLOPs of the forward pass of each stage."""
    step, layers, flops = found.costs.step, found.costs.layers, op_flops(found.costs.step)
    return [
        sum(
            flops[op]
            for layer in range(stage.first, stage.last + 1)
            for op in layers.ops_of(layer)
            if step.phases[op] is Phase.FORWARD
        )
        for stage in found.stages
    ]


def _has_loops(found: Found) -> bool:
    """Return whether the forward pass has loops of several trips."""
    step = found.costs.step
    wirings = (wiring_of(step.graph.ops[op]) for op in forward_loops(step))
    return any(wiring is not None and wiring.trips > 1 for wiring in wirings)


def reordered(request: PlanRequest, best: Found, at_most: float = math.inf) -> Found:
    """Return the same stages with their tasks in an order that is made for their times, if that is faster.

    No order is made that cannot take less than `at_most` seconds.
    """
    if best.estimate.bubble_fraction <= BUBBLE:
        return best
    lists, found = best.schedule.tasks(*best.size), best
    # An order that is hardly shorter is not worth a schedule without a formula.
    at_most = min(best.seconds * (1 - WORTH), at_most) - (best.seconds - best.estimate.loop_seconds)
    for in_two in (False, True):
        order = _order(request, best, in_two=in_two)
        # Without room for any number of micro-batches, as many as the plan holds so far.
        for most in ((), tuple(peak_in_flight(tasks) for tasks in lists)):
            limited = replace(order, most_held=most)
            if limited.least_seconds(*best.size) >= at_most:
                break
            if fits(best.costs, best.stages, limited):
                other = Found.of(request, best.costs, best.stages, limited)
                found = min(found, other, key=lambda way: way.seconds)
                break
    return found if found.seconds < best.seconds * (1 - WORTH) else best


def _order(request: PlanRequest, found: Found, *, in_two: bool) -> Synthesised:
    """Return the order that is made for the times of stages, with whole backward passes or `in_two` parts."""
    costs, launch = found.costs, dispatch_seconds(request.cluster)
    of_stages = [costs.in_two_parts(stage, stage.solution, in_two=in_two).cost for stage in found.stages]
    return Synthesised(
        forward=tuple(cost.forward_seconds + launch for cost in of_stages),
        backward=tuple(cost.backward_seconds + launch * (1 + in_two) for cost in of_stages),
        weight=tuple(cost.weight_seconds + launch * in_two for cost in of_stages),
        transfer=tuple(inflows_between(request, costs.step, costs.layers, found.stages)),
        processors=tuple(found.schedule.processor_of(stage, len(found.stages)) for stage in range(len(found.stages))),
    )


def polished(request: PlanRequest, found: Found) -> Found:
    """Solve the slowest stages again to a smaller gap, and use what is faster; the form of stacked arguments stays."""
    # Otherwise equally good forms could appear that stages do not share, and rows would move between steps.
    pins = {v: spec for stage in found.stages for v, spec in forms_given(found.costs, stage).items()}
    costs = found.costs.with_pins({**found.costs.constraints.pins, **pins})
    gap, limit = (ALONE_GAP, ALONE_SECONDS) if len(found.stages) == 1 else (RELATIVE_GAP, POLISH_SECONDS)
    costs = costs.solved_with(replace(costs.effort, relative_gap=gap, time_limit_seconds=limit))
    stages, count, done = [*found.stages], costs.step.num_microbatches, set[int]()
    taken = [stage.solution.cost.step_seconds(count) for stage in stages]
    # The others wait for the slowest one: once that is solved closely, they hardly matter.
    while (slowest := int(np.argmax(taken))) not in done:
        solution = costs.fastest(stages[slowest], in_flight=found.in_flight[slowest])
        seconds = solution.cost.step_seconds(count)
        if solution.choice is not None and seconds < taken[slowest]:
            stages[slowest], taken[slowest] = replace(stages[slowest], solution=solution), seconds
        done.add(slowest)
    # Stages that are faster alone may need slower transfers, or more memory than this schedule leaves.
    again = Found.of(request, found.costs, stages, found.schedule)
    better = again.seconds < found.seconds and fits(found.costs, again.stages, found.schedule)
    return again if better else found


def under_each(request: PlanRequest, found: Found, schedules: Sequence[Schedule]) -> Iterator[Found]:
    """Yield the stages as they are, and under each other schedule that their memory allows."""
    yield found
    for schedule in schedules if len(found.stages) > 1 else ():
        lists = schedule.tasks(len(found.stages), found.costs.step.num_microbatches)
        # Splitting backward passes in two only helps to fill a bubble.
        in_vain = any(map(splits_backward, lists)) and found.estimate.bubble_fraction <= BUBBLE
        if schedule != found.schedule and not in_vain and fits(found.costs, found.stages, schedule):
            yield Found.of(request, found.costs, found.stages, schedule)


def rescheduled(request: PlanRequest, found: Found, schedules: Sequence[Schedule]) -> Found:
    """Return the same stages under the fastest schedule that their memory allows, by the estimate."""
    return min(under_each(request, found, schedules), key=lambda way: way.seconds)


def scheduled(costs: StageCosts, stages: Sequence[PlacedStage], schedule: Schedule) -> list[PlacedStage]:
    """Return the stages as a schedule runs them: with the times of both parts if it splits backward passes."""
    lists = schedule.tasks(len(stages), costs.step.num_microbatches)
    found, processors = list[PlacedStage](), processors_of(lists)
    for number, stage in enumerate(stages):
        solution, in_two = stage.solution, splits_backward(lists[processors[number]])
        # The solution may come from a schedule that splits backward passes.
        if in_two or solution.cost.weight_seconds:
            solution = costs.in_two_parts(stage, solution, in_two=in_two)
        found.append(replace(stage, solution=solution))
    return found


def fits(costs: StageCosts, stages: Sequence[PlacedStage], schedule: Schedule) -> bool:
    """Return True if stages have memory for all that a schedule lets them hold, together on shared devices."""
    lists = schedule.tasks(len(stages), costs.step.num_microbatches)
    processors, held = processors_of(lists), [dict[int, StageCost]() for _ in lists]
    for number, stage in enumerate(scheduled(costs, stages, schedule)):
        held[processors[number]][number] = stage.solution.cost
    return all(
        device_peak(of_stages, tasks) <= (1 + ROUNDING) * costs.room_bytes(stages[min(of_stages)].submesh)
        for of_stages, tasks in zip(held, lists, strict=True)
    )


def with_less_memory(
    found: Found, over: Mapping[int, float], limits: Mapping[int, float]
) -> tuple[Found, dict[int, float]]:
    """Return the stages with so many bytes less, by number, and the limits within which they are solved.

    `limits`: of stages that had to do with less before. Raises `InfeasibleError` if one cannot do with less.
    """
    costs, lists = found.costs, found.schedule.tasks(len(found.stages), found.costs.step.num_microbatches)
    if len(lists) < len(found.stages):
        raise InfeasibleError(f"Stages that share devices do not fit under {found.schedule}.")
    lower = {n: device_peak({n: found.stages[n].solution.cost}, lists[n]) - excess for n, excess in over.items()}
    within = {**limits, **lower}
    try:
        solved = _within(costs, found.stages, found.schedule, within)
    except InfeasibleError:
        # The stage of all layers saves less as the step is written.
        first, *others = found.stages
        if others or costs.whole is costs:
            raise
        costs = costs.whole
        solved = _within(costs, [replace(first, last=0)], found.schedule, within)
    return replace(found, costs=costs, stages=tuple(solved)), within


def made_to_fit(costs: StageCosts, stages: Sequence[PlacedStage], schedule: Schedule) -> list[PlacedStage]:
    """Return the stages, solved again with less memory if a schedule holds more than the search assumed.

    Raises `InfeasibleError` if a stage does not fit.
    """
    return list(stages) if fits(costs, stages, schedule) else _within(costs, stages, schedule, {})


def _within(
    costs: StageCosts, stages: Sequence[PlacedStage], schedule: Schedule, limits: Mapping[int, float]
) -> list[PlacedStage]:
    """Return the stages, solved within limits in bytes per device, by number; the others within their memory."""
    lists = schedule.tasks(len(stages), costs.step.num_microbatches)
    found: list[PlacedStage] = []
    for number, (stage, tasks) in enumerate(zip(stages, lists, strict=True)):

        def solve(
            _: int,
            in_flight: int,
            limit_bytes: float,
            stage: PlacedStage = stage,
            in_two: bool = splits_backward(tasks),
        ) -> StageSolution:
            solution = costs.solution(stage, in_flight=in_flight, limit_bytes=limit_bytes)
            return costs.in_two_parts(stage, solution) if in_two else solution

        together = solve_together(solve, tasks, limits.get(number, costs.room_bytes(stage.submesh)))
        if not together.fits:
            raise InfeasibleError(f"Stage {number} of {len(stages)} does not fit under {schedule}.")
        found.append(replace(stage, solution=together.solutions[number]))
    return found


def dealt_out(
    request: PlanRequest,
    found: Found,
    steps: StageCostCache,
    schedule: Schedule,
    *,
    in_trips: bool = False,
    policies: Sequence[Remat] | None = None,
) -> Found | None:
    """Return a plan with the chunks of a schedule on the submesh of each stage; None if that is not possible.

    `in_trips`: with loops written out, as always if the schedule cuts backward passes in two. `policies`: of
    rematerialisation, of each stage; by default as found.
    """
    parts, num_microbatches = len(found.stages), found.costs.step.num_microbatches
    chunks = parts * schedule.stages_per_processor
    homes = [schedule.processor_of(chunk, chunks) for chunk in range(chunks)]
    try:
        # A schedule may run other numbers of micro-batches, and there may be too few ops.
        tasks = schedule.tasks(chunks, num_microbatches)
        in_trips = in_trips or any(map(splits_backward, tasks))
        cut = Cut.written_out([_shares(found)[home] for home in homes]) if in_trips else Cut.into(chunks)
        policies = found.policies if policies is None else policies
        costs, per_chunk = steps.mixed(num_microbatches, cut, [policies[home] for home in homes])
    except PlanError:
        return None
    solved: dict[int, StageSolution] = {}
    # The last part first: it has the fewest micro-batches in flight, and its solutions serve those before it.
    for part in reversed(range(parts)):

        def solve(
            chunk: int,
            in_flight: int,
            limit_bytes: float,
            whole: PlacedStage = found.stages[part],
            in_two: bool = splits_backward(tasks[part]),
        ) -> StageSolution:
            place = StagePlace.nth(chunk, per_chunk, whole.submesh, whole.mesh)
            solution = costs.solution(place, in_flight=in_flight, limit_bytes=limit_bytes)
            return costs.in_two_parts(place, solution) if in_two else solution

        together = solve_together(solve, tasks[part], costs.room_bytes(found.stages[part].submesh))
        if not together.fits:
            return None
        solved |= together.solutions
    stages = [
        StagePlace.nth(chunk, per_chunk, whole.submesh, whole.mesh).with_solution(solved[chunk])
        for chunk, whole in enumerate(found.stages[home] for home in homes)
    ]
    return Found.of(request, costs, stages, schedule)


def agreeing(costs: StageCosts, stages: Sequence[PlacedStage], schedule: Schedule) -> Iterator[list[PlacedStage]]:
    """Yield for each form in which a stage holds rows the stages that all hold them so, if these fit.

    Nothing is yielded if the stages agree already.
    """
    if not stacks_at_rest(costs.cost_model, costs.step, costs.layers, stages).seconds:
        return
    held = [schedule.in_flight(i, len(stages), costs.step.num_microbatches) for i in range(len(stages))]
    forms = [_forms(costs, stage) for stage in stages]
    # Each form that some stage has chosen is a candidate for all.
    for model in dict.fromkeys(tuple(sorted(form.items())) for form in forms):
        wanted = dict(model)
        pins = {v: wanted[leaf] for stage in stages for leaf, v in _rows(costs, stage) if leaf in wanted}
        given = costs.with_pins({**costs.constraints.pins, **pins})
        # The last first: what is best with the fewest micro-batches in flight is so with more, where it fits.
        found = [
            stage if _forms(costs, stage) == wanted else _solved_again(given, stage, in_flight)
            for stage, in_flight in reversed([*zip(stages, held, strict=True)])
        ]
        found.reverse()
        if all(stage.solution.choice is not None for stage in found):
            yield found


def _rows(costs: StageCosts, stage: PlacedStage) -> list[tuple[int, int]]:
    """Return the leaf and the input of the graph for each stacked argument of which a stage holds rows."""
    step, layers = costs.step, costs.layers
    inputs = zip(step.input_parts, step.graph.inputs, layers.of_input, strict=True)
    return [(part.leaf, v) for part, v, home in inputs if part.rows is not None and stage.first <= home <= stage.last]


def _forms(costs: StageCosts, stage: PlacedStage) -> dict[int, Spec]:
    """Return the spec in which a stage holds its rows of each stacked argument, by leaf."""
    choice = stage.solution.choice
    return {leaf: choice.inputs[v] for leaf, v in _rows(costs, stage) if v in choice.inputs} if choice else {}


def forms_given(costs: StageCosts, stage: PlacedStage) -> dict[int, Spec]:
    """Return the spec in which a stage holds its rows of stacked arguments, by input of the graph."""
    choice = stage.solution.choice
    return {v: choice.inputs[v] for _, v in _rows(costs, stage) if v in choice.inputs} if choice else {}


def _solved_again(costs: StageCosts, stage: PlacedStage, in_flight: int) -> PlacedStage:
    return replace(stage, solution=costs.solution(stage, in_flight=in_flight))
