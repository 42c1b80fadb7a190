"""Compute the memory that XLA allocates for a compiled step, from the sizes of its buffers and executables.

    resident   = buffers alive on the devices of a stage, arguments of the running executable included
    allocated  = max over instructions of resident + outputs that overwrite no argument + temporaries   `allocated`

Outputs and temporaries are what XLA reports for each executable (`memory_analysis`). Nothing runs. Other memory of the
process and fragmentation by the device allocator are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from alpa_lite.lower.instructions import Buffer, Instruction
from alpa_lite.plan.plan import Plan
from alpa_lite.plan.pricing import local_bytes
from alpa_lite.runtime.execute.execute import Executor
from alpa_lite.sharding.specs import Spec, replicated


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocated:
    """Bytes on one device of a stage at its peak, including those of other stages on the same device.

    Attributes:
        resident_bytes: live buffers, arguments of the running task included.
        output_bytes: results of the running task that overwrite no argument.
        temporary_bytes: temporaries of the running task.
    """

    resident_bytes: float
    output_bytes: float
    temporary_bytes: float

    @property
    def peak_bytes(self) -> float:
        """The sum of all three, in bytes."""
        return self.resident_bytes + self.output_bytes + self.temporary_bytes

    # The names of JAX's own memory analysis, for code that reads one.

    @property
    def argument_size_in_bytes(self) -> float:
        """See `resident_bytes`."""
        return self.resident_bytes

    @property
    def output_size_in_bytes(self) -> float:
        """See `output_bytes`."""
        return self.output_bytes

    @property
    def temp_size_in_bytes(self) -> float:
        """See `temporary_bytes`."""
        return self.temporary_bytes


def allocated(executor: Executor, plan: Plan) -> tuple[Allocated, ...]:
    """Return for each stage the allocation at the peak of its devices."""
    walk = _BufferWalk(executor, plan)
    for instruction in executor.program.instructions:
        walk.take(instruction)
    return tuple(walk.most[walk.place[stage]] for stage in range(len(plan.stages)))


class _BufferWalk:
    """Tracks the live buffers on each group of devices, by the number of the first stage on it."""

    def __init__(self, executor: Executor, plan: Plan) -> None:
        self.executor, self.program, self.plan = executor, executor.program, plan
        self.place = {i: min(stages) for stages in self.plan.stages_together for i in stages}
        self.live: dict[int, dict[Buffer, float]] = {place: {} for place in self.place.values()}
        self.most: dict[int, Allocated] = {}

    def size(self, buffer: Buffer, spec: Spec | None) -> float:
        """Return the bytes per device of a buffer."""
        value = self.executor.step.graph.values[buffer.value]
        sizes = dict(self.plan.stages[buffer.stage].mesh_shape.axis_sizes)
        return local_bytes(value, spec if spec is not None else replicated(value.rank), sizes)

    def take(self, instruction: Instruction) -> None:
        """Apply the effect of one instruction."""
        if instruction.kind == "FREE":
            for live in self.live.values():
                for buffer in instruction.reads:
                    live.pop(buffer, None)
        elif instruction.kind in ("RUN", "ZEROS"):
            self._run(instruction)
        else:
            live = self.live[self.place[instruction.stage]]
            live.update({buffer: self.size(buffer, instruction.spec) for buffer in instruction.writes})

    def _run(self, instruction: Instruction) -> None:
        place = self.place[instruction.stage]
        live, task = self.live[place], self.program.tasks[instruction.task]
        ports = (*task.outputs, *task.sums) if instruction.kind == "RUN" else task.sums
        written = {b: self.size(b, port.spec) for b, port in zip(instruction.writes, ports, strict=True)}
        if instruction.kind == "RUN":
            executable = self.executor.executables[instruction.task]
            memory = executable.compiled.memory_analysis()
            now = Allocated(
                resident_bytes=sum(live.values()),
                output_bytes=float(memory.output_size_in_bytes - memory.alias_size_in_bytes),
                temporary_bytes=float(memory.temp_size_in_bytes),
            )
            if place not in self.most or now.peak_bytes > self.most[place].peak_bytes:
                self.most[place] = now
            for position in executable.donated:
                live.pop(instruction.reads[position], None)
        live.update(written)
