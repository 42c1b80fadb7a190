"""Take out of a traced step what the user's code says of meshes: the plan lays out its arrays anew.

Comes in: a closed jaxpr. Goes out: one that computes the same and names no mesh.

    constraints, reshardings      become `user_sharding` equations, which compute nothing and say what the user wants;
                                  with `user_shardings="ignore"` they go
    types that name a mesh        become plain ones, in the bodies of loops too
    shard_map                     becomes vmap over the blocks, one dim for each mesh axis       `_without_shard_map`
    primitives of other libraries become what they compute                                     `expand_libraries`

Under `vmap` collectives are ordinary ops along a dim: a psum is a sum, a permute a gather, the index of a device an
iota. They have rules, so that a planner may split these dims over the devices, or others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core as jex_core
from jax.interpreters import batching, mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from alpa_lite import _jax
from alpa_lite.program.user_shardings import USER_SHARDING, Mode, UserSharding
from alpa_lite.trace.passes.expand_libraries import expanded


def without_meshes(jaxpr: Any, user_shardings: Mode = "ignore") -> Any:
    """Return a closed jaxpr without the meshes that the user's function names.

    Constraints and reshardings, which compute nothing, go, or become `user_sharding` equations; types of values and
    parameters of equations no longer name a mesh. A function under `shard_map` becomes the same function under `vmap`,
    once for each device of its mesh: blocks are rows of arrays with a dim for each mesh axis, collectives are sums and
    moves along these dims.
    """
    with _jax.no_mesh():
        return _MeshRemover(user_shardings).closed(jaxpr)


_CONSTRAINTS = frozenset({"sharding_constraint", "reshard", "mesh_cast", "pvary", "pcast"})
"""Primitives that return their operands, and say where these are."""

user_sharding_p = jex_core.Primitive(USER_SHARDING)
"""Return the operand.

