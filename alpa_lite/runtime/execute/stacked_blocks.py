"""A stacked array between steps whose stages hold different numbers of its rows, or in other forms: `alpa_lite.sharding.stacked_rest`
says where, and here its rows are moved there and back, from device to device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from alpa_lite import _jax
from alpa_lite.runtime.execute.placing import Placing
from alpa_lite.runtime.execute.stacked_runs import STAGE_AXIS, Run
from alpa_lite.runtime.job.processes import any_here, devices_of
from alpa_lite.sharding.stacked_rest import resting

GROUP_AXIS = "group"
"""Mesh axis of the devices that have a block together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shelf:
    """Consecutive blocks of an array at rest that have rows of the same runs: (number of the run, first and last + 1
    row, counted in the run), in order."""

    sharding: NamedSharding
    sources: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, kw_only=True)
class Rest:
    """Where an array of several runs lies between steps that is no joint array; see `alpa_lite.sharding.stacked_rest`."""

    sharding: NamedSharding
    shelves: tuple[Shelf, ...]

    @staticmethod
    def of(runs: Sequence[Run], shape: Sequence[int]) -> Rest:
        """For an array of this shape."""
        meshes = list(dict.fromkeys(run.sharding.mesh for run in runs))
        devices = [devices_of(mesh) for mesh in meshes]
        owners = [number for number, run in enumerate(runs) for _ in range(run.num_rows)]
        places = [meshes.index(runs[number].sharding.mesh) for number in owners]
        at = resting(tuple(shape), tuple(places), tuple(map(len, devices)))
        groups = [
            devices[holder][first : first + at.group_size]
            for holder, first in zip(at.holders, at.first_devices, strict=True)
        ]

        def over(first: int, last: int) -> NamedSharding:
            """Of the rows of some blocks."""
            mesh = Mesh(np.array(groups[first:last]), (STAGE_AXIS, GROUP_AXIS))
            inner = () if at.split_dim is None else (*[None] * (at.split_dim - 1), GROUP_AXIS)
            return NamedSharding(mesh, PartitionSpec(STAGE_AXIS, *inner))

        size, shelves = at.rows_per_block, list[Shelf]()
        read_by = [tuple(dict.fromkeys(owners[b * size : (b + 1) * size])) for b in range(len(groups))]
        # Blocks of one run that follow each other are moved together, one of several runs by itself.
        for _, blocks in groupby(enumerate(read_by), key=lambda each: each[1] if len(each[1]) == 1 else each):
            numbers = [block for block, _ in blocks]
            start, stop = numbers[0] * size, (numbers[-1] + 1) * size
            sources = tuple((owner, *runs[owner].part(start, stop)) for owner in read_by[numbers[0]])
            shelves.append(Shelf(sharding=over(numbers[0], numbers[-1] + 1), sources=sources))
        return Rest(sharding=over(0, len(groups)), shelves=tuple(shelves))

    def put(self, runs: Sequence[Any], placing: Placing) -> Any:
        """The whole array from those of its runs."""
        shelved = list[Any]()
        for shelf in self.shelves:
            pieces = [placing.carried(runs[n], start, stop, shelf.sharding).array for n, start, stop in shelf.sources]
            here = any_here(devices_of(shelf.sharding.mesh))
            shelved.append(_joined(shelf.sharding)(pieces) if here and len(pieces) > 1 else pieces[0])
        blocks = [block for x in shelved for block in _jax.blocks(x)]
        shape = (sum(x.shape[0] for x in runs), *runs[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, self.sharding, blocks, dtype=runs[0].dtype)


@lru_cache(maxsize=1024)
def _joined(sharding: NamedSharding) -> Callable[..., Any]:
    """What puts pieces one after the other."""
    return jax.jit(jax.numpy.concatenate, out_shardings=sharding)
