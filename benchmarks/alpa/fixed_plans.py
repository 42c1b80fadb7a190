"""The plans of Alpa's evaluation, its own and those it was compared with, and their measured TFLOPS per device.

Zheng et al., OSDI 2022, figures 7 and 13 and the suites and results of alpa-projects/alpa, branch osdi22_artifact. What
was not measured, or is a projection from smaller batches, has no figure here.

Counts of layers are of equal clusters: of loops over layers for GPT and MoE, which are alike, and of operators for
Wide-ResNet, clustered by this project. The published plan of WRN-13B is one of 33 clusters of another network of that
size (101 blocks, factor 16); its stages are applied to the network that was measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from alpa_lite.cli.models.alpa_cases import CASES, Case
from alpa_lite.cli.models.transformer import Transformer
from alpa_lite.planners import Hybrid
from alpa_lite.planners.planner import Planner
from benchmarks.alpa.given_stages import GivenStage, GivenStages
from cost_models.hardware import Backend


@dataclass(frozen=True, kw_only=True)
class Software:
    """The software that runs a plan.

    Attributes:
        backend: how it executes a program.
        memory_bytes: the memory of a V100 that it can use, in bytes; None: as the device is described.
    """

    backend: Backend
    memory_bytes: float | None = None


#: XLA of that time ran collectives and kernels in turn, on GPUs.
XLA = Software(backend=Backend(overlap=False))
#: PyTorch without a compiler: one library call after another, as `benchmarks.published.plan_of` takes it to be. It has
#: the 16160 MiB that a V100 reports but for the context of CUDA, about half a GiB (assumption).
PYTORCH = Software(
    backend=Backend(overlap=False, fusion="calls", call_seconds=1e-5), memory_bytes=(16160 - 512) * 2.0**20
)


@dataclass(frozen=True, kw_only=True)
class FixedPlan:
    """A published plan.

    Attributes:
        system: the name of the system that made it.
        case: the case, with another batch where that was measured, its model written as the plan's loops.
        planner: a planner that makes this plan.
        measured_tflops: per device, counted as `Case.flops_per_step` counts; None where nothing was measured.
        ran_on: the software that it ran on; plans are compared on `XLA`.
        ran_as: the plan as it was run, where that differs from the comparison.
    """

    system: str
    case: Case
    planner: Planner
    num_microbatches: int
    measured_tflops: float | None = None
    ran_on: Software = XLA
    ran_as: Planner | None = None


def in_loops(case: Case, count: int) -> Case:
    """Return the case with its layers in `count` loops, as far as they can be divided; convolutions have no loops."""
    model = case.model
    if not isinstance(model, Transformer):
        return case
    periods = model.num_layers // model.period
    computation = replace(model.computation, num_segments=min(count, periods))
    return replace(case, model=replace(model, computation=computation))


def without_recomputation(case: Case) -> Case:
    """Return the case without recomputation, as it ran without a pipeline.

    Neither the counts nor the memory of Wide-ResNet show any recomputation there.
    """
    if isinstance(case.model, Transformer):
        return case
    return replace(case, model=replace(case.model, recompute=False))


Stages = Sequence[tuple[int, tuple[int, int], tuple[int, int]]]
"""Layers, hosts × devices per host, and logical mesh of each stage."""

_ALPA: Mapping[str, Stages] = {
    "gpt-350M": [(1, (1, 1), (1, 1))],
    "gpt-760M": [(3, (1, 1), (1, 1))] * 2,
    "gpt-1.3B": [(3, (1, 2), (2, 1))] * 2,
    "gpt-2.6B": [(2, (1, 2), (2, 1)), (2, (1, 2), (2, 1)), (4, (1, 4), (4, 1))],
    "gpt-6.7B": [(4, (1, 8), (2, 4))] * 2,
    "gpt-15B": [(4, (1, 8), (2, 4))] * 4,
    "gpt-39B": [(1, (1, 4), (1, 4))] * 16,
    "moe-380M": [(1, (1, 1), (1, 1))],
    "moe-690M": [(1, (1, 2), (2, 1))],
    "moe-1.3B": [(4, (1, 2), (2, 1))] * 2,
    "moe-2.4B": [(4, (1, 4), (4, 1))] * 2,
    "moe-10B": [(4, (1, 8), (8, 1))] * 2,
    "moe-27B": [(1, (1, 4), (4, 1))] * 8,
    "moe-70B": [(1, (1, 8), (8, 1))] * 8,
    "wrn-250M": [(16, (1, 1), (1, 1))],
    "wrn-500M": [(16, (1, 2), (1, 2))],
    "wrn-1B": [(16, (1, 4), (1, 4))],
    "wrn-2B": [(8, (1, 4), (4, 1)), (8, (1, 4), (1, 4))],
    "wrn-4B": [(5, (1, 4), (4, 1)), (4, (1, 4), (4, 1)), (7, (1, 8), (8, 1))],
    "wrn-6.8B": [(layers, (1, 8), (8, 1)) for layers in (5, 4, 4, 3)],
    "wrn-13B": [
        (layers, (1, 8), (8, 1) if batch else (1, 8))
        for layers, batch in zip((4, 4, 4, 4, 4, 4, 5, 4), (1, 0, 1, 0, 1, 1, 0, 1), strict=True)
    ],
}
_ALPA_TFLOPS = {
    "gpt-350M": 45.07, "gpt-760M": 57.92, "gpt-1.3B": 58.21, "gpt-2.6B": 61.61, "gpt-15B": 59.9,
    "moe-380M": 45.46, "moe-690M": 43.03, "moe-1.3B": 39.92, "moe-2.4B": 45.76, "moe-27B": 38.84,
    "wrn-250M": 8.30, "wrn-500M": 8.46, "wrn-1B": 8.16, "wrn-2B": 8.04, "wrn-6.8B": 6.60,
}  # fmt: skip

#: Batch, and (data, tensor, pipeline; micro-batches) of Megatron-LM's best.
_MEGATRON = {
    "gpt-350M": (128, 1, 1, 1, 8, 47.53),
    "gpt-1.3B": (1024, 2, 1, 2, 128, 55.89),
    "gpt-2.6B": (1024, 1, 1, 8, 128, 50.44),
    "gpt-6.7B": (1024, 1, 2, 8, 256, None),
    "gpt-15B": (1024, 1, 4, 8, 256, 58.24),
    "gpt-39B": (1024, 1, 4, 16, 1024, None),
}
#: Micro-batches and expert-parallel devices of DeepSpeed's best (ZeRO-2).
_DEEPSPEED = {
    "moe-380M": (128, 1, 34.24),
    "moe-1.3B": (32, 4, 34.67),
    "moe-2.4B": (16, 2, 40.01),
    "moe-10B": (8, 8, None),
    "moe-27B": (8, 8, 3.82),
}
#: Micro-batches, and layers and devices of each stage, of pipeline and data parallelism alone.
_PP_DP = {
    "wrn-1B": (32, ((8, 2), (5, 1), (3, 1)), 8.08),
    "wrn-2B": (32, ((9, 4), (2, 1), (3, 2), (2, 1)), 7.72),
    "wrn-4B": (384, ((1, 1),) * 16, None),
}
#: Logical mesh, micro-batches and TFLOPS per device of sharding alone.
_INTRA = {
    "gpt-350M": ((1, 1), 64, 46.20), "gpt-760M": ((2, 1), 64, 59.54), "gpt-1.3B": ((4, 1), 64, 58.36),
    "gpt-2.6B": ((4, 2), 32, 50.82), "gpt-6.7B": ((2, 8), 64, 48.42),
    "moe-380M": ((1, 1), 32, 45.46), "moe-690M": ((2, 1), 32, 42.17), "moe-1.3B": ((4, 1), 16, 41.13),
    "moe-2.4B": ((8, 1), 16, 46.72), "moe-10B": ((2, 8), 32, 22.91),
    "wrn-250M": ((1, 1), 48, 8.37), "wrn-500M": ((2, 1), 32, 8.48), "wrn-1B": ((4, 1), 32, 8.15),
    "wrn-2B": ((8, 1), 48, 7.71), "wrn-4B": ((2, 8), 64, 4.72),
}  # fmt: skip
#: Micro-batches and layers of each stage, of one device each, of pipelines alone.
_INTER = {
    "wrn-1B": (64, (6, 5, 3, 2), 6.47),
    "wrn-2B": (96, (3, 3, 2, 3, 2, 1, 1, 1), 5.46),
    "wrn-4B": (384, (1,) * 16, 0.37),
}


#: Cases whose manual baseline ran out of memory whatever was tried.
NO_MANUAL_PLAN = ("wrn-6.8B",)


def fixed_plans(case: Case) -> Iterator[FixedPlan]:
    """Yield the published plans of a case."""
    name, known = case.id, CASES[case.id]
    yield alpa_plan(known)
    if name in _MEGATRON:
        batch, data, model, pipeline, count, tflops = _MEGATRON[name]
        yield FixedPlan(
            system="Megatron-LM",
            case=in_loops(replace(known, global_batch=batch), pipeline),
            planner=megatron(data, model, pipeline),
            num_microbatches=count,
            measured_tflops=tflops,
        )
    if name in _DEEPSPEED:
        count, experts, tflops = _DEEPSPEED[name]
        planner = deepspeed(case.num_devices, experts)
        yield FixedPlan(
            system="DeepSpeed",
            case=known,
            planner=planner,
            num_microbatches=count,
            measured_tflops=tflops,
            ran_on=PYTORCH,
        )
    if name in _PP_DP:
        count, stages, tflops = _PP_DP[name]
        yield given("PP-DP", known, [(n, (1, d), (d, 1)) for n, d in stages], count, tflops, force_batch=True)
    if name in _INTRA:
        (data, model), count, tflops = _INTRA[name]
        cluster = case.cluster
        whole = [(1, (cluster.num_hosts, cluster.devices_per_host), (data, model))]
        yield given("intra-op only", without_recomputation(known), whole, count, tflops)
    if name in _INTER:
        count, sizes, tflops = _INTER[name]
        yield given("inter-op only", known, [(n, (1, 1), (1, 1)) for n in sizes], count, tflops)


def num_layers(name: str) -> int:
    """Return the number of layer clusters into which Alpa divided the model of a case."""
    return sum(layers for layers, _, _ in _ALPA[name])


def alpa_plan(case: Case) -> FixedPlan:
    """Return the plan of Alpa's search for a published case."""
    return given("Alpa", case, _ALPA[case.id], case.num_microbatches, _ALPA_TFLOPS.get(case.id))


