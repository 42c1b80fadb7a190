"""Custom: the placement that the user already has, as `PartitionSpec`s of the arguments; the rest is found.

    al.planners.Custom(mesh={"data": 2, "model": 4}, in_specs=(state_specs, P("data")))      as jax.jit(in_shardings=…)
    al.planners.Custom(mesh=mesh, rules=[(r"w_up$", P(None, "model")), (r"w_down$", P("model"))])

It is `OnMesh` with these arguments pinned. How the ops inside are split is chosen by the integer program, where XLA's
partitioner would propagate the placement of the arguments. State keeps its placement from step to step; other outputs
come in the placement that they are computed in.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from typing import Any, NamedTuple, cast

from alpa_lite.errors import PlanError
from alpa_lite.plan import Plan
from alpa_lite.planners.data_parallel import renamed
from alpa_lite.planners.on_mesh import OnMesh
from alpa_lite.planners.planner import Planner, PlanRequest


class _Given(NamedTuple):
    """A leaf of a tree of specs."""

    path: str
    spec: Any


@dataclass(frozen=True, kw_only=True)
class Custom(Planner):
    """The arguments lie as they are told to.

    Attributes:
        mesh: devices per axis, or a `jax.sharding.Mesh`, of which names and sizes count: the devices are those of the
            cluster in their order. None: the mesh of the `NamedSharding`s.
        in_specs: a tuple with one entry per positional argument that is not static, or a mapping from argument names.
            An entry is a `PartitionSpec` or `NamedSharding`, for the whole argument, or a tree of such, like the
            argument or a prefix of it. None leaves the choice to the planner.
        rules: pairs of a regular expression and a `PartitionSpec`: arrays that `in_specs` leaves open, with more than
            one element, get the spec of the first expression that is found in their path (`state/params/w`).
        batch: axes that split nothing but the batch, and state; see `OnMesh`. The others are as free as they can be.
    """

    mesh: Any = field(default=None, hash=False)
    in_specs: Any = field(default=(), hash=False)
    rules: Sequence[tuple[str, Any]] = field(default=(), hash=False)
    batch: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """For tables."""
        return "custom"

    def plan(self, request: PlanRequest) -> Plan:
        """Raises `PlanError` when a spec fits no argument or not its shape, or the mesh does not cover the cluster."""
        step = request.step_at(1, 0)
        arrays = {
            step.graph.values[v].name: step.graph.values[v].num_elements
            for v, part in zip(step.graph.inputs, step.input_parts, strict=True)
            if part.leaf < request.num_arguments
        }
        given = [*_leaves(self._trees(request), "")]
        pins: dict[str, Any] = {}
        for path, spec in given:
            below = [name for name in arrays if name == path or name.startswith(f"{path}/")]
            if not below and path not in request.arguments:
                near = get_close_matches(path, arrays, n=3, cutoff=0.3) or [*arrays][:3]
                raise PlanError(
                    f"in_specs has an entry for {path!r}, but there is no such argument. Did you mean "
                    f"{', '.join(near)}? Write specs as PartitionSpec(...): a tuple is a tree."
                )
            pins |= dict.fromkeys(below, spec)
        pins |= self._by_rules([name for name, size in arrays.items() if name not in pins and size > 1])
        axes = self._axes(spec for _, spec in given)
        found = OnMesh(axes=axes, batch=self.batch, pins={name: _dims(name, spec) for name, spec in pins.items()})
        return renamed(found.plan(request), self.name)

    def _trees(self, request: PlanRequest) -> Mapping[str, Any]:
        """The entry of each argument, by its name."""
        if isinstance(self.in_specs, Mapping):
            return cast("Mapping[str, Any]", self.in_specs)
        if not isinstance(self.in_specs, (tuple, list)):
            raise PlanError(
                f"in_specs = {self.in_specs!r} was given; give a tuple with one entry per argument, or a mapping from "
                f"the names {', '.join(request.arguments)}."
            )
        entries = cast("Sequence[Any]", self.in_specs)
        if entries and len(entries) != len(request.arguments):
            raise PlanError(
                f"in_specs has {len(entries)} entries, but the step takes {len(request.arguments)} positional "
                f"arguments ({', '.join(request.arguments)}). Give one for each, None where the planner may choose."
            )
        return dict(zip(request.arguments, entries, strict=False))

    def _by_rules(self, names: Sequence[str]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for pattern, spec in self.rules:
            fitting = [name for name in names if re.search(pattern, name)]
            if not fitting:
                raise PlanError(f"The rule {pattern!r} fits no array that has no spec yet. Take it out, or correct it.")
            found |= {name: spec for name in fitting if name not in found}
        return found

    def _axes(self, given: Iterator[Any]) -> Mapping[str, int]:
        meshes = [dict(spec.mesh.shape) for spec in given if _is_sharding(spec)]
        if self.mesh is not None:
            meshes.append(dict(getattr(self.mesh, "shape", self.mesh)))
        if not meshes:
            raise PlanError('Specs need a mesh to name axes of: give mesh={"data": 2, "model": 4}, or NamedShardings.')
        for other in meshes[1:]:
            if other != meshes[0]:
                raise PlanError(f"The specs are for meshes {meshes[0]} and {other}. Give specs for one mesh.")
        return meshes[0]


def _is_sharding(spec: Any) -> bool:
    """True for a `jax.sharding.NamedSharding`."""
    return hasattr(spec, "mesh") and hasattr(spec, "spec")


def _leaves(tree: Any, path: str) -> Iterator[_Given]:
    """The specs in a tree, each with its path; what is None is left out."""
    if tree is None:
        return
    for key, child in _children(tree) or ():
        yield from _leaves(child, f"{path}/{key}" if path else key)
    if _children(tree) is None:
        yield _Given(path, tree)


def _children(tree: Any) -> list[tuple[str, Any]] | None:
    """The entries of a container by their keys in paths; None for a leaf.

    Planning knows no JAX: containers are what pytrees of parameters are made of.
    """
    if isinstance(tree, Mapping):
        return [(str(key), child) for key, child in cast("Mapping[Any, Any]", tree).items()]
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return list(zip(cast("Any", tree)._fields, cast("tuple[Any, ...]", tree), strict=True))
    if isinstance(tree, (tuple, list)):
        return [(str(i), child) for i, child in enumerate(cast("Sequence[Any]", tree))]
    if is_dataclass(tree) and not isinstance(tree, type):
        return [(field.name, getattr(tree, field.name)) for field in fields(tree)]
    return None


def _dims(name: str, spec: Any) -> tuple[Any, ...]:
    """The dims of a spec, of axes and None alone."""
    spec = spec.spec if _is_sharding(spec) else spec
    dims = tuple(spec) if hasattr(spec, "__iter__") and not isinstance(spec, str) else ("?",)
    entries = [axis for dim in dims for axis in (dim if isinstance(dim, tuple) else (dim,))]
    plain = all(axis is None or type(axis) is str for axis in entries) and "?" not in entries
    if not plain or getattr(spec, "unreduced", None) or getattr(spec, "reduced", None):
        raise PlanError(
            f"The spec of {name} is {spec!r}; give a PartitionSpec or a NamedSharding of whole sums, with None, an "
            "axis or a tuple of axes for each dim. Give None in its place where the planner may choose."
        )
    return dims
