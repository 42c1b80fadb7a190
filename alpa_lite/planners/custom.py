"""Custom: the placement that the user already has, as `PartitionSpec`s of arguments and results; the rest is found.

    al.planners.Custom(mesh={"data": 2, "model": 4}, in_specs=(state_specs, P("data")))      as jax.jit(in_shardings=…)
    al.planners.Custom(mesh=mesh, in_specs=…, out_specs=(state_specs, P()))         … and as jax.jit(out_shardings=…)
    al.planners.Custom(mesh=mesh, rules=[(r"w_up$", P(None, "model")), (r"w_down$", P("model"))])

It is `OnMesh` with these arrays pinned. How the ops inside are split is chosen by the integer program, where XLA's
partitioner would propagate the placement of the arguments. State keeps its placement from step to step, and other
results come in the placement that they are computed in, where `out_specs` does not say otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from alpa_lite.errors import PlanError
from alpa_lite.inter_op.plan_request import PlanRequest
from alpa_lite.plan.plan import Plan
from alpa_lite.planners.data_parallel import renamed
from alpa_lite.planners.on_mesh import OnMesh
from alpa_lite.planners.planner import Planner
from alpa_lite.planners.spec_trees import by_path, dims_of, meshes


@dataclass(frozen=True, kw_only=True)
class Custom(Planner):
    """Arguments lie as they are told to, and results come as they are told to.

    Attributes:
        mesh: devices per axis, or a `jax.sharding.Mesh`, of which names and sizes count: the devices are those of the
            cluster in their order. None: the mesh of the `NamedSharding`s.
        in_specs: a tuple with one entry per positional argument that is not static, or a mapping from argument names.
            An entry is a `PartitionSpec` or `NamedSharding`, for the whole argument, or a tree of such, like the
            argument or a prefix of it. None leaves the choice to the planner.
        out_specs: one such entry for what the step returns: a spec for all of it, or a tree like it or a prefix of it.
            State whose argument has no spec of its own goes in as it comes out.
        rules: pairs of a regular expression and a `PartitionSpec`: arguments that `in_specs` leaves open, with more
            than one element, get the spec of the first expression that is found in their path (`state/params/w`).
        batch: axes that split nothing but the batch, and state; see `OnMesh`. The others are as free as they can be.
    """

    mesh: Any = field(default=None, hash=False)
    in_specs: Any = field(default=(), hash=False)
    out_specs: Any = field(default=None, hash=False)
    rules: Sequence[tuple[str, Any]] = field(default=(), hash=False)
    batch: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """For tables."""
        return "custom"

    def plan(self, request: PlanRequest) -> Plan:
        """Raises `PlanError` when a spec fits no array or not its shape, or the mesh does not cover the cluster."""
        step = request.step_at(1, 0)
        arrays = {
            step.graph.values[v].name: step.graph.values[v].num_elements
            for v, part in zip(step.graph.inputs, step.input_parts, strict=True)
            if part.leaf < request.num_arguments
        }
        trees = self._trees(request)
        pins = by_path("in_specs", trees, [*arrays], request.arguments)
        pins |= self._by_rules([name for name, size in arrays.items() if name not in pins and size > 1])
        returned = by_path("out_specs", self.out_specs, request.results)
        found = OnMesh(
            axes=self._axes(trees),
            batch=self.batch,
            pins={name: dims_of(name, spec) for name, spec in pins.items()},
            outputs={name: dims_of(f"result {name}", spec) for name, spec in returned.items()},
        )
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

    def _axes(self, trees: Mapping[str, Any]) -> Mapping[str, int]:
        found = meshes((trees, self.out_specs))
        if self.mesh is not None:
            found.append(dict(getattr(self.mesh, "shape", self.mesh)))
        if not found:
            raise PlanError('Specs need a mesh to name axes of: give mesh={"data": 2, "model": 4}, or NamedShardings.')
        for other in found[1:]:
            if other != found[0]:
                raise PlanError(f"The specs are for meshes {found[0]} and {other}. Give specs for one mesh.")
        return found[0]
