"""Stage costs: every layer range on every submesh in every logical shape, equal stages solved once.

`StageCosts` answers for one step, cost model and restriction; solutions are kept by the stage's structure
(`StageView.signature`), so that repeated layers cost one solve.

On a 1-D logical mesh every op may use the axis for anything. On a 2-D mesh the first axis splits the batch (and may
split state, as ZeRO does) and the second everything else, as in Alpa: more freedom multiplies the strategies and has
bought nothing on the models tried.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from alpa_lite.graph.phases import StepGraph
from alpa_lite.inter_op.stage_dp import StageTable
from alpa_lite.intra_op.build import remap
from alpa_lite.intra_op.catalogue import Catalogue
from alpa_lite.intra_op.solve import StageSolution, solve_stage
from alpa_lite.intra_op.stage import StageView
from alpa_lite.layers import Layers, op_flops
from alpa_lite.mesh import LogicalMesh, Submesh, logical_shapes, submesh_kinds
from alpa_lite.pricing import Pricer
from alpa_lite.strategies import FREE_CHOICE, AxisRole, Restriction
from cost_models.interface import CostModel

#: Axis names of the logical meshes of the search, by number of axes.
AXIS_NAMES = {1: ("x",), 2: ("data", "model")}


def free_restriction(mesh: LogicalMesh) -> Restriction:
    """What the search may do on a logical mesh."""
    if len(mesh.shape) == 1:
        return FREE_CHOICE
    roles = {"data": AxisRole.BATCH, "model": AxisRole.MODEL}
    return Restriction(roles=roles, shard_optimizer=True, shard_parameters=True)


@dataclass(frozen=True, kw_only=True)
class StageCosts:
    """Solves stages of one step on demand and remembers them."""

    step: StepGraph
    layers: Layers
    aliases: Mapping[int, int]
    cost_model: CostModel
    restriction: Restriction | None = None
    progress: Callable[[str], None] = field(default=lambda _: None)
    _catalogues: dict[object, Catalogue] = field(default_factory=dict[object, Catalogue], repr=False)
    _solved: dict[object, tuple[StageView, StageSolution]] = field(
        default_factory=dict[object, tuple[StageView, StageSolution]], repr=False
    )

    def solution(
        self, first: int, last: int, submesh: Submesh, mesh: LogicalMesh, *, in_flight: int = 1
    ) -> StageSolution:
        """The best sharding of layers `first..last` on a logical mesh, within the memory of a device."""
        view = StageView(step=self.step, layers=self.layers, first=first, last=last, aliases=self.aliases)
        kind = (submesh.num_hosts, submesh.devices_per_host, mesh)
        key = (view.signature, kind, in_flight)
        if key not in self._solved:
            self.progress(f"layers {first}..{last} on {mesh}")
            limit = float(self.cost_model.cluster.device.memory_bytes)
            catalogue = self._catalogue(kind, submesh, mesh)
            solved = solve_stage(view, catalogue, limit_bytes=limit, in_flight=in_flight)
            self._solved[key] = view, solved
        origin, solved = self._solved[key]
        if solved.choice is None:
            return solved
        return replace(solved, choice=remap(solved.choice, origin, view))

    def _catalogue(self, kind: object, submesh: Submesh, mesh: LogicalMesh) -> Catalogue:
        if kind not in self._catalogues:
            pricer = Pricer(cost_model=self.cost_model, submesh=submesh, mesh=mesh)
            self._catalogues[kind] = Catalogue(pricer, self.restriction or free_restriction(mesh))
        return self._catalogues[kind]

    def least_peaks(self) -> dict[int, float]:
        """For each single layer the least bytes per device of any solution tried, feasible or not."""
        least: dict[int, float] = {}
        for view, solved in self._solved.values():
            if view.first == view.last:
                least[view.first] = min(solved.peak_bytes, least.get(view.first, float("inf")))
        return least


@dataclass(frozen=True, kw_only=True)
class StageOptions:
    """The table of the stage DP and what its indices mean."""

    table: StageTable
    kinds: tuple[tuple[int, int], ...]
    shapes: tuple[tuple[tuple[int, ...], ...], ...]

    def mesh(self, kind: int, configuration: int) -> LogicalMesh:
        """The logical mesh of a configuration of a submesh kind."""
        return mesh_of(self.shapes[kind][configuration])


#: A stage may have at most this many times its devices' share of the FLOPs, and at least the inverse of its square.
IMBALANCE = 2.0


def balanced(flops_share: float, device_share: float) -> bool:
    """True for stages that can be part of a good pipeline: the slowest stage sets its pace."""
    return device_share / IMBALANCE**2 <= flops_share <= device_share * IMBALANCE


def _flops_shares(step: StepGraph, layers: Layers) -> np.ndarray:
    """Each layer's part of the FLOPs of the loop."""
    totals = np.zeros(layers.num_layers)
    for flops, layer, phase in zip(op_flops(step), layers.of_op, step.phases, strict=True):
        if layer is not None and phase.in_loop:
            totals[layer] += flops
    return totals / max(1.0, totals.sum())


