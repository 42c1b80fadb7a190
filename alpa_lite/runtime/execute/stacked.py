"""Arguments and results of a step as one array each, although a program may hold them in parts on several stages.

A stacked array [layers, ...] consists of row blocks: consecutive parts on one stage (`RowBlocks`). If all stages have
equal meshes, specs and numbers of layers, it is a single joint `jax.Array` over their devices, split over a mesh axis
"stage": its shards are those of the parts, and nothing moves between steps (`joint_sharding`). Otherwise it lies in
equal blocks between steps, on devices of its own stages as far as possible (`StackedRest`):
`alpa_lite.sharding.stacked_rest` computes the placement, and this module moves the rows there and back, from device to
device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, islice

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from alpa_lite import _jax
from alpa_lite._jax import TreeLeaf
from alpa_lite.program.memo import memoized
from alpa_lite.program.phases import LeafPart
from alpa_lite.runtime.execute.placing import Placing, Windows
from alpa_lite.runtime.job.processes import any_here, devices_of, handle, is_here
from alpa_lite.sharding.stacked_rest import resting

STAGE_AXIS = "stage"
"""Name of the mesh axis over which the leading dim of a joint array is split."""


@dataclass(frozen=True, kw_only=True)
class RowBlocks:
    """Consecutive parts on one stage: the rows of each, counted in the whole array, and their common sharding."""

    rows: tuple[tuple[int, int], ...]
    sharding: NamedSharding

    @property
    def devices(self) -> np.ndarray:
        """The devices of the stage, as the array of its mesh."""
        return np.asarray(self.sharding.mesh.devices)

    @property
    def num_rows(self) -> int:
        """The number of rows of all parts together."""
        return self.rows[-1][1] - self.rows[0][0]

    def part(self, start: int, stop: int) -> tuple[int, int]:
        """Return the range of own rows, counted from the first, within rows `start` to `stop` of the whole array."""
        first, last = self.rows[0][0], self.rows[-1][1]
        return max(start, first) - first, min(stop, last) - first

    @cached_property
    def is_here(self) -> bool:
        """True if the stage has a device of this process."""
        return any_here(devices_of(self.sharding.mesh))

    @cached_property
    def num_blocks(self) -> int:
        """The number of the stage's devices that belong to this process."""
        return sum(map(is_here, devices_of(self.sharding.mesh)))

    def join(self, parts: Sequence[jax.Array]) -> jax.Array:
        """Return the parts as one array on the stage."""
        if len(parts) == 1:
            return parts[0]
        if not self.is_here:
            return handle((self.num_rows, *parts[0].shape[1:]), parts[0].dtype, self.sharding)
        return self._join(list(parts))

    def split(self, array: jax.Array) -> list[jax.Array]:
        """Return the parts of an array on the stage; the inverse of `join`."""
        if len(self.rows) == 1:
            return [array]
        if not self.is_here:
            return [handle((b - a, *array.shape[1:]), array.dtype, self.sharding) for a, b in self.rows]
        return self._split(array)

    @cached_property
    def _join(self) -> Callable[[list[jax.Array]], jax.Array]:
        return jax.jit(jax.numpy.concatenate, out_shardings=self.sharding)

    @cached_property
    def _split(self) -> Callable[[jax.Array], list[jax.Array]]:
        first = self.rows[0][0]
        bounds = [(start - first, stop - first) for start, stop in self.rows]
        return jax.jit(lambda x: [x[start:stop] for start, stop in bounds], out_shardings=self.sharding)


def joint_sharding(runs: Sequence[RowBlocks]) -> NamedSharding | None:
    """Return the sharding of the whole array over the stages of its runs; None if these differ in form."""

    def form(run: RowBlocks) -> object:
        return run.num_rows, run.sharding.spec, run.sharding.mesh.axis_names, run.devices.shape

    first = runs[0].sharding
    meshes = {run.sharding.mesh for run in runs}
    # A mesh can hold a device only once, so two runs on the same mesh have no joint one.
    if any(form(run) != form(runs[0]) for run in runs) or len(meshes) < len(runs):
        return None
    if len(runs) == 1:
        return first
    mesh = Mesh(np.stack([run.devices for run in runs]), (STAGE_AXIS, *first.mesh.axis_names))
    leading, *rest = first.spec or (None,)
    # The rows of a stage may be split over axes of its own mesh too.
    inner = () if leading is None else leading if isinstance(leading, tuple) else (leading,)
    return NamedSharding(mesh, PartitionSpec((STAGE_AXIS, *inner), *rest))


