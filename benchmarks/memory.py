"""Compare the predicted memory of plans with XLA's allocations: `python -m benchmarks.memory [--out FILE]`.

Models, and a transformer under each recomputation policy, are planned by each planner and compiled for virtual CPU
devices. Plans have the rates of a DGX-1, so that they are the same on every machine. The program is then interpreted,
instruction by instruction, with the sizes of its buffers and XLA's figures for each executable
(`alpa_lite.runtime.execute.measure.allocated`), and compared with the plan's prediction for the same devices.

Temporaries of the CPU backend differ from a GPU's: it fuses less, copies operands of products into other layouts and
computes them in float32. `--gpu h100` and `--tpu v5e:2x4` compile larger models for accelerators, which need not be
there (`benchmarks.absent_devices`). XLA:GPU orders a program by the memory of the device: with more than it needs, it
lets arrays live longer so that collectives overlap. So each plan is compiled for GPUs whose allocators have what it is
predicted to need. `--published` compares with peaks that were measured on GPUs
(`benchmarks.published.peaks`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import alpa_lite as al
from alpa_lite.api.doctor import virtual_cpu_environment
from alpa_lite.cli.bench.request import ZOO, find_target
from alpa_lite.cli.models.sequential_networks import CNN, MLP
from alpa_lite.cli.models.train import Adam, Transformation, init_state, make_train_step
from alpa_lite.cli.models.transformer import Computation, Transformer
from alpa_lite.errors import AlpaLiteError
from alpa_lite.inspection.text.progress_bar import shown_progress
from alpa_lite.planners import FSDP, Auto, DataParallel, Hybrid, Megatron, Pipeline, Planner
from alpa_lite.runtime.execute.measure import Allocated
from alpa_lite.text import show_bytes, show_percent
from benchmarks import accelerator_programs
from benchmarks.absent_devices import GPU_FLAGS, GPUS, allocated_on, gpu_cluster, gpu_devices, tpu_devices
from benchmarks.published import peaks
from cost_models.cluster import Cluster

POLICIES = ("none", "selective", "full", "dots")
"""Recomputation policies of the transformer (`alpa_lite.cli.models.transformer.Recompute`)."""

PLANS: Mapping[str, tuple[Planner, int]] = {
    "data parallel": (DataParallel(), 1),
    "data parallel, 4 micro-batches": (DataParallel(), 4),
    "FSDP": (FSDP(), 1),
    "Megatron": (Megatron(), 1),
    "dp2 × tp4": (Hybrid(data=2, tensor=4), 1),
    "pipeline of 2": (Pipeline(pipeline=2), 4),
    "pp2 × dp2 × tp2": (Hybrid(pipeline=2, data=2, tensor=2), 4),
    "auto": (Auto(), 4),
    "one device": (DataParallel(), 1),
    "data parallel, recomputed": (Hybrid(remat="full"), 1),
    "ZeRO-3, recomputed": (Hybrid(zero=3, remat="full"), 1),
}
"""The planners, and the number of micro-batches for each."""

_MLP_BATCH = ("inputs", "targets")

OWN_MODELS = ("transformer", "MLP", "CNN")
"""Models of this benchmark; the others are those of `alpa-lite bench`, and for one accelerator (`LARGE_MODELS`)."""

LARGE_MODELS = tuple(case.name for case in accelerator_programs.cases(tiny=False)[: accelerator_programs.NUM_PREDICTED])
"""Names of the models of `benchmarks.accelerator`, which do not fit a machine without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A train step with the shapes of its arguments."""

    name: str
    step: Callable[..., Any]
    arguments: tuple[Any, ...]

    @classmethod
    def of_model(
        cls, name: str, model: Any, batch: Mapping[str, jax.ShapeDtypeStruct], optimizer: Transformation | None = None
    ) -> Case:
        """Return the train step of a model, by default with Adam."""
        optimizer = optimizer or Adam()
        state = jax.eval_shape(lambda: init_state(model.init(jax.random.key(0)), optimizer))
        return cls(name=name, step=make_train_step(model.loss_fn, optimizer), arguments=(state, dict(batch)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One stage of a plan: bytes per device, predicted and according to XLA."""

    model: str
    plan: str
    stage: int
    state_bytes: float
    accumulator_bytes: float
    saved_bytes: float
    temporary_bytes: float
    predicted_bytes: float
    xla_resident_bytes: float
    xla_output_bytes: float
    xla_temporary_bytes: float
    xla_bytes: float

    @property
    def ratio(self) -> float:
        """Predicted over allocated bytes."""
        return self.predicted_bytes / self.xla_bytes


