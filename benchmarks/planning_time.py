"""Seconds from a train step to its plan: `python -m benchmarks.planning_time --case gpt-39B --json`.

The step is traced with shapes, split into micro-batches, layers and stages, and the search runs as in `al.plan`. With
--no-cache the plan cache is not used. Imports are not counted; the first run after installation includes the
compilation of this project's own kernels by numba. With --json the last line is one object:

seconds       from the function to the plan
gap           of the solver (`plan.solver.gap`)
phases        seconds by name: trace (JAX traces the step), split (the step at numbers of micro-batches), manual
              (the classic plans), layers (clustered and priced on one device), survey, stages (the search for them),
              refine, simulate (schedules), rest; none includes a nested phase

Without --case tables show how the time grows with the layers, with the devices, and with the ops of layers that are
written out, and how long the models of `written_out` and `large_models` take; each row in its own process.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from typing import TypeVar

import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import alpa_lite as al
from alpa_lite.api.plan_cache import Cache, planned
from alpa_lite.cli.models.alpa_cases import CASES, Case, gpt
from alpa_lite.errors import AlpaLiteError
from alpa_lite.inspection.text.progress_bar import default_progress
from alpa_lite.plan.progress import PhaseTimes, Progress
from alpa_lite.planners import Auto, Planner
from benchmarks import large_models, written_out
from benchmarks.large_models import LargeModel
from benchmarks.written_out import WrittenOut
from cost_models.cluster import Cluster

#: One width on one kind of host, so that only what varies varies.
_HOST, _HIDDEN, _HEADS = "dgx-a100", 4096, 32
LAYERS = (12, 24, 48, 96, 192, 384)
WRITTEN_OUT_LAYERS = (1, 2, 4, 8, 16, 32, 48)
DEVICES = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
PHASES = ("trace", "split", "manual", "layers", "survey", "stages", "refine", "simulate", "rest")
_USUAL_LAYERS, _USUAL_DEVICES, _SAMPLES_PER_DEVICE = 48, 64, 16


AnyCase = Case | WrittenOut | LargeModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The planning time of one case, and the quality of its plan."""

    case: str
    cluster: str
    seconds: float
    gap: float
    num_ops: int
    predicted_seconds: float
    predicted_tflops_per_device: float | None
    peak_rss_bytes: int
    num_stages: int
    num_microbatches: int
    phases: Mapping[str, float]
    cached: bool = False

    def to_line(self) -> str:
        """Return one line of JSON."""
        return json.dumps(asdict(self))


def measure(
    case: AnyCase,
    *,
    planner: Planner | None = None,
    num_microbatches: int | str = "auto",
    shows_progress: bool = False,
    cache: Cache = False,
) -> Measured:
    """Plan a case for its cluster, timed. Raises `AlpaLiteError` if there is no plan.

    shows_progress    whether progress is shown on a terminal
    cache             whether the plan cache is used, or its folder
    """
    cluster, step, arguments = case.cluster, case.train_step(), case.arguments()
    progress, times = default_progress() if shows_progress else Progress(), PhaseTimes()
    with progress.during("plan"):
        progress.follow(times)
        started = time.perf_counter()
        traced = al.parallelize(step, progress=progress).trace(*arguments)
        request = traced.request(cluster, num_microbatches=num_microbatches)
        answer = planned(planner or planner_of(case, manual=True), request, cache)
        ended = time.perf_counter()
    plan = answer.plan
    return Measured(
        case=case.id,
        cluster=f"{case.host}:{cluster.num_hosts}",
        seconds=ended - started,
        gap=plan.solver.gap,
        num_ops=len(traced.step(1).step.graph.ops),
        predicted_seconds=(seconds := plan.prediction.step_seconds),
        predicted_tflops_per_device=case.tflops_per_device(seconds) if isinstance(case, Case) else None,
        peak_rss_bytes=_peak_rss_bytes(),
        num_stages=len(plan.stages),
        num_microbatches=plan.num_microbatches,
        phases=_phases(times.seconds, ended - started),
        cached=answer.cached,
    )


def planner_of(case: AnyCase, *, manual: bool) -> Auto:
    """Return the search for a case, with or without manual plans and those on the host beside it."""
    planner = case.planner if isinstance(case, LargeModel) else Auto()
    return planner if manual else replace(planner, manual=(), host_memory=False)


def _peak_rss_bytes() -> int:
    """Return the peak memory of this process plus the largest peak of its workers, in bytes."""
    used = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(used) * (1 if sys.platform == "darwin" else 1024)


def _phases(seconds: Mapping[str, float], total: float) -> dict[str, float]:
    """Return the seconds of all phases, and the rest of the total."""
    known = {name: seconds.get(name, 0.0) for name in PHASES[:-1]}
    return {**known, PHASES[-1]: total - sum(known.values())}


def growing_layers(num_layers: int) -> Case:
    """Return a case for the table over the number of layers."""
    return _gpt(num_layers, _USUAL_DEVICES)


def growing_devices(num_devices: int) -> Case:
    """Return a case for the table over the number of devices."""
    return _gpt(_USUAL_LAYERS, num_devices)


