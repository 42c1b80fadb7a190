"""The cheapest resharding from one spec of an array to another, as a sequence of elementary moves.

The specs that a shape can have on a mesh are the nodes of a graph whose edges are `sharding.specs.moves`, and

    cost of a sequence = Σ over its moves  sent_bytes_factor · array bytes + STEP_BYTES     (a local move: 1)

One run of Dijkstra's algorithm gives the cheapest sequences from one spec to all others. On four axes a graph has
thousands of specs and a plan needs the sequences from hundreds of them; therefore the search is compiled by numba.
"""

# numba's decorators return objects whose types pyright cannot infer.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUntypedFunctionDecorator=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from itertools import islice
from math import gcd, inf, prod
from typing import NamedTuple
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from alpa_lite.program.kernel import kernel
from alpa_lite.program.memo import memoized
from alpa_lite.sharding.specs import Move, Spec, moves, sent_bytes_factor

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

#: The cost of one collective in bytes, added to the bytes it sends, so that fewer and larger moves are preferred.
STEP_BYTES = 1024.0

#: An upper bound on the moves of a cheapest sequence, which gathers, scatters or moves each axis at most a few times.
_MAX_STEPS = 64


def reshard(
    source: Spec, target: Spec, shape: tuple[int, ...], sizes: Mapping[str, int], item_bytes: int = 4
) -> tuple[Move, ...] | None:
    """Return the cheapest sequence of elementary moves from `source` to `target`, or None if there is none.

    A partial sum can be resolved, but only a scalar can be made one. A sequence costs the bytes sent per device plus
    `STEP_BYTES` per collective. `sizes` maps mesh axes to numbers of devices, and `item_bytes` is per element.
    """
    if source == target:
        return ()
    return spec_graph(shape, tuple(sizes.items())).walks(source, prod(shape) * item_bytes).to(target)


class _Moves(NamedTuple):
    """The moves of a graph as arrays for compiled code; the moves from spec s are start[s] <= move < stop[s].

    start, stop               by number of a spec
    source, target, of_class  by number of a move: its two specs and its class
    class_sent, class_weight  by number of a class: `sent_bytes_factor`, and the cost per move in bytes
    """

    start: IntArray
    stop: IntArray
    source: IntArray
    target: IntArray
    of_class: IntArray
    class_sent: FloatArray
    class_weight: FloatArray


class SpecGraph:
    """The specs of arrays of one shape, numbered in the order of discovery, and the moves between them.

    Moves of the same kind that send equally much over the same axes form one *class* and have the same price; all local
    moves form one class. Use `spec_graph` to get the graph of a shape.
    """

    def __init__(self, shape: tuple[int, ...], sizes: Mapping[str, int]) -> None:
        """Start with an empty graph; specs are added when they are first needed."""
        self.shape = shape
        self.sizes = sizes
        self.specs: list[Spec] = []
        self.classes: list[Move] = []  # the first move of each class
        self._numbers: dict[Spec, int] = {}
        self._class_numbers: dict[object, int] = {}
        self._start: dict[int, int] = {}
        self._moves: list[tuple[int, int, int]] = []  # source, target, class
        self._arrays: _Moves | None = None
        self._steps: dict[int, Move] = {}
        self._walks: dict[tuple[Spec, int], Walks] = {}

    def number(self, spec: Spec) -> int:
        """Return the number of a spec, which is added to the graph if it is new."""
        number = self._numbers.get(spec)
        if number is None:
            number = self._numbers[spec] = len(self.specs)
            self.specs.append(spec)
        return number

    def walks(self, source: Spec, array_bytes: int) -> Walks:
        """Return the cheapest sequences of moves from `source` to all reachable specs, for arrays of this size."""
        key = (source, _bytes_that_matter(array_bytes, self.sizes))
        if key not in self._walks:
            self._walks[key] = Walks(self, *key)
        return self._walks[key]

    def step(self, move: int) -> Move:
        """Return the move of this number.

        Only the numbers of moves are stored, since few of them are ever part of a cheapest sequence; the `Move` is
        reconstructed from its position among the moves of its source.
        """
        if move not in self._steps:
            source = self._moves[move][0]
            steps = moves(self.specs[source], self.shape, self.sizes)
            self._steps[move] = next(islice(steps, move - self._start[source], None))
        return self._steps[move]

    def moves_from(self, source: int) -> _Moves:
        """Return the moves of all specs reachable from `source`, possibly among moves of other specs."""
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
                # Local moves have a small cost, so that a cheapest sequence contains no unnecessary ones.
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
        # Assign the results together at the end: a graph outlives a KeyboardInterrupt, and compiled code does not check
        # the bounds of its numbers.
        self._start, self._moves, self._arrays = start, found, None

    def _class_of(self, step: Move) -> int:
        key = step.is_local or (step.kind, step.axes, step.bytes_factor)
        if key not in self._class_numbers:
            self._class_numbers[key] = len(self.classes)
            self.classes.append(step)
        return self._class_numbers[key]