def cases(names: Sequence[str], policies: Sequence[str], *, large: bool = False) -> list[Case]:
    """Return the models of these names; the own ones in float32, in which the CPU backend computes in any case.

    large: sizes for an accelerator: small arrays lie in other memory there, and are padded.
    """
    found: list[Case] = []
    # XLA:GPU makes one array of equal zeros, of those that weights are multiplied with and of those that loops fill.
    optimizer = Adam(weight_decay=0.01) if large else Adam()
    if "transformer" in names:
        base = Transformer(vocab_size=1024, num_layers=8, hidden=256, num_heads=8, inner=1024, seq_len=256)
        if large:
            base = replace(base, vocab_size=8192, hidden=1024, inner=4096, seq_len=512)
        for policy in policies:
            computation = Computation(
                recompute=policy,  # pyright: ignore[reportArgumentType]
                num_segments=2,
                dtype=jnp.float32,
            )
            model = replace(base, computation=computation)
            batch = model.batch_shapes(64 if large else 32)
            found.append(Case.of_model(f"transformer, {policy}", model, batch, optimizer))
    if "MLP" in names:
        scale = 8 if large else 1
        batch = {name: jax.ShapeDtypeStruct((1024 * scale, 256 * scale), jnp.float32) for name in _MLP_BATCH}
        model = MLP(in_features=256 * scale, hidden=512 * scale, out_features=256 * scale, num_layers=8)
        found.append(Case.of_model("MLP", model, batch, optimizer))
    if "CNN" in names:
        size = 4096 if large else 64
        images = jax.ShapeDtypeStruct((size, 32, 32, 3), jnp.float32)
        labels = jax.ShapeDtypeStruct((size,), jnp.int32)
        model = CNN(channels=128 if large else 16)
        found.append(Case.of_model("CNN", model, {"images": images, "labels": labels}, optimizer))
    for each in accelerator_programs.cases(tiny=False):
        if each.name in names:
            found.append(Case.of_model(each.name, each.model, each.model.batch_shapes(each.batch_size), optimizer))
    others = [find_target(name) for name in names if name in ZOO]
    return [*found, *(Case(name=each.name, step=each.step, arguments=each.arguments) for each in others)]


class Judge:
    """Virtual devices of this process that share a processor, with the rates of a DGX-1."""

    num_devices = 8

    def cluster(self, num_devices: int) -> Cluster:
        """Return the cluster that plans are made for."""
        return replace(al.cluster("dgx-1"), devices_per_host=num_devices, shared_processor=True)

    def allocated(self, lowered: al.LoweredFunction) -> tuple[Allocated, ...]:
        """Compile a step, and return what XLA allocates for each stage; nothing is run."""
        return lowered.compile(devices=jax.devices()[: lowered.planned.last_plan.cluster.num_devices]).allocated()


class TpuJudge(Judge):
    """TPUs of a topology such as `v5e:2x4`, which need not be there."""

    def __init__(self, topology: str) -> None:
        """Raise `ExecutionError` without libtpu."""
        self.kind, self.devices = topology.partition(":")[0], tpu_devices(topology)
        self.num_devices = len(self.devices)

    def cluster(self, num_devices: int) -> Cluster:
        # What a host has of them changes no memory.
        return replace(al.cluster(f"tpu-{self.kind}"), num_hosts=1, devices_per_host=num_devices)

    def allocated(self, lowered: al.LoweredFunction) -> tuple[Allocated, ...]:
        return allocated_on(lowered, self.devices[: lowered.planned.last_plan.cluster.num_devices], "tpu")


class GpuJudge(Judge):
    """GPUs of a kind, which need not be there, whose allocators have as much memory as a plan is predicted to need."""

    def __init__(self, kind: str) -> None:
        """Raise `ExecutionError` without JAX's plugin for CUDA."""
        self.kind = kind
        gpu_devices(kind, 1, 2.0**30)

    def cluster(self, num_devices: int) -> Cluster:
        return gpu_cluster(self.kind, num_devices)

    def allocated(self, lowered: al.LoweredFunction) -> tuple[Allocated, ...]:
        plan = lowered.planned.last_plan
        devices = gpu_devices(self.kind, plan.cluster.num_devices, max(plan.prediction.peak_bytes))
        return allocated_on(lowered, devices, "cuda")


def lowered_plan(case: Case, planner: Planner, num_microbatches: int, cluster: Cluster) -> al.LoweredFunction:
    """Plan and lower the train step of a case."""
    function = al.parallelize(
        case.step, donate_argnums=0, cluster=cluster, planner=planner, num_microbatches=num_microbatches, cache=False
    )
    return function.trace(*case.arguments).plan().lower()


def rows_of(case: Case, plan_name: str, plan: al.Plan, measured: Sequence[Allocated]) -> list[Row]:
    """Return predicted and allocated memory of the stages of a plan."""
    rows: list[Row] = []
    for number, stage in enumerate(plan.stages):
        held = plan.schedule.in_flight(number, len(plan.stages), plan.num_microbatches)
        rows.append(
            Row(
                model=case.name,
                plan=plan_name,
                stage=number,
                state_bytes=stage.cost.state_bytes,
                accumulator_bytes=stage.cost.accumulator_bytes,
                saved_bytes=held * stage.cost.activation_bytes,
                temporary_bytes=stage.cost.temporary_bytes,
                predicted_bytes=plan.prediction.peak_bytes[number],
                xla_resident_bytes=measured[number].resident_bytes,
                xla_output_bytes=measured[number].output_bytes,
                xla_temporary_bytes=measured[number].temporary_bytes,
                xla_bytes=measured[number].peak_bytes,
            )
        )
    return rows


