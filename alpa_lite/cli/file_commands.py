"""Commands on saved files: `explain`, `diff` and `simulate` on plans, `solve` on intra-op problems."""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType

import alpa_lite as al
from alpa_lite.api.stages import PlannedFunction
from alpa_lite.cli.command import Command, answer, check_writable, complain, positive, seconds, suggests, writing
from alpa_lite.cli.exit_codes import Exit
from alpa_lite.cli.user_files import load_example
from alpa_lite.errors import PlanError
from alpa_lite.inspection.text.diff import compare
from alpa_lite.inspection.text.progress_bar import default_progress
from alpa_lite.inspection.text.tables import plan_summary, render
from alpa_lite.inspection.text.timeline import (
    chrome_trace,
    compared,
    comparison_text,
    overlaid,
    predicted_timeline,
)
from alpa_lite.inspection.why.explain import Explanation, explanation
from alpa_lite.inspection.why.memory_use import MemoryUse, allocated_table, memory_use
from alpa_lite.inspection.why.profile_differences import profile_differences
from alpa_lite.inspection.why.time_use import TimeUse, time_use
from alpa_lite.intra_op.problem import Status
from alpa_lite.intra_op.problem_file import (
    SOLVERS_BY_NAME,
    front_of_file,
    point_data,
    point_line,
    solution_data,
    solution_line,
    solve_file,
    solver_named,
    why_infeasible,
)
from alpa_lite.intra_op.solvers import Control, SolveProgress
from alpa_lite.plan.progress import Progress
from alpa_lite.schedule.tasks import SpanLike

_STEP_HELP = "the step that was planned: the plan is checked against it, and details that need the step are shown"


def run_explain(given: argparse.Namespace) -> int:
    """Print `Plan.explain`, `Plan.explain_time`, `Plan.explain_memory`, or the plan itself."""
    if sum((given.subject is not None, given.time, given.memory)) > 1:
        given.parser.error("give one of a subject, --time and --memory")
    check_writable(given.html)
    plan = al.Plan.load(given.plan)
    if given.step is not None:
        # Only a plan made in this process has its request, from which alternatives and values are priced.
        plan = _planned(plan, given.step, default_progress()).last_plan
    found = _explained(plan, given)
    if given.html is not None:
        with writing(given.html):
            plan.to_html(given.html)
    if found is None:
        answer(given, plan, lambda: {"kind": "plan", **plan_summary(plan)})
    else:
        answer(given, found, found.to_json)
    return Exit.DONE


def _explained(plan: al.Plan, given: argparse.Namespace) -> TimeUse | MemoryUse | Explanation | None:
    """Return the explanation that the options name; None for the plan itself."""
    if given.time:
        return time_use(plan)
    if given.memory:
        return memory_use(plan)
    return None if given.subject is None else explanation(plan, given.subject)


def _explain_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", metavar="PLAN.json")
    parser.add_argument(
        "subject", nargs="?", help="a parameter's path, `stage 0`, `layer 2`, `op 12`, or part of a source line"
    )
    parser.add_argument("--time", action="store_true", help="the step's time by cause, and how to reduce it")
    parser.add_argument(
        "--memory", action="store_true", help="the peak memory of each stage, and the values alive at it"
    )
    parser.add_argument("--step", metavar="MODULE:FUNCTION", help=_STEP_HELP)
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the plan as a page")


def run_diff(given: argparse.Namespace) -> int:
    """Print the differences of two plans (`inspection.text.diff.compare`)."""
    found = compare(al.Plan.load(given.before), al.Plan.load(given.after))
    answer(given, found, found.to_json)
    return Exit.DONE


def _diff_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", metavar="A.json")
    parser.add_argument("after", metavar="B.json")


