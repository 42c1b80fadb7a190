"""Slice a step into tasks: all ops with the same place (`op_places`) become one executable.

Invariant ops, free values, and ops without a place (`op_places`) are repeated in every task that reads them. Every
other op is in exactly one task. Which
values cross the boundaries of tasks, and in which form (`Form`), follows from the data flow alone; the decisions of a
stage say which spec each form is (`task_specs_of`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property

from alpa_lite.plan.op_places import TaskLayout, layout_of_plan, places_of
from alpa_lite.plan.parts import Choice, OpPlacement, TaskRole
from alpa_lite.plan.plan import Plan
from alpa_lite.plan.task_specs import OpPlace, Port, TaskPart, TaskSpec
from alpa_lite.program.ir import Graph, Op
from alpa_lite.program.memo import memoized
from alpa_lite.program.phases import Phase, StepGraph, parameters
from alpa_lite.rules.op_info import free_values
from alpa_lite.sharding.specs import Spec, replicated


class Form(Enum):
    """The spec of a value at the boundary of a task."""

    RECEIVED = auto()
    """The one in which a stage reads an input of the step or a value of another stage."""
    HOME = auto()
    """The one in which the value leaves its op."""
    STORED = auto()
    """That of a sum during the loop."""
    RESOLVED = auto()
    """The one in which the update reads a sum."""
    RETURNED = auto()
    """The one in which the caller gets a result of the step."""


FormPort = tuple[int, Form]
"""A value that enters or leaves a task, and its form there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOutline:
    """A task before its stage is decided: its parts, and the forms of the values that cross its boundary."""

    place: OpPlace
    parts: tuple[TaskPart, ...]
    inputs: tuple[FormPort, ...]
    outputs: tuple[FormPort, ...]
    sums: tuple[FormPort, ...]


