"""Which inputs of a task are given away to it, so that results take over their memory.

    arguments      that the caller donates, to the update that is the last to read them
    intermediates  of a micro-batch, to the task that is the last to read them, in every micro-batch

An argument that the caller keeps is never given away, whatever it is called inside: placing or sending an array that is
where it should be hands on the array itself. So only what a task made, or what was sent to other devices, counts as an
intermediate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from alpa_lite.lower.instructions import Buffer, Instruction, Program
from alpa_lite.lower.slices import Port, TaskSpec
from alpa_lite.plan.plan import Plan
from alpa_lite.program.phases import StepGraph


def donations(program: Program, plan: Plan, step: StepGraph, donated: Sequence[bool]) -> dict[int, tuple[int, ...]]:
    """For each task the numbers of the inputs that it may overwrite. `donated[i]`: the caller gives argument i away."""
    facts = _Facts(program, plan, step, donated)
    kept: dict[int, set[int]] = {}
    for number, instruction in enumerate(program.instructions):
        if instruction.kind == "RUN":
            inputs = range(len(program.tasks[instruction.task].inputs))
            free = {i for i in inputs if facts.is_free(number, instruction, i)}
            kept[instruction.task] = kept.get(instruction.task, free) & free
    return {task: _reusable(program.tasks[task], sorted(free), step) for task, free in kept.items() if free}


class _Facts:
    def __init__(self, program: Program, plan: Plan, step: StepGraph, donated: Sequence[bool]) -> None:
        self.program, self.plan, self.donated = program, plan, donated
        self.leaf = dict(zip(step.graph.inputs, (part.leaf for part in step.input_parts), strict=True))
        self.same = sent_in_place(program, plan)
        self.shared = {*self.same, *self.same.values()}
        self.made = self._made()
        self.returned = {self.same.get(buffer, buffer) for buffer in program.outputs}
        self.last: dict[Buffer, tuple[int, int]] = {}
        self.times: Counter[tuple[int, Buffer]] = Counter()
        for number, instruction in enumerate(program.instructions):
            if instruction.kind != "FREE":
                for position, buffer in enumerate(instruction.reads):
                    self.last[self.same.get(buffer, buffer)] = number, position
                    self.times[number, self.same.get(buffer, buffer)] += 1

    def is_free(self, number: int, instruction: Instruction, position: int) -> bool:
        """True when nobody needs an input of this instruction any more, and it is ours to overwrite."""
        buffer = instruction.reads[position]
        if buffer in self.returned or self.last.get(buffer) != (number, position) or self.times[number, buffer] > 1:
            return False
        leaf = self.leaf.get(buffer.value)
        if leaf is None:
            return buffer in self.made and buffer not in self.shared
        given = leaf < len(self.donated) and self.donated[leaf]
        at_home = self.program.homes[buffer.value][0] == buffer.stage
        # Without a task that returns the argument's next value, nothing would take it over.
        return given and at_home and self.program.tasks[instruction.task].kind in ("update", "step")

    def _made(self) -> set[Buffer]:
        """Arrays that the program made itself, or copied to devices of which the source has none."""
        found: set[Buffer] = set()
        for instruction in self.program.instructions:
            if instruction.kind == "RUN":
                found.update(instruction.writes)
            elif instruction.kind == "SEND":
                source, target = (
                    set(self.plan.stages[s].submesh.devices) for s in (instruction.source_stage, instruction.stage)
                )
                if source.isdisjoint(target):
                    found.update(instruction.writes)
        return found


def sent_in_place(program: Program, plan: Plan) -> dict[Buffer, Buffer]:
    """What stages send to others on devices they share: it may be the very array that was sent. Copy → original."""
    same: dict[Buffer, Buffer] = {}
    for instruction in program.instructions:
        if instruction.kind == "SEND":
            stages = (plan.stages[s] for s in (instruction.source_stage, instruction.stage))
            if set.intersection(*(set(stage.submesh.devices) for stage in stages)):
                source = instruction.reads[0]
                same[instruction.writes[0]] = same.get(source, source)
    return same


def _reusable(task: TaskSpec, positions: Sequence[int], step: StepGraph) -> tuple[int, ...]:
    """Of some inputs of a task those whose buffer an output can take over: same shape, dtype and spec."""

    def layout(port: Port) -> object:
        value = step.graph.values[port.value]
        return value.shape, value.dtype, port.spec

    free, taken = Counter(map(layout, task.outputs)), list[int]()
    for position in positions:
        kind = layout(task.inputs[position])
        if free[kind]:
            free[kind] -= 1
            taken.append(position)
    return tuple(taken)
