"""Rewrite a traced jaxpr to plain operations on arrays: no mutable arrays, no meshes, no primitives of other libraries.

Input: a closed jaxpr. Output: one that computes the same, of operations that the factor rules know.

    mutable arrays (`jax.new_ref`)    become the values that they hold; loops and branches carry them   `without_refs`
    constraints, reshardings,         become `user_sharding` equations, which compute nothing and say what the user
    shardings of inner `jax.jit`s     wants; with `user_shardings="ignore"` they are removed            `without_meshes`
    shardings of a jitted step        are returned beside it: they are those of arguments and results   `of_jitted_step`
    types that name a mesh            become plain ones, in the bodies of loops too
    shard_map                         becomes vmap over the blocks, with one dim for each mesh axis
    primitives of other libraries     become calls of the function that defines them                    `_expanded`

A plan lays out the arrays of a step anew, so that no mesh is left of the layout that the user's code asks for. Under
`vmap` collectives are ordinary ops along a dim: a psum is a sum, a permute a gather, the index of a device an iota.
They have rules, so that a planner may split these dims over the devices, or others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import jax
from jax.extend import core as jex_core
from jax.interpreters import batching, mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec, Sharding

from alpa_lite import _jax
from alpa_lite._jax import Aval, ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Tree, Var
from alpa_lite.errors import TraceError
from alpa_lite.program.user_shardings import USER_SHARDING, Mode, UserSharding
from alpa_lite.rules import has_rule
from alpa_lite.trace.source_lines import in_a_library

Params = dict[str, Any]
"""The parameters of an equation, whose types depend on its primitive."""

_KERNELS = frozenset({"pallas_call", "core_map", "run_state"})
"""Primitives whose bodies are about references by nature, and stay as they are."""


def without_refs(jaxpr: ClosedJaxpr, name: str) -> ClosedJaxpr:
    """Return a closed jaxpr without mutable arrays; `name` is the step's name, for messages.

    Raises:
        TraceError: the step reads or writes a mutable array that it did not make, or JAX cannot replace one.
    """
    if any(_jax.is_ref(v.aval) for v in _jax.open_jaxpr(jaxpr).constvars):
        raise TraceError(
            f"{name} reads or writes a jax.Ref from outside of it. A parallel step cannot change arrays that are not "
            "its own: pass the value as an argument, and return the new one."
        )
    if not _makes_refs(_jax.open_jaxpr(jaxpr)):
        return jaxpr
    try:
        return _discharged(jaxpr)
    except Exception as error:  # JAX raises various types for primitives that it cannot discharge
        raise TraceError(
            f"{name} makes a mutable array (jax.new_ref) that JAX cannot replace by values: {error}. Carry the value "
            "through the step instead."
        ) from error


def _discharged(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    opened = _jax.open_jaxpr(jaxpr)
    # From the inside out: a call whose body makes a reference for itself has none among its operands, and JAX, which
    # looks at operands alone, would leave the body as it is.
    eqns = [
        eqn.replace(params={name: _discharged_param(value) for name, value in eqn.params.items()})
        if _is_own(eqn)
        else eqn
        for eqn in opened.eqns
    ]
    opened = opened.replace(eqns=eqns)
    whole = _jax.with_open_jaxpr(jaxpr, opened)
    return _jax.discharged(whole) if _has_own_refs(opened) else whole


def _discharged_param(value: object) -> object:
    # The branches of a conditional are a tuple of jaxprs.
    if isinstance(value, tuple):
        return _jax.tuple_like(value, map(_discharged_param, value))
    return _discharged(value) if isinstance(value, _jax.ClosedJaxpr) else value


def _is_own(eqn: JaxprEqn) -> bool:
    """Return whether the bodies of an equation make references, and get none."""
    return eqn.primitive.name not in _KERNELS and not any(_jax.is_ref(v.aval) for v in eqn.invars)


def _has_own_refs(jaxpr: Jaxpr) -> bool:
    return any(_jax.is_ref(v.aval) for eqn in jaxpr.eqns for v in eqn.outvars)


def _makes_refs(jaxpr: Jaxpr) -> bool:
    """Return whether a jaxpr, or the body of one of its equations, makes a mutable array."""
    if _has_own_refs(jaxpr):
        return True
    bodies = (_jax.open_jaxpr(b) for eqn in jaxpr.eqns if _is_own(eqn) for b in _jax.inner_jaxprs(eqn))
    return any(map(_makes_refs, bodies))


class JittedStep(NamedTuple):
    """A step without the shardings of the `jax.jit` that it is, and these.

    Attributes:
        jaxpr: the step.
        arguments: the layout of each argument leaf that `in_shardings` gives; None where it gives none.
        results: the layout of each result leaf that `out_shardings` gives.
    """

    jaxpr: ClosedJaxpr
    arguments: tuple[UserSharding | None, ...]
    results: tuple[UserSharding | None, ...]


def of_jitted_step(jaxpr: ClosedJaxpr) -> JittedStep:
    """Return a step apart from its `in_shardings`, if it is a function that `jax.jit` returned.

    There they say where arguments lie when the step is called; in an inner `jax.jit` they are constraints. Those of the
    results stay, too, as constraints on them.
    """
    opened = _jax.open_jaxpr(jaxpr)
    if len(opened.eqns) != 1 or not _is_jit(opened.eqns[0]):
        return JittedStep(jaxpr, (None,) * len(opened.invars), (None,) * len(opened.outvars))
    (call,) = opened.eqns
    given = {v: s for v, s in zip(call.invars, call.params["in_shardings"], strict=True) if v in opened.invars}
    returned = dict(zip(call.outvars, call.params["out_shardings"], strict=True))
    bare = call.replace(params={**call.params, "in_shardings": (None,) * len(call.invars)})
    return JittedStep(
        _jax.with_open_jaxpr(jaxpr, opened.replace(eqns=[bare])),
        tuple(_if_splittable(given.get(v), v) for v in opened.invars),
        tuple(None if isinstance(v, _jax.Literal) else _if_splittable(returned.get(v), v) for v in opened.outvars),
    )


def _is_jit(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in ("jit", "pjit") and "in_shardings" in eqn.params


def without_meshes(jaxpr: ClosedJaxpr, user_shardings: Mode = "ignore") -> ClosedJaxpr:
    """Return a closed jaxpr without the meshes that the user's function names.

    Constraints and reshardings, which compute nothing, go, or become `user_sharding` equations; types of values and
    parameters of equations no longer name a mesh. A function under `shard_map` becomes the same function under `vmap`,
    once for each device of its mesh: blocks are rows of arrays with a dim for each mesh axis, collectives are sums and
    moves along these dims.
    """
    with _jax.no_mesh():
        return _MeshRemover(user_shardings, {}).closed(jaxpr)


def with_shardings(jaxpr: ClosedJaxpr, found: Mapping[tuple[int, int], UserSharding | None]) -> ClosedJaxpr:
    """Return a closed jaxpr without meshes, in which results have the layouts that XLA gives them.

    found: the layouts by the id of an equation and the number of its result, or by the id of a jaxpr, of the step or of
    the body of a loop, and the number of its argument; other values remain open.
    """
    with _jax.no_mesh():
        return _MeshRemover("pin", found).closed(jaxpr)


_CONSTRAINTS = frozenset({"sharding_constraint", "reshard", "mesh_cast", "pvary", "pcast"})
"""Primitives that return their operands, and say where these are."""

user_sharding_p = jex_core.Primitive(USER_SHARDING)
"""Return the operand.

