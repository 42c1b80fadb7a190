"""Compile all executables of a step before it first runs: equal units once, and one compilation per core at a time.

    group     units of one form (lower.emission)  are traced and lowered once                   `precompile`
    compile   one executable per group, for the devices of its first unit                       `_compile_first`
    load      the same executable on the devices of the others, without XLA compiling it again  `_load_or_compile`

With JAX's compilation cache, executables for other devices come from the cache, or are compiled for it, instead of
being loaded from the first: each has an entry of its own on CPU.

Chunks of an interleaved pipeline that lie on the same devices share one executable. Tracing is Python and stays in the
calling thread, with the user's JAX settings; XLA compiles in other threads meanwhile, and does not hold Python's lock.

A program needs executables for its tasks, for initialising accumulators, and for joining the parts of outputs.
"""

from __future__ import annotations

import operator
import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh
from jax.stages import Compiled, Lowered

from alpa_lite import _jax
from alpa_lite._jax import Device
from alpa_lite.errors import ExecutionError
from alpa_lite.lower.emission import (
    BoundaryArray,
    Emitted,
    boundary_layout,
    boundary_shape,
    boundary_spec,
    emit_task,
    task_form,
)
from alpa_lite.lower.local_machine import PlacedTask
from alpa_lite.plan.instructions import Buffer, InstructionKind, Program
from alpa_lite.plan.plan import Plan
from alpa_lite.plan.task_specs import TaskSpec
from alpa_lite.program.equations import Equation
from alpa_lite.program.ir import Value
from alpa_lite.program.phases import Combination, StepGraph
from alpa_lite.runtime.job.processes import all_here, any_here
from alpa_lite.sharding.specs import Spec


@dataclass(frozen=True, kw_only=True, eq=False)
class LoweredStep:
    """A program of instructions, and what it was lowered from: a plan, the graph of a step, and JAX's equations."""

    program: Program
    plan: Plan
    step: StepGraph
    equations: Sequence[Equation]


Meshes = Sequence[Mesh] | Sequence[AbstractMesh]
"""The mesh of each stage; what is only lowered needs no devices."""


def task_units(lowered: LoweredStep, meshes: Meshes, donated: Mapping[int, Sequence[int]]) -> list[CompileUnit]:
    """Return the tasks of a program, in order. `donated`: per task the inputs that are donated."""
    program, plan, step, equations = lowered.program, lowered.plan, lowered.step, lowered.equations
    units: list[CompileUnit] = []
    for number, task in enumerate(program.tasks):
        mesh, given = meshes[task.stage], tuple(donated.get(number, ()))
        placed = PlacedTask(
            task=task, step=step, equations=equations, placements=plan.stages[task.stage].ops, donated=given
        )
        form = task_form(placed, dict(mesh.shape))
        emit = partial(emit_task, placed, mesh.abstract_mesh)
        units.append(CompileUnit(name=task.name, mesh=mesh, form=form, emit=emit))
    return units


def abstract_meshes(plan: Plan) -> list[AbstractMesh]:
    """Return the logical mesh of each stage, without devices."""
    return [AbstractMesh(s.mesh_shape.shape, s.mesh_shape.axis_names) for s in plan.stages]


def lowered_units(
    units: Iterable[CompileUnit], platform: str, *, keep_unused: bool = False
) -> list[tuple[Emitted, Lowered]]:
    """Return each unit as a function and as its lowered program, without devices; equal units share both.

    keep_unused: whether a program takes the inputs too that it does not read.
    """
    made: dict[Hashable, tuple[Emitted, Lowered]] = {}
    pairs: list[tuple[Emitted, Lowered]] = []
    for unit in units:
        form = unit.mesh.abstract_mesh, unit.form
        if form not in made:
            emitted = unit.emit(name=unit.name, platform=platform)
            made[form] = emitted, emitted.lower(keep_unused=keep_unused)
        pairs.append(made[form])
    return pairs


def lowered_tasks(of: LoweredStep, platform: str) -> list[tuple[TaskSpec, Lowered]]:
    """Return each task with its lowered program (`jax.stages.Lowered`), without devices; equal tasks share one."""
    # Without donations: nothing is run, and donations do not change the computation.
    units = task_units(of, abstract_meshes(of.plan), {})
    return [(task, each) for task, (_, each) in zip(of.program.tasks, lowered_units(units, platform), strict=True)]


def summed_costs(costs: Iterable[tuple[Mapping[str, float] | None, int]]) -> dict[str, float]:
    """Return the sum of XLA's cost analyses, each of them so many times; utilisations, which are no sums, are left out.

    costs: pairs of an analysis, None where the platform has none, and its number of runs.
    """
    total: dict[str, float] = {}
    for analysis, runs in costs:
        for key, value in (analysis or {}).items():
            if not key.startswith(("utilization", "optimal_seconds")):
                total[key] = total.get(key, 0.0) + value * runs
    return total


