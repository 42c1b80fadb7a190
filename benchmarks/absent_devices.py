"""Compile the programs of a plan for accelerators that are not there, for what XLA says of their memory.

    TPUs    by the package `libtpu`
    GPUs    by JAX's plugin for CUDA, of which the kernels are compiled too; none are timed, so that products are those
            of cuBLAS, whose workspace counts among the temporaries

Neither is a requirement of alpa_lite.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import util
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import alpa_lite as al
from alpa_lite.errors import ExecutionError
from alpa_lite.lower.emission import Emitted, Executable
from alpa_lite.runtime.execute.aliasing import donations
from alpa_lite.runtime.execute.compile import CompileUnit, LoweredStep, task_units
from alpa_lite.runtime.execute.measure import Allocated, allocated
from cost_models.cluster import Cluster

GPU_FLAGS = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false --xla_disable_hlo_passes=rematerialization"
"""Flags of XLA for programs of GPUs that are not there.

No kernel can be timed, and products are those of cuBLAS. XLA does not recompute by itself, by which it would get a
program into less memory than it needs.
"""

XLA_SHARE = 0.8
"""The share of the memory of a GPU that is not there which XLA takes to be the allocator's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuTarget:
    """A GPU as XLA describes it to itself (`GpuTargetConfig`), with the cluster whose hosts have it.

    The figures are those of NVIDIA's data sheets and of the tables of compute capabilities in its CUDA C++ Programming
    Guide.

    Attributes:
        cluster: name of the cluster.
        capability: major and minor number of the compute capability.
        multiprocessors: their number.
        fpus: units for float32 of a multiprocessor.
        shared_bytes: shared memory of a multiprocessor.
        cache_bytes: cache of level 2.
        clock_ghz: highest clock rate.
        bytes_per_second: rate of the memory.
    """

    cluster: str
    capability: tuple[int, int]
    multiprocessors: int
    fpus: int
    shared_bytes: int
    cache_bytes: int
    clock_ghz: float
    bytes_per_second: int

    def configuration(self, memory_bytes: int) -> str:
        """Return the target configuration of such a GPU with so much memory, as text of a protocol buffer."""
        major, minor = self.capability
        return f"""
            platform_name: "CUDA"
            device_description_str: "NVIDIA GPU"
            dnn_version_info {{ major: 9 minor: 8 }}
            runtime_version {{ major: 12 minor: 9 }}
            gpu_device_info {{
              cuda_compute_capability {{ major: {major} minor: {minor} }}
              threads_per_block_limit: 1024
              threads_per_warp: 32
              threads_per_core_limit: 2048
              block_dim_limit_x: 2147483647
              block_dim_limit_y: 65535
              block_dim_limit_z: 65535
              registers_per_core_limit: 65536
              registers_per_block_limit: 65536
              shared_memory_per_block: 49152
              shared_memory_per_core: {self.shared_bytes}
              shared_memory_per_block_optin: {self.shared_bytes - 1024}
              core_count: {self.multiprocessors}
              fpus_per_core: {self.fpus}
              l2_cache_size: {self.cache_bytes}
              clock_rate_ghz: {self.clock_ghz}
              memory_bandwidth: {self.bytes_per_second}
              device_memory_size: {memory_bytes}
            }}
        """


GPUS: Mapping[str, GpuTarget] = {
    "a100": GpuTarget(
        cluster="dgx-a100",
        capability=(8, 0),
        multiprocessors=108,
        fpus=64,
        shared_bytes=167936,
        cache_bytes=41943040,
        clock_ghz=1.41,
        bytes_per_second=2039000000000,
    ),
    "h100": GpuTarget(
        cluster="dgx-h100",
        capability=(9, 0),
        multiprocessors=132,
        fpus=128,
        shared_bytes=233472,
        cache_bytes=52428800,
        clock_ghz=1.98,
        bytes_per_second=3352000000000,
    ),
}
"""GPUs for which programs can be compiled, by name."""


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


def gpu_devices(kind: str, number: int, memory_bytes: float) -> list[Any]:
    """Return GPUs of a kind (`GPUS`) in one host. `memory_bytes`: of the allocator, to which XLA keeps where it can.

    Raises:
        ExecutionError: JAX's plugin for CUDA is not installed.
    """
    if util.find_spec("jax_plugins.xla_cuda12") is None and util.find_spec("jax_plugins.xla_cuda13") is None:
        raise ExecutionError(
            "Programs for GPUs are compiled by JAX's plugin for CUDA, which is not installed: pip install "
            f'"jax[cuda12]=={jax.__version__}". It needs no GPU.'
        )
    from jax.experimental import topologies

    try:
        found = topologies.get_topology_desc(
            platform="cuda",
            target_config=GPUS[kind].configuration(int(memory_bytes / XLA_SHARE)),
            topology=f"1x1x{number}",
        )
    except Exception as error:
        raise ExecutionError(f"JAX's plugin for CUDA gives no such GPUs: {str(error).rstrip('.')}.") from error
    return list(found.devices)


def gpu_cluster(kind: str, num_devices: int) -> Cluster:
    """Return a host of so many GPUs of a kind."""
    return replace(al.cluster(GPUS[kind].cluster), num_hosts=1, devices_per_host=num_devices)


def _compiled(emitted: Emitted, unit: CompileUnit) -> Any:
    try:
        return emitted.lower(unit.mesh, elsewhere=True).compile()
    except Exception as error:
        # The first line says what; how much memory which buffer takes, or a stack of the compiler, follows.
        said = str(error).partition("\n")[0]
        raise ExecutionError(f"XLA could not compile {unit.name} for {emitted.platform}: {said}") from error


def allocated_on(lowered: al.LoweredFunction, devices: Sequence[Any], platform: str) -> tuple[Allocated, ...]:
    """Compile the tasks of a lowered step for devices of a platform, and return the allocation at the peak of each
    stage.
    """
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
            emitted = unit.emit(name=unit.name, platform=platform)
            made[form] = emitted, _compiled(emitted, unit)
        emitted, compiled = made[form]
        executables.append(Executable(task=task, mesh=meshes[task.stage], emitted=emitted, compiled=compiled))
    return allocated(plan, of.program, of.step, executables)