GROUP_AXIS = "group"
"""Name of the mesh axis over the devices that share a block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shelf:
    """Consecutive blocks of an array between steps that take rows of the same runs.

    `sources`: (number of the run, first row, last row + 1), rows counted in the run, in order.
    """

    sharding: NamedSharding
    sources: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, kw_only=True)
class StackedRest:
    """The placement between steps (`sharding.stacked_rest`) of an array of several runs without a joint sharding."""

    sharding: NamedSharding
    shelves: tuple[Shelf, ...]

    @staticmethod
    def of(runs: Sequence[RowBlocks], shape: Sequence[int]) -> StackedRest:
        """Return the placement of an array of this shape."""
        # Several runs may lie on one mesh, whose devices count once.
        meshes = list(dict.fromkeys(run.sharding.mesh for run in runs))
        devices = [devices_of(mesh) for mesh in meshes]
        # Of each row the number of its run, and then of the mesh of that run.
        owners = [number for number, run in enumerate(runs) for _ in range(run.num_rows)]
        places = [meshes.index(runs[number].sharding.mesh) for number in owners]
        at = resting(tuple(shape), tuple(places), tuple(map(len, devices)))
        groups = [
            devices[holder][first : first + at.group_size]
            for holder, first in zip(at.holders, at.first_devices, strict=True)
        ]

        def over(first: int, last: int) -> NamedSharding:
            """Return the sharding of the rows of some blocks."""
            mesh = Mesh(np.array(groups[first:last]), (STAGE_AXIS, GROUP_AXIS))
            inner = () if at.split_dim is None else (*[None] * (at.split_dim - 1), GROUP_AXIS)
            return NamedSharding(mesh, PartitionSpec(STAGE_AXIS, *inner))

        size, shelves = at.rows_per_block, list[Shelf]()
        read_by = [tuple(dict.fromkeys(owners[b * size : (b + 1) * size])) for b in range(len(groups))]
        # Consecutive blocks of one run are moved together; a block with rows of several runs is moved on its own.
        for _, blocks in groupby(enumerate(read_by), key=lambda each: each[1] if len(each[1]) == 1 else each):
            numbers = [block for block, _ in blocks]
            start, stop = numbers[0] * size, (numbers[-1] + 1) * size
            sources = tuple((owner, *runs[owner].part(start, stop)) for owner in read_by[numbers[0]])
            shelves.append(Shelf(sharding=over(numbers[0], numbers[-1] + 1), sources=sources))
        return StackedRest(sharding=over(0, len(groups)), shelves=tuple(shelves))

    def put(self, runs: Sequence[jax.Array], placing: Placing) -> jax.Array:
        """Return the whole array, made of its runs."""
        shelved = list[jax.Array]()
        for shelf in self.shelves:
            pieces = [placing.carried(runs[n], start, stop, shelf.sharding).array for n, start, stop in shelf.sources]
            here = any_here(devices_of(shelf.sharding.mesh))
            shelved.append(_joined(shelf.sharding)(pieces) if here and len(pieces) > 1 else pieces[0])
        blocks = [block for x in shelved for block in _jax.blocks(x)]
        shape = (sum(x.shape[0] for x in runs), *runs[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, self.sharding, blocks, dtype=runs[0].dtype)


@memoized(entries=1024)
def _joined(sharding: NamedSharding) -> Callable[..., jax.Array]:
    """Return a function that concatenates pieces."""
    return jax.jit(jax.numpy.concatenate, out_shardings=sharding)


@dataclass(frozen=True, kw_only=True)
class Stack:
    """One argument or result in parts, and the shape of the whole."""

    runs: tuple[RowBlocks, ...]
    shape: tuple[int, ...]

    @cached_property
    def joint(self) -> NamedSharding | None:
        """The joint sharding; see `joint_sharding`."""
        return joint_sharding(self.runs)

    @cached_property
    def rest(self) -> StackedRest:
        """The placement between steps, if there is no joint sharding."""
        return StackedRest.of(self.runs, self.shape)

    @property
    def sharding(self) -> NamedSharding:
        """The sharding of the whole array between steps."""
        return self.joint or self.rest.sharding

    def split(self, array: TreeLeaf, placing: Placing, *, donated: bool) -> list[jax.Array]:
        """Return the parts, each on its stage. `donated`: the array is not needed any more."""
        # The first step gets the array as the user made it; later ones get it as this class has returned it.
        if not isinstance(array, jax.Array) or array.sharding != self.sharding:
            return [self._part(array, a, b, run, placing) for run in self.runs for a, b in run.rows]
        if self.joint is None:
            carried = [placing.carried(array, run.rows[0][0], run.rows[-1][1], run.sharding) for run in self.runs]
            parts = [part for run, x in zip(self.runs, carried, strict=True) for part in run.split(x.array)]
            # The rows are on their stages now; the caller's reference would keep the original in memory for the whole
            # step.
            if donated and all(x.is_copy for x in carried):
                array.delete()
            return parts
        blocks, parts = iter(_jax.blocks(array)), list[jax.Array]()
        for run in self.runs:
            shape = (run.num_rows, *array.shape[1:])
            # The blocks of a joint array come stage by stage, since "stage" is the first axis of its mesh.
            mine = list(islice(blocks, run.num_blocks))
            whole = jax.make_array_from_single_device_arrays(shape, run.sharding, mine, dtype=array.dtype)
            parts += run.split(whole)
        return parts

    @staticmethod
    def _part(array: TreeLeaf, start: int, stop: int, run: RowBlocks, placing: Placing) -> jax.Array:
        rows = Windows(dim=0, start=start, size=stop - start, count=1)
        return placing.rows(placing.staged(array, rows, run.sharding), rows, 0, run.sharding)

    def join(self, parts: Sequence[jax.Array], placing: Placing) -> jax.Array:
        """Return the whole array, made of the parts."""
        rest = iter(parts)
        joined = [run.join([next(rest) for _ in run.rows]) for run in self.runs]
        if self.joint is None:
            return self.rest.put(joined, placing)
        # The shards of the joint array are the blocks of the parts: nothing is copied.
        shards = [block for x in joined for block in _jax.blocks(x)]
        shape = (sum(x.shape[0] for x in joined), *joined[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, self.joint, shards, dtype=joined[0].dtype)


class Leaves:
    """All arguments (or all results) of a step: whole arrays, some of which the program holds in parts."""

    def __init__(
        self,
        parts: Sequence[LeafPart],
        shapes: Sequence[tuple[int, ...]],
        shardings: Sequence[NamedSharding],
        placing: Placing,
        *,
        donated: Sequence[bool] = (),
    ) -> None:
        """Group graph inputs (or outputs), given in order by the part that each is, its shape and its sharding.

        `donated`: for each of the first whole arrays whether the caller donates it.
        """
        self._placing, self._donated = placing, donated
        self.whole: list[NamedSharding | Stack] = []
        for _, members in groupby(zip(parts, shapes, shardings, strict=True), key=lambda member: member[0].leaf):
            self.whole.append(_leaf(list(members)))
        # Known once, as most steps hold no array in parts and need no work per leaf.
        self.in_parts = any(isinstance(whole, Stack) for whole in self.whole)

    def sharding(self, leaf: int) -> NamedSharding:
        """Return the sharding of a whole array between steps."""
        whole = self.whole[leaf]
        return whole.sharding if isinstance(whole, Stack) else whole

    def split(self, leaves: Sequence[TreeLeaf]) -> list[TreeLeaf]:
        """Return the graph inputs, made of the arguments."""
        if not self.in_parts:
            return list(leaves)
        parts: list[TreeLeaf] = []
        for number, (array, whole) in enumerate(zip(leaves, self.whole, strict=True)):
            donated = number < len(self._donated) and self._donated[number]
            parts += whole.split(array, self._placing, donated=donated) if isinstance(whole, Stack) else [array]
        return parts

    def join(self, parts: list[jax.Array]) -> list[jax.Array]:
        """Return the results, made of graph outputs.

        The outputs are removed from the list, so that the parts of one result are freed while others are moved.
        """
        if not self.in_parts:
            return parts
        # Reversed, as a list is popped at its end in constant time.
        parts.reverse()
        return [
            whole.join([parts.pop() for run in whole.runs for _ in run.rows], self._placing)
            if isinstance(whole, Stack)
            else parts.pop()
            for whole in self.whole
        ]


def _leaf(members: Sequence[tuple[LeafPart, tuple[int, ...], NamedSharding]]) -> NamedSharding | Stack:
    first, shape, sharding = members[0]
    if first.rows is None:
        return sharding
    # Parts of one array that lie next to each other in one sharding form a run.
    runs = groupby(members, key=lambda member: member[2])
    return Stack(
        runs=tuple(
            RowBlocks(rows=tuple(part.rows for part, _, _ in run if part.rows is not None), sharding=sharding)
            for sharding, run in runs
        ),
        shape=(sum(shape[0] for _, shape, _ in members), *shape[1:]),
    )
