"""ColocRL: the device of each group of ops, found by a policy network that is trained on the seconds of placements.

    groups       branches of the forward pass, at most so many; or what the user places together      `colocated_groups`
    embedding    of a group: share of each primitive among its ops; logarithms of the dims of its largest results; which
                 groups it reads, and which read it                                                   `embeddings`
    reward       seconds of a step by a placement, simulated (`DevicePlacements`) or measured on devices
    search       REINFORCE                                                                            `learn_placement`
    plan         every group is a stage on one device, without micro-batches; branches on different devices overlap

The fastest placements of the search are priced like every plan, and the fastest of these that fits is the plan. Those
on a single device of each kind are among them, so that a plan never takes longer than one device does, if that has
room. Of measured placements the fastest is the plan, whatever its price.

Mirhoseini et al., Device Placement Optimization with Reinforcement Learning (ICML 2017).
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from alpa_lite.errors import AlpaLiteError, InfeasibleError, PlanError
from alpa_lite.inter_op.assembly import StagedStep, assembled, bytes_over, schedule_for, too_large
from alpa_lite.inter_op.device_placement import Placement, device_placements
from alpa_lite.inter_op.learned_placement import LearnedPlacement, Reinforce, RewardFunction, learn_placement
from alpa_lite.inter_op.loop_cuts import natural_layers
from alpa_lite.inter_op.placement_policy import Floats
from alpa_lite.inter_op.plan_request import PlanRequest
from alpa_lite.inter_op.solved_stages import PlacedStage, StagePlace
from alpa_lite.inter_op.stage_costs import StageCosts
from alpa_lite.plan.plan import Plan
from alpa_lite.planners.planner import Planner
from alpa_lite.program.phases import Phase, StepGraph
from alpa_lite.schedule import Sequential
from alpa_lite.sharding.meshes import LogicalMesh, Submesh
from alpa_lite.step.colocation import ColocatedGroups, colocated_groups
from alpa_lite.step.planned_step import planned_step
from alpa_lite.text import show_count, show_seconds

PRICED = 4
"""Of the placements of a search, the number of the fastest that are priced as plans; more, while none of them fits."""

MOST_PRICED = 32
"""The largest number of placements that are priced as plans."""

_OUTPUTS, _DIMS = 5, 5
"""The number of results of a group in its embedding, and of dims of each (the published controller's)."""


@dataclass(frozen=True, kw_only=True)
class ColocRL(Planner):
    """Each group of ops on one device, by a policy network trained with REINFORCE; no micro-batches.

    Attributes:
        groups: the largest number of groups, or beginnings of argument paths, such as `("params/encoder",
            "params/decoder")`: groups that read arguments with one of these paths are placed together.
        reward: the seconds of a placement, as "simulated", or as "measured" on the devices of this process.
        steps: number of gradient steps.
        samples: placements sampled for each step.
        hidden: size of the states of the policy network (published: 512).
        learning_rate: of Adam (published: 0.1, with which so small a network learns little).
        shape_reward: what seconds count as: their square root, themselves ("identity"), or a logarithm.
        seed: seed of all randomness; the same seed gives the same plan.
    """

    groups: int | tuple[str, ...] = 16
    reward: Literal["simulated", "measured"] = "simulated"
    steps: int = 200
    samples: int = 10
    hidden: int = 64
    learning_rate: float = 0.003
    shape_reward: Literal["sqrt", "identity", "log"] = "sqrt"
    seed: int = 0

    @property
    def name(self) -> str:
        """Name for tables."""
        return "ColocRL"

    def plan(self, request: PlanRequest) -> Plan:
        """Return the fastest plan of the search that fits.

        Raises:
            InfeasibleError: no placement that was tried fits.
            PlanError: the groups cannot be made, or the reward cannot be measured.
        """
        started = time.perf_counter()
        self._check(request)
        search = _Placing.of(request, self._groups(request))
        learned = self._learned(request, search)
        plans, error = list[Plan](), None
        # What was measured is not compared with prices.
        firsts = search.first_devices if self.reward == "simulated" else ()
        one_device = [(first,) * search.num_sets for first in firsts]
        tried = dict.fromkeys((*one_device, *(placement for placement, _ in learned.ranked)))
        for placement in [*tried][: MOST_PRICED + len(one_device)]:
            plan = search.plan(self.name, placement, started)
            if not bytes_over(plan):
                plans.append(plan)
            else:
                error = error or too_large(plan)
            if len(plans) == PRICED + len(one_device):
                break
        if not plans:
            raise InfeasibleError(
                f"{self.name} does not fit: {show_count(learned.num_failed, 'placement')} that were tried need more "
                f"memory than a device has. {error} Ask for more groups, or use al.planners.FSDP."
            )
        best = plans[0] if self.reward == "measured" else min(plans, key=lambda plan: plan.prediction.step_seconds)
        return replace(best, notes=(*best.notes, *self._notes(learned, search, best)))

    def _check(self, request: PlanRequest) -> None:
        least = {"steps": 1, "samples": 1, "hidden": 1}
        for name, smallest in least.items():
            if getattr(self, name) < smallest:
                raise PlanError(f"{name} = {getattr(self, name)} was asked for. Ask for at least {smallest}.")
        if self.reward == "measured" and request.measure is None:
            raise PlanError(
                f"{self.name} was asked to measure steps, but there are no devices to run them on. Plan with the real "
                'arguments on the devices of this process, or use reward="simulated".'
            )

    def _groups(self, request: PlanRequest) -> tuple[StepGraph, ColocatedGroups]:
        """Return the step without micro-batches, with its loops in parts, and its groups."""
        cut = natural_layers(request, (1,), range(1, request.cluster.num_devices + 1))
        most, names = (self.groups, ()) if isinstance(self.groups, int) else (ColocRL.groups, self.groups)
        assert isinstance(most, int)
        groups = colocated_groups(cut.step, most, names)
        # Groups that run `jax.checkpoint` read values that they compute again themselves.
        planned = planned_step(cut.step, groups.layers.of_op, ())
        return planned.step, replace(groups, layers=replace(groups.layers, of_op=planned.of_op))

    def _learned(self, request: PlanRequest, search: _Placing) -> LearnedPlacement:
        options = Reinforce(
            steps=self.steps,
            samples=self.samples,
            hidden=self.hidden,
            learning_rate=self.learning_rate,
            reward=RewardFunction(self.shape_reward),
            seed=self.seed,
        )

        def told(step: int, least: float) -> None:
            best = "none fits so far" if math.isinf(least) else f"best {show_seconds(least)}"
            request.progress(f"{self.name}: step {step + 1} of {self.steps}, {best}")

        seconds_of = search.simulated_seconds() if self.reward == "simulated" else search.measured_seconds(self.name)
        with request.progress.during("placement", f"{self.name}: placing {show_count(search.num_sets, 'group')}"):
            return learn_placement(search.embeddings(), request.cluster.num_devices, seconds_of, options, told)

    def _notes(self, learned: LearnedPlacement, search: _Placing, best: Plan) -> list[str]:
        used, total = len({stage.submesh for stage in best.stages}), search.request.cluster.num_devices
        seen = len(learned.ranked) + learned.num_failed
        tried = f"{show_count(seen, 'placement')} of {show_count(search.num_sets, 'group')} were tried"
        failed = f", of which {learned.num_failed} do not fit" if learned.num_failed else ""
        return [f"{tried}{failed}; the best uses {used} of {show_count(total, 'device')}, without micro-batches"]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Placing:
    """A step in groups, each with its cost on one device of each kind."""

    request: PlanRequest
    step: StepGraph
    groups: ColocatedGroups
    stages: tuple[tuple[PlacedStage, ...], ...]
    first_devices: tuple[int, ...]

    @staticmethod
    def of(request: PlanRequest, grouped: tuple[StepGraph, ColocatedGroups]) -> _Placing:
        """Return the groups, solved on one device each."""
        step, groups = grouped
        cluster = request.cluster
        ends = np.cumsum([0, *(group.num_hosts for group in cluster.groups[:-1])]) * cluster.devices_per_host
        firsts = tuple(int(end) for end in ends)
        costs = StageCosts(
            step=step,
            layers=groups.layers,
            cost_model=request.cost_model,
            cost_model_for=request.cost_model_for,
            progress=request.progress,
        )

        def solved(group: int, device: int) -> PlacedStage:
            place = StagePlace(group, group, _device(device), _ONE)
            # Whether what lies on a device fits is decided for all of it together.
            return place.with_solution(costs.solution(place, limit_bytes=math.inf))

        stages = tuple(tuple(solved(g, first) for g in range(groups.layers.num_layers)) for first in firsts)
        return _Placing(request=request, step=step, groups=groups, stages=stages, first_devices=firsts)

    @property
    def num_sets(self) -> int:
        """The number of sets of groups that are placed."""
        return max(self.groups.together) + 1

    def plan(self, name: str, placement: Placement, started: float) -> Plan:
        """Return the plan of a placement of the sets, whether it fits or not."""
        devices = [placement[group] for group in self.groups.together]
        stages = [self._on(group, device) for group, device in enumerate(devices)]
        # Processors are numbered in the order of their first group.
        number = {device: n for n, device in enumerate(dict.fromkeys(devices))}
        schedule = Sequential(processors=tuple(number[device] for device in devices))
        staged = StagedStep(
            step=self.step,
            layers=self.groups.layers,
            stages=stages,
            schedule=schedule_for(self.step, schedule),
        )
        return assembled(name, self.request, staged, started)

    def _on(self, group: int, device: int) -> PlacedStage:
        kind = max(k for k, first in enumerate(self.first_devices) if first <= device)
        return replace(self.stages[kind][group], submesh=_device(device))

    def simulated_seconds(self) -> Callable[[Placement], float | None]:
        """Return a function from placements of the sets to seconds; None for what does not fit."""
        plans = [self.plan("", (first,) * self.num_sets, time.perf_counter()) for first in self.first_devices]
        placing = device_placements(self.request, plans, self.step)

        def seconds(placement: Placement) -> float | None:
            devices = tuple(placement[group] for group in self.groups.together)
            return placing.seconds(devices) if placing.fits(devices) else None

        return seconds

    def measured_seconds(self, name: str) -> Callable[[Placement], float | None]:
        """Return the same, as measured; None also for what fails to run."""
        measure = self.request.measure
        assert measure is not None

        def seconds(placement: Placement) -> float | None:
            plan = self.plan(name, placement, time.perf_counter())
            try:
                return None if bytes_over(plan) else measure(plan)
            # Those of XLA too, such as for a lack of memory.
            except (AlpaLiteError, RuntimeError):
                return None

        return seconds

    def embeddings(self) -> Floats:
        """Return [sets, features]: what the policy knows of each set of groups."""
        return embeddings(self.step, self.groups)


_ONE = LogicalMesh(axis_names=("data",), shape=(1,))


def _device(number: int) -> Submesh:
    return Submesh(first_device=number, num_hosts=1, devices_per_host=1)


def embeddings(step: StepGraph, groups: ColocatedGroups) -> Floats:
    """Return [sets, features]: types of ops, dims of results, and the neighbours of each set of groups."""
    graph, count = step.graph, max(groups.together) + 1
    ops = [
        [graph.ops[o] for g, s in enumerate(groups.together) if s == number for o in groups.layers.ops_of(g)]
        for number in range(count)
    ]
    forward = [[op for op in each if step.phases[op.id] is Phase.FORWARD] for each in ops]
    kinds = sorted({op.primitive for each in forward for op in each})
    types, shapes = np.zeros((count, len(kinds))), np.zeros((count, _OUTPUTS, _DIMS))
    neighbours = np.zeros((count, 2, count))
    for number, each in enumerate(forward):
        counted = Counter(op.primitive for op in each)
        types[number] = [counted[kind] / max(1, len(each)) for kind in kinds]
        results = sorted((v for op in each for v in graph.results(op)), key=lambda v: (-v.bytes, v.id))
        for row, value in enumerate(results[:_OUTPUTS]):
            dims: Sequence[int] = value.shape[:_DIMS]
            # Logarithms, so that a wide layer differs from a narrow one as a deep one does; 10 is about log(2^14).
            shapes[number, row, : len(dims)] = np.log1p(dims) / 10
    for a, b in groups.edges:
        source, target = groups.together[a], groups.together[b]
        neighbours[source, 0, target] = neighbours[target, 1, source] = 1
    return np.concatenate([types, shapes.reshape(count, -1), neighbours.reshape(count, -1)], axis=1)
