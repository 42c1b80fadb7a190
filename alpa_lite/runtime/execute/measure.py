"""Measure a step on the devices of this process: how long it takes, and the memory that XLA allocates for it.

    resident   = buffers alive on the devices of a stage, arguments of the running executable and all state included
    allocated  = max over instructions of resident + outputs that overwrite no argument + temporaries   `allocated`

Outputs and temporaries are what XLA reports for each executable (`memory_analysis`); nothing runs for that. Other
memory of the process and fragmentation by the device allocator are not counted.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh

from alpa_lite import _jax
from alpa_lite._jax import TreeLeaf
from alpa_lite.errors import ExecutionError
from alpa_lite.lower.emission import Executable
from alpa_lite.plan.instructions import Buffer, Instruction, InstructionKind, Program, TaskTime
from alpa_lite.plan.plan import Plan
from alpa_lite.plan.pricing import local_bytes
from alpa_lite.program.phases import StepGraph
from alpa_lite.runtime.execute.execute import Executor
from alpa_lite.sharding.specs import Spec, replicated
from alpa_lite.text import show_bytes

Inputs = Callable[[Sequence[TreeLeaf]], list[TreeLeaf]]

NUM_STEPS = 3
"""Number of steps run to measure one."""


def step_seconds(executor: Executor, shapes: Sequence[jax.ShapeDtypeStruct], inputs: Inputs) -> float:
    """Return the median time of a few steps on arguments of zeros, in seconds, without the time to place the arguments.

    `shapes`: of the arguments; `inputs`: maps the arguments to all inputs of the step.
    """
    seconds = [_seconds_once(executor, shapes, inputs) for _ in range(1 + NUM_STEPS)]
    return statistics.median(seconds[1:])  # the first step includes remaining compilation


def _seconds_once(executor: Executor, shapes: Sequence[jax.ShapeDtypeStruct], inputs: Inputs) -> float:
    # Outside of the measured time.
    leaves = placed_zeros(executor, shapes)
    # Placed anew for every step, as the step before may have taken over the memory of its arguments.
    started = time.perf_counter()
    jax.block_until_ready(executor(inputs(leaves)))
    return time.perf_counter() - started


def placed_zeros(executor: Executor, shapes: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]:
    """Return arguments of zeros in place, awaited: the step must not wait for them."""
    return jax.block_until_ready(executor.place_inputs([*map(_zeros, shapes)]))


def _zeros(like: jax.ShapeDtypeStruct) -> np.ndarray | jax.Array:
    """Return an array of zeros on the host, or of PRNG keys, of a shape and dtype."""
    if not jax.numpy.issubdtype(like.dtype, jax.dtypes.prng_key):
        return np.zeros(like.shape, like.dtype)
    words = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(like.shape, like.dtype))
    implementation = _jax.key_implementation(_jax.name_of(like.dtype))
    return jax.random.wrap_key_data(jax.numpy.zeros(words.shape, words.dtype), impl=implementation)


def typical_times(
    executor: Executor, shapes: Sequence[jax.ShapeDtypeStruct], inputs: Inputs, *, awaited: bool
) -> tuple[TaskTime, ...]:
    """Return the spans of the instructions of the step with the median length, of a few steps on arguments of zeros.

    `awaited`: see `Executor.__call__`.
    """
    steps: list[list[TaskTime]] = []
    for _ in range(1 + NUM_STEPS):
        record: list[TaskTime] = []
        leaves = placed_zeros(executor, shapes)
        executor(inputs(leaves), record, awaited=awaited)
        steps.append(record)
    # All spans are of one step, so that they fit together as medians of each span would not.
    return tuple(sorted(steps[1:], key=lambda step: max(span.end_seconds for span in step))[NUM_STEPS // 2])


def short_of_memory(plan: Plan, meshes: Sequence[Mesh]) -> Iterator[str]:
    """Yield a sentence for each stage that is predicted to use more than the allocators of its devices have."""
    for number, (peak, mesh) in enumerate(zip(plan.prediction.peak_bytes, meshes, strict=True)):
        here = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
        limits = [(limit, device) for device in here if (limit := _jax.allocatable_bytes(device)) is not None]
        limit, device = min(limits, key=lambda found: found[0], default=(math.inf, None))
        if peak > limit:
            yield (
                f"stage {number} is predicted to use {show_bytes(peak)} of each of its devices, but JAX's allocator "
                f"has {show_bytes(limit)} on {device}, and may run out of it. On a GPU, start the process with "
                "XLA_CLIENT_MEM_FRACTION=0.9 or more; or plan for the devices of this process, without a cluster."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocated:
    """Bytes on one device of a stage at its peak, including other stages on the same device.

    Attributes:
        resident_bytes: live buffers, arguments of the running task and all state included.
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


