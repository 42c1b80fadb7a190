"""A state as arrays by name, as a checkpoint holds it; independent of the pytrees that it is taken from and put into.

    saved     shape and dtype of each leaf by its name, and the arrays to write            `stored`
    wanted    the same of a state to be restored, and the sharding of each leaf            `wanted`, `check_fit`
    back      leaves of the requested kind, made of the arrays that were read              `Wanted.restored`
    sizes     no file of a checkpoint may be larger than its arrays can make it            `check_files`

Names are the paths in the state, as `params/0/w`. Types that storage cannot hold are converted: typed keys are written
as their data, integers of 4 bits and less as 8 bits; arrays without elements are not written at all.
"""

from __future__ import annotations

import json
import math
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from alpa_lite import _jax
from alpa_lite._jax import Array, DType, Tree, TreeLeaf
from alpa_lite.errors import CheckpointError
from alpa_lite.program.memo import memoized
from alpa_lite.runtime.checkpoint.checkpoint_folder import files_of, is_own
from alpa_lite.runtime.checkpoint.disk import read_bounded
from alpa_lite.text import show_first
from alpa_lite.trace.trace import unique
from cost_models.checks import excerpt, parse_json

FORMAT = 1
"""Version of the description of the arrays in a checkpoint."""

_WIDER = {"int2": "int8", "int4": "int8", "uint2": "uint8", "uint4": "uint8"}
"""Dtypes that are stored as wider ones, which hold the same numbers."""

# Compared with `jnp.issubdtype`, which also covers bfloat16 and the float8 dtypes.
_KINDS = (np.bool_, np.integer, np.floating, np.complexfloating)
# By NumPy's letter of a kind of dtypes; the others have at most 8 bytes.
_LARGEST_BYTES = {"c": 16}
_DTYPE = re.compile(r"[a-z][a-z0-9_]{2,24}|key<[a-zA-Z0-9_ .-]{1,40}>")
_MOST_DIMS = 64
_LARGEST_SIZE = 2**63
_MOST_LEAVES = 200_000
_MOST_BYTES = 64 * 2**20
_VALUES_PER_LEAF = 8 + 4
_DEPTH = 4
_SHOWN = 3
"""Number of names that a message lists."""

