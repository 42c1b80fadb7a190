"""Compute the memory that a program uses on each submesh, instruction by instruction.

    changes     buffers from their first writer to their FREE, and what a running task needs in addition;
                state is there all the time, unless there are several versions of it           `memory_changes`
    in place    a task writes a result into an input of the same form that it is the last to read  `_taken_over`
    work        what the program of a task takes beside its arguments and results                   `_work`

Memory follows the order of the instructions, not the seconds: hosts launch them one after the other, and a buffer is
allocated when the instruction that writes it is launched. What another stage has made long before lies on that stage
until its SEND is launched, just before the first task that reads it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from alpa_lite.plan.instructions import Buffer, Instruction, InstructionKind, Program
from alpa_lite.plan.parts import TaskRole
from alpa_lite.plan.plan import Plan
from alpa_lite.plan.pricing import local_bytes
from alpa_lite.plan.task_specs import Port, TaskSpec
from alpa_lite.program.phases import Phase, StepGraph
from alpa_lite.sharding.specs import Spec

TOKEN_BYTES, ADDRESS_BYTES = 1, 8
"""The bytes of the token that every program returns, and of the address of one result."""


def most_between(starts: Sequence[int], changes: Sequence[tuple[int, float]]) -> list[float]:
    """Return the largest partial sum of changes (instruction, bytes) from each of some instructions to the next one.

    What comes before the first of them counts with it.
    """
    found, held, current = [0.0] * len(starts), 0.0, 0
    for number, change in changes if starts else ():
        while current + 1 < len(starts) and number >= starts[current + 1]:
            current += 1
            found[current] = held
        held += change
        found[current] = max(found[current], held)
    return found


def memory_changes(
    program: Program, plan: Plan, step: StepGraph, row_of: Mapping[int, int]
) -> list[list[tuple[int, float]]]:
    """Return for each submesh the changes of the memory of a device: (number of the instruction, bytes), in order.

    `row_of`: the number of the submesh of each stage.
    """
    resident = _resident(program, plan, step)
    sizes = _sizes(program, plan, step, resident)
    # State is in memory before the step. Of state that is updated several times, each version has its own life.
    allocated = {*resident, *(Buffer(v, program.homes[v][0]) for v in _versioned(step))}
    changes: list[list[tuple[int, float]]] = [[] for _ in plan.stages_together]
    for buffer in allocated:
        changes[row_of[buffer.stage]].append((-1, resident.get(buffer, sizes.get(buffer, 0.0))))
    arrays = [_TaskArrays.of(task, step) for task in program.tasks]
    in_two = _in_two(program)
    following = (*program.instructions[1:], None)  # one item too long for an empty program
    for number, (instruction, after) in enumerate(zip(program.instructions, following, strict=False)):
        if instruction.kind is InstructionKind.FREE:
            for buffer in instruction.reads:
                changes[row_of[buffer.stage]].append((number, -sizes.get(buffer, 0.0)))
            continue
        # The first writer allocates; later ones, as of a gradient sum, write into the same memory.
        made = [buffer for buffer in instruction.writes if buffer not in allocated]
        allocated.update(made)
        taken_over = frozenset[Buffer]()
        if instruction.kind is InstructionKind.RUN:
            freed = after.reads if after is not None and after.kind is InstructionKind.FREE else ()
            taken_over = _taken_over(arrays[instruction.task], instruction, freed)
        for buffer in made:
            # What is written into the memory of an input has none of its own before this is freed.
            start = number + 1 if buffer in taken_over else number
            changes[row_of[buffer.stage]].append((start, sizes.get(buffer, 0.0)))
        if instruction.kind is InstructionKind.RUN:
            work = _work(plan, instruction, program.tasks[instruction.task], step, sizes, in_two)
            # Programs also return a token of one byte, and a table of the addresses of all results.
            work += TOKEN_BYTES + ADDRESS_BYTES * (len(instruction.writes) + 1)
            changes[row_of[instruction.stage]] += [(number, work), (number + 1, -work)]
    # What is freed by an instruction is available to what it writes: ends come before starts.
    return [sorted(each) for each in changes]


@dataclass(frozen=True, slots=True, kw_only=True)
class _TaskArrays:
    """The forms of a task's inputs and outputs, as numbers: arrays of one shape, dtype and spec have the same."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @staticmethod
    def of(task: TaskSpec, step: StepGraph) -> _TaskArrays:
        values, known = step.graph.values, dict[object, int]()

        def number(port: Port) -> int:
            form = (values[port.value].shape, values[port.value].dtype, port.spec)
            return known.setdefault(form, len(known))

        return _TaskArrays(inputs=tuple(map(number, task.inputs)), outputs=tuple(map(number, task.outputs)))


def _taken_over(arrays: _TaskArrays, instruction: Instruction, freed: Sequence[Buffer]) -> frozenset[Buffer]:
    """Return the buffers that a task writes into the memory of inputs of the same form that it is the last to read.

    `freed`: what the FREE after the task lists, which is what the task was the last to read.
    """
    last = set(freed)
    dying = Counter([form for b, form in zip(instruction.reads, arrays.inputs, strict=False) if b in last])
    reused = set[Buffer]()
    for buffer, form in zip(instruction.writes, arrays.outputs, strict=False):
        if dying[form]:
            dying[form] -= 1
            reused.add(buffer)
    return frozenset(reused)


def _in_two(program: Program) -> frozenset[int]:
    """Return the stages that compute a part of their backward pass before the gradients of weights.

    A first stage sends no gradient on, so that a schedule that splits backward passes leaves all of its own to the task
    of the gradients of weights: in it products may wait for each other as in a backward pass of one task.
    """
    return frozenset(
        task.stage
        for task in program.tasks
        if task.kind in (TaskRole.FORWARD_BACKWARD, TaskRole.INPUT_GRADIENT)
        and any(part.ops for part in task.parts if part.phase is Phase.BACKWARD)
    )


