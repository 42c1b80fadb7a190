"""Slice a step into tasks: all ops with the same place (`op_places`) become one executable.

Invariant ops and free values are repeated in every task that reads them. Every other op is in exactly one task. A task
runs its ops phase by phase (`run_parts`), in an order that emission and pricing share.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from alpa_lite.lower.op_places import OpPlace, TaskRole, is_whole, places_of
from alpa_lite.plan.plan import Plan, StagePlan
from alpa_lite.plan.walk import Walk
from alpa_lite.program.ir import Graph
from alpa_lite.program.phases import Phase, StepGraph, parameters
from alpa_lite.rules.op_info import free_values
from alpa_lite.sharding.specs import Spec, replicated

A = TypeVar("A")


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """A value that enters or leaves a task, and its spec there."""

    value: int
    spec: Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSpec:
    """One executable of a stage.

    kind          the part of the step; "forward+backward" holds the input gradient only where the backward pass is
                  split in two
    ops           in order, repeated ones included
    inputs, outputs
    sums          values of the loop that are added up over micro-batches, in the specs in which they are stored
    resolved      sums that the update reads, of earlier tasks or its own: value, stored spec, resolved spec
    buckets       which of the resolved sums are reduced together, one bucket after the other
    keeps_gathered
                  whether a parameter stays gathered from the forward pass to the backward pass
    """

    stage: int
    kind: TaskRole
    wave: int = 0
    ops: tuple[int, ...]
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    sums: tuple[Port, ...] = ()
    resolved: tuple[tuple[int, Spec, Spec], ...] = ()
    buckets: tuple[tuple[int, ...], ...] = ()
    keeps_gathered: bool = False

    @property
    def name(self) -> str:
        """The name of the task, for example `stage 1 backward`."""
        return f"stage {self.stage} {self.kind}" + (f" {self.wave}" if self.wave else "")


class Slicer:
    """Derives the tasks of a plan from the data flow of its step."""

    def __init__(self, plan: Plan, step: StepGraph) -> None:
        """Prepare the slicing of `step`, which must be the step that the plan was made for."""
        self.plan = plan
        self.step = step
        self.graph: Graph = step.graph
        self.free = free_values(step.graph)
        self.homes = {
            v: plan.stage_of_layer(layer) for v, layer in zip(step.graph.inputs, plan.input_layers, strict=True)
        }
        self.whole = is_whole(plan)
        self.places = places_of(plan, step)

    def tasks(self) -> tuple[TaskSpec, ...]:
        """Return all tasks, in an order that respects their dependencies within one micro-batch."""
        # One task for each place that occurs; ops come in program order, so that the members of a place are sorted.
        members: dict[OpPlace, list[int]] = {}
        for op_id, place in enumerate(self.places):
            if place is not None:
                members.setdefault(place, []).append(op_id)
        # A stage without ops in the update still needs an update task if it returns or sends a sum: it must resolve it.
        for v in self._sums_to_send():
            members.setdefault(OpPlace(stage=self._stage_of_value(v), kind=TaskRole.UPDATE), [])
        for v in self.graph.outputs:
            if self._is_sum(v) and not self.whole:
                members.setdefault(OpPlace(stage=self._stage_of_value(v), kind=TaskRole.UPDATE), [])
            # Any stage could return a value that all can compute: the first one does.
            elif self._is_invariant(v):
                members.setdefault(OpPlace(stage=0, kind=TaskRole.STEP if self.whole else TaskRole.UPDATE), [])
        return tuple(self._task(place, members[place]) for place in sorted(members, key=lambda place: place.order))

    # -------------------------------------------------------------------------------------------------- values

    def _stage_of_value(self, v: int) -> int:
        place = self.place_of_value(v)
        return place.stage if place else self.homes.get(v, 0)

    def place_of_value(self, v: int) -> OpPlace | None:
        """Return the place of the op that computes a value; None for inputs and invariant values."""
        producer = self.graph.producer[v]
        return None if producer is None else self.places[producer]

    def _is_invariant(self, v: int) -> bool:
        producer = self.graph.producer[v]
        return producer is not None and self.places[producer] is None

    def is_repeated(self, v: int) -> bool:
        """Return True for values that every task computes for itself."""
        return self._is_invariant(v) or v in self.free

    def _is_sum(self, v: int) -> bool:
        """Return True for values of the loop without a batch dim: they are added up over micro-batches."""
        producer = self.graph.producer[v]
        return (
            producer is not None
            and self.step.phases[producer].in_loop
            and self.step.batch_dims[v] is None
            and v not in self.free
        )

    def _sums_to_send(self) -> list[int]:
        """Return the sums that the update of another stage reads."""
        if self.whole:
            return []
        found: list[int] = []
        for op_id, place in enumerate(self.places):
            if place is None or place.kind is not TaskRole.UPDATE:
                continue
            for v in self.graph.ops[op_id].operands:
                if self._is_sum(v) and self._stage_of_value(v) != place.stage:
                    found.append(v)
        return found

    def home_spec(self, v: int) -> Spec:
        """Return the spec in which a value leaves the op that computes it."""
        producer, value = self.graph.producer[v], self.graph.values[v]
        place = self.place_of_value(v)
        if producer is None or place is None:
            return replicated(value.rank)
        placement = self.plan.stages[place.stage].ops.get(producer)
        if placement is None:
            return replicated(value.rank)
        return placement.results[self.graph.ops[producer].results.index(v)]

    def stored_spec(self, v: int) -> Spec:
        """Return the spec in which a sum is stored during the loop."""
        stage = self.plan.stages[self._stage_of_value(v)]
        return stage.accumulators[v].stored if v in stage.accumulators else self.home_spec(v)

    def resolved_spec(self, v: int) -> Spec:
        """Return the spec in which the update reads a sum."""
        stage = self.plan.stages[self._stage_of_value(v)]
        return stage.accumulators[v].resolved if v in stage.accumulators else self.home_spec(v)

    def output_spec(self, v: int) -> Spec:
        """Return the spec of a graph output: as the caller requested, else state is returned as it was passed in."""
        target = self.step.aliases.get(v)
        stage = self.plan.stages[self.output_stage(v)]
        if v in stage.outputs:
            return stage.outputs[v]
        if target is not None and target in stage.inputs:
            return stage.inputs[target]
        spec = self.resolved_spec(v) if self._is_sum(v) else self.home_spec(v)
        return spec.without_partial()

    def output_stage(self, v: int) -> int:
        """Return the stage on which a graph output is returned."""
        target = self.step.aliases.get(v)
        if target is not None:
            return self.homes[target]
        return self._stage_of_value(v)

    # -------------------------------------------------------------------------------------------------- tasks

    def _task(self, place: OpPlace, ops: list[int]) -> TaskSpec:
        graph, stage = self.graph, self.plan.stages[place.stage]
        ordered, external = self._with_repeated(ops, self._extra_needs(place))
        inputs, resolved = [], []
        for v in external:
            spec, later = self._input_spec(place, stage, v)
            inputs.append(Port(value=v, spec=spec))
            if later is not None:
                resolved.append((v, spec, later))
        if place.kind is TaskRole.STEP:
            # This task runs the loop and the update: the sums that it resolves are its own, not its inputs.
            resolved += [(v, sums.stored, sums.resolved) for v, sums in stage.accumulators.items()]
        buckets = self._buckets([v for v, _, _ in resolved])
        # Sums in buckets are resolved bucket by bucket, the others after them.
        order = {v: i for i, v in enumerate(v for bucket in buckets for v in bucket)}
        resolved.sort(key=lambda sums: order.get(sums[0], len(order)))
        computed = {r for op_id in ordered for r in graph.ops[op_id].results if not self.is_repeated(r)}
        computed.update(self._free_outputs(place))
        in_loop = place.kind.in_loop
        # A sum that only other ops of the loop read is no accumulator.
        sums = [v for v in sorted(computed) if in_loop and self._is_sum(v) and self._read_after_loop(v)]
        outputs = [*self._computed_outputs(place, sorted(computed)), *self._handed_on(place, external, computed)]
        return TaskSpec(
            stage=place.stage,
            kind=place.kind,
            wave=place.wave,
            ops=tuple(ordered),
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            sums=tuple(Port(value=v, spec=self.stored_spec(v)) for v in sums),
            resolved=tuple(resolved),
            buckets=buckets,
            keeps_gathered=stage.keeps_gathered,
        )

    def _buckets(self, resolved: Collection[int]) -> tuple[tuple[int, ...], ...]:
        """Return the plan's buckets, restricted to the sums that a task resolves."""
        mine = (tuple(v for v in bucket if v in resolved) for bucket in self.plan.buckets)
        return tuple(bucket for bucket in mine if bucket)

    def _computed_outputs(self, place: OpPlace, computed: Iterable[int]) -> Iterator[Port]:
        """Yield the values computed by a task that others read.

        Sums leave a task of the loop as outputs only for other tasks of the loop; for the update they leave as `sums`.
        """
        for v in computed:
            if self._is_sum(v) and place.kind.in_loop:
                if self._read_in_loop_elsewhere(v, place):
                    yield Port(value=v, spec=self.home_spec(v))
            elif self._leaves(v, place):
                yield Port(value=v, spec=self._leaving_spec(v, place))

    def _handed_on(self, place: OpPlace, external: Iterable[int], computed: set[int]) -> Iterator[Port]:
        """Yield values that an update passes on without computing them.

        These are sums to return or for other updates, and repeated values that are returned.
        """
        if place.kind.in_loop:
            return
        for v in dict.fromkeys([*external, *self._invariant_outputs(place)]):
            if self._returned_from(v, place) and v not in computed:
                yield Port(value=v, spec=self.output_spec(v))
            elif place.kind is TaskRole.UPDATE and self._is_sum(v) and self._later_readers(v, place):
                yield Port(value=v, spec=self.resolved_spec(v))

    def _extra_needs(self, place: OpPlace) -> list[int]:
        """Return values that a task must read though none of its ops does: sums to return or send, repeated outputs."""
        if place.kind is TaskRole.STEP:
            return [*self._invariant_outputs(place), *self._free_outputs(place)]
        if place.kind is not TaskRole.UPDATE or place.wave:
            return self._free_outputs(place)
        sums = [v for v in self.graph.outputs if self._is_sum(v) and self._stage_of_value(v) == place.stage]
        sums += [v for v in self._sums_to_send() if self._stage_of_value(v) == place.stage]
        return [*dict.fromkeys(sums), *self._invariant_outputs(place), *self._free_outputs(place)]

    def _invariant_outputs(self, place: OpPlace) -> list[int]:
        wanted = place.kind is TaskRole.STEP or (place.kind is TaskRole.UPDATE and place.stage == 0 and place.wave == 0)
        return [v for v in dict.fromkeys(self.graph.outputs) if wanted and self._is_invariant(v)]

    def _free_outputs(self, place: OpPlace) -> list[int]:
        """Return the free values that the caller receives (a dropout mask); the task of their op computes them."""
        wanted = (v for v in dict.fromkeys(self.graph.outputs) if v in self.free)
        return [v for v in wanted if self.place_of_value(v) == place]

    def _returned_from(self, v: int, place: OpPlace) -> bool:
        if v not in self.graph.outputs:
            return False
        if self._is_invariant(v):
            return place.stage == 0 and place.wave == 0
        return self._is_sum(v) and self._stage_of_value(v) == place.stage and place.wave == 0

    def _with_repeated(self, ops: list[int], needs: Iterable[int]) -> tuple[list[int], list[int]]:
        """Return the ops of a task with the repeated ones that they read, in order; and the values that come from
        outside.
        """
        graph, own = self.graph, set(ops)
        needed, chosen, external = set(needs), list[int](), dict[int, None]()
        made_here = {r for op_id in own for r in graph.ops[op_id].results}
        for op in reversed(graph.ops):
            lazy = any(r in self.free for r in op.results)
            repeated = self.places[op.id] is None or lazy
            wanted = any(r in needed for r in op.results)
            # Backwards, so that all readers of an op are known here. A free value of this task is computed only if
            # something in the task reads it.
            if (op.id in own and (not lazy or wanted)) or (repeated and wanted):
                chosen.append(op.id)
                needed.update(v for v in op.operands if graph.values[v].literal is None)
        produced = {r for op_id in chosen for r in graph.ops[op_id].results}
        for v in sorted(needed | {v for v in needs}):
            if v not in produced and v not in made_here:
                external[v] = None
        return list(reversed(chosen)), list(external)

    def _input_spec(self, place: OpPlace, stage: StagePlan, v: int) -> tuple[Spec, Spec | None]:
        """Return the spec in which a value enters a task, and for sums the spec to which the task resolves it, else
        None.
        """
        origin = self.place_of_value(v)
        # What comes from outside the stage arrives in the spec that the plan gives for it.
        if origin is None or origin.stage != place.stage:
            return stage.inputs.get(v, replicated(self.graph.values[v].rank)), None
        if place.kind is TaskRole.UPDATE and self._is_sum(v):
            # If wave 0 reads a sum, it resolves it for all later waves.
            if place.wave == 0 or not self._read_by_wave_zero(v):
                stored, resolved = self.stored_spec(v), self.resolved_spec(v)
                return stored, resolved if stored != resolved else None
            return self.resolved_spec(v), None
        return self.home_spec(v), None

    def _read_by_wave_zero(self, v: int) -> bool:
        """Return True if wave 0 of the value's own stage reads, returns or sends the sum: then wave 0 resolves it."""
        stage = self._stage_of_value(v)
        if v in self.graph.outputs or v in self._sums_to_send():
            return True
        return any(self.places[c] == OpPlace(stage=stage, kind=TaskRole.UPDATE) for c in self.graph.consumers[v])

    def _read_after_loop(self, v: int) -> bool:
        """Return True if the value is returned or an update reads it."""
        if v in self.graph.outputs or any(self.step.phases[c] is Phase.UPDATE for c in self.graph.consumers[v]):
            return True
        # An update makes free values for itself, and reads what they are made of.
        return any(place.kind is TaskRole.UPDATE for place in self._real_readers(v))

    def _real_readers(self, v: int) -> set[OpPlace]:
        """Return the places of the ops that read a value, directly or through repeated ops."""
        found, queue, seen = set[OpPlace](), [v], {v}
        while queue:
            for c in self.graph.consumers[queue.pop()]:
                op = self.graph.ops[c]
                place = self.places[c]
                # A repeated op is part of each task that reads its results: the search goes on behind it.
                if place is not None and not any(r in self.free for r in op.results):
                    found.add(place)
                    continue
                for r in op.results:
                    if r not in seen:
                        seen.add(r)
                        queue.append(r)
        return found

    def _read_in_loop_elsewhere(self, v: int, place: OpPlace) -> bool:
        return any(p != place and p.kind is not TaskRole.UPDATE for p in self._real_readers(v))

    def _leaves(self, v: int, place: OpPlace) -> bool:
        return v in self.graph.outputs or any(p != place for p in self._real_readers(v))

    def _later_readers(self, v: int, place: OpPlace) -> bool:
        """Return True if this task resolves a sum that other update tasks read."""
        if place.wave or self._stage_of_value(v) != place.stage:
            return False
        return any(p.kind is TaskRole.UPDATE and p != place for p in self._real_readers(v))

    def _leaving_spec(self, v: int, place: OpPlace) -> Spec:
        """Return the spec of an output of a task: the caller's if only the caller reads it, else the spec of its op."""
        # Resharding for the caller inside the task saves a program of its own, unless other tasks read the value too.
        only_returned = v in self.graph.outputs and not any(p != place for p in self._real_readers(v))
        if only_returned and self.output_stage(v) == place.stage:
            return self.output_spec(v)
        return self.home_spec(v)


