"""Lay measured steps over predicted ones: `python -m benchmarks.timelines [--out FILE]`.

The demo's model and two more are planned by hand for a pipeline with data and tensor parallelism, and automatically. A
step of each runs under JAX's profiler on this machine, and stands beside the prediction: both timelines, and the ops
with the largest differences (`plan.explain_profile`).

By default a process with eight virtual CPU devices is started; `--devices 0` uses the devices of this process. They are
calibrated first, unless `--cluster FILE` is given.
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import jax
from rich.console import Console

import alpa_lite as al
from alpa_lite.api.doctor import virtual_environment
from alpa_lite.cli.bench.row import here
from alpa_lite.cli.models.train import init_state, make_optimizer, make_train_step
from alpa_lite.inspection.page.drawings import overlaid_svg
from alpa_lite.inspection.text.progress_bar import shown_progress
from alpa_lite.inspection.text.timeline import Bar
from alpa_lite.inspection.why.profile_differences import MAX_DIFFERENCES, ProfileDifferences, profile_differences
from alpa_lite.plan.instructions import TaskTime
from alpa_lite.planners import Auto, Hybrid, Planner
from alpa_lite.runtime.calibrate.calibrate import calibrate
from benchmarks.ranking import Case, cases
from cost_models.cluster import Cluster

KEPT = Path(__file__).parent / "results" / "timelines.json"

MODELS = ("GPT", "Llama", "CNN")
"""The demo's model, and two more."""

PLANS: Mapping[str, tuple[Planner, int | Literal["auto"]]] = {
    "pp2 × dp2 × tp2": (Hybrid(pipeline=2, data=2, tensor=2), 4),
    "auto": (Auto(), "auto"),
}
"""The planners, and the number of micro-batches of each."""


def run_case(
    case: Case, cluster: Cluster, planner: Planner, num_microbatches: int | Literal["auto"]
) -> ProfileDifferences:
    """Plan, compile and profile one step, and compare."""
    optimizer = make_optimizer()
    step = make_train_step(case.model.loss_fn, optimizer)
    state = jax.eval_shape(lambda: init_state(case.model.init(jax.random.key(0)), optimizer))
    function = al.parallelize(
        step, donate_argnums=0, cluster=cluster, planner=planner, num_microbatches=num_microbatches
    )
    compiled = function.trace(state, case.batch).plan().lower().compile()
    return profile_differences(compiled.plan, compiled.profile())


def row_of(model: str, plan: str, found: ProfileDifferences) -> dict[str, Any]:
    """Return the figures to keep: the largest differences, the sum of the others, and both timelines."""
    rest = found.rows[MAX_DIFFERENCES:]
    return {
        "model": model,
        "plan": plan,
        "about": found.plan,
        "predicted_seconds": found.predicted_seconds,
        "measured_seconds": found.measured_seconds,
        "differences": [{**asdict(row), "seconds": row.seconds} for row in found.rows[:MAX_DIFFERENCES]],
        "other_seconds": sum(row.seconds for row in rest),
        "predicted": spans_of(found.predicted),
        "measured": spans_of(found.measured),
    }


def spans_of(times: Iterable[TaskTime]) -> list[list[Any]]:
    """Return stage, name, micro-batch, start and end of the instructions that take time."""
    return [
        [time.stage, time.name, time.microbatch, round(time.start_seconds, 6), round(time.end_seconds, 6)]
        for time in times
        if time.end_seconds > time.start_seconds
    ]


@functools.cache
def kept() -> dict[str, Any]:
    """Return what was kept of the last run."""
    return json.loads(KEPT.read_text(encoding="utf-8"))


def timeline_svg(model: str) -> str:
    """Return both timelines of a model's pipeline as they were kept."""
    first = next(iter(PLANS))
    row = next(row for row in kept()["rows"] if (row["model"], row["plan"]) == (model, first))
    return overlaid_svg(*([*map(_bar, row[side])] for side in ("predicted", "measured")))


def _bar(span: Sequence[Any]) -> Bar:
    stage, name, microbatch, start, end = span
    return Bar(stage=stage, row=stage, kind=name, microbatch=microbatch, start_seconds=start, end_seconds=end)


def differences_table(model: str) -> str:
    """Return the largest differences of a model's pipeline as rows of Markdown, as the page shows them."""
    first = next(iter(PLANS))
    row = next(row for row in kept()["rows"] if (row["model"], row["plan"]) == (model, first))
    return "\n".join(
        f"| {model} | {_words(each)} | {1e3 * each['predicted_seconds']:.1f} | {1e3 * each['measured_seconds']:.1f} | "
        f"{1e3 * each['seconds']:+.1f} |"
        for each in row["differences"]
    )


def _words(difference: Mapping[str, Any]) -> str:
    line = f"`{difference['source'].split(' ')[0]}`" if difference["source"] else ""
    return ", ".join(filter(None, (difference["what"], difference["phase"], line)))


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments, plan, run, and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.timelines", description="Which ops take longer than predicted?"
    )
    parser.add_argument("--cluster", type=Path, metavar="FILE", help="from alpa-lite calibrate --out")
    parser.add_argument("--model", action="append", choices=MODELS, help="default: all")
    parser.add_argument("--plan", action="append", choices=list(PLANS), help="default: all")
    parser.add_argument("--devices", type=int, default=8, help="virtual CPU devices; 0: the devices at hand")
    parser.add_argument("--out", type=Path, metavar="JSON", help="keep the figures")
    given = parser.parse_args(argv)
    if given.devices:
        rest = list(sys.argv[1:] if argv is None else argv)
        command = [sys.executable, "-m", "benchmarks.timelines", *rest, "--devices", "0"]
        return subprocess.run(command, env=virtual_environment(given.devices), check=False).returncode
    console = Console(width=None if sys.stdout.isatty() else 140)
    cluster = calibrate().cluster if given.cluster is None else al.local_cluster(given.cluster)
    rows: list[dict[str, Any]] = []
    with shown_progress("measure") as say:
        rows = [*_rows(cluster, given.model or MODELS, given.plan or [*PLANS], say, console)]
    if given.out is not None:
        environment = asdict(here(jax.devices()[0].device_kind))
        data = {"environment": environment, "cluster": cluster.to_json(), "rows": rows}
        given.out.write_text(json.dumps(data, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


def _rows(
    cluster: Cluster, models: Sequence[str], plans: Sequence[str], say: Callable[[str], None], console: Console
) -> Iterable[dict[str, Any]]:
    """Yield the figures of each model under each plan, and print its largest differences."""
    for case in (case for case in cases() if case.name in models):
        for name in plans:
            say(f"{case.name}: {name}")
            found = run_case(case, cluster, *PLANS[name])
            console.print(f"{case.name}: {found}", markup=False, highlight=False)
            yield row_of(case.name, name, found)


if __name__ == "__main__":
    raise SystemExit(main())
