"""Predicted peak memory against peaks that were measured on GPUs: the intra-operator ablation of Alpa.

The measurements are from Zheng et al., OSDI 2022, figure 8: alpa-projects/alpa, branch osdi22_artifact,
osdi22_artifact/results_intra_ablation_ref.tsv, in GiB (`GB = 1 << 30` in benchmark/alpa/exp_intra_ablation.py, which
also has the sizes of the models). One micro-batch on V100s of one host. Other settings that decide on memory
(benchmark/alpa/benchmark_one_case_*.py): no dropout, an untied output projection; Adam with float32 copies of float16
weights for GPT, Adafactor with copies for MoE, SGD with momentum in float32 for Wide-ResNet.

Rows whose sharding Alpa searched are predicted with the logical mesh of Alpa's plan and with our search on it; runs
that shard the largest dim, and those that repeat another, are left out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from rich.table import Table

import alpa_lite as al
from alpa_lite.api.stages import TracedFunction
from alpa_lite.cli.models.skip_networks import ResNet
from alpa_lite.cli.models.train import Adam, Transformation, init_state, make_train_step, with_master_weights
from alpa_lite.cli.models.transformer import Architecture, Computation, Transformer
from alpa_lite.cli.models.transformer_layers import Experts
from alpa_lite.planners import Hybrid
from cost_models.cluster import Cluster

Family = Literal["GPT", "MoE", "Wide-ResNet"]
Sharding = Literal["auto", "data", "zero-2", "zero-3"]

_GIB = 1 << 30
_UNLIMITED_BYTES = 1e15
#: (hidden, heads, experts), (hidden, heads) and (channels,) by the number of devices.
_GPT = {1: (2048, 16), 2: (3072, 24), 4: (4096, 32), 8: (5760, 40)}
_MOE = {1: (1024, 32, 8), 2: (1280, 40, 16), 4: (1536, 24, 16), 8: (1536, 24, 32)}
_RESNET = {1: 160, 2: 224, 4: 320, 8: 448}

_MEASURED_GIB: dict[tuple[Family, Sharding], dict[tuple[int, int], float]] = {
    ("GPT", "auto"): {
        (1, 1): 9.54,
        (1, 2): 9.52,
        (2, 2): 8.74,
        (1, 4): 7.77,
        (4, 2): 11.08,
        (2, 4): 8.44,
        (1, 8): 7.75,
    },
    ("GPT", "zero-2"): {(2, 1): 10.34, (4, 1): 12.42},
    ("GPT", "zero-3"): {(2, 1): 9.59, (4, 1): 10.02, (8, 1): 13.00},
    ("MoE", "auto"): {(1, 1): 8.33, (2, 1): 9.72, (4, 1): 6.59, (8, 1): 5.63},
    ("MoE", "zero-2"): {(2, 1): 12.70, (4, 1): 13.62},
    ("MoE", "zero-3"): {(2, 1): 10.84, (4, 1): 9.55, (8, 1): 13.93},
    ("Wide-ResNet", "auto"): {
        (1, 1): 10.25,
        (2, 1): 8.34,
        (4, 1): 8.19,
        (2, 2): 9.32,
        (8, 1): 7.95,
        (4, 2): 10.57,
        (2, 4): 9.71,
    },
    ("Wide-ResNet", "data"): {(2, 1): 10.22},
    ("Wide-ResNet", "zero-2"): {(2, 1): 9.25, (4, 1): 10.78},
    ("Wide-ResNet", "zero-3"): {(2, 1): 7.76, (4, 1): 7.19, (8, 1): 10.17},
}
"""The plans by the sizes of the logical mesh: data-parallel × tensor-parallel devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A measured run: model, how state is sharded, the logical mesh, and its peak per device in GiB."""

    family: Family
    sharding: Sharding
    data: int
    model: int
    measured_gib: float

    @property
    def num_devices(self) -> int:
        """The number of devices, all of one host."""
        return self.data * self.model


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakRow:
    """Predicted parts of the peak of a run and the measured whole, in GiB per device."""

    family: Family
    sharding: Sharding
    mesh: str
    state_gib: float
    saved_gib: float
    temporary_gib: float
    predicted_gib: float
    measured_gib: float

    @property
    def ratio(self) -> float:
        """Predicted to measured peak."""
        return self.predicted_gib / self.measured_gib


def runs() -> Iterator[Run]:
    """Yield the measured runs."""
    for (family, sharding), by_mesh in _MEASURED_GIB.items():
        for (data, model), gib in by_mesh.items():
            yield Run(family=family, sharding=sharding, data=data, model=model, measured_gib=gib)


def planner_of(run: Run) -> Hybrid:
    """Return the planner that makes the plan of a run."""
    return Hybrid(
        data=run.data,
        tensor=run.model,
        # What stage 2 adds to stage 1, gradients that are scattered at once, follows from the costs.
        zero={"auto": 1, "data": 0, "zero-2": 1, "zero-3": 3}[run.sharding],
        # The search was free to split anything on the first axis; for GPT it had to split the batch.
        expert=run.data if run.family != "GPT" and run.sharding == "auto" else 1,
        sequence_parallel=False,
    )


def cluster_of(run: Run) -> Cluster:
    """Return the devices of a run, without a memory limit: some runs exceed it, and the excess is of interest."""
    cluster = al.cluster("p3.16xlarge", num_hosts=1)
    device = replace(cluster.device, memory_bytes=_UNLIMITED_BYTES)
    return replace(cluster, devices_per_host=run.num_devices, device=device)


def predicted(run: Run) -> PeakRow:
    """Return the predicted peak of our plan for a run."""
    planned = traced(run).plan(cluster=cluster_of(run), planner=planner_of(run), num_microbatches=1)
    plan = planned.last_plan
    (stage,), (peak,) = plan.stages, plan.prediction.peak_bytes
    return PeakRow(
        family=run.family,
        sharding=run.sharding,
        mesh=f"{run.data} × {run.model}",
        state_gib=stage.cost.state_bytes / _GIB,
        saved_gib=stage.cost.activation_bytes / _GIB,
        temporary_gib=stage.cost.temporary_bytes / _GIB,
        predicted_gib=peak / _GIB,
        measured_gib=run.measured_gib,
    )


def traced(run: Run) -> TracedFunction:
    """Trace the train step of a run with shapes only."""
    model, optimizer, batch = _training(run)
    state = jax.eval_shape(lambda: init_state(model.init(jax.random.key(0)), optimizer))
    return al.parallelize(make_train_step(model.loss_fn, optimizer)).trace(state, batch)


def _training(run: Run) -> tuple[Any, Transformation, Any]:
    if run.family == "Wide-ResNet":
        resnet = ResNet(channels=_RESNET[run.num_devices], width_factor=2, num_classes=1024, norm_batch=1)
        return resnet, optax.sgd(0.1, momentum=0.9, nesterov=True), resnet.batch_shapes(32)
    common = Transformer(
        seq_len=1024,
        num_layers=8,
        architecture=Architecture(tied=False),
        computation=Computation(recompute="full", dtype=jnp.float16, param_dtype=jnp.float16),
    )
    if run.family == "GPT":
        hidden, heads = _GPT[run.num_devices]
        model = replace(common, vocab_size=25600, hidden=hidden, num_heads=heads, inner=4 * hidden)
        return model, Adam(weight_decay=0.01, master_weights=True), model.batch_shapes(8)
    hidden, heads, experts = _MOE[run.num_devices]
    model = replace(
        common,
        vocab_size=51200,
        hidden=hidden,
        num_heads=heads,
        inner=8 * hidden,
        experts=Experts(num_experts=experts, top_k=2, group_size=1024, every=2),
    )
    return model, with_master_weights(optax.adafactor(1e-2)), model.batch_shapes(8)


def run_all(say: Callable[[str], None]) -> list[PeakRow]:
    """Return the predictions of all runs."""
    rows: list[PeakRow] = []
    for run in runs():
        say(f"{run.family}, {run.sharding}, {run.data} × {run.model}")
        rows.append(predicted(run))
    return rows


def bias_and_spread(ratios: Sequence[float]) -> tuple[float, float]:
    """Return the geometric mean of some ratios, and their geometric standard deviation."""
    logarithms = [math.log(ratio) for ratio in ratios]
    return math.exp(statistics.fmean(logarithms)), math.exp(statistics.pstdev(logarithms))


def rendered(rows: Sequence[PeakRow]) -> Table:
    """Return the table, with bias and spread by kind of sharding."""
    table = Table("model", "sharding", "mesh", "state", "saved", "temporary", "predicted", "measured", "ratio")
    for column in table.columns[3:]:
        column.justify = "right"
    for row in rows:
        sizes = (row.state_gib, row.saved_gib, row.temporary_gib, row.predicted_gib, row.measured_gib)
        table.add_row(row.family, row.sharding, row.mesh, *(f"{size:.2f}" for size in sizes), f"{row.ratio:.2f}")
    table.add_section()
    for sharding in (*dict.fromkeys(row.sharding for row in rows), "all"):
        bias, spread = bias_and_spread([row.ratio for row in rows if sharding in (row.sharding, "all")])
        table.add_row("all", sharding, f"spread {spread:.2f}", *[""] * 5, f"{bias:.2f}")
    return table
