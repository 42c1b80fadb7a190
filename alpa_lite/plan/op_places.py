"""Assign each op of a step to the stage and the task in which it runs.

    forward, backward   of each stage, once per micro-batch (one task where nothing runs between them)
    input gradient, weight gradient
                        the two parts of a backward pass, where the schedule has tasks of both kinds
    update              of each stage, once per step; in several waves where stages exchange values (a global norm)
    step                the whole step, where there is one stage and one micro-batch

Invariant ops have no place: every task that reads them repeats them. So does every wave of an update with ops that are
cheap to repeat, where their results would take more memory between waves (`_repeated`). An op that fuses into ops of a
later task, and that only these read, runs in that task if this transfers no more bytes between tasks: JAX's derivatives
often save values that are made from other saved values, and a single compiled program would not store both
(`_deferred`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from alpa_lite.errors import PlanError
from alpa_lite.plan.parts import TaskRole
from alpa_lite.plan.plan import Plan
from alpa_lite.plan.task_specs import OpPlace
from alpa_lite.program.ir import TO_DEVICE, Graph, Op
from alpa_lite.program.memo import memoized
from alpa_lite.program.phases import Phase, StepGraph, weight_gradient_ops
from alpa_lite.rules.fusion import is_fusible, is_repeatable
from alpa_lite.schedule import ServerSchedule, Task, TaskKind, TaskLists, kinds_of, processors_of


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskLayout:
    """The tasks that the stages of a step have.

    Attributes:
        stage_of_op: stage of each op; None for invariant ops.
        stage_of_input: stage on which each graph input lives.
        whole: whether the step is one task: one stage and one micro-batch.
        fused: stages whose forward and backward passes are one task.
        in_two: stages whose backward pass is two tasks.
        served: whether stage 0 alone updates the state, on behalf of workers.
    """

    stage_of_op: Sequence[int | None]
    stage_of_input: Mapping[int, int]
    whole: bool
    fused: frozenset[int]
    in_two: frozenset[int]
    served: bool = False

    def __hash__(self) -> int:
        """Return a hash of the fields that can be hashed; equality compares all."""
        return hash((*self.stage_of_op, self.whole, self.fused, self.in_two))


def layout_of_plan(plan: Plan, step: StepGraph) -> TaskLayout:
    """Return the tasks of a plan's stages. Raises `PlanError` for a schedule that cannot run the step."""
    lists = plan.schedule.tasks(len(plan.stages), plan.num_microbatches)
    kinds = {stage: found for tasks in lists for stage, found in kinds_of(tasks).items()}
    if Phase.BACKWARD in step.phases and not any(kind.sends_back for found in kinds.values() for kind in found):
        raise PlanError(
            f"The schedule {plan.schedule} runs forward passes alone, but {plan.function} computes gradients. Choose"
            " another schedule, such as al.schedule.OneFOneB()."
        )
    inputs = zip(step.graph.inputs, plan.input_layers, strict=True)
    return TaskLayout(
        # A tuple, as stages have it, so that equal layouts compare equal.
        stage_of_op=tuple([None if layer is None else plan.stage_of_layer(layer) for layer in plan.op_layers]),
        stage_of_input={v: plan.stage_of_layer(layer) for v, layer in inputs},
        whole=len(plan.stages) == 1 and plan.num_microbatches == 1,
        fused=fused_stages(lists, plan.schedule.loss_stage(len(plan.stages))),
        # Read off the tasks of the schedule, and not asked of it, so that a user's own schedule needs no other method.
        in_two=frozenset(stage for stage, found in kinds.items() if TaskKind.WEIGHT_GRADIENT in found),
        served=isinstance(plan.schedule, ServerSchedule),
    )


def places_of(layout: TaskLayout, step: StepGraph, among: Sequence[Op] = ()) -> tuple[OpPlace | None, ...]:
    """Return the place of each op, None for those that every task which reads their results repeats.

    `among`: ops in order, all of a stage among them, if the places of others matter only to these: then these alone are
    moved to other tasks or repeated.
    """
    weights, phases, kind = _weights(layout, step), step.phases, TaskRole.STEP
    places: list[OpPlace | None] = []
    # One object per place, of which each task has one.
    known: dict[tuple[int, TaskRole, int], OpPlace] = {}
    for op, stage in enumerate(layout.stage_of_op):
        if stage is None:
            places.append(None)
            continue
        wave = 0
        if not layout.whole and phases[op].in_loop:
            kind = TaskRole.WEIGHT_GRADIENT if op in weights else _kind_in_loop(layout, stage, phases[op])
        elif not layout.whole:
            # Ops are in program order, so that the operands of this one have their places.
            kind, wave = TaskRole.UPDATE, _wave(step, op, stage, places)
        key = (stage, kind, wave)
        places.append(known.get(key) or known.setdefault(key, OpPlace(stage=stage, kind=kind, wave=wave)))
    if layout.whole:
        return tuple(places)
    among = among or step.graph.ops
    return tuple(_deferred(step, _repeated(step, places, among), among))


