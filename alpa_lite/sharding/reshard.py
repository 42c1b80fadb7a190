"""Walks from one spec of an array to another by elementary moves, the cheapest by what they send.

The specs that a shape can have on a mesh are the nodes of a graph, `sharding.moves` its edges, and

    a walk costs  Σ over its steps  sent_bytes_factor · array bytes + STEP_BYTES     (a local step: 1)

One search (Dijkstra's) finds the walks from a spec to all others. On four axes a graph has thousands of specs and
planning asks for walks from many hundreds of them, so that the search is compiled by numba.
"""

# What numba makes of functions pyright cannot know.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUntypedFunctionDecorator=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from functools import lru_cache
from itertools import islice
from math import gcd, inf, prod
from typing import NamedTuple
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from alpa_lite.program.kernel import kernel
from alpa_lite.sharding.specs import Move, Spec, moves, sent_bytes_factor

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

#: What one more collective weighs against bytes when two walks are compared: prefers fewer, larger steps.
STEP_BYTES = 1024.0

#: More steps than any cheapest walk has: each axis is gathered, scattered or moved a few times at most.
_MAX_STEPS = 64


def reshard(
    source: Spec, target: Spec, shape: tuple[int, ...], sizes: Mapping[str, int], item_bytes: int = 4
) -> tuple[Move, ...] | None:
    """Cheapest walk of elementary moves from `source` to `target`; None when there is none.

    A partial sum can be resolved, but only a scalar made one. A walk costs the bytes sent per device + `STEP_BYTES` a
    collective.
    """
    if source == target:
        return ()
    return spec_graph(shape, tuple(sizes.items())).walks(source, prod(shape) * item_bytes).to(target)


class _Moves(NamedTuple):
    """The moves of a graph: those from spec s are start[s] <= move < stop[s]."""

    start: IntArray
    stop: IntArray
    source: IntArray
    target: IntArray
    of_class: IntArray
    class_sent: FloatArray
    class_weight: FloatArray


class SpecGraph:
    """The specs of arrays of one shape, numbered as they are met, and the moves between them; see `spec_graph`.

    Moves that send the same over the same axes are of one *class*.
    """

    def __init__(self, shape: tuple[int, ...], sizes: Mapping[str, int]) -> None:
        """Start without specs."""
        self.shape = shape
        self.sizes = sizes
        self.specs: list[Spec] = []
        self.classes: list[Move] = []  # the first move of each that was met
        self._numbers: dict[Spec, int] = {}
        self._class_numbers: dict[object, int] = {}
        self._start: dict[int, int] = {}
        self._moves: list[tuple[int, int, int]] = []  # source, target, class
        self._arrays: _Moves | None = None
        self._steps: dict[int, Move] = {}
        self._walks: dict[tuple[Spec, int], Walks] = {}

    def number(self, spec: Spec) -> int:
        """The number of a spec."""
        number = self._numbers.get(spec)
        if number is None:
            number = self._numbers[spec] = len(self.specs)
            self.specs.append(spec)
        return number

    def walks(self, source: Spec, array_bytes: int) -> Walks:
        """The cheapest walk to every spec that can be reached from `source`, for arrays of this size; see `reshard`."""
        key = (source, _bytes_that_matter(array_bytes, self.sizes))
        if key not in self._walks:
            self._walks[key] = Walks(self, *key)
        return self._walks[key]

    def step(self, move: int) -> Move:
        """The move of this number."""
        if move not in self._steps:
            source = self._moves[move][0]
            steps = moves(self.specs[source], self.shape, self.sizes)
            self._steps[move] = next(islice(steps, move - self._start[source], None))
        return self._steps[move]

    def moves_from(self, source: int) -> _Moves:
        """The moves of all specs that can be reached from one; those of others may be among them."""
        if source not in self._start or self._arrays is None:
            self._meet(source)
            columns = np.array(self._moves, dtype=np.int64).reshape(-1, 3)
            sources, targets, of_class = (np.ascontiguousarray(columns[:, i]) for i in range(3))
            start = np.zeros(len(self.specs), dtype=np.int64)
            start[list(self._start)] = list(self._start.values())
            self._arrays = _Moves(
                start=start,
                stop=start + np.bincount(sources, minlength=start.size),
                source=sources,
                target=targets,
                of_class=of_class,
                class_sent=np.array([sent_bytes_factor(step, self.sizes) for step in self.classes], dtype=float),
                # A local step weighs a little too, so that a walk never wanders through pointless ones.
                class_weight=np.array([1.0 if s.is_local else STEP_BYTES for s in self.classes], dtype=float),
            )
        return self._arrays

    def _meet(self, source: int) -> None:
        waiting, start, found = [source], dict(self._start), list(self._moves)
        while waiting:
            spec = waiting.pop()
            if spec in start:
                continue
            start[spec] = len(found)
            for step in moves(self.specs[spec], self.shape, self.sizes):
                target = self.number(step.spec)
                found.append((spec, target, self._class_of(step)))
                waiting.append(target)
        # All at once: graphs outlive an interruption, and compiled code trusts their numbers.
        self._start, self._moves, self._arrays = start, found, None

    def _class_of(self, step: Move) -> int:
        key = step.is_local or (step.kind, step.axes, step.bytes_factor)
        if key not in self._class_numbers:
            self._class_numbers[key] = len(self.classes)
            self.classes.append(step)
        return self._class_numbers[key]


