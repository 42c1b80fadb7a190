"""Trace a train step: arguments become avals, and the step a jaxpr at the full batch and at other batch sizes.

No array is read: `jax.ShapeDtypeStruct`s serve as arguments as well. The module `batch` determines which arguments hold
the batch.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from alpa_lite import _jax
from alpa_lite._jax import Array, Aval, ClosedJaxpr, Tree, TreeDef
from alpa_lite.errors import BatchError, TraceError
from alpa_lite.program.collector import rare_collection
from alpa_lite.program.memo import memoized
from alpa_lite.program.user_shardings import Mode, UserSharding, UserShardings
from alpa_lite.trace.batch import (
    ArgumentLeaves,
    Batch,
    BatchArgnums,
    by_exclusion,
    by_name,
    by_trial,
    resized,
    without_state,
)
from alpa_lite.trace.call import (
    ArgumentRoles,
    Call,
    NamedArguments,
    Owner,
    Results,
    argument_name,
    function_name,
    is_array,
)
from alpa_lite.trace.explicit_types import Types, argument_types, result_types, traced_with_types
from alpa_lite.trace.passes.plain_jaxpr import JittedStep, of_jitted_step, user_sharding, without_meshes, without_refs
from alpa_lite.trace.passes.propagated import Propagated, propagated
from cost_models.checks import printable

KeyPath = tuple[Any, ...]
"""The path of a leaf in a pytree, of keys of several classes of JAX."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedInputs:
    """The dynamic arguments of a traced function, flattened.

    Attributes:
        tree: their pytree structure.
        leaves: avals of the leaves; bool stands for float0, which has no bytes.
        names: paths of the leaves, each starting with the name of its argument.
        donated: for each leaf whether the caller donates it.
        positional: names of the positional dynamic arguments.
        static: the arguments that are not among the leaves, because the user named them as constants of the trace.
    """

    tree: TreeDef
    leaves: tuple[jax.ShapeDtypeStruct, ...]
    names: tuple[str, ...]
    donated: tuple[bool, ...]
    positional: tuple[str, ...]
    static: NamedArguments


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedOutputs:
    """The outputs of a traced function, flattened.

    Attributes:
        tree: their pytree structure.
        leaves: avals of the leaves.
        names: paths of the leaves.
        results: how the results of a call are made of the outputs.
    """

    tree: TreeDef
    leaves: tuple[jax.ShapeDtypeStruct, ...]
    names: tuple[str, ...]
    results: Results


