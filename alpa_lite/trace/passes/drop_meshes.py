"""Take out of a traced step what the user's code says of meshes: the plan lays out its arrays anew.

Comes in: a closed jaxpr. Goes out: one that computes the same and names no mesh.

    constraints, reshardings      go: they compute nothing
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
from jax.sharding import NamedSharding

from alpa_lite import _jax
from alpa_lite.trace.passes.expand_libraries import expanded


def without_meshes(jaxpr: Any) -> Any:
    """Return a closed jaxpr without the meshes that the user's function names.

    Constraints and reshardings, which compute nothing, go; types of values and parameters of equations no longer
    name a mesh. A function under `shard_map` becomes the same function under `vmap`, once for each device of its mesh:
    blocks are rows of arrays with a dim for each mesh axis, collectives are sums and moves along these dims.
    """
    with _jax.no_mesh():
        return _MeshRemover().closed(jaxpr)


_CONSTRAINTS = frozenset({"sharding_constraint", "reshard", "mesh_cast", "pvary", "pcast"})
"""Primitives that return their operands, and say where these are."""


_UNGROUPED = {"axis_index_groups": None}
_INVARIANT = {} if _jax.psum_p is None else {"psum_invariant": _jax.psum_p}
"""Collectives whose results are typed as equal on all devices, by those of results that are not."""


class _MeshRemover:
    """Rewrites jaxprs; one that several equations hold is rewritten once, and stays one."""

    def __init__(self) -> None:
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
            if eqn.primitive.name in _CONSTRAINTS:
                now |= zip(eqn.outvars, map(renamed, eqn.invars), strict=True)
                changed = True
                continue
            operands, results = [renamed(v) for v in eqn.invars], [renamed(v) for v in eqn.outvars]
            plain = expanded(self._without_region(eqn))
            params, context = self._params(plain.params), _jax.context_without_mesh(plain.ctx)
            same = params is eqn.params and operands == eqn.invars and results == eqn.outvars and context is eqn.ctx
            if not same:
                plain = plain.replace(invars=operands, outvars=results, params=params, ctx=context)
            equations.append(plain)
            changed |= plain is not eqn
        if not changed:
            return jaxpr
        outvars = [renamed(v) for v in jaxpr.outvars]
        return jaxpr.replace(constvars=constvars, invars=invars, outvars=outvars, eqns=equations)

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
            found = _jax.tuple_like(value, (self._param(each) for each in value))
            return value if all(a is b for a, b in zip(found, value, strict=True)) else found
        return self.closed(value) if hasattr(value, "eqns") else value


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
