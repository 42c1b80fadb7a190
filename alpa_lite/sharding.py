"""Specs: how one array lies on a logical mesh, and the collectives that lead from one spec to another.

A spec names, for each tensor dim, the mesh axes that split it (major first), and the axes over which the array is a
*partial sum*: each device holds an addend and the array is their sum.

    local size of dim d = size(d) / Π_{a ∈ dims[d]} |a|            (local_shape)

Resharding is a walk over specs by elementary moves (moves): all_gather takes the minor-most axis off a dim, slice
puts an unused axis on a dim (free), all_to_all moves the minor-most axis from one dim to another, all_reduce and
reduce_scatter resolve a partial sum, permute hands whole blocks from device to device (rearrangements), addend makes a
partial sum of a scalar (free). The cheapest walk by bytes sent per device is found once and
cached (reshard).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count, permutations
from math import gcd, prod
from weakref import WeakValueDictionary

import numpy as np

#: What one more collective weighs against bytes when two walks are compared: prefers fewer, larger steps.
STEP_BYTES = 1024.0

#: More steps than any cheapest walk has: each axis is gathered, scattered or moved a few times at most.
_MAX_STEPS = 64


@dataclass(frozen=True, slots=True)
class Spec:
    """Mesh axes per tensor dim (major first) and the axes over which the value is a partial sum (sorted)."""

    dims: tuple[tuple[str, ...], ...]
    partial: tuple[str, ...] = ()

    @property
    def axes(self) -> frozenset[str]:
        """All mesh axes in use."""
        return frozenset(axis for dim in self.dims for axis in dim) | frozenset(self.partial)

    @property
    def is_replicated(self) -> bool:
        """True when every device holds the whole array."""
        return not self.axes

    def without_partial(self) -> Spec:
        """The same layout with every sum resolved."""
        return Spec(self.dims)

    def __str__(self) -> str:
        """`[data, model]`-like text: `-` for a whole dim, `+axis` for a partial sum."""
        text = ", ".join("·".join(axes) or "-" for axes in self.dims)
        return f"[{text}]" + "".join(f"+{axis}" for axis in self.partial)


def replicated(rank: int) -> Spec:
    """The spec of an array that every device holds whole."""
    return Spec(((),) * rank)


def spec_to_json(spec: Spec) -> dict[str, object]:
    """Plain data for a plan file."""
    data: dict[str, object] = {"dims": [list(axes) for axes in spec.dims]}
    if spec.partial:
        data["partial"] = list(spec.partial)
    return data


def spec_from_json(data: Mapping[str, list[list[str]]]) -> Spec:
    """Inverse of `spec_to_json`."""
    partial = data.get("partial", [])
    return Spec(tuple(tuple(axes) for axes in data["dims"]), tuple(str(axis) for axis in partial))


def divides(spec: Spec, shape: tuple[int, ...], sizes: Mapping[str, int]) -> bool:
    """True when every split dim is a multiple of the devices that split it."""
    return all(n % prod(sizes[a] for a in axes) == 0 for n, axes in zip(shape, spec.dims, strict=True))


def local_shape(spec: Spec, shape: tuple[int, ...], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Shape of one device's block."""
    return tuple(n // prod(sizes[a] for a in axes) for n, axes in zip(shape, spec.dims, strict=True))


def num_shards(spec: Spec, sizes: Mapping[str, int]) -> int:
    """Into how many different blocks the array is cut."""
    return prod(sizes[a] for axes in spec.dims for a in axes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One elementary move of a resharding over one mesh axis, or over several for a permute.

    kind: all_reduce, reduce_scatter, all_gather, all_to_all, permute, and slice and addend, which are local. `dim` is
    the tensor dim that loses (all_gather, all_to_all) or gains (slice, reduce_scatter) the axis; `target_dim` the one
    that gains it in an all_to_all; `pairs` the (from, to) of a permute, devices numbered along `axes`, the last one
    fastest. `spec` is the layout afterwards. `bytes_factor` × array bytes = buffer of the collective per device, by the
    convention of `cost_models.Collective`.
    """

    kind: str
    axes: tuple[str, ...]
    dim: int = -1
    target_dim: int = -1
    pairs: tuple[tuple[int, int], ...] = ()
    spec: Spec
    bytes_factor: float

    @property
    def is_local(self) -> bool:
        """True when nothing is sent."""
        return self.kind in ("slice", "addend")

    @property
    def axis(self) -> str:
        """The mesh axis of a move over one."""
        (axis,) = self.axes
        return axis

    def below(self, num_dims: int) -> Step:
        """The same move of an array with more leading dims."""
        return replace(self, dim=self.dim + num_dims, target_dim=self.target_dim + num_dims) if num_dims else self


def moves(spec: Spec, shape: tuple[int, ...], sizes: Mapping[str, int]) -> Iterator[Step]:
    """Every elementary move that is possible from `spec`."""
    local = 1.0 / num_shards(spec, sizes)
    used = spec.axes
    for axis in spec.partial:
        rest = tuple(a for a in spec.partial if a != axis)
        yield Step(kind="all_reduce", axes=(axis,), spec=Spec(spec.dims, rest), bytes_factor=local)
        for dim in _can_split(spec, shape, sizes, axis):
            yield Step(
                kind="reduce_scatter",
                axes=(axis,),
                dim=dim,
                spec=Spec(_with(spec.dims, dim, (*spec.dims[dim], axis)), rest),
                bytes_factor=local,
            )
    for axis in (a for a in sizes if a not in used):
        if not shape:
            yield addend(spec, axis)
        for dim in _can_split(spec, shape, sizes, axis):
            yield Step(
                kind="slice",
                axes=(axis,),
                dim=dim,
                spec=Spec(_with(spec.dims, dim, (*spec.dims[dim], axis)), spec.partial),
                bytes_factor=0.0,
            )
    for dim, axes in enumerate(spec.dims):
        if not axes:
            continue
        axis, shorter = axes[-1], _with(spec.dims, dim, axes[:-1])
        gathered = Spec(shorter, spec.partial)
        yield Step(kind="all_gather", axes=(axis,), dim=dim, spec=gathered, bytes_factor=local * sizes[axis])
        for target in _can_split(gathered, shape, sizes, axis):
            if target != dim:
                yield Step(
                    kind="all_to_all",
                    axes=(axis,),
                    dim=dim,
                    target_dim=target,
                    spec=Spec(_with(shorter, target, (*shorter[target], axis)), spec.partial),
                    bytes_factor=local,
                )

    yield from rearrangements(spec, sizes)


def addend(spec: Spec, axis: str) -> Step:
    """The move to a partial sum over an unused axis: the first device along it keeps its block, others take zeros."""
    summed = Spec(spec.dims, tuple(sorted((*spec.partial, axis))))
    return Step(kind="addend", axes=(axis,), spec=summed, bytes_factor=0.0)


def rearrangements(spec: Spec, sizes: Mapping[str, int]) -> Iterator[Step]:
    """The permutes: other specs with blocks of the same shape, each device sending its block to one other device."""
    if not any(spec.dims):
        return
    free = tuple(a for a in sizes if a not in spec.partial)
    blocks = tuple(prod(sizes[a] for a in axes) for axes in spec.dims)
    local = 1.0 / num_shards(spec, sizes)
    for dims in _arranged(blocks, free, tuple(sizes.items())):
        if dims != spec.dims:
            axes, pairs = _permutation(spec.dims, dims, sizes)
            yield Step(kind="permute", axes=axes, pairs=pairs, spec=Spec(dims, spec.partial), bytes_factor=local)


@lru_cache(maxsize=10_000)
def _arranged(
    counts: tuple[int, ...], free: tuple[str, ...], sizes_items: tuple[tuple[str, int], ...]
) -> tuple[tuple[tuple[str, ...], ...], ...]:
    return tuple(_arrangements(counts, free, dict(sizes_items)))


def _arrangements(
    counts: Sequence[int], free: Sequence[str], sizes: Mapping[str, int]
) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Every way to give each dim an ordered choice of the free axes that splits it in so many blocks."""
    if not counts:
        yield ()
        return
    for number in range(len(free) + 1):
        for axes in permutations(free, number):
            if prod(sizes[a] for a in axes) == counts[0]:
                rest = [a for a in free if a not in axes]
                yield from ((axes, *others) for others in _arrangements(counts[1:], rest, sizes))


def _permutation(
    source: tuple[tuple[str, ...], ...], target: tuple[tuple[str, ...], ...], sizes: Mapping[str, int]
) -> tuple[tuple[str, ...], tuple[tuple[int, int], ...]]:
    """The mesh axes that matter, and for each group along them who sends to whom.

    A device sends its block to one that needs it; copies along axes unused in the source go to the copies wanted along
    axes unused in the target.
    """
    changed = [(old, new) for old, new in zip(source, target, strict=True) if old != new]
    involved = {a for old, new in changed for a in (*old, *new)}
    axes = tuple(a for a in sizes if a in involved)
    used = [tuple(a for side in changed for a in side[i]) for i in (0, 1)]
    orders = [[*axes_of, *(a for a in axes if a not in axes_of)] for axes_of in used]
    # Numbered block by block, then copy by copy: equal numbers belong together on both sides.
    numbers = [
        np.arange(prod(sizes[a] for a in axes))
        .reshape([sizes[a] for a in axes])
        .transpose([axes.index(a) for a in order])
        .ravel()
        for order in orders
    ]
    return axes, tuple(sorted((int(old), int(new)) for old, new in zip(*numbers, strict=True)))


def _with(dims: tuple[tuple[str, ...], ...], dim: int, axes: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    return dims[:dim] + (axes,) + dims[dim + 1 :]


def _can_split(spec: Spec, shape: tuple[int, ...], sizes: Mapping[str, int], axis: str) -> list[int]:
    local = local_shape(spec, shape, sizes)
    return [dim for dim, n in enumerate(local) if n % sizes[axis] == 0 and n > 0]


def sent_bytes_factor(step: Step, sizes: Mapping[str, int]) -> float:
    """Bytes that one device sends in a step, as a multiple of the array's bytes (ring algorithms)."""
    if step.is_local:
        return 0.0
    if step.kind == "permute":
        return step.bytes_factor
    n = sizes[step.axis]
    share = {"all_reduce": 2.0, "reduce_scatter": 1.0, "all_gather": 1.0, "all_to_all": 1.0}
    return share[step.kind] * (n - 1) / n * step.bytes_factor


def reshard(
    source: Spec, target: Spec, shape: tuple[int, ...], sizes: Mapping[str, int], item_bytes: int = 4
) -> tuple[Step, ...] | None:
    """Cheapest walk of elementary moves from `source` to `target`; None when there is none.

    A partial sum can be resolved, but only a scalar made one. A walk costs the bytes sent per device + `STEP_BYTES` a
    collective.
    """
    if source == target:
        return ()
    return spec_graph(shape, tuple(sizes.items())).walks(source, prod(shape) * item_bytes).to(target)


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


class SpecGraph:
    """The specs of arrays of one shape, numbered as they are met, and the moves between them; see `spec_graph`."""

    def __init__(self, shape: tuple[int, ...], sizes: Mapping[str, int]) -> None:
        """Start without specs."""
        self.shape = shape
        self.sizes = sizes
        self.specs: list[Spec] = []
        self._numbers: dict[Spec, int] = {}
        self._moves: dict[int, tuple[tuple[Step, int, float, float], ...]] = {}
        self._walks: dict[tuple[Spec, int], Walks] = {}

    def number(self, spec: Spec) -> int:
        """The number of a spec."""
        number = self._numbers.get(spec)
        if number is None:
            number = self._numbers[spec] = len(self.specs)
            self.specs.append(spec)
        return number

    def moves(self, number: int) -> tuple[tuple[Step, int, float, float], ...]:
        """Moves from a spec: the step, where it leads, its `sent_bytes_factor`, and what it weighs besides."""
        if number not in self._moves:
            steps = moves(self.specs[number], self.shape, self.sizes)
            self._moves[number] = tuple(
                (step, self.number(step.spec), sent_bytes_factor(step, self.sizes), _weight(step)) for step in steps
            )
        return self._moves[number]

    def walks(self, source: Spec, array_bytes: int) -> Walks:
        """The cheapest walk to every spec that can be reached from `source`, for arrays of this size; see `reshard`."""
        key = (source, _bytes_that_matter(array_bytes, self.sizes))
        if key not in self._walks:
            self._walks[key] = Walks(self, *key)
        return self._walks[key]


def _weight(step: Step) -> float:
    """A local step costs a little too, so that a walk never wanders through pointless ones."""
    return 1.0 if step.is_local else STEP_BYTES


class Walks:
    """The cheapest walks from one spec, by Dijkstra's algorithm, which goes no farther than it is asked for."""

    def __init__(self, graph: SpecGraph, source: Spec, array_bytes: int) -> None:
        """Nothing is found yet."""
        self.graph = graph
        self.source = graph.number(source)
        self.array_bytes = array_bytes
        self._partial = frozenset(source.partial)
        self._best: dict[int, float] = {self.source: 0.0}
        self._came: dict[int, tuple[int, Step]] = {}
        self._done: set[int] = set()
        self._queue: list[tuple[float, int, int]] = [(0.0, 0, self.source)]
        self._discovered = count(1)  # breaks ties in order of discovery

    def to(self, target: Spec) -> tuple[Step, ...] | None:
        """The steps to a spec; None when it cannot be reached."""
        return self.to_number(self.graph.number(target))

    def to_number(self, number: int) -> tuple[Step, ...] | None:
        """The steps to the spec of this number in the graph; None when it cannot be reached."""
        if not self._finds(number):
            return None
        steps: list[Step] = []
        while number != self.source:
            number, step = self._came[number]
            steps.append(step)
        return tuple(reversed(steps))

    def _finds(self, number: int) -> bool:
        """Search until the cheapest walk to a spec is known; False when there is none."""
        if self.graph.shape and not self._partial.issuperset(self.graph.specs[number].partial):
            return False  # only scalars are made partial sums
        while number not in self._done and self._queue:
            cost, _, spec = heapq.heappop(self._queue)
            if cost <= self._best[spec]:
                self._done.add(spec)
                self._look_around(cost, spec)
        return number in self._done

    def _look_around(self, cost: float, spec: int) -> None:
        best, came = self._best, self._came
        for step, target, sent, weight in self.graph.moves(spec):
            total = cost + sent * self.array_bytes + weight
            known = best.get(target)
            if known is None or total < known:
                best[target] = total
                came[target] = (spec, step)
                heapq.heappush(self._queue, (total, next(self._discovered), target))


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
