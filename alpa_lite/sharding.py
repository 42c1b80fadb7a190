"""Specs: how one array lies on a logical mesh, and the collectives that lead from one spec to another.

A spec names, for each tensor dim, the mesh axes that split it (major first), and the axes over which the array is a
*partial sum*: each device holds an addend and the array is their sum.

    local size of dim d = size(d) / Π_{a ∈ dims[d]} |a|            (local_shape)

Resharding is a walk over specs by elementary moves (moves): all_gather takes the minor-most axis off a dim, slice
puts an unused axis on a dim (free), all_to_all moves the minor-most axis from one dim to another, all_reduce and
reduce_scatter resolve a partial sum. The cheapest walk by bytes sent per device is found once and cached (reshard).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod

#: What one more collective weighs against bytes when two walks are compared: prefers fewer, larger steps.
STEP_BYTES = 1024.0


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
    """One elementary move of a resharding over one mesh axis.

    kind: all_reduce, reduce_scatter, all_gather, all_to_all, or slice (local). `dim` is the tensor dim that loses
    (all_gather, all_to_all) or gains (slice, reduce_scatter) the axis; `target_dim` the one that gains it in an
    all_to_all. `spec` is the layout afterwards. `bytes_factor` × array bytes = buffer of the collective per device, by
    the convention of `cost_models.Collective`.
    """

    kind: str
    axis: str
    dim: int = -1
    target_dim: int = -1
    spec: Spec
    bytes_factor: float


def moves(spec: Spec, shape: tuple[int, ...], sizes: Mapping[str, int]) -> Iterator[Step]:
    """Every elementary move that is possible from `spec`."""
    local = 1.0 / num_shards(spec, sizes)
    used = spec.axes
    for axis in spec.partial:
        rest = tuple(a for a in spec.partial if a != axis)
        yield Step(kind="all_reduce", axis=axis, spec=Spec(spec.dims, rest), bytes_factor=local)
        for dim in _can_split(spec, shape, sizes, axis):
            yield Step(
                kind="reduce_scatter",
                axis=axis,
                dim=dim,
                spec=Spec(_with(spec.dims, dim, (*spec.dims[dim], axis)), rest),
                bytes_factor=local,
            )
    for axis in (a for a in sizes if a not in used):
        for dim in _can_split(spec, shape, sizes, axis):
            yield Step(
                kind="slice",
                axis=axis,
                dim=dim,
                spec=Spec(_with(spec.dims, dim, (*spec.dims[dim], axis)), spec.partial),
                bytes_factor=0.0,
            )
    for dim, axes in enumerate(spec.dims):
        if not axes:
            continue
        axis, shorter = axes[-1], _with(spec.dims, dim, axes[:-1])
        gathered = Spec(shorter, spec.partial)
        yield Step(kind="all_gather", axis=axis, dim=dim, spec=gathered, bytes_factor=local * sizes[axis])
        for target in _can_split(gathered, shape, sizes, axis):
            if target != dim:
                yield Step(
                    kind="all_to_all",
                    axis=axis,
                    dim=dim,
                    target_dim=target,
                    spec=Spec(_with(shorter, target, (*shorter[target], axis)), spec.partial),
                    bytes_factor=local,
                )


def _with(dims: tuple[tuple[str, ...], ...], dim: int, axes: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    return dims[:dim] + (axes,) + dims[dim + 1 :]


def _can_split(spec: Spec, shape: tuple[int, ...], sizes: Mapping[str, int], axis: str) -> list[int]:
    local = local_shape(spec, shape, sizes)
    return [dim for dim, n in enumerate(local) if n % sizes[axis] == 0 and n > 0]


def sent_bytes_factor(step: Step, sizes: Mapping[str, int]) -> float:
    """Bytes that one device sends in a step, as a multiple of the array's bytes (ring algorithms)."""
    n = sizes[step.axis]
    share = {"all_reduce": 2.0, "reduce_scatter": 1.0, "all_gather": 1.0, "all_to_all": 1.0, "slice": 0.0}
    return share[step.kind] * (n - 1) / n * step.bytes_factor


def reshard(
    source: Spec, target: Spec, shape: tuple[int, ...], sizes: Mapping[str, int], item_bytes: int = 4
) -> tuple[Step, ...] | None:
    """Cheapest walk of elementary moves from `source` to `target`; None when there is none.

    A partial sum can be resolved but never created. A walk costs the bytes sent per device + `STEP_BYTES` a collective.
    """
    if source == target:
        return ()
    return _cheapest_walk(source, target, shape, tuple(sizes.items()), item_bytes)


@lru_cache(maxsize=200_000)
def _cheapest_walk(
    source: Spec, target: Spec, shape: tuple[int, ...], sizes_items: tuple[tuple[str, int], ...], item_bytes: int
) -> tuple[Step, ...] | None:
    sizes = dict(sizes_items)
    if not set(target.partial) <= set(source.partial) or not divides(target, shape, sizes):
        return None
    array_bytes = prod(shape) * item_bytes
    best: dict[Spec, float] = {source: 0.0}
    queue: list[tuple[float, int, Spec, tuple[Step, ...]]] = [(0.0, 0, source, ())]
    count = 0
    while queue:
        cost, _, spec, walk = heapq.heappop(queue)
        if spec == target:
            return walk
        if cost > best[spec]:
            continue
        for step in moves(spec, shape, sizes):
            if not set(target.partial) <= set(step.spec.partial):
                continue
            # A slice costs a little too, so that a walk never wanders through pointless ones.
            weight = STEP_BYTES if step.kind != "slice" else 1.0
            total = cost + sent_bytes_factor(step, sizes) * array_bytes + weight
            if total < best.get(step.spec, float("inf")):
                best[step.spec] = total
                count += 1
                heapq.heappush(queue, (total, count, step.spec, (*walk, step)))
    return None
