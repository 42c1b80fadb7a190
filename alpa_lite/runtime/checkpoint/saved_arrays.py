"""Checkpoints on disk, through Orbax. The only module that imports it, itself imported only where checkpoints are used.

    folder/<step>/alpa_lite_checkpoint.json             the record, which is written first (`checkpoint_folder`)
                  manifest.ocdbt, d, ocdbt.process_*    the arrays by name, in chunks of at most 16 MiB (Orbax)
                  leaves.json                           their shapes and dtypes (`saved_leaves.py`)
                  plan.json                             how they were sharded; `Plan.load` reads it
                  SHA256SUMS                            of all files, written last (`checksums.py`)

Every process writes the shards that it has, waits until they are on its disk, and reads what its devices need. The
first process syncs all files before it writes the list of checksums, and gives the folder its name then.

An error on one process is stored until all have come to the end of a save (`_Careful`): a process that gave up early
would leave the others waiting for it. An incomplete checkpoint gets no list of checksums and no name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath
from orbax.checkpoint.type_handlers import ParamInfo

from alpa_lite._jax import Array
from alpa_lite.runtime.checkpoint import disk
from alpa_lite.runtime.checkpoint.checksums import LIST, write_checksums, write_part
from alpa_lite.runtime.checkpoint.saved_leaves import Leaf, Wanted
from alpa_lite.runtime.job.consensus import ConsequenceError
from cost_models.checks import excerpt, parse_json

_CHUNK_BYTES = 16 * 2**20  # upper bound on the bytes read for a small part of a large array
_REPLICAS_SHARE_FROM = 2**20  # size in bytes from which replicas of a shard each write a part of it
_READ_AT_ONCE_GB = 16
_LONGEST_SAVE_SECONDS = 3600
_HEADER_BYTES = 2**16
_MOST_DIMS = 64
_HEADERS_AT_ONCE = 256


class _Local:
    """An array whose devices all belong to this process, in a job of several.

    It must not look like a `jax.Array` to Orbax, which expects every process to have a part of those.
    """

    def __init__(self, array: jax.Array) -> None:
        self._array = array

    def __getattr__(self, name: str) -> Any:
        return getattr(self._array, name)


class ShardHandler(ocp.type_handlers.ArrayHandler):
    """Writes arrays of which a process has all, some or no shards: those of a stage lie on some processes only."""

    def __init__(self) -> None:
        """Set up without keys and shardings, which are passed elsewhere."""
        super().__init__(
            primary_host=None,  # every process with a part of an array also writes its metadata
            use_replica_parallel=jax.process_count() > 1,
            min_slice_bytes_for_replica_parallel=_REPLICAS_SHARE_FROM,
            enable_write_sharding_file=False,
            array_metadata_store=None,
        )

    async def serialize(
        self, values: Sequence[jax.Array], infos: Sequence[ParamInfo], args: Sequence[ocp.SaveArgs] | None = None
    ) -> Sequence[ocp.Future]:
        """Write the shards that this process has."""
        # Stages of a pipeline lie on some processes only: others have no shard of their arrays.
        args = args or [ocp.SaveArgs()] * len(values)
        here = [i for i, value in enumerate(values) if value.sharding.addressable_devices]
        if not here:
            return []
        local = jax.process_count() > 1
        arrays: list[Any] = [_Local(values[i]) if local and values[i].is_fully_addressable else values[i] for i in here]
        return await super().serialize(arrays, [infos[i] for i in here], [args[i] for i in here])

    async def deserialize(self, infos: Sequence[ParamInfo], args: Any = None) -> Sequence[jax.Array]:
        """Read the shards that this process's devices need."""
        here = [i for i, arg in enumerate(args) if arg.sharding.addressable_devices]
        # Orbax expects each process to have a part of each array; those without one are made as handles below.
        read = await super().deserialize([infos[i] for i in here], [args[i] for i in here]) if here else []
        arrays = dict(zip(here, read, strict=True))
        return [
            arrays[i]
            if i in arrays
            else jax.make_array_from_single_device_arrays(arg.global_shape, arg.sharding, [], dtype=arg.dtype)
            for i, arg in enumerate(args)
        ]


def _arrays_handler() -> ocp.PyTreeCheckpointHandler:
    registry = ocp.type_handlers.create_type_handler_registry(
        (jax.Array, ShardHandler()), (np.ndarray, ocp.type_handlers.NumpyHandler())
    )
    return ocp.PyTreeCheckpointHandler(
        type_handler_registry=registry,
        restore_concurrent_gb=_READ_AT_ONCE_GB,
        use_compression=False,  # saves 1/12 of the bytes of weights, and takes longer than writing these
    )


