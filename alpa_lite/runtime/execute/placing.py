"""Move arguments of a step to the devices on which it reads them.

    alone       JAX moves them                                                                         `Alone`
    in a job    an array that each process holds whole (NumPy's, or a JAX array on its own devices) is put by each
                process on its devices; arrays over devices of several processes are moved by all of these  `InJob`

In a job every process must make the same choices, whichever part of an array it holds. So an array counts as the job's
if it lies on devices of other processes too, or on a mesh that a plan was run on (`InJob.know`): one process may have
all devices of a stage's mesh, and another none.

The pieces of arrays that the caller has placed in other shardings than the plan's are computed here (`relocation`),
while those of a plan's transfers are planned and priced:


    boxes    the block of each device in the source and in the target sharding                 `_boxes`
    pieces   their intersections; a piece comes from the nearest device that has it            `course_between`
    windows  instead of all rows, several runs of equally many rows, one after the other: each device gets its share of
             every run, so that a run can then be sliced without communication                 `Windows`
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import NamedTuple

import jax
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from alpa_lite import _jax
from alpa_lite._jax import Array, Device, TreeLeaf
from alpa_lite.errors import ExecutionError
from alpa_lite.program.memo import memoized
from alpa_lite.runtime.execute.crossing import Blanks, Course, Crossing, Hand
from alpa_lite.runtime.job.processes import any_here, devices_of, handle, processes_of
from alpa_lite.sharding.transfer import Box


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Runs of rows along a dim: `count` runs of `size` rows, the first from row `start`."""

    dim: int
    start: int
    size: int
    count: int


def relocation(array: jax.ShapeDtypeStruct, wanted: NamedSharding, windows: Windows | None, blanks: Blanks) -> Crossing:
    """Compile a relocation. Collective: all processes that take part must call this. `array` carries its sharding."""
    return Crossing(course_between(array, wanted, windows), blanks)


def course_between(array: jax.ShapeDtypeStruct, wanted: NamedSharding, windows: Windows | None = None) -> Course:
    """Return the pieces between two shardings. With windows the result has `count * size` rows along their dim."""
    source = array.sharding
    assert isinstance(source, NamedSharding)
    here, there = devices_of(source.mesh), devices_of(wanted.mesh)
    held, shape = _boxes(source, array.shape), array.shape
    runs = [0]
    if windows is not None:
        shape = tuple(windows.size if dim == windows.dim else n for dim, n in enumerate(shape))
        runs = [windows.start + i * windows.size for i in range(windows.count)]
    landed = _boxes(wanted, shape)
    senders = _PieceSenders(held, here)
    hands: list[Hand] = []
    for target, box in enumerate(landed):
        # Every device receives its share of every run, so that a run can be taken without communication.
        for number, first in enumerate(runs):
            # The rows of the whole array that this run of the device consists of.
            moved = box if windows is None else _shifted(box, windows.dim, first)
            # In the chunk of a device its shares of the runs lie one after the other.
            shift = tuple(number * (b - a) if windows and d == windows.dim else 0 for d, (a, b) in enumerate(box))
            for owned, part in senders.overlaps(moved):
                landing = [a - first + by for (a, _), (first, _), by in zip(part, moved, shift, strict=True)]
                hands.append(
                    Hand(
                        source=senders.choose(owned, part, there[target]),
                        target=target,
                        shape=_size(part),
                        start=tuple(a - first for (a, _), (first, _) in zip(part, owned, strict=True)),
                        landing=tuple(landing),
                    )
                )
    count = 1 if windows is None else windows.count
    # A chunk and the result have the rows of all runs along the dim of the windows.
    rows = {} if windows is None else {windows.dim: count}
    chunk = tuple(n * rows.get(d, 1) for d, n in enumerate(_size(landed[0])))
    whole = tuple(n * rows.get(d, 1) for d, n in enumerate(shape))
    return Course(array=array, hands=tuple(hands), held=_size(held[0]), chunk=chunk, shape=whole, wanted=wanted)


