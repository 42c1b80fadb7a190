"""All manual plans of a case that its baseline could have tried.

GPT            Megatron-LM   data × tensor within a host × pipeline × micro-batches
MoE            DeepSpeed     ZeRO-2 with expert-parallel devices × micro-batches
Wide-ResNet    PP-DP         pipeline × data, stages of equal FLOPs × micro-batches

For each choice of degrees, micro-batches grow until one does not fit or takes longer than the previous one. Plans that
cannot fit are left out: 14 bytes per weight of GPT, in float16 with the float32 copy and moments of Adam.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

from alpa_lite.cli.models.alpa_cases import Case
from alpa_lite.cli.models.transformer import Transformer
from alpa_lite.inter_op.microbatch_counts import divisors
from alpa_lite.planners import Hybrid
from alpa_lite.planners.grid_search import factorisations, microbatch_sizes
from benchmarks.alpa.fixed_plans import FixedPlan, deepspeed, in_loops, megatron
from benchmarks.alpa.price import Desk, Price

#: Samples per data-parallel replica and micro-batch that are tried, in steps of about 2.
LARGEST_MICROBATCH = 64
_BYTES_PER_WEIGHT = 14


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """A manual plan without its number of micro-batches; `data` is the number of parts into which it splits each."""

    case: Case
    planner: Hybrid
    data: int


def degrees(case: Case) -> Iterator[Degrees]:
    """Yield the degrees that the baseline of a case can choose."""
    devices, model = case.num_devices, case.model
    if not isinstance(model, Transformer):
        for pipeline in divisors(min(devices, sum(model.stage_sizes))):
            if devices % pipeline == 0:
                data = devices // pipeline
                yield Degrees(case=case, planner=Hybrid(pipeline=pipeline, data=data), data=data)
        return
    if model.experts is not None:
        for experts in divisors(gcd(devices, model.experts.num_experts)):
            yield Degrees(case=case, planner=deepspeed(devices, experts), data=devices)
        return
    memory = case.cluster.device.usable_bytes
    for pipeline, data, tensor in factorisations(devices, max_tensor=case.cluster.devices_per_host):
        fits = _BYTES_PER_WEIGHT * case.parameters / (pipeline * tensor) <= memory
        if model.num_layers % pipeline == 0 and case.cluster.devices_per_host % tensor == 0 and fits:
            yield Degrees(case=in_loops(case, pipeline), planner=megatron(data, tensor, pipeline), data=data)


def numbers_of_microbatches(case: Case, data: int) -> Iterator[int]:
    """Yield numbers of micro-batches, from the smallest micro-batches on."""
    for size in microbatch_sizes(case.num_samples, data, LARGEST_MICROBATCH):
        yield case.num_samples // data // size


def grid_prices(desk: Desk, case: Case) -> Iterator[Price]:
    """Yield the prices of the grid."""
    for choice in degrees(case):
        shortest = float("inf")
        for count in numbers_of_microbatches(case, choice.data):
            plan = FixedPlan(system="best manual", case=choice.case, planner=choice.planner, num_microbatches=count)
            price = desk.price(plan)
            yield price
            if price.seconds is None or price.seconds > shortest:
                break
            shortest = price.seconds
