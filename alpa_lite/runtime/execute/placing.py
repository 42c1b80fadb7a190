"""Move arguments of a step to the devices on which it reads them.

    alone       JAX moves them                                                                         `Alone`
    in a job    an array that each process holds whole (NumPy's, or a JAX array on its own devices) is put by each
                process on its devices; arrays over devices of several processes are moved by all of these  `InJob`

In a job every process must make the same choices, whichever part of an array it holds. So an array counts as the job's
if it lies on devices of other processes too, or on a mesh that a plan was run on (`InJob.know`): one process may have
all devices of a stage's mesh, and another none.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from alpa_lite import _jax
from alpa_lite.errors import ExecutionError
from alpa_lite.runtime.execute.crossing import Crossing, Windows, on_plain_mesh, relocation
from alpa_lite.runtime.execute.exchange import Blanks
from alpa_lite.runtime.job.processes import any_here, devices_of, handle, processes_of


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
    def put(self, array: Any, sharding: NamedSharding) -> jax.Array:
        """Return the array in a sharding; the array itself if it has this sharding."""

    @abstractmethod
    def rows(self, array: Any, windows: Windows, number: int, sharding: NamedSharding) -> jax.Array:
        """Return one of several runs of rows in a sharding."""

    def staged(self, array: Any, windows: Windows, sharding: NamedSharding) -> Any:
        """Return a form of an array from which `rows` takes every run."""
        del windows, sharding
        return array

    def carried(self, array: jax.Array, start: int, stop: int, sharding: NamedSharding) -> Carried:
        """Return some rows of an array that a step left on devices of this job, sent directly from these."""
        rows = Windows(dim=0, start=start, size=stop - start, count=1)
        found = None if rows.size == array.shape[0] else rows
        moved = self._moved(array, sharding, found)
        if moved is None:
            moved = handle((rows.size, *array.shape[1:]), array.dtype, sharding)
        return Carried(array=moved, is_copy=self._crossing(array, sharding, found).copies)

    def put_all(self, arrays: Sequence[Any], shardings: Sequence[NamedSharding]) -> list[jax.Array]:
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

    def _crossing(self, array: Any, sharding: NamedSharding, windows: Windows | None) -> Crossing:
        source = on_plain_mesh(array.sharding)
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

    def put(self, array: Any, sharding: NamedSharding) -> jax.Array:
        """Call `jax.device_put`, except for an array that is already in place: a step has hundreds of those."""
        if getattr(array, "sharding", None) == sharding and getattr(array, "committed", False):
            return array
        return _jax.put_numpy(array, sharding) if type(array) is np.ndarray else jax.device_put(array, sharding)

    def rows(self, array: Any, windows: Windows, number: int, sharding: NamedSharding) -> jax.Array:
        return self.put(rows_of(array, windows, number), sharding)


_known: set[Mesh | AbstractMesh] = set()
"""Meshes that plans were run on. JAX keeps every mesh alive as well, so this leaks nothing."""


class InJob(Placing):
    """Placement in a job of several processes."""

    @staticmethod
    def know(meshes: Iterable[Mesh | AbstractMesh]) -> None:
        """Register meshes; arrays on them are the job's."""
        _known.update(meshes)

    def put(self, array: Any, sharding: NamedSharding) -> jax.Array:
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

    def staged(self, array: Any, windows: Windows, sharding: NamedSharding) -> Any:
        """Move an array of the job once for all runs."""
        if not _is_of_job(array):
            return array if isinstance(array, jax.Array) else np.asarray(array)
        return _Staged(value=self._moved(array, sharding, windows), shape=array.shape, dtype=array.dtype)

    def rows(self, array: Any, windows: Windows, number: int, sharding: NamedSharding) -> jax.Array:
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


def _is_of_job(array: Any) -> bool:
    if not isinstance(array, jax.Array):
        return False
    return not array.is_fully_addressable or getattr(array.sharding, "mesh", None) in _known


def _of_blocks(
    shape: tuple[int, ...], dtype: DTypeLike, sharding: NamedSharding, blocks: Sequence[jax.Array]
) -> jax.Array:
    return jax.make_array_from_single_device_arrays(shape, sharding, list(blocks), dtype=dtype)


def _spread(array: Any, sharding: NamedSharding) -> jax.Array:
    """Return an array that each process holds whole, on its devices of a sharding.

    `jax.device_put` would first compare the arrays of all processes, in a collective.
    """
    found = array if isinstance(array, jax.Array) else _jax.own_memory(np.asarray(array), sharding)
    dtype = found.dtype if isinstance(found, jax.Array) else jax.dtypes.canonicalize_dtype(found.dtype)
    return jax.make_array_from_callback(found.shape, sharding, lambda index: found[index], dtype=dtype)


def rows_of(array: Any, windows: Windows, number: int) -> Any:
    """Return a run of rows: a view of a NumPy array, else a copy by one program for all starts."""
    first, dim = windows.start + number * windows.size, windows.dim
    if isinstance(array, jax.Array):
        return _cut(_untyped(array), np.int32(first), windows.size, dim)
    return np.asarray(array)[(*[slice(None)] * dim, slice(first, first + windows.size))]


def _untyped(array: Any) -> jax.Array:
    """Return the array on a mesh without explicit axis types, under which slices that the axes do not divide fail."""
    mesh = getattr(array.sharding, "mesh", None)
    if mesh is None or AxisType.Explicit not in mesh.axis_types:
        return array
    return _of_blocks(array.shape, array.dtype, on_plain_mesh(array.sharding), _jax.blocks(array))


@partial(jax.jit, static_argnums=(2, 3))
def _cut(array: jax.Array, start: ArrayLike, size: int, dim: int) -> jax.Array:
    return lax.dynamic_slice_in_dim(array, start, size, dim)


@lru_cache(maxsize=1024)
def _run_of(sharding: NamedSharding, dim: int, count: int) -> Callable[..., jax.Array]:
    """Return a function that slices one run out of all of them, each device its own share."""

    def cut(x: jax.Array, number: jax.Array) -> jax.Array:
        size = x.shape[dim] // count
        return lax.dynamic_slice_in_dim(x, number * size, size, dim)

    specs = (sharding.spec, PartitionSpec())
    return jax.jit(jax.shard_map(cut, mesh=sharding.mesh, in_specs=specs, out_specs=sharding.spec, check_vma=False))
