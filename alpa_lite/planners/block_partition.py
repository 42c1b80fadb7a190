"""Block partition: layers in a row cut into runs whose costs differ by no more than the dearest layer.

    c_i      costs, scaled so that the cheapest layer has 0 and the dearest 1; all 0 where all are alike
    start    n div k layers in each block, the rest in the last
    step     p: the dearest block, of several the last; q: the cheapest, of several the first; the block beside q
             towards p, which must not be empty, hands its nearest layer to q. Again with the same p, until that has
             given one away
    end      b_p <= b_q + 1

It is not optimal, but as even as one layer allows. Bárány and Grinberg, Block partitions of sequences (Israel J. of
Mathematics, 2015); Kim et al., torchgpipe (2020), which balances its stages so.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

from alpa_lite.errors import PlanError
from alpa_lite.inter_op.loop_cuts import PipelineCut
from alpa_lite.inter_op.plan_request import PlanRequest
from alpa_lite.inter_op.stage_costs import state_bytes
from alpa_lite.program.phases import StepGraph
from alpa_lite.step.clustering import make_layers
from alpa_lite.step.layers import Layers, natural_cut, op_flops

_ROUNDING = 1e-9

By = Literal["layer_flops", "layer_bytes"]
"""What layers cost: floating-point operations of both passes, or bytes of what lives in them."""


def block_partition(costs: Sequence[float], count: int) -> tuple[int, ...]:
    """How many of the costs, in order, each of `count` blocks holds.

    Raises `PlanError` when there are fewer costs than blocks.
    """
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
            # What goes on for long goes in circles, for sums that are equal but for rounding.
            if sums[dearest] <= min(sums) + 1 + (_ROUNDING if moves > 10 * count * len(costs) else 0):
                return tuple(b - a for a, b in pairwise(ends))
            cheapest = _cheapest(sums, ends, dearest)
            if dearest > cheapest:
                ends[cheapest + 1] += 1
                given = cheapest + 1 == dearest
            else:
                ends[cheapest] -= 1
                given = cheapest - 1 == dearest


def _cheapest(sums: Sequence[float], ends: Sequence[int], dearest: int) -> int:
    """The first of the cheapest blocks whose neighbour towards the dearest block has a layer to give."""
    for block in (i for i, cost in enumerate(sums) if cost == min(sums)):
        beside = block + 1 if block < dearest else block - 1
        if ends[beside] < ends[beside + 1]:
            return block
    raise AssertionError("The neighbour of the cheapest block that is next to the dearest one is dearer, not empty.")


def _sums(costs: Sequence[float], ends: Sequence[int]) -> list[float]:
    return [sum(costs[a:b]) for a, b in pairwise(ends)]


def cut_into_blocks(request: PlanRequest, microbatches: Sequence[int], count: int, by: By) -> PipelineCut:
    """Cut a step into `count` stages of whole layers by block partition; see `cut_into_stages`."""
    natural = natural_cut(request.best_step(microbatches, loop_parts=0), (count,))
    step = request.best_step(microbatches, loop_parts=natural.loop_parts)
    layers = make_layers(step, natural.num_layers, imbalance=natural.imbalance, equal=natural.equal)
    costs = state_bytes(step, layers).tolist() if by == "layer_bytes" else _flops(step, layers)
    sizes = block_partition(costs, count)
    block = [number for number, size in enumerate(sizes) for _ in range(size)]
    merged = Layers(
        num_layers=count,
        of_op=tuple(None if layer is None else block[layer] for layer in layers.of_op),
        of_input=tuple(block[layer] for layer in layers.of_input),
    )
    return PipelineCut(step=step, layers=merged)


def _flops(step: StepGraph, layers: Layers) -> list[float]:
    """Of each layer in both passes."""
    totals = [0.0] * layers.num_layers
    for op, flops, layer in zip(step.graph.ops, op_flops(step), layers.of_op, strict=True):
        if layer is not None and step.phases[op.id].in_loop:
            totals[layer] += flops
    return totals