_SPARE_BYTES = 64 * 2**20
_SPARE_BYTES_PER_LEAF = 2**20  # for the index of its chunks
_KEY_BYTES = 256  # upper bound for any kind of key
_ORBAX_VALUES_PER_LEAF = 40
_ORBAX_FILE = "_METADATA"


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """The description of one leaf. Keys have the dtype `key<...>` and the shape without their data.

    `is_number`: it was a Python number, which has no dtype of its own.
    """

    shape: tuple[int, ...]
    dtype: str
    is_number: bool = False

    @property
    def is_key(self) -> bool:
        """True if it holds typed random keys."""
        return self.dtype.startswith("key<")

    @property
    def is_empty(self) -> bool:
        """True if it has no elements."""
        return 0 in self.shape

    @property
    def as_stored(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype in the file."""
        if self.is_key:
            # The words of a key are one more dim, whose size depends on the generator.
            return jax.eval_shape(jax.random.key_data, _jax.struct(self.shape, self.dtype))
        return jax.ShapeDtypeStruct(self.shape, jnp.dtype(_WIDER.get(self.dtype, self.dtype)))

    @property
    def kind(self) -> object:
        """The category of dtypes that it belongs to: integers, floats, or another."""
        return self.dtype if self.is_key else next(kind for kind in _KINDS if jnp.issubdtype(self.dtype, kind))

    def fits(self, other: Leaf) -> bool:
        """Return True if one can be restored as the other."""
        # A Python number has no width, so any number of its kind will do.
        alike = self.kind == other.kind if self.is_number or other.is_number else self.dtype == other.dtype
        return alike and self.shape == other.shape

    def to_json(self) -> dict[str, object]:
        """Return JSON-compatible data."""
        data: dict[str, object] = {"shape": list(self.shape), "dtype": self.dtype}
        # Left out where it is false, as in most leaves: a state may have many thousands of them.
        return {**data, "is_number": True} if self.is_number else data

    @staticmethod
    def from_json(data: Any) -> Leaf:
        """Return the leaf that `to_json` described. Raises KeyError, TypeError or ValueError for anything else."""
        shape, dtype = data["shape"], data["dtype"]
        if not (isinstance(shape, list) and len(shape) <= _MOST_DIMS and all(map(_is_size, shape))):
            raise ValueError(f"{excerpt(shape)} is no shape")
        # Checked by its letters first, as NumPy parses names of dtypes as expressions.
        if not (isinstance(dtype, str) and _DTYPE.fullmatch(dtype)):
            raise ValueError(f"{excerpt(dtype)} is no dtype")
        if not dtype.startswith("key<") and not _is_of_numbers(dtype):
            raise ValueError(f"{excerpt(dtype)} is no dtype of numbers")
        return Leaf(shape=tuple(shape), dtype=dtype, is_number=data.get("is_number") is True)

    def __str__(self) -> str:
        return excerpt(f"{self.dtype}{list(self.shape)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A state to be written: the description of each leaf, and the arrays with elements as storage holds them."""

    leaves: Mapping[str, Leaf]
    arrays: Mapping[str, Array]


def stored(state: Tree) -> Stored:
    """Return a state as it is written. Raises `CheckpointError` for a leaf that is no array and no number."""
    leaves: dict[str, Leaf] = {}
    arrays: dict[str, Array] = {}
    for name, value in _named(state):
        if isinstance(value, jax.Array) and value.is_deleted():
            raise CheckpointError(
                f"The array {excerpt(name)} of the state was deleted: a step took its memory over (donate_argnums). "
                "Save what that step returned."
            )
        leaf = leaves[name] = _described(name, value)
        if not leaf.is_empty:
            arrays[name] = _storable(value, leaf)
    return Stored(leaves=leaves, arrays=arrays)


def _storable(value: TreeLeaf, leaf: Leaf) -> Array:
    if leaf.is_key:
        return jax.random.key_data(value)
    array = value if isinstance(value, jax.Array) else np.asarray(value)
    return array.astype(_WIDER[leaf.dtype]) if leaf.dtype in _WIDER else array


def write_leaves(leaves: Mapping[str, Leaf]) -> bytes:
    """Return the file that describes the leaves. Raises `CheckpointError` if it is too large to read back."""
    data = {"format": FORMAT, "leaves": {name: leaf.to_json() for name, leaf in leaves.items()}}
    text = json.dumps(data, allow_nan=False).encode()
    # What could not be read back must fail now, while the state still exists.
    if len(leaves) > _MOST_LEAVES or len(text) > _MOST_BYTES:
        raise CheckpointError(
            f"The state has {len(leaves)} leaves, described in {len(text)} bytes, but a checkpoint holds at most "
            f"{_MOST_LEAVES} in {_MOST_BYTES} bytes. Stack arrays of the same kind."
        )
    return text


def read_leaves(path: Path) -> dict[str, Leaf]:
    """Return the leaves that `write_leaves` wrote. Raises `CheckpointError` for anything else."""
    try:
        text = read_bounded(path, _MOST_BYTES)
        data = parse_json(text, any_text=True, max_values=_VALUES_PER_LEAF * _MOST_LEAVES, max_depth=_DEPTH)
        if data["format"] != FORMAT:
            raise ValueError(f"format {excerpt(data['format'])}")
        return {name: Leaf.from_json(leaf) for name, leaf in data["leaves"].items()}
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"its list of arrays is none that this version of alpa_lite writes ({excerpt(error, 200)}): restore it "
            "with the version that saved it"
        ) from error


