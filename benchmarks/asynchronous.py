"""Train a small GPT by synchronous and asynchronous pipelines: `python -m benchmarks.asynchronous [--out FILE]`.

Four stages on four virtual CPU devices, the text of `alpa-lite demo`, equally many samples per update, the same samples
in the same order. The loss is that of the mini-batch with the weights that its micro-batches ran with.

    1F1B            a call per update, of `MICROBATCHES` micro-batches
    PipeDream       a call per `UPDATES_PER_CALL` updates, each of one micro-batch that is as large as a mini-batch
    PipeDream-2BW   a call per `UPDATES_PER_CALL` updates, each of `MICROBATCHES` micro-batches

Virtual devices take turns on one processor, so that the time of a call says nothing about a pipeline. Seconds are those
of devices that work at the same time: every task is run and timed by itself, and the order of the schedule is simulated
with these seconds, updates included. Utilisation is the share of that time in which a device works.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

import alpa_lite as al
from alpa_lite.api.doctor import virtual_cpu_environment
from alpa_lite.cli.models.batches import load_text, text_batches
from alpa_lite.cli.models.decoders import GPT
from alpa_lite.cli.models.train import init_state, make_optimizer, make_train_step
from alpa_lite.plan.instructions import TaskTime
from alpa_lite.schedule import OneFOneB, PipeDream, PipeDream2BW, Schedule, simulate
from benchmarks.charts import Series, lines_svg

RESULTS = Path(__file__).parent / "results" / "asynchronous.json"
STAGES, MICROBATCHES, UPDATES_PER_CALL = 4, 4, 16

# The output projection is a matrix of its own: stages of an asynchronous pipeline share no weights.
_MODEL = GPT(num_layers=4, hidden=64, num_heads=4, seq_len=64, tied=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of a run: the model, samples and number of updates, and updates over which losses are averaged."""

    model: GPT = _MODEL
    batch_size: int = 16
    num_updates: int = 384
    learning_rate: float = 3e-3
    window: int = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A training run by one schedule.

    Attributes:
        schedule: its name, with its semantics in brackets.
        losses: the loss of each update; means over a call where a call returns one loss for several updates.
        update_seconds: seconds per update on devices that work at the same time.
        utilisation: the share of this time in which a device works.
    """

    schedule: str
    losses: tuple[float, ...]
    update_seconds: float
    utilisation: float


def train(schedule: Schedule, sizes: Sizes) -> Run:
    """Train by a schedule from the same state, on the same samples."""
    often = schedule.microbatches_per_update(STAGES)
    per_call = UPDATES_PER_CALL if often else 1
    microbatches = per_call * (often or MICROBATCHES)
    optimizer = make_optimizer(sizes.learning_rate)
    step = al.parallelize(
        make_train_step(sizes.model.loss_fn, optimizer),
        planner=al.planners.Pipeline(pipeline=STAGES, schedule=schedule),
        num_microbatches=microbatches,
        donate_argnums=0,
    )
    state = init_state(jax.jit(sizes.model.init)(jax.random.key(0)), optimizer)
    batches = list(text_batches(sizes.num_updates, sizes.batch_size, sizes.model.seq_len, text=load_text()))
    losses = list[float]()
    for first in range(0, sizes.num_updates, per_call):
        group = batches[first : first + per_call]
        state, metrics = step(state, {name: np.concatenate([b[name] for b in group]) for name in group[0]})
        losses += [float(metrics["loss"])] * per_call
    compiled = step.compiled(
        state, {name: np.concatenate([b[name] for b in batches[:per_call]]) for name in batches[0]}
    )
    seconds, utilisation = _overlapped(compiled.measure(awaited=True), schedule, microbatches, per_call)
    return Run(
        schedule=f"{schedule.name} ({compiled.plan.semantics})",
        losses=tuple(losses),
        update_seconds=seconds,
        utilisation=utilisation,
    )


def _overlapped(times: Sequence[TaskTime], schedule: Schedule, microbatches: int, updates: int) -> tuple[float, float]:
    """Return seconds per update and the utilisation, if stages work at the same time: from each task's own seconds."""
    own: dict[str, list[float]] = {}
    for time in times:
        own.setdefault(time.name, []).append(time.end_seconds - time.start_seconds)
    typical = {name: statistics.median(found) for name, found in own.items()}
    stages = range(STAGES)
    forward = [typical.get(f"stage {s} forward", 0.0) for s in stages]
    # The last stage runs both passes in one task.
    backward = [sum(typical.get(f"stage {s} {kind}", 0.0) for kind in ("backward", "forward+backward")) for s in stages]
    update = [typical[f"stage {s} update"] for s in stages]
    often = schedule.microbatches_per_update(STAGES)
    if often:
        # A stage updates right after the last backward pass of a group, on average after each.
        backward = [b + u / often for b, u in zip(backward, update, strict=True)]
    makespan = simulate(schedule.tasks(STAGES, microbatches), forward, backward).makespan_seconds
    makespan += 0.0 if often else max(update)
    busy = sum(microbatches * (f + b) for f, b in zip(forward, backward, strict=True)) + (0.0 if often else sum(update))
    return makespan / updates, busy / (STAGES * makespan)


