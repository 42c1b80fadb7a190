"""Check a checkpoint's files before reading them, for folders that somebody else has made or changed.

    check_files      all are regular files in the folder, and none is larger than its arrays can make it
    check_headers    each array is stored in the requested shape and dtype, in chunks no larger than itself

TensorStore allocates as much as the headers and sizes say. Problems are raised as `ValueError`, with a sentence.
"""

from __future__ import annotations

import math
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax.numpy as jnp
import tensorstore as ts

from alpa_lite.runtime.checkpoint.checkpoint_folder import files_of, is_own
from alpa_lite.runtime.checkpoint.saved_leaves import Leaf, Wanted
from alpa_lite.runtime.checkpoint.untrusted import read_bounded, shown
from cost_models.checks import parse_json

_SPARE_BYTES = 64 * 2**20
_SPARE_BYTES_PER_LEAF = 2**20  # for the index of its chunks
_HEADER_BYTES = 2**16
_MOST_DIMS = 64
_KEY_BYTES = 256  # upper bound for any kind of key
_ORBAX_VALUES_PER_LEAF = 40
_ORBAX_FILE = "_METADATA"
_AT_ONCE = 256


def check_files(folder: Path, saved: Mapping[str, Leaf]) -> None:
    """Raise ValueError unless the files of a checkpoint are regular, and of plausible sizes for its arrays."""
    room = 2 * sum(_bytes(leaf) for leaf in saved.values()) + _SPARE_BYTES + _SPARE_BYTES_PER_LEAF * len(saved)
    largest = room - _SPARE_BYTES_PER_LEAF * len(saved)
    root = folder.resolve()
    for name in files_of(folder):
        size = _size(folder / name, root, is_own(name))
        room -= size
        if size > largest or room < 0:
            raise ValueError(f"with {shown(name)} its files are larger than the arrays that it names can make them")
    try:
        text = read_bounded(folder / _ORBAX_FILE, _SPARE_BYTES)
        parse_json(text, any_text=True, max_values=_ORBAX_VALUES_PER_LEAF * (len(saved) + 4), max_depth=16)
    except FileNotFoundError:
        return  # there may be no arrays; the list of checksums says which files must exist
    except (OSError, ValueError) as error:
        raise ValueError(f"{_ORBAX_FILE} cannot be read ({shown(error)})") from error


def check_headers(folder: Path, wanted: Sequence[Wanted], saved: Mapping[str, Leaf]) -> None:
    """Raise ValueError unless the requested arrays are stored in their shapes and dtypes."""
    store = ts.KvStore.open({"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder}/"}}).result()
    names = [each.name for each in wanted if not each.leaf.is_empty]
    for start in range(0, len(names), _AT_ONCE):
        group = names[start : start + _AT_ONCE]
        # All reads of a group run at once; a bounded number of answers is in memory.
        reading = [store.read(_header_key(name)) for name in group]
        for name, each in zip(group, reading, strict=True):
            if problem := _header_problem(each.result().value, saved[name]):
                raise ValueError(f"the array {shown(name)} is not stored as {saved[name]}: {problem}")


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
        return f"its shape is {shown(shape)}, its dtype {shown(dtype)}"
    if not plain:
        # Its size on disk would say nothing about the memory that reading it takes.
        return "it is compressed"
    if not isinstance(chunks, list) or len(chunks) != len(shape) or not all(map(_fits, chunks, shape)):
        return f"its chunks have the shape {shown(chunks)}"
    return ""


def _fits(chunk: object, size: int) -> bool:
    return type(chunk) is int and 0 < chunk <= size


def _is_dtype(text: object, dtype: object) -> bool:
    try:
        return isinstance(text, str) and len(text) < 40 and jnp.dtype(text) == dtype
    except (TypeError, ValueError, SyntaxError):  # NumPy parses names of dtypes as expressions
        return False


def _bytes(leaf: Leaf) -> int:
    size = _KEY_BYTES if leaf.is_key else max(1, jnp.dtype(leaf.dtype).itemsize)
    return math.prod(leaf.shape) * size


def _size(path: Path, root: Path, own: bool) -> int:
    """Return the size in bytes of a file of ours; 0 for others, whose links must still not lead out of the folder."""
    try:
        found = path.lstat()
        if stat.S_ISLNK(found.st_mode):
            if not path.resolve(strict=True).is_relative_to(root):
                raise ValueError(f"{shown(path.name)} leads out of the folder")
            found = path.stat()
    except RuntimeError as error:
        raise ValueError(f"{shown(path.name)} is a link to itself") from error
    if not own:
        return 0
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{shown(path.name)} is no regular file")
    return found.st_size