def on_plain_mesh(sharding: NamedSharding) -> NamedSharding:
    """Return the sharding on a mesh whose axes have no types, which programs on local blocks need."""
    mesh = sharding.mesh
    assert isinstance(mesh, Mesh)
    return NamedSharding(Mesh(mesh.devices, mesh.axis_names), sharding.spec, memory_kind=sharding.memory_kind)


def described(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Return an array under an equivalent sharding, without a copy."""
    if jax.numpy.issubdtype(array.dtype, jax.dtypes.extended):  # keys are arrays around arrays
        return jax.device_put(array, sharding)
    aval = array.aval.update(sharding=NamedSharding(sharding.mesh.abstract_mesh, sharding.spec))
    return _jax.relabeled(array, aval, sharding)


class _PieceSenders:
    """Which devices hold each box, and how many bytes each sends."""

    def __init__(self, held: Sequence[Box], devices: Sequence[Device]) -> None:
        self.devices, self.sent = devices, Counter[int]()
        self.holders: dict[Box, list[int]] = {}
        for place, box in enumerate(held):
            self.holders.setdefault(box, []).append(place)

    def overlaps(self, wanted: Box) -> list[tuple[Box, Box]]:
        """Return the distinct boxes that overlap `wanted`, each with the intersection."""
        overlaps: list[tuple[Box, Box]] = []
        # Over distinct boxes, not devices: replicas of a block are one box.
        for owned in self.holders:
            part = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(wanted, owned, strict=True))
            if all(a < b for a, b in part):
                overlaps.append((owned, part))
        return overlaps

    def choose(self, owned: Box, part: Box, receiver: Device) -> int:
        """Return the sender: the receiver itself, a device of its process, or the one that sent the fewest bytes."""

        def cost(place: int) -> tuple[bool, bool, int, int]:
            device = self.devices[place]
            # The place comes last, so that all processes choose the same among equals.
            return device != receiver, device.process_index != receiver.process_index, self.sent[place], place

        place = min(self.holders[owned], key=cost)
        if self.devices[place] != receiver:
            self.sent[place] += prod(_size(part))
        return place


def _boxes(sharding: NamedSharding, shape: tuple[int, ...]) -> list[Box]:
    """Return the box of each device, in the order of the mesh."""
    indices = sharding.devices_indices_map(shape)
    return [
        tuple((part.start or 0, n if part.stop is None else part.stop) for part, n in zip(index, shape, strict=True))
        for index in (indices[device] for device in devices_of(sharding.mesh))
    ]


def _size(box: Box) -> tuple[int, ...]:
    return tuple(b - a for a, b in box)


def _shifted(box: Box, dim: int, by: int) -> Box:
    return tuple((a + by, b + by) if d == dim else (a, b) for d, (a, b) in enumerate(box))


class Carried(NamedTuple):
    """Rows on other devices; `is_copy`: whether they share no buffer with the original array."""

    array: jax.Array
    is_copy: bool


class Placing(ABC):
    """Moves arguments to shardings."""

    def __init__(self, blanks: Blanks) -> None:
        """Start without compiled programs."""
        self._blanks = blanks
        self._crossings: dict[object, Crossing] = {}

    @abstractmethod
    def put(self, array: TreeLeaf, sharding: NamedSharding) -> jax.Array:
        """Return the array in a sharding; the array itself if it has this sharding."""

    @abstractmethod
    def rows(self, array: TreeLeaf | _Staged, windows: Windows, number: int, sharding: NamedSharding) -> jax.Array:
        """Return one of several runs of rows in a sharding."""

    def staged(self, array: TreeLeaf, windows: Windows, sharding: NamedSharding) -> TreeLeaf | _Staged:
        """Return a form of an array from which `rows` takes every run."""
        del windows, sharding
        return array

    def carried(self, array: jax.Array, start: int, stop: int, sharding: NamedSharding) -> Carried:
        """Return some rows of an array that a step left on devices of this job, sent directly from these."""
        rows = Windows(dim=0, start=start, size=stop - start, count=1)
        windows = None if rows.size == array.shape[0] else rows
        moved = self._moved(array, sharding, windows)
        if moved is None:
            moved = handle((rows.size, *array.shape[1:]), array.dtype, sharding)
        return Carried(array=moved, is_copy=self._crossing(array, sharding, windows).copies)

    def put_all(self, arrays: Sequence[TreeLeaf], shardings: Sequence[NamedSharding]) -> list[jax.Array]:
        """Return `put` of each array, at the cost of one comparison of shardings for each that is in place."""
        try:
            return [x if x.sharding == s else self.put(x, s) for x, s in zip(arrays, shardings, strict=True)]
        except AttributeError:  # NumPy's
            return [self.put(x, s) for x, s in zip(arrays, shardings, strict=True)]

    def _moved(self, array: jax.Array, sharding: NamedSharding, windows: Windows | None) -> jax.Array | None:
        if jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key):
            return self._moved_keys(array, sharding, windows)
        if not isinstance(array.sharding, NamedSharding):
            raise ExecutionError(
                f"An argument of shape {list(array.shape)} lies on several processes as {array.sharding}. Place it "
                "with a jax.sharding.NamedSharding, as those of compiled.input_shardings()."
            )
        # The same blocks on a mesh without axis types, for which the programs are compiled.
        blocks = _of_blocks(array.shape, array.dtype, on_plain_mesh(array.sharding), _jax.blocks(array))
        return self._crossing(array, sharding, windows)(blocks)

    def _crossing(self, array: TreeLeaf, sharding: NamedSharding, windows: Windows | None) -> Crossing:
        source = on_plain_mesh(array.sharding)
        # Compiling takes far longer than moving, and steps move arrays of the same forms again and again.
        key = (array.shape, array.dtype, source, sharding, windows)
        if key not in self._crossings:
            like = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=source)
            self._crossings[key] = relocation(like, sharding, windows, self._blanks)
        return self._crossings[key]

    def _moved_keys(self, keys: jax.Array, sharding: NamedSharding, windows: Windows | None) -> jax.Array | None:
        """Move typed PRNG keys as the words that store them."""
        words = jax.random.key_data(keys)
        # The words of a key are the last dim, which stays whole.
        inner = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec, *[None] * (words.ndim - len(sharding.spec))))
        moved = self._moved(words, inner, windows)
        return None if moved is None else jax.random.wrap_key_data(moved, impl=jax.random.key_impl(keys))


class Alone(Placing):
    """Placement in a job of one process."""

    def put(self, array: TreeLeaf, sharding: NamedSharding) -> jax.Array:
        """Call `jax.device_put`, except for an array that is already in place: a step has hundreds of those."""
        if isinstance(array, jax.Array):
            # An uncommitted array is described anew: the step must not depend on where JAX would move it.
            if array.committed and array.sharding == sharding:
                return array
            # Another description of the same placement, which `device_put` takes a millisecond to see.
            if array.sharding.is_equivalent_to(sharding, array.ndim):
                return described(array, sharding)
        return _jax.put_numpy(array, sharding) if type(array) is np.ndarray else jax.device_put(array, sharding)

    def rows(self, array: TreeLeaf | _Staged, windows: Windows, number: int, sharding: NamedSharding) -> jax.Array:
        return self.put(rows_of(array, windows, number), sharding)


_known: set[Mesh | AbstractMesh] = set()
"""Meshes that plans were run on. JAX keeps every mesh alive as well, so this leaks nothing."""


class InJob(Placing):
    """Placement in a job of several processes."""

    @staticmethod
    def know(meshes: Iterable[Mesh | AbstractMesh]) -> None:
        """Register meshes; arrays on them are the job's."""
        _known.update(meshes)

    def put(self, array: TreeLeaf, sharding: NamedSharding) -> jax.Array:
        if not _is_of_job(array):
            return _spread(array, sharding)
        if array.sharding == sharding:
            return array
        # Another description of the same placement: the blocks stay where they are.
        if array.sharding.is_equivalent_to(sharding, array.ndim):
            return _of_blocks(array.shape, array.dtype, sharding, _jax.blocks(array))
        # Every process that needs a part holds the whole array, so nothing has to be sent.
        wanted_by, held_by = processes_of(devices_of(sharding.mesh)), processes_of(array.sharding.device_set)
        if not (array.is_fully_replicated and {*wanted_by} <= {*held_by}):
            moved = self._moved(array, sharding, None)
        else:
            moved = _spread(array.addressable_data(0), sharding) if jax.process_index() in wanted_by else None
        return handle(array.shape, array.dtype, sharding) if moved is None else moved

    def staged(self, array: TreeLeaf, windows: Windows, sharding: NamedSharding) -> TreeLeaf | _Staged:
        """Move an array of the job once for all runs."""
        if not _is_of_job(array):
            return array if isinstance(array, jax.Array) else np.asarray(array)
        return _Staged(value=self._moved(array, sharding, windows), shape=array.shape, dtype=array.dtype)

    def rows(self, array: TreeLeaf | _Staged, windows: Windows, number: int, sharding: NamedSharding) -> jax.Array:
        if not any_here(devices_of(sharding.mesh)):
            shape = (windows.size if d == windows.dim else n for d, n in enumerate(array.shape))
            return handle(tuple(shape), array.dtype, sharding)
        if isinstance(array, _Staged):
            return _run_of(sharding, windows.dim, windows.count)(array.value, np.int32(number))
        return _spread(rows_of(array, windows, number), sharding)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Staged:
    """All runs of rows of an array, with each device's share of every run; empty on processes that receive nothing."""

    value: jax.Array | None
    shape: tuple[int, ...]
    dtype: DTypeLike


def _is_of_job(array: TreeLeaf) -> bool:
    if not isinstance(array, jax.Array):
        return False
    return not array.is_fully_addressable or getattr(array.sharding, "mesh", None) in _known


def _of_blocks(
    shape: tuple[int, ...], dtype: DTypeLike, sharding: NamedSharding, blocks: Sequence[jax.Array]
) -> jax.Array:
    return jax.make_array_from_single_device_arrays(shape, sharding, list(blocks), dtype=dtype)


def _spread(array: TreeLeaf, sharding: NamedSharding) -> jax.Array:
    """Return an array that each process holds whole, on its devices of a sharding.

    `jax.device_put` would first compare the arrays of all processes, in a collective.
    """
    # A step may run after the caller has overwritten its NumPy array, which JAX on CPU would share.
    whole = array if isinstance(array, jax.Array) else _jax.own_memory(np.asarray(array), sharding)
    dtype = whole.dtype if isinstance(whole, jax.Array) else jax.dtypes.canonicalize_dtype(whole.dtype)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index], dtype=dtype)