Parameters: `mesh` and `dims` of the `UserSharding` that the user wants; `pinned`, whether the plan must obey it;
`propagated`, whether it is what XLA's propagation makes of others.
"""

user_sharding_p.def_impl(lambda x, **_: x)
user_sharding_p.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(user_sharding_p, lambda _, x, **__: [x])


def _batched(operands: Sequence[Any], places: Sequence[int], *, dims: Any, **params: Any) -> tuple[Any, int]:
    (place,) = places
    return user_sharding_p.bind(*operands, dims=(*dims[:place], None, *dims[place:]), **params), place


batching.primitive_batchers[user_sharding_p] = _batched


def user_sharding(sharding: Sharding | None, rank: int) -> UserSharding | None:
    """Return the layout that a sharding of JAX describes; None if it names no mesh of several devices."""
    if not isinstance(sharding, NamedSharding) or sharding.mesh.empty or sharding.mesh.size == 1:
        return None
    entries = [*sharding.spec, *[None] * (rank - len(sharding.spec))]
    dims = tuple(None if entry is PartitionSpec.UNCONSTRAINED else _axes_of_entry(entry) for entry in entries)
    return UserSharding(mesh=tuple(sharding.mesh.shape.items()), dims=dims)


def _axes_of_entry(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the axes that an entry of a `PartitionSpec` names."""
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def _is_explicit(mesh: Any) -> bool:
    """Return whether types of arrays are split by axes of a mesh."""
    return not mesh.empty and AxisType.Explicit in mesh.axis_types


