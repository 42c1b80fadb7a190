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
from alpa_lite.inter_op.sharding_demands import argument_pins, user_layout, user_mesh
from alpa_lite.inter_op.stage_costs import PlacedStage, StageCosts, StagePlace
from alpa_lite.intra_op.stage import NO_LAYOUT, GivenLayout
from alpa_lite.intra_op.strategies import AxisRole, BatchSplit, Restriction
from alpa_lite.plan.plan import Plan
from alpa_lite.planners.planner import Planner
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

    obeys_user_shardings = True

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
        asked = user_mesh(request.step_at(1, 0), request.user_shardings)
        if asked is not None and _wide(asked) != _wide(self.axes):
            raise PlanError(
                f'user_shardings="pin": the shardings of {request.function} are on the mesh {asked}, but the planner '
                f"is to use {dict(self.axes)}. Give the planner that mesh."
            )
        return plan_on_mesh(
            self.name, request, self.axes, restriction=restriction, pins=self.pins, outputs=self.outputs
        )


def plan_on_mesh(
    name: str,
    request: PlanRequest,
    axes: Mapping[str, int],
    *,
    restriction: Restriction,
    pins: Pins | None = None,
    outputs: Pins | None = None,
    layout: GivenLayout = NO_LAYOUT,
) -> Plan:
    """Return a plan of one stage on all devices, which form a mesh of these axes; see `OnMesh.plan`.

    `layout`: constraints on the values of `request.best_step((1,), loop_parts=0)` (`intra_op.stage`).
    """
    started = time.perf_counter()
    mesh, cluster = _mesh(name, request, axes), request.cluster
    step = request.best_step((1,), loop_parts=0)
    layers = make_layers(step, 1)
    pins = dict(pins or {})
    if request.user_shardings.mode == "pin":
        pins = {**argument_pins(step, request.user_shardings), **pins}
        layout = user_layout(step, axes) if layout is NO_LAYOUT else layout
    pinned = with_results(step, request.results, pins_on_mesh(step, pins, axes), outputs or {}, axes)
    costs = StageCosts(
        step=step,
        layers=layers,
        cost_model=request.cost_model,
        restriction=restriction,
        pins=pinned.inputs,
        outputs=pinned.outputs,
        layout=layout,
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
    stage = PlacedStage(first=0, last=0, submesh=submesh, mesh=mesh, solution=solution)
    staged = StagedStep(step=step, layers=layers, stages=[stage], schedule=OneFOneB())
    plan = assemble(name, request, staged, started)
    return replace(plan, stages=(replace(plan.stages[0], outputs=pinned.outputs),))


def _wide(axes: Mapping[str, int]) -> dict[str, int]:
    """Return the axes of more than one device."""
    return {axis: size for axis, size in axes.items() if size > 1}


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