@dataclass(frozen=True, kw_only=True)
class Traced:
    """A function traced for one set of argument shapes.

    Attributes:
        fun: the user's function.
        name: its name, for messages.
        inputs: the flattened dynamic arguments.
        outputs: the flattened outputs.
        batch: the dims and the size of the batch.
        aliases: output leaf → the input leaf that it replaces in the next step.
        call: the arguments that the function was traced for.
        user_shardings: how the arguments lie that the step was traced for, and what that means for a plan.
        jaxpr: closed jaxpr of the function on flat arguments at the full batch.
    """

    fun: Callable[..., Tree]
    name: str
    inputs: TracedInputs
    outputs: TracedOutputs
    batch: Batch
    aliases: Mapping[int, int]
    call: Call
    user_shardings: UserShardings
    jaxpr: ClosedJaxpr
    _flat: Callable[..., Tree] = field(repr=False)
    _mesh: Mesh | None = field(default=None, repr=False, compare=False)
    _types: Types = field(default=(), repr=False, compare=False)

    @memoized
    def at_batch_size(self, size: int) -> ClosedJaxpr:
        """Return the closed jaxpr of the step at another batch size. Raises `TraceError` if the function fails."""
        if size == self.batch.size:
            return self.jaxpr
        avals = [
            leaf if dim is None else resized(leaf, dim, size, self.batch.size)
            for leaf, dim in zip(self.inputs.leaves, self.batch.dims, strict=True)
        ]
        try:
            return self.retraced(avals)
        except TraceError:
            raise
        except Exception as error:  # the user's function may raise anything at a size that it was not written for
            cause = f"{type(error).__name__}: {error}".rstrip(".")
            raise TraceError(
                f"{self.name} cannot be traced at {size} samples instead of {self.batch.size}: {cause}. Micro-batching "
                "needs a step that works at any batch size; use num_microbatches=1, or name the batch arguments in "
                "batch_argnums if others were taken for it."
            ) from error

    def retraced(self, avals: Sequence[jax.ShapeDtypeStruct]) -> Any:
        """Return the closed jaxpr of the step for flat arguments of other shapes."""
        under, given = _Context(mesh=self._mesh, types=self._types), self.user_shardings
        jaxpr = _plain_step(self._flat, avals, under, self.name, given.mode).jaxpr
        return self._propagated(jaxpr, given).jaxpr if given.propagated else jaxpr

    def _propagated(self, jaxpr: ClosedJaxpr, given: UserShardings) -> Propagated:
        """Return the step at some size with the shardings that XLA's propagation gives to its values."""
        arguments = list(map(given.arguments.get, self.inputs.names))
        return propagated(jaxpr, arguments, list(map(given.results.get, self.outputs.names)), self.name)

    def result_types(self, mesh: Mesh, leaves: Sequence[object]) -> Types | None:
        """Return the shardings on the user's mesh of explicit types in which `jax.jit` returns the results of these
        arguments; None for state whose argument lies on several devices elsewhere, or if the step has no such types.
        """
        types = argument_types(leaves, mesh)
        with jax.set_mesh(mesh), _jax.tracing_for_gpus():
            try:
                found: list[NamedSharding | None] = [
                    *result_types(traced_with_types(self._flat, self.inputs.leaves, types), mesh)
                ]
            except Exception:  # the user's function may raise anything for types that it was not written for
                return None
        for result, leaf in self.aliases.items():
            if types[leaf] is None and len(getattr(getattr(leaves[leaf], "sharding", None), "device_set", ())) > 1:
                found[result] = None
        return found

    def pinned(self) -> Traced:
        """Return the step traced again, with the shardings that the user gives as demands on its plan."""
        return self.under(replace(self.user_shardings, mode="pin"))

    def under(self, given: UserShardings) -> Traced:
        """Return the step traced again, with other shardings of arguments and results as demands on its plan.

        Those that the function names inside are demands too, unless `user_shardings="ignore"` has dropped them.
        Raises `TraceError` if the shardings are to be propagated, and the step cannot be lowered without devices.
        """
        under = _Context(mesh=self._mesh, types=self._types)
        mode: Mode = "ignore" if self.user_shardings.mode == "ignore" else "pin"
        jaxpr = _plain_step(self._flat, self.inputs.leaves, under, self.name, mode).jaxpr
        if given.propagated:
            jaxpr, arguments = self._propagated(jaxpr, given)
            given = replace(given, arguments=_with_source("argument", self.inputs.names, arguments))
        return replace(self, user_shardings=given, jaxpr=jaxpr)

    def require_batch(self) -> int:
        """Return the batch size in samples. Raises `BatchError`, which says why, if it could not be determined."""
        if self.batch.size is None:
            raise BatchError(self.batch.problem)
        return self.batch.size


