"""The search for stages: the stage DP on estimates that become costs where they matter.

    estimate    of a stage: the sum of what its layers take, each solved by itself with memory to spare    `_estimate`
    search      the best stages by what is known; those that were only estimated are solved; again, until
                the best stages are solved ones                                                            `run`

Solving a whole stage is what takes time; few of those that can occur are ever near the best. What is solved takes its
memory into account, and what its layers hand to each other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations_with_replacement

import numpy as np
from numpy.typing import NDArray

from alpa_lite.graph.phases import StepGraph
from alpa_lite.inter_op.stage_costs import AXIS_NAMES, StageCosts
from alpa_lite.inter_op.stage_dp import StageChoice, StageTable, solve
from alpa_lite.intra_op.problem import Status
from alpa_lite.intra_op.solve import StageSolution
from alpa_lite.layers import Layers, op_flops
from alpa_lite.mesh import LogicalMesh, Submesh, logical_shapes, submesh_kinds
from alpa_lite.pricing import dispatch_seconds
from alpa_lite.schedule import Schedule
from cost_models.cluster import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """A logical shape, and how many micro-batches in flight the sharding must leave room for."""

    shape: tuple[int, ...]
    in_flight: int

    @property
    def mesh(self) -> LogicalMesh:
        """The logical mesh with the search's axis names."""
        return LogicalMesh(axis_names=AXIS_NAMES[len(self.shape)], shape=self.shape)


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


def _in_flight(costs: StageCosts, schedule: Schedule, following: int) -> int:
    """Micro-batches in flight on a stage that is followed by so many others."""
    return schedule.in_flight(0, following + 1, costs.step.num_microbatches)