class _Careful(ocp.AsyncCheckpointHandler):
    """Writes a checkpoint; `problem` stores the error of this process."""

    def __init__(self, writers: int) -> None:
        self._arrays = _arrays_handler()
        self._writers = writers
        self._files: Mapping[str, bytes] = {}
        self._publish: Callable[[], None] = _nothing
        self._has_arrays = False
        self.problem: Exception | None = None

    async def async_save(self, directory: epath.Path, args: Content) -> list[Any]:
        # Do not store the arrays themselves: their device memory would stay in use.
        self._files, self._has_arrays, self.problem = args.files, bool(args.arrays), None
        self._publish = args.publish
        written: list[ocp.Future] = []
        try:
            if args.arrays:
                # In small chunks: a process that needs a part of an array reads little more than that.
                chunks = dict.fromkeys(args.arrays, ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES))
                item = ocp.args.PyTreeSave(item=dict(args.arrays), save_args=chunks)
                written = await self._arrays.async_save(directory, args=item) or []
        except Exception as error:
            self.problem = error
        return [_PendingWrite(written, Path(directory), self)]

    # Abstract in the base class, but never called: saves are asynchronous, and `read_arrays` restores.
    def save(self, directory: epath.Path, args: Content) -> None:
        raise NotImplementedError

    def restore(self, directory: epath.Path, args: ocp.args.CheckpointArgs | None = None) -> None:
        raise NotImplementedError

    def finalize(self, directory: epath.Path) -> None:
        """Complete the checkpoint on the first process, when all have written what they could."""
        folder, publish, self._publish = Path(directory), self._publish, _nothing
        try:
            if self.problem is None:
                for process in range(1, self._writers):
                    if not (folder / f"{LIST}.{_part(process)}").exists():
                        raise ConsequenceError(
                            f"nothing of process {process} is there: all processes must see the same folder"
                        )
                if self._has_arrays:
                    self._arrays.finalize(directory)
                for name, data in self._files.items():
                    disk.create(folder / name, data)
                disk.sync_tree(folder)
                write_checksums(folder)
                publish()
        except Exception as error:
            self.problem = error

    def close(self) -> None:
        self._arrays.close()


@ocp.args.register_with_handler(_Careful, for_save=True, for_restore=True)
@dataclass
class Content(ocp.args.CheckpointArgs):
    """A checkpoint's arrays and other files by name; the first process calls `publish` when all are on disk."""

    arrays: Mapping[str, Array]
    files: Mapping[str, bytes]
    publish: Callable[[], None]


def _nothing() -> None:
    pass


class _CheckpointPath:
    """The folder of a checkpoint in the form that Orbax expects: made before, and renamed by `Content.publish`."""

    def __init__(self, folder: Path) -> None:
        self._folder = epath.Path(folder)

    def get(self) -> epath.Path:
        return self._folder

    def get_final(self) -> epath.Path:
        return self._folder / "none"  # Orbax requires a path that does not exist

    async def create(self) -> epath.Path:
        return self._folder

    async def finalize(self) -> None:
        pass


class _Places:
    """Makes the paths that Orbax writes to; its requests for other paths, times and options are ignored."""

    folder = Path()

    def from_final(self, final: object, **options: object) -> _CheckpointPath:
        del final, options
        return _CheckpointPath(self.folder)


class _PendingWrite:
    """The pending write of one process: done when the data and its digests are on disk."""

    def __init__(self, futures: Sequence[ocp.Future], folder: Path, handler: _Careful) -> None:
        self._futures, self._folder, self._handler = futures, folder, handler

    def result(self, timeout: float | None = None) -> None:
        try:
            for each in self._futures:
                each.result(timeout=timeout)
            # The first process writes the digests of its own files together with the whole list.
            if jax.process_index() > 0 and self._handler.problem is None:
                write_part(self._folder, _part(jax.process_index()))
        except Exception as error:
            self._handler.problem = error


def _part(process: int) -> str:
    """Return the subfolder that a process writes its arrays into."""
    return f"ocdbt.process_{process}"


class _NoMetadata:
    """Drops Orbax's notes on when it wrote what: they change after the list of checksums is written."""

    def write(self, file_path: object, metadata: object) -> None:
        pass

    def update(self, file_path: object, **changes: object) -> None:
        pass

    def wait_until_finished(self) -> None:
        pass

    def close(self) -> None:
        pass


def is_on_first(arrays: Iterable[Array]) -> bool:
    """Return True if the first process has the whole of each array."""
    placed = [array.sharding for array in arrays if isinstance(array, jax.Array)]
    of = [(sharding, {device.process_index for device in sharding.device_set}) for sharding in placed]
    return all(processes == {0} or (0 in processes and sharding.is_fully_replicated) for sharding, processes in of)