def _work(
    plan: Plan,
    instruction: Instruction,
    task: TaskSpec,
    step: StepGraph,
    sizes: Mapping[Buffer, float],
    in_two: frozenset[int],
) -> float:
    """Return the bytes that a task needs in addition to its arrays; a task of both passes also holds residuals.

    If only the temporaries of the whole stage are known, they contain the gradients that its backward pass is given,
    which are buffers. `in_two`: the stages of `_in_two`.
    """
    stage, saved, addends = plan.stages[task.stage], 0.0, 0.0
    if task.kind is TaskRole.WEIGHT_GRADIENT and plan.cluster.breadth_first:
        # Products wait for arguments alone, and not for the addition of another one's result.
        addends = sum(sizes.get(buffer, 0.0) for buffer in instruction.writes[len(task.outputs) :])
        if task.stage in in_two:
            return addends
    if stage.cost.work is not None:
        # Of a whole backward pass, products that wait for its gradients may be few.
        work = max(addends, stage.cost.work.of(task.kind))
        if task.kind is TaskRole.FORWARD_BACKWARD and task.stage in in_two:
            # What it saves for the gradients of weights it returns, in buffers.
            work -= sum(sizes.get(b, 0.0) for b in _made_forward(instruction.writes[: len(task.outputs)], step))
        return max(0.0, work)
    if task.kind in (TaskRole.BACKWARD, TaskRole.INPUT_GRADIENT):
        read, producer = instruction.reads[: len(task.inputs)], step.graph.producer
        makers = {b: producer[b.value] for b in read}
        given = [b for b, op_id in makers.items() if op_id is not None and step.phases[op_id] is Phase.BACKWARD]
        return max(0.0, stage.cost.temporary_bytes - sum(sizes.get(buffer, 0.0) for buffer in given))
    if task.kind in (TaskRole.FORWARD_BACKWARD, TaskRole.STEP):
        # Of what is saved, arrays of the batch and those of other stages are buffers that the task reads.
        read, producer = instruction.reads[: len(task.inputs)], step.graph.producer
        buffers = [b for b in read if producer[b.value] is not None or step.batch_dims[b.value] is not None]
        buffers += instruction.writes[: len(task.outputs)]
        saved = max(0.0, stage.cost.activation_bytes - sum(sizes.get(buffer, 0.0) for buffer in buffers))
    return stage.cost.temporary_bytes + saved


def _made_forward(buffers: Sequence[Buffer], step: StepGraph) -> list[Buffer]:
    """Return those of some buffers that hold results of the forward pass."""
    makers = {buffer: step.graph.producer[buffer.value] for buffer in buffers}
    return [b for b, op_id in makers.items() if op_id is not None and step.phases[op_id] is Phase.FORWARD]


def _resident(program: Program, plan: Plan, step: StepGraph) -> dict[Buffer, float]:
    """Return the bytes per device of state that is in memory all the time."""
    versioned = _versioned(step)
    return {
        Buffer(v, home): local_bytes(step.graph.values[v], spec, plan.stages[home].mesh_shape.axis_sizes)
        for v, (home, spec) in program.homes.items()
        if step.batch_dims[v] is None and v not in versioned
    }


def _versioned(step: StepGraph) -> frozenset[int]:
    """Return the state of which there are several versions in a step."""
    return frozenset(step.aliases.values()) if step.num_updates > 1 else frozenset()


def _sizes(program: Program, plan: Plan, step: StepGraph, resident: Iterable[Buffer]) -> dict[Buffer, float]:
    """Return the bytes per device of each buffer: 0 for state, for its replacement, and for arrays already in place."""
    nothing = set(resident)
    replaced = {buffer.value for buffer in nothing}
    for buffer, spec in zip(program.outputs, program.output_specs, strict=True):
        target = step.aliases.get(buffer.value)
        if target is not None and target in replaced and program.homes[target] == (buffer.stage, spec):
            nothing.add(buffer)
    bytes_of, written = dict[Buffer, float](), _written(program, plan, step)
    for instruction in program.instructions:
        for buffer, size in zip(instruction.writes, written(instruction), strict=False):
            if buffer not in nothing:
                # The first writer decides, as it does for the allocation in `_held`.
                bytes_of.setdefault(buffer, size)
    return bytes_of


def _written(program: Program, plan: Plan, step: StepGraph) -> Callable[[Instruction], Sequence[float]]:
    """Return a function of an instruction: the bytes per device of what it writes; () for what is in place already."""

    def of_array(value: int, spec: Spec, stage: int) -> float:
        return local_bytes(step.graph.values[value], spec, plan.stages[stage].mesh_shape.axis_sizes)

    # The same for every micro-batch.
    of_tasks = [[of_array(p.value, p.spec, task.stage) for p in (*task.outputs, *task.sums)] for task in program.tasks]

    def written(instruction: Instruction) -> Sequence[float]:
        kind, stage, spec = instruction.kind, instruction.stage, instruction.spec
        if kind in (InstructionKind.RUN, InstructionKind.ZEROS):
            made = 0 if kind is InstructionKind.RUN else len(program.tasks[instruction.task].outputs)
            return of_tasks[instruction.task][made:]
        sent = kind is InstructionKind.SEND
        if spec is None or (sent and plan.stages[instruction.source_stage].submesh == plan.stages[stage].submesh):
            return ()
        return [of_array(buffer.value, spec, stage) for buffer in instruction.writes]

    return written
