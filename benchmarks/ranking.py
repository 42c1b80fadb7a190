"""Compare the cost model's ranking of plans with this machine's: `python -m benchmarks.ranking [--out FILE]`.

Four models are planned by each planner for this machine's devices, and the plans run in turn:

predicted / measured      seconds of a step, median over the rounds
Spearman rank correlation of predicted and measured seconds, for each model and over all plans

By default a process with eight virtual CPU devices is started; `--devices 0` uses the devices of this process. They are
calibrated first, unless `--cluster FILE` is given.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.stats import spearmanr

import alpa_lite as al
from alpa_lite.api.doctor import virtual_environment
from alpa_lite.cli.demo import DemoConfig
from alpa_lite.cli.models.decoders import Llama
from alpa_lite.cli.models.sequential_networks import CNN, MLP
from alpa_lite.cli.models.train import init_state, make_optimizer, make_train_step
from alpa_lite.inspection.text.progress_bar import shown_progress
from alpa_lite.planners import FSDP, Auto, DataParallel, Hybrid, Megatron, Pipeline, Planner
from alpa_lite.runtime.calibrate.calibrate import calibrate
from cost_models.cluster import Cluster

PLANNERS: tuple[Planner, ...] = (
    Auto(),
    DataParallel(),
    FSDP(),
    Megatron(),
    Pipeline(pipeline=2),
    Pipeline(pipeline=4),
    Hybrid(pipeline=2, data=2, tensor=2),
)
"""The planners of the demo, and two more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model with its loss and one batch."""

    name: str
    model: Any
    batch: Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The predicted and measured times of one plan of one model, in seconds per step."""

    model: str
    plan: str
    predicted_seconds: float
    measured_seconds: float
    spread: float

    @property
    def ratio(self) -> float:
        """Predicted over measured seconds."""
        return self.predicted_seconds / self.measured_seconds


def cases() -> tuple[Case, ...]:
    """Return the demo's transformer, a Llama, a CNN and an MLP; each step takes 0.1 to 1 s on two cores."""
    demo = DemoConfig()
    gpt = demo.model
    llama = Llama(
        vocab_size=512,
        num_layers=4,
        num_heads=8,
        num_kv_heads=4,
        hidden=256,
        inner=768,
        seq_len=32,
        remat=False,
        dtype=jnp.float32,
    )
    cnn, mlp = CNN(channels=32, num_blocks=3), MLP(in_features=256, hidden=512, out_features=64, num_layers=8)
    draw = np.random.default_rng(0)

    def tokens(vocab: int, size: int, length: int) -> dict[str, np.ndarray]:
        drawn = draw.integers(0, vocab, (size, length + 1)).astype(np.int32)
        return {"tokens": drawn[:, :-1], "targets": drawn[:, 1:]}

    images = draw.normal(size=(64, 32, 32, 3)).astype(np.float32)
    rows = {"inputs": (256, 256), "targets": (256, 64)}
    return (
        Case(name="GPT", model=gpt, batch=tokens(256, demo.batch_size, gpt.seq_len)),
        Case(name="Llama", model=llama, batch=tokens(512, 32, 32)),
        Case(name="CNN", model=cnn, batch={"images": images, "labels": draw.integers(0, 10, 64).astype(np.int32)}),
        Case(
            name="MLP",
            model=mlp,
            batch={name: draw.normal(size=shape).astype(np.float32) for name, shape in rows.items()},
        ),
    )


def run_case(case: Case, cluster: Cluster, rounds: int, say: Callable[[str], None]) -> list[Row]:
    """Plan and compile, then run one step of each plan in turn."""
    optimizer = make_optimizer()
    train_step = make_train_step(case.model.loss_fn, optimizer)
    state = jax.device_get(init_state(jax.jit(case.model.init)(jax.random.key(0)), optimizer))
    compiled: dict[str, al.CompiledFunction] = {}
    for planner in PLANNERS:
        say(f"{case.name}: {planner.name}")
        function = al.parallelize(train_step, donate_argnums=0, cluster=cluster, planner=planner)
        try:
            found = function.compiled(state, case.batch)
        except al.AlpaLiteError as error:
            print(f"{case.name}, {planner.name}: {error}", file=sys.stderr)
            continue
        if all(found.plan.stages != other.plan.stages for other in compiled.values()):
            compiled[f"auto: {found.plan.name}" if isinstance(planner, Auto) else planner.name] = found
    times = _in_turn(compiled, case, state, rounds, say)
    rows: list[Row] = []
    for name, samples in times.items():
        median = statistics.median(samples)
        rows.append(
            Row(
                model=case.name,
                plan=name,
                predicted_seconds=compiled[name].plan.prediction.step_seconds,
                measured_seconds=median,
                spread=statistics.median(abs(s - median) for s in samples) / median,
            )
        )
    return rows