def _is_size(size: object) -> bool:
    return type(size) is int and 0 <= size < _LARGEST_SIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """One leaf of a state to be restored.

    sharding   the sharding of its array; None: it is NumPy's, or a number
    number     type of a number: `int`, `np.float32`
    """

    name: str
    leaf: Leaf
    sharding: Sharding | None
    number: type[Any] | None = None

    @property
    def stored_sharding(self) -> Sharding | None:
        """The sharding of the array as it is stored: that of keys has one more dim."""
        if not self.leaf.is_key or not isinstance(self.sharding, NamedSharding):
            return self.sharding
        spec = PartitionSpec(*self.sharding.spec[: len(self.leaf.shape)])
        return NamedSharding(self.sharding.mesh, spec, memory_kind=self.sharding.memory_kind)

    def restored(self, array: Array | None) -> TreeLeaf:
        """Return the leaf, made of the array that was read (None for an array without elements)."""
        form = self.leaf.as_stored
        # Arrays without elements are not in the file.
        array = np.zeros(form.shape, form.dtype) if array is None else array
        # A number is stored as an array without dims, whose element `[()]` takes out.
        if self.number is not None:
            return self.number(array[()])
        sharding = self.stored_sharding
        if sharding is None:
            return np.array(array, self.leaf.dtype)
        if not isinstance(array, jax.Array):
            array = _placed(self.name, array, form, sharding)
        if self.leaf.is_key:
            return jax.jit(_keys, static_argnums=1, out_shardings=self.sharding)(
                array, _jax.key_implementation(self.leaf.dtype)
            )
        if self.leaf.dtype in _WIDER:
            # Converted on the devices, each its own block.
            return jax.jit(lambda x: x.astype(self.leaf.dtype), out_shardings=self.sharding)(array)
        return array


def _keys(data: jax.Array, implementation: str) -> jax.Array:
    return jax.random.wrap_key_data(data, impl=implementation)


def _placed(name: str, array: Array, form: jax.ShapeDtypeStruct, sharding: Sharding) -> jax.Array:
    """Return an array in a sharding, made from one that every process has on its host; each puts its own blocks."""
    converted = np.asarray(array).astype(form.dtype)
    # A Python number of any size may have been saved where an array of narrow integers is wanted.
    if jnp.issubdtype(form.dtype, np.integer) and (converted != array).any():
        raise CheckpointError(f"it holds {excerpt(array)} for {excerpt(name)}, which is too large for {form.dtype}")
    return jax.make_array_from_callback(form.shape, sharding, lambda index: converted[index], dtype=form.dtype)


def wanted(like: Tree, shardings: Sequence[Sharding] | None = None) -> list[Wanted]:
    """Return the leaves of a pytree like the state to be restored: arrays, `jax.ShapeDtypeStruct`s, numbers.

    shardings: of each leaf; None: those of the arrays or structs; leaves without one go to the first device.
    """
    named = _named(like)
    places = shardings if shardings is not None else [_place(value) for _, value in named]
    return [
        Wanted(
            name=name,
            leaf=_described(name, value),
            sharding=place,
            number=type(value) if isinstance(value, (bool, int, float, complex, np.generic)) else None,
        )
        for (name, value), place in zip(named, places, strict=True)
    ]


def _place(value: TreeLeaf) -> Sharding | None:
    if isinstance(value, (jax.Array, jax.ShapeDtypeStruct)):
        return value.sharding or SingleDeviceSharding(jax.local_devices()[0])
    return None


def check_fit(wanted: Sequence[Wanted], saved: Mapping[str, Leaf], *, partial: bool) -> None:
    """Raise `CheckpointError` unless a checkpoint has the requested leaves, and (unless `partial`) no others."""
    names = {each.name for each in wanted}
    # Names first, then forms: a message about a wrong state is shorter than one about each of its leaves.
    missing = [name for name in names if name not in saved]
    extra = [] if partial else [name for name in saved if name not in names]
    if missing or extra:
        parts = [*_listed("lacks", missing), *_listed("has besides", extra)]
        advice = ", or give partial=True to restore a part of it" if not missing else ""
        raise CheckpointError(
            f"it holds another state than the one that is asked for: it {' and '.join(parts)}. Give the state that was "
            f"saved as `like`{advice}"
        )
    for each in wanted:
        if not each.leaf.fits(saved[each.name]):
            raise CheckpointError(
                f"it holds {saved[each.name]} for {excerpt(each.name)}, but {each.leaf} is asked for. Nothing is cut, "
                "padded or converted: restore it as it was saved, and change it then"
            )


