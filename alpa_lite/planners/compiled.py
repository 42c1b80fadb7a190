"""The plan that a compiled program is: its shardings of arguments and results, and what XLA makes of them inside.

    text        →  arguments and results, each with the blocks that devices hold           `partitioned_program`
    blocks      →  specs on one mesh: that which the step or the text names, else the coarsest that has them all
    arguments   →  those of the step, by their paths where the text has them, else by their order

The rest is as for a jitted step (`jitted`): values in between lie as Shardy's propagation says, and as the step itself
demands. A compiled program has the shapes of the results on one device, but mostly not their shardings: a result is
returned as its argument if it is state and its block is that of the argument, else in the only spec with such blocks,
if there is only one. Others are left to the propagation, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from math import prod
from typing import NamedTuple

from alpa_lite.errors import MismatchError, PlanError
from alpa_lite.inter_op.plan_request import PlanRequest
from alpa_lite.inter_op.sharding_demands import user_mesh
from alpa_lite.plan.plan import Plan
from alpa_lite.planners.jitted import Inside, plan_under_demands
from alpa_lite.planners.partitioned_program import PartitionedProgram, ProgramArray, read_program
from alpa_lite.planners.planner import Planner
from alpa_lite.planners.trainer_configuration import written
from alpa_lite.program.phases import StepGraph
from alpa_lite.program.user_shardings import UserSharding, UserShardings
from alpa_lite.sharding.specs import Spec
from alpa_lite.sharding.tile_assignments import axes_of, spec_on
from alpa_lite.text import show_count

_AXES = "xyzw"
"""Names of the axes of a mesh that neither the step nor the text names."""


@dataclass(frozen=True, kw_only=True)
class Compiled(Planner):
    """A plan of one stage with the shardings of a program that XLA has compiled, or is to compile.

    With `num_microbatches` given, it is the step in this many micro-batches, as for `Jitted`.

    Attributes:
        program: the text of `compiled.as_text()` or `lowered.as_text()`, where `lowered = jax.jit(…).lower(…)` and
            `compiled = lowered.compile()`; or the path of a file with it, which is read at once. Either becomes what
            was read from it.
        inside: who chooses the shardings of values in between, as in `Jitted`.
    """

    obeys_user_shardings = True

    program: str | PartitionedProgram
    inside: Inside = "propagated"

    def __post_init__(self) -> None:
        """Read the text. Raises `PlanError` if it is no program, or has shardings that no plan has."""
        if isinstance(self.program, str):
            object.__setattr__(self, "program", read_program(written(self.program)))

    @property
    def name(self) -> str:
        """Name for tables."""
        return "as compiled" if self.inside == "propagated" else "as compiled, cheapest inside"

    def demands(self, request: PlanRequest) -> UserShardings:
        """Return the shardings of the program. Raises `MismatchError` for that of another step or number of devices."""
        program, cluster = self.program, request.cluster
        assert isinstance(program, PartitionedProgram)
        if program.num_devices != cluster.num_devices:
            raise MismatchError(
                f"The program is partitioned for {show_count(program.num_devices, 'device')}, but {cluster.name} has "
                f"{cluster.num_devices}. Plan for a cluster of that size, or compile the step for this one."
            )
        step = request.step_at(1, 0)
        pairs = _Pairs.of(program, request, step)
        axes = _mesh(program, request, step)
        found = _specs(program, pairs, axes)
        if not found.arguments and not found.results:
            raise PlanError(
                "The program does not say how its arguments and results lie. Lower jax.jit(step, in_shardings=…), or "
                "give the text of compiled.as_text(), which has what XLA chose."
            )

        def shardings(kind: str, specs: Mapping[str, Spec]) -> dict[str, UserSharding]:
            mesh = tuple(axes.items())
            return {p: UserSharding(mesh=mesh, dims=s.dims, source=f"{kind} {p}") for p, s in specs.items()}

        return UserShardings(
            mode="pin",
            arguments=shardings("argument", found.arguments),
            results=shardings("result", found.results),
            propagated=self.inside == "propagated",
        )

    def plan(self, request: PlanRequest) -> Plan:
        """Return the plan."""
        return plan_under_demands(self.name, request)


class _Leaf(NamedTuple):
    """An argument or result leaf of a step; `state` is the path of the argument that a result replaces, if any."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    is_read: bool = True
    state: str | None = None

    @property
    def is_key(self) -> bool:
        return self.dtype.startswith("key<")


