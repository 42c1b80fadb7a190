"""Stage costs: every layer range on every submesh in every logical shape, equal stages solved once.

`StageCosts` answers for one step, cost model and restriction; solutions are kept by the stage's structure
(`StageView.signature`), so that repeated layers cost one solve. A solution that was the best with more room is the best
with less, if it still fits: fewer micro-batches in flight are to be asked for first (`StageCosts._fits`).

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
from alpa_lite.pricing import Pricer, dispatch_seconds
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """A stage as it was solved: within so many bytes per device, with so many micro-batches in flight."""

    view: StageView
    kind: Kind
    in_flight: int
    limit_bytes: float
    solution: StageSolution


@dataclass(frozen=True, kw_only=True)
class StageCosts:
    """Solves stages of one step on demand and remembers them."""

    step: StepGraph
    layers: Layers
    cost_model: CostModel
    restriction: Restriction | None = None
    progress: Callable[[str], None] = field(default=lambda _: None)
    _catalogues: dict[Kind, Catalogue] = field(default_factory=dict[Kind, Catalogue], repr=False)
    _solved: dict[tuple[object, Kind], list[Solved]] = field(
        default_factory=dict[tuple[object, Kind], list[Solved]], repr=False
    )
    _views: dict[tuple[int, int], StageView] = field(default_factory=dict[tuple[int, int], StageView], repr=False)
    _alike: dict[object, object] = field(default_factory=dict[object, object], repr=False)

    def solution(
        self,
        first: int,
        last: int,
        submesh: Submesh,
        mesh: LogicalMesh,
        *,
        in_flight: int = 1,
        limit_bytes: float | None = None,
    ) -> StageSolution:
        """The best sharding of some layers on a logical mesh, within `limit_bytes` (None: the memory of a device)."""
        view, kind = self._view(first, last), (submesh.num_hosts, submesh.devices_per_host, mesh)
        limit = float(self.cost_model.cluster.device.memory_bytes) if limit_bytes is None else limit_bytes
        known = self._solved.setdefault((self._structure(view), kind), [])
        found = next((s for s in known if _fits(s, in_flight, limit)), None)
        if found is None:
            self.progress(f"layers {first}..{last} on {mesh}")
            catalogue = self._catalogue(kind, submesh, mesh)
            solution = solve_stage(view, catalogue, limit_bytes=limit, in_flight=in_flight)
            found = Solved(view=view, kind=kind, in_flight=in_flight, limit_bytes=limit, solution=solution)
            known.append(found)
        solved = found.solution
        if solved.choice is None:
            return solved
        peak = solved.peak_bytes if found.in_flight == in_flight else solved.bytes_in_flight(in_flight)
        return replace(solved, choice=remap(solved.choice, found.view, view), peak_bytes=peak)

    def _view(self, first: int, last: int) -> StageView:
        if (first, last) not in self._views:
            self._views[first, last] = StageView(step=self.step, layers=self.layers, first=first, last=last)
        return self._views[first, last]

    def _structure(self, view: StageView) -> object:
        """An object that stands for the signature of a view, which is long to hash."""
        if view not in self._alike:
            self._alike[view] = self._alike.setdefault(view.signature, object())
        return self._alike[view]

    def _catalogue(self, kind: Kind, submesh: Submesh, mesh: LogicalMesh) -> Catalogue:
        if kind not in self._catalogues:
            pricer = Pricer(cost_model=self.cost_model, submesh=submesh, mesh=mesh)
            self._catalogues[kind] = Catalogue(pricer, self.restriction or free_restriction(mesh))
        return self._catalogues[kind]

    def shortage(self, first: int, last: int, submesh: Submesh, mesh: LogicalMesh, *, in_flight: int = 1) -> Shortage:
        """Why layers `first..last` do not fit on a logical mesh, and what would do."""
        view = self._view(first, last)
        catalogue = self._catalogue((submesh.num_hosts, submesh.devices_per_host, mesh), submesh, mesh)
        limit = float(self.cost_model.cluster.device.memory_bytes)
        return explain_shortage(view, catalogue, limit_bytes=limit, in_flight=in_flight)

    def leanest_shortage(self, first: int, last: int) -> Shortage | None:
        """The same where these layers come closest to fitting; None if they fit somewhere, or were not tried."""
        tried = [s for s in self._all_solved() if (s.view.first, s.view.last) == (first, last)]
        if not tried or any(s.solution.choice is not None for s in tried):
            return None
        leanest = min(tried, key=lambda s: s.solution.peak_bytes)
        hosts, devices, mesh = leanest.kind
        submesh = Submesh(first_device=0, num_hosts=hosts, devices_per_host=devices)
        return self.shortage(first, last, submesh, mesh, in_flight=leanest.in_flight)

    def least_peaks(self) -> dict[tuple[int, int], float]:
        """For the shortest stages tried the least bytes per device of any solution, feasible or not."""
        shortest = min((s.view.last - s.view.first for s in self._all_solved()), default=0)
        least: dict[tuple[int, int], float] = {}
        for solved in self._all_solved():
            key = (solved.view.first, solved.view.last)
            if key[1] - key[0] == shortest:
                least[key] = min(solved.solution.peak_bytes, least.get(key, float("inf")))
        return least

    def _all_solved(self) -> list[Solved]:
        return [solved for alike in self._solved.values() for solved in alike]


def _fits(solved: Solved, in_flight: int, limit_bytes: float) -> bool:
    """True when the best with as much room or more keeps to less room: then nothing is better there."""
    if (solved.in_flight, solved.limit_bytes) == (in_flight, limit_bytes):
        return True
    roomier = solved.in_flight <= in_flight and solved.limit_bytes >= limit_bytes
    has_choice = solved.solution.choice is not None
    return roomier and has_choice and solved.solution.bytes_in_flight(in_flight) <= limit_bytes


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
    launch = dispatch_seconds(costs.cost_model.cluster)
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
