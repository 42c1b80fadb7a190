"""Execute a program on the devices of this process: one thread launches everything, in the program's total order.

    before the first step   every executable is compiled (compile), every instruction is bound (bind)
    in a step               launches only, with a bounded number in flight per group of devices (job.activity); nothing
                            is fetched from devices
    on a hang               an error names the instruction (job.activity within a step, watch after it)

A step that is one task on one micro-batch needs no list of instructions: its arguments go directly to the executable
(`Executor._as_one_task`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from alpa_lite import _jax
from alpa_lite._jax import Device, TreeLeaf
from alpa_lite.errors import ExecutionError
from alpa_lite.lower.emission import Executable, boundary_spec
from alpa_lite.plan.instructions import InstructionKind, TaskTime
from alpa_lite.plan.plan import Plan
from alpa_lite.runtime.execute.aliasing import copies, donations, shared_results, with_copies
from alpa_lite.runtime.execute.arrivals import BoundSegments, arrival_run
from alpa_lite.runtime.execute.bind import Binder, Slots
from alpa_lite.runtime.execute.compile import LoweredStep, Tell, concat_units, precompile, task_units, zeros_units
from alpa_lite.runtime.execute.crossing import Blanks
from alpa_lite.runtime.execute.placing import Alone, InJob
from alpa_lite.runtime.execute.run_transfers import Delivery, Result, compile_transfers, wanted, warm
from alpa_lite.runtime.execute.stacked import Leaves
from alpa_lite.runtime.execute.survival import HostDelivery, Survival, losses_of
from alpa_lite.runtime.execute.watch import Watch, Watchdog, explanation, short_name, spans
from alpa_lite.runtime.job.activity import CPU_CREDITS, CREDITS, Flight, HangPolicy, InstructionInfo
from alpa_lite.runtime.job.channel import channel
from alpa_lite.runtime.job.processes import (
    all_here,
    any_here,
    devices_of,
    handle,
    host_by_host,
    in_turn,
    participants,
    processes_of,
    verify_order,
)
from alpa_lite.runtime.job.shutdown import at_work, end_hung, is_recoverable, is_watched, say
from alpa_lite.sharding.specs import Spec

OnHang = Literal["auto", "raise", "end"]
"""What to do about a step that hangs."""

ANNOTATION = "alpa_lite instruction "
"""The name that JAX's profiler shows for an awaited instruction, before its number."""