def _bytes_that_matter(array_bytes: int, sizes: Mapping[str, int]) -> int:
    """Return the size of an array in bytes, reduced to a bound above which the cheapest sequences do not change.

    The bound lets arrays of different sizes share one search. On D devices, the total `sent_bytes_factor`s of two
    sequences are equal or differ by at least 1 / D. If 1 / D of the array outweighs `STEP_BYTES` times the most moves
    of a sequence, sequences are ordered by what they send and then by their moves, for any larger size. The argument
    needs exact floating-point sums, which hold for powers of two; other sizes are returned unchanged.
    """
    devices = prod(sizes.values())
    enough = devices * round(STEP_BYTES) * _MAX_STEPS
    exact = devices & (devices - 1) == 0 and array_bytes < 1 << 44
    return min(array_bytes, enough) if exact else array_bytes


class Walks:
    """The cheapest sequences of moves from one spec to all specs that are reachable from it."""

    def __init__(self, graph: SpecGraph, source: Spec, array_bytes: int) -> None:
        """Search them for arrays of `array_bytes` bytes."""
        self.graph = graph
        self.source = graph.number(source)
        moves = graph.moves_from(self.source)
        costs = moves.class_sent * array_bytes + moves.class_weight
        # The reachable specs by increasing cost, and for each spec the last move of the sequence to it (-1: none).
        self._order, self._last = _search(moves.start, moves.stop, moves.target, costs[moves.of_class], self.source)

    def to(self, target: Spec) -> tuple[Move, ...] | None:
        """Return the moves to a spec, or None if it is not reachable."""
        number = self.graph.number(target)
        # All reachable specs had numbers when the search ended; a later number belongs to a spec that is not reachable.
        if number != self.source and (number >= self._last.size or self._last[number] < 0):
            return None
        moves, steps = self.graph.moves_from(self.source), list[Move]()
        while number != self.source:
            move = int(self._last[number])
            steps.append(self.graph.step(move))
            number = int(moves.source[move])
        return tuple(reversed(steps))

    def seconds(self, price: Callable[[Move], float]) -> FloatArray:
        """Return for each spec, by its number, the seconds of the sequence of moves to it; inf if it is not reachable.

        `price` returns the seconds of a move; it is called once for each class of moves in use.
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
    """Run Dijkstra's algorithm, and return the specs by increasing cost and the last move to each spec.

    Ties are broken by the order of discovery, so that the result is deterministic.
    """
    best = np.full(start.size, np.inf)
    last = np.full(start.size, -1, dtype=np.int32)
    order = np.empty(start.size, dtype=np.int32)
    done = 0
    best[source] = 0.0
    heap = [(0.0, 0, source)]
    discovered = 1
    while heap:
        so_far, _, spec = heapq.heappop(heap)
        # An outdated entry: a cheaper sequence to this spec was pushed later.
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
    """Return the graph of the specs of all arrays that can be split in the same ways as this shape.

    No axis is used twice, so only the greatest common divisor of a dim and the number of devices matters, and shapes
    with the same divisors share one graph. Graphs are large on many axes: those that are neither referenced nor
    recently used are dropped, and rebuilt with new numbers when needed.
    """
    devices = prod(size for _, size in sizes_items)
    # gcd(0, devices) is `devices`, but an empty dim must not be split.
    return _spec_graph(tuple(gcd(n, devices) if n else 0 for n in shape), sizes_items)


# `_spec_graph` keeps the graphs used last alive; this finds those that anything else still refers to, so that two
# graphs with different numbers never exist for one shape.
_GRAPHS: WeakValueDictionary[object, SpecGraph] = WeakValueDictionary()


@memoized(entries=16)
def _spec_graph(shape: tuple[int, ...], sizes_items: tuple[tuple[str, int], ...]) -> SpecGraph:
    graph = _GRAPHS.get((shape, sizes_items))
    return _GRAPHS.setdefault((shape, sizes_items), SpecGraph(shape, dict(sizes_items))) if graph is None else graph