class Slicer:
    """Derives the tasks of a step from its data flow."""

    def __init__(self, layout: TaskLayout, step: StepGraph, ops: Iterable[int] | None = None) -> None:
        """Prepare the slicing of `step` into the tasks of a layout; `ops` are those that the tasks can need."""
        self.step = step
        self.graph: Graph = step.graph
        self.free = free_values(step.graph)
        self.returned = frozenset(step.graph.outputs)
        self.homes = layout.stage_of_input
        self.stage_of_op = layout.stage_of_op
        self.whole, self.served = layout.whole, layout.served
        self.ops = [step.graph.ops[op] for op in ops] if ops is not None else step.graph.ops
        self.places = places_of(layout, step, self.ops)

    @memoized
    def outlines(self, only: int | None = None) -> tuple[TaskOutline, ...]:
        """Return all tasks, or those of one stage, in an order of their dependencies within one micro-batch."""
        # One task for each place that occurs; ops come in program order, so that the members of a place are sorted.
        members: dict[OpPlace, list[int]] = {}
        for op_id, place in enumerate(self.places):
            if place is not None:
                members.setdefault(place, []).append(op_id)
        # A stage without ops in the update still needs an update task if it returns or sends a sum: it must resolve it.
        for v in self._sums_to_send:
            members.setdefault(OpPlace(stage=self.stage_of_value(v), kind=TaskRole.UPDATE), [])
        for v in self.graph.outputs:
            if self.is_sum(v) and not self.whole:
                members.setdefault(OpPlace(stage=self.stage_of_value(v), kind=TaskRole.UPDATE), [])
            # Any stage could return a value that all can compute: the first one does.
            elif self._is_invariant(v):
                for stage in self.stages_renewing(v):
                    members.setdefault(OpPlace(stage=stage, kind=TaskRole.STEP if self.whole else TaskRole.UPDATE), [])
        chosen = (place for place in members if only in (None, place.stage))
        return tuple(self._task(place, members[place]) for place in sorted(chosen, key=lambda place: place.order))

    # -------------------------------------------------------------------------------------------------- values

    def stage_of_value(self, v: int) -> int:
        place = self.place_of_value(v)
        return place.stage if place else self.homes.get(v, 0)

    def place_of_value(self, v: int) -> OpPlace | None:
        """Return the place of the op that computes a value; None for inputs and repeated values."""
        producer = self.graph.producer[v]
        return None if producer is None else self.places[producer]

    def _is_invariant(self, v: int) -> bool:
        producer = self.graph.producer[v]
        return producer is not None and self.places[producer] is None

    def is_repeated(self, v: int) -> bool:
        """Return True for values that every task computes for itself."""
        return self._is_invariant(v) or v in self.free

    def is_sum(self, v: int) -> bool:
        """Return True for values of the loop without a batch dim: they are added up over micro-batches."""
        producer = self.graph.producer[v]
        return (
            producer is not None
            and self.step.phases[producer].in_loop
            and self.step.batch_dims[v] is None
            and v not in self.free
        )

    @cached_property
    def _sums_to_send(self) -> list[int]:
        """The sums that the update of another stage reads, directly or through repeated ops."""
        if self.whole:
            return []
        return [
            v
            for v, readers in sorted(self._readers.items())
            # Few values are sums, and to look at all of their readers takes longer.
            if self.is_sum(v)
            and any(place.kind is TaskRole.UPDATE and place.stage != self.stage_of_value(v) for place in readers)
        ]

    def stages_renewing(self, v: int) -> frozenset[int]:
        """Return the stages that compute an invariant output: the first one, and its readers if updates do not wait.

        A counter of steps is such a value, which the update of each stage needs before that of the first one has run.
        """
        if self.step.num_updates == 1 or v not in self.step.aliases or self.served:
            return frozenset((0,))
        return self.stages_reading[self.step.aliases[v]] | {0}

    @cached_property
    def stages_reading(self) -> Mapping[int, frozenset[int]]:
        """For each input that the step replaces, the stages that read it, or compute for themselves what follows it."""
        found = {
            v: frozenset(place.stage for place in self._readers[v])
            for v in self.graph.inputs
            if self.step.batch_dims[v] is None
        }
        while True:
            before = dict(found)
            for out, replaced in self.step.aliases.items():
                for v in self._origins(out) if self._is_invariant(out) else ():
                    found[v] |= found[replaced] | {0}
            if found == before:
                return found

    def _origins(self, v: int) -> list[int]:
        """Return the inputs from which an invariant value is computed."""
        _, external = self._with_repeated([], [v])
        return [origin for origin in external if self.graph.producer[origin] is None]

    def output_stage(self, v: int) -> int:
        """Return the stage on which a graph output is returned."""
        target = self.step.aliases.get(v)
        if target is not None:
            return self.homes[target]
        return self.stage_of_value(v)

    # -------------------------------------------------------------------------------------------------- tasks

    def _task(self, place: OpPlace, ops: list[int]) -> TaskOutline:
        ordered, external = self._with_repeated(ops, self._extra_needs(place))
        computed = {r for op_id in ordered for r in self.graph.ops[op_id].results if not self.is_repeated(r)}
        computed.update(self._free_outputs(place))
        in_loop = place.kind.in_loop
        # A sum that only other ops of the loop read is no accumulator.
        sums = [v for v in sorted(computed) if in_loop and self.is_sum(v) and self._read_after_loop(v)]
        outputs = [*self._computed_outputs(place, sorted(computed)), *self._handed_on(place, external, computed)]
        return TaskOutline(
            place=place,
            parts=self._parts(place.kind, ordered),
            inputs=tuple((v, self._input_form(place, v)) for v in external),
            outputs=tuple(outputs),
            sums=tuple((v, Form.STORED) for v in sums),
        )

    def _parts(self, kind: TaskRole, ops: Sequence[int]) -> tuple[TaskPart, ...]:
        """Return the ops of a task by phase, in order."""
        phases, graph = _PHASES[kind], self.graph
        number = [0] * len(ops)
        earliest: dict[int, int] = {}
        # Backwards, so that the parts of all readers of an op are known.
        for i, op in reversed([*enumerate(map(graph.ops.__getitem__, ops))]):
            phase = self.step.phases[op.id]
            readers = min((earliest[r] for r in op.results if r in earliest), default=len(phases) - 1)
            if phase is Phase.INVARIANT or not self.free.isdisjoint(op.results):
                # It runs where it is read first; only what is returned may have no reader in the task.
                number[i] = readers
            elif phase in phases:
                number[i] = phases.index(phase)
            for v in op.operands:
                earliest[v] = min(number[i], earliest.get(v, number[i]))
        parts = (
            TaskPart(phase=phase, ops=tuple(op for op, own in zip(ops, number, strict=True) if own == part))
            for part, phase in enumerate(phases)
        )
        # A task without ops resolves sums.
        return tuple(part for part in parts if part.ops) or (TaskPart(phase=phases[-1], ops=()),)

    def _computed_outputs(self, place: OpPlace, computed: Iterable[int]) -> Iterator[FormPort]:
        """Yield the values computed by a task that others read.

        Sums leave a task of the loop as outputs only for other tasks of the loop; for the update they leave as `sums`.
        """
        for v in computed:
            if self.is_sum(v) and place.kind.in_loop:
                if self._read_in_loop_elsewhere(v, place):
                    yield v, Form.HOME
            elif self._leaves(v, place):
                yield v, self._leaving_form(v, place)

    def _handed_on(self, place: OpPlace, external: Iterable[int], computed: set[int]) -> Iterator[FormPort]:
        """Yield values that an update passes on without computing them.

        These are sums to return or for other updates, and repeated values that are returned.
        """
        if place.kind.in_loop:
            return
        for v in dict.fromkeys([*external, *self._invariant_outputs(place)]):
            if self._returned_from(v, place) and v not in computed:
                yield v, Form.RETURNED
            elif place.kind is TaskRole.UPDATE and self.is_sum(v) and self._later_readers(v, place):
                yield v, Form.RESOLVED

    def _extra_needs(self, place: OpPlace) -> list[int]:
        """Return values that a task must read though none of its ops does: sums to return or send, repeated outputs."""
        if place.kind is TaskRole.STEP:
            return [*self._invariant_outputs(place), *self._free_outputs(place)]
        if place.kind is not TaskRole.UPDATE or place.wave:
            return self._free_outputs(place)
        sums = [v for v in self.graph.outputs if self.is_sum(v) and self.stage_of_value(v) == place.stage]
        sums += [v for v in self._sums_to_send if self.stage_of_value(v) == place.stage]
        return [*dict.fromkeys(sums), *self._invariant_outputs(place), *self._free_outputs(place)]

    def _invariant_outputs(self, place: OpPlace) -> list[int]:
        if place.kind not in (TaskRole.STEP, TaskRole.UPDATE) or place.wave:
            return []
        outputs = (v for v in dict.fromkeys(self.graph.outputs) if self._is_invariant(v))
        return [v for v in outputs if place.stage in self.stages_renewing(v)]

    def _free_outputs(self, place: OpPlace) -> list[int]:
        """Return the free values that the caller receives (a dropout mask); the task of their op computes them."""
        wanted = (v for v in dict.fromkeys(self.graph.outputs) if v in self.free)
        return [v for v in wanted if self.place_of_value(v) == place]

    def _returned_from(self, v: int, place: OpPlace) -> bool:
        if v not in self.returned:
            return False
        if self._is_invariant(v):
            return place.stage in self.stages_renewing(v) and place.wave == 0
        return self.is_sum(v) and self.stage_of_value(v) == place.stage and place.wave == 0

    @cached_property
    def _lazy(self) -> set[int]:
        """The ops of free values, which a task computes only if something in it reads them."""
        return {op.id for op in self.ops if not self.free.isdisjoint(op.results)}

    @cached_property
    def _repeated(self) -> set[int]:
        """The ops that every task that reads their results runs."""
        return {op.id for op in self.ops if self._is_repeated_op(op)}

    def _with_repeated(self, ops: list[int], needs: Iterable[int]) -> tuple[list[int], list[int]]:
        """Return a task's ops with the repeated ones that they read, in order; and the values from outside."""
        graph, own = self.graph, set(ops)
        needed, chosen = set(needs), list[int]()
        made_here = {r for op_id in own for r in graph.ops[op_id].results}
        for op_id in sorted(own.union(self._repeated), reverse=True):
            op, lazy = graph.ops[op_id], op_id in self._lazy
            repeated = op_id in self._repeated
            wanted = any(r in needed for r in op.results)
            # Backwards, so that all readers of an op are known here. A free value of this task is computed only if
            # something in the task reads it.
            if (op_id in own and (not lazy or wanted)) or (repeated and wanted):
                chosen.append(op_id)
                needed.update(v for v in op.operands if graph.values[v].literal is None)
        made_here.update(r for op_id in chosen for r in graph.ops[op_id].results)
        return list(reversed(chosen)), sorted(needed - made_here)

    def _input_form(self, place: OpPlace, v: int) -> Form:
        """Return the form in which a value enters a task; a task resolves the sums that enter it as stored."""
        origin = self.place_of_value(v)
        # What comes from outside the stage arrives in the spec that the plan gives for it.
        if origin is None or origin.stage != place.stage:
            return Form.RECEIVED
        if place.kind is TaskRole.UPDATE and self.is_sum(v):
            # If wave 0 reads a sum, it resolves it for all later waves.
            return Form.STORED if place.wave == 0 or not self._read_by_wave_zero(v) else Form.RESOLVED
        return Form.HOME

    def _read_by_wave_zero(self, v: int) -> bool:
        """Return True if wave 0 of the value's own stage reads, returns or sends the sum: then wave 0 resolves it."""
        stage = self.stage_of_value(v)
        if v in self.returned or v in self._sums_to_send:
            return True
        return OpPlace(stage=stage, kind=TaskRole.UPDATE) in self._readers[v]

    def _read_after_loop(self, v: int) -> bool:
        """Return True if the value is returned or an update reads it."""
        return v in self.returned or any(place.kind is TaskRole.UPDATE for place in self._readers[v])

    @cached_property
    def _readers(self) -> Mapping[int, frozenset[OpPlace]]:
        """For each value that an op of the tasks reads or makes, the places that read it, by themselves or through
        repeated ops.
        """
        found = defaultdict[int, frozenset[OpPlace]](frozenset[OpPlace])
        alone: dict[OpPlace | None, frozenset[OpPlace]]
        alone = {place: frozenset([place]) for place in set(self.places) if place is not None}
        # Backwards, so that the readers of the results of an op are known.
        for op in reversed(self._reading):
            # A repeated op is part of each task that reads its results.
            if self._is_repeated_op(op):
                readers = frozenset[OpPlace]().union(*map(found.__getitem__, op.results))
            else:
                readers = alone[self.places[op.id]]
            for v in op.operands:
                # Most values have one reader, or several in one task, whose set is one object.
                known = found[v]
                if known is not readers and not readers <= known:
                    found[v] = known | readers if known else readers
        return found

    @property
    def _reading(self) -> Sequence[Op]:
        """The ops that read what an op of the tasks reads or makes, by themselves or through repeated ops, in order."""
        graph = self.graph
        # All readers of state decide who makes an invariant output anew (`stages_reading`).
        if len(self.ops) == len(graph.ops) or self.step.num_updates > 1:
            return graph.ops
        waiting = [*{v for op in self.ops for v in (*op.operands, *op.results)}]
        found = set[int]()
        while waiting:
            for c in graph.consumers[waiting.pop()]:
                if c not in found:
                    found.add(c)
                    waiting += graph.ops[c].results if self._is_repeated_op(graph.ops[c]) else ()
        return [graph.ops[op] for op in sorted(found)]

    def _is_repeated_op(self, op: Op) -> bool:
        """Return True for ops that are part of each task that reads their results."""
        return self.places[op.id] is None or not self.free.isdisjoint(op.results)

    def _read_in_loop_elsewhere(self, v: int, place: OpPlace) -> bool:
        return any(p != place and p.kind is not TaskRole.UPDATE for p in self._readers[v])

    def _leaves(self, v: int, place: OpPlace) -> bool:
        return v in self.returned or any(p != place for p in self._readers[v])

    def _later_readers(self, v: int, place: OpPlace) -> bool:
        """Return True if this task resolves a sum that other update tasks read."""
        if place.wave or self.stage_of_value(v) != place.stage:
            return False
        return any(p.kind is TaskRole.UPDATE and p != place for p in self._readers[v])

    def _leaving_form(self, v: int, place: OpPlace) -> Form:
        """Return the form of an output of a task: the caller's if only the caller reads it, else that of its op."""
        # Resharding for the caller inside the task saves a program of its own, unless other tasks read the value too.
        only_returned = v in self.returned and not any(p != place for p in self._readers[v])
        return Form.RETURNED if only_returned and self.output_stage(v) == place.stage else Form.HOME


