"""One stage on a logical mesh of the user, with named axes, some of which split the batch.

The integer program chooses the sharding of every op on it, as it does for the 1-D and 2-D meshes of the search. With
axes such as data × fsdp × model this is the mesh for which a GSPMD program would be annotated by hand.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from alpa_lite.errors import InfeasibleError, PlanError
from alpa_lite.inter_op.assembly import StagedStep, assemble
from alpa_lite.inter_op.joint.what_would_fit import show_bytes, show_shortage
from alpa_lite.inter_op.pins import Pins, check_results, pins_on_mesh, with_results
from alpa_lite.inter_op.plan_request import PlanRequest
from alpa_lite.inter_op.stage_costs import StageConstraints, StageCosts, StagePlace
from alpa_lite.intra_op.stage import NO_LAYOUT, GivenLayout
from alpa_lite.intra_op.strategies import AxisRole, BatchSplit, Restriction
from alpa_lite.plan.plan import Plan
from alpa_lite.planners.planner import Planner
from alpa_lite.program.phases import StepGraph
from alpa_lite.schedule import OneFOneB
from alpa_lite.sharding.meshes import LogicalMesh, Submesh
from alpa_lite.step.clustering import make_layers


@dataclass(frozen=True, kw_only=True)
class OnMesh(Planner):
    """One stage on all devices, which form a mesh with axes of your own; the integer program chooses all shardings.

    Attributes:
        axes: devices per axis, the last one over neighbouring devices; at most four of more than one device.
        batch: axes that split the batch wherever they divide it, and may split state (ZeRO). The other axes split
            whatever is best, the batch included.
        pins: given shardings of arguments over these axes, by path, as in `Auto`.
        outputs: the same for results of the step, by path (`0/params/w`, or "" for a single one). Without them state is
            returned as it came in, and other results as they are computed.
    """

    axes: Mapping[str, int] = field(hash=False)
    batch: tuple[str, ...] = field(default=())
    pins: Pins = field(default_factory=dict[str, Sequence[Any]], hash=False)
    outputs: Pins = field(default_factory=dict[str, Sequence[Any]], hash=False)

    @property
    def name(self) -> str:
        """The axes, such as `mesh data=2 × model=4`."""
        return "mesh " + " × ".join(f"{name}={size}" for name, size in self.axes.items())

    def plan(self, request: PlanRequest) -> Plan:
        """Return the plan.

        Raises `PlanError` if the axes do not cover the cluster, `InfeasibleError` if nothing fits.
        """
        if unknown := [axis for axis in self.batch if axis not in self.axes]:
            raise PlanError(f"batch names the axes {unknown}, but the mesh has {list(self.axes)}.")
        check_results(self.outputs, request.results)
        roles = {axis: AxisRole.BATCH for axis in self.batch if self.axes[axis] > 1}
        restriction = Restriction(roles=roles, optimizer=BatchSplit.MAY, parameters=BatchSplit.MAY)
        constraints = MeshConstraints(restriction=restriction, pins=self.pins, outputs=self.outputs)
        return plan_on_mesh(self.name, request, self.axes, constraints)


@dataclass(frozen=True, kw_only=True)
class MeshConstraints:
    """The restrictions of a plan on a mesh of given axes.

    Attributes:
        restriction: the use of each axis.
        pins, outputs: as in `OnMesh`.
        layout: constraints on the values of `request.best_step((1,), loop_parts=0)` (`intra_op.stage`).
    """

    restriction: Restriction
    pins: Pins = field(default_factory=dict[str, Sequence[Any]])
    outputs: Pins = field(default_factory=dict[str, Sequence[Any]])
    layout: GivenLayout = NO_LAYOUT

    def on(self, request: PlanRequest, step: StepGraph, axes: Mapping[str, int]) -> StageConstraints:
        """Return the constraints on the values of a step. Raises `PlanError` for pins that do not fit."""
        inputs = pins_on_mesh(step, self.pins, axes)
        pinned = with_results(step, request.results, inputs, self.outputs, axes)
        return StageConstraints(
            restriction=self.restriction, pins=pinned.inputs, outputs=pinned.outputs, layout=self.layout
        )


def plan_on_mesh(name: str, request: PlanRequest, axes: Mapping[str, int], constraints: MeshConstraints) -> Plan:
    """Return a plan of one stage on all devices, which form a mesh of these axes; see `OnMesh.plan`."""
    started = time.perf_counter()
    mesh, cluster = _mesh(name, request, axes), request.cluster
    step = request.best_step((1,), loop_parts=0)
    layers = make_layers(step, 1)
    given = constraints.on(request, step, axes)
    costs = StageCosts(
        step=step,
        layers=layers,
        cost_model=request.cost_model,
        constraints=given,
        progress=request.progress,
    )
    submesh = Submesh(first_device=0, num_hosts=cluster.num_hosts, devices_per_host=cluster.devices_per_host)
    place = StagePlace(0, 0, submesh, mesh)
    solution = costs.solution(place)
    if solution.choice is None:
        why = costs.shortage(place) if request.advise else None
        raise InfeasibleError(
            f"{name} does not fit: it needs at least {show_bytes(solution.peak_bytes)} per device, but "
            f"{cluster.device.name} has {show_bytes(cluster.device.memory_bytes)}. {show_shortage(why)}Use more "
            "micro-batches, more hosts, or al.planners.Auto, which also tries pipelines."
        )
    staged = StagedStep(step=step, layers=layers, stages=[place.with_solution(solution)], schedule=OneFOneB())
    plan = assemble(name, request, staged, started)
    return replace(plan, stages=(replace(plan.stages[0], outputs=given.outputs),))


def _mesh(name: str, request: PlanRequest, axes: Mapping[str, int]) -> LogicalMesh:
    total = request.cluster.num_devices
    if not axes or prod(axes.values()) != total:
        raise PlanError(
            f"The axes {dict(axes)} have {prod(axes.values())} devices, but {request.cluster.name} has {total}. Choose "
            f"sizes whose product is {total}."
        )
    # An axis of one device splits nothing; with none left, the first stands for all.
    wide = {axis: size for axis, size in axes.items() if size > 1} or dict([*axes.items()][:1])
    if len(wide) > 4:
        raise PlanError(
            f"{name} has {len(wide)} axes. The strategies grow exponentially with their number: use at most 4."
        )
    return LogicalMesh(axis_names=tuple(wide), shape=tuple(wide.values()))
