"""The key of a compiled step: everything by which `jax.jit` tells calls apart, and the difference of two keys in words.

structure      the pytree of the traced arguments
static         constants with their types: 1, True and 1.0 are equal, but are three values
leaves         shape, dtype and weak type of each array
configuration  the settings of JAX that decide how a function is traced (64 bits, precision, meshes, …)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from alpa_lite import _jax
from alpa_lite.trace.call import Static, argument_name
from alpa_lite.trace.trace import aval_of, leaf_name

_LONGEST = 60
"""The greatest number of characters of a value in a log line."""

_MOST = 6
"""The greatest number of differences in a log line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallKey:
    """The key of a call; the module describes the fields."""

    structure: Any
    static: Static
    leaves: tuple[tuple[tuple[int, ...], Any, bool], ...]
    configuration: tuple[tuple[str, Any], ...]

    def has_same_arrays(self, other: CallKey) -> bool:
        """Whether the arguments of both calls have the same structure, shapes and dtypes, whatever else differs."""
        mine, others = ([leaf[:2] for leaf in key.leaves] for key in (self, other))
        return self.structure == other.structure and mine == others


def form_of(leaf: Any) -> Any:
    """Return a value by which two arguments are compared quickly: the aval of a JAX array, else shape and dtype or
    type.
    """
    if isinstance(leaf, jax.Array):
        return leaf.aval
    return np.shape(leaf), getattr(leaf, "dtype", type(leaf))


def key_of_call(
    fun: Callable[..., Any], structure: Any, static: Static, leaves: Sequence[Any], configuration: tuple[Any, ...]
) -> CallKey:
    """Return the key of a call. Raises `TraceError` for an argument that is not an array."""
    return CallKey(
        structure=structure,
        static=static,
        leaves=tuple(_array(leaf, name) for leaf, name in zip(leaves, _names(fun, structure), strict=True)),
        configuration=tuple(_jax.by_name(configuration).items()),
    )


def _array(leaf: Any, name: str) -> tuple[tuple[int, ...], Any, bool]:
    aval = aval_of(leaf, name)
    has_no_bytes = getattr(leaf, "dtype", None) == jax.dtypes.float0
    return tuple(aval.shape), jax.dtypes.float0 if has_no_bytes else aval.dtype, bool(aval.weak_type)


def _names(fun: Callable[..., Any], structure: Any) -> list[str]:
    paths, _ = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(structure, range(structure.num_leaves)))
    return [leaf_name(fun, path) for path, _ in paths]


def difference(fun: Callable[..., Any], old: CallKey, new: CallKey) -> str:
    """Describe in one line what differs between two calls: arguments, static values, JAX's configuration."""
    found: list[str] = []
    for before, after in zip(_described(fun, old), _described(fun, new), strict=True):
        for name in dict.fromkeys([*before, *after]):
            pair = before.get(name, "not given"), after.get(name, "not given")
            if pair[0] != pair[1]:
                found.append(f"{name}: {pair[0]} → {pair[1]}")
    if not found:
        return "the argument structure"
    more = [f"and {len(found) - _MOST} more"] if len(found) > _MOST else []
    return ", ".join([*found[:_MOST], *more])


def _described(fun: Callable[..., Any], key: CallKey) -> list[dict[str, str]]:
    """Describe a call as three mappings by name: arrays, static arguments, configuration."""
    arrays = zip(_names(fun, key.structure), key.leaves, strict=True)
    return [
        {name: f"{dtype}{list(shape)}{' with a weak type' if weak else ''}" for name, (shape, dtype, weak) in arrays},
        {argument_name(fun, i): f"{kind.__name__} {_short(value)}" for i, kind, value in key.static},
        {name: _short(value) for name, value in key.configuration},
    ]


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
