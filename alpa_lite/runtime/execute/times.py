"""When each instruction of a step ran: simulated and measured in one format, instruction by instruction."""

from __future__ import annotations

from dataclasses import dataclass

from alpa_lite.lower.instructions import Instruction, Program


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskTime:
    """The span of one instruction, in seconds since the step began. `kind` is the instruction's, `name` its task's."""

    stage: int
    kind: str
    name: str
    microbatch: int | None
    start_seconds: float
    end_seconds: float

    @staticmethod
    def of(program: Program, instruction: Instruction, start_seconds: float, end_seconds: float) -> TaskTime:
        """The span of an instruction of a program."""
        is_task = instruction.kind == "RUN"
        return TaskTime(
            stage=instruction.stage,
            kind=instruction.kind,
            name=program.tasks[instruction.task].name if is_task else instruction.kind,
            microbatch=instruction.microbatch,
            start_seconds=start_seconds,
            end_seconds=end_seconds,
        )