def _batch_divides(step: StepGraph, shape: tuple[int, ...]) -> bool:
    """A 2-D mesh needs a batch that its first axis can split."""
    if len(shape) == 1:
        return True
    return step.batch_size is not None and step.batch_size // step.num_microbatches % shape[0] == 0


def mesh_of(shape: tuple[int, ...]) -> LogicalMesh:
    """A logical mesh with the search's axis names."""
    return LogicalMesh(axis_names=AXIS_NAMES[len(shape)], shape=shape)


def stage_options(costs: StageCosts, num_microbatches: int, inflow_seconds: np.ndarray) -> StageOptions:
    """Solve all stages that can occur. `inflow_seconds[i]`: time to receive what layer i reads from earlier layers."""
    cluster, num_layers = costs.cost_model.cluster, costs.layers.num_layers
    kinds = submesh_kinds(cluster.num_hosts, cluster.devices_per_host)
    shapes = tuple(
        tuple(shape for shape in logical_shapes(hosts, devices) if _batch_divides(costs.step, shape))
        for hosts, devices in kinds
    )
    width = max(map(len, shapes))
    size = (num_layers, num_layers, len(kinds), width)
    seconds, following = np.full(size, np.inf), np.full(size, -1, dtype=int)
    shares = _flops_shares(costs.step, costs.layers)
    launch, capacity = costs.cost_model.launch_seconds(), float(cluster.device.memory_bytes)
    for first in range(num_layers):
        for last in range(first, num_layers):
            for k, (hosts, devices) in enumerate(kinds):
                everything = hosts * devices == cluster.num_devices
                if everything != (first == 0 and last == num_layers - 1):
                    continue
                share = hosts * devices / cluster.num_devices
                if not cluster.shared_processor and not balanced(shares[first : last + 1].sum(), share):
                    continue
                submesh = Submesh(first_device=0, num_hosts=hosts, devices_per_host=devices)
                for c, shape in enumerate(shapes[k]):
                    s = costs.solution(first, last, submesh, mesh_of(shape))
                    if s.choice is None:
                        continue
                    seconds[first, last, k, c] = (
                        s.forward_seconds
                        + s.backward_seconds
                        + 2 * launch
                        + 2 * inflow_seconds[first]
                        + (s.update_seconds + launch) / num_microbatches
                    )
                    spare = capacity - s.bytes_in_flight(0)
                    held = num_layers if s.activation_bytes <= 0 else int(spare // s.activation_bytes)
                    following[first, last, k, c] = min(held, num_layers) - 1
    table = StageTable(
        seconds=seconds,
        max_following_stages=following,
        submesh_devices=tuple(hosts * devices for hosts, devices in kinds),
    )
    return StageOptions(table=table, kinds=kinds, shapes=shapes)
