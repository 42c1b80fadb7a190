"""Which stages a plan may consist of, where they are to be alike."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import reduce
from itertools import product
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from alpa_lite.inter_op.space import Space

Equal = Literal["layers", "devices"]
"""What all stages may be asked to have equally many of."""


def ways(
    space: Space, num_layers: int, equal: Collection[Equal], *, one_mesh: bool, repeats: int
) -> Iterator[NDArray[np.bool_]]:
    """Which stages a plan may consist of, one way after the other: masks that broadcast to [layers, layers, kinds,
    configurations].

    `equal`: what its stages have equally many of. `one_mesh`: whether they have one logical mesh. `repeats`: how many
    times the configurations of a kind repeat its shapes.
    """
    found: list[list[NDArray[np.bool_]]] = []
    if one_mesh:
        found.append([np.tile(mask, repeats) for mask in _in_one_mesh(space)])
    if "devices" in equal:
        devices = np.array(space.devices)
        found.append([(devices == n)[:, None] for n in dict.fromkeys(space.devices)])
    if "layers" in equal:
        number = np.arange(num_layers)
        length = (number[None, :] - number[:, None] + 1)[..., None, None]
        found.append([length == n for n in range(1, num_layers + 1) if num_layers % n == 0])
    for masks in product(*found):
        yield reduce(np.logical_and, masks, np.ones((), dtype=np.bool_))


def equal_parts(space: Space, num_layers: int) -> NDArray[np.bool_]:
    """[layers, layers, kinds]: which stages are some of equal ones."""
    found = np.zeros((num_layers, num_layers, len(space.kinds)), dtype=np.bool_)
    for first, last, kind in np.argwhere(space.in_order(num_layers)).tolist():
        found[first, last, kind] = number_of_equal(space, num_layers, first, last, kind) is not None
    return found


def number_of_equal(space: Space, num_layers: int, first: int, last: int, kind: int) -> int | None:
    """Of how many stages, equal in layers and devices, some layers are one; None if they are not."""
    length, devices = last + 1 - first, space.devices[kind]
    count = num_layers // length
    aligned = num_layers % length == 0 and first % length == 0
    return count if aligned and count * devices == space.cluster.num_devices else None


def _in_one_mesh(space: Space) -> Iterator[NDArray[np.bool_]]:
    """[kinds, shapes]: where each logical mesh is."""
    for mesh in dict.fromkeys(mesh for of_kind in space.meshes for mesh in of_kind):
        found = np.zeros((len(space.kinds), space.most_shapes), dtype=np.bool_)
        for kind, of_kind in enumerate(space.meshes):
            found[kind, : len(of_kind)] = [each == mesh for each in of_kind]
        yield found
