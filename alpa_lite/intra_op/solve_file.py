"""Solve the problem of a file and write the solution: the implementation of ``alpa-lite solve``."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from alpa_lite.errors import ProblemFileError
from alpa_lite.intra_op.limits import Point, explain_infeasible, pareto_front
from alpa_lite.intra_op.problem import Solution, Status
from alpa_lite.intra_op.problem_file import read_problem, write_solution
from alpa_lite.intra_op.solvers import (
    BruteForce,
    Control,
    Elimination,
    Highs,
    IntegerProgram,
    Portfolio,
    Rounds,
    Solver,
    TooWide,
)
from alpa_lite.program.collector import rare_collection

SOLVERS_BY_NAME: dict[str, Solver] = {
    "portfolio": Portfolio(),
    "search": Portfolio(max_program_entries=0),
    "highs": Highs(),
    "pulp": IntegerProgram(),
    "elimination": Elimination(),
    "brute_force": BruteForce(),
}
"""The solvers by their names on the command line."""


def solver_named(name: str, *, seed: int = 0, rounds: int | None = None) -> Solver:
    """Return the solver with this name. Raises ProblemFileError for an unknown name."""
    solver = SOLVERS_BY_NAME.get(name.replace("-", "_"))
    if solver is None:
        raise ProblemFileError(f"There is no solver {name!r}. Choose one of {', '.join(SOLVERS_BY_NAME)}.")
    if isinstance(solver, Portfolio):
        return replace(solver, rounds=Rounds(seed=seed, max_rounds=rounds))
    return solver


def solve_file(
    path: str | Path,
    *,
    out: str | Path | None = None,
    solver: Solver | None = None,
    time_limit_seconds: float = 60.0,
    control: Callable[[], AbstractContextManager[Control]] = lambda: nullcontext(Control()),
) -> Solution:
    """Read a problem, solve it within the time (which includes reading), and write the solution if ``out`` is given.

    ``control`` is entered when the file is read, and left when the problem is solved.

    Raises ProblemFileError when the file holds no problem, or when the solver cannot handle it.
    """
    started = time.perf_counter()
    if out is not None and not Path(out).resolve().parent.is_dir():
        raise ProblemFileError(f"{out} cannot be written: there is no folder {Path(out).resolve().parent}.")
    problem = read_problem(path)
    left = max(time_limit_seconds - (time.perf_counter() - started), 0.0)
    try:
        with rare_collection(), control() as controlled:
            solution = (solver or Portfolio()).solve(problem, time_limit_seconds=left, control=controlled)
    except (TooWide, ValueError) as error:
        raise ProblemFileError(f"{path}: {error}") from error
    if out is not None:
        write_solution(solution, out)
    return solution


def front_of_file(path: str | Path, *, num_points: int, time_limit_seconds: float) -> tuple[Point, ...]:
    """Return the Pareto front of memory and cost of a file's problem.

    Raises ProblemFileError when the file holds no problem, or when ``num_points`` is less than two.
    """
    problem = read_problem(path)
    try:
        return pareto_front(problem, num_points=num_points, time_limit_seconds=time_limit_seconds)
    except ValueError as error:
        raise ProblemFileError(f"{path}: {error}") from error


def why_infeasible(path: str | Path, *, time_limit_seconds: float) -> str:
    """Explain in words why the limit of a file's problem is too low, and which limit would suffice."""
    return explain_infeasible(read_problem(path), time_limit_seconds=time_limit_seconds).sentence()


def point_data(point: Point) -> dict[str, Any]:
    """Return the JSON fields of a point of the front, without its choices."""
    bound = None if math.isinf(point.bound) else point.bound
    return {"peak_bytes": point.peak_bytes, "cost": point.cost, "bound": bound, "status": point.status.value}


def point_line(point: Point) -> str:
    """Format a point of the front as one line of text."""
    return f"  peak {point.peak_bytes:>16,.0f} bytes  cost {point.cost:<14.12g}  {point.status.value}"


def solution_line(solution: Solution) -> str:
    """Format a solution as one line of text: status, cost, bound, gap, peak, seconds."""
    bound = "none" if math.isinf(solution.bound) else f"{solution.bound:.12g}"
    if solution.choices is None:
        peak = f", smallest peak found {solution.peak_bytes:.12g} bytes" if math.isfinite(solution.peak_bytes) else ""
        why = (
            "no choices have finite cost within the limit" if solution.status is Status.INFEASIBLE else "nothing found"
        )
        return f"{solution.status.value}: {why}{peak}  bound {bound}  {solution.seconds:.1f} s"
    return (
        f"{solution.status.value}  cost {solution.cost:.12g}  bound {bound}  gap {solution.gap:.4%}  "
        f"peak {solution.peak_bytes:.12g} bytes  {solution.seconds:.1f} s"
    )


def seconds_since_start() -> float:
    """Return the seconds since this process began (Linux; 0 elsewhere): imports count against a time limit."""
    try:
        with open("/proc/self/stat", encoding="ascii") as stat, open("/proc/uptime", encoding="ascii") as uptime:
            ticks = int(stat.read().rpartition(")")[2].split()[19])
            return max(float(uptime.read().split()[0]) - ticks / os.sysconf("SC_CLK_TCK"), 0.0)
    except (OSError, ValueError, IndexError):
        return 0.0