@rare_collection()
def trace(
    fun: Callable[..., Tree],
    args: Sequence[Tree],
    kwargs: Mapping[str, Tree] | None = None,
    *,
    roles: ArgumentRoles | None = None,
    batch_argnums: BatchArgnums = None,
    user_shardings: Mode = "hint",
) -> Traced:
    """Trace `fun(*args, **kwargs)`; arguments may be arrays or `ShapeDtypeStruct`s.

    Args:
        fun: the function to trace.
        args: positional arguments.
        kwargs: keyword arguments.
        roles: the arguments that are constants of the trace, and those that the caller donates.
        batch_argnums: the arguments that hold the batch; None infers them (see `alpa_lite.trace.batch`).
        user_shardings: whether shardings that the user gives are read; see `alpa_lite.program.user_shardings`.

    Raises:
        TraceError: the function does not accept the call, or an argument or output is no array.
        BatchError: `batch_argnums` names an argument or dim that does not exist.
    """
    _check_call(fun, args, kwargs or {})
    roles = roles or ArgumentRoles()
    call = Call.of(fun, args, kwargs or {}, roles.static)
    paths, in_tree = jax.tree_util.tree_flatten_with_path(call.tree)
    names = unique(leaf_name(fun, path) for path, _ in paths)
    leaves = tuple(aval_of(leaf, name) for (_, leaf), name in zip(paths, names, strict=True))
    empty = [_has_no_bytes(leaf) for _, leaf in paths]
    box: dict[str, Any] = {}  # structure of the outputs, known only while `flat` is traced

    # Flat functions are traced with booleans in place of float0 (`_struct`), and the user's function is given float0
    # again.
    def flat(*held: jax.Array) -> list[Array]:
        given = [np.zeros(x.shape, jax.dtypes.float0) if e else x for x, e in zip(held, empty, strict=True)]
        arrays, box["results"] = call.run(fun, jax.tree.unflatten(in_tree, given))
        out_paths, box["tree"] = jax.tree_util.tree_flatten_with_path(arrays)
        box["names"] = unique(_path(path) for path, _ in out_paths)
        _check_outputs(fun, box["names"], [leaf for _, leaf in out_paths])
        box["empty"] = [_has_no_bytes(leaf) for _, leaf in out_paths]
        return [np.zeros(leaf.shape, bool) if _has_no_bytes(leaf) else leaf for _, leaf in out_paths]

    # Remembered, since traces at other batch sizes must see the mesh of this call, whatever is set by then.
    mesh = _jax.context_mesh()
    under = _Context(mesh=mesh, types=argument_types([leaf for _, leaf in paths], mesh))
    plain = _plain_step(flat, leaves, under, function_name(fun), user_shardings)
    jaxpr = plain.jaxpr
    out_leaves = tuple(_struct(aval) for aval in jaxpr.out_avals)
    # A module that the step does not change remains the caller's, who still reads its arrays after the step.
    donated = roles.donated.among(len(args), kwargs or {}) - call.unchanged(box["results"])
    owner = tuple(_owner(path) for path, _ in paths)
    positional, keywords = jax.tree.unflatten(in_tree, [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in jaxpr.in_avals])
    aliases = match_state({**positional, **keywords}, jax.tree.unflatten(box["tree"], out_leaves))
    state = frozenset(owner[leaf] for leaf in aliases.values())
    arguments = ArgumentLeaves(avals=leaves, names=names, owner=owner, num_args=len(args), state=state)
    traced = Traced(
        fun=fun,
        name=function_name(fun),
        inputs=TracedInputs(
            tree=in_tree,
            leaves=leaves,
            names=names,
            donated=tuple(key in donated for key in owner),
            positional=tuple(argument_name(fun, i) for i in positional),
            static=roles.static,
        ),
        outputs=TracedOutputs(
            tree=box["tree"],
            leaves=tuple(
                jax.ShapeDtypeStruct(x.shape, jax.dtypes.float0) if empty else x
                for x, empty in zip(out_leaves, box["empty"], strict=True)
            ),
            names=box["names"],
            results=box["results"],
        ),
        # The batch is added below: looking for it takes traces at other sizes, which need this object.
        batch=Batch(dims=(None,) * len(leaves), size=None),
        aliases=aliases,
        call=call,
        user_shardings=UserShardings(
            mode=user_shardings,
            # As in JAX: `in_shardings` say where an argument lies, wherever its array was before.
            arguments={
                **_placed(names, [leaf for _, leaf in paths], leaves),
                **_with_source("argument", names, plain.arguments),
            },
            results=_with_source("result", box["names"], plain.results),
        ),
        jaxpr=jaxpr,
        _flat=flat,
        _mesh=mesh,
        _types=under.types,
    )
    if batch_argnums is not None:
        return _with_batch(traced, by_name(arguments, batch_argnums))
    # A single array that is returned first may be a prediction, so it does not count as state here.
    trees = any(not jax.tree_util.all_leaves([{**positional, **keywords}[key]]) for key in state)
    return _with_assumed_batch(traced, arguments, has_state=trees)


class _Context(NamedTuple):
    """What the user's code sees of devices while it is traced: the mesh that is set, and types of arguments on it."""

    mesh: Mesh | None
    types: Types


def _plain_step(
    flat: Callable[..., Tree], avals: Sequence[jax.ShapeDtypeStruct], under: _Context, name: str, user_shardings: Mode
) -> JittedStep:
    """Return the jaxpr of a function, traced under the mesh that the user has set, without this and other meshes, and
    without mutable arrays, with the shardings of arguments and results that a jitted function has. Unless
    `user_shardings` is "ignore", shardings that the function names remain as equations.

    What the user's code says of meshes is read where it runs, under that mesh; a plan lays out the arrays anew.
    """
    with _jax.no_mesh() if under.mesh is None else jax.set_mesh(under.mesh), _jax.tracing_for_gpus():
        try:
            jaxpr = traced_with_types(flat, avals, under.types)
        except Exception:
            if not any(under.types):
                raise
            # The types of the batch need not divide a micro-batch.
            jaxpr = traced_with_types(flat, avals, (None,) * len(avals))
        step = of_jitted_step(without_refs(jaxpr, name))
        return step._replace(jaxpr=without_meshes(step.jaxpr, user_shardings))


