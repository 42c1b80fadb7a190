"""A call compared with earlier calls: the key of its compiled step, and the arguments that it shares with another step.

`CallKey` holds everything by which `jax.jit` tells calls apart, and `difference` says in words how two keys differ:

structure      the pytree of the traced arguments
static         constants with their types: 1, True and 1.0 are equal, but are three values
leaves         shape, dtype and weak type of each array, and its split under a mesh with explicit axis types
configuration  the settings of JAX that decide how a function is traced (64 bits, precision, meshes, …)

`planner_with_placement` plans a step so that the arguments which it shares with another step stay where that step has
them. The last batch of an epoch may be smaller, and an evaluation step reads the parameters that a train step updates;
neither should move the state over the devices and back. The plan of such a step is one stage on the mesh of the other
plan, with the specs of shared arguments pinned; the integer program chooses the rest (`planners.OnMesh`).

An argument is shared if the other step has one of the same shape and path, or one whose path ends in the same way and
in no other's (`state/params/w` and `params/w`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from alpa_lite import _jax
from alpa_lite._jax import Configuration, DType, Tree, TreeDef
from alpa_lite.plan.plan import Plan
from alpa_lite.planners import OnMesh
from alpa_lite.sharding.specs import Spec
from alpa_lite.trace.call import Static, argument_name
from alpa_lite.trace.explicit_types import argument_types
from alpa_lite.trace.trace import Traced, aval_of, leaf_name

_LONGEST = 60
"""The greatest number of characters of a value in a log line."""

_MOST = 6
"""The greatest number of differences in a log line."""


_Leaf = tuple[tuple[int, ...], DType, bool, PartitionSpec | None]
"""Shape, dtype and weak type of an array, and how its type splits it; None for an array that is whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallKey:
    """The key of a call; the module describes the fields."""

    structure: TreeDef
    static: Static
    leaves: tuple[_Leaf, ...]
    configuration: tuple[tuple[str, object], ...]

    def has_same_arrays(self, other: CallKey, *, split_alike: bool = False) -> bool:
        """Return whether the arguments of both calls have the same structure, shapes and dtypes, and with `split_alike`
        the same split in their types, whatever else differs.
        """

        # Weak types change the dtypes of results but not where arrays can lie.
        def form(shape: tuple[int, ...], dtype: DType, _: bool, split: PartitionSpec | None) -> object:
            return shape, dtype, split if split_alike else None

        mine, others = ([form(*leaf) for leaf in key.leaves] for key in (self, other))
        return self.structure == other.structure and mine == others


def form_of(leaf: Tree) -> object:
    """Return a value by which arguments are compared quickly: the aval of a JAX array, else shape and dtype or type."""
    if isinstance(leaf, jax.Array):
        return leaf.aval
    # A Python number has no dtype: its type stands for the dtype and the weak type that JAX gives it.
    return np.shape(leaf), getattr(leaf, "dtype", type(leaf))


def key_of_call(
    fun: Callable[..., Tree], structure: TreeDef, static: Static, leaves: Sequence[object], configuration: Configuration
) -> CallKey:
    """Return the key of a call. Raises `TraceError` for an argument that is not an array."""
    types = argument_types(leaves, _jax.context_mesh())
    return CallKey(
        structure=structure,
        static=static,
        leaves=tuple(map(_array, leaves, _names(fun, structure), types)),
        configuration=tuple(_jax.by_name(configuration).items()),
    )


def _array(leaf: object, name: str, given: NamedSharding | None) -> _Leaf:
    aval = aval_of(leaf, name)
    # `aval_of` shows float0 as bool; without its own dtype, an argument of float0 would equal one of booleans.
    has_no_bytes = getattr(leaf, "dtype", None) == jax.dtypes.float0
    # An array that is whole and one without a type, such as NumPy's, have one type while a step is traced.
    split = given.spec if given is not None and any(given.spec) else None
    return tuple(aval.shape), jax.dtypes.float0 if has_no_bytes else aval.dtype, bool(aval.weak_type), split


def _names(fun: Callable[..., Tree], structure: TreeDef) -> list[str]:
    # JAX lists paths of trees, not of structures: the numbers only fill the places of the leaves.
    paths, _ = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(structure, range(structure.num_leaves)))
    return [leaf_name(fun, path) for path, _ in paths]


def difference(fun: Callable[..., Tree], old: CallKey, new: CallKey) -> str:
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


def _described(fun: Callable[..., Tree], key: CallKey) -> list[dict[str, str]]:
    """Describe a call as three mappings by name: arrays, static arguments, configuration."""
    arrays = zip(_names(fun, key.structure), key.leaves, strict=True)
    return [
        {name: _shown(*leaf) for name, leaf in arrays},
        # The type is shown since 1, True and 1.0 look alike or compare equal, but are three values.
        {argument_name(fun, i): f"{kind.__name__} {_short(value)}" for i, kind, value in key.static},
        {name: _short(value) for name, value in key.configuration},
    ]


def _shown(shape: tuple[int, ...], dtype: DType, weak: bool, split: PartitionSpec | None) -> str:
    suffix = f" split as {tuple(split)}" if split is not None else " with a weak type" if weak else ""
    return f"{dtype}{list(shape)}{suffix}"


def _short(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def planner_with_placement(plan: Plan, traced: Traced) -> OnMesh | None:
    """Return a planner that leaves shared arguments where a plan has them; None if its stages lie apart."""
    # Pins are specs on one mesh, but the arguments of several stages lie on several meshes.
    if len(plan.stages) != 1:
        return None
    (stage,) = plan.stages
    pins = {name: [axes or None for axes in spec.dims] for name, spec in _shared(plan, traced)}
    return OnMesh(axes=dict(stage.mesh_shape.axis_sizes), pins=pins)


def num_shared(plan: Plan, traced: Traced) -> int:
    """Return the number of arguments that a traced step shares with the step of a plan."""
    return sum(1 for _ in _shared(plan, traced))


def _shared(plan: Plan, traced: Traced) -> Iterator[tuple[str, Spec]]:
    """Yield the path of each shared argument with the spec that the plan gives it; batches are not shared."""
    known = {name: (spec, stage.shapes.get(name)) for stage in plan.stages for name, spec in stage.specs.items()}
    batch = plan.batch.dims if plan.batch is not None else {}
    for name, leaf, dim in zip(traced.inputs.names, traced.inputs.leaves, traced.batch.dims, strict=True):
        if dim is not None:
            continue
        shapes = {other: shape.dims for other, (_, shape) in known.items() if shape is not None and other not in batch}
        fitting = [other for other, dims in shapes.items() if dims == leaf.shape]
        if (found := _same_name(name, fitting)) is not None:
            yield name, known[found][0].without_partial()


def _same_name(name: str, others: Sequence[str]) -> str | None:
    """Return the path that agrees with a path in the most components at its end; None if several do, or none."""
    if name in others:
        return name
    lengths = {other: _common_end(name, other) for other in others}
    most = max(lengths.values(), default=0)
    longest = [other for other, length in lengths.items() if length == most]
    # An ambiguous path is no match: pinned like the wrong argument, an array would move at every call.
    return longest[0] if most > 0 and len(longest) == 1 else None


def _common_end(one: str, other: str) -> int:
    count = 0
    for a, b in zip(reversed(one.split("/")), reversed(other.split("/")), strict=False):
        if a != b:
            break
        count += 1
    return count