_UNGROUPED = {"axis_index_groups": None}
_INVARIANT = {} if _jax.psum_p is None else {"psum_invariant": _jax.psum_p}
"""Collectives whose results have a type that says "equal on all devices" → the same collectives without such a type.

`vmap` has rules for the latter alone.
"""


class _Names:
    """The variables of a rewritten jaxpr in place of those of the original, and whether anything is changed."""

    def __init__(self) -> None:
        self.now: dict[Var, Var | Literal] = {}
        self.changed = False

    def of(self, atom: Var | Literal) -> Any:
        """Return the variable in place of one, of a type without mesh; literals stay."""
        if isinstance(atom, _jax.Literal):
            return atom
        if atom not in self.now:
            aval = _on_no_mesh(atom.aval)
            self.now[atom] = atom if aval is atom.aval else type(atom)(aval)
            self.changed |= self.now[atom] is not atom
        return self.now[atom]

    def renewed(self, variable: Var) -> Var:
        """Return a new variable, which later equations read in place of one."""
        self.changed, self.now[variable] = True, (found := _jax.Var(self.of(variable).aval))
        return found


class _MeshRemover:
    """Rewrites jaxprs; one that several equations hold is rewritten once, and stays one.

    That matters beyond speed: the conversion to a graph makes one body of each jaxpr object, which is analysed once.
    """

    def __init__(self, user_shardings: Mode, found: Mapping[tuple[int, int], UserSharding | None]) -> None:
        self._user_shardings: Mode = user_shardings
        self._found = found
        # Original and rewritten jaxpr by the id of the original, which is held so that its id is not reused.
        self._rewritten: dict[int, tuple[Jaxpr, Jaxpr]] = {}

    def closed(self, jaxpr: ClosedJaxpr) -> ClosedJaxpr:
        """Rewrite a closed jaxpr; one that names no mesh is returned itself."""
        opened = _jax.open_jaxpr(jaxpr)
        rewritten = self.opened(opened)
        return jaxpr if rewritten is opened else _jax.with_open_jaxpr(jaxpr, rewritten)

    def opened(self, jaxpr: Jaxpr) -> Jaxpr:
        """Rewrite an open jaxpr."""
        if id(jaxpr) not in self._rewritten:
            self._rewritten[id(jaxpr)] = jaxpr, self._rewrite(jaxpr)
        return self._rewritten[id(jaxpr)][1]

    def _rewrite(self, jaxpr: Jaxpr) -> Jaxpr:
        names = _Names()
        constvars, invars = [list(map(names.of, variables)) for variables in (jaxpr.constvars, jaxpr.invars)]
        equations: list[JaxprEqn] = []
        for n, (variable, argument) in enumerate(zip(jaxpr.invars, invars, strict=True)):
            demand = self._found.get((id(jaxpr), n))
            # Without equations there is nothing that would read the argument elsewhere.
            if demand is not None and jaxpr.eqns:
                equations.append(self._constraint(jaxpr.eqns[0], argument, names.renewed(variable), demand))
        for eqn in jaxpr.eqns:
            write = self._of_constraint if eqn.primitive.name in _CONSTRAINTS else self._of_equation
            equations += write(eqn, names)
        if not names.changed:
            return jaxpr
        outvars = list(map(names.of, jaxpr.outvars))
        return jaxpr.replace(constvars=constvars, invars=invars, outvars=outvars, eqns=equations)

    def _of_constraint(self, eqn: JaxprEqn, names: _Names) -> list[JaxprEqn]:
        """Return the equation in place of one that returns its operand and says where it is, if any is needed."""
        names.changed = True
        (wanted,) = self._wanted_results(eqn) or (None,)
        if wanted is not None:
            return [self._constraint(eqn, names.of(eqn.invars[0]), names.of(eqn.outvars[0]), wanted)]
        # The result is another name of the operand in all later equations.
        names.now |= zip(eqn.outvars, map(names.of, eqn.invars), strict=True)
        return []

    def _of_equation(self, eqn: JaxprEqn, names: _Names) -> list[JaxprEqn]:
        """Return an equation on plain arrays, with the constraints on its operands and results."""
        operands, results = list(map(names.of, eqn.invars)), list(map(names.of, eqn.outvars))
        before, after = list[JaxprEqn](), list[JaxprEqn]()
        for n, demand in enumerate(self._wanted_operands(eqn)):
            if demand is not None:
                outside, operands[n] = operands[n], _jax.Var(operands[n].aval)
                before.append(self._constraint(eqn, outside, operands[n], demand))
        plain = _expanded(self._without_region(eqn))
        params, context = self._params(plain.params), _jax.context_without_mesh(plain)
        same = params is eqn.params and operands == eqn.invars and results == eqn.outvars and context is eqn.ctx
        if not same:
            plain = plain.replace(invars=operands, outvars=results, params=params, ctx=context)
        names.changed |= plain is not eqn
        for outvar, result, demand in zip(eqn.outvars, results, self._wanted_results(eqn), strict=True):
            if demand is not None:
                after.append(self._constraint(eqn, result, names.renewed(outvar), demand))
        return [*before, plain, *after]

    def _wanted_operands(self, eqn: JaxprEqn) -> Sequence[UserSharding | None]:
        """Return the layout that the user gives for each operand of an equation, none for those that have none."""
        if self._user_shardings == "ignore" or not _is_jit(eqn):
            return ()
        return [_if_splittable(s, v) for s, v in zip(eqn.params["in_shardings"], eqn.invars, strict=True)]

    def _wanted_results(self, eqn: JaxprEqn) -> Sequence[UserSharding | None]:
        """Return the layout that the user gives for each result of an equation."""
        none = (None,) * len(eqn.outvars)
        if self._found:
            return [self._found.get((id(eqn), n)) for n in range(len(eqn.outvars))]
        if self._user_shardings == "ignore":
            return none
        if _is_jit(eqn):
            return [_if_splittable(s, v) for s, v in zip(eqn.params["out_shardings"], eqn.outvars, strict=True)]
        if len(eqn.outvars) != 1:
            return none
        (result,) = eqn.outvars
        if eqn.primitive.name == "sharding_constraint":
            return (_if_splittable(eqn.params["sharding"], result),)
        # On a mesh of explicit types alone `out_sharding` is the user's: elsewhere JAX writes it for itself.
        aval: Any = result.aval
        of_type = eqn.primitive.name == "reshard" or eqn.params.get("out_sharding") is not None
        return (_if_splittable(aval.sharding, result) if of_type and _is_explicit(aval.sharding.mesh) else None,)

    def _constraint(self, eqn: JaxprEqn, operand: Any, result: Any, wanted: UserSharding) -> JaxprEqn:
        """Return the equation that says what the user wants for the result of an equation."""
        params = {
            "mesh": wanted.mesh,
            "dims": wanted.dims,
            "pinned": self._user_shardings == "pin",
            "propagated": bool(self._found),
        }
        context = _jax.context_without_mesh(eqn)
        return eqn.replace(
            primitive=user_sharding_p,
            invars=[operand],
            outvars=[result],
            params=params,
            ctx=context,
            effects=frozenset(),
        )

    def _without_region(self, eqn: JaxprEqn) -> JaxprEqn:
        """Return an equation on whole arrays in place of one that is written for the blocks of a device."""
        name = eqn.primitive.name
        if name == "shard_map":
            return self._without_shard_map(eqn)
        if name in _INVARIANT:
            return eqn.replace(primitive=_INVARIANT[name], params={**_UNGROUPED, **eqn.params})
        return eqn

    def _without_shard_map(self, eqn: JaxprEqn) -> JaxprEqn:
        """Return a call of the function under `vmap` in the place of one under `shard_map`."""
        body, mesh, params = self.opened(_jax.open_jaxpr(eqn.params["jaxpr"])), eqn.params["mesh"], eqn.params
        axes = [axis for axis in mesh.axis_names if axis in params.get("newly_manual_axes", mesh.axis_names)]

        def run(*operands: jax.Array) -> list[jax.Array]:
            given = zip(operands, params["in_specs"], strict=True)
            blocks = [_in_blocks(x, spec, axes, mesh.shape) for x, spec in given]
            function = jex_core.jaxpr_as_fun(jex_core.ClosedJaxpr(body, ()))
            # The innermost `vmap` is that of the last axis. A block that an axis does not split is the same for all its
            # devices, and is not mapped over it.
            for axis in reversed(axes):
                lined_up = [0 if axis in used else None for _, used in blocks]
                function = jax.vmap(function, in_axes=lined_up, axis_name=axis, axis_size=mesh.shape[axis])
            results = function(*[x for x, _ in blocks])
            return [_whole(x, spec, axes) for x, spec in zip(results, params["out_specs"], strict=True)]

        shapes = [_struct(v) for v in eqn.invars]
        (call,) = _jax.open_jaxpr(jax.make_jaxpr(jax.jit(run))(*shapes)).eqns
        return call.replace(invars=eqn.invars, outvars=eqn.outvars, source_info=eqn.source_info)

    def _params(self, params: Params) -> Params:
        # Unchanged parameters are returned themselves, so that the equation that holds them may stay as it is.
        rewritten = {name: self._param(value) for name, value in params.items()}
        return params if all(rewritten[name] is value for name, value in params.items()) else rewritten

    def _param(self, value: object) -> object:
        if isinstance(value, NamedSharding):
            return None
        if isinstance(value, tuple):
            rewritten = _jax.tuple_like(value, (self._param(each) for each in value))
            return value if all(a is b for a, b in zip(rewritten, value, strict=True)) else rewritten
        if isinstance(value, _jax.Jaxpr):
            return self.opened(value)
        return self.closed(value) if isinstance(value, _jax.ClosedJaxpr) else value