class _Pairs(NamedTuple):
    """The arrays of a program, each with the leaf of the step that it is."""

    arguments: Sequence[tuple[_Leaf, ProgramArray]]
    results: Sequence[tuple[_Leaf, ProgramArray]]

    @staticmethod
    def of(program: PartitionedProgram, request: PlanRequest, step: StepGraph) -> _Pairs:
        """Pair the arrays of a program with the leaves of a step. Raises `MismatchError` if they differ."""
        function = request.signature.function
        leaves = _matched(program.arguments, _arguments(request, step), function)
        names, returned = request.signature.results, _results(request, step)
        if len(program.results) != len(names):
            raise MismatchError(
                f"The program returns {show_count(len(program.results), 'array')}, but {function} returns "
                f"{len(names)}: it is the program of another step. Give that of this one."
            )
        pairs = _Pairs(
            list(zip(leaves, program.arguments, strict=True)),
            [(returned[n], array) for n, array in enumerate(program.results) if n in returned],
        )
        for kind, each in (("argument", pairs.arguments), ("result", pairs.results)):
            for leaf, array in each:
                _check(kind, leaf, array, program)
        return pairs


def _arguments(request: PlanRequest, step: StepGraph) -> list[_Leaf]:
    """Return the leaves of the arguments in order."""
    graph = step.graph
    read = {v for op in graph.ops for v in op.operands} | {*graph.outputs}
    found = dict[int, _Leaf]()
    for v, part in zip(graph.inputs, step.input_parts, strict=True):
        if part.leaf < request.signature.num_arguments:
            value = graph.values[v]
            found[part.leaf] = _Leaf(value.name, value.shape, value.dtype, is_read=v in read)
    return [found[number] for number in sorted(found)]


def _results(request: PlanRequest, step: StepGraph) -> dict[int, _Leaf]:
    """Return the leaves of the results by their number; constants, which the step does not compute, are left out."""
    graph = step.graph
    return {
        part.leaf: _Leaf(
            request.signature.results[part.leaf],
            graph.values[v].shape,
            graph.values[v].dtype,
            state=graph.values[step.aliases[v]].name if v in step.aliases else None,
        )
        for v, part in zip(graph.outputs, step.output_parts, strict=True)
    }


def _matched(arrays: Sequence[ProgramArray], leaves: Sequence[_Leaf], function: str) -> Sequence[_Leaf]:
    """Return the leaf of each argument of a program, in which `jax.jit` leaves out what the step does not read."""
    by_path = {leaf.path: leaf for leaf in leaves}
    if all(array.name in by_path for array in arrays):
        found = [by_path[array.name] for array in arrays]
        if missing := [leaf.path for leaf in leaves if leaf.is_read and leaf not in found]:
            raise MismatchError(
                f"{function} reads {missing[0]}, which is no argument of the program: it is that of another step. Give "
                "that of this one."
            )
        return found
    read = [leaf for leaf in leaves if leaf.is_read]
    for chosen in (leaves, read):
        if len(chosen) == len(arrays):
            _check_order(arrays, chosen, by_path)
            return chosen
    raise MismatchError(
        f"The program takes {show_count(len(arrays), 'array')}, but {function} takes {len(leaves)}, of which it reads "
        f"{len(read)}: it is the program of another step, or of other arguments. Give that of this one."
    )


def _check_order(arrays: Sequence[ProgramArray], leaves: Sequence[_Leaf], by_path: Mapping[str, _Leaf]) -> None:
    """Raise `MismatchError` if the text has the path of another argument where an argument is in the order."""
    for array, leaf in zip(arrays, leaves, strict=True):
        if array.name != leaf.path and array.name in by_path:
            raise MismatchError(
                f"The program takes {array.name} where the step takes {leaf.path}: it is the program of another step. "
                "Give that of this one."
            )


def _check(kind: str, leaf: _Leaf, array: ProgramArray, program: PartitionedProgram) -> None:
    """Raise `MismatchError` for an array of another shape or dtype than its leaf."""
    ways = _ways(leaf, array, program)
    # Random keys are words of 32 bits in a program, whose number is their last dim.
    is_same = array.shape[: len(leaf.shape)] == leaf.shape if leaf.is_key else ways is not None
    if array.tiling is not None and array.tiling.ways and len(array.tiling.ways) != len(array.shape):
        is_same = False
    if not is_same or (array.dtype and not leaf.is_key and _narrow(array.dtype) != _narrow(leaf.dtype)):
        name = array.name or "that array"
        part = " on each device" if program.is_of_device else ""
        split = "" if array.tiling is None or array.tiling.is_whole else f" in {_times(array.tiling.ways)} blocks"
        raise MismatchError(
            f"The {kind} {leaf.path or 'of the step'} is {leaf.dtype}{[*leaf.shape]}, but in the program {name} is "
            f"{array.dtype}{[*array.shape]}{part}{split}: it is the program of another step, or of other shapes. Give "
            "that of this one."
        )


def _narrow(dtype: str) -> str:
    # XLA has no float0; JAX passes booleans in its place.
    return "bool" if dtype == "float0" else dtype


