"""Measure the kernels of a step: each instruction awaited, under JAX's profiler.

    span of an instruction   as in any awaited step, by an annotation in the trace                    `_annotated`
    kernel                   an instruction of XLA's program in the trace, on one device              `_kernel_events`
    seconds of a kernel      its time on a device, where the time in which several run at once is
                             split equally among them; averaged over the devices of the stage         `shared_seconds`
    its ops                  the ops of the task from which XLA made it                               `hlo_kernels`

The profiler itself takes time, most of all for many short kernels.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax

from alpa_lite import _jax
from alpa_lite.errors import ExecutionError
from alpa_lite.lower.emission import Executable
from alpa_lite.plan.instructions import InstructionKind, Program, TaskTime
from alpa_lite.program.ir import OpPath
from alpa_lite.program.phases import StepGraph
from alpa_lite.runtime.execute.execute import ANNOTATION, Executor
from alpa_lite.runtime.execute.hlo_kernels import HloKernel, hlo_kernels
from alpa_lite.runtime.execute.measure import NUM_STEPS, Inputs, placed_zeros

Trace = Any
"""A `jax.profiler.ProfileData`, of which JAX tells type checkers nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTime:
    """The runs of one instruction of XLA's program in one run of a task.

    Attributes:
        name: name of the instruction, as `compiled.as_text()` has it.
        opcode: such as `fusion` or `all-reduce`.
        ops: paths of the ops that it runs, its own first; empty for what XLA has added.
        product: whether it multiplies matrices or convolves.
        sums: whether it adds to sums over micro-batches.
        seconds: time of all its runs on an average device of the stage.
    """

    name: str
    opcode: str
    ops: tuple[OpPath, ...]
    product: bool
    sums: bool
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProfile:
    """The instructions of one step with their spans and kernels.

    Attributes:
        program: the program that has run.
        step: the graph to which the paths of ops refer.
        times: the span of every instruction but FREE, as `CompiledFunction.measure` returns them.
        numbers: the number of each of them in the program.
        kernels: for each of them the kernels that ran in it; empty for instructions that run no task.
    """

    program: Program = field(repr=False)
    step: StepGraph = field(repr=False)
    times: tuple[TaskTime, ...] = field(repr=False)
    numbers: tuple[int, ...] = field(repr=False)
    kernels: tuple[tuple[KernelTime, ...], ...] = field(repr=False)

    @property
    def step_seconds(self) -> float:
        """The end of the last instruction, in seconds since the step began."""
        return max((time.end_seconds for time in self.times), default=0.0)


def shared_seconds(spans: Sequence[tuple[float, float]]) -> list[float]:
    """Return the seconds of each span, where time in which several run at once is split equally among them.

    They add up to the time in which any span runs.
    """
    found = [0.0] * len(spans)
    events = sorted((at, is_start, i) for i, span in enumerate(spans) for is_start, at in ((1, span[0]), (0, span[1])))
    running: set[int] = set()
    before = 0.0
    for at, is_start, i in events:
        for other in running:
            found[other] += (at - before) / len(running)
        before = at
        (running.add if is_start and spans[i][1] > spans[i][0] else running.discard)(i)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _KernelEvent:
    """One run of an instruction of XLA's program; times in seconds on the clock of the trace."""

    device: tuple[str, int]
    name: str
    start: float
    end: float