def _listed(what: str, names: Sequence[str]) -> list[str]:
    return [f"{what} {show_first([*map(excerpt, sorted(names))], _SHOWN)}"] if names else []


def _named(tree: Tree) -> list[tuple[str, TreeLeaf]]:
    """Return the leaves by their paths; of paths that read alike the later ones are numbered."""
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    # Two keys of a dictionary may read alike, as 1 and "1" do.
    names = unique(jax.tree_util.keystr(path, simple=True, separator="/") or "state" for path, _ in paths)
    return [(name, value) for name, (_, value) in zip(names, paths, strict=True)]


def _described(name: str, value: TreeLeaf) -> Leaf:
    is_number = type(value) in (bool, int, float, complex)
    dtype = np.asarray(value).dtype if is_number else getattr(value, "dtype", None)
    if _can_be_stored(dtype):
        return Leaf(shape=tuple(np.shape(value)), dtype=str(dtype), is_number=is_number)
    what = type(value).__name__ if dtype is None else f"{type(value).__name__} of {dtype}"
    raise CheckpointError(
        f"{excerpt(name)} of the state is a {excerpt(what)}, but checkpoints hold arrays and numbers. Leave it out of "
        "the state, or make it an array of numbers."
    )


@memoized(entries=64)
def _is_of_numbers(dtype: str) -> bool:
    return _can_be_stored(jnp.dtype(dtype))


def _can_be_stored(dtype: DType) -> bool:
    if dtype is None or jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return dtype is not None
    if not any(jnp.issubdtype(dtype, kind) for kind in _KINDS):
        return False
    # No long doubles, whose size and layout differ between machines.
    return np.dtype(dtype).itemsize <= _LARGEST_BYTES.get(np.dtype(dtype).kind, 8)


def check_files(folder: Path, saved: Mapping[str, Leaf]) -> None:
    """Raise ValueError unless the files of a checkpoint are regular, and of plausible sizes for its arrays."""
    # Generous: the bound has to catch files that would fill the memory, not files that are a little too large.
    room = 2 * sum(_bytes(leaf) for leaf in saved.values()) + _SPARE_BYTES + _SPARE_BYTES_PER_LEAF * len(saved)
    largest = room - _SPARE_BYTES_PER_LEAF * len(saved)
    root = folder.resolve()
    for name in files_of(folder):
        size = _size(folder / name, root, is_own(name))
        room -= size
        if size > largest or room < 0:
            raise ValueError(f"with {excerpt(name)} its files are larger than the arrays that it names can make them")
    try:
        text = read_bounded(folder / _ORBAX_FILE, _SPARE_BYTES)
        parse_json(text, any_text=True, max_values=_ORBAX_VALUES_PER_LEAF * (len(saved) + 4), max_depth=16)
    except FileNotFoundError:
        return  # there may be no arrays; the list of checksums says which files must exist
    except (OSError, ValueError) as error:
        raise ValueError(f"{_ORBAX_FILE} cannot be read ({excerpt(error)})") from error


def _bytes(leaf: Leaf) -> int:
    size = _KEY_BYTES if leaf.is_key else max(1, jnp.dtype(leaf.dtype).itemsize)
    return math.prod(leaf.shape) * size


def _size(path: Path, root: Path, own: bool) -> int:
    """Return the size in bytes of a file of ours; 0 for others, whose links must still not lead out of the folder."""
    try:
        status = path.lstat()
        if stat.S_ISLNK(status.st_mode):
            if not path.resolve(strict=True).is_relative_to(root):
                raise ValueError(f"{excerpt(path.name)} leads out of the folder")
            status = path.stat()
    except RuntimeError as error:
        raise ValueError(f"{excerpt(path.name)} is a link to itself") from error
    if not own:
        return 0
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{excerpt(path.name)} is no regular file")
    return status.st_size