def _if_splittable(sharding: Sharding | None, atom: Var | Literal) -> UserSharding | None:
    """Return the layout that a sharding gives an array; None for scalars and random keys, which are whole anyway."""
    aval: Any = atom.aval
    shape = getattr(aval, "shape", ())
    if not shape or jax.numpy.issubdtype(aval.dtype, jax.dtypes.extended):
        return None
    return user_sharding(sharding, len(shape))


def _struct(atom: Var | Literal) -> jax.ShapeDtypeStruct:
    aval = _jax.aval_of(atom)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _axes_of(spec: PartitionSpec, ndim: int, axes: Sequence[str]) -> list[tuple[str, ...]]:
    """Return, for each dim of an array, the axes of a `shard_map` that split it."""
    dims = [*spec, *[None] * (ndim - len(spec))]
    named = [() if dim is None else dim if isinstance(dim, tuple) else (dim,) for dim in dims]
    return [tuple(axis for axis in each if axis in axes) for each in named]


def _in_blocks(
    array: jax.Array, spec: PartitionSpec, axes: Sequence[str], sizes: Mapping[str, int]
) -> tuple[jax.Array, list[str]]:
    """Return an array with a leading dim for each axis that splits it, in the order of `axes`, and these axes."""
    split = _axes_of(spec, array.ndim, axes)
    # Each dim becomes one dim per axis that splits it, the first axis outermost, and the rows of a block; the dims of
    # axes are moved to the front then.
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