def run(
    some: Sequence[Case],
    plans: Mapping[str, tuple[Planner, int]],
    say: Callable[[str], None],
    judge: Judge | None = None,
) -> list[Row]:
    """Return rows for every case under every plan that is possible for it; `judge`: default, those of this process."""
    judge = judge or Judge()
    rows: list[Row] = []
    for case in some:
        for name, (planner, count) in plans.items():
            say(f"{case.name}: {name}")
            try:
                cluster = judge.cluster(1 if name == "one device" else judge.num_devices)
                lowered = lowered_plan(case, planner, count, cluster)
                measured = judge.allocated(lowered)
            except AlpaLiteError as error:
                print(f"{case.name}, {name}: {error}", file=sys.stderr)
                continue
            rows += rows_of(case, name, lowered.planned.last_plan, measured)
    return rows


def mean_and_worst_error(rows: Sequence[Row]) -> tuple[float, float]:
    """Return the mean and the largest of the differences between predicted and allocated bytes, as parts of these."""
    errors = [abs(row.ratio - 1.0) for row in rows]
    return statistics.fmean(errors), max(errors)


def rendered(rows: Sequence[Row]) -> Table:
    """Return the table: the parts of the prediction, those of XLA, and the ratio of the sums."""
    columns = ("state", "sums", "saved", "temporary", "predicted", "resident", "outputs", "temporary", "XLA", "ratio")
    table = Table("model", "plan", *columns)
    for column in table.columns[2:]:
        column.justify = "right"
    for number, row in enumerate(rows):
        last = number + 1 == len(rows) or rows[number + 1].model != row.model
        stages = sum(1 for other in rows if (other.model, other.plan) == (row.model, row.plan))
        predicted = (row.state_bytes, row.accumulator_bytes, row.saved_bytes, row.temporary_bytes, row.predicted_bytes)
        allocated = (row.xla_resident_bytes, row.xla_output_bytes, row.xla_temporary_bytes, row.xla_bytes)
        table.add_row(
            row.model,
            f"{row.plan}, stage {row.stage}" if stages > 1 else row.plan,
            *(show_bytes(size) for size in (*predicted, *allocated)),
            f"{row.ratio:.2f}",
            end_section=last,
        )
    mean, worst = mean_and_worst_error(rows)
    table.add_row("all", "mean and worst error", *[""] * 8, show_percent(mean), show_percent(worst))
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments, plan, compile, and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.memory", description="Is the predicted memory of plans what is allocated?"
    )
    known = (*OWN_MODELS, *LARGE_MODELS, *ZOO)
    parser.add_argument("--model", action="append", choices=known, help="default: transformer, MLP, CNN")
    parser.add_argument("--policy", action="append", choices=POLICIES, help="of the transformer (default: all)")
    parser.add_argument("--plan", action="append", choices=list(PLANS), help="default: all")
    parser.add_argument("--published", action="store_true", help="compare with peaks that others measured")
    parser.add_argument("--tpu", metavar="TOPOLOGY", help="compile larger models for TPUs, such as v5e:2x4, by libtpu")
    parser.add_argument("--gpu", choices=list(GPUS), help="compile larger models for eight GPUs, by JAX's CUDA plugin")
    parser.add_argument("--devices", type=int, default=8, help="virtual CPU devices; 0: the devices at hand")
    parser.add_argument("--out", type=Path, metavar="JSON", help="keep the figures")
    given = parser.parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 200)
    if given.published:
        with shown_progress("measure") as say:
            found = peaks.run_all(say)
        console.print(peaks.rendered(found))
        _keep(given.out, [{**asdict(row), "ratio": row.ratio} for row in found])
        return 0
    if given.devices and given.tpu is None:
        rest = list(sys.argv[1:] if argv is None else argv)
        environment = {**os.environ, **virtual_cpu_environment(given.devices)}
        if given.gpu is not None:
            environment["XLA_FLAGS"] += f" {GPU_FLAGS}"
        command = [sys.executable, "-m", "benchmarks.memory", *rest, "--devices", "0"]
        return subprocess.run(command, env=environment, check=False).returncode
    plans = {name: plan for name, plan in PLANS.items() if given.plan is None or name in given.plan}
    large = given.tpu is not None or given.gpu is not None
    some = cases(given.model or OWN_MODELS, given.policy or POLICIES, large=large)
    try:
        judge = TpuJudge(given.tpu) if given.tpu else GpuJudge(given.gpu) if given.gpu else Judge()
    except AlpaLiteError as error:
        print(error, file=sys.stderr)
        return 1
    with shown_progress("measure") as say:
        rows = run(some, plans, say, judge)
    if not rows:
        print("None of these plans could be compiled.", file=sys.stderr)
        return 1
    console.print(rendered(rows))
    _keep(given.out, [{**asdict(row), "ratio": row.ratio} for row in rows])
    return 0


def _keep(path: Path | None, rows: Sequence[Mapping[str, Any]]) -> None:
    if path is not None:
        path.write_text(json.dumps({"rows": list(rows)}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
