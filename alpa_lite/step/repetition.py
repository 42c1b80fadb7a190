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

This only proposes where to cut a step. Whether layers are equal, with their backward pass and update, is decided anew
(`alpa_lite.intra_op.stage.StageView.signature`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, islice

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

_ROUNDING = 1 + 1e-9


@dataclass(frozen=True, kw_only=True)
class Repetition:
    """The repeated layers of a forward pass.

    Attributes:
        block_of: block of each forward op, by op id. Blocks are numbered in the order of the data flow: each repeated
            layer is a block, and each op outside of them.
        rows: blocks of each row of equal layers.
    """

    block_of: Mapping[int, int]
    rows: tuple[range, ...]

    @cached_property
    def in_rows(self) -> frozenset[int]:
        """The ops of repeated layers."""
        blocks = frozenset(chain(*self.rows))
        return frozenset(op for op, block in self.block_of.items() if block in blocks)


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
