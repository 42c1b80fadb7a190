"""Where each op of a step runs: its stage, and the task of it.

    forward, backward   of each stage, once per micro-batch (one task where nothing comes between them)
    input gradient, weight gradient
                        the two parts of a backward pass, where the schedule has tasks of both
    update              of each stage, once per step; in several waves where stages exchange values (a global norm)
    step                all of it, where there is one stage and one micro-batch

Invariant ops have no place. Ops that fuse into those of a later task, and that only these read, run with them where
that hands on no more bytes: what JAX's derivatives save is often made from other things that are saved, and one
compiled program would not keep both                                                           (`_deferred`)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from alpa_lite.errors import PlanError
from alpa_lite.plan.plan import Plan
from alpa_lite.program.ir import Graph
from alpa_lite.program.phases import Phase, StepGraph, weight_gradient_ops
from alpa_lite.rules.fusion import is_fusible
from alpa_lite.schedule import Task, TaskKind, TaskLists, kinds_of

_ORDER = {
    "step": 0,
    "forward": 0,
    "forward+backward": 1,
    "backward": 2,
    "input gradient": 2,
    "weight gradient": 3,
    "update": 4,
}

_UPDATE = (_ORDER["update"], 0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpPlace:
    """Where an op of the step runs: its stage, the kind of its task and the wave of the update."""

    stage: int
    kind: str
    wave: int = 0

    @property
    def order(self) -> tuple[int, int, int]:
        """Rises along every dependency within a micro-batch; backward passes go from the last stage to the first."""
        number = _ORDER[self.kind]
        return number, self.wave, -self.stage if number == _ORDER["backward"] else self.stage


def is_whole(plan: Plan) -> bool:
    """True when the step is one task: one stage, one micro-batch."""
    return len(plan.stages) == 1 and plan.num_microbatches == 1


def places_of(plan: Plan, step: StepGraph) -> tuple[OpPlace | None, ...]:
    """The place of each op; None for invariant ops. Raises `PlanError` for a schedule that cannot run the step."""
    lists = plan.schedule.tasks(len(plan.stages), plan.num_microbatches)
    kinds = {stage: found for tasks in lists for stage, found in kinds_of(tasks).items()}
    if Phase.BACKWARD in step.phases and not any(kind.sends_back for found in kinds.values() for kind in found):
        raise PlanError(
            f"The schedule {plan.schedule} runs forward passes alone, but {plan.function} computes gradients. Choose"
            " another schedule, such as al.schedule.OneFOneB()."
        )
    in_two = frozenset(stage for stage, found in kinds.items() if TaskKind.WEIGHT_GRADIENT in found)
    in_loop = _InLoop(
        step=step, fused=_fused(lists, len(plan.stages) - 1), in_two=in_two, weights=_weights(plan, step, in_two)
    )
    places: list[OpPlace | None] = []
    for op, layer in enumerate(plan.op_layers):
        stage = None if layer is None else plan.stage_of_layer(layer)
        if stage is None:
            places.append(None)
        elif is_whole(plan):
            places.append(OpPlace(stage=stage, kind="step"))
        elif step.phases[op].in_loop:
            places.append(OpPlace(stage=stage, kind=in_loop.kind_of(op, stage)))
        else:
            places.append(OpPlace(stage=stage, kind="update", wave=_wave(step, op, stage, places)))
    return tuple(places if is_whole(plan) else _deferred(step, places))


@dataclass(frozen=True, slots=True, kw_only=True)
class _InLoop:
    """What tells the tasks of the loop apart. `fused`: stages whose forward and backward are one task. `in_two`: those
    whose backward pass has two parts, with the ops of the second ones, `weights`."""

    step: StepGraph
    fused: frozenset[int]
    in_two: frozenset[int]
    weights: frozenset[int]

    def kind_of(self, op: int, stage: int) -> str:
        """The kind of the task of an op."""
        if op in self.weights:
            return TaskKind.WEIGHT_GRADIENT.value
        if stage in self.fused:
            return "forward+backward"
        phase = self.step.phases[op]
        return TaskKind.INPUT_GRADIENT.value if phase is Phase.BACKWARD and stage in self.in_two else phase.value


def _fused(lists: TaskLists, last: int) -> frozenset[int]:
    """Stages whose forward and backward of a micro-batch always run back to back: at most the last one."""
    after = dict(pairwise(lists[last % len(lists)]))
    forwards = [task for task in after if task.stage == last and task.kind is TaskKind.FORWARD]
    return frozenset([last] if forwards and all(_returns(task, after[task]) for task in forwards) else [])


def _returns(forward: Task, after: Task) -> bool:
    same = (after.stage, after.microbatch) == (forward.stage, forward.microbatch)
    return same and after.kind.sends_back


def _weights(plan: Plan, step: StepGraph, in_two: frozenset[int]) -> frozenset[int]:
    """Ops of the second parts of backward passes."""
    members: Mapping[int, list[int]] = {stage: [] for stage in in_two}
    for op, layer in enumerate(plan.op_layers if in_two else ()):
        stage = None if layer is None else plan.stage_of_layer(layer)
        if stage is not None and stage in members:
            members[stage].append(op)
    return frozenset().union(*(weight_gradient_ops(step, ops) for ops in members.values()))


def _deferred(step: StepGraph, places: Sequence[OpPlace | None]) -> list[OpPlace | None]:
    """The places with ops moved to the later task of the loop that is the first to read them."""
    graph, found, outputs = step.graph, list(places), set(step.graph.outputs)
    crossing = [_crosses(graph, v.id, found) for v in graph.values]
    for op in reversed(graph.ops):
        place = found[op.id]
        if place is None or place.kind == "update" or not is_fusible(graph, op):
            continue
        readers = {found[c] for r in op.results for c in graph.consumers[r]}
        later = [p for p in readers if p is not None and p.stage == place.stage and place.order < p.order < _UPDATE]
        if not outputs.isdisjoint(op.results) or len(later) < len(readers) or not later:
            continue
        more = [v for v in op.operands if graph.values[v].literal is None and not crossing[v]]
        if sum(graph.values[v].bytes for v in more) <= sum(graph.values[r].bytes for r in op.results):
            found[op.id] = min(later, key=lambda p: p.order)
            for v in more:
                crossing[v] = True
    return found


def _crosses(graph: Graph, value: int, places: Sequence[OpPlace | None]) -> bool:
    """Whether a value is handed on from one task to another, or kept anyway, as state is."""
    producer = graph.producer[value]
    if producer is None or places[producer] is None:
        return True
    return any(places[c] not in (None, places[producer]) for c in graph.consumers[value])


def _wave(step: StepGraph, op: int, stage: int, places: Sequence[OpPlace | None]) -> int:
    """Of the update: how often values have gone from one stage to another before an op can run."""
    wave = 0
    for v in step.graph.ops[op].operands:
        producer = step.graph.producer[v]
        origin = places[producer] if producer is not None else None
        if origin is not None:
            # A value of another stage's loop is resolved there first, by its update.
            earlier = origin.wave if origin.kind == "update" else 0
            wave = max(wave, earlier + (origin.stage != stage))
    return wave
