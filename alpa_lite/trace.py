"""Tracing a plain train step: arguments to avals, the step to a jaxpr, at the full batch and at other batch sizes.

No array is touched: `jax.ShapeDtypeStruct`s do. Which arguments hold the batch is found by exclusion (find_batch):
arguments that come back among the outputs are state, keys are keys, and what is left must agree on its leading size.
Where that does not tell, or no gradient is computed and no tree comes back (a forward function of parameters and data),
the arguments whose arrays all agree on their leading size may hold it, and of several such sizes the one with which
outputs lead (_without_state), if the function works at other such sizes too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from alpa_lite import _jax
from alpa_lite.errors import BatchError, TraceError
from alpa_lite.garbage import rare_collection

BatchArgnums = int | str | Sequence[int | str] | Mapping[int | str, int] | None
"""The arguments that hold the batch, by position, name or path (`"state/carry"`); a mapping also gives their dim."""


@dataclass(frozen=True, kw_only=True)
class Traced:
    """A function traced for one set of argument shapes.

    `leaves` are the avals of the flattened dynamic arguments, `names` their paths, `arguments` the names of the
    positional ones, with which paths begin, `batch_leaves[i]` is the dim of leaf i that holds the batch (None: none
    does), `donated[i]` whether the caller gives it away, `aliases` which output leaf takes the place of which input
    leaf in the next step.
    """

    fun: Callable[..., Any]
    name: str
    in_tree: Any
    out_tree: Any
    leaves: tuple[jax.ShapeDtypeStruct, ...]
    out_leaves: tuple[jax.ShapeDtypeStruct, ...]
    names: tuple[str, ...]
    arguments: tuple[str, ...]
    out_names: tuple[str, ...]
    batch_leaves: tuple[int | None, ...]
    batch_size: int | None
    batch_problem: str
    aliases: Mapping[int, int]
    donated: tuple[bool, ...]
    static_argnums: tuple[int, ...]
    jaxpr: Any
    _flat: Callable[..., Any] = field(repr=False)
    _cache: dict[int, Any] = field(default_factory=dict, repr=False, compare=False)

    def at_batch_size(self, size: int) -> Any:
        """The jaxpr of the step with another leading size of its batch."""
        if size == self.batch_size:
            return self.jaxpr
        if size not in self._cache:
            avals = [
                leaf if dim is None else _resized(leaf, dim, size, self.batch_size)
                for leaf, dim in zip(self.leaves, self.batch_leaves, strict=True)
            ]
            self._cache[size] = jax.make_jaxpr(self._flat)(*avals)
        return self._cache[size]

    def require_batch(self) -> int:
        """The batch size, or the sentence that says why there is none."""
        if self.batch_size is None:
            raise BatchError(self.batch_problem)
        return self.batch_size


def _resized(leaf: jax.ShapeDtypeStruct, dim: int, size: int, batch_size: int | None) -> jax.ShapeDtypeStruct:
    # A leaf may hold several rows per sample; its dim scales with the batch.
    rows = leaf.shape[dim] * size // (batch_size or leaf.shape[dim])
    shape = (*leaf.shape[:dim], rows, *leaf.shape[dim + 1 :])
    return jax.ShapeDtypeStruct(shape, leaf.dtype, weak_type=leaf.weak_type)


@rare_collection()
def trace(
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    static_argnums: int | Sequence[int] = (),
    donate_argnums: int | Sequence[int] = (),
    batch_argnums: BatchArgnums = None,
) -> Traced:
    """Trace `fun(*args, **kwargs)`; arrays and `ShapeDtypeStruct`s are equally good.

    Raises `TraceError` when an argument is no array, `BatchError` when `batch_argnums` names something unusable.
    """
    _check_call(fun, args, kwargs or {})
    static = {argument_number(i, len(args)) for i in _as_tuple(static_argnums)}
    dynamic = {i: arg for i, arg in enumerate(args) if i not in static}
    tree = (dynamic, dict(kwargs or {}))
    paths, in_tree = jax.tree_util.tree_flatten_with_path(tree)
    names = tuple(_leaf_name(fun, path) for path, _ in paths)
    leaves = tuple(_aval(leaf, name) for (_, leaf), name in zip(paths, names, strict=True))
    box: dict[str, Any] = {}

    def flat(*flat_leaves: Any) -> list[Any]:
        arguments, keywords = jax.tree.unflatten(in_tree, flat_leaves)
        full = [args[i] if i in static else arguments[i] for i in range(len(args))]
        out_paths, box["tree"] = jax.tree_util.tree_flatten_with_path(fun(*full, **keywords))
        box["names"] = tuple(jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in out_paths)
        _check_outputs(fun, box["names"], [leaf for _, leaf in out_paths])
        return [leaf for _, leaf in out_paths]

    jaxpr = jax.make_jaxpr(flat)(*leaves)
    out_leaves = tuple(jax.ShapeDtypeStruct(v.shape, v.dtype) for v in jaxpr.out_avals)
    donate = {argument_number(i, len(args)) for i in _as_tuple(donate_argnums)}
    owner = tuple(_owner(path) for path, _ in paths)
    positional, keywords = jax.tree.unflatten(in_tree, [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in jaxpr.in_avals])
    aliases = match_state({**positional, **keywords}, jax.tree.unflatten(box["tree"], out_leaves))
    state = {owner[leaf] for leaf in aliases.values()}
    batch, size, problem = find_batch(state, leaves, owner, names, batch_argnums, len(args))
    traced = Traced(
        fun=fun,
        name=_name_of(fun),
        in_tree=in_tree,
        out_tree=box["tree"],
        leaves=leaves,
        out_leaves=out_leaves,
        names=names,
        arguments=tuple(_argument_name(fun, i) for i in dynamic),
        out_names=box["names"],
        batch_leaves=batch,
        batch_size=size,
        batch_problem=problem,
        aliases=aliases,
        donated=tuple(key in donate for key in owner),
        static_argnums=tuple(sorted(static)),
        jaxpr=jaxpr,
        _flat=flat,
    )
    trees = {key for key in state if not jax.tree_util.all_leaves([{**positional, **keywords}[key]])}
    known = size is not None and any("transpose(" in _jax.name_stack(eqn) for eqn in _jax.open_jaxpr(jaxpr).eqns)
    likely = _without_state(leaves, owner, out_leaves)
    if batch_argnums is not None or trees or known or likely is None:
        return traced
    batch, size, problem = find_batch(state, leaves, owner, names, likely, len(args))
    forward = replace(traced, batch_leaves=batch, batch_size=size, batch_problem=problem, _cache={})
    return forward if batch != traced.batch_leaves and _works_at_other_sizes(forward) else traced


def _check_call(fun: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises `TraceError` for arguments that the function does not take."""
    try:
        signature = inspect.signature(fun)
    except (TypeError, ValueError):  # some callables have none
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        named = f" and {', '.join(kwargs)}" if kwargs else ""
        raise TraceError(
            f"{_name_of(fun)}{signature} cannot be called with {len(args)} positional arguments{named}: {error}."
        ) from error


