"""Executes a program on the devices of this process, one instruction after the other, asynchronously.

One Python thread dispatches everything in the program's total order. On CPU, where every launch occupies threads of one
pool, the number of launches in flight is bounded (MAX_IN_FLIGHT); elsewhere the runtime's own queues do that.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from alpa_lite.errors import ExecutionError
from alpa_lite.graph.equations import Equation
from alpa_lite.graph.phases import StepGraph
from alpa_lite.lower.emit import Executable, boundary_spec, emit_task, emit_zeros
from alpa_lite.lower.program import SUM, Buffer, Instruction, Program
from alpa_lite.lower.slice import Port, TaskSpec
from alpa_lite.plan import Plan
from alpa_lite.runtime.leaves import Leaves, put
from alpa_lite.runtime.times import TaskTime
from alpa_lite.runtime.transfer import compile_transfers
from alpa_lite.sharding import Spec

#: Launches on virtual CPU devices that may be un-awaited at a time; their shared thread pool deadlocks far above this.
MAX_IN_FLIGHT = 8


def stage_meshes(plan: Plan, devices: Sequence[Any] | None = None) -> tuple[Mesh, ...]:
    """A JAX mesh per stage. Raises `ExecutionError` when there are fewer devices than the plan uses."""
    available = list(jax.devices() if devices is None else devices)
    needed = 1 + max(device for stage in plan.stages for device in stage.submesh.devices)
    if needed > len(available):
        raise ExecutionError(
            f"The plan uses {needed} devices ({plan.cluster.name}), but JAX sees {len(available)}. Plan for "
            "al.local_cluster(), or start JAX with more devices (jax.config.update('jax_num_cpu_devices', n) on CPU)."
        )
    meshes: list[Mesh] = []
    for stage in plan.stages:
        chosen = np.array([available[d] for d in stage.submesh.devices]).reshape(stage.mesh_shape.shape)
        meshes.append(Mesh(chosen, stage.mesh_shape.axis_names))
    return tuple(meshes)


class Executor:
    """A program with its executables, ready to be called with the flat inputs of the step.

    `donated[i]`: input i may be overwritten by the output that replaces it.
    """

    def __init__(
        self,
        program: Program,
        plan: Plan,
        step: StepGraph,
        equations: Sequence[Equation],
        *,
        donated: Sequence[bool],
        devices: Sequence[Any] | None = None,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        """Emit and compile every task; `progress(name, done, total)` is called before each."""
        self.program, self.plan, self.step = program, plan, step
        self.meshes = stage_meshes(plan, devices)
        self.input_number = {v: i for i, v in enumerate(step.graph.inputs)}
        self.leaf = dict(zip(step.graph.inputs, (part.leaf for part in step.input_parts), strict=True))
        accumulate = step.num_microbatches > 1
        self.executables: list[Executable] = []
        self.zeros: dict[int, Callable[[], tuple[Any, ...]]] = {}
        donate = self._donations(donated)
        for number, task in enumerate(program.tasks):
            if progress is not None:
                progress(task.name, number, len(program.tasks))
            mesh = self.meshes[task.stage]
            executable = emit_task(
                task,
                step,
                equations,
                plan.stages[task.stage].ops,
                mesh,
                accumulate=accumulate and bool(task.sums),
                donated=donate.get(number, ()),
            )
            executable.compiled  # noqa: B018  # compiles now, so that the first step is like every other
            self.executables.append(executable)
            if accumulate and task.sums:
                self.zeros[number] = emit_zeros(task, step, mesh)
        self.transfers = compile_transfers(program, step, self.meshes)
        self.indices = self._microbatch_indices()
        self.bound_launches = all(d.platform == "cpu" for m in self.meshes for d in m.devices.flat)
        self._shardings: dict[tuple[int, Spec | None], NamedSharding] = {}
        self.inputs = Leaves(step.input_parts, [self._sharding(*program.homes[v]) for v in step.graph.inputs])
        output_homes = zip(program.outputs, program.output_specs, strict=True)
        self.outputs = Leaves(step.output_parts, [self._sharding(buffer.stage, spec) for buffer, spec in output_homes])
        self.concat = jax.jit(lambda parts, dim: jax.numpy.concatenate(parts, dim), static_argnums=1)

    def _microbatch_indices(self) -> list[list[Any]]:
        """The number of each micro-batch, on each stage, placed once."""
        count = self.step.num_microbatches
        return [
            [jax.device_put(np.int32(i), NamedSharding(mesh, PartitionSpec())) for i in range(count)]
            for mesh in self.meshes
        ]

    def _donations(self, donated: Sequence[bool]) -> dict[int, tuple[int, ...]]:
        """For each update task the inputs that are given away: state that this task is the last to read."""
        last: dict[Buffer, tuple[int, int]] = {}
        same = self._sent_in_place()
        for instruction in self.program.instructions:
            for position, buffer in enumerate(instruction.reads):
                if instruction.kind in ("RUN", "SEND", "CONCAT"):
                    task = instruction.task if instruction.kind == "RUN" and buffer not in same else -1
                    last[same.get(buffer, buffer)] = (task, position)
        result: dict[int, tuple[int, ...]] = {}
        returned = {same.get(buffer, buffer) for buffer in self.program.outputs}
        for buffer, (task, position) in last.items():
            leaf = self.leaf.get(buffer.value)
            if leaf is None or leaf >= len(donated) or not donated[leaf] or buffer in returned:
                continue
            at_home = self.program.homes[buffer.value][0] == buffer.stage
            if task >= 0 and at_home and self.program.tasks[task].kind in ("update", "step"):
                result[task] = (*result.get(task, ()), position)
        return {task: self._reusable(self.program.tasks[task], positions) for task, positions in result.items()}

    def _sent_in_place(self) -> dict[Buffer, Buffer]:
        """What stages send to others on devices they share: it may be the very array that was sent. Copy → original."""
        same: dict[Buffer, Buffer] = {}
        for instruction in self.program.instructions:
            if instruction.kind == "SEND":
                stages = (self.plan.stages[s] for s in (instruction.source_stage, instruction.stage))
                if set.intersection(*(set(stage.submesh.devices) for stage in stages)):
                    source = instruction.reads[0]
                    same[instruction.writes[0]] = same.get(source, source)
        return same

    def _reusable(self, task: TaskSpec, positions: Sequence[int]) -> tuple[int, ...]:
        """Of some inputs of a task those whose buffer an output can take over: same shape, dtype and spec."""

        def layout(port: Port) -> object:
            value = self.step.graph.values[port.value]
            return value.shape, value.dtype, port.spec

        free, taken = Counter(map(layout, task.outputs)), list[int]()
        for position in sorted(positions):
            kind = layout(task.inputs[position])
            if free[kind]:
                free[kind] -= 1
                taken.append(position)
        return tuple(taken)

    def input_sharding(self, leaf: int) -> NamedSharding:
        """Where an argument of the step lives between steps."""
        return self.inputs.sharding(leaf)

    def __call__(self, inputs: Sequence[Any], record: list[TaskTime] | None = None) -> list[Any]:
        """One step. With `record`, every instruction is awaited and its measured span appended."""
        arrays: dict[Buffer, Any] = {}
        parts = self.inputs.split(inputs)
        in_flight: deque[Any] = deque()
        began = time.perf_counter()
        for instruction in self.program.instructions:
            start = time.perf_counter() - began
            self._execute(instruction, arrays, parts)
            if record is not None:
                jax.block_until_ready([arrays[b] for b in instruction.writes])
                record.append(TaskTime.of(self.program, instruction, start, time.perf_counter() - began))
            elif self.bound_launches and self._launches(instruction):
                in_flight.append(arrays[instruction.writes[-1]])
                if len(in_flight) > MAX_IN_FLIGHT:
                    oldest = in_flight.popleft()
                    if not oldest.is_deleted():
                        jax.block_until_ready(oldest)
        return self.outputs.join([arrays[buffer] for buffer in self.program.outputs])

    def _launches(self, instruction: Instruction) -> bool:
        """True for instructions that launch programs over several devices, whose results are `writes`."""
        if instruction.kind == "SEND":
            return self.transfers[instruction.writes[0]].num_programs > 0
        return instruction.kind == "RUN" and bool(instruction.writes)

    def _execute(self, instruction: Instruction, arrays: dict[Buffer, Any], inputs: Sequence[Any]) -> None:
        kind = instruction.kind
        if kind == "RUN":
            self._run(instruction, arrays)
        elif kind == "PLACE":
            arrays[instruction.writes[0]] = self._place(instruction, inputs)
        elif kind == "SEND":
            target = instruction.writes[0]
            arrays[target] = self.transfers[target](arrays[instruction.reads[0]])
        elif kind == "ZEROS":
            arrays.update(zip(instruction.writes, self.zeros[instruction.task](), strict=True))
        elif kind == "CONCAT":
            parts = [arrays[b] for b in instruction.reads]
            dim = self.step.batch_dims[instruction.writes[0].value] or 0
            whole = self.concat(parts, dim)
            arrays[instruction.writes[0]] = put(whole, self._sharding(instruction.stage, instruction.spec))
        else:
            for buffer in instruction.reads:
                arrays.pop(buffer, None)

    def _run(self, instruction: Instruction, arrays: dict[Buffer, Any]) -> None:
        executable = self.executables[instruction.task]
        operands = [arrays[b] for b in instruction.reads]
        if executable.takes_microbatch:
            operands.append(self.indices[instruction.stage][instruction.microbatch or 0])
        results = executable.compiled(*operands)
        arrays.update(zip(instruction.writes, results, strict=True))

    def _sharding(self, stage: int, spec: Spec | None) -> NamedSharding:
        key = (stage, spec)
        if key not in self._shardings:
            partition = boundary_spec(spec) if spec is not None else PartitionSpec()
            self._shardings[key] = NamedSharding(self.meshes[stage], partition)
        return self._shardings[key]

    def _place(self, instruction: Instruction, inputs: Sequence[Any]) -> Any:
        buffer = instruction.writes[0]
        array = inputs[self.input_number[buffer.value]]
        if buffer.microbatch is not None and buffer.microbatch != SUM:
            dim = self.step.batch_dims[buffer.value] or 0
            size = self.step.graph.values[buffer.value].shape[dim]
            index = [slice(None)] * np.ndim(array)
            index[dim] = slice(buffer.microbatch * size, (buffer.microbatch + 1) * size)
            array = array[tuple(index)]
        return put(array, self._sharding(instruction.stage, instruction.spec))

    def place_inputs(self, inputs: Sequence[Any]) -> list[Any]:
        """The inputs on their home submeshes, so that the next call moves nothing."""
        return [put(x, self.input_sharding(leaf)) for leaf, x in enumerate(inputs)]