def growing_ops(num_layers: int) -> WrittenOut:
    """Return a case for the table over the number of layers that are written out."""
    return replace(written_out.CASES["gpt2-xl"], num_layers=num_layers)


def _gpt(num_layers: int, num_devices: int) -> Case:
    return Case(
        id=f"gpt, {num_layers} layers",
        family="gpt",
        model=gpt(_HIDDEN, num_layers, _HEADS, dtype=jnp.bfloat16),
        num_devices=num_devices,
        global_batch=_SAMPLES_PER_DEVICE * num_devices,
        num_microbatches=_SAMPLES_PER_DEVICE,
        host=_HOST,
    )


Size = TypeVar("Size", int, str)


def growth(
    title: str,
    make: Callable[[Size], AnyCase],
    sizes: Iterable[Size],
    console: Console,
    *,
    manual: bool,
) -> None:
    """Measure the cases one after the other, and print a table of them."""
    columns = ("seconds", "bar", *PHASES, "ops", "peak memory", "stages", "micro-batches", "step", "TFLOPS per device")
    table = Table(title, *columns)
    for column in table.columns:
        column.justify = "right"
    for size in sizes:
        case = make(size)
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
            try:
                row = alone.submit(measure, case, planner=planner_of(case, manual=manual)).result()
            except AlpaLiteError as error:
                console.print(f"{title} {size}: {error}", highlight=False, markup=False)
                continue
        console.print(f"{title} {size}: {row.seconds:.1f} s", highlight=False)
        table.add_row(
            str(size),
            f"{row.seconds:.1f}",
            f"{case.bar_seconds:.0f}" if isinstance(case, WrittenOut | LargeModel) else "",
            *(f"{row.phases[name]:.1f}" for name in PHASES),
            str(row.num_ops),
            f"{row.peak_rss_bytes / 1e9:.2f} GB",
            str(row.num_stages),
            str(row.num_microbatches),
            f"{row.predicted_seconds:.3g} s",
            "" if row.predicted_tflops_per_device is None else f"{row.predicted_tflops_per_device:.0f}",
        )
    console.print(table)


def on_cluster(case: AnyCase, text: str) -> AnyCase:
    """Return the case on a cluster given as NAME:HOSTS."""
    name, _, hosts = text.partition(":")
    per_host = al.cluster(name, num_hosts=1).devices_per_host
    if not isinstance(case, Case):
        return replace(case, host=name, num_hosts=int(hosts or 1))
    return replace(case, host=name, num_devices=per_host * int(hosts or 1))


def listed() -> Table:
    """Return a table of the cases."""
    table = Table("case", "parameters", "cluster", "batch")
    for case in _cases().values():
        cluster: Cluster = case.cluster
        where = f"{cluster.num_hosts} × {cluster.devices_per_host} of {cluster.name}"
        table.add_row(case.id, f"{case.parameters / 1e9:.2f} B", where, str(case.global_batch))
    return table


def _cases() -> dict[str, AnyCase]:
    return {**CASES, **written_out.CASES, **large_models.CASES}


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments, plan, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=list(_cases()), metavar="ID", help="what to plan (see --list)")
    parser.add_argument("--list", action="store_true", help="show the cases")
    parser.add_argument("--cluster", metavar="NAME:HOSTS", help="default: the case's own")
    parser.add_argument("--num-microbatches", default="auto", help="a number, or auto (default)")
    parser.add_argument("--no-manual", action="store_true", help="price no manual plans beside the search")
    parser.add_argument(
        "--no-cache",
        action="store_true",
        help="plan as if for the first time, and keep nothing (the tables always do)",
    )
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    given = parser.parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 160)
    manual = not given.no_manual
    if given.list:
        console.print(listed())
        return 0
    if given.case is None:
        growth("layers", growing_layers, LAYERS, console, manual=manual)
        growth("devices", growing_devices, DEVICES, console, manual=manual)
        growth("layers written out", growing_ops, WRITTEN_OUT_LAYERS, console, manual=manual)
        written: Mapping[str, AnyCase] = {**written_out.CASES, **large_models.CASES}
        growth("model", written.__getitem__, written, console, manual=manual)
        return 0
    case = _cases()[given.case] if given.cluster is None else on_cluster(_cases()[given.case], given.cluster)
    wanted = given.num_microbatches
    count = wanted if wanted == "auto" else int(wanted)
    planner = planner_of(case, manual=manual)
    row = measure(case, planner=planner, num_microbatches=count, shows_progress=True, cache=not given.no_cache)
    if given.json:
        print(row.to_line())
        return 0
    phases = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in row.phases.items())
    console.print(
        f"{row.case} on {row.cluster}: {row.seconds:.2f} s ({phases}); {row.num_stages} stages, {row.num_microbatches} "
        f"micro-batches, {row.predicted_seconds:.3g} s per step, gap {100 * row.gap:.2f} %, {row.num_ops} ops, peak "
        f"memory {row.peak_rss_bytes / 1e9:.2f} GB" + (", from the cache" if row.cached else ""),
        highlight=False,
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