def _times(ways: Sequence[int]) -> str:
    return " × ".join(map(str, ways))


def _ways(leaf: _Leaf, array: ProgramArray, program: PartitionedProgram) -> tuple[int, ...] | None:
    """Return the number of blocks of each dim of a leaf in a program; None if the shapes are not those of one array."""
    whole, block = leaf.shape, array.shape
    if len(whole) != len(block):
        return None
    if not program.is_of_device:
        return (1,) * len(whole) if whole == block else None
    if array.tiling is not None:
        ways = array.tiling.ways or (1,) * len(whole)
        # XLA fills the last block up.
        return ways if all(-(-n // w) == b for n, w, b in zip(whole, ways, block, strict=False)) else None
    if any(n % b if b else n for n, b in zip(whole, block, strict=True)):
        return None
    return tuple(n // b if b else 1 for n, b in zip(whole, block, strict=True))


def _mesh(program: PartitionedProgram, request: PlanRequest, step: StepGraph) -> Mapping[str, int]:
    """Return the devices per axis of the mesh on which the shardings of a program are specs."""
    arrays = (*program.arguments, *program.results)
    tiled = [(array.tiling, len(array.shape)) for array in arrays if array.tiling is not None]

    def has_all(axes: Mapping[str, int]) -> bool:
        is_whole = prod(axes.values()) == program.num_devices
        return is_whole and all(spec_on(tiling, axes, rank) is not None for tiling, rank in tiled)

    given = request.signature.user_shardings
    own = None if given.mode == "ignore" else user_mesh(step, replace(given, mode="pin"))
    if own is not None and not has_all(own):
        raise PlanError(
            f"{request.signature.function} names shardings on the mesh {own}, on which those of the program are not "
            'specs: it was compiled for another mesh. Compile it anew, or plan with user_shardings="ignore".'
        )
    if own is not None:
        return own
    if program.mesh and has_all(dict(program.mesh)):
        return dict(program.mesh)
    sizes = axes_of((tiling for tiling, _ in tiled), program.num_devices)
    names = _AXES if sizes is not None and len(sizes) <= len(_AXES) else [f"x{n}" for n in range(len(sizes or ()))]
    axes = dict(zip(names, sizes or (), strict=False)) or {"x": 1}
    if sizes is None or not has_all(axes):
        raise PlanError(
            "The shardings of the program are not specs on one mesh of devices in order: they divide devices in ways "
            "that no common axes have. Use shardings of one mesh, made of the devices in order."
        )
    return axes


class _Specs(NamedTuple):
    """Specs of arguments and results by path."""

    arguments: dict[str, Spec]
    results: dict[str, Spec]


def _specs(program: PartitionedProgram, pairs: _Pairs, axes: Mapping[str, int]) -> _Specs:
    specs = dict[str, Spec]()
    for leaf, array in pairs.arguments:
        spec = None if array.tiling is None or leaf.is_key else spec_on(array.tiling, axes, len(leaf.shape))
        if spec is not None:
            specs[leaf.path] = spec
    returned = dict[str, Spec]()
    for leaf, array in pairs.results:
        ways = _ways(leaf, array, program)
        # XLA pads results whose blocks are not equal; those of a plan are.
        if leaf.is_key or ways is None or any(n % w for n, w in zip(leaf.shape, ways, strict=True)):
            continue
        spec = (
            _result_spec(leaf, array, ways, specs, axes) if program.is_of_device or array.tiling is not None else None
        )
        if spec is not None:
            returned[leaf.path] = spec
    return _Specs(specs, returned)


def _result_spec(
    leaf: _Leaf, array: ProgramArray, ways: tuple[int, ...], arguments: Mapping[str, Spec], axes: Mapping[str, int]
) -> Spec | None:
    """Return the spec of a result with so many blocks per dim, as far as its program says it."""
    if array.tiling is not None:
        return spec_on(array.tiling, axes, len(leaf.shape))
    state = arguments.get(leaf.state or "")
    if state is not None and tuple(prod(axes[a] for a in dim) for dim in state.dims) == ways:
        return state
    fitting = list(_specs_with(ways, {axis: size for axis, size in axes.items() if size > 1}))
    return Spec(fitting[0]) if len(fitting) == 1 else None


def _specs_with(ways: Sequence[int], axes: Mapping[str, int]) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Yield the axes of each dim in all specs with so many blocks per dim."""
    if not ways:
        yield ()
        return
    for count in range(len(axes) + 1):
        for dim in permutations(axes, count):
            if prod(axes[axis] for axis in dim) == ways[0]:
                rest = {axis: size for axis, size in axes.items() if axis not in dim}
                yield from ((dim, *others) for others in _specs_with(ways[1:], rest))