def _check_outputs(fun: Callable[..., Any], names: Sequence[str], outputs: Sequence[Any]) -> None:
    """Raises `TraceError` for an output that is no array."""
    for name, leaf in zip(names, outputs, strict=True):
        known = hasattr(leaf, "dtype") or hasattr(leaf, "__jax_array__")
        if not known and not isinstance(leaf, (bool, int, float, complex)):
            where = f" at {name}" if name else ""
            raise TraceError(
                f"{_name_of(fun)} returns a {type(leaf).__name__}{where}, which is no array. Return arrays, numbers "
                "and pytrees of them alone."
            )


def _name_of(fun: Callable[..., Any]) -> str:
    return getattr(fun, "__name__", type(fun).__name__)


def _works_at_other_sizes(traced: Traced) -> bool:
    try:
        traced.at_batch_size(2 * traced.require_batch())
    except Exception:  # the user's function may raise anything at another size
        return False
    return True


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return (value,) if isinstance(value, (int, str)) else tuple(value)


def argument_number(index: int, count: int) -> int:
    """The number of a positional argument, of `count`, which may be counted from the end.

    Raises:
        TraceError: there is no such argument.
    """
    if not -count <= index < count:
        raise TraceError(
            f"Argument number {index} was named, but the function was called with {count} positional ones."
        )
    return index % count


