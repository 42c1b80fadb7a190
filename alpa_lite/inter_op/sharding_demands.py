"""The shardings of the user as demands on a plan, and what a plan makes of them.

    demands    on the mesh that they name: specs of arguments and results, and layout constraints on the results of the
               ops that hold a sharding                      `user_mesh`, `argument_pins`, `result_pins`, `user_layout`
    uses       for each line of the user's code and each argument: whether the plan has that sharding  `sharding_uses`

A sharding that the shape of the array does not allow, since its parts would be unequal, demands nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from alpa_lite.errors import PlanError
from alpa_lite.intra_op.stage import GivenLayout, Wanted
from alpa_lite.plan.parts import OpPlacement, UserShardingUse
from alpa_lite.program.ir import Graph, Value, wiring_of
from alpa_lite.program.phases import StepGraph
from alpa_lite.program.user_shardings import USER_SHARDING, UserSharding, UserShardings
from alpa_lite.sharding.specs import Spec


def user_mesh(step: StepGraph, given: UserShardings) -> dict[str, int] | None:
    """Return the devices per axis of the mesh of the user's shardings that must be obeyed; None if there are none.

    Raises `PlanError` if they are on different meshes.
    """
    if given.mode != "pin":
        return None
    if given.part is not None:
        return dict(given.part.mesh)
    first: dict[tuple[tuple[str, int], ...], str] = {}
    for _, sharding in wanted_shardings(step, given):
        # The message names the first line on which each mesh occurs.
        first.setdefault(sharding.mesh, sharding.source)
    if len(first) > 1:
        (one, at), (other, there), *_ = first.items()
        raise PlanError(
            f'user_shardings="pin" asks for one mesh, but {at} names {dict(one)} and {there} names {dict(other)}. '
            'Use one mesh, or user_shardings="hint".'
        )
    return dict(next(iter(first))) if first else None


def argument_pins(step: StepGraph, given: UserShardings) -> dict[str, Sequence[Any]]:
    """Return the specs of arguments that the user has placed and a plan obeys, by path, in the form of `Pins`."""
    arrays: dict[str, list[Value]] = {}
    for v, path in step.argument_paths().items():
        value = step.graph.values[v]
        if value.rank and not value.dtype.startswith("key<"):
            arrays.setdefault(path, []).append(value)
    return {
        # In a pin None stands for a whole dim and for an open one alike.
        name: [dim or None for dim in sharding.dims]
        for name, sharding in given.arguments.items()
        if given.obeys(sharding.source)
        and name in arrays
        and all(len(sharding.dims) == value.rank and sharding.divides(value.shape) for value in arrays[name])
    }


def result_pins(given: UserShardings) -> dict[str, Sequence[Any]]:
    """Return the specs of results that the user gives and a plan obeys, by path, in the form of `Pins`."""
    return {name: [dim or None for dim in s.dims] for name, s in given.results.items() if given.obeys(s.source)}


def user_layout(step: StepGraph, given: UserShardings, axes: Mapping[str, int]) -> GivenLayout:
    """Return the layout constraints on the results of the ops that pin a sharding of the user; other ops are exempt.

    An axis that the user's sharding does not use splits no dim, unless some dims are open. Where XLA has propagated the
    shardings, ops also read their operands as these lie, if they can: XLA divides an op as its operands are divided.
    """
    layout: dict[Graph, list[Wanted]] = {}
    held: dict[Graph, set[int]] = {}
    for graph, op in step.graph.walk():
        if op.primitive != USER_SHARDING or not given.obeys(op.source):
            continue
        value = graph.values[op.results[0]]
        sharding = UserSharding(mesh=op.params["mesh"], dims=op.params["dims"])
        # XLA pads parts of different sizes, but the parts in a plan are all equal.
        if sharding.divides(value.shape):
            layout.setdefault(graph, [()] * len(graph.values))[value.id] = _wanted(sharding, axes)
            held.setdefault(graph, set()).add(op.id)
    if given.propagated:
        return GivenLayout(values=layout, reads_otherwise=True)
    exempt = {graph: frozenset(range(len(graph.ops))) - ops for graph, ops in held.items()}
    return GivenLayout(values=layout, exempt=exempt)


def _wanted(sharding: UserSharding, axes: Mapping[str, int]) -> Wanted:
    place = {axis: dim for dim, names in enumerate(sharding.dims) for axis in names or ()}
    # An axis that the user does not name may split a dim that is open.
    is_open = None in sharding.dims
    # A mesh of the plan has no axes of one device.
    return tuple((a, place.get(a)) for a, size in axes.items() if size > 1 and (a in place or not is_open))


def wanted_shardings(step: StepGraph, given: UserShardings) -> Iterator[tuple[Value, UserSharding]]:
    """Yield the arrays of a step that have a sharding of the user, with that; `source` says where it is given."""
    for graph in _graphs(step.graph):
        for value in graph.values:
            yield from ((value, sharding) for sharding in value.user_shardings)
    for v, path in step.argument_paths().items():
        value = step.graph.values[v]
        yield from ((value, sharding) for sharding in _of_argument(path, value.rank, given))


def _graphs(graph: Graph) -> dict[Graph, None]:
    """Return a graph and the bodies of its ops, each once."""
    found = {graph: None}
    for inner, op in graph.walk():
        found |= {inner: None, **dict.fromkeys(op.bodies)}
    return found


def _of_argument(path: str, rank: int, given: UserShardings) -> tuple[UserSharding, ...]:
    """Return the sharding in which the user gives an argument, if any."""
    sharding = given.arguments.get(path)
    return () if sharding is None or len(sharding.dims) != rank else (sharding,)


class PlacedOps(NamedTuple):
    """The part of a plan in which its specs are looked up: the placements of ops, and the specs of inputs."""

    ops: Mapping[int, OpPlacement]
    inputs: Mapping[int, Spec]
    sizes: Mapping[str, int]


def sharding_uses(step: StepGraph, given: UserShardings, stages: Sequence[PlacedOps]) -> tuple[UserShardingUse, ...]:
    """Return the shardings of the user, each with the plan's specs; equal ones of one line are one entry."""
    if given.mode == "ignore":
        return ()
    found: dict[tuple[str, tuple[int, ...], UserSharding], list[tuple[bool, str]]] = {}
    paths = step.argument_paths()
    for stage in stages:
        placed = [(value, value.user_shardings, spec) for value, spec in _specs(step.graph, stage.inputs, stage.ops)]
        for v, spec in stage.inputs.items():
            value = step.graph.values[v]
            # Values that come from other stages have no path.
            placed.append((value, _of_argument(paths.get(v, ""), value.rank, given), spec))
        for value, shardings, spec in placed:
            for sharding in shardings:
                parts = [prod(stage.sizes[axis] for axis in dim) for dim in spec.dims]
                # Numbers of parts are compared, since the plan's axes have names of their own.
                same = all(w is None or w == p for w, p in zip(sharding.ways, parts, strict=True))
                key = (sharding.source, value.shape, sharding)
                # A partial sum is not yet the array that the user lays out.
                found.setdefault(key, []).append((same and not spec.partial, str(spec)))
    return tuple(
        UserShardingUse(
            source=source,
            shape=shape,
            mesh=sharding.mesh,
            wanted=str(sharding),
            planned=tuple(dict.fromkeys(spec for _, spec in planned)),
            follows=all(follows for follows, _ in planned),
            divides=sharding.divides(shape),
        )
        for (source, shape, sharding), planned in found.items()
    )


def _specs(
    graph: Graph, inputs: Mapping[int, Spec], placements: Mapping[int, OpPlacement]
) -> Iterator[tuple[Value, Spec]]:
    """Yield the arrays of a graph and of its bodies that have a spec, with that."""
    yield from ((graph.values[v], spec) for v, spec in inputs.items())
    for number, placement in placements.items():
        op = graph.ops[number]
        yield from zip(graph.results(op), placement.results, strict=False)
        wiring = wiring_of(op)
        for n, (body, inside) in enumerate(zip(op.bodies, placement.bodies, strict=False)):
            read = wiring.inputs[n] if wiring is not None and placement.body_operands else ()
            specs = {v: placement.body_operands[i] for v, i in zip(body.inputs, read, strict=False)}
            yield from _specs(body, specs, inside)
