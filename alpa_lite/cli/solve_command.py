"""`alpa-lite solve`: solve a file with an intra-op problem."""

from __future__ import annotations

import argparse
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from alpa_lite.cli.command import Command, answer, complain, positive, seconds, suggests
from alpa_lite.cli.exit_codes import Exit
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
        control=lambda: _until_interrupted(_report if show else lambda _: None),
    )
    if show:
        print("\r\033[K", end="", file=sys.stderr)
    # What follows gets a moment even if solving has taken all of the time.
    left = max(_seconds_left(given), 0.1)
    front = () if given.pareto is None else front_of_file(given.file, num_points=given.pareto, time_limit_seconds=left)
    points = {} if given.pareto is None else {"pareto": [point_data(point) for point in front]}
    text = "\n".join([solution_line(solution), *map(point_line, front)])
    answer(given, text, lambda: {**solution_data(solution), **points})
    if solution.status is Status.INFEASIBLE:
        if not given.json:
            complain(why_infeasible(given.file, time_limit_seconds=left))
        return Exit.INFEASIBLE
    return Exit.DONE if solution.choices is not None else Exit.ERROR


@contextmanager
def _until_interrupted(report: Callable[[SolveProgress], None]) -> Iterator[Control]:
    """Yield a control that Ctrl-C stops; a second Ctrl-C ends the program, as the first one does outside this block."""
    stopped = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        # The solver ends at its next look; who presses Ctrl-C again does not want to wait for that.
        if stopped.is_set():
            raise KeyboardInterrupt
        stopped.set()

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield Control(stop=stopped.is_set, report=report)
    finally:
        signal.signal(signal.SIGINT, before)


def _seconds_left(given: argparse.Namespace) -> float:
    """Return the seconds left for solving; negative if they are used up."""
    return _SOLVE_SHARE * given.timeout - (time.perf_counter() - given.begun)


def _report(progress: SolveProgress) -> None:
    cost = "none yet" if math.isinf(progress.cost) else f"{progress.cost:.8g}"
    line = f"{progress.seconds:6.1f} s  cost {cost}  bound {progress.bound:.8g}  {progress.doing}"
    print(f"\r\033[K{line}", end="", flush=True, file=sys.stderr)


def _arguments(parser: argparse.ArgumentParser) -> None:
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
    add_arguments=_arguments,
)
