"""Stage costs: every layer range on every submesh in every logical shape, equal stages solved once.

`StageCosts` answers for one step, cost model and restriction; solutions are kept by the stage's structure
(`StageView.signature`), so that repeated layers cost one solve.

On a 1-D logical mesh every op may use the axis for anything. On a 2-D mesh the first axis splits the batch (and may
split state, as ZeRO does) and the second everything else, as in Alpa: more freedom multiplies the strategies and has
bought nothing on the models tried.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from alpa_lite.graph.phases import StepGraph
from alpa_lite.inter_op.stage_dp import StageTable
from alpa_lite.intra_op.catalogue import Catalogue
from alpa_lite.intra_op.choice import remap
from alpa_lite.intra_op.shortage import Shortage, explain_shortage
from alpa_lite.intra_op.solve import StageSolution, solve_stage
from alpa_lite.intra_op.stage import StageView
from alpa_lite.layers import Layers, op_flops
from alpa_lite.mesh import LogicalMesh, Submesh, logical_shapes, submesh_kinds
from alpa_lite.pricing import Pricer
from alpa_lite.schedule import Schedule
from alpa_lite.strategies import FREE_CHOICE, AxisRole, Restriction, Split
from cost_models.cluster import Cluster
from cost_models.interface import CostModel

#: Axis names of the logical meshes of the search, by number of axes.
AXIS_NAMES = {1: ("x",), 2: ("data", "model")}

Kind = tuple[int, int, LogicalMesh]
"""Hosts and devices per host of a submesh, and the logical mesh over them."""


def free_restriction(mesh: LogicalMesh) -> Restriction:
    """What the search may do on a logical mesh."""
    if len(mesh.shape) == 1:
        return FREE_CHOICE
    roles = {"data": AxisRole.BATCH, "model": AxisRole.MODEL}
    return Restriction(roles=roles, optimizer=Split.MAY, parameters=Split.MAY)


@dataclass(frozen=True, kw_only=True)
class StageCosts:
    """Solves stages of one step on demand and remembers them."""

    step: StepGraph
    layers: Layers
    cost_model: CostModel
    restriction: Restriction | None = None
    progress: Callable[[str], None] = field(default=lambda _: None)
    _catalogues: dict[Kind, Catalogue] = field(default_factory=dict[Kind, Catalogue], repr=False)
    _solved: dict[tuple[object, Kind, int], tuple[StageView, StageSolution]] = field(
        default_factory=dict[tuple[object, Kind, int], tuple[StageView, StageSolution]], repr=False
    )

    def solution(
        self, first: int, last: int, submesh: Submesh, mesh: LogicalMesh, *, in_flight: int = 1
    ) -> StageSolution:
        """The best sharding of layers `first..last` on a logical mesh, within the memory of a device."""
        view = StageView(step=self.step, layers=self.layers, first=first, last=last)
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

    def _catalogue(self, kind: Kind, submesh: Submesh, mesh: LogicalMesh) -> Catalogue:
        if kind not in self._catalogues:
            pricer = Pricer(cost_model=self.cost_model, submesh=submesh, mesh=mesh)
            self._catalogues[kind] = Catalogue(pricer, self.restriction or free_restriction(mesh))
        return self._catalogues[kind]

    def shortage(self, first: int, last: int, submesh: Submesh, mesh: LogicalMesh, *, in_flight: int = 1) -> Shortage:
        """Why layers `first..last` do not fit on a logical mesh, and what would do."""
        view = StageView(step=self.step, layers=self.layers, first=first, last=last)
        catalogue = self._catalogue((submesh.num_hosts, submesh.devices_per_host, mesh), submesh, mesh)
        limit = float(self.cost_model.cluster.device.memory_bytes)
        return explain_shortage(view, catalogue, limit_bytes=limit, in_flight=in_flight)

    def leanest_shortage(self, first: int, last: int) -> Shortage | None:
        """The same where these layers come closest to fitting; None if they fit somewhere, or were not tried."""
        tried = [
            (solved.peak_bytes, solved.choice is not None, key)
            for key, (view, solved) in self._solved.items()
            if (view.first, view.last) == (first, last)
        ]
        if not tried or any(fits for _, fits, _ in tried):
            return None
        _, _, (_, kind, in_flight) = min(tried, key=lambda each: each[0])
        submesh = Submesh(first_device=0, num_hosts=kind[0], devices_per_host=kind[1])
        return self.shortage(first, last, submesh, kind[2], in_flight=in_flight)

    def least_peaks(self) -> dict[tuple[int, int], float]:
        """For the shortest stages tried the least bytes per device of any solution, feasible or not."""
        shortest = min((view.last - view.first for view, _ in self._solved.values()), default=0)
        least: dict[tuple[int, int], float] = {}
        for view, solved in self._solved.values():
            if view.last - view.first == shortest:
                key = (view.first, view.last)
                least[key] = min(solved.peak_bytes, least.get(key, float("inf")))
        return least


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """A logical shape, and how many micro-batches in flight the sharding must leave room for."""

    shape: tuple[int, ...]
    in_flight: int

    @property
    def mesh(self) -> LogicalMesh:
        """The logical mesh with the search's axis names."""
        return LogicalMesh(axis_names=AXIS_NAMES[len(self.shape)], shape=self.shape)