def profiled(executor: Executor, shapes: Sequence[jax.ShapeDtypeStruct], inputs: Inputs) -> StepProfile:
    """Return the profile of a step on arguments of zeros: of a few steps, the one of median length.

    Raises:
        ExecutionError: the job has several processes, another profile is being taken, or the trace has no kernels.
    """
    if jax.process_count() > 1:
        raise ExecutionError(
            f"A profile was asked for in a job of {jax.process_count()} processes, but each sees its own kernels "
            "alone. Use compiled.measure(), or jax.profiler.trace in each process."
        )
    profiles: list[StepProfile] = []
    with _named_by_own_ops(executor):
        programs = _tasks_kernels(executor)
        executor(inputs(placed_zeros(executor, shapes)), [])  # the first step includes remaining compilation
        for _ in range(NUM_STEPS):
            arguments = inputs(placed_zeros(executor, shapes))
            profiles.append(_profile(executor, programs, *_traced(executor, arguments)))
    return sorted(profiles, key=lambda profile: profile.step_seconds)[NUM_STEPS // 2]


@contextmanager
def _named_by_own_ops(executor: Executor) -> Iterator[None]:
    """Let the executor run programs whose instructions have the names of this step's ops, while the context lasts.

    A program from JAX's compilation cache may have been compiled for another step, with other numbers of ops.
    """
    config: Any = jax.config  # type checkers do not know its options
    if config.jax_compilation_cache_dir is None:
        yield
        return
    cached, option = list(executor.executables), "jax_compilation_cache_include_metadata_in_key"
    before = config.jax_compilation_cache_include_metadata_in_key
    jax.config.update(option, True)
    try:
        executor.executables[:] = [
            replace(each, compiled=_jax.compiled(each.emitted.lower(each.mesh))) for each in cached
        ]
    finally:
        jax.config.update(option, before)
    executor.bind()
    try:
        yield
    finally:
        executor.executables[:] = cached
        executor.bind()


def _traced(executor: Executor, arguments: Sequence[Any]) -> tuple[tuple[TaskTime, ...], Trace]:
    """Run one step under the profiler, and return its spans and the trace."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # calls of Python functions would make the host slower
    options.enable_hlo_proto = False
    record: list[TaskTime] = []
    with tempfile.TemporaryDirectory(prefix="alpa_lite_profile") as folder:
        try:
            jax.profiler.start_trace(folder, profiler_options=options)
        except Exception as error:
            raise ExecutionError(
                f"JAX's profiler could not start: {error}. Only one profile can be taken at a time: end the other one."
            ) from error
        try:
            jax.block_until_ready(executor(arguments, record))
        finally:
            jax.profiler.stop_trace()
        files = sorted(Path(folder).rglob("*.xplane.pb"))
        if not files:
            raise ExecutionError("JAX's profiler has written no trace. Use compiled.measure(), which needs none.")
        return tuple(record), jax.profiler.ProfileData.from_serialized_xspace(files[-1].read_bytes())


def _profile(
    executor: Executor,
    programs: Mapping[int, Mapping[str, HloKernel]],
    times: tuple[TaskTime, ...],
    trace: Trace,
) -> StepProfile:
    annotated, events = _annotated(trace), sorted(_kernel_events(trace), key=lambda event: event.start)
    numbers = tuple(executor.bound.instructions)
    listed: list[tuple[KernelTime, ...]] = []
    for number in numbers:
        instruction = executor.program.instructions[number]
        if instruction.kind != InstructionKind.RUN:
            listed.append(())
            continue
        begin, end = annotated.get(number, (0.0, 0.0))
        # Every instruction is awaited: nothing else ran between its begin and its end, and its kernels ended before
        # its end, although a busy machine may note that later.
        inside = [replace(event, end=min(event.end, end)) for event in events if begin <= event.start <= end]
        num_devices = executor.meshes[instruction.stage].devices.size
        listed.append(_kernel_times(inside, programs[instruction.task], num_devices))
    if not any(listed):
        raise ExecutionError(
            "The trace of JAX's profiler names no instruction of the step's programs on this platform, so that times "
            "of ops are not known. Use compiled.measure(), which has the times of tasks."
        )
    return StepProfile(
        program=executor.program, step=executor.step, times=times, numbers=numbers, kernels=tuple(listed)
    )


def _annotated(trace: Trace) -> dict[int, tuple[float, float]]:
    """Return begin and end of each instruction, in seconds on the clock of the trace."""
    found: dict[int, tuple[float, float]] = {}
    for plane in trace.planes:
        for line in plane.lines:
            for event in line.events:
                if event.name.startswith(ANNOTATION):
                    start = 1e-9 * event.start_ns
                    found[int(event.name[len(ANNOTATION) :])] = start, start + 1e-9 * event.duration_ns
    return found


def _kernel_events(trace: Trace) -> Iterator[_KernelEvent]:
    """Yield the runs of instructions of XLA's programs.

    On CPU, where a kernel may end in another thread, `_p` of its event is `_c` of another one at its end.
    """
    begun, ends = list[tuple[_KernelEvent, object]](), dict[object, float]()
    for plane in trace.planes:
        for line in plane.lines:
            for event in line.events:
                facts = dict(event.stats)
                start = 1e-9 * event.start_ns
                if "hlo_op" in facts:
                    made = _KernelEvent(
                        device=(plane.name, int(facts.get("device_ordinal", 0))),
                        name=str(facts["hlo_op"]),
                        start=start,
                        end=start + 1e-9 * event.duration_ns,
                    )
                    begun.append((made, facts.get("_p")))
                elif event.name.startswith("end: ") and "_c" in facts:
                    ends[facts["_c"]] = start
    for event, link in begun:
        end = ends.get(link, event.end) if link is not None else event.end
        yield _KernelEvent(device=event.device, name=event.name, start=event.start, end=max(end, event.start))


def _kernel_times(
    events: Sequence[_KernelEvent], program: Mapping[str, HloKernel], num_devices: int
) -> tuple[KernelTime, ...]:
    """Return the kernels of one run of a task, the longest first."""
    names = {event.name for event in events}
    # Loops and branches have events of their own, around those of what they run.
    plain = [event for event in events if event.name in program and names.isdisjoint(program[event.name].calls)]
    by_device: dict[tuple[str, int], list[_KernelEvent]] = {}
    for event in plain:
        by_device.setdefault(event.device, []).append(event)
    seconds: dict[str, float] = {}
    for mine in by_device.values():
        for event, share in zip(mine, shared_seconds([(e.start, e.end) for e in mine]), strict=True):
            seconds[event.name] = seconds.get(event.name, 0.0) + share / num_devices
    return tuple(
        KernelTime(
            name=name,
            opcode=kernel.opcode,
            ops=kernel.ops,
            product=kernel.product,
            sums=kernel.sums,
            seconds=spent,
        )
        for name, spent in sorted(seconds.items(), key=lambda item: -item[1])
        for kernel in [program[name]]
    )


def _tasks_kernels(executor: Executor) -> dict[int, Mapping[str, HloKernel]]:
    """Return the instructions of the program of each task, with the numbers of the task's own ops."""
    first: dict[int, Executable] = {}
    parsed: dict[int, Mapping[str, HloKernel]] = {}
    found: dict[int, Mapping[str, HloKernel]] = {}
    for number, executable in enumerate(executor.executables):
        assert executable.compiled is not None, "a single process has the devices of all stages"
        key = id(executable.emitted)
        # Equal tasks share the program of the first one, which names the ops of that one.
        origin = first.setdefault(key, executable)
        if key not in parsed:
            parsed[key] = hlo_kernels(executable.compiled.as_text() or "")
        own = dict(zip(origin.task.ops, executable.task.ops, strict=True))
        found[number] = {
            name: replace(kernel, ops=tuple((own[path[0]], *path[1:]) for path in kernel.ops if path[0] in own))
            for name, kernel in parsed[key].items()
        }
    return found
