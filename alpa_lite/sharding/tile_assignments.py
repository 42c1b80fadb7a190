"""XLA's shardings as text, and the mesh on which they are specs.

HLO names no mesh: a sharding lists the device that holds each tile of an array (`HloSharding::Parse` in XLA).

    {replicated}                                             every device holds the array
    {devices=[2,1,4]<=[8] last_tile_dim_replicate}           2 × 1 tiles, each on 4 devices, in the order 0 … 7
    {devices=[4,2]<=[2,4]T(1,0)}                             the order is that of iota(8).reshape(2, 4).transpose(1, 0)
    {devices=[2,2]0,2,1,3}                                   the order is given

Shardy names axes of a mesh, with parts of axes where it must (`"x":(1)2` is the major part of size 2 of the axis x).

    #sdy.sharding<@mesh, [{"data"}, {"x":(1)2}]>

Both become `Tiling`s: for each dim of an array, which of its blocks each device holds. On a mesh whose devices are
numbered in order, last axis fastest, dim d is split by the axes A if the number of a device's block is

    block_d(device)  =  Σ over a in A of coordinate_a(device) · weight_a                                     `spec_on`

where the weights are products of the sizes of the axes after a in A. The block as a function of the device's number
changes its slope at multiples of some strides alone; the strides of all arrays, if each divides the next, are those of
the axes of the coarsest mesh (`axes_of`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import numpy as np

from alpa_lite.errors import PlanError
from alpa_lite.sharding.specs import Spec

_DEVICES = re.compile(r"devices=\[([\d,]+)\](?:<=\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d,]+))(.*)", re.DOTALL)
_SHARDY = re.compile(
    r"#sdy\.sharding<\s*(?:@([\w.\"-]+)|mesh<\[([^\]]*)\]>)\s*,\s*\[(.*?)\]\s*(?:,\s*(.*?))?>$", re.DOTALL
)
_AXIS = re.compile(r'"([^"]+)"(?::\((\d+)\)(\d+))?')
_SIZE = re.compile(r'"([^"]+)"\s*=\s*(\d+)')


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """The blocks of an array that each device holds.

    Attributes:
        ways: the number of blocks of each dim; empty for an array of any rank that all devices hold whole.
        blocks: for each dim the number of the block of each device, by the device's number.
    """

    ways: tuple[int, ...]
    blocks: tuple[tuple[int, ...], ...]

    @property
    def is_whole(self) -> bool:
        """Whether every device holds the whole array."""
        return all(ways == 1 for ways in self.ways)


WHOLE = Tiling(ways=(), blocks=())


def hlo_tiling(text: str, num_devices: int) -> Tiling:
    """Return the tiling that a sharding of HLO, such as `{devices=[2,4]<=[8]}`, stands for.

    Raises `PlanError` for one that is no division into equal blocks among all devices.
    """
    # The source lines of a sharding stand inside it.
    inner = re.sub(r",?\s*metadata=\{.*\}", "", text.strip()[1:-1]).strip()
    if inner == "replicated" or (inner.startswith("maximal") and num_devices == 1):
        return WHOLE
    found = _DEVICES.fullmatch(inner)
    if found is None:
        raise PlanError(
            f"The sharding {_short(text)} is no division of an array among {num_devices} devices: what can be read is "
            "{replicated} and {devices=[…]…}. Give that array no such sharding."
        )
    dims = _numbers(found[1])
    count = prod(dims)
    if count != num_devices:
        raise PlanError(
            f"The sharding {_short(text)} names {count} devices, but the program is for {num_devices}. Give the text "
            "of one program, as compiled.as_text() returns it."
        )
    if found[4]:
        order = np.array(_numbers(found[4]))
    else:
        order = np.arange(count).reshape(_numbers(found[2])).transpose(_numbers(found[3]) if found[3] else None)
    if sorted(order.flat) != list(range(count)):
        raise PlanError(f"The sharding {_short(text)} does not name each of its {count} devices once.")
    rank = len(dims) - _subgroups(found[5], text)
    # The tile of each device; replicas have the same one.
    tiles = np.unravel_index(np.argsort(order.reshape(-1)), dims)
    return Tiling(ways=dims[:rank], blocks=tuple(tuple(map(int, each)) for each in tiles[:rank]))


def _subgroups(rest: str, text: str) -> int:
    """Return the number of dims of a tile assignment after those of the array: its replicas."""
    if not rest.strip():
        return 0
    if rest.strip() == "last_tile_dim_replicate":
        return 1
    kinds = re.fullmatch(r"\s*last_tile_dims=\{([\w, ]*)\}", rest)
    names = [name.strip() for name in kinds[1].split(",")] if kinds else [rest.strip()]
    if other := [name for name in names if name != "replicated"]:
        raise PlanError(
            f"The sharding {_short(text)} has devices that are {other[0]}, which a plan has no spec for. Give that "
            "array a sharding without such devices."
        )
    return len(names)


def shardy_mesh(text: str) -> dict[str, int]:
    """Return the devices per axis of a mesh of Shardy, such as `<["x"=2, "y"=4]>`. Raises `PlanError` for others."""
    ids = re.search(r"device_ids=\[([\d,\s]*)\]", text)
    axes = {name: int(size) for name, size in _SIZE.findall(text)}
    if ids is not None and _numbers(ids[1]) != (*range(prod(axes.values())),):
        raise PlanError(
            f"The mesh {_short(text)} has its devices in an order of their own, but a plan has those of the cluster "
            "in order. Make the mesh of devices in order."
        )
    return axes


def shardy_tiling(text: str, meshes: Mapping[str, Mapping[str, int]]) -> Tiling:
    """Return the tiling that a sharding of Shardy stands for; `meshes` are those of the module, by name.

    Dims left open are whole, apart from the axes that split them. Raises `PlanError` for partial sums and other forms.
    """
    found = _SHARDY.fullmatch(text.strip())
    mesh = None if found is None else shardy_mesh(found[2]) if found[1] is None else meshes.get(found[1].strip('"'))
    if found is None or mesh is None or "unreduced" in (found[4] or ""):
        raise PlanError(
            f"The sharding {_short(text)} cannot be read: what can be is #sdy.sharding<@MESH, [{{AXES}}, …]> on a mesh "
            "of the module, of whole sums."
        )
    sizes = tuple(mesh.values())
    coordinates = dict(zip(mesh, np.unravel_index(np.arange(prod(sizes)), sizes), strict=True)) if sizes else {}
    ways, blocks = list[int](), list[tuple[int, ...]]()
    for dim in re.findall(r"\{([^}]*)\}", found[3]):
        count, block = 1, np.zeros(prod(sizes), int)
        for name, before, part in _AXIS.findall(dim):
            size = int(part) if part else mesh[name]
            # Of an axis in parts, the sizes of the parts before this one and its own leave those after it.
            after = mesh[name] // (int(before or 1) * size)
            block = block * size + coordinates[name] // after % size
            count *= size
        ways.append(count)
        blocks.append(tuple(map(int, block)))
    return Tiling(ways=tuple(ways), blocks=tuple(blocks))


def axes_of(tilings: Iterable[Tiling], num_devices: int) -> tuple[int, ...] | None:
    """Return the sizes of the axes of the coarsest mesh on which all tilings are specs; None if there is none."""
    strides = {1, num_devices}
    for tiling in set(tilings):
        for ways, blocks in zip(tiling.ways, tiling.blocks, strict=True):
            if ways > 1:
                strides |= _strides(blocks)
    listed = sorted(strides)
    if any(large % small for small, large in pairwise(listed)):
        return None
    return tuple(large // small for small, large in pairwise(listed))[::-1]


def _strides(blocks: Sequence[int]) -> set[int]:
    """Return the multiples of which number of devices the block changes its slope at."""
    found, stride, count = {1}, 1, len(blocks)
    while stride < count:
        slope = blocks[stride] - blocks[0]
        length = 1
        while length * stride < count and blocks[length * stride] - blocks[0] == length * slope:
            length += 1
        # With a length of 1 nothing is left that could be an axis; `spec_on` says so.
        stride *= max(length, 2)
        found.add(min(stride, count))
    return found


def spec_on(tiling: Tiling, axes: Mapping[str, int], rank: int) -> Spec | None:
    """Return the spec that a tiling of an array is on a mesh with these devices per axis; None if it is none."""
    if not tiling.ways:
        return Spec(((),) * rank)
    total = prod(axes.values())
    dims = list[tuple[str, ...]]()
    for ways, blocks in zip(tiling.ways, tiling.blocks, strict=True):
        if len(blocks) != total:
            return None
        weights, expected, stride = dict[str, int](), np.zeros(total, int), total
        numbers = np.arange(total)
        for axis, size in axes.items():
            stride //= size
            weight = blocks[stride] - blocks[0] if size > 1 else 0
            expected += weight * (numbers // stride % size)
            if weight:
                weights[axis] = weight
        dim = tuple(sorted(weights, key=lambda axis: -weights[axis]))
        # What splits a dim into as many blocks as there are devices along its axes, in their order.
        is_spec = prod(axes[axis] for axis in dim) == ways and np.array_equal(expected, blocks)
        if not is_spec or any(weights[a] != weights[b] * axes[b] for a, b in pairwise(dim)):
            return None
        dims.append(dim)
    return Spec(tuple(dims))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number.strip())


def _short(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:100]}…"