def run_simulate(given: argparse.Namespace) -> int:
    """Print the predicted timeline of a plan; with `--step`, simulate its program, and run it if options ask for it."""
    check_writable(given.html)
    # Before the work, which may take minutes.
    check_writable(given.trace)
    plan = al.Plan.load(given.plan)
    if given.step is None:
        if given.measure or given.profile:
            option = "--profile" if given.profile else "--measure"
            raise PlanError(f"{option} runs the step: give --step MODULE:FUNCTION as well.")
        timeline = predicted_timeline(plan)
        _write_trace(given.trace, chrome_trace(timeline, "predicted"))
        _write_page(given.html, plan)
        answer(given, timeline, timeline.to_json)
        return Exit.DONE
    progress = default_progress()
    lowered = _planned(plan, given.step, progress).lower()
    with progress.during("simulate", "simulating the program"):
        # On the cost model; nothing is compiled and no device is used.
        simulated = lowered.simulate()
    compiled = lowered.compile() if given.measure or given.profile else None
    with progress.during("run"):
        profile = None if compiled is None or not given.profile else compiled.profile()
        measured = profile.times if profile is not None else () if compiled is None else compiled.measure()
    if compiled is None:
        _write_trace(given.trace, chrome_trace(simulated.times, "predicted"))
        _write_page(given.html, plan, simulated=simulated.times)
        answer(given, simulated, simulated.to_json)
        return Exit.DONE
    # The bytes of compiled programs are known without running them, and are compared with the prediction too.
    allocated = [each.peak_bytes for each in compiled.allocated()]
    # Simulated and measured spans come from the same list of instructions, so that tasks match one to one.
    rows = compared(simulated.times, measured)
    _write_trace(given.trace, overlaid(simulated.times, measured))
    _write_page(given.html, plan, simulated=simulated.times, measured=measured, allocated_bytes=allocated)
    found: dict[str, object] = {"tasks": [asdict(row) for row in rows], "allocated_bytes": allocated}
    text = f"{simulated}\n{comparison_text(rows)}\n{render((), [allocated_table(plan, allocated)])}"
    if profile is not None:
        by_op = profile_differences(compiled.plan, profile)
        text += f"\n{by_op}"
        found["differences"] = by_op.to_json()["differences"]
    answer(given, text, lambda: {**simulated.to_json(), **found})
    return Exit.DONE


def _planned(plan: al.Plan, name: str, progress: Progress) -> PlannedFunction:
    """Plan the step that a function returns by a saved plan. Raises `MismatchError` for a plan of another step."""
    step, args, kwargs = load_example(name)
    return al.parallelize(step, planner=plan, progress=progress).trace(*args, **kwargs).plan(cluster=plan.cluster)


def _write_trace(path: Path | None, trace: Mapping[str, object]) -> None:
    if path is not None:
        with writing(path):
            path.write_text(json.dumps(trace))


def _write_page(
    path: Path | None,
    plan: al.Plan,
    *,
    simulated: Sequence[SpanLike] | None = None,
    measured: Sequence[SpanLike] | None = None,
    allocated_bytes: Sequence[float] | None = None,
) -> None:
    if path is not None:
        with writing(path):
            plan.to_html(path, simulated=simulated, measured=measured, allocated_bytes=allocated_bytes)


def _simulate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", metavar="PLAN.json")
    parser.add_argument(
        "--step", metavar="MODULE:FUNCTION", help="the step that was planned: simulate each instruction of its program"
    )
    parser.add_argument(
        "--measure", action="store_true", help="also run the program on this machine's devices, and compare"
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="as --measure, and name the ops whose times differ most from the prediction",
    )
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write it for chrome://tracing or ui.perfetto.dev")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the plan as a page with this timeline")


EXPLAIN = Command(
    name="explain",
    about="show a plan, or the reasons for part of it",
    example='plan.json "params/layers/0/w" --step train.py:example',
    run=run_explain,
    add_arguments=_explain_arguments,
)

DIFF = Command(
    name="diff",
    about="show what changes from one plan to another",
    example="plan.json other.json",
    run=run_diff,
    add_arguments=_diff_arguments,
)

SIMULATE = Command(
    name="simulate",
    about="show the timeline of a plan, predicted or measured",
    example="plan.json --step train.py:example --trace timeline.json",
    run=run_simulate,
    add_arguments=_simulate_arguments,
)