def megatron(data: int, model: int, pipeline: int) -> Hybrid:
    """Return Megatron-LM of the time: replicated state, no sequence parallelism, one loop over layers per stage."""
    return Hybrid(
        pipeline=pipeline,
        data=data,
        tensor=model,
        sequence_parallel=False,
        equal="loops" if pipeline > 1 else "flops",
    )


def deepspeed(num_devices: int, experts: int) -> Hybrid:
    """Return DeepSpeed's mixture of experts: batch and optimizer state over all devices, experts over some."""
    return Hybrid(data=num_devices, zero=1, expert=experts)


def given(
    system: str,
    case: Case,
    stages: Stages,
    count: int,
    tflops: float | None,
    *,
    force_batch: bool | None = None,
) -> FixedPlan:
    """Return given stages as a plan of a case, whose model is written as their layers."""
    layers = sum(number for number, _, _ in stages)
    written = in_loops(case, layers)
    by_loops = isinstance(case.model, Transformer)
    if len(stages) == 1:
        stages, written = [(1, *stages[0][1:])], case
    planner = GivenStages(
        stages=tuple(
            GivenStage(layers=number, hosts=hosts, devices_per_host=devices, data=data, model=model)
            for number, (hosts, devices), (data, model) in stages
        ),
        by_loops=by_loops,
        # Alpa's suites force the batch dim for GPT; experts and convolutions were free on meshes of one axis.
        force_batch=case.family == "gpt" if force_batch is None else force_batch,
    )
    return FixedPlan(
        system=system,
        case=written,
        planner=planner,
        num_microbatches=count,
        measured_tflops=tflops,
        ran_as=replace(planner, as_alpa_ran=True),
    )