def runs(sizes: Sizes) -> list[Run]:
    """Return the runs of all schedules."""
    return [train(schedule, sizes) for schedule in (OneFOneB(), PipeDream(), PipeDream2BW(accumulated=MICROBATCHES))]


def kept() -> list[Run]:
    """Return the runs in `benchmarks/results`."""
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))["runs"]
    return [Run(**{**row, "losses": tuple(row["losses"])}) for row in rows]


def smoothed(run: Run, update: int, window: int = Sizes().window) -> float:
    """Return the mean loss of the window of updates that ends at `update` (from 1)."""
    return statistics.fmean(run.losses[max(0, update - window) : update])


def updates_svg(found: Sequence[Run] | None = None) -> str:
    """Return the loss against the number of updates."""
    found = kept() if found is None else found
    places = [16 * 2**i for i in range(8) if 16 * 2**i <= len(found[0].losses)]
    places += [len(found[0].losses)] if places[-1] < len(found[0].losses) else []
    series = [Series(name=run.schedule, values=tuple(smoothed(run, n) for n in places)) for run in found]
    return lines_svg(places, series, axis="updates", unit="loss")


def seconds_svg(found: Sequence[Run] | None = None) -> str:
    """Return the loss against the time on devices that work at the same time, in updates of synchronous 1F1B."""
    found = kept() if found is None else found
    unit = found[0].update_seconds
    places = [16.0 * 2**i for i in range(8) if 16 * 2**i <= len(found[0].losses)]

    def at(run: Run, place: float) -> float | None:
        update = int(place * unit / run.update_seconds)
        return smoothed(run, update) if Sizes().window <= update <= len(run.losses) else None

    series = [Series(name=run.schedule, values=tuple(at(run, place) for place in places)) for run in found]
    return lines_svg(places, series, axis="time, in updates of synchronous 1F1B", unit="loss")


def rendered(found: Sequence[Run]) -> Table:
    """Return the table of losses, time per update and utilisation."""
    table = Table(title="One GPT by synchronous and asynchronous pipelines of four stages")
    total = len(found[0].losses)
    for column in (
        "schedule",
        *(f"loss at {n}" for n in (total // 8, total // 2, total)),
        "time per update",
        "utilisation",
    ):
        table.add_column(column, justify="left" if column == "schedule" else "right")
    for run in found:
        losses = (f"{smoothed(run, n):.3f}" for n in (total // 8, total // 2, total))
        table.add_row(
            run.schedule, *losses, f"{run.update_seconds / found[0].update_seconds:.2f}×", f"{run.utilisation:.0%}"
        )
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Train, and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.asynchronous", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--updates", type=int, default=Sizes().num_updates, help="a multiple of 16")
    parser.add_argument("--devices", type=int, default=STAGES, help="virtual CPU devices; 0: the devices at hand")
    parser.add_argument("--out", type=Path, metavar="JSON", help="keep the figures")
    given = parser.parse_args(argv)
    if given.devices:
        rest = list(sys.argv[1:] if argv is None else argv)
        environment = {**os.environ, **virtual_cpu_environment(given.devices)}
        command = [sys.executable, "-m", "benchmarks.asynchronous", *rest, "--devices", "0"]
        return subprocess.run(command, env=environment, check=False).returncode
    found = runs(Sizes(num_updates=given.updates))
    Console(width=None if sys.stdout.isatty() else 160).print(rendered(found))
    if given.out is not None:
        data = {"runs": [{**asdict(run), "losses": [round(loss, 4) for loss in run.losses]} for run in found]}
        given.out.write_text(json.dumps(data) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