def joined_texts(programs: Iterable[tuple[str, Lowered | Compiled | None]]) -> str:
    """Return the texts of programs, equal ones once, each after a line of comment with the names of its tasks.

    programs: pairs of the name of a task and its lowered or compiled program; None for one of another process.
    """
    # By identity: units of one form share one program.
    by_identity: dict[int, tuple[list[str], Lowered | Compiled]] = {}
    for name, program in programs:
        if program is not None:
            by_identity.setdefault(id(program), ([], program))[0].append(name)
    return "\n".join(f"// {', '.join(names)}\n{program.as_text()}" for names, program in by_identity.values())


def zeros_units(program: Program, step: StepGraph, meshes: Meshes) -> dict[int, CompileUnit]:
    """Return the units that make the accumulators of tasks, by task number."""
    units: dict[int, CompileUnit] = {}
    for number in dict.fromkeys(i.task for i in program.instructions if i.kind == InstructionKind.ZEROS):
        task = program.tasks[number]
        mesh = meshes[task.stage]
        layouts = tuple(boundary_layout(step.graph.values[p.value], p, dict(mesh.shape)) for p in task.sums)

        def make(layouts: tuple[BoundaryArray, ...] = layouts) -> tuple[jax.Array, ...]:
            return tuple(map(_zeros, layouts))

        emit = partial(emit_function, make, mesh.abstract_mesh, (), tuple(x.spec for x in layouts))
        units[number] = CompileUnit(name=f"{task.name}'s sums", mesh=mesh, form=("zeros", layouts), emit=emit)
    return units


def _zeros(layout: BoundaryArray) -> jax.Array:
    if layout.dtype.startswith("key<"):
        # Every micro-batch returns the key of the whole step, so nothing is added to it.
        key = jax.random.key(0, impl=_jax.key_implementation(layout.dtype))
        return jax.numpy.broadcast_to(key, layout.shape)
    return jax.numpy.zeros(layout.shape, layout.dtype)


def concat_units(program: Program, step: StepGraph, meshes: Meshes) -> dict[Buffer, CompileUnit]:
    """Return the units that join the micro-batches of outputs, by buffer; those without a batch dim are averaged."""
    specs: dict[Buffer, Spec] = {}
    units: dict[Buffer, CompileUnit] = {}
    for instruction in program.instructions:
        # In the order of the program, since an update may write a sum of the loop anew, in another spec.
        if instruction.kind == InstructionKind.RUN:
            task = program.tasks[instruction.task]
            ports = zip(instruction.writes, (*task.outputs, *task.sums), strict=True)
            specs.update({buffer: port.spec for buffer, port in ports})
        elif instruction.spec is not None:
            specs.update(dict.fromkeys(instruction.writes, instruction.spec))
        if instruction.kind in (InstructionKind.CONCAT, InstructionKind.ADD, InstructionKind.MEAN):
            (buffer,) = instruction.writes
            value, mesh = step.graph.values[buffer.value], meshes[buffer.stage]
            ins = tuple(_boundary(value, specs[b], mesh) for b in instruction.reads)
            out = boundary_spec(specs[buffer])
            dim = step.batch_dims[buffer.value]
            runs = step.loop_results.runs.get(buffer.value, 1)
            join = _mean if dim is None else partial(_join, dim, runs)
            how = step.loop_results.combined.get(buffer.value)
            if instruction.kind == InstructionKind.ADD:
                join = partial(_added, how)
            elif instruction.kind == InstructionKind.MEAN and how is not None:
                # Only sums are averaged: a maximum over a round is that of its micro-batches.
                join = partial(_added, how)
            emit = partial(emit_function, join, mesh.abstract_mesh, ins, out)
            form = (instruction.kind, how, ins, dim, runs, out)
            units[buffer] = CompileUnit(name=f"output {buffer}", mesh=mesh, form=form, emit=emit)
    return units


def _boundary(value: Value, spec: Spec, mesh: Mesh | AbstractMesh) -> BoundaryArray:
    shape = boundary_shape(value.shape, spec, dict(mesh.shape))
    return BoundaryArray(shape=shape, dtype=value.dtype, spec=boundary_spec(spec))


def _added(how: Combination | None, *parts: jax.Array) -> jax.Array:
    """Return the sum of what several workers have summed, in their order, or what else combines micro-batches."""
    if how is Combination.SAME:
        return parts[0]
    combine = {None: operator.add, Combination.MAX: jax.numpy.maximum, Combination.MIN: jax.numpy.minimum}[how]
    return reduce(combine, parts)


