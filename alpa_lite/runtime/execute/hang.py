"""What an instruction that does not end is, and what it reads, in words."""

from __future__ import annotations

from collections.abc import Sequence

from jax.sharding import Mesh

from alpa_lite.lower.instructions import SUM, Buffer, Instruction, Program
from alpa_lite.program.phases import StepGraph

MOST_INPUTS = 8
"""So many inputs are named; the others are counted."""


def explanation(program: Program, step: StepGraph, meshes: Sequence[Mesh], number: int) -> str:
    """The sentence for instruction `number`: task, micro-batch, stage, devices, inputs, and what to do.

    The number after the last one stands for what follows the program in a job of several processes.
    """
    if number == len(program.instructions):
        return (
            "the delivery of the step's small results to all processes. Either it is stuck, because one of them does "
            "not call the step, or takes longer than that; in the second case give a higher watchdog_seconds."
        )
    instruction = program.instructions[number]
    if instruction.kind == "SEND":
        return _of_transfer(program, step, meshes, number)
    task = program.tasks[instruction.task]
    devices = ", ".join(map(str, meshes[instruction.stage].devices.flat))
    inputs = list(zip(instruction.reads, (*task.inputs, *task.sums), strict=False))
    named = [f"{_name(step, b)} {_facts(step, b, str(p.spec))}{_origin(program, number, b)}" for b, p in inputs]
    more = f"; and {len(named) - MOST_INPUTS} more" if len(named) > MOST_INPUTS else ""
    sent = any(_writer(program, number, b).kind == "SEND" for b, _ in inputs)
    suspect = "it, or a transfer that brings its inputs," if sent else "it"
    return (
        f"{short_name(program, number)}, on stage {instruction.stage} ({devices}). "
        f"All that it reads was launched before: {'; '.join(named[:MOST_INPUTS]) or 'nothing'}{more}. "
        f"Either {suspect} is stuck, or takes longer than that; in the second case give a higher watchdog_seconds. On "
        "virtual CPU devices `alpa-lite doctor` says which settings they need."
    )


def short_name(program: Program, number: int) -> str:
    """An instruction in a few words; the number after the last one stands for the delivery of results in a job."""
    if number == len(program.instructions):
        return "the delivery of results"
    instruction = program.instructions[number]
    batch = "" if instruction.microbatch is None else f" of micro-batch {instruction.microbatch}"
    place = f"instruction {number} of {len(program.instructions)}"
    if instruction.kind != "RUN":
        return f"{instruction.kind} to stage {instruction.stage}{batch}, {place}"
    return f"{program.tasks[instruction.task].name!r}{batch}, {place}"


def _of_transfer(program: Program, step: StepGraph, meshes: Sequence[Mesh], number: int) -> str:
    instruction = program.instructions[number]
    source, buffer = instruction.source_stage, instruction.reads[0]
    ends = [f"stage {s} ({', '.join(map(str, meshes[s].devices.flat))})" for s in (source, instruction.stage)]
    return (
        f"the transfer of {_name(step, buffer)} {_facts(step, buffer, str(instruction.spec))}, instruction {number} of "
        f"{len(program.instructions)}, from {ends[0]} to {ends[1]}. Either it is stuck, or takes longer than that; in "
        "the second case give a higher watchdog_seconds."
    )


def _name(step: StepGraph, buffer: Buffer) -> str:
    """The user's name of an argument, or the user's line of a result."""
    graph = step.graph
    producer = graph.producer[buffer.value]
    if producer is None:
        return graph.values[buffer.value].name or f"argument {graph.inputs.index(buffer.value)}"
    op = graph.ops[producer]
    kind = "the sum of what" if buffer.microbatch == SUM else "what"
    return f"{kind} {op.primitive} gives" + (f" at {op.source}" if op.source else "")


def _facts(step: StepGraph, buffer: Buffer, spec: str) -> str:
    value = step.graph.values[buffer.value]
    return f"{value.dtype}{list(value.shape)} as {spec}"


def _origin(program: Program, number: int, buffer: Buffer) -> str:
    writer = _writer(program, number, buffer)
    return f", sent by stage {writer.source_stage}" if writer.kind == "SEND" else ""


def _writer(program: Program, number: int, buffer: Buffer) -> Instruction:
    return next(i for i in reversed(program.instructions[:number]) if buffer in i.writes)