def _in_turn(
    compiled: Mapping[str, al.CompiledFunction], case: Case, state: Any, rounds: int, say: Callable[[str], None]
) -> dict[str, list[float]]:
    """Return the seconds of every plan in every round; the first is a warm-up, every other one runs reversed."""
    states = {name: function.place(state, case.batch)[0] for name, function in compiled.items()}
    times: dict[str, list[float]] = defaultdict(list)
    for number in range(rounds + 1):
        say(f"{case.name}: round {number} of {rounds}")
        for name in list(compiled)[:: 1 if number % 2 else -1]:
            start = time.perf_counter()
            states[name], metrics = compiled[name](states[name], case.batch)
            jax.block_until_ready((states[name], metrics))
            times[name].append(time.perf_counter() - start)
    return {name: times[name][1:] for name in compiled}


def correlations(rows: Sequence[Row]) -> dict[str, float]:
    """Return the Spearman rank correlation of predicted and measured seconds by model, and of "all" plans."""
    by_model: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_model[row.model].append(row)
    return {name: _spearman(some) for name, some in {**by_model, "all": list(rows)}.items()}


def _spearman(rows: Sequence[Row]) -> float:
    correlation: Any = spearmanr([row.predicted_seconds for row in rows], [row.measured_seconds for row in rows])
    return float(correlation.statistic)


def rendered(rows: Sequence[Row]) -> Table:
    """Return the table, with the rank correlation of a model after its last plan."""
    found = correlations(rows)
    table = Table("model", "plan", "predicted ms", "measured ms", "±", "predicted / measured", "Spearman")
    for column in table.columns[2:]:
        column.justify = "right"
    ordered = sorted(rows, key=lambda row: ([*found].index(row.model), row.measured_seconds))
    for number, row in enumerate(ordered):
        last = number + 1 == len(ordered) or ordered[number + 1].model != row.model
        table.add_row(
            row.model,
            row.plan,
            f"{1e3 * row.predicted_seconds:.1f}",
            f"{1e3 * row.measured_seconds:.1f}",
            f"{row.spread:.0%}",
            f"{row.ratio:.2f}",
            f"{found[row.model]:.2f}" if last else "",
            end_section=last,
        )
    table.add_row("all", "", "", "", "", "", f"{found['all']:.2f}")
    return table


def to_json(rows: Sequence[Row], cluster: Cluster) -> dict[str, Any]:
    """Return plain data for JSON."""
    return {
        "cluster": cluster.to_json(),
        "rows": [{**asdict(row), "ratio": row.ratio} for row in rows],
        "spearman": correlations(rows),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments, plan, run, and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ranking", description="Does the cost model rank plans as this machine does?"
    )
    parser.add_argument("--cluster", type=Path, metavar="FILE", help="from alpa-lite calibrate --out")
    parser.add_argument("--rounds", type=int, default=15, help="steps under each plan (default %(default)s)")
    parser.add_argument("--model", action="append", help="GPT, Llama, CNN, MLP (default: all)")
    parser.add_argument("--devices", type=int, default=8, help="virtual CPU devices; 0: the devices at hand")
    parser.add_argument("--out", type=Path, metavar="JSON", help="keep the figures")
    given = parser.parse_args(argv)
    if given.devices:
        rest = list(sys.argv[1:] if argv is None else argv)
        command = [sys.executable, "-m", "benchmarks.ranking", *rest, "--devices", "0"]
        return subprocess.run(command, env=virtual_environment(given.devices), check=False).returncode
    console = Console(width=None if sys.stdout.isatty() else 120)
    cluster = calibrate().cluster if given.cluster is None else al.local_cluster(given.cluster)
    rows: list[Row] = []
    with shown_progress("measure") as say:
        for case in cases():
            if given.model is None or case.name in given.model:
                rows += run_case(case, cluster, given.rounds, say)
    console.print(rendered(rows))
    if given.out is not None:
        given.out.write_text(json.dumps(to_json(rows, cluster), indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