def allocated(
    plan: Plan, program: Program, step: StepGraph, executables: Sequence[Executable]
) -> tuple[Allocated, ...]:
    """Return for each stage the allocation at the peak of its devices. `executables`: one for each task of the program.

    Raises:
        ExecutionError: a stage lies on devices of other processes alone, which have compiled its programs.
    """
    walk = _BufferWalk(plan, program, step, executables)
    # State lies on its devices between two steps, before an instruction names it.
    for value, (home, spec) in program.homes.items():
        if step.batch_dims[value] is None:
            walk.hold(Buffer(value, home), spec)
    for instruction in program.instructions:
        walk.take(instruction)
    return tuple(walk.most[walk.place[stage]] for stage in range(len(plan.stages)))


class _BufferWalk:
    """Tracks the live buffers on each group of devices, by the number of the first stage on it."""

    def __init__(self, plan: Plan, program: Program, step: StepGraph, executables: Sequence[Executable]) -> None:
        self.plan, self.program, self.graph, self.executables = plan, program, step.graph, executables
        # Stages on the same devices share one memory, so that their buffers add up.
        self.place = {i: min(stages) for stages in self.plan.stages_together for i in stages}
        self.live: dict[int, dict[Buffer, float]] = {place: {} for place in self.place.values()}
        self.most: dict[int, Allocated] = {}

    def size(self, buffer: Buffer, spec: Spec | None) -> float:
        """Return the bytes per device of a buffer."""
        value = self.graph.values[buffer.value]
        sizes = dict(self.plan.stages[buffer.stage].mesh_shape.axis_sizes)
        return local_bytes(value, spec if spec is not None else replicated(value.rank), sizes)

    def hold(self, buffer: Buffer, spec: Spec | None) -> None:
        """Let a buffer be alive from now on."""
        self.live[self.place[buffer.stage]][buffer] = self.size(buffer, spec)

    def take(self, instruction: Instruction) -> None:
        """Apply the effect of one instruction."""
        if instruction.kind == InstructionKind.FREE:
            for live in self.live.values():
                for buffer in instruction.reads:
                    live.pop(buffer, None)
        elif instruction.kind in (InstructionKind.RUN, InstructionKind.ZEROS):
            self._run(instruction)
        else:
            # What arrives is in memory from now on, and lives until its FREE.
            for buffer in instruction.writes:
                self.hold(buffer, instruction.spec)

    def _run(self, instruction: Instruction) -> None:
        place = self.place[instruction.stage]
        live, task = self.live[place], self.program.tasks[instruction.task]
        ports = (*task.outputs, *task.sums) if instruction.kind == InstructionKind.RUN else task.sums
        written = {b: self.size(b, port.spec) for b, port in zip(instruction.writes, ports, strict=True)}
        if instruction.kind == InstructionKind.RUN:
            executable = self.executables[instruction.task]
            if executable.compiled is None:
                raise ExecutionError(
                    f"The memory that XLA allocates was asked for, for all stages, but {task.name} of stage "
                    f"{instruction.stage} is compiled by other processes alone: this process has no device of that "
                    "stage. Ask for it where one process has devices of every stage, or read the predicted peaks "
                    "instead (plan.prediction.peak_bytes)."
                )
            memory = executable.compiled.memory_analysis()
            # JAX returns None for platforms whose compilers give no analysis, and alpa_lite runs on none of these.
            assert memory is not None
            now = Allocated(
                resident_bytes=sum(live.values()),
                # XLA counts an output that overwrites an argument twice: among the outputs, and as an alias.
                output_bytes=float(memory.output_size_in_bytes - memory.alias_size_in_bytes),
                temporary_bytes=float(memory.temp_size_in_bytes),
            )
            if place not in self.most or now.peak_bytes > self.most[place].peak_bytes:
                self.most[place] = now
            # Outputs overwrite these; XLA counts such a buffer once, as an argument.
            for position in executable.donated:
                live.pop(instruction.reads[position], None)
        live.update(written)