Parameters: `mesh` and `dims` of the `UserSharding` that the user wants; `pinned`, whether the plan must obey it.
"""

user_sharding_p.def_impl(lambda x, **_: x)
user_sharding_p.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(user_sharding_p, lambda _, x, **__: [x])


def _batched(operands: Sequence[Any], places: Sequence[int], *, dims: Any, **params: Any) -> tuple[Any, int]:
    (place,) = places
    return user_sharding_p.bind(*operands, dims=(*dims[:place], None, *dims[place:]), **params), place


batching.primitive_batchers[user_sharding_p] = _batched


def user_sharding(sharding: Any, rank: int) -> UserSharding | None:
    """Return the layout that a sharding of JAX describes; None if it splits nothing or names no mesh."""
    if not isinstance(sharding, NamedSharding) or sharding.mesh.empty or sharding.mesh.size == 1:
        return None
    entries = [*sharding.spec, *[None] * (rank - len(sharding.spec))]
    open_, whole = PartitionSpec.UNCONSTRAINED, ()
    dims = [
        None if each is open_ else whole if each is None else each if isinstance(each, tuple) else (each,)
        for each in entries
    ]
    return UserSharding(mesh=tuple(sharding.mesh.shape.items()), dims=tuple(dims))


_UNGROUPED = {"axis_index_groups": None}
_INVARIANT = {} if _jax.psum_p is None else {"psum_invariant": _jax.psum_p}
"""Collectives whose results are typed as equal on all devices, by those of results that are not."""


class _MeshRemover:
    """Rewrites jaxprs; one that several equations hold is rewritten once, and stays one."""

    def __init__(self, user_shardings: Mode) -> None:
        self._user_shardings: Mode = user_shardings
        self._known: dict[int, tuple[Any, Any]] = {}

    def closed(self, jaxpr: Any) -> Any:
        """Rewrite a closed jaxpr; it comes back as it is where it names no mesh."""
        opened = _jax.open_jaxpr(jaxpr)
        rewritten = self.opened(opened)
        if rewritten is opened:
            return jaxpr
        return rewritten if opened is jaxpr else jaxpr.replace(jaxpr=rewritten)

    def opened(self, jaxpr: Any) -> Any:
        """Rewrite an open jaxpr."""
        if id(jaxpr) not in self._known:
            # The jaxpr is held as well, so that its id stays its own.
            self._known[id(jaxpr)] = jaxpr, self._rewrite(jaxpr)
        return self._known[id(jaxpr)][1]

    def _rewrite(self, jaxpr: Any) -> Any:
        now: dict[Any, Any] = {}
        changed = False

        def renamed(atom: Any) -> Any:
            nonlocal changed
            if isinstance(atom, _jax.Literal):
                return atom
            if atom not in now:
                aval = _on_no_mesh(atom.aval)
                now[atom] = atom if aval is atom.aval else type(atom)(aval)
                changed |= now[atom] is not atom
            return now[atom]

        constvars, invars = [renamed(v) for v in jaxpr.constvars], [renamed(v) for v in jaxpr.invars]
        equations: list[Any] = []
        for eqn in jaxpr.eqns:
            wanted = self._wanted(eqn)
            if eqn.primitive.name in _CONSTRAINTS:
                changed = True
                if wanted is None:
                    now |= zip(eqn.outvars, map(renamed, eqn.invars), strict=True)
                else:
                    equations.append(self._constraint(eqn, renamed(eqn.invars[0]), renamed(eqn.outvars[0]), wanted))
                continue
            operands, results = [renamed(v) for v in eqn.invars], [renamed(v) for v in eqn.outvars]
            plain = expanded(self._without_region(eqn))
            params, context = self._params(plain.params), _jax.context_without_mesh(plain.ctx)
            same = params is eqn.params and operands == eqn.invars and results == eqn.outvars and context is eqn.ctx
            if not same:
                plain = plain.replace(invars=operands, outvars=results, params=params, ctx=context)
            equations.append(plain)
            changed |= plain is not eqn
            if wanted is not None:
                changed, (result,) = True, results
                now[eqn.outvars[0]] = type(result)(result.aval)
                equations.append(self._constraint(eqn, result, now[eqn.outvars[0]], wanted))
        if not changed:
            return jaxpr
        outvars = [renamed(v) for v in jaxpr.outvars]
        return jaxpr.replace(constvars=constvars, invars=invars, outvars=outvars, eqns=equations)

    def _wanted(self, eqn: Any) -> UserSharding | None:
        """Return the layout that the user gives for the only result of an equation."""
        if self._user_shardings == "ignore" or len(eqn.outvars) != 1:
            return None
        aval = eqn.outvars[0].aval
        if not getattr(aval, "shape", ()) or jax.numpy.issubdtype(aval.dtype, jax.dtypes.extended):
            return None
        if eqn.primitive.name == "sharding_constraint":
            return user_sharding(eqn.params["sharding"], aval.ndim)
        # On a mesh of explicit types alone `out_sharding` is the user's: elsewhere JAX writes it for itself.
        of_type = eqn.primitive.name == "reshard" or eqn.params.get("out_sharding") is not None
        return user_sharding(aval.sharding, aval.ndim) if of_type and _is_explicit(aval.sharding.mesh) else None

    def _constraint(self, eqn: Any, operand: Any, result: Any, wanted: UserSharding) -> Any:
        """Return the equation that says what the user wants for the result of an equation."""
        return eqn.replace(
            primitive=user_sharding_p,
            invars=[operand],
            outvars=[result],
            params={"mesh": wanted.mesh, "dims": wanted.dims, "pinned": self._user_shardings == "pin"},
            ctx=_jax.context_without_mesh(eqn.ctx),
            effects=frozenset(),
        )

    def _without_region(self, eqn: Any) -> Any:
        """Return an equation by which arrays are whole, in the place of one that is written for the devices."""
        name = eqn.primitive.name
        if name == "shard_map":
            return self._without_shard_map(eqn)
        if name in _INVARIANT:
            return eqn.replace(primitive=_INVARIANT[name], params={**_UNGROUPED, **eqn.params})
        return eqn

    def _without_shard_map(self, eqn: Any) -> Any:
        """Return a call of the function under `vmap` in the place of one under `shard_map`."""
        body, mesh, params = self.opened(_jax.open_jaxpr(eqn.params["jaxpr"])), eqn.params["mesh"], eqn.params
        axes = [axis for axis in mesh.axis_names if axis in params.get("newly_manual_axes", mesh.axis_names)]

        def run(*operands: Any) -> list[Any]:
            given = zip(operands, params["in_specs"], strict=True)
            blocks = [_in_blocks(x, spec, axes, mesh.shape) for x, spec in given]
            function = jex_core.jaxpr_as_fun(jex_core.ClosedJaxpr(body, ()))
            for axis in reversed(axes):
                lined_up = [0 if axis in used else None for _, used in blocks]
                function = jax.vmap(function, in_axes=lined_up, axis_name=axis, axis_size=mesh.shape[axis])
            results = function(*[x for x, _ in blocks])
            return [_whole(x, spec, axes) for x, spec in zip(results, params["out_specs"], strict=True)]

        shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
        (call,) = _jax.open_jaxpr(jax.make_jaxpr(jax.jit(run))(*shapes)).eqns
        return call.replace(invars=eqn.invars, outvars=eqn.outvars, source_info=eqn.source_info)

    def _params(self, params: dict[str, Any]) -> dict[str, Any]:
        found = {name: self._param(value) for name, value in params.items()}
        return params if all(found[name] is value for name, value in params.items()) else found

    def _param(self, value: Any) -> Any:
        if isinstance(value, NamedSharding):
            return None
        if isinstance(value, tuple):
            found = tuple(self._param(each) for each in value)
            return value if all(a is b for a, b in zip(found, value, strict=True)) else found
        return self.closed(value) if hasattr(value, "eqns") else value


def _is_explicit(mesh: Any) -> bool:
    """Return True for a mesh with axes by which types of arrays are split."""
    return not mesh.empty and AxisType.Explicit in mesh.axis_types


def _axes_of(spec: Any, ndim: int, axes: Sequence[str]) -> list[tuple[str, ...]]:
    """Return, for each dim of an array, the axes of a `shard_map` that split it."""
    dims = [*spec, *[None] * (ndim - len(spec))]
    named = [() if dim is None else dim if isinstance(dim, tuple) else (dim,) for dim in dims]
    return [tuple(axis for axis in each if axis in axes) for each in named]


def _in_blocks(array: Any, spec: Any, axes: Sequence[str], sizes: Any) -> tuple[Any, list[str]]:
    """Return an array with a leading dim for each axis that splits it, in the order of `axes`, and these axes."""
    split = _axes_of(spec, array.ndim, axes)
    shape: list[int] = []
    for size, each in zip(array.shape, split, strict=True):
        parts = [sizes[axis] for axis in each]
        shape += [*parts, size // math.prod(parts)]
    places, place = dict[str, int](), 0
    for each in split:
        places |= {axis: place + i for i, axis in enumerate(each)}
        place += len(each) + 1
    used = [axis for axis in axes if axis in places]
    front = [places[axis] for axis in used]
    order = [*front, *[i for i in range(len(shape)) if i not in front]]
    return jax.lax.transpose(jax.lax.reshape(array, shape), order), used


def _whole(blocks: Any, spec: Any, axes: Sequence[str]) -> Any:
    """Return the array whose blocks have a leading dim for each of `axes`; of equal blocks the first one counts."""
    ndim = blocks.ndim - len(axes)
    split = _axes_of(spec, ndim, axes)
    used = [axis for each in split for axis in each]
    for place, axis in reversed(list(enumerate(axes))):
        if axis not in used:
            blocks = jax.lax.index_in_dim(blocks, 0, place, keepdims=False)
    left = [axis for axis in axes if axis in used]
    order, shape = list[int](), list[int]()
    for dim, each in enumerate(split):
        places = [left.index(axis) for axis in each]
        order += [*places, len(left) + dim]
        shape.append(math.prod(blocks.shape[i] for i in (*places, len(left) + dim)))
    return jax.lax.reshape(jax.lax.transpose(blocks, order), shape)


def _on_no_mesh(aval: Any) -> Any:
    """Return the type of a value without the mesh in it."""
    sharding = getattr(aval, "sharding", None)
    if sharding is None or getattr(sharding, "mesh", None) is None or sharding.mesh.empty:
        return aval
    return type(aval)(aval.shape, aval.dtype, aval.weak_type, memory_space=aval.memory_space)
