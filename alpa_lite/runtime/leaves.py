"""Arguments and results of a step as one array each, though a program may hold them in parts on several stages.

A stacked array [layers, ...] whose parts live on stages of one form is a single `jax.Array` over the devices of all of
them, split over a mesh axis "stage": its shards are those of the parts, nothing moves between steps (joint_sharding).
Parts that do not fit together so (stages with other meshes, specs or numbers of layers) are put together on the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, islice
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from alpa_lite import _jax
from alpa_lite.graph.phases import Part
from alpa_lite.runtime.placing import Placing
from alpa_lite.runtime.processes import any_here, devices_of, handle, is_here
from alpa_lite.runtime.relocation import Windows

STAGE_AXIS = "stage"
"""Mesh axis over which the leading dim of a joint array is split."""


@dataclass(frozen=True, kw_only=True)
class Run:
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


def joint_sharding(runs: Sequence[Run]) -> NamedSharding | None:
    """The sharding of the whole array over the stages of its runs; None when they do not fit together."""

    def form(run: Run) -> object:
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


@dataclass(frozen=True, kw_only=True)
class Stack:
    """One argument or result in parts."""

    runs: tuple[Run, ...]

    @cached_property
    def joint(self) -> NamedSharding | None:
        """See `joint_sharding`."""
        return joint_sharding(self.runs)

    @property
    def sharding(self) -> NamedSharding:
        """Where the whole array lives between steps."""
        return self.joint or NamedSharding(self.runs[0].sharding.mesh, PartitionSpec())

    def split(self, array: Any, placing: Placing) -> list[Any]:
        """The parts, each on its stage."""
        if self.joint is None or not isinstance(array, jax.Array) or array.sharding != self.joint:
            return [self._part(array, a, b, run, placing) for run in self.runs for a, b in run.rows]
        blocks, parts = iter(_jax.blocks(array)), list[Any]()
        for run in self.runs:
            shape = (run.num_rows, *array.shape[1:])
            mine = list(islice(blocks, run.num_blocks))
            whole = jax.make_array_from_single_device_arrays(shape, run.sharding, mine, dtype=array.dtype)
            parts += run.split(whole)
        return parts

    @staticmethod
    def _part(array: Any, start: int, stop: int, run: Run, placing: Placing) -> Any:
        rows = Windows(dim=0, start=start, size=stop - start, count=1)
        return placing.rows(placing.staged(array, rows, run.sharding), rows, 0, run.sharding)

    def join(self, parts: Sequence[Any], placing: Placing) -> Any:
        """The whole array."""
        rest = iter(parts)
        joined = [run.join([next(rest) for _ in run.rows]) for run in self.runs]
        if self.joint is None:
            moved = [placing.put(x, self.sharding) for x in joined]
            shape = (self.runs[-1].rows[-1][1], *moved[0].shape[1:])
            return self._on_first(moved) if self.runs[0].is_here else handle(shape, moved[0].dtype, self.sharding)
        shards = [block for x in joined for block in _jax.blocks(x)]
        shape = (sum(x.shape[0] for x in joined), *joined[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, self.joint, shards, dtype=joined[0].dtype)

    @cached_property
    def _on_first(self) -> Any:
        return jax.jit(jax.numpy.concatenate, out_shardings=self.sharding)


class Leaves:
    """All arguments (or all results) of a step: whole arrays, some of them in parts inside."""

    def __init__(self, parts: Sequence[Part], shardings: Sequence[NamedSharding], placing: Placing) -> None:
        """Of each graph input (or output), in order, what it is a part of and where it is."""
        self._placing = placing
        self.whole: list[NamedSharding | Stack] = []
        for _, members in groupby(zip(parts, shardings, strict=True), key=lambda member: member[0].leaf):
            self.whole.append(_leaf(list(members)))
        self.in_parts = any(isinstance(whole, Stack) for whole in self.whole)

    def sharding(self, leaf: int) -> NamedSharding:
        """Where a whole array lives between steps."""
        found = self.whole[leaf]
        return found.sharding if isinstance(found, Stack) else found

    def split(self, leaves: Sequence[Any]) -> list[Any]:
        """Graph inputs from arguments."""
        if not self.in_parts:
            return list(leaves)
        parts: list[Any] = []
        for array, whole in zip(leaves, self.whole, strict=True):
            parts += whole.split(array, self._placing) if isinstance(whole, Stack) else [array]
        return parts

    def join(self, parts: Sequence[Any]) -> list[Any]:
        """Results from graph outputs."""
        if not self.in_parts:
            return list(parts)
        rest = iter(parts)
        return [
            whole.join([next(rest) for run in whole.runs for _ in run.rows], self._placing)
            if isinstance(whole, Stack)
            else next(rest)
            for whole in self.whole
        ]


def _leaf(members: Sequence[tuple[Part, NamedSharding]]) -> NamedSharding | Stack:
    if members[0][0].rows is None:
        return members[0][1]
    runs = groupby(members, key=lambda member: member[1])
    return Stack(
        runs=tuple(
            Run(rows=tuple(part.rows for part, _ in run if part.rows is not None), sharding=sharding)
            for sharding, run in runs
        )
    )