@memoized
def update_tasks(step: StepGraph, stage_of_op: tuple[int | None, ...]) -> Counter[int]:
    """Return how many tasks the update of each stage is, by stage: the waves of `places_of`."""
    places: list[OpPlace | None] = [None] * len(stage_of_op)
    for op, stage in enumerate(stage_of_op):
        if stage is not None:
            in_loop = step.phases[op].in_loop
            wave = 0 if in_loop else _wave(step, op, stage, places)
            places[op] = OpPlace(stage=stage, kind=TaskRole.FORWARD if in_loop else TaskRole.UPDATE, wave=wave)
    places = _repeated(step, places, step.graph.ops)
    return Counter(place.stage for place in {*places} if place is not None and place.kind is TaskRole.UPDATE)


def _kind_in_loop(layout: TaskLayout, stage: int, phase: Phase) -> TaskRole:
    """Return the kind of the task that runs an op of the loop, except for gradients of weights."""
    if stage in layout.fused:
        return TaskRole.FORWARD_BACKWARD
    in_parts = phase is Phase.BACKWARD and stage in layout.in_two
    return TaskRole.INPUT_GRADIENT if in_parts else TaskRole(phase.value)


def fused_stages(lists: TaskLists, last: int) -> frozenset[int]:
    """Return the stages whose two passes of a micro-batch always run back to back: the one of the loss, or none.

    last: the stage that computes the loss.
    """
    # A task occurs once in a list, so it can be a key for its successor.
    after = dict(pairwise(lists[processors_of(lists)[last]]))
    forwards = [task for task in after if task.stage == last and task.kind is TaskKind.FORWARD]
    return frozenset([last] if forwards and all(_returns(task, after[task]) for task in forwards) else [])


def _returns(forward: Task, after: Task) -> bool:
    """Return True if task `after` is the backward pass of the same micro-batch and stage as `forward`."""
    same = (after.stage, after.microbatch) == (forward.stage, forward.microbatch)
    return same and after.kind.sends_back


def _weights(layout: TaskLayout, step: StepGraph) -> frozenset[int]:
    """Return the ops of the second parts (weight gradients) of backward passes in two parts."""
    members: Mapping[int, list[int]] = {stage: [] for stage in layout.in_two}
    for op, stage in enumerate(layout.stage_of_op if members else ()):
        if stage is not None and stage in members:
            members[stage].append(op)
    return frozenset().union(*(weight_gradient_ops(step, ops) for ops in members.values()))


def _repeated(step: StepGraph, places: list[OpPlace | None], among: Sequence[Op]) -> list[OpPlace | None]:
    """Return the places, with None for ops of the update that every wave which reads their results repeats.

    `among`: the ops to look at, in order. All ops of a stage, and those without a place, are enough for its tasks: an
    op is repeated within its own stage alone.

    Between two waves a stage waits for others, with what later waves read in memory. A result is not kept there if it
    takes no fewer bytes than the values from which cheap ops make it again: these are kept instead, such as gradients
    in half precision and not their copies in float32. State on the host stays there until a wave needs it.
    """
    if not any(place is not None and place.wave for place in places):
        return places
    graph, found, sources = step.graph, list(places), _sources(step, places, among)
    outputs = set(graph.outputs)
    # The places that read the results of each op, by themselves or through repeated ops.
    readers: dict[int, set[OpPlace]] = {}
    # In reverse order, so that the readers of an op are known. Nothing in the loop reads results of the update.
    for op in (op for op in reversed(among) if not step.phases[op.id].in_loop):
        place, mine = found[op.id], readers.setdefault(op.id, set())
        for c in {c for r in op.results for c in graph.consumers[r]}:
            reader = found[c]
            mine |= readers.get(c, set()) if reader is None else {reader}
        if place is None or place.kind is not TaskRole.UPDATE or not outputs.isdisjoint(op.results):
            continue
        own = all((p.stage, p.kind) == (place.stage, place.kind) for p in mine)
        later = any(p.wave > place.wave for p in mine)
        if own and later and all(sources.get(r, {r}) != {r} for r in op.results):
            found[op.id] = None
    return found