def _mean(*parts: jax.Array) -> jax.Array:
    """Return the mean of what several updates have returned; of integers (counts) the sum, of a key the last one."""
    if jax.numpy.issubdtype(parts[0].dtype, jax.dtypes.prng_key):
        return parts[-1]
    total = reduce(operator.add, parts)
    return total / len(parts) if jax.numpy.issubdtype(total.dtype, jax.numpy.inexact) else total.astype(parts[0].dtype)


def _join(dim: int, runs: int, *parts: jax.Array) -> jax.Array:
    """Concatenate the samples of all micro-batches; with several runs of rows, run by run."""
    if runs == 1:
        return jax.numpy.concatenate(parts, dim)
    shape = parts[0].shape
    # Run r of the whole array consists of run r of each micro-batch, so the parts are joined within each run.
    cut = [part.reshape(*shape[:dim], runs, shape[dim] // runs, *shape[dim + 1 :]) for part in parts]
    whole = jax.numpy.concatenate(cut, dim + 1)
    return whole.reshape(*shape[:dim], shape[dim] * len(parts), *shape[dim + 1 :])


def emit_function(
    function: Callable[..., Any],
    mesh: AbstractMesh,
    ins: tuple[BoundaryArray, ...],
    outs: Any,
    *,
    name: str,
    platform: str,
) -> Emitted:
    """Return a function of whole arrays as a program for a mesh. `outs`: the specs of its results, in a pytree."""

    def run(*arrays: jax.Array) -> Any:
        return function(*arrays)

    # XLA names the module after the function, which profiles and its errors show.
    run.__name__ = name.replace(" ", "_")
    return Emitted(
        function=run,
        mesh=mesh,
        platform=platform,
        ins=ins,
        outs=outs,
        donated=(),
        takes_microbatch=False,
    )


Tell = Callable[[str, int, int], None]
"""Callback: the name of the unit being compiled, the number of units done, and the number of units."""

Devices = tuple[Device, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileUnit:
    """A program to compile for a mesh. Units of equal forms are the same program; `emit(name=…, platform=…)` makes it.

    A unit on an abstract mesh is only lowered.
    """

    name: str
    mesh: Mesh | AbstractMesh
    form: Hashable
    emit: Callable[..., Emitted]

    @property
    def devices(self) -> Devices:
        """The devices of the mesh, in its order."""
        assert isinstance(self.mesh, Mesh), "a unit on an abstract mesh is only lowered"
        return tuple(self.mesh.devices.flat)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """The number of units, and how many were lowered, compiled by XLA, and loaded on other devices."""

    units: int
    lowered: int
    compiled: int
    loaded: int

    def __str__(self) -> str:
        """Return the counts in one line."""
        shared = self.units - self.compiled - self.loaded
        return (
            f"{self.units} executables: {self.lowered} traced and lowered, {self.compiled} compiled, "
            f"{self.loaded} loaded on other devices, {shared} shared on the same devices"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Precompiled:
    """The program and the executable of each unit, in order; None for a unit without devices of this process."""

    emitted: tuple[Emitted, ...]
    compiled: tuple[Compiled | None, ...]
    counts: Counts


@dataclass(slots=True, kw_only=True)
class _EqualUnits:
    """Units of one form.

    By devices, `meshes` and `uses` hold the mesh and the number of units on it; `on` holds the executables, `packed`
    the first of them as bytes.
    """

    name: str
    emitted: Emitted
    meshes: dict[Devices, Mesh | AbstractMesh]
    uses: Counter[Devices]
    lowered: Lowered | None = None
    num_lowered: int = 1
    packed: _jax.Packed | None = None
    on: dict[Devices, Compiled] = field(default_factory=dict[Devices, Compiled])
    compiled: int = 0


def precompile(
    units: Sequence[CompileUnit], tell: Tell | None = None, *, num_threads: int | None = None
) -> Precompiled:
    """Compile all units with a device of this process. `num_threads`: default one per core.

    Raises:
        ExecutionError: XLA could not compile a unit; its name is in the message.
    """
    members: dict[Hashable, list[CompileUnit]] = {}
    # Equal forms on meshes of one shape are one program, if they are on one platform: lowering depends on it.
    keys = [(unit.mesh.abstract_mesh, unit.devices[0].platform, unit.form) for unit in units]
    for key, unit in zip(keys, units, strict=True):
        members.setdefault(key, []).append(unit)
    groups = {key: _group(alike) for key, alike in members.items()}
    # Units of other processes are not lowered or compiled here, and do not count for the progress.
    count = sum(sum(group.uses.values()) for group in groups.values())
    ours = [group for group in groups.values() if group.uses]
    _Precompiler(count, tell or (lambda *_: None)).run(ours, num_threads or _num_cores())
    compiled = sum(group.compiled for group in groups.values())
    return Precompiled(
        emitted=tuple(groups[key].emitted for key in keys),
        compiled=tuple(groups[key].on.get(unit.devices) for key, unit in zip(keys, units, strict=True)),
        counts=Counts(
            units=count,
            lowered=sum(group.num_lowered for group in groups.values()),
            compiled=compiled,
            loaded=sum(len(group.on) for group in groups.values()) - compiled,
        ),
    )


def _group(alike: Sequence[CompileUnit]) -> _EqualUnits:
    more = f" and {len(alike) - 1} more" if len(alike) > 1 else ""
    name = alike[0].name + more
    return _EqualUnits(
        name=name,
        emitted=alike[0].emit(name=name, platform=_jax.lowering_platform(alike[0].devices[0])),
        meshes={unit.devices: unit.mesh for unit in alike if any_here(unit.devices)},
        # Several units on the same devices share one executable: chunks of an interleaved pipeline, for example.
        uses=Counter(unit.devices for unit in alike if any_here(unit.devices)),
    )


class _Precompiler:
    """Passes lowered groups to threads, and their executables to the units that wait for them."""

    def __init__(self, num_units: int, tell: Tell) -> None:
        self.num_units, self.tell, self.done = num_units, tell, 0
        self.waiting: dict[Future[tuple[Compiled, int]], tuple[_EqualUnits, Devices]] = {}

    def run(self, groups: Sequence[_EqualUnits], num_threads: int) -> None:
        """Compile all groups; only this thread calls the progress callback."""
        pool = ThreadPoolExecutor(num_threads, thread_name_prefix="alpa_lite compiles")
        try:
            for group in groups:
                self.tell(group.name, self.done, self.num_units)
                self._begin(group, pool)
                # Between two tracings, so that finished units are reported, and errors raised, as soon as possible.
                self._take(pool, timeout=0)
            while self.waiting:
                self._take(pool, timeout=None)
        finally:
            # Running compilations cannot be cancelled; after an error nothing waits for them.
            pool.shutdown(wait=False, cancel_futures=True)

    def _begin(self, group: _EqualUnits, pool: ThreadPoolExecutor) -> None:
        try:
            group.lowered = group.emitted.lower()
        except Exception:  # it may need concrete devices; a genuine error is raised again below
            group.num_lowered = len(group.uses)
            for devices, mesh in group.meshes.items():
                lowered = group.emitted.lower(mesh)
                self.waiting[pool.submit(_compile_alone, lowered)] = group, devices
            return
        first = next(iter(group.uses))
        self.waiting[pool.submit(_compile_first, group, first)] = group, first

    def _take(self, pool: ThreadPoolExecutor, timeout: float | None) -> None:
        done, _ = wait(self.waiting, timeout=timeout, return_when=FIRST_COMPLETED)
        for future in done:
            group, devices = self.waiting.pop(future)
            try:
                executable, compiled = future.result()
            except Exception as error:
                raise ExecutionError(
                    f"XLA could not compile {group.name} for {', '.join(map(str, devices))}: {error}. If memory ran "
                    "out, plan for less of it (al.planners.Auto(max_memory_bytes=…)); else report what XLA says."
                ) from error
            # Only the executable of the first unit can be loaded for the others, so these had to wait for it.
            is_first = not group.on and group.lowered is not None
            group.on[devices] = executable
            group.compiled += compiled
            self.done += group.uses[devices]
            self.tell(group.name, self.done, self.num_units)
            for other in list(group.uses)[1:] if is_first else ():
                self.waiting[pool.submit(_load_or_compile, group, other)] = group, other
            if len(group.on) == len(group.uses):
                # Modules and packed executables of a large step take much memory, and the other groups still compile.
                group.lowered = group.packed = None


def _compile_alone(lowered: Lowered) -> tuple[Compiled, int]:
    return _jax.compiled(lowered), 1


def _compile_first(group: _EqualUnits, devices: Devices) -> tuple[Compiled, int]:
    # It was lowered without devices, so that one module serves all units of the group.
    assert group.lowered is not None, "only groups that were lowered without devices come here"
    compiled = _jax.compiled(group.lowered, device_assignment=devices)
    # Packing costs time, and serves only to load the executable on further devices of this process.
    if len(group.uses) > 1 and all_here(devices):
        group.packed = _jax.packed(compiled, devices)
    return compiled, 1


def _load_or_compile(group: _EqualUnits, devices: Devices) -> tuple[Compiled, int]:
    loaded = _jax.unpacked(group.packed, devices) if group.packed is not None and all_here(devices) else None
    if loaded is not None:
        return loaded, 0
    assert group.lowered is not None, "it is dropped only when all units of the group are compiled"
    return _jax.compiled(group.lowered, device_assignment=devices), 1


def _num_cores() -> int:
    # A container or a scheduler may allow fewer cores than the machine has.
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1
