"""Where a pipeline cuts a step: between the loops over layers as they are written, or through them, written out.

Written out, a loop multiplies the step by its trips; so a model that comes in enough pieces is cut between them.
With f_s the forward FLOPs of stage s, the cut between pieces is taken if

    max f <= (1 + UNEVEN) · mean f,  or  max f <= the least that stages of whole trips can have      `_is_even`

and if no argument comes in rows that several stages read: only writing out parts those (`alpa_lite.stacks`). Who writes
a model as one loop for each stage can also have it cut so, whatever the loops' FLOPs are (`by_loops`). Stages may also
have unequal shares of the FLOPs; then f_s is taken in relation to the share of stage s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, gcd

from alpa_lite.errors import BatchError, NonAdditiveError, PlanError, TraceError
from alpa_lite.graph.ir import Graph, Op
from alpa_lite.graph.phases import Phase, StepGraph
from alpa_lite.graph.wiring import wiring_of
from alpa_lite.layers import Layers, forward_loops, make_layers, op_flops
from alpa_lite.planners.planner import PlanRequest

UNEVEN = 0.15
"""By how much the largest stage of a cut between loops may exceed the mean."""

_ROUNDING = 1 + 1e-6


@dataclass(frozen=True, kw_only=True)
class Cut:
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
) -> Cut:
    """Cut the step into `count` stages, with the first of some numbers of micro-batches that works.

    Stages have about equal FLOPs, or FLOPs in proportion to `shares`, or `by_loops` equal numbers of the loops of the
    forward pass.

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
        step = request.best_step(microbatches, unroll=0)
        if (loops := len(forward_loops(step))) == 0 or loops % count:
            raise PlanError(
                f"{count} stages of equally many loops were asked for, but the forward pass has {loops} loops over "
                f'layers. Write the layers as a multiple of {count} calls of lax.scan, or cut by "flops".'
            )
        return Cut(step=step, layers=make_layers(step, count, imbalance=0.1, by_loops=True))
    if count > 1:
        kept = _between_loops(request, microbatches, count, shares)
        if kept is not None:
            return kept
    step = request.best_step(microbatches, unroll=num_pieces(shares or (1,) * count) if count > 1 else 0)
    try:
        return Cut(step=step, layers=make_layers(step, count, imbalance=0.1, shares=shares))
    except PlanError as error:
        raise PlanError(f"{count} pipeline stages were asked for. {error}") from error


def num_pieces(shares: Sequence[float]) -> int:
    """Into how many equal pieces a loop is cut, so that runs of them can have these shares, or about these."""
    if all(float(share).is_integer() for share in shares):
        return round(sum(shares)) // gcd(*map(int, shares))
    return ceil(2 * sum(shares) / min(shares))


def _between_loops(
    request: PlanRequest, microbatches: Sequence[int], count: int, shares: Sequence[float]
) -> Cut | None:
    """The cut that keeps all loops; None where it is worse than one through them."""
    try:
        step = request.best_step(microbatches, unroll=0)
        layers = make_layers(step, count, imbalance=0.1, shares=shares)
    except (NonAdditiveError, BatchError, TraceError, PlanError):
        return None  # what is wrong with it is said when it is asked for written out
    if not _is_even(step, layers, shares) or _reads_rows_apart(step, layers):
        return None
    return Cut(step=step, layers=layers)


def _is_even(step: StepGraph, layers: Layers, shares: Sequence[float]) -> bool:
    """True when writing out the loops could hardly give stages that are closer to their shares."""
    forward = [op for op in step.graph.ops if step.phases[op.id] is Phase.FORWARD]
    flops = op_flops(step)
    totals = [0.0] * layers.num_layers
    trips: list[float] = []
    for op in forward:
        totals[layers.of_op[op.id] or 0] += flops[op.id]
        wiring = wiring_of(op)
        count = int(wiring.trips) if wiring is not None and wiring.scanned else 1
        trips += [flops[op.id] / count] * count
    mean = sum(totals) / len(totals)
    if shares:
        whole = sum(totals) / sum(shares)
        return all(total <= (1 + UNEVEN) * share * whole for total, share in zip(totals, shares, strict=True))
    return max(totals) <= (1 + UNEVEN) * mean or max(totals) <= least_largest(trips, len(totals)) * _ROUNDING


def least_largest(sizes: Sequence[float], count: int) -> float:
    """The least that the largest sum of `count` consecutive runs of `sizes` can be (by bisection)."""
    low, high = max(max(sizes, default=0.0), sum(sizes) / count), sum(sizes)
    while high > low * _ROUNDING:
        middle = (low + high) / 2
        low, high = (low, middle) if _num_runs(sizes, middle) <= count else (middle, high)
    return high


def _num_runs(sizes: Sequence[float], limit: float) -> int:
    """How many consecutive runs of at most `limit` in sum there must be."""
    runs, total = 1, 0.0
    for size in sizes:
        total += size
        if total > limit:
            runs, total = runs + 1, size
    return runs


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
    home = layers.of_op[op.id]
    if home is not None:
        return {home}
    readers = (graph.ops[c] for r in op.results for c in graph.consumers[r])
    return set[int]().union(*(_layers_of(graph, layers, reader) for reader in readers))