def rows_of(array: TreeLeaf, windows: Windows, number: int) -> Array:
    """Return a run of rows: a view of a NumPy array, else a copy by one program for all starts."""
    first, dim = windows.start + number * windows.size, windows.dim
    if isinstance(array, jax.Array):
        return _cut(_untyped(array), np.int32(first), windows.size, dim)
    return np.asarray(array)[(*[slice(None)] * dim, slice(first, first + windows.size))]


def _untyped(array: TreeLeaf) -> jax.Array:
    """Return the array on a mesh without explicit axis types, under which slices that the axes do not divide fail."""
    mesh = getattr(array.sharding, "mesh", None)
    if mesh is None or AxisType.Explicit not in mesh.axis_types:
        return array
    return _of_blocks(array.shape, array.dtype, on_plain_mesh(array.sharding), _jax.blocks(array))


@partial(jax.jit, static_argnums=(2, 3))
def _cut(array: jax.Array, start: ArrayLike, size: int, dim: int) -> jax.Array:
    return lax.dynamic_slice_in_dim(array, start, size, dim)


@memoized(entries=1024)
def _run_of(sharding: NamedSharding, dim: int, count: int) -> Callable[..., jax.Array]:
    """Return a function that slices one run out of all of them, each device its own share."""

    def cut(x: jax.Array, number: jax.Array) -> jax.Array:
        size = x.shape[dim] // count
        return lax.dynamic_slice_in_dim(x, number * size, size, dim)

    # The number of the run is an argument, so that one program serves all runs.
    specs = (sharding.spec, PartitionSpec())
    return jax.jit(jax.shard_map(cut, mesh=sharding.mesh, in_specs=specs, out_specs=sharding.spec, check_vma=False))
