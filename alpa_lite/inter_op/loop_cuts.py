"""Where a pipeline cuts a step: between the loops over layers as they are written, or between parts of these loops.

With f_s the forward FLOPs of stage s and w_s its share of them, a cut is taken if

    max f / w <= (1 + UNEVEN) · Σ f / Σ w,  or  max f / w <= the least that stages of whole trips can have   `is_even`

and if no argument comes in rows that several stages read: only loops that are cut have their stacked arrays cut
(`alpa_lite.trace.passes.split_stacked`).
Else loops are cut into more parts, since each multiplies the step: as many as stages, twice as many, and so on. Who
writes a model as one loop for each stage can also have it cut so, whatever the loops' FLOPs are (`by_loops`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from alpa_lite.errors import BatchError, NonAdditiveError, PlanError, TraceError
from alpa_lite.inter_op.plan_request import PlanRequest
from alpa_lite.program.ir import MAX_TRIPS, Graph, Op, parts_of, wiring_of
from alpa_lite.program.phases import Phase, StepGraph
from alpa_lite.step.clustering import make_layers
from alpa_lite.step.layers import Layers, forward_loops, op_flops

IMBALANCE = 0.1
"""By how much a stage may exceed its share for the sake of smaller cuts."""

UNEVEN = 0.15
"""By how much the largest stage of a cut between loops may exceed its share."""

_ROUNDING = 1 + 1e-6


@dataclass(frozen=True, kw_only=True)
class PipelineCut:
    """A step and its stages, one layer each."""

    step: StepGraph
    layers: Layers


def cut_into_stages(
    request: PlanRequest,
    microbatches: Sequence[int],
    count: int,
    *,
    by_loops: bool = False,
    shares: Sequence[float] = (),
    written_out: bool = False,
) -> PipelineCut:
    """Cut the step into `count` stages, with the first of some numbers of micro-batches that works.

    Stages have about equal FLOPs, or FLOPs in proportion to `shares`, or `by_loops` equal numbers of the loops of the
    forward pass. `written_out`: trip by trip, for who wants to take the backward pass of a trip apart.

    Raises PlanError when the model is too short or has other loops or there are not as many positive shares as stages,
    and what tracing raises for a number that the user asked for.
    """
    if shares and (len(shares) != count or min(shares) <= 0 or by_loops):
        raise PlanError(
            f"The shares {tuple(shares)} were asked for, but there are {count} stages"
            + (" of equally many loops" if by_loops else "")
            + f'. Give {count} numbers above 0, and cut by "flops".'
        )
    if by_loops and count > 1:
        step = request.best_step(microbatches, loop_parts=0)
        if (loops := len(forward_loops(step))) == 0 or loops % count:
            raise PlanError(
                f"{count} stages of equally many loops were asked for, but the forward pass has {loops} loops over "
                f'layers. Write the layers as a multiple of {count} calls of lax.scan, or cut by "flops".'
            )
        return PipelineCut(step=step, layers=make_layers(step, count, imbalance=0.1, equal="loops"))
    if count == 1:
        step = request.best_step(microbatches, loop_parts=0)
        return PipelineCut(step=step, layers=make_layers(step, 1))
    shares = shares or (1.0,) * count
    if written_out:
        step = request.best_step(microbatches, loop_parts=MAX_TRIPS)
        return PipelineCut(step=step, layers=make_layers(step, count, imbalance=IMBALANCE, shares=shares))
    num_parts = count
    try:
        step = request.best_step(microbatches, loop_parts=0)
        layers = make_layers(step, count, imbalance=IMBALANCE, shares=shares)
        if is_even(step, layers, shares) and not _reads_rows_apart(step, layers):
            return PipelineCut(step=step, layers=layers)
        num_parts = parts_that_may_do(step, count, shares)
    except (NonAdditiveError, BatchError, TraceError, PlanError):
        pass  # what is wrong with it is said when it is asked for in parts
    try:
        return _in_parts(request, microbatches, shares, num_parts)
    except PlanError as error:
        raise PlanError(f"{count} pipeline stages were asked for. {error}") from error


def _in_parts(
    request: PlanRequest, microbatches: Sequence[int], shares: Sequence[float], num_parts: int
) -> PipelineCut:
    """The cut with loops in as many parts as it takes, from so many on; at last they are written out."""
    while True:
        step = request.best_step(microbatches, loop_parts=num_parts)
        layers = make_layers(step, len(shares), imbalance=IMBALANCE, shares=shares)
        if num_parts >= MAX_TRIPS or is_even(step, layers, shares):
            return PipelineCut(step=step, layers=layers)
        num_parts = min(2 * num_parts, MAX_TRIPS)


def is_even(step: StepGraph, layers: Layers, shares: Sequence[float] = ()) -> bool:
    """True when more parts of loops could hardly give stages that are closer to their shares; without them, equal."""
    shares = shares or (1.0,) * layers.num_layers
    loops, totals = _trips(step), [0.0] * layers.num_layers
    for op, (flops, count) in loops.items():
        totals[layers.of_op[op] or 0] += flops * count
    if all(count == 1 for _, count in loops.values()):
        return True  # there is nothing to cut through
    return max(total / share for total, share in zip(totals, shares, strict=True)) <= _allowed(loops, shares)


def parts_that_may_do(step: StepGraph, num_parts: int, shares: Sequence[float]) -> int:
    """The first number of parts of loops with which a cut of a step can be even: `num_parts`, or twice as many, and so
    on. `step`: with its loops whole."""
    loops = _trips(step)
    allowed = _allowed(loops, shares) * _ROUNDING
    while num_parts < MAX_TRIPS:
        sizes = [f * (b - a) for f, count in loops.values() for a, b in parts_of(count, num_parts)]
        if least_largest(sizes, shares) <= allowed:
            break
        num_parts = min(2 * num_parts, MAX_TRIPS)
    return num_parts


def _trips(step: StepGraph) -> dict[int, tuple[float, int]]:
    """Of each op of the forward pass, the FLOPs of a trip, and how many trips there are that can be taken apart."""
    flops, found = op_flops(step), dict[int, tuple[float, int]]()
    for op in step.graph.ops:
        if step.phases[op.id] is Phase.FORWARD:
            wiring = wiring_of(op)
            cuttable = wiring is not None and wiring.scanned and wiring.trips <= MAX_TRIPS
            count = int(wiring.trips) if wiring is not None and cuttable else 1
            found[op.id] = flops[op.id] / count, count
    return found


def _allowed(loops: Mapping[int, tuple[float, int]], shares: Sequence[float]) -> float:
    """How many FLOPs for each share the largest stage may have."""
    trips = [flops for flops, count in loops.values() for _ in range(count)]
    return max((1 + UNEVEN) * sum(trips) / sum(shares), least_largest(trips, shares) * _ROUNDING)


def least_largest(sizes: Sequence[float], shares: Sequence[float]) -> float:
    """The least x so that `sizes` are consecutive runs, one per share, of sums of at most x · share (by bisection)."""
    low, high = sum(sizes) / sum(shares), sum(sizes) / shares[0]
    if _fit(sizes, shares, low * _ROUNDING):
        return low
    while high > low * _ROUNDING:
        middle = (low + high) / 2
        low, high = (low, middle) if _fit(sizes, shares, middle) else (middle, high)
    return high


def _fit(sizes: Sequence[float], shares: Sequence[float], limit: float) -> bool:
    """Whether runs of at most limit · share hold all sizes; filling them up in turn never needs more of them."""
    run, room = 0, limit * shares[0]
    for size in sizes:
        while size > room:
            run += 1
            if run == len(shares):
                return False
            room = limit * shares[run]
        room -= size
    return True


def _reads_rows_apart(step: StepGraph, layers: Layers) -> bool:
    """True when several layers read an argument by slices of their own, as they do the rows of stacked weights."""
    graph = step.graph
    for v in graph.inputs:
        slices = [graph.ops[c] for c in graph.consumers[v] if graph.ops[c].primitive in ("slice", "dynamic_slice")]
        homes = [_layers_of(graph, layers, op) for op in slices if step.batch_dims[v] is None]
        if len(homes) > 1 and len(set[int]().union(*homes)) > 1:
            return True
    return False


def _layers_of(graph: Graph, layers: Layers, op: Op) -> set[int]:
    """The layers that run an op; of one that is repeated, those of its readers."""
    found, seen, waiting = set[int](), {op.id}, [op]
    while waiting:
        op = waiting.pop()
        home = layers.of_op[op.id]
        if home is not None:
            found.add(home)
            continue
        readers = {c for r in op.results for c in graph.consumers[r]} - seen
        seen |= readers
        waiting += (graph.ops[c] for c in readers)
    return found