_SOLVE_SHARE = 0.97
"""The share of `--timeout` for reading and solving; the rest is for writing the answer and exiting."""


def run_solve(given: argparse.Namespace) -> int:
    """Run `intra_op.problem_file.solve_file` and return the exit code. Ctrl-C ends it with the best choices so far."""
    # A line that is redrawn would fill a log file.
    show = sys.stderr.isatty() and not given.json
    solution = solve_file(
        given.file,
        out=given.out,
        solver=solver_named(given.solver, seed=given.seed, rounds=given.rounds),
        time_limit_seconds=_seconds_left(given),
        control=lambda: _until_interrupted(_report_progress if show else lambda _: None),
    )
    if show:
        print("\r\033[K", end="", file=sys.stderr)
    # What follows gets a moment even if solving has taken all of the time.
    left = max(_seconds_left(given), 0.1)
    # Each point is a solve of its own under another limit.
    front = () if given.pareto is None else front_of_file(given.file, num_points=given.pareto, time_limit_seconds=left)
    # Without `--pareto` the data have no such entry, so that readers can tell.
    points = {} if given.pareto is None else {"pareto": [point_data(point) for point in front]}
    text = "\n".join([solution_line(solution), *map(point_line, front)])
    answer(given, text, lambda: {**solution_data(solution), **points})
    if solution.status is Status.INFEASIBLE:
        # With `--json` the status says it, without the time that an explanation takes.
        if not given.json:
            complain(why_infeasible(given.file, time_limit_seconds=left))
        return Exit.INFEASIBLE
    return Exit.DONE if solution.choices is not None else Exit.ERROR


@contextmanager
def _until_interrupted(report: Callable[[SolveProgress], None]) -> Iterator[Control]:
    """Yield a control that Ctrl-C stops; a second Ctrl-C ends the program, as the first one does outside this block."""
    # Set by the signal handler and read by solvers in other threads.
    stopped = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        # The solver ends at its next look; who presses Ctrl-C again does not want to wait for that.
        if stopped.is_set():
            raise KeyboardInterrupt
        stopped.set()

    # The handler of Python would raise KeyboardInterrupt in the middle of the solver, and lose its choices.
    before = signal.signal(signal.SIGINT, stop)
    try:
        yield Control(stop=stopped.is_set, report=report)
    finally:
        signal.signal(signal.SIGINT, before)


def _seconds_left(given: argparse.Namespace) -> float:
    """Return the seconds left for solving; negative if they are used up."""
    # Counted from the start of the process: reading a large file takes part of the limit.
    return _SOLVE_SHARE * given.timeout - (time.perf_counter() - given.begun)


def _report_progress(progress: SolveProgress) -> None:
    cost = "none yet" if math.isinf(progress.cost) else f"{progress.cost:.8g}"
    line = f"{progress.seconds:6.1f} s  cost {cost}  bound {progress.bound:.8g}  {progress.doing}"
    # Back to the first column, and clear what a longer line has left.
    print(f"\r\033[K{line}", end="", flush=True, file=sys.stderr)


def _solve_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="the contest's format, .json or .json.gz")
    parser.add_argument(
        "--timeout", type=seconds, default=60.0, metavar="S", help="seconds, reading included (default: 60)"
    )
    parser.add_argument("--out", type=Path, metavar="SOLUTION.json", help="write the solution")
    solver = parser.add_argument(
        "--solver", default="portfolio", metavar="NAME", help=f"one of {', '.join(SOLVERS_BY_NAME)}"
    )
    suggests(solver, tuple(SOLVERS_BY_NAME))
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the random search (default: 0)")
    parser.add_argument(
        "--pareto", type=int, metavar="N", help="also solve under N limits: the front of memory and cost"
    )
    parser.add_argument(
        "--rounds", type=positive, metavar="N", help="rounds of search in place of the time limit: reproducible"
    )


SOLVE = Command(
    name="solve",
    about="solve a file with an intra-op problem",
    example="problem.json.gz --timeout 60 --out solution.json",
    run=run_solve,
    add_arguments=_solve_arguments,
)