WATCHDOG_SECONDS = 300.0
"""Seconds without any progress of a step before it counts as hung."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HangOptions:
    """What counts as a hang of a step, and the reaction to it.

    watchdog_seconds  seconds without progress of a step after which it counts as hung; None: for ever
    on_hang           "end" the job then, "raise" `HangError`, or ("auto") end it if there are several processes
    """

    watchdog_seconds: float | None = WATCHDOG_SECONDS
    on_hang: OnHang = "auto"

    def ends_job(self) -> bool:
        """Return True if a hang ends the job: an error in one process alone would leave the others waiting."""
        return self.on_hang == "end" or (self.on_hang == "auto" and is_watched())


def stage_meshes(plan: Plan, devices: Sequence[Device] | None = None) -> tuple[Mesh, ...]:
    """Return a JAX mesh per stage. Raises `ExecutionError` if there are fewer devices than the plan uses."""
    # Plans number devices host by host, which JAX's own order need not be.
    available = host_by_host(jax.devices() if devices is None else devices)
    needed = plan.first_device + 1 + max(device for stage in plan.stages for device in stage.submesh.devices)
    if needed > len(available):
        raise ExecutionError(
            f"The plan needs {needed} devices ({plan.cluster.name}), but JAX sees {len(available)}. Plan for "
            "al.local_cluster(), or start JAX with more devices (jax.config.update('jax_num_cpu_devices', n) on CPU)."
        )
    meshes: list[Mesh] = []
    for stage in plan.stages:
        # Row-major, as the plan numbers the devices of a submesh.
        numbers = [plan.first_device + d for d in stage.submesh.devices]
        chosen = np.array([available[d] for d in numbers]).reshape(stage.mesh_shape.shape)
        meshes.append(Mesh(chosen, stage.mesh_shape.axis_names))
    return tuple(meshes)


def device_groups(meshes: Sequence[Mesh]) -> tuple[int, ...]:
    """Return a group number for each stage, equal for stages that share a device, directly or through others."""
    of_device: dict[Device, int] = {}
    for number, mesh in enumerate(meshes):
        # A plan has few stages, so that relabelling all devices of merged groups is fast enough.
        met = {of_device[d] for d in mesh.devices.flat if d in of_device}
        # A stage may connect groups that were apart before: they become one.
        of_device.update({d: number for d, group in of_device.items() if group in met})
        of_device.update(dict.fromkeys(mesh.devices.flat, number))
    numbers = {group: i for i, group in enumerate(dict.fromkeys(of_device.values()))}
    return tuple(numbers[of_device[mesh.devices.flat[0]]] for mesh in meshes)


class Executor:
    """A program with its executables, to be called with the flat inputs of the step."""

    def __init__(
        self,
        lowered: LoweredStep,
        *,
        donated: Sequence[bool],
        devices: Sequence[Device] | None = None,
        progress: Tell | None = None,
        hangs: HangOptions,
    ) -> None:
        """Compile everything; `progress(name, done, total)` is called meanwhile.

        `donated[i]`: input i may be overwritten by the output that replaces it.
        """
        program, plan, step = lowered.program, lowered.plan, lowered.step
        self.program, self.plan, self.step = program, plan, step
        self.meshes = stage_meshes(plan, devices)
        self._shardings: dict[tuple[int, Spec | None, bool], NamedSharding] = {}
        self._is_here = [any_here(devices_of(mesh)) for mesh in self.meshes]
        blanks = Blanks()
        self.placing = (Alone if jax.process_count() == 1 else InJob)(blanks)
        # Arguments lie on their home stages between steps, where the step reads or updates them.
        values = step.graph.values
        homes = [self._sharding(*program.homes[v], values[v].on_host) for v in step.graph.inputs]
        shapes = [value.shape for value in step.graph.values]
        held = [shapes[v] for v in step.graph.inputs]
        self.inputs = Leaves(step.input_parts, held, homes, self.placing, donated=donated)
        output_homes = zip(program.outputs, program.output_specs, strict=True)
        self._returned = [self._sharding(b.stage, spec, values[b.value].on_host) for b, spec in output_homes]
        returned = [shapes[v] for v in step.graph.outputs]
        self.outputs = Leaves(step.output_parts, returned, self._returned, self.placing)
        self._shared = shared_results(program, plan, step, donated)
        given = donations(program, plan, step, donated)
        tasks = task_units(lowered, self.meshes, given)
        zeros, concats = zeros_units(program, step, self.meshes), concat_units(program, step, self.meshes)
        made = precompile([*tasks, *zeros.values(), *concats.values()], progress)
        self.counts = made.counts
        self.executables = [
            Executable(task=task, mesh=self.meshes[task.stage], emitted=emitted, compiled=compiled)
            for task, emitted, compiled in zip(program.tasks, made.emitted, made.compiled, strict=False)
        ]
        rest = iter(made.compiled[len(tasks) :])
        # `zip` asks `zeros` first, and at its end takes nothing more from `rest`, which goes on with the concats.
        zeros_here, concats_here = list(zip(zeros, rest, strict=False)), list(zip(concats, rest, strict=True))
        self._zeros = {task: compiled for task, compiled in zeros_here if compiled is not None}
        self._concats = {buffer: compiled for buffer, compiled in concats_here if compiled is not None}
        # Segments run in an order that is decided as they run, by the first process.
        self._processes_of = [processes_of(devices_of(mesh)) for mesh in self.meshes]
        self._channel = channel() if jax.process_count() > 1 and (program.segments or is_recoverable()) else None
        self._survives = False
        if self._channel is not None and is_recoverable():
            may_be_lost, why_not = losses_of(plan.schedule, self._processes_of)
            self._channel.add_step(may_be_lost)
            self._survives = bool(may_be_lost)
            if why_not and self._channel.leads:
                say(f"the job ends when a process is lost that {plan.function} needs: {why_not}")
        # All processes meet here, with their tasks compiled: none is late for the first program that spans several.
        self._delivery = self._connected(blanks)
        self.transfers = compile_transfers(program, step, self.meshes, blanks)
        self._groups = device_groups(self.meshes)
        # Virtual devices run their launches in the threads of one pool, which many launches in flight would fill.
        on_cpu = any(d.platform == "cpu" for mesh in self.meshes for d in mesh.devices.flat)
        self.flight = Flight(
            1 + max(self._groups),
            limit=CPU_CREDITS if on_cpu else CREDITS,
            instructions=InstructionInfo(
                explain=partial(explanation, program, step, self.meshes),
                name=partial(short_name, program),
                processes=self._processes,
            ),
            hang_policy=HangPolicy(
                patience=hangs.watchdog_seconds, at_work=at_work, end=end_hung if hangs.ends_job() else None
            ),
        )
        self.watchdog = Watchdog(self.flight)
        self._indices = self._microbatch_indices()
        self.bind()

    def bind(self) -> None:
        """Bind all instructions again, for example after an entry of `executables` was replaced."""
        self.bound = Binder(
            program=self.program,
            step=self.step,
            executables=self.executables,
            zeros=self._zeros,
            concats=self._concats,
            transfers=self.transfers,
            is_here=self._is_here,
            indices=self._indices,
            groups=self._groups,
            flight=self.flight,
            sharding=self._sharding,
            placing=self.placing,
        ).bound()
        self._at_once = self._as_one_task()
        segments = BoundSegments(
            program=self.program,
            bound=self.bound,
            flight=self.flight,
            processes=self._processes_of,
            channel=self._channel,
            survival=self._survival(),
        )
        self.arrivals = arrival_run(segments, self.plan.schedule, len(self.plan.stages))

    def _survival(self) -> Survival | None:
        """Return what lets the step go on without workers that have died; None if it cannot."""
        if not self._survives or self._channel is None:
            return None
        return Survival(
            program=self.program,
            step=self.step,
            bound=self.bound,
            processes=self._processes_of,
            channel=self._channel,
        )

    def _connected(self, blanks: Blanks) -> Delivery | HostDelivery | None:
        """Return, in a job, the delivery of small results; all processes have compiled their tasks on return."""
        if jax.process_count() == 1:
            return None
        verify_order(self.program, self._processes_of)
        InJob.know(self.meshes)
        for leaves in (self.inputs, self.outputs):
            InJob.know(leaves.sharding(i).mesh for i in range(len(leaves.whole)))
        for mesh in dict.fromkeys(self.meshes):
            if any_here(devices_of(mesh)) and not all_here(devices_of(mesh)):
                warm(mesh)
        results = [self._result(number) for number in range(len(self.outputs.whole))]
        chosen = [result for result in results if wanted(result)]
        if self._survives and self._channel is not None:
            return HostDelivery(chosen, jax.devices(), self._channel)
        return Delivery(chosen, jax.devices(), blanks)

    def _result(self, leaf: int) -> Result:
        """Return a result of the step, for its delivery."""
        graph, parts = self.step.graph, self.step.output_parts
        values = [v for v, part in zip(graph.outputs, parts, strict=True) if part.leaf == leaf]
        shape = graph.values[values[0]].shape
        if parts[graph.outputs.index(values[0])].rows is not None:
            # An array in parts: the parts are consecutive rows of it.
            shape = (sum(graph.values[v].shape[0] for v in values), *shape[1:])
        dtype = _jax.struct((), graph.values[values[0]].dtype).dtype
        array = jax.ShapeDtypeStruct(self._full(values[0], shape), dtype, sharding=self.outputs.sharding(leaf))
        return Result(number=leaf, array=array, is_state=values[0] in self.step.aliases)

    def _full(self, value: int, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a result of the whole step; the graph has the shape for a micro-batch."""
        dim = self.step.batch_dims[value]
        count = self.step.num_microbatches
        return tuple(n * count if d == dim else n for d, n in enumerate(shape))

    def _complete(self, results: Slots) -> list[jax.Array]:
        """Return the results of the step, with handles for those on other processes."""
        if all(self._is_here):
            return results
        complete: list[jax.Array] = []
        for value, array, sharding in zip(self.step.graph.outputs, results, self._returned, strict=True):
            if any_here(devices_of(sharding.mesh)):
                complete.append(array)
            else:
                about = self.step.graph.values[value]
                complete.append(handle(self._full(value, about.shape), _jax.struct((), about.dtype).dtype, sharding))
        return complete

    def _delivered(self, leaves: list[jax.Array]) -> list[jax.Array]:
        if self._delivery is None or not self._delivery.results:
            return leaves
        delivered, token = self._delivery(leaves)
        # The number after the last instruction stands for the delivery, as in the message on a hang.
        if token is not None:
            self.flight.launched(0, len(self.program.instructions), token)
        return delivered

    def _processes(self, instruction: int) -> frozenset[int]:
        """Return the processes that take part in an instruction; all in the delivery, one past the last one."""
        if instruction == len(self.program.instructions):
            return frozenset(range(jax.process_count()))
        return participants(self.program.instructions[instruction], self._processes_of)

    def _microbatch_indices(self) -> list[list[jax.Array]]:
        """Return the index of each micro-batch, placed once on each stage."""
        count = self.step.num_microbatches
        on_devices: dict[Mesh, list[jax.Array]] = {}
        for mesh in self.meshes:
            if mesh not in on_devices:
                whole = NamedSharding(mesh, PartitionSpec())
                on_devices[mesh] = [self.placing.put(np.int32(i), whole) for i in range(count)]
        return [on_devices[mesh] for mesh in self.meshes]

    def _as_one_task(self) -> Callable[[Sequence[TreeLeaf]], list[jax.Array]] | None:
        """Return a function that runs a single-task program on arguments in place; None for other programs."""
        instructions = [i for i in self.program.instructions if i.kind != InstructionKind.FREE]
        runs = [number for number, i in enumerate(self.program.instructions) if i.kind == InstructionKind.RUN]
        # An accumulator, a transfer or a concatenation needs slots for what passes between instructions.
        if len(runs) != 1 or any(i.kind not in (InstructionKind.PLACE, InstructionKind.RUN) for i in instructions):
            return None
        if len(processes_of(devices_of(self.meshes[0]))) < jax.process_count():
            return None  # the other processes place arguments one by one, in instruction order
        # From here on the program is one task that reads arguments and writes results.
        (number,) = runs
        run = self.program.instructions[number]
        executable = self.executables[run.task]
        position = {run.writes[number]: i for i, number in enumerate(executable.order)}
        if executable.takes_microbatch or any(b not in position for b in self.program.outputs):
            return None
        input_number = {v: i for i, v in enumerate(self.step.graph.inputs)}
        places = [input_number[b.value] for b in run.reads]
        shardings = [aval.sharding for aval in executable.avals]
        order = [position[b] for b in self.program.outputs]
        # Mostly both orders are the identity, and no list has to be made in a step.
        in_order = order == [*range(len(run.writes))]
        all_in_order = places == [*range(len(input_number))]
        assert executable.compiled is not None, "all processes have a device of the mesh"
        compiled = in_turn(executable.compiled, devices_of(executable.mesh))
        launched, put_all = self.flight.launched, self.placing.put_all

        def at_once(inputs: Sequence[TreeLeaf]) -> list[jax.Array]:
            arrays = inputs if all_in_order else [inputs[i] for i in places]
            *results, token = compiled(*put_all(arrays, shardings))
            launched(0, number, token)
            return results if in_order else [results[i] for i in order]

        return at_once

    def input_sharding(self, leaf: int) -> NamedSharding:
        """Return the sharding of an argument between steps."""
        return self.inputs.sharding(leaf)

    def __call__(
        self, inputs: Sequence[TreeLeaf], record: list[TaskTime] | None = None, *, awaited: bool = True
    ) -> list[jax.Array]:
        """Run one step. With `record`, append the measured span of every instruction but FREE.

        awaited: in a recorded step, whether each instruction is awaited before the next one is launched; otherwise
            they overlap as in a step that is not recorded.

        Raises:
            HangError: this step, or the one before, has made no progress for too long.
        """
        if self.flight.hang:
            self.flight.raise_if_hung()
        parts = self.inputs.split(inputs)
        if record is None and self._at_once is not None:
            results = self._at_once(parts)
        else:
            slots = self.bound.slots(parts)
            # The slots alone hold the arguments, so that each is freed as soon as nothing reads it any more.
            del parts
            if record is None and self.arrivals is not None:
                self.arrivals.run(slots)
            elif record is None:
                self.bound.run(slots)
            elif awaited:
                self._run_awaited(slots, record)
            else:
                self._run_watched(slots, record)
            results = [slots[i] for i in self.bound.outputs]
            slots.clear()
        results = self._complete(with_copies(results, self._shared))
        leaves = self._delivered(self.outputs.join(results))
        # From now on the caller may wait for results, where only the thread of the watchdog sees a hang.
        self.watchdog.watch()
        return leaves

    def _run_awaited(self, slots: Slots, record: list[TaskTime]) -> None:
        began = time.perf_counter()
        for (action, free), number in zip(self.bound.actions, self.bound.instructions, strict=True):
            instruction = self.program.instructions[number]
            start = time.perf_counter() - began
            with jax.profiler.TraceAnnotation(f"{ANNOTATION}{number}"):
                action(slots)
                jax.block_until_ready([slots[self.bound.slot[b]] for b in instruction.writes])
            record.append(TaskTime.of(self.program, instruction, start, time.perf_counter() - began))
            for i in free:
                slots[i] = None

    def _run_watched(self, slots: Slots, record: list[TaskTime]) -> None:
        watch, launches = Watch(len(self.flight.queues)), dict[int, float]()
        self.flight.observer = watch.launched
        began = time.perf_counter()
        try:
            for (action, free), number in zip(self.bound.actions, self.bound.instructions, strict=True):
                instruction = self.program.instructions[number]
                launches[number] = time.perf_counter() - began
                action(slots)
                # A copy that launches no program leaves no token by which its end could be seen.
                if instruction.kind == InstructionKind.SEND and not self.transfers[instruction.writes[0]].num_programs:
                    watch.copied(number, slots[self.bound.slot[instruction.writes[0]]])
                for i in free:
                    slots[i] = None
        finally:
            self.flight.observer = None
        ends = {number: end - began for number, end in watch.finish().items()}
        record.extend(spans(self.program, self._groups, launches, ends))

    def _sharding(self, stage: int, spec: Spec | None, on_host: bool = False) -> NamedSharding:
        # One object for each, as shardings are compared before every launch, and quickly if they are the same object.
        key = (stage, spec, on_host)
        if key not in self._shardings:
            partition = boundary_spec(spec) if spec is not None else PartitionSpec()
            self._shardings[key] = _jax.named_sharding(self.meshes[stage], partition, on_host=on_host)
        return self._shardings[key]

    def own_constants(self, first: int, constants: Sequence[TreeLeaf]) -> list[jax.Array]:
        """Return copies, in their shardings, of captured arrays, which are inputs of the step from number `first` on.

        As with `jax.jit`, the caller may overwrite or donate the originals without changing the step.
        """
        copied: list[jax.Array] = []
        for leaf, constant in enumerate(constants, first):
            array = constant if isinstance(constant, jax.Array) else np.asarray(constant)
            placed = self.placing.put(array, self.input_sharding(leaf))
            # `put` returns an array that is in place as it is, still shared with the caller.
            copied += copies([placed]) if array is constant else [placed]
        return copied

    def place_inputs(self, inputs: Sequence[TreeLeaf]) -> list[jax.Array]:
        """Return the inputs in their shardings, so that the next call moves nothing."""
        return [self.placing.put(x, self.input_sharding(leaf)) for leaf, x in enumerate(inputs)]