def _bytes_that_matter(array_bytes: int, sizes: Mapping[str, int]) -> int:
    """The bytes of an array, or fewer that lead to the same walks.

    With D devices the `sent_bytes_factor`s of walks differ by 1 / D at least. Where that times the bytes outweighs as
    many steps as a walk can have, walks are ordered by what they send and then by their steps, whatever the size. Sizes
    that are powers of two make the sums exact; others are left as they are.
    """
    devices = prod(sizes.values())
    enough = devices * round(STEP_BYTES) * _MAX_STEPS
    exact = devices & (devices - 1) == 0 and array_bytes < 1 << 44
    return min(array_bytes, enough) if exact else array_bytes


class Walks:
    """The cheapest walks from one spec to all that can be reached from it."""

    def __init__(self, graph: SpecGraph, source: Spec, array_bytes: int) -> None:
        """Find them for arrays of this size in bytes."""
        self.graph = graph
        self.source = graph.number(source)
        moves = graph.moves_from(self.source)
        costs = moves.class_sent * array_bytes + moves.class_weight
        # The specs in order of their cost, and of each the last move of the walk to it.
        self._order, self._last = _search(moves.start, moves.stop, moves.target, costs[moves.of_class], self.source)

    def to(self, target: Spec) -> tuple[Move, ...] | None:
        """The steps to a spec; None when it cannot be reached."""
        number = self.graph.number(target)
        if number != self.source and (number >= self._last.size or self._last[number] < 0):
            return None
        moves, steps = self.graph.moves_from(self.source), list[Move]()
        while number != self.source:
            move = int(self._last[number])
            steps.append(self.graph.step(move))
            number = int(moves.source[move])
        return tuple(reversed(steps))

    def seconds(self, price: Callable[[Move], float]) -> FloatArray:
        """By number of a spec the time of the walk to it, infinite where there is none.

        `price` is asked for one move of each class.
        """
        moves = self.graph.moves_from(self.source)
        last = self._last[self._order[1:]]
        prices = np.zeros(len(self.graph.classes))
        for number in np.unique(moves.of_class[last]).tolist():
            prices[number] = price(self.graph.classes[number])
        found = np.full(len(self.graph.specs), inf)
        found[self.source] = 0.0
        _add_up(found, self._order[1:], moves.source[last], prices[moves.of_class[last]])
        return found


@kernel
def _search(
    start: IntArray, stop: IntArray, target: IntArray, cost: FloatArray, source: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Dijkstra's algorithm; of equally cheap walks to a spec the one that was found first."""
    best = np.full(start.size, np.inf)
    last = np.full(start.size, -1, dtype=np.int32)
    order = np.empty(start.size, dtype=np.int32)
    done = 0
    best[source] = 0.0
    heap = [(0.0, 0, source)]
    discovered = 1
    while heap:
        so_far, _, spec = heapq.heappop(heap)
        if so_far > best[spec]:
            continue
        order[done] = spec
        done += 1
        for move in range(start[spec], stop[spec]):
            total = so_far + cost[move]
            if total < best[target[move]]:
                best[target[move]] = total
                last[target[move]] = move
                heapq.heappush(heap, (total, discovered, target[move]))
                discovered += 1
    return order[:done].copy(), last


@kernel
def _add_up(found: FloatArray, order: NDArray[np.int32], before: IntArray, seconds: FloatArray) -> None:
    for i in range(order.size):
        found[order[i]] = found[before[i]] + seconds[i]


def spec_graph(shape: tuple[int, ...], sizes_items: tuple[tuple[str, int], ...]) -> SpecGraph:
    """The one graph of the specs of arrays that can be split as this shape can.

    No axis is used twice, so that only common divisors of a dim and the number of devices matter. Those that nobody
    holds and that were not asked for lately are made anew, with new numbers: on many axes they are large.
    """
    devices = prod(size for _, size in sizes_items)
    return _spec_graph(tuple(gcd(n, devices) if n else 0 for n in shape), sizes_items)


_GRAPHS: WeakValueDictionary[object, SpecGraph] = WeakValueDictionary()


@lru_cache(maxsize=16)
def _spec_graph(shape: tuple[int, ...], sizes_items: tuple[tuple[str, int], ...]) -> SpecGraph:
    graph = _GRAPHS.get((shape, sizes_items))
    if graph is None:
        graph = _GRAPHS[shape, sizes_items] = SpecGraph(shape, dict(sizes_items))
    return graph
