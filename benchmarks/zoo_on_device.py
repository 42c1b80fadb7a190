"""Small models of every kind on one device: is a step by a plan what `jax.jit` computes (`checked`)?

one device    the whole step as one program
pipeline      two stages that share the device, two micro-batches: sends, sums of gradients and the schedule run as they
              do on several devices

Outputs are compared in units of their rounding (`alpa_lite.runtime.compare`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import alpa_lite as al
from alpa_lite.cli.bench.request import ZOO, find_target
from alpa_lite.errors import CheckError
from alpa_lite.planners import DataParallel, Hybrid, Planner
from alpa_lite.runtime.compare import check_compiled
from alpa_lite.schedule import Interleaved1F1B
from cost_models.cluster import Cluster

SMALL = tuple(name for name in ZOO if name.endswith("-tiny"))
"""The models that are checked."""

PLANS: Mapping[str, tuple[Planner, int]] = {
    "one device": (DataParallel(), 1),
    "pipeline": (Hybrid(schedule=Interleaved1F1B(num_chunks=2)), 2),
}
"""Planners with their micro-batches; chunks of an interleaved pipeline of one device are stages that share it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A model under a plan.

    Attributes:
        share: the largest difference of an output from `jax.jit`, as a part of what is allowed.
        worst: the sentence about that output, if it differs by more.
    """

    model: str
    plan: str
    num_stages: int
    equal: bool
    share: float
    worst: str
    seconds: float


def checked(model: str, plan: str, cluster: Cluster) -> Check:
    """Run one step of a model by a plan on the first device of this process, and compare it with `jax.jit`."""
    began = time.perf_counter()
    target, (planner, num_microbatches) = find_target(model), PLANS[plan]
    function = al.parallelize(
        target.step, cluster=cluster, planner=planner, num_microbatches=num_microbatches, cache=False
    )
    compiled = function.compiled(*target.arguments)
    try:
        report = check_compiled(compiled, target.values(), {})
    except CheckError as error:
        report = error.report
    leaf = report.worst[0]
    return Check(
        model=model,
        plan=plan,
        num_stages=len(compiled.plan.stages),
        equal=report.ok,
        share=leaf.share,
        worst="" if report.ok else leaf.sentence,
        seconds=time.perf_counter() - began,
    )