def _sources(step: StepGraph, places: Sequence[OpPlace | None], among: Sequence[Op]) -> Mapping[int, frozenset[int]]:
    """Return for values those that must stay in memory so that later waves of the update have it.

    That is the value itself (as for all that are left out), or others of no more bytes from which ops that are cheap to
    repeat make it.
    """
    graph = step.graph
    found = dict.fromkeys(_at_rest(step, places), frozenset[int]())
    for op in among:
        place = places[op.id]
        again = place is not None and place.kind is TaskRole.UPDATE and _is_cheap(graph, op)
        if place is not None and not again:
            continue
        kept = frozenset[int]().union(*(found.get(v, (v,)) for v in op.operands if graph.values[v].literal is None))
        # Scalars take next to nothing, and must not decide between arrays of one size.
        bytes_kept = sum(graph.values[v].bytes for v in kept if graph.values[v].rank)
        if place is None or bytes_kept <= sum(graph.values[r].bytes for r in op.results):
            for r in op.results:
                found[r] = kept
    return found


def _is_cheap(graph: Graph, op: Op) -> bool:
    """Return True for ops to repeat rather than to keep their results in memory."""
    return op.primitive == TO_DEVICE or is_repeatable(graph, op)


def _at_rest(step: StepGraph, places: Sequence[OpPlace | None]) -> frozenset[int]:
    """Return the state that is in memory during all waves: none replaces it before the last one of its stage."""
    last = Counter[int]()
    for place in places:
        if place is not None:
            last[place.stage] = max(place.wave, last[place.stage])
    replaced_in = {old: places[op] for new, old in step.aliases.items() if (op := step.graph.producer[new]) is not None}
    found = (v for v in step.graph.inputs if step.batch_dims[v] is None)
    return frozenset(v for v in found if (p := replaced_in.get(v)) is None or p.wave == last[p.stage])


def _deferred(step: StepGraph, places: Sequence[OpPlace | None], among: Sequence[Op]) -> list[OpPlace | None]:
    """Return the places with fusible ones of some ops, in order, moved to the first later task that reads them."""
    graph, found, outputs = step.graph, list(places), set(step.graph.outputs)
    update, sent = OpPlace(stage=0, kind=TaskRole.UPDATE).order, set[int]()
    # In reverse order, so that a chain of fusible ops follows its last member into the later task.
    for op in reversed(among):
        place = found[op.id]
        if place is None or place.kind is TaskRole.UPDATE or not is_fusible(graph, op):
            continue
        readers = {found[c] for r in op.results for c in graph.consumers[r]}
        later = [p for p in readers if p is not None and p.stage == place.stage and place.order < p.order < update]
        if not outputs.isdisjoint(op.results) or len(later) < len(readers) or not later:
            continue
        # Deferring the op sends its operands instead of its results; what is sent or stored anyway costs nothing more.
        operands = (v for v in op.operands if graph.values[v].literal is None and v not in sent)
        more = [v for v in operands if not _crosses(graph, v, places)]
        if sum(graph.values[v].bytes for v in more) <= sum(graph.values[r].bytes for r in op.results):
            found[op.id] = min(later, key=lambda p: p.order)
            sent.update(more)
    return found


def _crosses(graph: Graph, value: int, places: Sequence[OpPlace | None]) -> bool:
    """Return True if a value is transferred between tasks, or stays in memory regardless (as inputs and state do)."""
    producer = graph.producer[value]
    if producer is None or places[producer] is None:
        return True
    return any(places[c] not in (None, places[producer]) for c in graph.consumers[value])


def _wave(step: StepGraph, op: int, stage: int, places: Sequence[OpPlace | None]) -> int:
    """Return the wave of an update op: how often values pass between stages before the op can run."""
    wave = 0
    for v in step.graph.ops[op].operands:
        producer = step.graph.producer[v]
        origin = places[producer] if producer is not None else None
        if origin is not None:
            # A value of another stage's loop is resolved there first, by its update.
            earlier = origin.wave if origin.kind is TaskRole.UPDATE else 0
            # A value of another stage is available only after the wave that computes it, one of this stage within it.
            wave = max(wave, earlier + (origin.stage != stage))
    return wave
