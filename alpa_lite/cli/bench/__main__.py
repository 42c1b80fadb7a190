"""`alpa-lite bench`: compare planners; see `alpa_lite.cli.bench` and docs/benchmark.md."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
from rich.console import Console

import alpa_lite as al
from alpa_lite.api.doctor import virtual_environment
from alpa_lite.cli.bench.entries import PlannedEntry, Say, contest_of, measured_rows, planned_entries
from alpa_lite.cli.bench.report import ChartError, check_matplotlib, draw, environment_lines, groups, page, tables
from alpa_lite.cli.bench.request import (
    BenchTarget,
    add_options,
    check_planners,
    find_target,
    named_contenders,
    named_models,
)
from alpa_lite.cli.bench.row import Environment, Row, here, json_line, verdict
from alpa_lite.cli.command import Screen, SuggestingParser, ended, json_alone, run_module, writing
from alpa_lite.errors import PlanError
from alpa_lite.inspection.text.progress_bar import default_progress
from alpa_lite.inspection.text.tables import render
from alpa_lite.plan.progress import Progress
from alpa_lite.runtime.calibrate.calibrate import calibrate
from alpa_lite.text import show_seconds
from cost_models.cluster import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The options of a comparison.

    planners    lists of names of planners, or "all"
    counts      numbers of micro-batches, or "auto"
    rounds      steps of each plan to measure; 0 only predicts, None measures for some seconds (`rounds_within`)
    """

    planners: tuple[str, ...] = ("all",)
    counts: tuple[int | str, ...] = ("auto",)
    rounds: int | None = 0


def compare(
    target: BenchTarget, cluster: Cluster, request: Request, progress: Progress, tell: Say = lambda text: None
) -> list[Row]:
    """Return the rows of one model on one cluster.

    `tell` is called with a line of text for each plan that is made, compiled and measured.
    """
    with progress.during("compare", f"tracing {target.name}"):
        contest, contenders = contest_of(target, cluster), named_contenders(request.planners, cluster)
    entries = list[PlannedEntry]()
    progress.begin("compare")
    left = len(contenders) * len(request.counts)
    plans = planned_entries(contest, contenders, request.counts, progress)
    for number in range(left):
        # Outside of the phase nothing is drawn where a line is told.
        with progress.during("compare"):
            progress.expect("compare", left - number)
            entries.append(next(plans))
            progress.did()
        tell(planned_line(entries[-1].row))
    if request.rounds == 0:
        return [entry.row for entry in entries]
    return measured_rows(target, entries, request.rounds, progress, tell)


def planned_line(row: Row) -> str:
    """Return a line of text for a plan that was just made, or for a planner without one."""
    told = f"{row.model}, {row.planner}: "
    if row.predicted_seconds is None:
        return f"{told}no plan: {row.reason.partition('. ')[0].rstrip('.')}."
    took = "" if row.planning_seconds is None else f", planned in {show_seconds(row.planning_seconds)}"
    return f"{told}{show_seconds(row.predicted_seconds)} per step predicted{took}"


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    found = SuggestingParser(prog="alpa-lite bench", description="Planners against each other on a model.")
    add_options(found)
    found.add_argument("--json", action="store_true", help="print rows as lines of JSON")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments, compare, print, and write the results.

    The exit code is 1 after an error, whose message is printed; if a model has no plan at all; and if the search is
    slower than --fail-above allows.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    given = parser().parse_args(arguments)
    return ended("bench", json_alone(given)(lambda: _run(arguments, given)))