def _owner(path: tuple[Any, ...]) -> int | str:
    """Positional number or keyword of the argument that a leaf belongs to."""
    return path[1].key


def _leaf_name(fun: Callable[..., Any], path: tuple[Any, ...]) -> str:
    """`state/params/w`-like name of a leaf, starting with the argument's own name where Python tells it."""
    owner = _argument_name(fun, _owner(path))
    tail = jax.tree_util.keystr(path[2:], simple=True, separator="/")
    return f"{owner}/{tail}" if tail else owner


def _argument_name(fun: Callable[..., Any], owner: int | str) -> str:
    if isinstance(owner, str):
        return owner
    code = getattr(getattr(fun, "__wrapped__", fun), "__code__", None)
    known = code.co_varnames[: code.co_argcount] if code is not None else ()
    return known[owner] if owner < len(known) else f"argument {owner}"


def _aval(leaf: Any, name: str) -> jax.ShapeDtypeStruct:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    try:
        aval = jax.typeof(leaf)
    except TypeError as error:
        raise TraceError(
            f"{name} is a {type(leaf).__name__}, which JAX cannot trace. Pass arrays or numbers, or name the argument "
            "in static_argnums."
        ) from error
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def _without_state(
    leaves: Sequence[jax.ShapeDtypeStruct], owner: Sequence[int | str], out_leaves: Sequence[jax.ShapeDtypeStruct]
) -> tuple[int | str, ...] | None:
    """The arguments that hold the batch of a function without state; None if it is not clear."""
    sizes: dict[int | str, set[int]] = {}
    for key, leaf in zip(owner, leaves, strict=True):
        if leaf.shape and not is_key(leaf):
            sizes.setdefault(key, set()).add(leaf.shape[0])
    agreeing = {key: min(found) for key, found in sizes.items() if len(found) == 1}
    likely = set(agreeing.values())
    if len(likely) > 1:
        likely &= {leaf.shape[0] for leaf in out_leaves if leaf.shape}
    if len(likely) != 1:
        return None
    return tuple(key for key, size in agreeing.items() if size in likely)


def find_batch(
    state: set[int | str],
    leaves: Sequence[jax.ShapeDtypeStruct],
    owner: Sequence[int | str],
    names: Sequence[str],
    batch_argnums: BatchArgnums,
    num_args: int,
) -> tuple[tuple[int | None, ...], int | None, str]:
    """The dim of each leaf that holds the batch, the batch size, and a sentence when it cannot be found."""
    if batch_argnums is not None:
        marked = _named_batch(leaves, owner, names, batch_argnums, num_args)
    else:
        marked = tuple(
            0 if o not in state and len(leaf.shape) > 0 and not is_key(leaf) else None
            for o, leaf in zip(owner, leaves, strict=True)
        )
    sizes = {leaf.shape[dim] for leaf, dim in zip(leaves, marked, strict=True) if dim is not None}
    if len(sizes) == 1 and 0 not in sizes:
        return marked, sizes.pop(), ""
    where = ", ".join(
        f"{name} {list(leaf.shape)}" for name, leaf, dim in zip(names, leaves, marked, strict=True) if dim is not None
    )
    problem = (
        f"The batch cannot be found: the arguments that are not state disagree on its size ({where}). "
        if sizes
        else "The batch cannot be found: every array argument comes back among the outputs, so none looks like data. "
    )
    example = _likely_batch(leaves, owner, names, marked)
    advice = (
        f"Name the arguments or paths that hold it, e.g. batch_argnums={example}, or their dim too, e.g. "
        'batch_argnums={"x": 1}.'
    )
    return (None,) * len(leaves), None, problem + advice


