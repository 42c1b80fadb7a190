"""The shardings of the user as demands on a plan, and what a plan makes of them.

    demands    on the mesh that they name: specs of arguments, and layout constraints on the results of the ops that
               hold a sharding                                              `user_mesh`, `argument_pins`, `user_layout`
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
from alpa_lite.program.ir import Graph
from alpa_lite.program.phases import StepGraph
from alpa_lite.program.user_shardings import USER_SHARDING, UserSharding, UserShardings, constraints
from alpa_lite.sharding.specs import Spec

ARGUMENT = "argument "
"""What the source of a sharding begins with if an argument lies in it."""


def user_mesh(step: StepGraph, given: UserShardings) -> dict[str, int] | None:
    """Return the devices per axis of the mesh on which the user's shardings must be obeyed; None if there are none.

    Raises:
        PlanError: the shardings are on different meshes.
    """
    if given.mode != "pin":
        return None
    first: dict[tuple[tuple[str, int], ...], str] = {}
    for source, _, sharding in wanted_shardings(step, given):
        first.setdefault(sharding.mesh, source)
    if len(first) > 1:
        (one, at), (other, there), *_ = first.items()
        raise PlanError(
            f'user_shardings="pin" asks for one mesh, but {at} names {dict(one)} and {there} names {dict(other)}. '
            'Use one mesh, or user_shardings="hint".'
        )
    return dict(next(iter(first))) if first else None


def argument_pins(step: StepGraph, given: UserShardings, *, only: str = "") -> dict[str, Sequence[Any]]:
    """Return the specs of arguments that the user has placed, by path, in the form of `inter_op.pins`.

    only: a source, whose arguments alone count; "" for all.
    """
    values = (step.graph.values[v] for v in step.graph.inputs)
    shapes = {value.name: value for value in values if value.rank and not value.dtype.startswith("key<")}
    return {
        name: [dim or None for dim in sharding.dims]
        for name, sharding in given.arguments.items()
        if only in ("", f"{ARGUMENT}{name}")
        and name in shapes
        and len(sharding.dims) == shapes[name].rank
        and sharding.divides(shapes[name].shape)
    }


def user_layout(step: StepGraph, axes: Mapping[str, int], *, only: str = "") -> GivenLayout:
    """Return the layout constraints of the ops that hold a sharding of the user; all other ops are exempt.

    An axis that the user's sharding does not use splits no dim, unless some dims are open. `only`: a source, whose ops
    alone count; "" for all.
    """
    layout: dict[Graph, list[Wanted]] = {}
    held: dict[Graph, set[int]] = {}
    for graph, op, sharding in constraints(step.graph):
        (result,) = op.results
        if only not in ("", op.source) or not sharding.divides(graph.values[result].shape):
            continue
        layout.setdefault(graph, [()] * len(graph.values))[result] = _wanted(sharding, axes)
        held.setdefault(graph, set()).add(op.id)
    exempt = {graph: frozenset(range(len(graph.ops))) - ops for graph, ops in held.items()}
    return GivenLayout(values=layout, exempt=exempt)


def _wanted(sharding: UserSharding, axes: Mapping[str, int]) -> Wanted:
    place = {axis: dim for dim, names in enumerate(sharding.dims) for axis in names or ()}
    is_open = None in sharding.dims
    # A mesh of the plan has no axes of one device.
    return tuple((a, place.get(a)) for a, size in axes.items() if size > 1 and (a in place or not is_open))


def wanted_shardings(step: StepGraph, given: UserShardings) -> Iterator[tuple[str, tuple[int, ...], UserSharding]]:
    """Yield the shardings of a step, each with where the user gives it and the shape of the array."""
    for graph, op, sharding in constraints(step.graph):
        yield op.source, graph.values[op.results[0]].shape, sharding
    shapes = {step.graph.values[v].name: step.graph.values[v].shape for v in step.graph.inputs}
    for name, sharding in given.arguments.items():
        if name in shapes:
            yield f"{ARGUMENT}{name}", shapes[name], sharding


class PlacedOps(NamedTuple):
    """The part of a plan in which its specs are looked up: the placements of ops, and the specs of arguments."""

    ops: Mapping[int, OpPlacement]
    inputs: Mapping[int, Spec]
    sizes: Mapping[str, int]


def sharding_uses(step: StepGraph, given: UserShardings, stages: Sequence[PlacedOps]) -> tuple[UserShardingUse, ...]:
    """Return the shardings of the user beside those of the plan; equal ones of one line are one entry."""
    if given.mode == "ignore":
        return ()
    found: dict[tuple[str, tuple[int, ...], UserSharding], list[tuple[bool, str]]] = {}
    for stage in stages:
        for source, shape, sharding, spec in _planned(step, given, stage):
            parts = tuple(prod(stage.sizes[axis] for axis in dim) for dim in spec.dims)
            follows = not spec.partial and all(w is None or w == p for w, p in zip(sharding.ways, parts, strict=True))
            found.setdefault((source, shape, sharding), []).append((follows, str(spec)))
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


def _planned(
    step: StepGraph, given: UserShardings, stage: PlacedOps
) -> Iterator[tuple[str, tuple[int, ...], UserSharding, Spec]]:
    """Yield the shardings of a stage with their sources and shapes, and the specs that the plan has for them."""
    yield from _planned_in(step.graph, stage.ops)
    for v, spec in stage.inputs.items():
        value = step.graph.values[v]
        sharding = given.arguments.get(value.name)
        if sharding is not None and len(sharding.dims) == value.rank:
            yield f"{ARGUMENT}{value.name}", value.shape, sharding, spec


def _planned_in(
    graph: Graph, placements: Mapping[int, OpPlacement]
) -> Iterator[tuple[str, tuple[int, ...], UserSharding, Spec]]:
    for number, placement in placements.items():
        op = graph.ops[number]
        if op.primitive == USER_SHARDING and placement.results:
            sharding = UserSharding(mesh=op.params["mesh"], dims=op.params["dims"])
            yield op.source, graph.values[op.results[0]].shape, sharding, placement.results[0]
        for body, inside in zip(op.bodies, placement.bodies, strict=False):
            yield from _planned_in(body, inside)