def _placed(
    names: Sequence[str], leaves: Sequence[Any], avals: Sequence[jax.ShapeDtypeStruct]
) -> dict[str, UserSharding]:
    """Return the layout of each argument that the user has placed on several devices, by path."""
    given = [
        user_sharding(getattr(leaf, "sharding", None), len(aval.shape))
        for leaf, aval in zip(leaves, avals, strict=True)
    ]
    return _with_source("argument", names, given)


def _with_source(kind: str, names: Sequence[str], given: Sequence[UserSharding | None]) -> dict[str, UserSharding]:
    """Return the layouts that are given, by path, each with the argument or result as its source."""
    return {
        name: replace(sharding, source=f"{kind} {name}")
        for name, sharding in zip(names, given, strict=True)
        if sharding is not None
    }


def _with_batch(traced: Traced, batch: Batch) -> Traced:
    """Return the trace with a batch; programs at other sizes are forgotten, since they depend on the batch."""
    return replace(traced, batch=batch)


def _with_assumed_batch(traced: Traced, arguments: ArgumentLeaves, *, has_state: bool) -> Traced:
    """Return the trace with an inferred batch; `has_state`: whether a tree of arrays is returned among the outputs."""
    excluded = by_exclusion(arguments)
    first = None if excluded is None else _with_batch(traced, excluded)
    # JAX marks the equations of a backward pass by `transpose(` in their name stack.
    takes_gradient = any("transpose(" in _jax.name_stack(eqn) for eqn in _jax.open_jaxpr(traced.jaxpr).eqns)
    # Without state or backward pass the function is likely a forward pass, whose weights are not returned:
    # `by_exclusion` cannot tell them from the batch.
    if not has_state and not (first is not None and takes_gradient):
        likely = without_state(arguments, traced.outputs.leaves)
        if likely is not None and likely != excluded:
            forward = _with_batch(traced, likely)
            if _works_at_other_sizes(forward):
                return forward
    if first is not None:
        return first

    def retrace(avals: Sequence[jax.ShapeDtypeStruct]) -> ClosedJaxpr:
        if list(avals) == list(traced.inputs.leaves):
            return traced.jaxpr
        return traced.retraced(avals)

    return _with_batch(traced, by_trial(arguments, retrace, traced.aliases))


def _check_call(fun: Callable[..., Tree], args: Sequence[Tree], kwargs: Mapping[str, Tree]) -> None:
    """Raise `TraceError` for arguments that the function does not accept."""
    try:
        signature = inspect.signature(fun)
    except (TypeError, ValueError):  # builtins and some extension callables have no signature
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        named = f" and {', '.join(kwargs)}" if kwargs else ""
        raise TraceError(
            f"{function_name(fun)}{signature} cannot be called with {len(args)} positional arguments{named}: {error}."
        ) from error


def _check_outputs(fun: Callable[..., Tree], names: Sequence[str], outputs: Sequence[object]) -> None:
    """Raise `TraceError` for an output that is no array."""
    for name, leaf in zip(names, outputs, strict=True):
        if not is_array(leaf) and not isinstance(leaf, (bool, int, float, complex)):
            where = f" at {name}" if name else ""
            raise TraceError(
                f"{function_name(fun)} returns a {type(leaf).__name__}{where}, which is no array. Return arrays, "
                "numbers and pytrees of them alone."
            )


def _works_at_other_sizes(traced: Traced) -> bool:
    """Return whether the step can be traced at twice the batch size."""
    try:
        # Numbers that divide the batch in the step divide twice the batch as well.
        traced.at_batch_size(2 * traced.require_batch())
    except TraceError:
        return False
    return True


def _owner(path: KeyPath) -> Owner:
    """Return the position or keyword of the argument that a leaf belongs to."""
    # The first entry of a path is 0 for positional and 1 for keyword arguments (`Call.tree`).
    return path[1].key


def leaf_name(fun: Callable[..., Tree], path: KeyPath) -> str:
    """Return the name of a leaf, such as `state/params/w`, starting with the argument's name if Python records it."""
    owner = argument_name(fun, _owner(path))
    tail = _path(path[2:])
    return f"{owner}/{tail}" if tail else owner