@memoized
def slicer_of(step: StepGraph, layout: TaskLayout) -> Slicer:
    """Return the slicer of a whole step, one object for equal layouts, as of plans with other shardings."""
    return Slicer(layout, step)


_PHASES = {
    TaskRole.STEP: (Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE),
    TaskRole.FORWARD: (Phase.FORWARD,),
    TaskRole.FORWARD_BACKWARD: (Phase.FORWARD, Phase.BACKWARD),
    TaskRole.BACKWARD: (Phase.BACKWARD,),
    TaskRole.INPUT_GRADIENT: (Phase.BACKWARD,),
    TaskRole.WEIGHT_GRADIENT: (Phase.BACKWARD,),
    TaskRole.UPDATE: (Phase.UPDATE,),
}
"""The phases of the parts of each kind of task."""

UNDECIDED = Choice(inputs={}, ops={}, accumulators={})
"""The decisions of a stage that is not decided yet."""


def home_spec(graph: Graph, placements: Mapping[int, OpPlacement], v: int) -> Spec:
    """Return the spec in which a value leaves its op, given the placements of ops; replicated if it has none."""
    producer = graph.producer[v]
    if producer is None or producer not in placements:
        return replicated(graph.values[v].rank)
    return placements[producer].results[graph.ops[producer].results.index(v)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicedStages:
    """A sliced step with the decisions of its stages by number; those of other stages are not known."""

    slicer: Slicer
    stages: Mapping[int, Choice]

    @staticmethod
    def of_plan(plan: Plan, step: StepGraph) -> SlicedStages:
        """Slice `step`, which must be the step that the plan was made for."""
        stages = {number: stage.choice for number, stage in enumerate(plan.stages)}
        return SlicedStages(slicer=slicer_of(step, layout_of_plan(plan, step)), stages=stages)

    def task(self, outline: TaskOutline, buckets: Sequence[Sequence[int]] = ()) -> TaskSpec:
        """Return a task with its specs; `buckets` are those of the plan."""
        place, stage = outline.place, self.stages[outline.place.stage]
        sums = [v for v, form in outline.inputs if form is Form.STORED]
        # A task of the whole step runs the loop and the update: the sums that it resolves are its own, not its inputs.
        sums += stage.accumulators if place.kind is TaskRole.STEP else ()
        pairs = ((v, self.spec(place.stage, v, Form.STORED), self.spec(place.stage, v, Form.RESOLVED)) for v in sums)
        resolved = [each for each in pairs if each[1] != each[2] or place.kind is TaskRole.STEP]
        mine = _buckets(buckets, {v for v, _, _ in resolved})
        # Sums in buckets are resolved bucket by bucket, the others after them.
        order = {v: i for i, v in enumerate(v for bucket in mine for v in bucket)}
        resolved.sort(key=lambda each: order.get(each[0], len(order)))

        def ports(of: Iterable[FormPort]) -> tuple[Port, ...]:
            return tuple(Port(value=v, spec=self.spec(place.stage, v, form)) for v, form in of)

        return TaskSpec(
            stage=place.stage,
            kind=place.kind,
            wave=place.wave,
            parts=outline.parts,
            inputs=ports(outline.inputs),
            outputs=ports(outline.outputs),
            sums=ports(outline.sums),
            resolved=tuple(resolved),
            buckets=mine,
            kept=parameters(self.slicer.step) if stage.keeps_gathered else frozenset(),
        )

    def spec(self, stage: int, v: int, form: Form) -> Spec:
        """Return the spec that a form of a value stands for on a stage."""
        if form is Form.RECEIVED:
            return self.stages[stage].inputs.get(v, replicated(self.slicer.graph.values[v].rank))
        if form is Form.RETURNED:
            return self.output_spec(v)
        if form is not Form.HOME:
            sums = self.stages.get(self.slicer.stage_of_value(v), UNDECIDED).accumulators
            if v in sums:
                return sums[v].stored if form is Form.STORED else sums[v].resolved
        place = self.slicer.place_of_value(v)
        made_on = self.stages.get(place.stage, UNDECIDED) if place is not None else UNDECIDED
        return home_spec(self.slicer.graph, made_on.ops, v)

    def output_spec(self, v: int) -> Spec:
        """Return the spec of a graph output: as the caller requested, else state is returned as it was passed in."""
        number = self.slicer.output_stage(v)
        target, stage = self.slicer.step.aliases.get(v), self.stages.get(number, UNDECIDED)
        if v in stage.outputs:
            return stage.outputs[v]
        if target is not None and target in stage.inputs:
            return stage.inputs[target]
        return self.spec(number, v, Form.RESOLVED if self.slicer.is_sum(v) else Form.HOME).without_partial()


def _buckets(buckets: Sequence[Sequence[int]], resolved: Collection[int]) -> tuple[tuple[int, ...], ...]:
    """Return the plan's buckets, restricted to the sums that a task resolves."""
    mine = (tuple(v for v in bucket if v in resolved) for bucket in buckets)
    return tuple(bucket for bucket in mine if bucket)
