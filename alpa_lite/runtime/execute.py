"""Executes a program on the devices of this process: one thread launches everything, in the program's total order.

    before the first step   every executable is compiled (compile), every instruction looked up (bind)
    in a step               launches only, at most so many un-awaited per group of devices (flight); nothing is fetched
    when nothing moves      an error names the instruction (flight within a step, watchdog after it)

A step that is one task on one micro-batch needs no list of instructions: its arguments go to the executable as they are
(`Executor._at_once`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from alpa_lite.errors import ExecutionError
from alpa_lite.graph.equations import Equation
from alpa_lite.graph.phases import StepGraph
from alpa_lite.lower.emit import Executable, boundary_spec
from alpa_lite.lower.program import Program
from alpa_lite.plan import Plan
from alpa_lite.runtime.bind import Binder
from alpa_lite.runtime.compile import Tell, precompile
from alpa_lite.runtime.donation import donations
from alpa_lite.runtime.flight import CPU_CREDITS, CREDITS, Flight
from alpa_lite.runtime.hang import explanation
from alpa_lite.runtime.leaves import Leaves, put, put_all
from alpa_lite.runtime.times import TaskTime
from alpa_lite.runtime.transfer import compile_transfers
from alpa_lite.runtime.units import concat_units, task_units, zeros_units
from alpa_lite.runtime.watch import Watch, spans
from alpa_lite.runtime.watchdog import Watchdog
from alpa_lite.sharding import Spec

WATCHDOG_SECONDS = 300.0
"""So long nothing of a step may end before that counts as a hang."""


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


def device_groups(meshes: Sequence[Mesh]) -> tuple[int, ...]:
    """A number for each stage: stages that share a device, directly or through others, have the same."""
    of_device: dict[Any, int] = {}
    for number, mesh in enumerate(meshes):
        met = {of_device[d] for d in mesh.devices.flat if d in of_device}
        of_device.update({d: number for d, group in of_device.items() if group in met})
        of_device.update(dict.fromkeys(mesh.devices.flat, number))
    numbers = {group: i for i, group in enumerate(dict.fromkeys(of_device.values()))}
    return tuple(numbers[of_device[mesh.devices.flat[0]]] for mesh in meshes)


class Executor:
    """A program with its executables, ready to be called with the flat inputs of the step."""

    def __init__(
        self,
        program: Program,
        plan: Plan,
        step: StepGraph,
        equations: Sequence[Equation],
        *,
        donated: Sequence[bool],
        devices: Sequence[Any] | None = None,
        progress: Tell | None = None,
        watchdog_seconds: float | None = WATCHDOG_SECONDS,
    ) -> None:
        """Compile everything; `progress(name, done, total)` is called on the way.

        donated           `donated[i]`: input i may be overwritten by the output that replaces it
        watchdog_seconds  so long nothing of a step may end before `HangError` is raised; None: for ever
        """
        self.program, self.plan, self.step = program, plan, step
        self.meshes = stage_meshes(plan, devices)
        self._shardings: dict[tuple[int, Spec | None], NamedSharding] = {}
        self.inputs = Leaves(step.input_parts, [self._sharding(*program.homes[v]) for v in step.graph.inputs])
        output_homes = zip(program.outputs, program.output_specs, strict=True)
        self.outputs = Leaves(step.output_parts, [self._sharding(buffer.stage, spec) for buffer, spec in output_homes])
        given = donations(program, plan, step, donated)
        tasks = task_units(program, plan, step, equations, self.meshes, given)
        zeros, concats = zeros_units(program, step, self.meshes), concat_units(program, step, self.meshes)
        made = precompile([*tasks, *zeros.values(), *concats.values()], progress)
        self.counts = made.counts
        self.executables = [
            Executable(task=task, mesh=self.meshes[task.stage], emitted=emitted, compiled=compiled)
            for task, emitted, compiled in zip(program.tasks, made.emitted, made.compiled, strict=False)
        ]
        rest = iter(made.compiled[len(tasks) :])
        self._zeros, self._concats = dict(zip(zeros, rest, strict=False)), dict(zip(concats, rest, strict=True))
        self.transfers = compile_transfers(program, step, self.meshes)
        self._groups = device_groups(self.meshes)
        on_cpu = any(d.platform == "cpu" for mesh in self.meshes for d in mesh.devices.flat)
        self.flight = Flight(
            1 + max(self._groups),
            limit=CPU_CREDITS if on_cpu else CREDITS,
            patience=watchdog_seconds,
            explain=partial(explanation, program, step, self.meshes),
        )
        self.watchdog = Watchdog(self.flight)
        self._indices = self._microbatch_indices()
        self.bind()

    def bind(self) -> None:
        """Look everything up again, as after another executable was put into `executables`."""
        self.bound = Binder(
            program=self.program,
            step=self.step,
            executables=self.executables,
            zeros=self._zeros,
            concats=self._concats,
            transfers=self.transfers,
            indices=self._indices,
            groups=self._groups,
            flight=self.flight,
            sharding=self._sharding,
        ).bound()
        self._at_once = self._as_one_task()

    def _microbatch_indices(self) -> list[list[Any]]:
        """The number of each micro-batch, on each stage, placed once."""
        count = self.step.num_microbatches
        on_devices: dict[Mesh, list[Any]] = {}
        for mesh in self.meshes:
            if mesh not in on_devices:
                whole = NamedSharding(mesh, PartitionSpec())
                on_devices[mesh] = [jax.device_put(np.int32(i), whole) for i in range(count)]
        return [on_devices[mesh] for mesh in self.meshes]

    def _as_one_task(self) -> Callable[[Sequence[Any]], list[Any]] | None:
        """What runs a program that is a single task on arguments at home; None for other programs."""
        instructions = [i for i in self.program.instructions if i.kind != "FREE"]
        runs = [number for number, i in enumerate(self.program.instructions) if i.kind == "RUN"]
        if len(runs) != 1 or any(i.kind not in ("PLACE", "RUN") for i in instructions):
            return None
        (number,) = runs
        run = self.program.instructions[number]
        executable = self.executables[run.task]
        position = {b: i for i, b in enumerate(run.writes)}
        if executable.takes_microbatch or any(b not in position for b in self.program.outputs):
            return None
        input_number = {v: i for i, v in enumerate(self.step.graph.inputs)}
        places = [input_number[b.value] for b in run.reads]
        shardings = [aval.sharding for aval in executable.avals]
        order = [position[b] for b in self.program.outputs]
        in_order = order == [*range(len(run.writes))]
        all_in_order = places == [*range(len(input_number))]
        compiled, launched = executable.compiled, self.flight.launched

        def at_once(inputs: Sequence[Any]) -> list[Any]:
            arrays = inputs if all_in_order else [inputs[i] for i in places]
            *results, token = compiled(*put_all(arrays, shardings))
            launched(0, number, token)
            return results if in_order else [results[i] for i in order]

        return at_once

    def input_sharding(self, leaf: int) -> NamedSharding:
        """Where an argument of the step lives between steps."""
        return self.inputs.sharding(leaf)

    def __call__(
        self, inputs: Sequence[Any], record: list[TaskTime] | None = None, *, awaited: bool = True
    ) -> list[Any]:
        """One step. With `record`, the measured span of every instruction but FREE is appended.

        awaited: of a recorded step, whether each instruction is awaited before the next one is launched; otherwise
            they overlap as they do in a step that is not recorded.

        Raises:
            HangError: nothing of this step, or of the one before, has ended for too long.
        """
        if self.flight.hang:
            self.flight.raise_if_hung()
        parts = self.inputs.split(inputs)
        if record is None and self._at_once is not None:
            results = self._at_once(parts)
        else:
            slots = self.bound.slots(parts)
            del parts
            if record is None:
                self.bound.run(slots)
            elif awaited:
                self._run_awaited(slots, record)
            else:
                self._run_watched(slots, record)
            results = [slots[i] for i in self.bound.outputs]
        self.watchdog.watch()
        return self.outputs.join(results)

    def _run_awaited(self, slots: list[Any], record: list[TaskTime]) -> None:
        began = time.perf_counter()
        for (action, free), number in zip(self.bound.actions, self.bound.instructions, strict=True):
            instruction = self.program.instructions[number]
            start = time.perf_counter() - began
            action(slots)
            jax.block_until_ready([slots[self.bound.slot[b]] for b in instruction.writes])
            record.append(TaskTime.of(self.program, instruction, start, time.perf_counter() - began))
            for i in free:
                slots[i] = None

    def _run_watched(self, slots: list[Any], record: list[TaskTime]) -> None:
        watch, launches = Watch(len(self.flight.queues)), dict[int, float]()
        self.flight.observer = watch.launched
        began = time.perf_counter()
        try:
            for (action, free), number in zip(self.bound.actions, self.bound.instructions, strict=True):
                instruction = self.program.instructions[number]
                launches[number] = time.perf_counter() - began
                action(slots)
                if instruction.kind == "SEND" and not self.transfers[instruction.writes[0]].num_programs:
                    watch.copied(number, slots[self.bound.slot[instruction.writes[0]]])
                for i in free:
                    slots[i] = None
        finally:
            self.flight.observer = None
        ends = {number: end - began for number, end in watch.finish().items()}
        record.extend(spans(self.program, self._groups, launches, ends))

    def _sharding(self, stage: int, spec: Spec | None) -> NamedSharding:
        key = (stage, spec)
        if key not in self._shardings:
            partition = boundary_spec(spec) if spec is not None else PartitionSpec()
            self._shardings[key] = NamedSharding(self.meshes[stage], partition)
        return self._shardings[key]

    def place_inputs(self, inputs: Sequence[Any]) -> list[Any]:
        """The inputs on their home submeshes, so that the next call moves nothing."""
        return [put(x, self.input_sharding(leaf)) for leaf, x in enumerate(inputs)]
