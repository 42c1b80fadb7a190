"""Cluster the forward ops into contiguous layers that are cut where little data flows and are equal in FLOPs.

Communication-aware clustering of a sequence of ops into layers (Alpa, OSDI'22, section 5.2) on plain arrays.

Ops 0..K-1 are cut into L runs. A value that leaves its layer is paid once in each layer that reads it.

    places  = the ops before which some layer of a cut within the limit may begin; those between
              two places are one block, so that K below is the number of blocks                   `possible_places`
    C(i,k)  = bytes of the values of ops before i that any of ops i..k reads                      `_inflow_bytes`
    limit   = (1 + imbalance) * total FLOPs / L, relaxed in steps until L runs can satisfy it      `_flops_limit`
    G(k,r)  = min over i of  max(G(i-1,r-1), C(i,k)),  least <= FLOPs of i..k <= limit            `_least_bottleneck`
    among the cuts with max C = G(K-1,L): the least sum of C, then the least sum of FLOPs**2
    (their mean is fixed, so this is the least variance)                                          `_cut`

A layer has at least a quarter of the average FLOPs where some cut allows that: a cut before the work begins is often
free, and would leave a layer without work. The tie-break is a second dynamic program, restricted to C(i,k) <= G(K-1,L):
cutting prefixes of least maximum first would miss cuts with a smaller sum. For every k the admissible i are
consecutive, since FLOPs only add up; both programs visit only these pairs, about 1.5 * K**2 / L of them. Few layers
leave few places: with two, these are the ops near the middle.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from alpa_lite.errors import PlanError
from alpa_lite.program.ir import Graph, Op, parts_of
from alpa_lite.program.memo import memoized
from alpa_lite.program.phases import Phase, StepGraph
from alpa_lite.rules.op_info import free_values
from alpa_lite.step.layers import (
    LayerBalance,
    Layers,
    contractions,
    default_num_layers,
    followed,
    forward_loops,
    readers_of,
)
from alpa_lite.step.repetition import (
    LEAST_BLOCK,
    MAX_LAYERS,
    FloatArray,
    Repetition,
    flops_of_blocks,
    repetition,
    row_cuts,
)
from alpa_lite.text import show_count

RELAXATION = 0.25
"""The step (as a fraction of the average) by which the allowed imbalance grows until some cut satisfies it."""

MOST_EXCESS = 0.02
"""The excess over its share of the FLOPs that a layer may have for the sake of whole repeated layers."""

FAR_MORE = 2.0
"""The weight of an op relative to the average layer above which it counts as an average one where layers are made."""

LEAST_SHARE = 0.25
"""The minimum FLOPs of a layer as a fraction of the average, if that is feasible."""


class Flow(NamedTuple):
    """A value that other ops read: the op that makes it, those that read it, and its bytes."""

    producer: int
    readers: Collection[int]
    bytes: float


# A margin for sums in different orders, so that a layer of exactly the limit is allowed.
_ROUNDING = 1 + 1e-9


def cluster_contiguous(
    flops: NDArray[np.float64], flows: Sequence[Flow], num_layers: int, *, imbalance: float = 0.5
) -> tuple[int, ...]:
    """Return the layer of each op: non-decreasing from 0 to num_layers - 1, no layer empty.

    Args:
        flops: [K] FLOPs of each op, in program order.
        flows: the values that ops read from earlier ones.
        num_layers: number of layers L.
        imbalance: fraction by which the FLOPs of a layer may exceed the average, if that is feasible.

    Raises:
        PlanError: there are fewer ops than layers, or the numbers are invalid.
    """
    num_ops = len(flops)
    if not 1 <= num_layers <= num_ops:
        raise PlanError(f"{num_ops} ops cannot be cut into {num_layers} layers: ask for 1 to {num_ops} layers.")
    if imbalance < 0 or not bool(np.all((flops >= 0) & np.isfinite(flops))):
        raise PlanError(f"FLOPs and imbalance must not be negative: imbalance {imbalance}, least FLOPs {flops.min()}.")
    for producer, readers, size in flows:
        if not (producer >= 0 and 0 <= size < np.inf and all(producer < reader < num_ops for reader in readers)):
            raise PlanError(
                f"A value of {size} bytes cannot flow from op {producer} to the ops {sorted(readers)} of {num_ops} ops:"
                " values flow from an earlier to a later op."
            )
    if num_layers == 1:
        return (0,) * num_ops
    ends = np.concatenate([[0.0], np.cumsum(flops, dtype=float)])
    limit = _flops_limit(ends, num_layers, imbalance)
    places = possible_places(ends, num_layers, limit)
    block_of = np.searchsorted(places, np.arange(num_ops), side="right") - 1
    runs = _Runs.of(ends[places], limit, _between_blocks(flows, block_of.tolist()))
    even = runs.of_at_least(LEAST_SHARE * float(ends[-1]) / num_layers)
    bottleneck = _least_bottleneck(even, num_layers)
    # No cut gives each layer its least share of the work: that condition is dropped.
    if np.isinf(bottleneck):
        even, bottleneck = runs, _least_bottleneck(runs, num_layers)
    firsts = _cut(even, num_layers, bottleneck)
    return tuple((np.searchsorted(firsts, block_of, side="right") - 1).tolist())


def possible_places(ends: NDArray[np.float64], num_layers: int, limit: float) -> NDArray[np.int64]:
    """Return the ops at which a layer of at most `limit` FLOPs may begin, and the end of all ops, ascending.

    With l layers before it, the ops before such a place have at most l limits of FLOPs, and the others L - l.
    """
    # As in `_Runs.of`, the margin covers sums in other orders.
    limit *= _ROUNDING**2
    possible = np.zeros(len(ends), dtype=np.bool_)
    possible[[0, -1]] = True
    for before in range(1, num_layers):
        possible |= (ends <= before * limit) & (ends[-1] - ends <= (num_layers - before) * limit)
    return np.flatnonzero(possible)


def _between_blocks(flows: Sequence[Flow], block_of: Sequence[int]) -> list[Flow]:
    """Return the values that flow between blocks of ops, by the numbers of the blocks."""
    found = list[Flow]()
    for producer, readers, size in flows:
        here = block_of[producer]
        if outside := {block_of[reader] for reader in readers} - {here}:
            found.append(Flow(here, outside, size))
    return found


def _inflow_bytes(lowest: NDArray[np.int64], flows: Sequence[Flow]) -> NDArray[np.float64]:
    """Return [R] C(i, k) in bytes of all runs from i >= lowest[k] to k, ordered by k.

    A value is paid by the runs that begin after its producer and end at or after the first reader that they contain. So
    reader c, with the reader (or producer) b before it, adds the bytes to all C(i, k) with b < i <= c <= k.
    """
    added: list[list[tuple[int, float]]] = [[] for _ in lowest]
    for producer, readers, size in flows:
        before = producer
        for reader in sorted({*readers}):
            added[reader].append((before, size))
            before = reader
    inflow, found = np.zeros(len(lowest)), list[NDArray[np.float64]]()
    for last, (first, here) in enumerate(zip(lowest.tolist(), added, strict=True)):
        for before, size in here:
            # No later run begins before the first one that ends here.
            inflow[max(before + 1, first) : last + 1] += size
        found.append(inflow[first : last + 1].copy())
    return np.concatenate(found)


def _flops_limit(ends: NDArray[np.float64], num_layers: int, imbalance: float) -> float:
    """Return the maximum FLOPs of a layer: (1 + imbalance + n * RELAXATION) averages with the least feasible n."""
    while not _is_feasible(ends, num_layers, limit := (1 + imbalance) * float(ends[-1]) / num_layers * _ROUNDING):
        imbalance += RELAXATION
    return limit


def _is_feasible(ends: NDArray[np.float64], num_layers: int, limit: float) -> bool:
    """Return True if layers of at most `limit` FLOPs can hold all ops, by their cumulative FLOPs."""
    op = 0
    for _ in range(num_layers):
        # Greedy filling needs the fewest layers; since there are at least L ops, any layer can be split further.
        op = int(np.searchsorted(ends, float(ends[op]) + limit, side="right")) - 1
    return op == len(ends) - 1


def _are_even(weights: NDArray[np.float64], num_layers: int, imbalance: float) -> bool:
    """Return True if some cut of blocks has no layer of more than the allowed excess."""
    ends = np.concatenate([[0.0], np.cumsum(weights)])
    limit = (1 + imbalance) * float(ends[-1]) / num_layers * _ROUNDING
    return len(weights) >= num_layers and _is_feasible(ends, num_layers, limit)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Runs:
    """All runs of ops within the limit, ordered by their last op: one element of each array per run.

    Attributes:
        first: [R] first op of each run.
        last: [R] last op of each run.
        begin: [K] index of the first run that ends with op k; there is at least the run of op k alone.
        bytes: [R] bytes that each run reads from earlier ops.
        flops: [R] FLOPs of each run.
    """

    first: NDArray[np.int64]
    last: NDArray[np.int64]
    begin: NDArray[np.int64]
    bytes: NDArray[np.float64]
    flops: NDArray[np.float64]

    @staticmethod
    def of(ends: NDArray[np.float64], limit: float, flows: Sequence[Flow]) -> _Runs:
        """Return the runs within the limit, by [K + 1] cumulative FLOPs, the limit in FLOPs, and what flows between."""
        num_ops = len(ends) - 1
        lasts = np.arange(num_ops)
        # `_flops_limit` sums in another order and rounds differently: the margin retains every run that it used.
        lowest = np.minimum(np.searchsorted(ends, ends[1:] - limit * _ROUNDING, side="left"), lasts)
        counts = lasts + 1 - lowest
        begin = np.cumsum(counts) - counts
        last = np.repeat(lasts, counts)
        first = np.arange(last.size) - begin[last] + lowest[last]
        inflow = _inflow_bytes(lowest, flows)
        return _Runs(first=first, last=last, begin=begin, bytes=inflow, flops=ends[last + 1] - ends[first])

    def of_at_least(self, flops: float) -> _Runs:
        """Return the runs, of which the ones with fewer FLOPs are excluded (infinite bytes)."""
        return replace(self, bytes=np.where(self.flops * _ROUNDING >= flops, self.bytes, np.inf))


def _least_bottleneck(runs: _Runs, num_layers: int) -> float:
    """Return G(K-1, L) in bytes. Element k+1 of `best` stands for the ops up to k, element 0 for no ops."""
    best = np.full(runs.begin.size + 1, np.inf)
    best[0] = 0.0
    for _ in range(num_layers):
        # Runs are sorted by their last op, so that each segment holds all runs that end with one op.
        best[1:] = np.minimum.reduceat(np.maximum(best[runs.first], runs.bytes), runs.begin)
        # Only the first layer may follow no ops.
        best[0] = np.inf
    return float(best[-1])


def _cut(runs: _Runs, num_layers: int, bottleneck: float) -> list[int]:
    """Return the first op of each layer of the best cut whose layers read at most `bottleneck` bytes each."""
    price = np.where(runs.bytes <= bottleneck * _ROUNDING, runs.bytes, np.inf)
    square = (runs.flops / max(float(runs.flops.max()), 1.0)) ** 2
    sums = np.full(runs.begin.size + 1, np.inf)
    squares = sums.copy()
    sums[0] = squares[0] = 0.0
    chosen: list[NDArray[np.int64]] = []
    for _ in range(num_layers):
        total = sums[runs.first] + price
        least = np.minimum.reduceat(total, runs.begin)
        tied = np.where(total <= least[runs.last] * _ROUNDING, squares[runs.first] + square, np.inf)
        evenest = np.minimum.reduceat(tied, runs.begin)
        # The first run of each segment that attains the minimum, since `reduceat` has no argmin.
        hits = np.flatnonzero(tied == evenest[runs.last])
        chosen.append(runs.first[hits[np.searchsorted(hits, runs.begin)]])
        sums[0] = squares[0] = np.inf
        sums[1:], squares[1:] = least, evenest
    firsts = [runs.begin.size]
    for choice in reversed(chosen):
        firsts.append(int(choice[firsts[-1] - 1]))
    # The list runs from the end of the last layer back to the first op of the first one.
    return firsts[:0:-1]


#: Contractions outside of loops per layer for which `subdivided` aims: about one transformer block.
CONTRACTIONS_PER_PART = 6


def make_layers(
    step: StepGraph,
    num_layers: int | None = None,
    *,
    imbalance: float = 0.3,
    equal: LayerBalance = "flops",
    shares: Sequence[float] = (),
) -> Layers:
    """Cluster the forward ops into `num_layers` layers and assign all other ops to them.

    Args:
        step: the step.
        num_layers: number of layers; None chooses it (`default_num_layers`).
        imbalance: fraction by which a layer may exceed its share of what `equal` names, if that is feasible.
        equal: the quantity that is balanced. With "operators" each layer has equally many forward ops, wherever that
            cuts: the baseline against which clustering is measured.
        shares: relative share of each layer; () for equal shares.

    Raises:
        PlanError: there are fewer forward ops than layers.
    """
    num_forward = step.phases.count(Phase.FORWARD)
    count = default_num_layers(step) if num_layers is None else num_layers
    if count > max(1, num_forward):
        found = f"only {show_count(num_forward, 'operation')}" if num_forward else "no operation"
        most = f"at most {num_forward} layers or stages" if num_forward > 1 else "1 layer or stage"
        raise PlanError(
            f"{count} layers were asked for, but the forward pass of this step (what depends on the batch, before the "
            f"gradients) has {found}. Ask for {most}."
        )
    return _layers(step, count, imbalance, equal, tuple(shares))


@memoized
def _layers(step: StepGraph, count: int, imbalance: float, equal: LayerBalance, shares: tuple[float, ...]) -> Layers:
    graph = step.graph
    forward = [op for op in graph.ops if step.phases[op.id] is Phase.FORWARD]
    of_op: list[int | None] = [None] * len(graph.ops)
    if equal == "operators":
        for place, op in enumerate(forward):
            of_op[op.id] = place * count // len(forward)
    elif forward:
        index = _blocks(step, forward, count)
        weights = _weights(step, index, equal)
        weights = _in_shares(weights, shares) if shares else _at_most_a_share(weights, count)
        repeated = repetition(step)
        if repeated.rows and not (_rows_read(step) or forward_loops(step)):
            whole = (
                _layer_weights(step, repeated, count) if equal == "loops" else flops_of_blocks(graph, repeated.block_of)
            )
            whole = _in_shares(whole, shares)
            # Equal layers are not cut, so that stages are equal, unless their shares would be uneven.
            excess = imbalance if equal == "loops" else min(imbalance, MOST_EXCESS)
            if _are_even(whole, count, excess):
                index, weights, imbalance = repeated.block_of, whole, excess
        layers = cluster_contiguous(weights, _flows(graph, index), count, imbalance=imbalance)
        for op in forward:
            of_op[op.id] = layers[index[op.id]]
    return followed(step, of_op, count)


def subdivided(step: StepGraph, layers: Layers, *, imbalance: float = 0.3) -> Layers:
    """Cut each layer into n layers of about one transformer block: layer i becomes layers i·n to (i + 1)·n - 1."""
    graph = step.graph
    forward = [
        [op for op in graph.ops if step.phases[op.id] is Phase.FORWARD and layers.of_op[op.id] == layer]
        for layer in range(layers.num_layers)
    ]
    loops = {loop for loop in forward_loops(step) if contractions(graph, graph.ops[loop])}
    repeated = repetition(step)
    heavy = sum(contractions(graph, op) for ops in forward for op in ops if op.id not in loops)
    units = len(loops) + ceil(heavy / CONTRACTIONS_PER_PART)
    # No layer can be cut into more parts than it has ops.
    count = max(1, min(MAX_LAYERS, round(units / layers.num_layers), *map(len, forward)))
    of_op: list[int | None] = [None] * len(graph.ops)
    for layer, ops in enumerate(forward):
        # A step that returns its arguments has a layer without ops.
        if not ops:
            continue
        # Repeated layers are parts of their own, where there are enough.
        blocks = sorted({repeated.block_of[op.id] for op in ops}) if repeated.rows else []
        number = {block: i for i, block in enumerate(blocks)}
        index = {op.id: i if len(blocks) < count else number[repeated.block_of[op.id]] for i, op in enumerate(ops)}
        parts = cluster_contiguous(flops_of_blocks(graph, index), _flows(graph, index), count, imbalance=imbalance)
        for op in ops:
            of_op[op.id] = layer * count + parts[index[op.id]]
    return followed(step, of_op, layers.num_layers * count)


def _weights(step: StepGraph, index: Mapping[int, int], equal: LayerBalance) -> FloatArray:
    """Return the balanced quantity of each block, shape [blocks]."""
    flops = flops_of_blocks(step.graph, index)
    if equal == "loops":  # all FLOPs together weigh a hundredth of a loop: they move no loop to another layer
        flops /= 100 * flops.sum()
        # A part of a loop of one trip is no loop any more, but reads its rows of stacked arguments.
        parts = [*forward_loops(step), *(op for op in _rows_read(step) if op in index)]
        flops[list({index[op] for op in parts})] += 1.0
    return flops


def _flows(graph: Graph, index: Mapping[int, int]) -> list[Flow]:
    """Return the values that flow between blocks of the ops in `index` (op → block)."""
    free, found = free_values(graph), list[Flow]()
    for op, here in index.items():
        for v in graph.ops[op].results:
            readers = {index[c] for c in graph.consumers[v] if c in index} - {here}
            # Free values are made where they are read, so that they never flow.
            if readers and v not in free:
                found.append(Flow(here, readers, float(graph.values[v].bytes)))
    return found


def _layer_weights(step: StepGraph, repeated: Repetition, count: int) -> FloatArray:
    """Return weights of blocks with which `count` equally heavy layers are equal parts of each row of layers."""
    for cut in row_cuts(step):
        if cut.num_layers == count:
            return cut.weights
    weights = np.full(max(repeated.block_of.values()) + 1, LEAST_BLOCK)
    most = max(map(len, repeated.rows))
    parts = (d for d in range(1, most) if sum(len(parts_of(len(row), d)) for row in repeated.rows) == count)
    wanted = next(parts, most)
    for row in repeated.rows:
        weights[row.start : row.stop] += len(parts_of(len(row), wanted)) / len(row)
    return weights


def _at_most_a_share(weights: FloatArray, count: int) -> FloatArray:
    """Return weights of which none is more than their sum over `count`, if one is far more.

    What cannot be cut, such as the head of a language model, is a layer by itself however heavy it is, and no reason to
    make others heavier than the rest is over the rest of layers, or to leave some without work. Weights that are a
    little more only widen the choice of cuts.
    """
    ordered = np.sort(weights)[::-1]
    if ordered[0] * count <= FAR_MORE * float(ordered.sum()):
        return weights
    for heavier in range(min(count, len(weights))):
        share = float(ordered[heavier:].sum()) / (count - heavier)
        if ordered[heavier] <= share * _ROUNDING:
            return np.minimum(weights, share)
    return weights


def _in_shares(weights: FloatArray, shares: Sequence[float]) -> FloatArray:
    """Return weights rescaled piecewise so that layers with the given shares of the original have equal sums."""
    if not shares:
        return weights
    ends = np.concatenate([[0.0], np.cumsum(weights)])
    borders = np.concatenate([[0.0], np.cumsum(shares)]) * (ends[-1] / sum(shares))
    return np.diff(np.interp(ends, borders, np.arange(borders.size)))


def _blocks(step: StepGraph, forward: Sequence[Op], count: int) -> dict[int, int]:
    """Return op → block: the forward ops from the first to the last reader of one part of stacked arguments form a
    block, all others are single.

    All ops are single when fewer blocks than layers hold contractions.
    """
    read = _rows_read(step)
    last_reader: dict[int, int] = {}
    first, current = -1, set[tuple[int, int]]()
    for i, op in enumerate(forward):
        if rows := read.get(op.id):
            if rows - current:
                first = i
            last_reader[first], current = i, rows
    index: dict[int, int] = {}
    block, inside = -1, -1
    for i, op in enumerate(forward):
        # Between two parts, such as in the norm that a layer begins with, a cut may come after any op.
        if i > inside:
            block, inside = block + 1, last_reader.get(i, i)
        index[op.id] = block
    working = {index[op.id] for op in forward if contractions(step.graph, op)}
    return index if len(working) >= count else {op.id: i for i, op in enumerate(forward)}


def _rows_read(step: StepGraph) -> dict[int, set[tuple[int, int]]]:
    """Return op → the row ranges (first, last + 1) of stacked arguments that it reads."""
    read: dict[int, set[tuple[int, int]]] = {}
    for v, part in zip(step.graph.inputs, step.input_parts, strict=True):
        if part.rows is not None:
            for c in readers_of(step, v):
                read.setdefault(c, set()).add(part.rows)
    return read
