"""Compile the programs of a plan for TPUs that are not there, for what XLA:TPU says of their memory.

The compiler comes with the package `libtpu`, which is no requirement of alpa_lite. It needs no device.
"""

from __future__ import annotations

from collections.abc import Hashable
from importlib import util
from typing import Any

import numpy as np
from jax.sharding import Mesh

import alpa_lite as al
from alpa_lite.errors import ExecutionError
from alpa_lite.lower.emission import Emitted, Executable
from alpa_lite.runtime.execute.aliasing import donations
from alpa_lite.runtime.execute.compile import CompileUnit, LoweredStep, task_units
from alpa_lite.runtime.execute.measure import Allocated, allocated


def tpu_devices(topology: str) -> list[Any]:
    """Return the devices of a topology, such as `v5e:2x4`.

    Raises:
        ExecutionError: libtpu is not installed, or knows no such topology.
    """
    if util.find_spec("libtpu") is None:
        raise ExecutionError(
            "Programs for TPUs are compiled by libtpu, which is not installed: pip install libtpu, in the version that "
            "the installed JAX names (pip show -v jax; its extra 'tpu')."
        )
    from jax.experimental import topologies

    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)
    except Exception as error:
        raise ExecutionError(
            f"libtpu does not give the topology {topology!r}: {str(error).rstrip('.')}. Give one such as v5e:2x4; only "
            "one process at a time can use libtpu."
        ) from error


def _compiled(emitted: Emitted, unit: CompileUnit) -> Any:
    try:
        return emitted.lower(unit.mesh).compile()
    except Exception as error:
        # The first line says what; how much memory which buffer takes, or a stack of the compiler, follows.
        said = str(error).partition("\n")[0]
        raise ExecutionError(f"XLA:TPU could not compile {unit.name}: {said}") from error


def allocated_on(lowered: al.LoweredFunction, devices: list[Any]) -> tuple[Allocated, ...]:
    """Compile the tasks of a lowered step for devices, and return the allocation at the peak of each stage."""
    plan, traced = lowered.planned.last_plan, lowered.step
    of = LoweredStep(program=lowered.program, plan=plan, step=traced.step, equations=traced.equations)
    # Each stage on the first devices: XLA:TPU compiles for all devices from 0 on, and what they allocate is the same.
    meshes = [
        Mesh(
            np.array(devices[: stage.submesh.num_devices]).reshape(stage.mesh_shape.shape), stage.mesh_shape.axis_names
        )
        for stage in plan.stages
    ]
    given = donations(of.program, plan, of.step, lowered.planned.function.traced.inputs.donated)
    made: dict[Hashable, tuple[Emitted, Any]] = {}
    executables: list[Executable] = []
    for task, unit in zip(of.program.tasks, task_units(of, meshes, given), strict=True):
        form = unit.mesh.abstract_mesh, unit.form
        if form not in made:
            emitted = unit.emit(name=unit.name, platform="tpu")
            made[form] = emitted, _compiled(emitted, unit)
        emitted, compiled = made[form]
        executables.append(Executable(task=task, mesh=meshes[task.stage], emitted=emitted, compiled=compiled))
    return allocated(plan, of.program, of.step, executables)
