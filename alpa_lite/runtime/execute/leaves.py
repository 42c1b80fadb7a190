"""Arguments and results of a step as one array each, though a program may hold them in parts on several stages.

A stacked array [layers, ...] whose parts live on stages of one form is a single `jax.Array` over the devices of all of
them, split over a mesh axis "stage": its shards are those of the parts, nothing moves between steps
(`runs.joint_sharding`). Parts that do not fit together so (stages with other meshes, specs or numbers of layers) lie in
equal blocks between steps, on devices of their own stages as far as that goes (`rest`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, islice
from typing import Any

import jax
from jax.sharding import NamedSharding

from alpa_lite import _jax
from alpa_lite.program.phases import Part
from alpa_lite.runtime.execute.placing import Placing
from alpa_lite.runtime.execute.relocation import Windows
from alpa_lite.runtime.execute.stacked_blocks import Rest
from alpa_lite.runtime.execute.stacked_runs import Run, joint_sharding


@dataclass(frozen=True, kw_only=True)
class Stack:
    """One argument or result in parts, and the shape of all of it."""

    runs: tuple[Run, ...]
    shape: tuple[int, ...]

    @cached_property
    def joint(self) -> NamedSharding | None:
        """See `joint_sharding`."""
        return joint_sharding(self.runs)

    @cached_property
    def rest(self) -> Rest:
        """Where it lies between steps if it is no joint array."""
        return Rest.of(self.runs, self.shape)

    @property
    def sharding(self) -> NamedSharding:
        """Where the whole array lives between steps."""
        return self.joint or self.rest.sharding

    def split(self, array: Any, placing: Placing, *, donated: bool) -> list[Any]:
        """The parts, each on its stage. `donated`: the array is not needed any more."""
        if not isinstance(array, jax.Array) or array.sharding != self.sharding:
            return [self._part(array, a, b, run, placing) for run in self.runs for a, b in run.rows]
        if self.joint is None:
            carried = [placing.carried(array, run.rows[0][0], run.rows[-1][1], run.sharding) for run in self.runs]
            parts = [part for run, x in zip(self.runs, carried, strict=True) for part in run.split(x.array)]
            if donated and all(x.is_copy for x in carried):
                array.delete()
            return parts
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
            return self.rest.put(joined, placing)
        shards = [block for x in joined for block in _jax.blocks(x)]
        shape = (sum(x.shape[0] for x in joined), *joined[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, self.joint, shards, dtype=joined[0].dtype)


class Leaves:
    """All arguments (or all results) of a step: whole arrays, some of them in parts inside."""

    def __init__(
        self,
        parts: Sequence[Part],
        shapes: Sequence[tuple[int, ...]],
        shardings: Sequence[NamedSharding],
        placing: Placing,
        *,
        donated: Sequence[bool] = (),
    ) -> None:
        """Of each graph input (or output), in order, what it is a part of, its shape, and where it is.

        `donated`: for each of the first whole arrays whether the caller gives it away.
        """
        self._placing, self._donated = placing, donated
        self.whole: list[NamedSharding | Stack] = []
        for _, members in groupby(zip(parts, shapes, shardings, strict=True), key=lambda member: member[0].leaf):
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
        for number, (array, whole) in enumerate(zip(leaves, self.whole, strict=True)):
            donated = number < len(self._donated) and self._donated[number]
            parts += whole.split(array, self._placing, donated=donated) if isinstance(whole, Stack) else [array]
        return parts

    def join(self, parts: list[Any]) -> list[Any]:
        """Results from graph outputs, which are taken out of the list: so the parts of one do not stay in memory while
        others are moved."""
        if not self.in_parts:
            return parts
        parts.reverse()
        return [
            whole.join([parts.pop() for run in whole.runs for _ in run.rows], self._placing)
            if isinstance(whole, Stack)
            else parts.pop()
            for whole in self.whole
        ]


def _leaf(members: Sequence[tuple[Part, tuple[int, ...], NamedSharding]]) -> NamedSharding | Stack:
    first, shape, sharding = members[0]
    if first.rows is None:
        return sharding
    runs = groupby(members, key=lambda member: member[2])
    return Stack(
        runs=tuple(
            Run(rows=tuple(part.rows for part, _, _ in run if part.rows is not None), sharding=sharding)
            for sharding, run in runs
        ),
        shape=(sum(shape[0] for _, shape, _ in members), *shape[1:]),
    )
