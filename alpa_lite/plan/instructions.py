"""A program: one list of instructions, executed on devices or simulated on a cost model.

An instruction places an input, runs a task, sends a value, or makes, joins or frees buffers (`InstructionKind`). A
buffer is named by value, stage and micro-batch (None: once per step). `program_builder` makes the list from a plan.

A `TaskTime` says when one instruction ran; simulation and measurement both return one per instruction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from alpa_lite.plan.task_specs import TaskSpec
from alpa_lite.schedule.servers import ServerEvent
from alpa_lite.schedule.tasks import Task
from alpa_lite.sharding.specs import Spec
from alpa_lite.sharding.transfer import PlannedTransfer
from alpa_lite.text import View, one_line, show_count, view

SUM = -1
"""The "micro-batch" in the name of an accumulator's buffer: of the first update; that of update u is SUM - u."""


class Buffer(NamedTuple):
    """Name of an array during a step; `microbatch` is None for arrays that exist once per step.

    It is the number of the update for what one of several updates makes, and below 0 for accumulators (`SUM`).
    """

    value: int
    stage: int
    microbatch: int | None = None

    def __str__(self) -> str:
        if self.microbatch is None:
            part = ""
        elif self.microbatch > SUM:
            part = f" mb{self.microbatch}"
        else:
            part = " sum" + (f" {SUM - self.microbatch}" if self.microbatch < SUM else "")
        return f"%{self.value}@{self.stage}{part}"


class InstructionKind(StrEnum):
    """The kinds of instructions.

    PLACE     put a graph input (or its i-th micro-batch) onto the submesh of a stage
    RUN       run a task of a stage
    SEND      send a value from one stage to another, into the spec that the receiver reads
    ZEROS     make fresh accumulators of a stage
    CONCAT    join the micro-batches of an output, or average it over several updates
    ADD       add up what several workers have summed
    MEAN      average what several replicas have made of a micro-batch each
    RENEW     let the buffers of state hold what an update has made of it
    FREE      free buffers that no later instruction reads
    """

    PLACE = "PLACE"
    RUN = "RUN"
    SEND = "SEND"
    ZEROS = "ZEROS"
    CONCAT = "CONCAT"
    ADD = "ADD"
    MEAN = "MEAN"
    RENEW = "RENEW"
    FREE = "FREE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One instruction; unused fields keep their defaults.

    For a SEND, `transfer` lists which device sends what to whom and what the receiving mesh gathers, and `bytes` counts
    the bytes sent to other devices.
    """

    kind: InstructionKind
    stage: int
    task: int = -1
    microbatch: int | None = None
    reads: tuple[Buffer, ...] = ()
    writes: tuple[Buffer, ...] = ()
    spec: Spec | None = None
    source_stage: int = -1
    bytes: float = 0.0
    transfer: PlannedTransfer | None = None

    def __str__(self) -> str:
        reads, writes = ", ".join(map(str, self.reads)), ", ".join(map(str, self.writes))
        head = f"{self.kind:6} stage {self.stage}" + (f" task {self.task}" if self.task >= 0 else "")
        return f"{head}: {reads} -> {writes}"


class Segment(NamedTuple):
    """Instructions `first` to `end` - 1 of a program, which belong to one event of a parameter server, or one task."""

    event: ServerEvent | Task
    first: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Program:
    """The tasks and instructions of a step, the buffers of its outputs, and the home stage and spec of each input.

    `segments`: parts of the instructions that may run in another order than they are listed in, or none.
    """

    tasks: tuple[TaskSpec, ...]
    instructions: tuple[Instruction, ...]
    outputs: tuple[Buffer, ...]
    output_specs: tuple[Spec, ...]
    homes: Mapping[int, tuple[int, Spec]]
    num_microbatches: int
    segments: tuple[Segment, ...] = ()

    def __str__(self) -> str:
        return "\n".join(map(str, self.instructions)) or "no instructions"

    def __repr__(self) -> str:
        return one_line(self, f"of {show_count(len(self.tasks), 'task')}, {len(self.instructions)} instructions")

    def _repr_html_(self) -> str:
        return view(View.INSTRUCTIONS_HTML, self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Print what IPython shows where it does not render HTML."""
        printer.text(view(View.INSTRUCTIONS_SUMMARY if cycle else View.INSTRUCTIONS_TEXT, self))


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskTime:
    """The time span of an instruction, in seconds since the step began; `name` is that of its task."""

    stage: int
    kind: InstructionKind
    name: str
    microbatch: int | None
    start_seconds: float
    end_seconds: float

    @staticmethod
    def of(program: Program, instruction: Instruction, start_seconds: float, end_seconds: float) -> TaskTime:
        """Return the span of an instruction of a program; times in seconds since the step began."""
        is_task = instruction.kind is InstructionKind.RUN
        return TaskTime(
            stage=instruction.stage,
            kind=instruction.kind,
            name=program.tasks[instruction.task].name if is_task else instruction.kind,
            microbatch=instruction.microbatch,
            start_seconds=start_seconds,
            end_seconds=end_seconds,
        )