@dataclass(frozen=True, kw_only=True)
class StageOptions:
    """The table of the stage DP and what its indices mean: submesh kinds, and configurations of each."""

    table: StageTable
    kinds: tuple[tuple[int, int], ...]
    configurations: tuple[tuple[Configuration, ...], ...]


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


def configurations_of(costs: StageCosts, schedule: Schedule, kind: tuple[int, int]) -> tuple[Configuration, ...]:
    """The logical shapes of a submesh, each for the micro-batches in flight on the last stage and on the first of many.

    The fewest in flight come first.
    """
    shapes = [shape for shape in logical_shapes(*kind) if _batch_divides(costs.step, shape)]
    held = sorted({_in_flight(costs, schedule, following) for following in (0, costs.layers.num_layers - 1)})
    return tuple(Configuration(shape=s, in_flight=n) for n in held for s in shapes)


def _in_flight(costs: StageCosts, schedule: Schedule, following: int) -> int:
    """Micro-batches in flight on a stage that is followed by so many others."""
    return schedule.in_flight(0, following + 1, costs.step.num_microbatches)


def stage_options(costs: StageCosts, schedule: Schedule, inflow_seconds: NDArray[np.float64]) -> StageOptions:
    """Solve all stages that can occur. `inflow_seconds[i]`: time to receive what layer i reads from earlier layers."""
    cluster, num_layers = costs.cost_model.cluster, costs.layers.num_layers
    kinds = submesh_kinds(cluster.num_hosts, cluster.devices_per_host)
    configurations = tuple(configurations_of(costs, schedule, kind) for kind in kinds)
    fewest = _in_flight(costs, schedule, 0)
    size = (num_layers, num_layers, len(kinds), max(map(len, configurations)))
    seconds, following = np.full(size, np.inf), np.full(size, -1, dtype=int)
    shares = _flops_shares(costs.step, costs.layers)
    for first, last, k in product(range(num_layers), range(num_layers), range(len(kinds))):
        devices = kinds[k][0] * kinds[k][1]
        if last < first or not _worthwhile(cluster, first, last, num_layers, devices, shares[first : last + 1].sum()):
            continue
        for c, configuration in enumerate(configurations[k]):
            loose = configurations[k].index(Configuration(shape=configuration.shape, in_flight=fewest))
            if loose != c and following[first, last, k, loose] == num_layers - 1:
                continue  # the best sharding has room for all micro-batches anyway
            submesh = Submesh(first_device=0, num_hosts=kinds[k][0], devices_per_host=kinds[k][1])
            solution = costs.solution(first, last, submesh, configuration.mesh, in_flight=configuration.in_flight)
            if solution.choice is not None:
                seconds[first, last, k, c] = _seconds(costs, solution, float(inflow_seconds[first]))
                following[first, last, k, c] = _stages_that_may_follow(costs, schedule, solution)
    devices_of = tuple(hosts * devices for hosts, devices in kinds)
    table = StageTable(seconds=seconds, max_following_stages=following, submesh_devices=devices_of)
    return StageOptions(table=table, kinds=kinds, configurations=configurations)


def _worthwhile(cluster: Cluster, first: int, last: int, num_layers: int, devices: int, flops_share: float) -> bool:
    """All devices go with all layers; a part of the layers gets about its share of the devices."""
    whole = first == 0 and last == num_layers - 1
    if whole or devices == cluster.num_devices:
        return whole and devices == cluster.num_devices
    return cluster.shared_processor or balanced(flops_share, devices / cluster.num_devices)


def _seconds(costs: StageCosts, solution: StageSolution, inflow: float) -> float:
    """A stage's time per micro-batch: both passes, their dispatch, what comes in, and its part of the update."""
    launch = costs.cost_model.launch_seconds()
    loop = solution.forward_seconds + solution.backward_seconds + 2 * launch + 2 * inflow
    return loop + (solution.update_seconds + launch) / costs.step.num_microbatches


def _stages_that_may_follow(costs: StageCosts, schedule: Schedule, solution: StageSolution) -> int:
    """The most stages after this one whose micro-batches in flight still fit into memory here; -1 for none at all."""
    limit = float(costs.cost_model.cluster.device.memory_bytes)
    fits = (
        following
        for following in reversed(range(costs.layers.num_layers))
        if solution.bytes_in_flight(_in_flight(costs, schedule, following)) <= limit
    )
    return next(fits, -1)
