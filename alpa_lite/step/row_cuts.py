"""Cuts of a forward pass into whole repeated layers, and layers of what lies before, between and after their rows.

    rows        each layer of the cut is n layers of a row, for an n that divides the length of every row
    beside      what is next to rows is as many layers as its work is times that of an average one, where an op that is
                heavier counts for one; with less than half of it, it goes with the layer before it

About `MAX_LAYERS` layers are enough, unless finer ones make more even stages, as where the head of a language model
weighs as much as three of its layers. Where no cut makes even stages, as eight of twelve layers, layers are better cut
anywhere (`row_cut`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd

import numpy as np
from numpy.typing import NDArray

from alpa_lite.program.ir import Graph
from alpa_lite.program.memo import memoized
from alpa_lite.program.phases import StepGraph
from alpa_lite.rules.op_info import flops_of
from alpa_lite.step.repetition import repetition

#: The number of layers below which layers may be smaller than usual, and the number above which they need not be.
FEW_LAYERS = 8
MAX_LAYERS = 16

MOST_REPEATED = 32
"""The maximum number of repeated layers that a cut takes one by one: the stage search takes quadratic time."""

LEAST_IN_ROWS = 0.5
"""The least share of the FLOPs of the forward pass in rows by which layers are cut."""

MOST_UNEVEN = 0.15
"""The excess of the heaviest stage over its share of the FLOPs up to which stages are even."""

AS_EVEN = 0.02
"""The excess of the heaviest stage over that of finer layers up to which coarser layers are as good."""

MOST_NUMBERS_UNEVEN = 0.25
"""The share of the numbers of stages that may not have even stages."""

# Blocks that make no layer weigh something, so that sums ascend.
_LEAST_WEIGHT = 1e-5

# A margin for sums in different orders.
_ROUNDING = 1 + 1e-9

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowCut:
    """A cut into whole repeated layers, and layers of what is beside them.

    Attributes:
        weights: [blocks] the part of a layer that each block of the repetition is.
        flops: [layers] FLOPs of each layer, in order.
        heaviest_op: the most FLOPs of an op.
        num_repeated: the number of layers in rows.
    """

    weights: FloatArray
    flops: FloatArray
    heaviest_op: float
    num_repeated: int

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.flops)

    def heaviest(self, count: int) -> float:
        """Return the least FLOPs that the heaviest of `count` runs of layers can have; infinite for fewer layers."""
        if count > self.num_layers:
            return np.inf
        ends = np.concatenate([[0.0], np.cumsum(self.flops)])
        # The heaviest run begins and ends at some layers: of their sums, the least into which all layers fit.
        sums = np.unique(ends[None, :] - ends[:, None])
        sums = sums[sums * _ROUNDING >= self.flops.max()]
        low, high = 0, len(sums) - 1
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if _fit(ends, count, float(sums[middle])) else (middle + 1, high)
        return float(sums[low])

    def share(self, count: int) -> float:
        """Return the FLOPs that the heaviest of `count` stages has at least, wherever they are cut."""
        return max(float(self.flops.sum()) / count, self.heaviest_op)


def _fit(ends: FloatArray, count: int, limit: float) -> bool:
    """Return True if `count` runs of at most `limit` hold all layers, by their cumulative FLOPs."""
    place = 0
    for _ in range(count):
        place = int(np.searchsorted(ends, ends[place] + limit * _ROUNDING, side="right")) - 1
    return place == len(ends) - 1


def row_cut(step: StepGraph, stages: Collection[int]) -> RowCut | None:
    """Return the cut whose layers make the most even stages, in any of these numbers; None to cut layers anywhere."""
    cuts = [cut for cut in row_cuts(step) if FEW_LAYERS <= cut.num_repeated <= MOST_REPEATED]
    if not cuts:
        return None
    few = [cut for cut in cuts if cut.num_repeated <= MAX_LAYERS]
    numbers = [count for count in stages if 1 < count <= max(MAX_LAYERS, min(stages))]
    finest = cuts[-1]
    uneven = sum(finest.heaviest(count) > (1 + MOST_UNEVEN) * finest.share(count) for count in numbers)
    if uneven > MOST_NUMBERS_UNEVEN * len(numbers):
        return None

    def is_as_even(cut: RowCut) -> bool:
        return all(cut.heaviest(count) <= (1 + AS_EVEN) * finest.heaviest(count) for count in numbers)

    return next(cut for cut in cuts[max(0, len(few) - 1) :] if is_as_even(cut))


@memoized
def row_cuts(step: StepGraph) -> tuple[RowCut, ...]:
    """Return the cuts of a step into whole repeated layers, the coarsest first."""
    repeated = repetition(step)
    if not repeated.rows:
        return ()
    graph = step.graph
    flops = flops_of_blocks(graph, repeated.block_of)
    rows = sorted(repeated.rows, key=lambda row: row.start)
    lengths = [len(row) for row in rows]
    in_rows = sum(float(flops[row.start : row.stop].sum()) for row in rows)
    if in_rows < LEAST_IN_ROWS * float(flops.sum()):
        return ()
    heaviest_op = max(flops_of(graph, graph.ops[op]) for op in repeated.block_of)

    def cut(together: int) -> RowCut:
        weights, layers = _layers(flops, rows, together, together * in_rows / sum(lengths))
        number = sum(lengths) // together
        return RowCut(weights=weights, flops=np.array(layers), heaviest_op=heaviest_op, num_repeated=number)

    return tuple(cut(n) for n in range(gcd(*lengths), 0, -1) if gcd(*lengths) % n == 0)


def _layers(flops: FloatArray, rows: Sequence[range], together: int, average: float) -> tuple[FloatArray, list[float]]:
    """Return the weights of blocks and the FLOPs of layers for so many repeated layers in each, of average FLOPs."""
    weights, layers, waiting = np.full_like(flops, _LEAST_WEIGHT), list[float](), 0.0
    end = range(len(flops), len(flops))
    for before, row in pairwise([range(0), *rows, end]):
        beside = flops[before.stop : row.start]
        # What cannot be cut is no reason for further layers.
        parts = np.minimum(beside, average)
        count = round(float(parts.sum()) / average)
        if count:
            weights[before.stop : row.start] += parts * (count / parts.sum())
            layers += [float(beside.sum()) / count] * count
        elif layers:
            layers[-1] += float(beside.sum())
        else:
            waiting = float(beside.sum())
        for first in row[::together]:
            weights[first : first + together] += 1 / together
            layers.append(float(flops[first : first + together].sum()) + waiting)
            waiting = 0.0
    return weights, layers


def flops_of_blocks(graph: Graph, block_of: Mapping[int, int]) -> FloatArray:
    """Return the FLOPs of each block by the blocks of ops, plus one per op so that no block weighs nothing."""
    flops = np.zeros(max(block_of.values()) + 1)
    for op, block in block_of.items():
        flops[block] += flops_of(graph, graph.ops[op]) + 1.0
    return flops