def unique(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names with repeated ones numbered from the second on.

    For example `{"a/b": x, "a": {"b": y}}` has two leaves `a/b`, which become `a/b` and `a/b#2`.
    """
    found: dict[str, None] = {}
    for name in names:
        number, numbered = 1, name
        while numbered in found:
            number += 1
            numbered = f"{name}#{number}"
        found[numbered] = None
    return tuple(found)


def _path(path: KeyPath) -> str:
    return printable(jax.tree_util.keystr(path, simple=True, separator="/"))


def aval_of(leaf: object, name: str) -> jax.ShapeDtypeStruct:
    """Return the shape, dtype and weak type of an argument as `jax.jit` sees them.

    Raises:
        TraceError: the argument is no array, or an integer out of range.
    """
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return _struct(leaf) if _has_no_bytes(leaf) else leaf
    try:
        aval = jax.typeof(leaf)
    except TypeError as error:
        raise TraceError(
            f"{name} is a {type(leaf).__name__}, which JAX cannot trace. Pass arrays or numbers, or name the argument "
            "in static_argnums."
        ) from error
    except OverflowError as error:
        raise TraceError(
            f"{name} is {leaf!r}, which an integer of {np.dtype(jax.dtypes.canonicalize_dtype(np.int64))} cannot hold. "
            'Pass a smaller number, or allow wider ones with jax.config.update("jax_enable_x64", True).'
        ) from error
    if _jax.is_ref(aval):
        raise TraceError(
            f"{name} is a jax.Ref, which a parallel step cannot change in place. Pass its value ({name}[...]), and "
            "return the new one."
        )
    return _struct(aval)


def _struct(aval: Aval) -> jax.ShapeDtypeStruct:
    # Executables take and return boolean arrays in place of float0, which has no bytes; JAX itself does the same.
    dtype = np.dtype(bool) if _has_no_bytes(aval) else aval.dtype
    return jax.ShapeDtypeStruct(aval.shape, dtype, weak_type=getattr(aval, "weak_type", False))


def _has_no_bytes(leaf: object) -> bool:
    """Return whether an array is of float0, the dtype of gradients with respect to integers."""
    return getattr(leaf, "dtype", None) == jax.dtypes.float0


def _subtrees(tree: Tree, depth: int, start: int = 0) -> list[tuple[Tree, int]]:
    """Return (tree, number of the first leaf) for a tree of avals and its subtrees down to `depth`, outer first."""
    found = [(tree, start)]
    if depth and not jax.tree_util.all_leaves([tree]):
        one_level = jax.tree_util.default_registry.flatten_one_level(tree)
        for child in one_level[0] if one_level else ():
            found += _subtrees(child, depth - 1, start)
            start += len(jax.tree.leaves(child))
    return found


def _signature(tree: Tree) -> tuple[TreeDef, tuple[Hashable, ...]]:
    """Return the structure of a tree of avals, which need not have a hash, and the shapes and dtypes of its leaves."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((tuple(leaf.shape), str(leaf.dtype)) for leaf in leaves)


def _holds_any(pairs: Mapping[int, int], first: int, count: int) -> bool:
    """Return whether one of `count` numbers from `first` on is a key."""
    return any(number in pairs for number in range(first, first + count))


def match_state(arguments: Mapping[Owner, Tree], outputs: Tree) -> dict[int, int]:
    """Return output leaf → the input leaf that it replaces in the next step.

    An argument is state when its whole tree (structure, shapes, dtypes) is returned somewhere among the outputs. A
    single array counts only as the first output: elsewhere an equal shape may be coincidence (predictions as wide as
    inputs).
    """
    candidates: dict[Hashable, deque[tuple[TreeDef, int]]] = {}
    # States are returned near the top, as in (state, (loss, metrics)).
    for tree, first in _subtrees(outputs, depth=3):
        structure, shapes = _signature(tree)
        # Structures need not have a hash (custom nodes may hold arrays): `==` decides among those of one key.
        candidates.setdefault((structure.num_nodes, shapes), deque()).append((structure, first))
    pairs: dict[int, int] = {}
    start = 0
    for tree in arguments.values():
        structure, shapes = _signature(tree)
        count, lone = len(shapes), jax.tree_util.all_leaves([tree])
        alike = candidates.get((structure.num_nodes, shapes), deque())
        # What is taken stays taken: without it, many equal arguments would each look at all outputs of those before.
        while alike and _holds_any(pairs, alike[0][1], count):
            alike.popleft()
        # An argument without leaves would match every empty subtree of the outputs.
        for other, first in alike if count else ():
            if lone and first:
                break
            if other == structure and not _holds_any(pairs, first, count):
                pairs.update({first + i: start + i for i in range(count)})
                break
        start += count
    return pairs
