"""Specs: the layout of one array on a logical mesh, and the elementary moves from one spec to another.

A spec names, for each tensor dim, the mesh axes that split it (major first), and the axes over which the array is a
*partial sum*: each device holds an addend and the array is their sum.

    local size of dim d = size(d) / Π_{a ∈ dims[d]} |a|            (local_shape)

A resharding is a sequence of elementary moves (`moves`):

    all_gather                   removes the minor-most mesh axis from a dim
    slice                        adds an unused mesh axis to a dim (no communication)
    all_to_all                   moves the minor-most mesh axis from one dim to another
    all_reduce, reduce_scatter   resolve a partial sum
    permute                      sends whole blocks from device to device                     (`rearrangements`)
    addend                       makes a partial sum of a scalar (no communication)

`sharding.reshard.reshard` returns the cheapest sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import permutations
from math import prod

import numpy as np

from alpa_lite.program.memo import memoized


@dataclass(frozen=True, slots=True)
class Spec:
    """The mesh axes that split each tensor dim (major first), and the axes of a partial sum (sorted)."""

    dims: tuple[tuple[str, ...], ...]
    partial: tuple[str, ...] = ()

    @property
    def axes(self) -> frozenset[str]:
        """The mesh axes that the spec uses, for tensor dims or for the partial sum."""
        return frozenset(axis for dim in self.dims for axis in dim) | frozenset(self.partial)

    @property
    def is_replicated(self) -> bool:
        """True when every device holds the whole array."""
        return not self.axes

    def without_partial(self) -> Spec:
        """Return the same spec without a partial sum."""
        return Spec(self.dims)

    def __str__(self) -> str:
        """Return text like `[data, -]+model`: `-` for a dim that is not split, `+axis` for a partial sum."""
        text = ", ".join("·".join(axes) or "-" for axes in self.dims)
        return f"[{text}]" + "".join(f"+{axis}" for axis in self.partial)


def replicated(rank: int) -> Spec:
    """Return the spec of an array of this rank that is replicated on every device."""
    return Spec(((),) * rank)


def divides(spec: Spec, shape: tuple[int, ...], sizes: Mapping[str, int]) -> bool:
    """Return True if the size of every dim is a multiple of the number of devices that split it."""
    return all(n % prod(sizes[a] for a in axes) == 0 for n, axes in zip(shape, spec.dims, strict=True))


def local_shape(spec: Spec, shape: tuple[int, ...], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape of the block that each device holds; `sizes` maps mesh axes to numbers of devices."""
    return tuple(n // prod(sizes[a] for a in axes) for n, axes in zip(shape, spec.dims, strict=True))


def num_shards(spec: Spec, sizes: Mapping[str, int]) -> int:
    """Return the number of different blocks into which the spec splits an array."""
    return prod(sizes[a] for axes in spec.dims for a in axes)


class MoveKind(StrEnum):
    """The kinds of moves: collectives, and the local operations slice and addend."""

    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    ALL_TO_ALL = "all_to_all"
    PERMUTE = "permute"
    SLICE = "slice"
    ADDEND = "addend"


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One elementary move of a resharding.

    kind           the collective or the local operation
    axes           the mesh axis of the move; several for a permute
    dim            the tensor dim that loses (all_gather, all_to_all) or gains (slice, reduce_scatter) the axis
    target_dim     the tensor dim that gains the axis in an all_to_all
    pairs          the (source, target) devices of a permute, numbered along `axes` with the last axis fastest
    spec           the spec after the move
    bytes_factor   buffer bytes of the collective per device as a multiple of the array bytes, by the convention of
                   `cost_models.Collective`
    """

    kind: MoveKind
    axes: tuple[str, ...]
    dim: int = -1
    target_dim: int = -1
    pairs: tuple[tuple[int, int], ...] = ()
    spec: Spec
    bytes_factor: float

    @property
    def is_local(self) -> bool:
        """True if the move needs no communication."""
        return self.kind in (MoveKind.SLICE, MoveKind.ADDEND)

    @property
    def axis(self) -> str:
        """The mesh axis of a move over a single axis. Raises ValueError for a move over several."""
        (axis,) = self.axes
        return axis

    def below(self, num_dims: int) -> Move:
        """Return the same move for an array with `num_dims` additional leading dims."""
        return replace(self, dim=self.dim + num_dims, target_dim=self.target_dim + num_dims) if num_dims else self


def moves(spec: Spec, shape: tuple[int, ...], sizes: Mapping[str, int]) -> Iterator[Move]:
    """Yield every elementary move from `spec` that keeps all blocks of equal size.

    The order is deterministic: `SpecGraph.step` identifies a move by its position.
    """
    local, block = 1.0 / num_shards(spec, sizes), local_shape(spec, shape, sizes)
    # An axis splits one dim at most, or is summed over; a second use would leave blocks undefined.
    used = spec.axes
    for axis in spec.partial:
        rest = tuple(a for a in spec.partial if a != axis)
        yield Move(kind=MoveKind.ALL_REDUCE, axes=(axis,), spec=Spec(spec.dims, rest), bytes_factor=local)
        for dim in _can_split(block, sizes[axis]):
            yield Move(
                kind=MoveKind.REDUCE_SCATTER,
                axes=(axis,),
                dim=dim,
                spec=Spec(_with(spec.dims, dim, (*spec.dims[dim], axis)), rest),
                bytes_factor=local,
            )
    for axis in (a for a in sizes if a not in used):
        # A scalar has no dim to slice, and may only become one addend of a partial sum.
        if not shape:
            yield addend(spec, axis)
        for dim in _can_split(block, sizes[axis]):
            yield Move(
                kind=MoveKind.SLICE,
                axes=(axis,),
                dim=dim,
                spec=Spec(_with(spec.dims, dim, (*spec.dims[dim], axis)), spec.partial),
                bytes_factor=0.0,
            )
    for dim, axes in enumerate(spec.dims):
        if not axes:
            continue
        # Only the minor-most axis: its blocks are adjacent, while a gather along any other axis would interleave them.
        axis, shorter = axes[-1], _with(spec.dims, dim, axes[:-1])
        gathered = Spec(shorter, spec.partial)
        # The bytes are the size of the gathered result, by the convention of `cost_models.work`.
        yield Move(kind=MoveKind.ALL_GATHER, axes=(axis,), dim=dim, spec=gathered, bytes_factor=local * sizes[axis])
        for target in _can_split(block, sizes[axis]):
            if target != dim:
                yield Move(
                    kind=MoveKind.ALL_TO_ALL,
                    axes=(axis,),
                    dim=dim,
                    target_dim=target,
                    spec=Spec(_with(shorter, target, (*shorter[target], axis)), spec.partial),
                    bytes_factor=local,
                )

    yield from rearrangements(spec, sizes)


def addend(spec: Spec, axis: str) -> Move:
    """Return the move to a partial sum over an unused axis: all devices but the first along it take zeros."""
    # Sorted, since the order of the axes of a sum means nothing and specs of equal meaning must be equal.
    summed = Spec(spec.dims, tuple(sorted((*spec.partial, axis))))
    return Move(kind=MoveKind.ADDEND, axes=(axis,), spec=summed, bytes_factor=0.0)


def rearrangements(spec: Spec, sizes: Mapping[str, int]) -> Iterator[Move]:
    """Yield the permutes to all other specs with blocks of the same shape; each device sends to one other device."""
    # An array that no dim splits has no blocks to rearrange.
    if not any(spec.dims):
        return
    # The devices along an axis of a partial sum hold different addends, not copies that could be exchanged.
    free = tuple(a for a in sizes if a not in spec.partial)
    blocks = tuple(prod(sizes[a] for a in axes) for axes in spec.dims)
    local = 1.0 / num_shards(spec, sizes)
    # Pairs in mesh order, as a mapping is no key of a cache.
    for dims in _arranged(blocks, free, tuple(sizes.items())):
        if dims != spec.dims:
            changed = tuple((old, new) for old, new in zip(spec.dims, dims, strict=True) if old != new)
            axes, pairs = _permutation(changed, tuple(sizes.items()))
            yield Move(kind=MoveKind.PERMUTE, axes=axes, pairs=pairs, spec=Spec(dims, spec.partial), bytes_factor=local)


@memoized(entries=10_000)
def _arranged(
    counts: tuple[int, ...], free: tuple[str, ...], sizes_items: tuple[tuple[str, int], ...]
) -> tuple[tuple[tuple[str, ...], ...], ...]:
    return tuple(_arrangements(counts, free, dict(sizes_items)))


def _arrangements(
    counts: Sequence[int], free: Sequence[str], sizes: Mapping[str, int]
) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Yield every assignment of ordered mesh axes to dims that splits dim d into `counts[d]` blocks."""
    if not counts:
        yield ()
        return
    for number in range(len(free) + 1):
        for axes in permutations(free, number):
            if prod(sizes[a] for a in axes) == counts[0]:
                rest = [a for a in free if a not in axes]
                yield from ((axes, *others) for others in _arrangements(counts[1:], rest, sizes))


@memoized(entries=10_000)
def _permutation(
    changed: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...], sizes_items: tuple[tuple[str, int], ...]
) -> tuple[tuple[str, ...], tuple[tuple[int, int], ...]]:
    """Return the mesh axes of a permute and its (source, target) device pairs within each group along these axes.

    `changed` holds, for each dim that changes, the axes that split it before and after. Copies of a block along axes
    unused in the source are sent to the copies along axes unused in the target.
    """
    sizes = dict(sizes_items)
    involved = {a for old, new in changed for a in (*old, *new)}
    axes = tuple(a for a in sizes if a in involved)
    used = [tuple(a for side in changed for a in side[i]) for i in (0, 1)]
    orders = [[*axes_of, *(a for a in axes if a not in axes_of)] for axes_of in used]
    # Order the devices of each side by block, then by copy: devices at the same position form a pair.
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


def _can_split(block: Sequence[int], size: int) -> list[int]:
    # An empty dim is a multiple of every size, but splitting it achieves nothing.
    return [dim for dim, n in enumerate(block) if n % size == 0 and n > 0]


def sent_bytes_factor(step: Move, sizes: Mapping[str, int]) -> float:
    """Return the bytes that one device sends in a move as a multiple of the array bytes, for ring algorithms."""
    if step.is_local:
        return 0.0
    if step.kind is MoveKind.PERMUTE:
        return step.bytes_factor
    n = sizes[step.axis]
    share = {"all_reduce": 2.0, "reduce_scatter": 1.0, "all_gather": 1.0, "all_to_all": 1.0}
    return share[step.kind] * (n - 1) / n * step.bytes_factor