def run_parts(walk: Walk[A], task: TaskSpec, step: StepGraph) -> Iterator[Phase]:
    """Run a task whose inputs the walk holds, and yield each phase when it is about to begin.

    Each phase fetches what it reads, as it is priced: a parameter gathered for the forward pass is gathered again for
    the backward pass, unless the task keeps gathered parameters.
    """
    parts = _by_phase(task.ops, step)
    kept = parameters(step) if task.keeps_gathered else frozenset[int]()
    for phase, part in parts.items():
        yield phase
        walk.forget(but=kept if phase.in_loop else ())
        if phase is Phase.UPDATE:
            for value, stored, resolved in task.resolved:
                walk.arrays[value] = {stored: walk.get(value, stored)}
                # No other copy remains, so that every reader of the update gets the resolved sum.
                walk.arrays[value] = {resolved: walk.get(value, resolved)}
        walk.run(part)
        if phase.in_loop and phase is [p for p in parts if p.in_loop][-1]:
            # Sums leave the loop as they are stored, where a task holds both.
            for value, stored, _ in task.resolved:
                walk.arrays[value] = {stored: walk.get(value, stored)}


def _by_phase(ops: Sequence[int], step: StepGraph) -> dict[Phase, list[int]]:
    """Return the ops of a task by phase, in order; invariant ops belong to the first phase that has any."""
    parts: dict[Phase, list[int]] = {Phase.FORWARD: [], Phase.BACKWARD: [], Phase.UPDATE: []}
    # A task of invariant ops alone, which only returns their results, is an update.
    first = next((phase for phase in parts if any(step.phases[i] is phase for i in ops)), Phase.UPDATE)
    for i in ops:
        parts[first if step.phases[i] is Phase.INVARIANT else step.phases[i]].append(i)
    return {phase: part for phase, part in parts.items() if part}