class Writer:
    """Writes checkpoints, one at a time. All processes must make the same calls."""

    def __init__(self, *, by_first: bool = False) -> None:
        """Start without a pending write.

        by_first: whether the first process writes alone, which waits for no other: some may have died.
        """
        self.by_first = by_first
        self._handler = _Careful(1 if by_first else jax.process_count())
        self._places: Any = _Places()
        self._takes_part = not by_first or jax.process_index() == 0
        if not self._takes_part:
            return
        self._checkpointer = ocp.AsyncCheckpointer(
            self._handler,
            multiprocessing_options=ocp.options.MultiprocessingOptions(
                active_processes={0} if by_first else None, barrier_sync_key_prefix="alpa_lite" if by_first else None
            ),
            async_options=ocp.AsyncOptions(timeout_secs=_LONGEST_SAVE_SECONDS),
            checkpoint_metadata_store=cast(Any, _NoMetadata()),
            temporary_path_class=self._places,
        )

    def start(self, folder: Path, content: Content) -> None:
        """Begin to write into an empty folder; return when the arrays may be overwritten."""
        self._places.folder = folder
        if self._takes_part:
            self._checkpointer.save(folder, args=content)

    def finish(self) -> None:
        """Wait until the checkpoint is complete. Raises the error of this process, if any."""
        if self._takes_part:
            self._checkpointer.wait_until_finished()
        if self._handler.problem is not None:
            raise self._handler.problem

    def close(self) -> None:
        """End the background threads."""
        if self._takes_part:
            self._checkpointer.close()


def read_arrays(folder: Path, wanted: Sequence[Wanted], saved: Mapping[str, Leaf]) -> dict[str, Array]:
    """Return the arrays of a checkpoint by name, as they are stored: in their shardings, or on the host.

    Raises ValueError for arrays that are stored in another form than `saved` says.
    """
    how = {each.name: _restore_args(each, saved[each.name]) for each in wanted if not each.leaf.is_empty}
    if not how:
        return {}
    _check_headers(folder, wanted, saved)
    with ocp.Checkpointer(_arrays_handler()) as reader:
        # With `partial_restore` Orbax reads the names of the item alone; its values do not matter.
        args = ocp.args.PyTreeRestore(item=dict.fromkeys(how, 0), restore_args=how, partial_restore=True)
        return reader.restore(folder, args=args)


def _restore_args(each: Wanted, saved: Leaf) -> ocp.RestoreArgs:
    if each.sharding is None or saved.is_number:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    form = each.leaf.as_stored
    return ocp.ArrayRestoreArgs(sharding=each.stored_sharding, global_shape=form.shape, dtype=form.dtype, strict=True)


def _check_headers(folder: Path, wanted: Sequence[Wanted], saved: Mapping[str, Leaf]) -> None:
    """Raise ValueError unless the requested arrays are stored in their shapes and dtypes, in chunks that fit.

    TensorStore allocates as much as these headers say, and somebody else may have changed them.
    """
    store = ts.KvStore.open({"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder}/"}}).result()
    names = [each.name for each in wanted if not each.leaf.is_empty]
    for start in range(0, len(names), _HEADERS_AT_ONCE):
        group = names[start : start + _HEADERS_AT_ONCE]
        # All reads of a group run at once; a bounded number of answers is in memory.
        reading = [store.read(_header_key(name)) for name in group]
        for name, each in zip(group, reading, strict=True):
            if problem := _header_problem(each.result().value, saved[name]):
                raise ValueError(f"the array {excerpt(name)} is not stored as {saved[name]}: {problem}")


def _header_key(name: str) -> str:
    return f"{name}.zarray" if not name or name.endswith("/") else f"{name}/.zarray"


def _header_problem(data: bytes, leaf: Leaf) -> str:
    if len(data) > _HEADER_BYTES:
        return f"its header has {len(data)} bytes"
    try:
        header = parse_json(data, any_text=True, max_values=4 * _MOST_DIMS, max_depth=4)
        shape, chunks, dtype = header["shape"], header["chunks"], header["dtype"]
        plain = header["compressor"] is None and header["filters"] is None and header["zarr_format"] == 2
    except (ValueError, KeyError, TypeError):
        return "its header cannot be read"
    form = leaf.as_stored
    if shape != [*form.shape] or not _is_dtype(dtype, form.dtype):
        return f"its shape is {excerpt(shape)}, its dtype {excerpt(dtype)}"
    if not plain:
        # Its size on disk would say nothing about the memory that reading it takes.
        return "it is compressed"
    if not isinstance(chunks, list) or len(chunks) != len(shape) or not all(map(_fits, chunks, shape)):
        return f"its chunks have the shape {excerpt(chunks)}"
    return ""


def _fits(chunk: object, size: int) -> bool:
    return type(chunk) is int and 0 < chunk <= size


def _is_dtype(text: object, dtype: object) -> bool:
    try:
        return isinstance(text, str) and len(text) < 40 and jnp.dtype(text) == dtype
    except (TypeError, ValueError, SyntaxError):  # NumPy parses names of dtypes as expressions
        return False
