"""Prove that the processes of a job cannot deadlock.

    order(p) = the instructions that process p takes part in, in the order in which it launches them      `orders`
    an instruction is done when all participants have reached it and all its inputs are written     `verify_order`

Here a process reaches an instruction when those before it are done. Devices may run more at a time, since programs that
share a device are launched in this order; so if all get done here, they do there. Success is certain when every process
follows one list: all participants have reached the first of the remaining instructions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from alpa_lite.errors import VerificationError
from alpa_lite.lower.instructions import Buffer, Instruction, Program


def participants(instruction: Instruction, processes: Sequence[Sequence[int]]) -> frozenset[int]:
    """Return the processes that take part. `processes`: of each stage. Any process may hold a part of an argument."""
    if instruction.kind == "PLACE":
        return frozenset(process for stage in processes for process in stage)
    stages = {instruction.stage} | ({instruction.source_stage} if instruction.kind == "SEND" else set())
    return frozenset(process for stage in stages for process in processes[stage])


def orders(program: Program, processes: Sequence[Sequence[int]]) -> dict[int, list[int]]:
    """Return for each process the numbers of the instructions that it launches."""
    found: dict[int, list[int]] = {process: [] for stage in processes for process in stage}
    for number, instruction in enumerate(program.instructions):
        if instruction.kind != "FREE":
            for process in participants(instruction, processes):
                found[process].append(number)
    return found


def verify_order(
    program: Program, processes: Sequence[Sequence[int]], launched: Mapping[int, Sequence[int]] | None = None
) -> None:
    """Raise `VerificationError` unless all instructions get done. `launched`: default `orders`."""
    queues = {process: list(order) for process, order in (launched or orders(program, processes)).items()}
    at, written = dict.fromkeys(queues, 0), set[Buffer]()
    waiting = {process for process, queue in queues.items() if queue}
    while waiting:
        ready = {number for process in waiting if _is_ready(number := queues[process][at[process]], program, written)}
        done = [number for number in ready if _all_there(number, program, processes, queues, at)]
        if not done:
            raise VerificationError(_circle(program, queues, at, waiting))
        for number in done:
            instruction = program.instructions[number]
            written.update(instruction.writes)
            for process in participants(instruction, processes):
                at[process] += 1
                if at[process] == len(queues[process]):
                    waiting.discard(process)


def _is_ready(number: int, program: Program, written: set[Buffer]) -> bool:
    return all(buffer in written for buffer in program.instructions[number].reads)


def _all_there(
    number: int,
    program: Program,
    processes: Sequence[Sequence[int]],
    queues: Mapping[int, Sequence[int]],
    at: Mapping[int, int],
) -> bool:
    taking = participants(program.instructions[number], processes)
    return all(at[p] < len(queues[p]) and queues[p][at[p]] == number for p in taking)


def _circle(program: Program, queues: Mapping[int, Sequence[int]], at: Mapping[int, int], waiting: set[int]) -> str:
    heads = ((process, queues[process][at[process]]) for process in sorted(waiting))
    told = "; ".join(f"process {p} at instruction {n} ({program.instructions[n]})" for p, n in heads)
    return f"The processes of this job would wait for each other for ever: {told}."
