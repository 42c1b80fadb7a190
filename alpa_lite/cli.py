"""The command line: parse, call one public function, print. `alpa-lite COMMAND --help` tells the options.

plan       plan a train step for a cluster                    alpa_lite.plan
explain    a saved plan, or why something in it is so         str(plan), inspection.explain.explanation
diff       what changes from one plan to another              inspection.diff.compare
simulate   the timeline of a plan, predicted or measured      inspection.timeline, LoweredFunction.simulate
solve      a file with an intra-op problem                    intra_op.solve_file.solve_file
calibrate  measure this machine's devices                     alpa_lite.calibrate
doctor     is this machine ready                              inspection.doctor.diagnose
bench      planners against each other                        benchmarks.bench, in a process of its own
demo       plan, train and compare on this machine            benchmarks.demo, in a process of its own
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

import alpa_lite as al
from alpa_lite.errors import AlpaLiteError, PlanError
from alpa_lite.inspection.calibration import CalibrationProgress, calibration_data, calibration_text
from alpa_lite.inspection.diff import compare
from alpa_lite.inspection.doctor import diagnose, steady_memory_environment, virtual_cpu_environment
from alpa_lite.inspection.explain import explanation
from alpa_lite.inspection.progress import planning_progress
from alpa_lite.inspection.tables import plan_summary
from alpa_lite.inspection.timeline import (
    SpanLike,
    chrome_trace,
    compared,
    comparison_text,
    overlaid,
    predicted_timeline,
)
from alpa_lite.intra_op.problem import Status
from alpa_lite.intra_op.problem_file import solution_data
from alpa_lite.intra_op.solve_file import (
    SOLVERS_BY_NAME,
    front_of_file,
    point_data,
    point_line,
    seconds_since_start,
    solution_line,
    solve_file,
    solver_named,
    why_infeasible,
)
from alpa_lite.intra_op.solvers import Control, Progress
from alpa_lite.planners.by_name import PLANNERS, planner_by_name
from alpa_lite.user_step import load_example
from cost_models import CostModelError

_SOLVE_SHARE = 0.97
"""The part of `solve --timeout` that is for reading and solving; the rest is for writing the answer and leaving."""


def main(argv: list[str] | None = None) -> int:
    """Run one command. Returns the exit code: 0, or 1 after an error of alpa_lite, which is printed as its sentence."""
    begun = time.perf_counter() - (seconds_since_start() if argv is None else 0.0)  # imports take time too
    parser = build_parser()
    given, rest = parser.parse_known_args(argv)
    given.rest = rest
    given.begun = begun
    if rest and given.command not in ("demo", "bench"):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    run: Callable[[argparse.Namespace], int] = given.run
    try:
        return run(given)
    except (AlpaLiteError, CostModelError) as error:
        print(error, file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader (`| head`) has seen enough; without this Python complains when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        print(f"Interrupted: {given.command} has no result yet.", file=sys.stderr)
        return 130


def build_parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    parser = argparse.ArgumentParser(prog="alpa-lite", description="Spread a JAX train step over devices, and see why.")
    parser.add_argument("--version", action="version", version=f"alpa_lite {al.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    plan = _command(commands, "plan", run_plan, "plan a train step for a cluster")
    plan.add_argument(
        "step", metavar="MODULE:FUNCTION", help="returns (train_step, args) or (train_step, args, kwargs)"
    )
    plan.add_argument("--cluster", help="a known cluster or a .json file (default: this machine's devices)")
    plan.add_argument("--num-hosts", type=int, help="hosts of the cluster (default: as described)")
    plan.add_argument("--planner", default="auto", help=f"{', '.join(PLANNERS)}, or a saved plan (default: auto)")
    plan.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="option of the planner, e.g. num_stages=4"
    )
    plan.add_argument(
        "--num-microbatches", type=_count_or_auto, default="auto", metavar="N", help='a number, or "auto"'
    )
    plan.add_argument("--no-cache", action="store_true", help="plan anew even if this plan was made before")
    plan.add_argument("--output", type=Path, metavar="PLAN.json", help="save the plan")

    explain = _command(commands, "explain", run_explain, "show a plan, or why something in it is so")
    explain.add_argument("plan", metavar="PLAN.json")
    explain.add_argument("subject", nargs="?", help="a parameter's path, `stage 0`, `op 12`, or part of a source line")
    explain.add_argument("--html", type=Path, metavar="FILE", help="write the plan as a page")

    diff = _command(commands, "diff", run_diff, "what changes from one plan to another")
    diff.add_argument("before", metavar="A.json")
    diff.add_argument("after", metavar="B.json")

    simulate = _command(commands, "simulate", run_simulate, "the timeline of a plan, predicted or measured")
    simulate.add_argument("plan", metavar="PLAN.json")
    simulate.add_argument(
        "--step", metavar="MODULE:FUNCTION", help="the step that was planned: simulate each instruction of its program"
    )
    simulate.add_argument(
        "--measure", action="store_true", help="also run the program on this machine's devices, and compare"
    )
    simulate.add_argument("--trace", type=Path, metavar="FILE", help="write it for chrome://tracing or ui.perfetto.dev")
    simulate.add_argument("--html", type=Path, metavar="FILE", help="write the plan as a page with this timeline")

    solve = _command(commands, "solve", run_solve, "solve a file with an intra-op problem")
    solve.add_argument("file", type=Path, metavar="FILE", help="the contest's format, .json or .json.gz")
    solve.add_argument(
        "--timeout", type=float, default=60.0, metavar="S", help="seconds, reading included (default: 60)"
    )
    solve.add_argument("--out", type=Path, metavar="SOLUTION.json", help="write the solution")
    solve.add_argument("--solver", default="portfolio", metavar="NAME", help=f"one of {', '.join(SOLVERS_BY_NAME)}")
    solve.add_argument("--seed", type=int, default=0, metavar="N", help="of the random search (default: 0)")
    solve.add_argument(
        "--pareto", type=int, metavar="N", help="also solve under N limits: the front of memory and cost"
    )
    solve.add_argument(
        "--rounds", type=int, metavar="N", help="rounds of search in place of the time limit: reproducible"
    )

    calibrate = _command(commands, "calibrate", run_calibrate, "measure this machine's devices")
    calibrate.add_argument(
        "--out",
        type=Path,
        metavar="FILE.json",
        help="where to write the cluster (default: where local_cluster() looks)",
    )
    calibrate.add_argument("--seconds", type=float, default=60.0, help="limit for the timing (default: 60)")
    calibrate.add_argument("--devices", type=int, metavar="N", help="measure N virtual CPU devices instead")

    _command(commands, "doctor", run_doctor, "is this machine ready")

    _command(commands, "bench", run_bench, "planners against each other", add_help=False)

    demo = _command(commands, "demo", run_demo, "plan, train and compare on this machine", add_help=False)
    demo.add_argument("--devices", type=int, default=8, help=argparse.SUPPRESS)
    return parser


def _command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], about: str, *, add_help: bool = True
) -> argparse.ArgumentParser:
    """A subcommand that runs `run`; each has `--json`."""
    parser = commands.add_parser(name, help=about, description=about, add_help=add_help)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)
    return parser


def run_plan(given: argparse.Namespace) -> int:
    """`alpa-lite plan`: what `alpa_lite.plan` does. Ctrl-C ends it with the best plan so far, if there is one."""
    step, args, kwargs = load_example(given.step)
    cluster = None
    if given.cluster is not None:
        cluster = al.cluster(given.cluster, num_hosts=given.num_hosts)
    elif given.num_hosts is not None:
        raise PlanError("--num-hosts says how many hosts a described cluster has: give --cluster as well.")
    planner = make_planner(given.planner, given.option)
    with planning_progress(Console(stderr=True, quiet=given.json)) as progress:
        function = al.parallelize(
            step,
            cluster=cluster,
            planner=planner,
            num_microbatches=given.num_microbatches,
            progress=progress,
            cache=not given.no_cache,
        )
        found = function.trace(*args, **kwargs).plan()
    plan = found.last_plan
    if given.output is not None:
        plan.save(given.output)
    _print({**plan_summary(plan), "cached": found.cached} if given.json else plan)
    if found.cached and not given.json:
        _print("This plan is from the cache; --no-cache plans anew.")
    return 0


def run_explain(given: argparse.Namespace) -> int:
    """`alpa-lite explain`: `str(plan)`, or `inspection.explain.explanation`."""
    plan = al.Plan.load(given.plan)
    if given.html is not None:
        plan.to_html(given.html)
    if given.subject is None:
        _print(plan_summary(plan) if given.json else plan)
        return 0
    found = explanation(plan, given.subject)
    _print(found.to_json() if given.json else found)
    return 0


def run_diff(given: argparse.Namespace) -> int:
    """`alpa-lite diff`: `inspection.diff.compare`."""
    found = compare(al.Plan.load(given.before), al.Plan.load(given.after))
    _print(found.to_json() if given.json else found)
    return 0


def run_simulate(given: argparse.Namespace) -> int:
    """`alpa-lite simulate`: `inspection.timeline.predicted_timeline`; of a step, `LoweredFunction.simulate`."""
    plan = al.Plan.load(given.plan)
    if given.step is None:
        if given.measure:
            raise PlanError("--measure runs the step: give --step MODULE:FUNCTION as well.")
        timeline = predicted_timeline(plan)
        _write_trace(given.trace, chrome_trace(timeline, "predicted"))
        _write_page(given.html, plan)
        _print(timeline.to_json() if given.json else timeline)
        return 0
    step, args, kwargs = load_example(given.step)
    lowered = al.parallelize(step, planner=plan).trace(*args, **kwargs).plan(cluster=plan.cluster).lower()
    simulated = lowered.simulate()
    if not given.measure:
        _write_trace(given.trace, chrome_trace(simulated.times, "predicted"))
        _write_page(given.html, plan, simulated=simulated.times)
        _print(simulated.to_json() if given.json else simulated)
        return 0
    measured = lowered.compile().measure()
    rows = compared(simulated.times, measured)
    _write_trace(given.trace, overlaid(simulated.times, measured))
    _write_page(given.html, plan, simulated=simulated.times, measured=measured)
    _print({**simulated.to_json(), "tasks": [asdict(row) for row in rows]} if given.json else simulated)
    if not given.json:
        _print(comparison_text(rows))
    return 0


def _write_trace(path: Path | None, trace: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(trace))


def _write_page(path: Path | None, plan: al.Plan, **spans: Sequence[SpanLike]) -> None:
    if path is not None:
        plan.to_html(path, **spans)


def run_solve(given: argparse.Namespace) -> int:
    """`alpa-lite solve`: `intra_op.solve_file.solve_file`. Ctrl-C ends it with the best choices so far."""
    stopped = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: stopped.set())
    show = sys.stderr.isatty() and not given.json
    try:
        solution = solve_file(
            given.file,
            out=given.out,
            solver=solver_named(given.solver, seed=given.seed, rounds=given.rounds),
            time_limit_seconds=_seconds_left(given),
            control=Control(stop=stopped.is_set, report=_solver_progress if show else lambda _: None),
        )
    finally:
        signal.signal(signal.SIGINT, before)
    if show:
        print("\r\033[K", end="", file=sys.stderr)
    left = max(_seconds_left(given), 0.1)
    front = () if given.pareto is None else front_of_file(given.file, num_points=given.pareto, time_limit_seconds=left)
    if given.json:
        points = {} if given.pareto is None else {"pareto": [point_data(point) for point in front]}
        _print({**solution_data(solution), **points})
    else:
        _print(solution_line(solution))
        for point in front:
            _print(point_line(point))
        if solution.status is Status.INFEASIBLE:
            print(why_infeasible(given.file, time_limit_seconds=left), file=sys.stderr)
    return 0 if solution.choices is not None else 1


def _seconds_left(given: argparse.Namespace) -> float:
    """What is left for solving; negative afterwards."""
    return _SOLVE_SHARE * given.timeout - (time.perf_counter() - given.begun)


def _solver_progress(progress: Progress) -> None:
    cost = "none yet" if math.isinf(progress.cost) else f"{progress.cost:.8g}"
    _progress(f"{progress.seconds:6.1f} s  cost {cost}  bound {progress.bound:.8g}  {progress.doing}")


def run_calibrate(given: argparse.Namespace) -> int:
    """`alpa-lite calibrate`: `alpa_lite.calibrate`, and the file that `alpa_lite.local_cluster` reads."""
    if given.devices is not None:
        options = ["--seconds", str(given.seconds), *(["--out", str(given.out)] if given.out else [])]
        command = [sys.executable, "-m", "alpa_lite.cli", "calibrate", *options, *(["--json"] if given.json else [])]
        return subprocess.run(command, env=_virtual_environment(given.devices), check=False).returncode
    with CalibrationProgress(Console(stderr=True)) as progress:
        found = al.calibrate(limit_seconds=given.seconds, progress=progress)
    path = found.save(given.out)
    if given.json:
        _print({**calibration_data(found), "path": str(path)})
    else:
        _print(calibration_text(found))
        _print(f"Written to {path}.")
    return 0


def run_doctor(given: argparse.Namespace) -> int:
    """`alpa-lite doctor`: `inspection.doctor.diagnose`."""
    found = diagnose()
    _print(found.to_json() if given.json else found)
    return 0 if found.healthy else 1


def run_demo(given: argparse.Namespace) -> int:
    """`alpa-lite demo`: `benchmarks.demo` in a process of its own, with virtual CPU devices that cannot hang."""
    return _benchmark("demo", given, _virtual_environment(given.devices))


def run_bench(given: argparse.Namespace) -> int:
    """`alpa-lite bench`: `benchmarks.bench` in a process of its own, which makes the devices that it needs."""
    return _benchmark("bench", given, dict(os.environ))


def _benchmark(name: str, given: argparse.Namespace, environment: dict[str, str]) -> int:
    command = [sys.executable, "-m", f"benchmarks.{name}", *given.rest, *(["--json"] if given.json else [])]
    return subprocess.run(command, env=environment, check=False).returncode


def _virtual_environment(num_devices: int) -> dict[str, str]:
    return {**os.environ, **virtual_cpu_environment(num_devices), **steady_memory_environment()}


def make_planner(name: str, options: Sequence[str]) -> al.planners.Planner | al.Plan:
    """The planner of that name with `name=value` options, or the plan of a file. Raises `PlanError` for others."""
    if name.endswith(".json"):
        return al.Plan.load(name)
    return planner_by_name(name, options)


def _count_or_auto(text: str) -> int | str:
    return text if text == "auto" else int(text)


def _progress(line: str) -> None:
    print(f"\r\033[K{line}", end="", flush=True, file=sys.stderr)


def _print(value: object) -> None:
    """Text as it is, data as JSON."""
    print(json.dumps(value, indent=2) if isinstance(value, dict) else value)


if __name__ == "__main__":
    raise SystemExit(main())
