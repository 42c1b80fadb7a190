"""The places at which a pipeline cuts a step: between loops over layers, parts of these, or whole layers.

With f_s the forward FLOPs of stage s and w_s its share of them, a cut is taken if

    max f / w <= (1 + UNEVEN) · Σ f / Σ w,  or  max f / w <= the least that stages of whole trips can have   `is_even`

and if no argument comes in rows that several stages read: only loops that are cut have their stacked arrays cut
(`alpa_lite.trace.passes.split_stacked`).
Else loops are cut into more parts, since each multiplies the step: as many as stages, twice as many, and so on. A model
that is written as one loop for each stage can also be cut so, whatever the loops' FLOPs are (`by_loops`).

Block partition cuts a row of whole layers into runs whose costs differ by no more than the dearest layer:

    c_i      costs, scaled so that the cheapest layer has 0 and the dearest 1; all 0 where all are alike
    start    n div k layers in each block, the rest in the last
    step     p: the dearest block, of several the last; q: the cheapest, of several the first; the block next to q
             towards p, which must not be empty, hands its nearest layer to q. Again with the same p, until that has
             given one away
    end      b_p <= b_q + 1

It is not optimal, but as even as one layer allows. Bárány and Grinberg, Block partitions of sequences (Israel J. of
Mathematics, 2015); Kim et al., torchgpipe (2020), which balances its stages so.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from alpa_lite.errors import BatchError, NonAdditiveError, PlanError, TraceError
from alpa_lite.inter_op.plan_request import PlanRequest
from alpa_lite.program.ir import MAX_TRIPS, Graph, Op, parts_of, wiring_of
from alpa_lite.program.phases import Phase, StepGraph
from alpa_lite.step.clustering import make_layers
from alpa_lite.step.layers import Layers, forward_loops, natural_cut, op_flops

IMBALANCE = 0.1
"""The relative excess over its share that a stage may have for the sake of smaller cuts."""

UNEVEN = 0.15
"""The relative excess over its share that the largest stage of a cut between loops may have."""

_ROUNDING = 1 + 1e-6


@dataclass(frozen=True, kw_only=True)
class PipelineCut:
    """A step and its layers, each of which is a stage."""

    step: StepGraph
    layers: Layers


@dataclass(frozen=True, kw_only=True)
class StageBalance:
    """The number of stages, and the quantity that they share.

    Attributes:
        count: number of stages.
        by_loops: whether stages have equal numbers of the loops of the forward pass, instead of FLOPs.
        shares: relative FLOPs of each stage; () for equal ones.
    """

    count: int
    by_loops: bool = False
    shares: Sequence[float] = ()

    def check(self) -> None:
        """Raise `PlanError` unless there are as many positive shares as stages, and loops are not shared."""
        if self.shares and (len(self.shares) != self.count or min(self.shares) <= 0 or self.by_loops):
            raise PlanError(
                f"The shares {tuple(self.shares)} were asked for, but there are {self.count} stages"
                + (" of equally many loops" if self.by_loops else "")
                + f'. Give {self.count} numbers above 0, and cut by "flops".'
            )


def cut_into_stages(
    request: PlanRequest, microbatches: Sequence[int], balance: StageBalance, *, written_out: bool = False
) -> PipelineCut:
    """Cut the step into stages, with the first of some numbers of micro-batches that works.

    `written_out`: cut loops into single trips, so that the backward pass of a trip can be split.

    Raises:
        PlanError: the model is too short, has other loops, or there are not as many positive shares as stages.
        AlpaLiteError: tracing fails at a number of micro-batches that the user gave.
    """
    balance.check()
    count, by_loops = balance.count, balance.by_loops
    if by_loops and count > 1:
        step = request.best_step(microbatches, loop_parts=0)
        if (loops := len(forward_loops(step))) == 0 or loops % count:
            raise PlanError(
                f"{count} stages of equally many loops were asked for, but the forward pass has {loops} loops over "
                f'layers. Write the layers as a multiple of {count} calls of lax.scan, or cut by "flops".'
            )
        return PipelineCut(step=step, layers=make_layers(step, count, imbalance=IMBALANCE, equal="loops"))
    if count == 1:
        step = request.best_step(microbatches, loop_parts=0)
        return PipelineCut(step=step, layers=make_layers(step, 1))
    shares = balance.shares or (1.0,) * count
    if written_out:
        # No loop that is cut has more trips than this, so that each part is one trip.
        step = request.best_step(microbatches, loop_parts=MAX_TRIPS)
        return PipelineCut(step=step, layers=make_layers(step, count, imbalance=IMBALANCE, shares=shares))
    # The loops as they are written come first: cutting them makes the step larger, and its arguments rows.
    num_parts = count
    try:
        step = request.best_step(microbatches, loop_parts=0)
        layers = make_layers(step, count, imbalance=IMBALANCE, shares=shares)
        if is_even(step, layers, shares) and not _reads_rows_apart(step, layers):
            return PipelineCut(step=step, layers=layers)
        num_parts = parts_that_may_do(step, count, shares)
    except (NonAdditiveError, BatchError, TraceError, PlanError):
        pass  # tracing it in parts raises the same problem, below
    try:
        return _in_parts(request, microbatches, shares, num_parts)
    except PlanError as error:
        raise PlanError(f"{count} pipeline stages were asked for. {error}") from error


def _in_parts(
    request: PlanRequest, microbatches: Sequence[int], shares: Sequence[float], num_parts: int
) -> PipelineCut:
    """Cut loops into `num_parts` parts, or twice as many, and so on until stages are even; at most into trips."""
    while True:
        step = request.best_step(microbatches, loop_parts=num_parts)
        layers = make_layers(step, len(shares), imbalance=IMBALANCE, shares=shares)
        if num_parts >= MAX_TRIPS or is_even(step, layers, shares):
            return PipelineCut(step=step, layers=layers)
        num_parts = min(2 * num_parts, MAX_TRIPS)


def is_even(step: StepGraph, layers: Layers, shares: Sequence[float] = ()) -> bool:
    """Return True if more parts of loops could hardly bring stages closer to their shares (by default equal ones)."""
    shares = shares or (1.0,) * layers.num_layers
    loops, totals = _trips(step), [0.0] * layers.num_layers
    for op, (flops, count) in loops.items():
        totals[layers.of_op[op] or 0] += flops * count
    if all(count == 1 for _, count in loops.values()):
        return True  # there is nothing to cut through
    return max(total / share for total, share in zip(totals, shares, strict=True)) <= _allowed(loops, shares)


def parts_that_may_do(step: StepGraph, num_parts: int, shares: Sequence[float]) -> int:
    """Return the first number of parts of loops with which a cut can be even: `num_parts`, or twice as many, and so on.

    `step` has its loops whole.
    """
    # Each number of parts that is tried takes a trace; this estimate skips those that cannot succeed.
    loops = _trips(step)
    allowed = _allowed(loops, shares) * _ROUNDING
    while num_parts < MAX_TRIPS:
        sizes = [f * (b - a) for f, count in loops.values() for a, b in parts_of(count, num_parts)]
        if least_largest(sizes, shares) <= allowed:
            break
        num_parts = min(2 * num_parts, MAX_TRIPS)
    return num_parts


def _trips(step: StepGraph) -> dict[int, tuple[float, int]]:
    """Return for each op of the forward pass the FLOPs of a trip, and the number of trips that can be separated."""
    flops, found = op_flops(step), dict[int, tuple[float, int]]()
    for op in step.graph.ops:
        if step.phases[op.id] is Phase.FORWARD:
            wiring = wiring_of(op)
            # Only loops that scan arrays have layers to separate, and not those with very many trips.
            cuttable = wiring is not None and wiring.scanned and wiring.trips <= MAX_TRIPS
            count = int(wiring.trips) if wiring is not None and cuttable else 1
            found[op.id] = flops[op.id] / count, count
    return found


def _allowed(loops: Mapping[int, tuple[float, int]], shares: Sequence[float]) -> float:
    """Return how many FLOPs per share the largest stage may have."""
    trips = [flops for flops, count in loops.values() for _ in range(count)]
    return max((1 + UNEVEN) * sum(trips) / sum(shares), least_largest(trips, shares) * _ROUNDING)


def least_largest(sizes: Sequence[float], shares: Sequence[float]) -> float:
    """Return the least x for which `sizes` form consecutive runs, one per share, of sums of at most x · share."""
    # By bisection; the lower end is exact where the sizes divide evenly, which is the usual case.
    low, high = sum(sizes) / sum(shares), sum(sizes) / shares[0]
    if _fit(sizes, shares, low * _ROUNDING):
        return low
    while high > low * _ROUNDING:
        middle = (low + high) / 2
        low, high = (low, middle) if _fit(sizes, shares, middle) else (middle, high)
    return high


def _fit(sizes: Sequence[float], shares: Sequence[float], limit: float) -> bool:
    """Return True if runs of at most limit · share hold all sizes."""
    # Filling the runs in turn is optimal: each ends as late as it can.
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
    """Return True if several layers read slices of one argument, as they do with the rows of stacked weights."""
    graph = step.graph
    for v in graph.inputs:
        slices = [graph.ops[c] for c in graph.consumers[v] if graph.ops[c].primitive in ("slice", "dynamic_slice")]
        homes = [_layers_of(graph, layers, op) for op in slices if step.batch_dims[v] is None]
        # Several slices that one layer reads stay together.
        if len(homes) > 1 and len(set[int]().union(*homes)) > 1:
            return True
    return False


def _layers_of(graph: Graph, layers: Layers, op: Op) -> set[int]:
    """Return the layers that run an op; for an op that is repeated where it is read, the layers of its readers."""
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


_BLOCK_ROUNDING = 1e-9

By = Literal["layer_flops", "layer_bytes"]
"""The cost of a layer: floating-point operations of both passes, or bytes of the arguments that live in it."""


def block_partition(costs: Sequence[float], count: int) -> tuple[int, ...]:
    """Return how many costs, in order, each of `count` blocks holds. Raises `PlanError` for fewer costs than blocks."""
    if not 0 < count <= len(costs):
        raise PlanError(f"{len(costs)} layers cannot be cut into {count} blocks. Ask for 1 to {len(costs)}.")
    low, high = min(costs), max(costs)
    scaled = [(cost - low) / (high - low) if high > low else 0.0 for cost in costs]
    ends = [0, *(i * (len(costs) // count) for i in range(1, count)), len(costs)]
    moves = 0
    while True:
        sums = _sums(scaled, ends)
        dearest = max(range(count), key=lambda block: (sums[block], block))
        given = False
        while not given:
            sums, moves = _sums(scaled, ends), moves + 1
            # With rounding the moves may go in circles between equal sums. After so many the bound is relaxed.
            # After scaling the dearest layer costs 1: moving one more could not make the blocks more even.
            if sums[dearest] <= min(sums) + 1 + (_BLOCK_ROUNDING if moves > 10 * count * len(costs) else 0):
                return tuple(b - a for a, b in pairwise(ends))
            cheapest = _cheapest(sums, ends, dearest)
            if dearest > cheapest:
                # The block on the right hands over its first layer.
                ends[cheapest + 1] += 1
                given = cheapest + 1 == dearest
            else:
                # The block on the left hands over its last layer.
                ends[cheapest] -= 1
                given = cheapest - 1 == dearest


def _cheapest(sums: Sequence[float], ends: Sequence[int], dearest: int) -> int:
    """Return the first of the cheapest blocks whose neighbour towards the dearest block has a layer to give."""
    for block in (i for i, cost in enumerate(sums) if cost == min(sums)):
        beside = block + 1 if block < dearest else block - 1
        if ends[beside] < ends[beside + 1]:
            return block
    raise AssertionError("The neighbour of the cheapest block that is next to the dearest one is dearer, not empty.")


def _sums(costs: Sequence[float], ends: Sequence[int]) -> list[float]:
    return [sum(costs[a:b]) for a, b in pairwise(ends)]


def cut_into_blocks(request: PlanRequest, microbatches: Sequence[int], count: int, by: By) -> PipelineCut:
    """Cut a step into `count` stages of whole layers by block partition; see `cut_into_stages`."""
    cut = natural_layers(request, microbatches, (count,))
    costs = state_bytes(cut.step, cut.layers).tolist() if by == "layer_bytes" else _flops(cut.step, cut.layers)
    return merged_layers(cut, block_partition(costs, count))


def natural_layers(request: PlanRequest, microbatches: Sequence[int], stages: Collection[int]) -> PipelineCut:
    """Return the step in layers of its own structure (`natural_cut`), of which pipelines have so many stages."""
    # The natural layers depend on the step with whole loops, which are then cut into as many parts.
    natural = natural_cut(request.best_step(microbatches, loop_parts=0), stages)
    step = request.best_step(microbatches, loop_parts=natural.loop_parts)
    layers = make_layers(step, natural.num_layers, imbalance=natural.imbalance, equal=natural.equal)
    return PipelineCut(step=step, layers=layers)


def merged_layers(cut: PipelineCut, sizes: Sequence[int]) -> PipelineCut:
    """Return runs of so many layers each as one layer. Raises `PlanError` unless all layers are in one."""
    layers = cut.layers
    if sum(sizes) != layers.num_layers or min(sizes) < 1:
        raise PlanError(
            f"Stages of {', '.join(map(str, sizes))} layers were asked for, but the step has {layers.num_layers}. Give "
            f"numbers of at least 1 whose sum is {layers.num_layers}."
        )
    block = [number for number, size in enumerate(sizes) for _ in range(size)]
    merged = Layers(
        num_layers=len(sizes),
        of_op=tuple(None if layer is None else block[layer] for layer in layers.of_op),
        of_input=tuple(block[layer] for layer in layers.of_input),
    )
    return PipelineCut(step=cut.step, layers=merged)


def state_bytes(step: StepGraph, layers: Layers) -> NDArray[np.float64]:
    """[layers]: bytes of the arguments without a batch that live in each layer, over all devices."""
    totals = np.zeros(layers.num_layers)
    for v, home in zip(step.graph.inputs, layers.of_input, strict=True):
        if step.batch_dims[v] is None:
            totals[home] += step.graph.values[v].bytes
    return totals


def _flops(step: StepGraph, layers: Layers) -> list[float]:
    """Return the FLOPs of each layer in both passes."""
    totals = [0.0] * layers.num_layers
    for op, flops, layer in zip(step.graph.ops, op_flops(step), layers.of_op, strict=True):
        if layer is not None and step.phases[op.id].in_loop:
            totals[layer] += flops
    return totals
