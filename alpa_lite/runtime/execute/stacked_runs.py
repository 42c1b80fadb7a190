"""Consecutive parts of a stacked array on one stage, and when those of several stages are one array as they lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from alpa_lite.runtime.job.processes import any_here, devices_of, handle, is_here

STAGE_AXIS = "stage"
"""Mesh axis over which the leading dim of a joint array is split."""


@dataclass(frozen=True, kw_only=True)
class RowBlocks:
    """Consecutive parts on one stage: the rows of each, counted in the whole array, and their common sharding."""

    rows: tuple[tuple[int, int], ...]
    sharding: NamedSharding

    @property
    def devices(self) -> Any:
        """The stage's devices as the array of its mesh."""
        return np.asarray(self.sharding.mesh.devices)

    @property
    def num_rows(self) -> int:
        """Rows of all parts together."""
        return self.rows[-1][1] - self.rows[0][0]

    def part(self, start: int, stop: int) -> tuple[int, int]:
        """Which of its own rows, counted from its first, are among those from `start` to `stop` of the whole array."""
        first, last = self.rows[0][0], self.rows[-1][1]
        return max(start, first) - first, min(stop, last) - first

    @cached_property
    def is_here(self) -> bool:
        """Whether the stage has a device of this process."""
        return any_here(devices_of(self.sharding.mesh))

    @cached_property
    def num_blocks(self) -> int:
        """Devices of the stage that belong to this process."""
        return sum(map(is_here, devices_of(self.sharding.mesh)))

    def join(self, parts: Sequence[Any]) -> Any:
        """The parts as one array on the stage."""
        if len(parts) == 1:
            return parts[0]
        if not self.is_here:
            return handle((self.num_rows, *parts[0].shape[1:]), parts[0].dtype, self.sharding)
        return self._join(list(parts))

    def split(self, array: Any) -> list[Any]:
        """Inverse of `join`."""
        if len(self.rows) == 1:
            return [array]
        if not self.is_here:
            return [handle((b - a, *array.shape[1:]), array.dtype, self.sharding) for a, b in self.rows]
        return self._split(array)

    @cached_property
    def _join(self) -> Any:
        return jax.jit(jax.numpy.concatenate, out_shardings=self.sharding)

    @cached_property
    def _split(self) -> Any:
        first = self.rows[0][0]
        bounds = [(start - first, stop - first) for start, stop in self.rows]
        return jax.jit(lambda x: [x[start:stop] for start, stop in bounds], out_shardings=self.sharding)


def joint_sharding(runs: Sequence[RowBlocks]) -> NamedSharding | None:
    """The sharding of the whole array over the stages of its runs; None when they do not fit together."""

    def form(run: RowBlocks) -> object:
        return run.num_rows, run.sharding.spec, run.sharding.mesh.axis_names, run.devices.shape

    first = runs[0].sharding
    meshes = {run.sharding.mesh for run in runs}
    if any(form(run) != form(runs[0]) for run in runs) or len(meshes) < len(runs):
        return None
    if len(runs) == 1:
        return first
    mesh = Mesh(np.stack([run.devices for run in runs]), (STAGE_AXIS, *first.mesh.axis_names))
    leading, *rest = first.spec or (None,)
    inner = () if leading is None else leading if isinstance(leading, tuple) else (leading,)
    return NamedSharding(mesh, PartitionSpec((STAGE_AXIS, *inner), *rest))
