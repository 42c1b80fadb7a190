"""Specs: how one array lies on a logical mesh, and the collectives that lead from one spec to another.

A spec names, for each tensor dim, the mesh axes that split it (major first), and the axes over which the array is a
*partial sum*: each device holds an addend and the array is their sum.

    local size of dim d = size(d) / Π_{a ∈ dims[d]} |a|            (local_shape)

Resharding is a walk over specs by elementary moves (moves): all_gather takes the minor-most axis off a dim, slice
puts an unused axis on a dim (free), all_to_all moves the minor-most axis from one dim to another, all_reduce and
reduce_scatter resolve a partial sum, permute hands whole blocks from device to device (rearrangements), addend makes a
partial sum of a scalar (free). `walks.reshard` finds the cheapest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import permutations
from math import prod

import numpy as np


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
class Move:
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

    def below(self, num_dims: int) -> Move:
        """The same move of an array with more leading dims."""
        return replace(self, dim=self.dim + num_dims, target_dim=self.target_dim + num_dims) if num_dims else self


def moves(spec: Spec, shape: tuple[int, ...], sizes: Mapping[str, int]) -> Iterator[Move]:
    """Every elementary move that is possible from `spec`."""
    local, block = 1.0 / num_shards(spec, sizes), local_shape(spec, shape, sizes)
    used = spec.axes
    for axis in spec.partial:
        rest = tuple(a for a in spec.partial if a != axis)
        yield Move(kind="all_reduce", axes=(axis,), spec=Spec(spec.dims, rest), bytes_factor=local)
        for dim in _can_split(block, sizes[axis]):
            yield Move(
                kind="reduce_scatter",
                axes=(axis,),
                dim=dim,
                spec=Spec(_with(spec.dims, dim, (*spec.dims[dim], axis)), rest),
                bytes_factor=local,
            )
    for axis in (a for a in sizes if a not in used):
        if not shape:
            yield addend(spec, axis)
        for dim in _can_split(block, sizes[axis]):
            yield Move(
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
        yield Move(kind="all_gather", axes=(axis,), dim=dim, spec=gathered, bytes_factor=local * sizes[axis])
        for target in _can_split(block, sizes[axis]):
            if target != dim:
                yield Move(
                    kind="all_to_all",
                    axes=(axis,),
                    dim=dim,
                    target_dim=target,
                    spec=Spec(_with(shorter, target, (*shorter[target], axis)), spec.partial),
                    bytes_factor=local,
                )

    yield from rearrangements(spec, sizes)


def addend(spec: Spec, axis: str) -> Move:
    """The move to a partial sum over an unused axis: the first device along it keeps its block, others take zeros."""
    summed = Spec(spec.dims, tuple(sorted((*spec.partial, axis))))
    return Move(kind="addend", axes=(axis,), spec=summed, bytes_factor=0.0)


def rearrangements(spec: Spec, sizes: Mapping[str, int]) -> Iterator[Move]:
    """The permutes: other specs with blocks of the same shape, each device sending its block to one other device."""
    if not any(spec.dims):
        return
    free = tuple(a for a in sizes if a not in spec.partial)
    blocks = tuple(prod(sizes[a] for a in axes) for axes in spec.dims)
    local = 1.0 / num_shards(spec, sizes)
    for dims in _arranged(blocks, free, tuple(sizes.items())):
        if dims != spec.dims:
            changed = tuple((old, new) for old, new in zip(spec.dims, dims, strict=True) if old != new)
            axes, pairs = _permutation(changed, tuple(sizes.items()))
            yield Move(kind="permute", axes=axes, pairs=pairs, spec=Spec(dims, spec.partial), bytes_factor=local)


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


@lru_cache(maxsize=10_000)
def _permutation(
    changed: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...], sizes_items: tuple[tuple[str, int], ...]
) -> tuple[tuple[str, ...], tuple[tuple[int, int], ...]]:
    """The mesh axes that matter, and for each group along them who sends to whom.

    `changed`: of dims that change, the axes that split them before and after. A device sends its block to one that
    needs it; copies along axes unused in the source go to the copies wanted along axes unused in the target.
    """
    sizes = dict(sizes_items)
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


def _can_split(block: Sequence[int], size: int) -> list[int]:
    return [dim for dim, n in enumerate(block) if n % size == 0 and n > 0]


def sent_bytes_factor(step: Move, sizes: Mapping[str, int]) -> float:
    """Bytes that one device sends in a step, as a multiple of the array's bytes (ring algorithms)."""
    if step.is_local:
        return 0.0
    if step.kind == "permute":
        return step.bytes_factor
    n = sizes[step.axis]
    share = {"all_reduce": 2.0, "reduce_scatter": 1.0, "all_gather": 1.0, "all_to_all": 1.0}
    return share[step.kind] * (n - 1) / n * step.bytes_factor