class StageSearch:
    """The stage DP on one step: estimates become costs where its answer depends on them; see the module."""

    def __init__(self, costs: StageCosts, schedule: Schedule, inflow_seconds: NDArray[np.float64]) -> None:
        """Estimate all stages that can occur. `inflow_seconds[i]`: to receive what layer i reads from earlier ones."""
        self.costs, self.schedule, self.inflow_seconds = costs, schedule, inflow_seconds
        cluster, self.num_layers = costs.cost_model.cluster, costs.layers.num_layers
        self.kinds = submesh_kinds(cluster.num_hosts, cluster.devices_per_host)
        self.shapes = [
            [shape for shape in logical_shapes(*kind) if _batch_divides(self.costs.step, shape)] for kind in self.kinds
        ]
        # Micro-batches in flight on the last stage, and on the first of many.
        self.held = sorted({_in_flight(self.costs, self.schedule, n) for n in (0, self.num_layers - 1)})
        size = (self.num_layers, self.num_layers, len(self.kinds), max(map(len, self.shapes)) * len(self.held))
        self.seconds, self.following = np.full(size, np.inf), np.full(size, -1, dtype=int)
        self.solved = np.zeros(size, dtype=np.bool_)
        self._estimate(cluster)

    def run(self) -> StageChoice:
        """The best stages, all of them solved."""
        cluster = self.costs.cost_model.cluster
        devices = tuple(hosts * per_host for hosts, per_host in self.kinds)
        while True:
            found = solve(
                StageTable(seconds=self.seconds, max_following_stages=self.following, submesh_devices=devices),
                num_devices=cluster.num_devices,
                num_microbatches=self.costs.step.num_microbatches,
                serialized=cluster.shared_processor,
            )
            entries = [(s.first_layer, s.last_layer, s.submesh, s.configuration) for s in found.stages]
            estimated = [entry for entry in entries if not self.solved[entry]]
            if not estimated:
                return found
            for entry in estimated:
                self._solve(*entry)

    def configuration(self, kind: int, number: int) -> Configuration:
        """What a configuration of a kind of submesh stands for: all shapes with the fewest in flight come first."""
        shapes = self.shapes[kind]
        return Configuration(shape=shapes[number % len(shapes)], in_flight=self.held[number // len(shapes)])

    def solution(self, first: int, last: int, kind: int, number: int) -> StageSolution:
        """The best sharding of a stage in a configuration."""
        chosen = self.configuration(kind, number)
        return self.costs.solution(first, last, self._submesh(kind), chosen.mesh, in_flight=chosen.in_flight)

    def _submesh(self, kind: int) -> Submesh:
        return Submesh(first_device=0, num_hosts=self.kinds[kind][0], devices_per_host=self.kinds[kind][1])

    def _estimate(self, cluster: Cluster) -> None:
        """A stage takes about what its layers take by themselves, with memory to spare."""
        shares = np.concatenate([[0.0], np.cumsum(_flops_shares(self.costs.step, self.costs.layers))])
        for k, (hosts, per_host) in enumerate(self.kinds):
            ranges = [
                (first, last)
                for first, last in combinations_with_replacement(range(self.num_layers), 2)
                if _worthwhile(
                    cluster, first, last, self.num_layers, hosts * per_host, float(shares[last + 1] - shares[first])
                )
            ]
            layers = sorted({layer for first, last in ranges for layer in range(first, last + 1)})
            for c in range(len(self.shapes[k])):
                alone = np.full(self.num_layers, np.inf)
                for layer in layers:
                    mesh = self.configuration(k, c).mesh
                    found = self.costs.solution(layer, layer, self._submesh(k), mesh, limit_bytes=math.inf)
                    if found.choice is not None:
                        alone[layer] = _work_seconds(self.costs, found)
                for first, last in ranges:
                    estimate = self._overhead(first) + alone[first : last + 1].sum()
                    if np.isfinite(estimate):
                        self.seconds[first, last, k, c] = estimate
                        self.following[first, last, k, c] = self.num_layers - 1

    def _overhead(self, first: int) -> float:
        """Seconds per micro-batch to dispatch a stage's tasks and to receive what comes in, on both ways."""
        count = 2 + 1 / self.costs.step.num_microbatches
        return count * dispatch_seconds(self.costs.cost_model.cluster) + 2 * float(self.inflow_seconds[first])

    def _solve(self, first: int, last: int, kind: int, number: int) -> None:
        """Put the cost of a stage in the place of its estimate."""
        entry, shapes = (first, last, kind, number), len(self.shapes[kind])
        solution = self.solution(*entry)
        self.solved[entry] = True
        self.seconds[entry], self.following[entry] = np.inf, -1
        if solution.status is Status.INFEASIBLE:
            # Nor does what holds more layers fit, or more micro-batches in flight.
            around = np.s_[: first + 1, last:, kind, number::shapes]
            self.seconds[around], self.following[around], self.solved[around] = np.inf, -1, True
        if solution.choice is None:
            return
        self.seconds[entry] = self._overhead(first) + _work_seconds(self.costs, solution)
        self.following[entry] = _stages_that_may_follow(self.costs, self.schedule, solution)
        tighter = (first, last, kind, number + shapes)
        if number < shapes and len(self.held) > 1 and self.following[entry] < self.num_layers - 1:
            # With room for more micro-batches it is no faster.
            self.seconds[tighter], self.following[tighter] = self.seconds[entry], self.num_layers - 1


def _worthwhile(cluster: Cluster, first: int, last: int, num_layers: int, devices: int, flops_share: float) -> bool:
    """All devices go with all layers; a part of the layers gets about its share of the devices."""
    whole = first == 0 and last == num_layers - 1
    if whole or devices == cluster.num_devices:
        return whole and devices == cluster.num_devices
    return cluster.shared_processor or balanced(flops_share, devices / cluster.num_devices)


def _work_seconds(costs: StageCosts, solution: StageSolution) -> float:
    """What a stage does per micro-batch: both passes, and its part of the update."""
    loop = solution.forward_seconds + solution.backward_seconds
    return loop + solution.update_seconds / costs.step.num_microbatches


def _stages_that_may_follow(costs: StageCosts, schedule: Schedule, solution: StageSolution) -> int:
    """The most stages after this one whose micro-batches in flight still fit into memory here; -1 for none at all."""
    limit = float(costs.cost_model.cluster.device.memory_bytes)
    fits = (
        following
        for following in reversed(range(costs.layers.num_layers))
        if solution.bytes_in_flight(_in_flight(costs, schedule, following)) <= limit
    )
    return next(fits, -1)