def _likely_batch(
    leaves: Sequence[jax.ShapeDtypeStruct],
    owner: Sequence[int | str],
    names: Sequence[str],
    marked: Sequence[int | None],
) -> str:
    """An example of `batch_argnums`: the last argument of one size, as data come last, and those that agree with it."""
    sizes: dict[int | str, set[int]] = {}
    called: dict[int | str, str] = {}
    for leaf, o, name, dim in zip(leaves, owner, names, marked, strict=True):
        if dim is not None:
            sizes.setdefault(o, set()).add(leaf.shape[dim])
            called[o] = name.split("/")[0]
    last = next((found for found in reversed(sizes.values()) if len(found) == 1), None)
    return str(tuple(called[o] for o, found in sizes.items() if found == last)) if last else '("x", "batch/labels")'


def _named_batch(
    leaves: Sequence[jax.ShapeDtypeStruct],
    owner: Sequence[int | str],
    names: Sequence[str],
    batch_argnums: Mapping[int | str, int] | Sequence[int | str] | int | str,
    num_args: int,
) -> tuple[int | None, ...]:
    """The dim of each leaf that the user named: by position, by name, or by the start of its path."""
    listed = batch_argnums if isinstance(batch_argnums, Mapping) else dict.fromkeys(_as_tuple(batch_argnums), 0)
    marked: list[int | None] = [None] * len(leaves)
    for key, dim in listed.items():
        place = argument_number(key, num_args) if isinstance(key, int) else key
        found = [i for i, name in enumerate(names) if place in (owner[i], name) or name.startswith(f"{place}/")]
        if not found:
            raise BatchError(
                f"batch_argnums names {key!r}, but no argument of that name and no path that starts so was given: "
                f"{list(names)}."
            )
        for i in found:
            rank = len(leaves[i].shape)
            if rank > dim >= 0:
                marked[i] = dim
            elif rank > 0:
                raise BatchError(f"batch_argnums says dim {dim} of {names[i]}, which has {rank} dims, counted from 0.")
    return tuple(marked)


def is_key(leaf: jax.ShapeDtypeStruct) -> bool:
    """Whether a leaf holds random keys: typed ones, or a single one as a pair of words."""
    return jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key) or (leaf.dtype == np.uint32 and leaf.shape == (2,))


def _subtrees(tree: Any, depth: int, start: int = 0) -> list[tuple[Any, int]]:
    """(signature, number of the first leaf) of a tree of avals and of its subtrees down to `depth`, largest first."""
    found = [(_signature(tree), start)]
    if depth and not jax.tree_util.all_leaves([tree]):
        one_level = jax.tree_util.default_registry.flatten_one_level(tree)
        for child in one_level[0] if one_level else ():
            found += _subtrees(child, depth - 1, start)
            start += len(jax.tree.leaves(child))
    return found


def _signature(tree: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((tuple(leaf.shape), str(leaf.dtype)) for leaf in leaves)


def match_state(arguments: Mapping[int | str, Any], outputs: Any) -> dict[int, int]:
    """Which output leaf replaces which input leaf in the next step: state in, state out.

    An argument is state when its whole tree (structure, shapes, dtypes) comes back somewhere among the outputs. A lone
    array counts only as the first output: elsewhere an equal shape may be chance (predictions as wide as inputs).
    """
    candidates = _subtrees(outputs, depth=3)
    pairs: dict[int, int] = {}
    start = 0
    for tree in arguments.values():
        count = len(jax.tree.leaves(tree))
        lone = jax.tree_util.all_leaves([tree])
        for signature, first in candidates if count else ():
            taken = any(first <= o < first + count for o in pairs)
            if signature == _signature(tree) and not taken and (first == 0 or not lone):
                pairs.update({first + i: start + i for i in range(count)})
                break
        start += count
    return pairs
