"""Repeated layers of the forward pass that a program has written out one after the other, found by structure.

Names play no part, nor does the order of equations within a layer.

    anchors     ops of one class that read results of the same classes, each dependent on the one before     `_anchored`
    segments    what an anchor needs and the one before it does not; of an op that could be in several, the last one
                that needs it, unless fewer bytes would lie between segments if it ran as soon as it can    `_segmented`
    rows        runs of layers of p segments each, with the least p for which segment i has the ops of
                segment i + p                                                                         `equal_runs`

The first layer of a row may have something before it, such as the embedding of tokens. Of all anchors those are taken
whose rows do most of the work, and of nearly equal ones those with the fewest bytes between segments. What lies between
rows is searched again, since a model may have rows of several kinds.

Layers of stages are whole repeated layers, and layers of what lies before, between and after their rows (`row_cut`):

    rows        each layer of the cut is n layers of a row, for an n that divides the length of every row
    beside      what is next to rows is as many layers as its work is times that of an average one, where an op that is
                heavier counts for one; with less than half of it, it goes with the layer before it

About `MAX_LAYERS` layers are enough, unless finer ones make more even stages. Where whole layers make no even stages,
as eight of twelve, but cuts between their ops would, layers are better cut anywhere.

This only proposes where to cut a step. Whether layers are equal, with their backward pass and update, is decided anew
(`alpa_lite.intra_op.stage.StageView.signature`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice, pairwise
from math import gcd

import numpy as np
from numpy.typing import NDArray

from alpa_lite.program.ir import Graph
from alpa_lite.program.memo import memoized
from alpa_lite.program.phases import Phase, StepGraph
from alpa_lite.rules.op_info import flops_of, free_values, op_class

LEAST_WEIGHT = 0.1
"""The least share of the FLOPs of the forward pass that makes a row of layers worth cutting by."""

NEARLY = 0.99
"""The share of the FLOPs in the best rows above which other rows are as good."""

LONGEST_PERIOD = 16
"""The maximum number of segments per layer."""

TRIED = 6
"""The number of groups of anchors that are tried, those first across which the fewest bytes flow."""

#: The number of layers below which layers may be smaller than usual, and the number above which they need not be.
FEW_LAYERS = 8
MAX_LAYERS = 16

MOST_REPEATED = 32
"""The maximum number of repeated layers that a cut takes one by one: the stage search takes quadratic time."""

LEAST_IN_ROWS = 0.5
"""The least share of the FLOPs of the forward pass in rows by which layers are cut."""

MOST_UNEVEN = 0.15
"""The excess of the heaviest stage over its share of FLOPs, or of trips of loops, up to which stages are even."""

AS_EVEN = 0.02
"""The excess of the heaviest stage over that of finer layers up to which coarser layers are as good."""

MOST_NUMBERS_UNEVEN = 0.25
"""The share of the numbers of stages that may not have even stages."""

LEAST_BLOCK = 1e-5
"""The weight of a block that makes no layer, in layers: sums of weights have to ascend."""

# A margin for sums in different orders.
_ROUNDING = 1 + 1e-9

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Repetition:
    """The repeated layers of a forward pass.

    Attributes:
        block_of: block of each forward op, by op id. Blocks are numbered in the order of the data flow: each repeated
            layer is a block, and each op outside of them.
        rows: blocks of each row of equal layers.
    """

    block_of: Mapping[int, int]
    rows: tuple[range, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Flow:
    """The data flow between some ops, which are numbered in program order.

    Attributes:
        reads: the ops among these whose results each op reads.
        readers: the ops among these that read the results of each op.
        sizes: bytes of the results of each op; 0 for values that are computed wherever they are read.
        kinds: class of each op.
        weights: FLOPs of each op, and one more.
    """

    reads: Sequence[Sequence[int]]
    readers: Sequence[Sequence[int]]
    sizes: Sequence[int]
    kinds: Sequence[object]
    weights: Sequence[float]

    @staticmethod
    def of(graph: Graph, ops: Sequence[int], weights: Mapping[int, float]) -> _Flow:
        """Return the flow between ops, given in program order."""
        number, free = {op: i for i, op in enumerate(ops)}, free_values(graph)
        reads: list[list[int]] = []
        readers: list[list[int]] = [[] for _ in ops]
        for i, op in enumerate(ops):
            made_by = {graph.producer[v] for v in graph.ops[op].operands}
            reads.append([number[maker] for maker in made_by if maker is not None and maker in number])
            for maker in reads[-1]:
                readers[maker].append(i)
        return _Flow(
            reads=reads,
            readers=readers,
            sizes=[sum(graph.values[r].bytes for r in graph.ops[op].results if r not in free) for op in ops],
            kinds=[op_class(graph, op).price for op in ops],
            weights=[weights[op] for op in ops],
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Rows:
    """The rows of equal layers between some anchors.

    Attributes:
        segment_of: segment of each op; the last one is what no anchor needs.
        layers: (first segment, segments per layer, number of layers) of each row, in order.
        weight: FLOPs of all rows.
        bytes: bytes between segments.
    """

    segment_of: Sequence[int]
    layers: Sequence[tuple[int, int, int]]
    weight: float
    bytes: int


@memoized
def repetition(step: StepGraph) -> Repetition:
    """Return the repeated layers of the forward pass of a step."""
    graph = step.graph
    forward = [op.id for op in graph.ops if step.phases[op.id] is Phase.FORWARD]
    weights = {op: flops_of(graph, graph.ops[op]) + 1.0 for op in forward}
    block_of: dict[int, int] = {}
    rows: list[range] = []
    number = 0
    for layers in _searched(graph, forward, weights, LEAST_WEIGHT * sum(weights.values())):
        blocks = layers if len(layers) > 1 else [[op] for op in layers[0]]
        if len(layers) > 1:
            rows.append(range(number, number + len(layers)))
        for block in blocks:
            block_of.update(dict.fromkeys(block, number))
            number += 1
    return Repetition(block_of=block_of, rows=tuple(rows))


def _searched(
    graph: Graph, ops: Sequence[int], weights: Mapping[int, float], least: float
) -> Iterator[list[list[int]]]:
    """Yield the ops of each row, layer by layer, and between rows all ops as one layer, in the order of the data flow.

    Rows and parts between them that weigh less than `least` are not searched for.
    """
    if sum(weights[op] for op in ops) < least:
        yield [list(ops)]
        return
    flow = _Flow.of(graph, ops, weights)
    found = [rows for anchors in _anchored(flow, least) if (rows := _rows(flow, anchors)) and rows.weight >= least]
    if not found:
        yield [list(ops)]
        return
    heaviest = max(rows.weight for rows in found)
    # An equally good cut of all layers but one is not as good.
    best = min((rows for rows in found if rows.weight > NEARLY * heaviest), key=lambda rows: rows.bytes)
    segments: list[list[int]] = [[] for _ in range(max(best.segment_of) + 1)]
    for op, segment in zip(ops, best.segment_of, strict=True):
        segments[segment].append(op)
    end = 0
    for first, length, number in best.layers:
        yield from _between(graph, segments[end:first], weights, least)
        end = first + length * number
        yield [sorted(chain(*segments[i : i + length])) for i in range(first, end, length)]
    yield from _between(graph, segments[end:], weights, least)


def _between(
    graph: Graph, segments: Sequence[Sequence[int]], weights: Mapping[int, float], least: float
) -> Iterator[list[list[int]]]:
    """Yield the rows in some segments between rows."""
    if ops := sorted(chain(*segments)):
        yield from _searched(graph, ops, weights, least)


def _anchored(flow: _Flow, least: float) -> Iterator[list[int]]:
    """Yield ops that may be the last ones of equal layers or of their parts, with at least some FLOPs in between."""
    alike: dict[object, list[int]] = {}
    # By class alone all layers are found, of which the first one reads something else; but others of the class may lie
    # between.
    for i, kind in enumerate(flow.kinds):
        alike.setdefault(kind, []).append(i)
        alike.setdefault((kind, frozenset([flow.kinds[r] for r in flow.reads[i]])), []).append(i)
    # The bytes of values that are made up to an op, and read after it.
    across = [0] * len(flow.kinds)
    for i, readers in enumerate(flow.readers):
        if readers:
            across[i] += flow.sizes[i]
            across[readers[-1]] -= flow.sizes[i]
    across, ends = list(accumulate(across)), list(accumulate(flow.weights))
    spans = {tuple(group): ends[group[-1]] - ends[group[0]] for group in alike.values()}
    long_ones = [group for group, span in spans.items() if span >= least]

    def ranked(group: Sequence[int]) -> tuple[bool, int]:
        # First those that may cut most of the pass.
        return 2 * spans[tuple(group)] < ends[-1], sorted([across[i] for i in group])[len(group) // 2]

    chains = (_chained(flow, group) for group in sorted(long_ones, key=ranked))
    yield from islice((anchors for anchors in chains if len(anchors) > 1), TRIED)


def _chained(flow: _Flow, group: Sequence[int]) -> list[int]:
    """Return the ops of a group that depend on the one that is returned before."""
    may, kept = frozenset(group), dict[int, None]()
    # The number of ops returned on the longest path to each op.
    depth = [0] * len(flow.kinds)
    for i, reads in enumerate(flow.reads):
        depth[i] = max([depth[r] + (r in kept) for r in reads], default=0)
        if i in may and depth[i] == len(kept):
            kept[i] = None
    return list(kept)


def _segmented(flow: _Flow, anchors: Sequence[int]) -> list[int]:
    """Return the segment of each op: that of the first anchor for what it needs, and one more for the others."""
    place = {anchor: number for number, anchor in enumerate(anchors)}
    # The first segment that needs each op, if an anchor does; what others read may be for the backward pass alone.
    latest: list[int | None] = [None] * len(flow.kinds)
    for i in range(len(flow.kinds) - 1, -1, -1):
        limits = [limit for c in flow.readers[i] if (limit := latest[c]) is not None]
        latest[i] = place.get(i, min(limits, default=None))
    segment = dict(place)
    for i, reads in enumerate(flow.reads):
        made = [r for r in reads if r in segment]
        if not made or i in place:
            continue
        earliest, limit = max([segment[r] + (r in place) for r in made]), latest[i]
        if limit is not None and earliest < limit:
            # A value that another op reads then is at hand.
            held = [r for r in made if all(c == i or (latest[c] or 0) < limit for c in flow.readers[r])]
            earliest = earliest if flow.sizes[i] < sum([flow.sizes[r] for r in held]) else limit
        segment[i] = earliest
    # Masks, keys and the like depend on no layer, and go with the first one that reads them.
    for i in range(len(flow.kinds) - 1, -1, -1):
        if i not in segment:
            segment[i] = min([segment[c] for c in flow.readers[i]], default=0)
    return [segment[i] for i in range(len(flow.kinds))]


def _rows(flow: _Flow, anchors: Sequence[int]) -> _Rows | None:
    """Return the rows of equal layers between some anchors; None if there are none."""
    segment_of = _segmented(flow, anchors)
    kinds: list[Counter[object]] = [Counter() for _ in range(len(anchors) + 1)]
    weights = [0.0] * len(kinds)
    for segment, kind, weight in zip(segment_of, flow.kinds, flow.weights, strict=True):
        kinds[segment][kind] += 1
        weights[segment] += weight
    # What follows the last anchor is no layer.
    layers = sorted(equal_runs(kinds[:-1], weights))
    if not layers:
        return None
    layer_of = list(range(len(kinds)))
    for first, length, number in layers:
        for i in range(length * number):
            layer_of[first + i] = first + i // length * length
    across = 0
    for i, segment in enumerate(segment_of):
        across += flow.sizes[i] * len({layer_of[segment_of[c]] for c in flow.readers[i]} - {layer_of[segment]})
    weight = sum(number * sum(weights[first + length : first + 2 * length]) for first, length, number in layers)
    return _Rows(segment_of=segment_of, layers=layers, weight=weight, bytes=across)


def equal_runs(kinds: Sequence[Counter[object]], weights: Sequence[float]) -> Iterator[tuple[int, int, int]]:
    """Yield runs of equal layers without a common segment, heaviest first: (first, segments per layer, layers)."""
    numbers: dict[object, int] = {}
    names = [numbers.setdefault(frozenset(each.items()), len(numbers)) for each in kinds]
    waiting = [(0, len(kinds))]
    while waiting:
        start, stop = waiting.pop()
        best, most = (start, 0, 0), 0.0
        for length in range(1, min(LONGEST_PERIOD, (stop - start) // 2) + 1):
            begin = start
            while begin + length < stop:
                end = begin
                while end + length < stop and names[end] == names[end + length]:
                    end += 1
                if end == begin and _has_more(kinds, weights, begin, begin + length):
                    # The first segment has something before it; a run may follow.
                    end += 1
                    while end + length < stop and names[end] == names[end + length]:
                        end += 1
                number = (end - begin) // length + 1 if end > begin else 0
                weight = number * sum(weights[begin + length : begin + 2 * length])
                if number > 1 and weight > most * _ROUNDING:
                    best, most = (begin, length, number), weight
                begin = end if end > begin else begin + 1
        if most:
            yield best
            first, length, number = best
            waiting += [(start, first), (first + length * number, stop)]


def _has_more(kinds: Sequence[Counter[object]], weights: Sequence[float], first: int, second: int) -> bool:
    """Return True if a segment runs the ops of another one and others, which are not most of it."""
    return weights[first] <= 2 * weights[second] and kinds[first] >= kinds[second]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowCut:
    """A cut into whole repeated layers, and layers of what is beside them.

    Attributes:
        weights: [blocks] the part of a layer that each block of the repetition is.
        flops: [layers] FLOPs of each layer, in order.
        op_flops: [ops] FLOPs of each op of the forward pass, in order.
        num_repeated: the number of layers in rows.
    """

    weights: FloatArray
    flops: FloatArray
    op_flops: FloatArray
    num_repeated: int

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.flops)

    def heaviest(self, count: int) -> float:
        """Return the least FLOPs that the heaviest of `count` runs of layers can have; infinite for fewer layers."""
        return _heaviest(self.flops, count)

    def share(self, count: int) -> float:
        """Return the least FLOPs that the heaviest of `count` stages can have, cut between any ops."""
        return _heaviest(self.op_flops, count)


def _heaviest(flops: FloatArray, count: int) -> float:
    """Return the least sum that the largest of `count` runs of some numbers can have; infinite for fewer numbers."""
    if count > len(flops):
        return np.inf
    ends = np.concatenate([[0.0], np.cumsum(flops)])
    low, high = max(float(flops.max()), float(ends[-1]) / count), float(ends[-1])
    while high > low * _ROUNDING:
        middle = (low + high) / 2
        low, high = (low, middle) if _fit(ends, count, middle) else (middle, high)
    return high


def _fit(ends: FloatArray, count: int, limit: float) -> bool:
    """Return True if `count` runs of at most `limit` hold all numbers, given their cumulative sums."""
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
    op_flops = np.array([flops_of(graph, graph.ops[op]) for op in sorted(repeated.block_of)])

    def cut(together: int) -> RowCut:
        weights, layers = _layers(flops, rows, together, together * in_rows / sum(lengths))
        number = sum(lengths) // together
        return RowCut(weights=weights, flops=np.array(layers), op_flops=op_flops, num_repeated=number)

    return tuple(cut(n) for n in range(gcd(*lengths), 0, -1) if gcd(*lengths) % n == 0)


def _layers(flops: FloatArray, rows: Sequence[range], together: int, average: float) -> tuple[FloatArray, list[float]]:
    """Return the weights of blocks and the FLOPs of layers for so many repeated layers in each, of average FLOPs."""
    weights, layers, waiting = np.full_like(flops, LEAST_BLOCK), list[float](), 0.0
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
