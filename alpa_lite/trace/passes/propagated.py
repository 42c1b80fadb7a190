"""The shardings that XLA gives to the values of a step, without devices and without compiling it.

XLA decides where values lie before it partitions a program, by Shardy's propagation, whose passes are in the jaxlib
that everybody has:

    evaluate    the step, with a constraint that leaves all dims open on each value: results of equations, arguments of
                the step and of bodies of loops                                                         `_Probe`
    lower       for an abstract mesh, with the shardings of arguments and results
    propagate   `sdy-propagation-pipeline`: each constraint has the sharding of its value then          `_propagate`
    insert      `user_sharding` equations with these, which a plan obeys                               `with_shardings`

Bodies of loops are shared by all trips, and functions by all calls: where calls differ, the value stays open.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy, stablehlo
from jaxlib.mlir.passmanager import PassManager

from alpa_lite import _jax
from alpa_lite._jax import AnyJaxpr, ClosedJaxpr, Jaxpr, JaxprEqn
from alpa_lite.errors import TraceError
from alpa_lite.program.memo import memoized
from alpa_lite.program.user_shardings import USER_SHARDING, UserSharding
from alpa_lite.trace.from_jaxpr import called_jaxpr
from alpa_lite.trace.passes.plain_jaxpr import with_shardings

_BODIES = {"scan": ("jaxpr",), "while": ("cond_jaxpr", "body_jaxpr"), "cond": ("branches",)}
_MARK = "value_of_alpa_lite_"


class Propagated(NamedTuple):
    """A step with the shardings that XLA gives to its values.

    Attributes:
        jaxpr: the step, with a `user_sharding` equation behind each equation.
        arguments: the layout of each argument, those that were left open too.
    """

    jaxpr: ClosedJaxpr
    arguments: tuple[UserSharding | None, ...]


def propagated(
    jaxpr: ClosedJaxpr, arguments: Sequence[UserSharding | None], results: Sequence[UserSharding | None], name: str
) -> Propagated:
    """Return a step with the shardings that XLA's propagation gives to its values.

    Args:
        jaxpr: the step; its own constraints are `user_sharding` equations.
        arguments: the layouts of arguments, on one mesh; None leaves one to XLA.
        results: the same for results.
        name: name of the step, for messages.

    Raises `TraceError` if the step cannot be lowered without devices.
    """
    given = [each for each in (*arguments, *results) if each is not None]
    if not given:
        return Propagated(jaxpr, tuple(arguments))
    sizes = given[0].sizes
    probe = _Probe(AbstractMesh(tuple(sizes.values()), tuple(sizes)))
    consts = _jax.consts_of(jaxpr)

    def run(consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        found = probe.evaluated(jaxpr, probe.marked(_jax.open_jaxpr(jaxpr), args), consts)
        return [x if s is None else probe.constrained(x, s) for x, s in zip(found, results, strict=True)]

    shapes = [probe.shaped(v.aval, s) for v, s in zip(_jax.open_jaxpr(jaxpr).invars, arguments, strict=True)]
    try:
        with _jax.no_mesh():
            traced = jax.jit(run, keep_unused=True).trace([probe.shaped(jax.typeof(c)) for c in consts], shapes)
            lowered = traced.lower(lowering_platforms=("cpu",))
        module = _propagate(lowered)
    except Exception as error:  # kernels and callbacks fail to lower in ways of their own
        why = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise TraceError(
            f"XLA's propagation cannot be run on {name} without devices: {why}. Plan "
            'with inside="cheapest", with which the planner chooses the shardings of values in between.'
        ) from error
    marks = _of_marks(module)

    def layout(dims: _Dims | None) -> UserSharding | None:
        return None if dims is None else UserSharding(mesh=given[0].mesh, dims=dims)

    found = {key: layout(marks.get(number)) for key, number in probe.numbers.items()}
    own = _of_arguments(module)[len(consts) :]
    return Propagated(
        with_shardings(jaxpr, found),
        tuple(s if s is not None else layout(dims) for s, dims in zip(arguments, own, strict=True)),
    )


class _Probe:
    """Evaluates a step on a mesh with a constraint, open in all dims, on each of its values.

    `numbers` has the number of the mark of each value, by the id of its equation or of the jaxpr whose argument it is,
    which the step holds, and its position there.
    """

    def __init__(self, mesh: AbstractMesh) -> None:
        self.mesh = mesh
        self.numbers: dict[tuple[int, int], int] = {}

    def shaped(self, aval: Any, sharding: UserSharding | None = None) -> jax.ShapeDtypeStruct:
        """Return the shape of an array, with its layout if it has one that divides it."""
        plain = jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))
        if sharding is None or not _is_divided(aval, sharding):
            return plain
        return plain.update(sharding=self._named(sharding))

    def constrained(self, value: Any, sharding: UserSharding) -> Any:
        """Return a value with the constraint of a layout; random keys and what it does not divide have none."""
        if not _is_divided(value, sharding):
            return value
        return jax.lax.with_sharding_constraint(value, self._named(sharding))

    def _named(self, sharding: UserSharding) -> NamedSharding:
        open_dim = PartitionSpec.UNCONSTRAINED
        return NamedSharding(self.mesh, PartitionSpec(*(open_dim if d is None else d or None for d in sharding.dims)))

    def evaluated(self, jaxpr: AnyJaxpr, args: Sequence[Any], consts: Sequence[Any] | None = None) -> list[Any]:
        """Return the results of a jaxpr."""
        opened = _jax.open_jaxpr(jaxpr)
        constants = _jax.consts_of(jaxpr) if consts is None else consts
        values = dict(zip((*opened.constvars, *opened.invars), (*constants, *args), strict=True))
        for eqn in opened.eqns:
            operands = [atom.val if isinstance(atom, _jax.Literal) else values[atom] for atom in eqn.invars]
            inner = called_jaxpr(eqn)
            if eqn.primitive.name == USER_SHARDING:
                wanted = UserSharding(mesh=eqn.params["mesh"], dims=eqn.params["dims"])
                found = [self.constrained(operands[0], wanted)]
            elif inner is not None:
                found = self.evaluated(inner, operands)
            else:
                found = self.marked(eqn, self._bound(eqn, operands))
            values.update(zip(eqn.outvars, found, strict=True))
        return [atom.val if isinstance(atom, _jax.Literal) else values[atom] for atom in opened.outvars]

    def _bound(self, eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
        """Return the results of an equation whose bodies, if it has any, are evaluated with constraints too."""
        # Callbacks cannot be lowered without devices; what the host returns has no sharding to propagate.
        if eqn.primitive.name.endswith("_callback"):
            return [jax.numpy.zeros(aval.shape, aval.dtype) for aval in map(_jax.aval_of, eqn.outvars)]
        params = dict(eqn.params)
        for name in _BODIES.get(eqn.primitive.name, ()):
            body = params[name]
            params[name] = (
                _jax.tuple_like(body, map(self._probed, body)) if isinstance(body, tuple) else self._probed(body)
            )
        # Later versions of JAX count the operands of a scan anew.
        if "ft_in" in params:
            params = {name: param for name, param in params.items() if name not in ("num_consts", "num_carry")}
        found = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(params))
        return list(found) if eqn.primitive.multiple_results else [found]

    def _probed(self, body: AnyJaxpr) -> ClosedJaxpr:
        shapes = [self.shaped(v.aval) for v in _jax.open_jaxpr(body).invars]
        opened = _jax.open_jaxpr(body)
        return jax.make_jaxpr(lambda *args: self.evaluated(body, self.marked(opened, args)))(*shapes)

    def marked(self, owner: JaxprEqn | Jaxpr, values: Sequence[Any]) -> list[Any]:
        """Return the results of an equation or arguments of a jaxpr, with a constraint on each."""
        return [self._marked((id(owner), n), x) for n, x in enumerate(values)]

    def _marked(self, key: tuple[int, int], value: Any) -> Any:
        aval = jax.typeof(value)
        if not _is_array(aval):
            return value
        mark = self.numbers.setdefault(key, len(self.numbers))
        # The name is that of the operation in the lowered program.
        with jax.named_scope(f"{_MARK}{mark}"):
            return self.constrained(value, UserSharding(mesh=(), dims=(None,) * aval.ndim))


def _is_array(aval: Any) -> bool:
    """Return whether an array can be split: scalars and random keys are whole on every device."""
    return bool(getattr(aval, "shape", ())) and not jax.numpy.issubdtype(aval.dtype, jax.dtypes.extended)


def _is_divided(array: Any, sharding: UserSharding) -> bool:
    return _is_array(array) and len(sharding.dims) == len(array.shape) and sharding.divides(tuple(array.shape))


@memoized(entries=1)
def _passes() -> str:
    """Return the pipeline; passes of StableHLO are registered once in a process."""
    stablehlo.register_stablehlo_passes()
    # Operations of CHLO have no rules that shardings could propagate by.
    return "builtin.module(func.func(chlo-legalize-to-stablehlo),sdy-propagation-pipeline)"


def _propagate(lowered: Any) -> Any:
    """Return a copy of a lowered module in which all values have shardings."""
    module = lowered.compiler_ir("stablehlo")
    with module.context:
        copy = ir.Module.parse(module.operation.get_asm(enable_debug_info=True))
        PassManager.parse(_passes()).run(copy.operation)
    return copy


_Dims = tuple[tuple[str, ...], ...]
"""For each dim the axes that split it, major first."""


def _of_marks(module: Any) -> Mapping[int, _Dims | None]:
    """Return the axes at each mark; None where the calls of a function differ."""
    found = dict[int, _Dims | None]()
    for operation in _operations(module.operation):
        if operation.name not in ("sdy.sharding_constraint", "sdy.reshard"):
            continue
        mark = re.search(rf"{_MARK}(\d+)", str(operation.location))
        if mark is not None:
            dims, number = _dims(operation.attributes["sharding"]), int(mark[1])
            found[number] = dims if found.get(number, dims) == dims else None
    return found


def _operations(operation: Any) -> Iterator[Any]:
    """Yield all operations inside of one."""
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield inner.operation
                yield from _operations(inner.operation)


def _of_arguments(module: Any) -> list[_Dims | None]:
    """Return the axes of the arguments of a module's entry function."""
    functions = (op for op in _operations(module.operation) if op.name == "func.func")
    main = next(op for op in functions if ir.StringAttr(op.attributes["sym_name"]).value == "main")
    return [_dims(a["sdy.sharding"]) if "sdy.sharding" in a else None for a in main.attributes["arg_attrs"]]


def _dims(sharding: Any) -> _Dims | None:
    """Return the axes of each dim in an attribute of Shardy; None if it has parts of axes."""
    dims = [
        [sdy.AxisRefAttr(axis) for axis in sdy.DimensionShardingAttr(dim).axes]
        for dim in sdy.TensorShardingAttr(sharding).dimension_shardings
    ]
    if any(axis.sub_axis_info is not None for dim in dims for axis in dim):
        return None
    return tuple(tuple(axis.name for axis in dim) for dim in dims)