def _whole(blocks: jax.Array, spec: PartitionSpec, axes: Sequence[str]) -> jax.Array:
    """Return the array whose blocks have a leading dim for each of `axes`; of equal blocks the first one counts."""
    ndim = blocks.ndim - len(axes)
    split = _axes_of(spec, ndim, axes)
    used = [axis for each in split for axis in each]
    # From the last axis to the first, so that the places of those before remain.
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


def _on_no_mesh(aval: Aval) -> Aval:
    """Return the aval without its mesh."""
    sharding = getattr(aval, "sharding", None)
    if sharding is None or getattr(sharding, "mesh", None) is None or sharding.mesh.empty:
        return aval
    return type(aval)(aval.shape, aval.dtype, aval.weak_type, memory_space=aval.memory_space)


def _expanded(eqn: JaxprEqn) -> JaxprEqn:
    """Return a call in place of an equation whose primitive another library defines by a function of JAX operations.

    Libraries define primitives to forbid or to notice a transformation (Equinox's ``nonbatchable``), and most of these
    compute nothing. When a step is traced all transformations are done, so that nothing is lost. A primitive whose
    function cannot be traced stays, and runs whole; one with a rule of the user's (`al.register_rule`) stays as well.
    """
    # JAX's own primitives compile themselves: their `impl` is no plain function.
    function = eqn.primitive.impl
    if not isinstance(function, FunctionType) or function.__module__.partition(".")[0] in ("jax", "jaxlib"):
        return eqn
    # A primitive of the user's own may stand for a kernel that its function only describes.
    if has_rule(eqn.primitive.name) or not in_a_library(function.__code__.co_filename):
        return eqn

    def run(*operands: jax.Array) -> Tree:
        return function(*operands, **eqn.params)

    try:
        avals = [_jax.aval_of(v) for v in eqn.invars]
        # Weak types are part of the call: without them the function could return other dtypes than it did.
        shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type) for aval in avals]
        traced = _jax.open_jaxpr(jax.make_jaxpr(jax.jit(run))(*shapes))
    except Exception:  # the function of a library may do anything: look at values, take what is no array
        return eqn
    # Arrays that the function captures may be further operands of the call, depending on JAX's settings.
    takes_operands_alone = len(traced.eqns) == 1 and traced.eqns[0].invars == traced.invars
    if not takes_operands_alone or [v.aval for v in traced.outvars] != [v.aval for v in eqn.outvars]:
        return eqn
    return traced.eqns[0].replace(invars=eqn.invars, outvars=eqn.outvars, source_info=eqn.source_info)
