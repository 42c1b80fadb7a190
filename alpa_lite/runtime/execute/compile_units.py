"""What a program needs compiled: its tasks, what makes their accumulators, and what joins the parts of an output."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from alpa_lite import _jax
from alpa_lite.lower.emission import Emitted, Layout, boundary_layout, boundary_spec, emit_task
from alpa_lite.lower.instructions import Buffer, Program
from alpa_lite.lower.same_task import task_form
from alpa_lite.plan.plan import Plan
from alpa_lite.program.equations import Equation
from alpa_lite.program.phases import StepGraph
from alpa_lite.runtime.execute.compile import Unit


def task_units(
    program: Program,
    plan: Plan,
    step: StepGraph,
    equations: Sequence[Equation],
    meshes: Sequence[Mesh],
    donated: Mapping[int, Sequence[int]],
) -> list[Unit]:
    """The tasks of a program, in order. `donated`: per task the inputs that are given away."""
    units: list[Unit] = []
    for number, task in enumerate(program.tasks):
        mesh, placements, given = meshes[task.stage], plan.stages[task.stage].ops, donated.get(number, ())
        form = task_form(task, step, equations, placements, dict(mesh.shape), given)
        emit = partial(_emit_task, task, step, equations, placements, mesh, given)
        units.append(Unit(name=task.name, mesh=mesh, form=form, emit=emit))
    return units


def _emit_task(task: Any, step: Any, equations: Any, placements: Any, mesh: Any, given: Any, name: str) -> Emitted:
    return emit_task(task, step, equations, placements, mesh, name=name, donated=given)


def zeros_units(program: Program, step: StepGraph, meshes: Sequence[Mesh]) -> dict[int, Unit]:
    """What makes the accumulators of each task that has some, by its number."""
    units: dict[int, Unit] = {}
    for number in dict.fromkeys(i.task for i in program.instructions if i.kind == "ZEROS"):
        task = program.tasks[number]
        mesh = meshes[task.stage]
        layouts = tuple(boundary_layout(step.graph.values[p.value], p, dict(mesh.shape)) for p in task.sums)

        def make(layouts: tuple[Layout, ...] = layouts) -> tuple[jax.Array, ...]:
            return tuple(map(_zeros, layouts))

        emit = partial(_emit, make, mesh, (), tuple(x.spec for x in layouts))
        units[number] = Unit(name=f"{task.name}'s sums", mesh=mesh, form=("zeros", layouts), emit=emit)
    return units


def _zeros(layout: Layout) -> jax.Array:
    if layout.dtype.startswith("key<"):  # a micro-batch hands the key of the whole step on, and adds nothing to it
        key = jax.random.key(0, impl=_jax.key_implementation(layout.dtype))
        return jax.numpy.broadcast_to(key, layout.shape)
    return jax.numpy.zeros(layout.shape, layout.dtype)


def concat_units(program: Program, step: StepGraph, meshes: Sequence[Mesh]) -> dict[Buffer, Unit]:
    """What puts together the micro-batches of each output that has a batch dim, by its buffer."""
    specs: dict[Buffer, PartitionSpec] = {}
    for instruction in program.instructions:
        if instruction.kind == "RUN":
            task = program.tasks[instruction.task]
            ports = zip(instruction.writes, (*task.outputs, *task.sums), strict=True)
            specs.update({buffer: boundary_spec(port.spec) for buffer, port in ports})
        elif instruction.spec is not None:
            specs.update(dict.fromkeys(instruction.writes, boundary_spec(instruction.spec)))
    units: dict[Buffer, Unit] = {}
    for instruction in program.instructions:
        if instruction.kind == "CONCAT":
            (buffer,) = instruction.writes
            value, mesh = step.graph.values[buffer.value], meshes[buffer.stage]
            ins = tuple(Layout(shape=value.shape, dtype=value.dtype, spec=specs[b]) for b in instruction.reads)
            dim = step.batch_dims[buffer.value] or 0
            runs = step.runs.get(buffer.value, 1)
            join = partial(_join, dim, runs)
            emit = partial(_emit, join, mesh, ins, specs[buffer])
            form = ("concat", ins, dim, runs, specs[buffer])
            units[buffer] = Unit(name=f"output {buffer}", mesh=mesh, form=form, emit=emit)
    return units


def _join(dim: int, runs: int, *parts: Any) -> jax.Array:
    """The samples of all micro-batches; of several runs one after the other those of each."""
    if runs == 1:
        return jax.numpy.concatenate(parts, dim)
    shape = parts[0].shape
    cut = [part.reshape(*shape[:dim], runs, shape[dim] // runs, *shape[dim + 1 :]) for part in parts]
    whole = jax.numpy.concatenate(cut, dim + 1)
    return whole.reshape(*shape[:dim], shape[dim] * len(parts), *shape[dim + 1 :])


def _emit(function: Callable[..., Any], mesh: Mesh, ins: tuple[Layout, ...], outs: Any, name: str) -> Emitted:
    def run(*arrays: Any) -> Any:
        return function(*arrays)

    run.__name__ = name.replace(" ", "_")
    return Emitted(
        function=run,
        mesh=mesh.abstract_mesh,
        platform=_jax.lowering_platform(mesh.devices.flat[0]),
        ins=ins,
        outs=outs,
        donated=(),
        takes_microbatch=False,
    )
