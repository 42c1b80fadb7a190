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
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

import alpa_lite as al
from alpa_lite.api.doctor import virtual_cpu_environment
from alpa_lite.cli.models.batches import load_text, text_batches
from alpa_lite.cli.models.decoders import GPT
from alpa_lite.cli.models.train import TrainState, init_state, make_optimizer, make_train_step
from alpa_lite.plan.instructions import TaskTime
from alpa_lite.schedule import OneFOneB, PipeDream, PipeDream2BW, Schedule, simulate
from benchmarks.charts import Series, lines_svg

RESULTS = Path(__file__).parent / "results" / "asynchronous.json"
STAGES, MICROBATCHES, UPDATES_PER_CALL, ROUNDS = 4, 4, 16, 5

# The output projection is a matrix of its own: stages of an asynchronous pipeline share no weights.
_MODEL = GPT(num_layers=4, hidden=64, num_heads=4, seq_len=64, tied=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of a run: the model, samples and number of updates, and updates over which losses are averaged."""

    model: GPT = _MODEL
    batch_size: int = 16
    num_updates: int = 384
    learning_rate: float = 1e-3
    window: int = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A training run by one schedule.

    Attributes:
        schedule: its name, with its semantics in brackets.
        losses: the loss of each update; means over a call where a call returns one loss for several updates.
        relative_seconds: time per update on devices that work at the same time, relative to synchronous 1F1B; the
            median of rounds in which all were timed in turn.
        utilisation: the share of this time in which a device works.
    """

    schedule: str
    losses: tuple[float, ...]
    relative_seconds: float
    utilisation: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Pipeline:
    """The train step by a schedule, with how many updates and micro-batches a call has."""

    schedule: Schedule
    sizes: Sizes

    @property
    def updates(self) -> int:
        """Updates per call."""
        return UPDATES_PER_CALL if self.schedule.microbatches_per_update(STAGES) else 1

    @property
    def microbatches(self) -> int:
        """Micro-batches per call."""
        return self.updates * (self.schedule.microbatches_per_update(STAGES) or MICROBATCHES)

    @cached_property
    def step(self) -> Any:
        """The parallel step."""
        return al.parallelize(
            make_train_step(self.sizes.model.loss_fn, make_optimizer(self.sizes.learning_rate)),
            planner=al.planners.Pipeline(pipeline=STAGES, schedule=self.schedule),
            num_microbatches=self.microbatches,
            donate_argnums=0,
        )

    def state(self) -> TrainState:
        """Return the state before training, the same for all."""
        return init_state(jax.jit(self.sizes.model.init)(jax.random.key(0)), make_optimizer(self.sizes.learning_rate))

    def calls(self) -> Iterator[dict[str, np.ndarray]]:
        """Yield the batches of all calls: mini-batches in the same order for all, several in a call."""
        sizes = self.sizes
        batches = text_batches(sizes.num_updates, sizes.batch_size, sizes.model.seq_len, text=load_text())
        while group := list(islice(batches, self.updates)):
            yield {name: np.concatenate([batch[name] for batch in group]) for name in group[0]}

    def losses(self) -> list[float]:
        """Train, and return the loss of each update."""
        state, losses = self.state(), list[float]()
        for batch in self.calls():
            state, metrics = self.step(state, batch)
            losses += [float(metrics["loss"])] * self.updates
        return losses

    def measured(self) -> tuple[float, float]:
        """Return seconds per update and the utilisation, if stages work at the same time."""
        times = self.step.compiled(self.state(), next(self.calls())).measure(awaited=True)
        return _overlapped(times, self.schedule, self.microbatches, self.updates)


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
    """Return the runs of all schedules, timed in turn."""
    schedules = (OneFOneB(), PipeDream(), PipeDream2BW(accumulated=MICROBATCHES))
    pipelines = [Pipeline(schedule=schedule, sizes=sizes) for schedule in schedules]
    losses = [pipeline.losses() for pipeline in pipelines]
    rounds = [[pipeline.measured() for pipeline in pipelines] for _ in range(ROUNDS)]
    return [
        Run(
            schedule=f"{pipeline.schedule.name} ({pipeline.step.last_plan.semantics})",
            losses=tuple(losses[n]),
            relative_seconds=statistics.median(each[n][0] / each[0][0] for each in rounds),
            utilisation=statistics.median(each[n][1] for each in rounds),
        )
        for n, pipeline in enumerate(pipelines)
    ]


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
    places = [16.0 * 2**i for i in range(8) if 16 * 2**i <= len(found[0].losses)]

    def at(run: Run, place: float) -> float | None:
        update = int(place / run.relative_seconds)
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
        table.add_row(run.schedule, *losses, f"{run.relative_seconds:.2f}×", f"{run.utilisation:.0%}")
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
