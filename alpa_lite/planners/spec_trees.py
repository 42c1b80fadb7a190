"""Trees of `PartitionSpec`s and `NamedSharding`s, as `jax.jit` takes them: which arrays each of them is for.

Planning knows no JAX: containers are what pytrees of parameters are made of, and a spec is what is none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from typing import Any, NamedTuple, cast

from alpa_lite.errors import PlanError


class _Given(NamedTuple):
    """A leaf of a tree of specs."""

    path: str
    spec: Any


def by_path(option: str, tree: Any, paths: Sequence[str], empty: Sequence[str] = ()) -> dict[str, Any]:
    """The spec of each of the arrays with these paths for which the tree has one, or a part of the tree that it is in.

    Args:
        option: what the tree was given as, for sentences.
        tree: of specs; what is None is left open.
        paths: of all arrays.
        empty: paths that there need not be arrays below.

    Raises `PlanError` for entries that no array belongs to, and for lists with fewer entries than there are arrays.
    """
    found: dict[str, Any] = {}
    for path, spec in _leaves(tree, "", option, paths):
        below = [name for name in paths if _is_in(name, path)]
        if not below and path not in empty:
            near = get_close_matches(path, paths, n=3, cutoff=0.3) or [*paths][:3]
            meant = f"Did you mean {', '.join(near)}?" if near != [""] else "There is one array, and no container."
            raise PlanError(
                f"{option} has an entry for {path!r}, but there is no such array. {meant} Write specs as "
                "PartitionSpec(...): a tuple is a tree."
            )
        found |= dict.fromkeys(below, spec)
    return found


def meshes(tree: Any) -> list[dict[str, int]]:
    """Devices per axis of the mesh of each `NamedSharding` in a tree."""
    children = _children(tree)
    if children is not None:
        return [mesh for _, child in children for mesh in meshes(child)]
    return [dict(tree.mesh.shape)] if _is_sharding(tree) else []


def dims_of(name: str, spec: Any) -> tuple[Any, ...]:
    """The dims of the spec of an array: of each None, an axis or a tuple of axes. Raises `PlanError` for others."""
    spec = spec.spec if _is_sharding(spec) else spec
    dims = tuple(spec) if hasattr(spec, "__iter__") and not isinstance(spec, str) else ("?",)
    entries = [axis for dim in dims for axis in (dim if isinstance(dim, tuple) else (dim,))]
    plain = all(axis is None or type(axis) is str for axis in entries) and "?" not in entries
    if not plain or getattr(spec, "unreduced", None) or getattr(spec, "reduced", None):
        raise PlanError(
            f"The spec of {name} is {spec!r}; give a PartitionSpec or a NamedSharding of whole sums, with None, an "
            "axis or a tuple of axes for each dim. Give None in its place where the planner may choose."
        )
    return dims


def _is_in(name: str, path: str) -> bool:
    """Whether a path is another one or goes on from it."""
    return not path or name == path or name.startswith(f"{path}/")


def _is_sharding(spec: Any) -> bool:
    """True for a `jax.sharding.NamedSharding`."""
    return hasattr(spec, "mesh") and hasattr(spec, "spec")


def _leaves(tree: Any, path: str, option: str, paths: Sequence[str]) -> Iterator[_Given]:
    """The specs in a tree, each with its path; what is None is left out."""
    children = _children(tree)
    if tree is None:
        return
    if children is None:
        yield _Given(path, tree)
        return
    below = f"{path}/" if path else ""
    if isinstance(tree, (tuple, list)):
        next_keys = (name.removeprefix(below).partition("/")[0] for name in paths if _is_in(name, path))
        most = max((int(key) + 1 for key in next_keys if key.isdecimal()), default=0)
        if len(children) < most:
            raise PlanError(
                f"{option} has {len(children)} entries{f' at {path!r}' if path else ''}, but there are arrays in "
                f"{most}. Give one for each, None where the planner may choose."
            )
    for key, child in children:
        yield from _leaves(child, f"{below}{key}", option, paths)


def _children(tree: Any) -> list[tuple[str, Any]] | None:
    """The entries of a container by their keys in paths; None for a leaf."""
    if isinstance(tree, Mapping):
        return [(str(key), child) for key, child in cast("Mapping[Any, Any]", tree).items()]
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return list(zip(cast("Any", tree)._fields, cast("tuple[Any, ...]", tree), strict=True))
    if isinstance(tree, (tuple, list)):
        return [(str(i), child) for i, child in enumerate(cast("Sequence[Any]", tree))]
    if is_dataclass(tree) and not isinstance(tree, type):
        return [(field.name, getattr(tree, field.name)) for field in fields(tree)]
    return None