def _run(arguments: Sequence[str], given: argparse.Namespace) -> int:
    if given.out is not None:
        with writing(given.out):
            given.out.mkdir(parents=True, exist_ok=True)
    models = named_models(given.model)
    targets = [find_target(name, given.batch) for name in models]
    # All names are resolved first: a wrong one should not end a comparison that has run for an hour.
    described, counts = _described(given), _counts(given.num_microbatches)
    planners = tuple(given.planners or ("all",))
    check_planners(planners)
    # A model that was published with a cluster is priced there, unless the user asks for this machine.
    local = [described is None and bool(given.measure or given.cluster or target.cluster is None) for target in targets]
    # Only now is it known whether devices are needed; plans for described clusters need none.
    if any(local) and given.devices:
        return _with_devices(arguments, given.devices)
    console = Screen(stderr=given.json, width=None if sys.stdout.isatty() else 120)
    rows: list[Row] = []
    progress = default_progress()

    def tell(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    with progress.during("measure"):
        machine = _this_machine(given.calibrate, progress) if any(local) else None
    for target, here_too in zip(targets, local, strict=True):
        # What is planned for another cluster cannot be measured here.
        rounds = given.steps if here_too and not given.simulate else 0
        request = Request(planners=planners, counts=counts, rounds=rounds)
        cluster = described or (machine if here_too else target.cluster)
        if cluster is not None:
            rows += compare(target, cluster, request, progress, tell)
    return _shown(given, rows, console, here(jax.devices()[0].device_kind if any(local) else ""))


def _with_devices(arguments: Sequence[str], num_devices: int) -> int:
    """Run the same command in a process with virtual CPU devices, which must be configured before JAX starts."""
    return run_module("alpa_lite.cli.bench", [*arguments, "--devices", "0"], virtual_environment(num_devices))


def _this_machine(calibrate_seconds: float, say: Say) -> Cluster:
    say("measuring this machine's devices")
    return calibrate(limit_seconds=calibrate_seconds).cluster if calibrate_seconds else al.local_cluster()


def _described(given: argparse.Namespace) -> Cluster | None:
    """Return the named cluster; None for this machine, or for the cluster that a model was published with."""
    if given.cluster in (None, "local"):
        return None
    if given.measure:
        raise PlanError(f"--measure runs plans on this machine, not on {given.cluster}. Leave out --cluster.")
    return al.cluster(given.cluster)


def _counts(text: str) -> tuple[int | str, ...]:
    parts = text.split(",")
    if not all(part == "auto" or (part.isdecimal() and int(part)) for part in parts):
        raise PlanError(f'--num-microbatches {text!r} is no list of numbers: write for example auto,8 or "auto".')
    return tuple(part if part == "auto" else int(part) for part in parts)


def _shown(given: argparse.Namespace, rows: Sequence[Row], console: Console, environment: Environment) -> int:
    """Print and write the rows, and return the exit code."""
    if given.json:
        for row in rows:
            print(json_line(row, environment), file=given.stdout, flush=True)
    console.print(render(environment_lines(environment), tables(rows)), markup=False, highlight=False, soft_wrap=True)
    if given.out is not None:
        for path in keep(given.out, rows, environment, console):
            console.print(f"Written to {path}.", markup=False, highlight=False, soft_wrap=True)
    # The verdicts come last, where a reader of a long output looks.
    verdicts = [verdict(some) for some in groups(rows)]
    for found in verdicts:
        console.print(str(found), markup=False, highlight=False, soft_wrap=True)
    failed = [found for found in verdicts if found.auto is None and found.manual is None]
    # For continuous integration: a regression of the search then fails the job.
    limit = given.fail_above
    slower = [v for v in verdicts if limit is not None and v.ratio is not None and v.ratio.value > limit]
    for found in slower:
        print(f"{found} That is more than {limit}.", file=sys.stderr)
    return 1 if failed or slower else 0


def keep(folder: Path, rows: Sequence[Row], environment: Environment, console: Console) -> list[Path]:
    """Write rows, page and charts into a folder, and return the files. Without matplotlib there are no charts."""
    folder.mkdir(parents=True, exist_ok=True)
    lines, html = folder / "rows.jsonl", folder / "report.html"
    lines.write_text("".join(json_line(row, environment) + "\n" for row in rows), encoding="utf-8")
    html.write_text(page(rows, environment), encoding="utf-8")
    # matplotlib is an optional extra; the page has its own charts.
    charts = list[Path]()
    try:
        check_matplotlib()
    except ChartError as error:
        console.print(str(error), markup=False)
        return [lines, html]
    for some in groups(rows):
        charts.append(folder / f"{file_name(some[0].model)}.png")
        draw(some, charts[-1])
    return [lines, html, *charts]


def file_name(model: str) -> str:
    """Return the letters, digits, dots and dashes of a model's name."""
    return "".join(c if c.isalnum() or c in ".-" else "-" for c in model)


if __name__ == "__main__":
    raise SystemExit(main())
