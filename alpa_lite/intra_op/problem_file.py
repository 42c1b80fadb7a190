"""Read, write and solve problems in the JSON format of the ASPLOS/EuroSys 2025 contest on intra-op parallelism.

    problem.nodes.costs[v][i]        c_v(i)                                       ``read_problem``
    problem.nodes.intervals[v]       [start, end), empty when start >= end
    problem.nodes.usages[v][i]       bytes of v under i in that interval
    problem.edges.nodes[e]           [u, v]
    problem.edges.costs[e]           C_uv row by row: entry i S_v + j
    problem.usage_limit              the memory limit; absent for none
    10^18 and more                   infinity

Files whose names end with ``.gz`` are compressed. The format is documented at github.com/google/iopddl. ``solve_file``
and what follows it implement ``alpa-lite solve``.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from alpa_lite.errors import ProblemFileError
from alpa_lite.intra_op.limits import Point, explain_infeasible, pareto_front
from alpa_lite.intra_op.problem import FloatArray, Problem, Ragged, Solution, Status
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
from alpa_lite.text import did_you_mean

INFINITY = 10**18
"""The number that represents infinity in a file."""
_EXACT = 2.0**53
"""The bound below which every whole number has an exact float representation."""


def read_problem(path: str | Path) -> Problem:
    """Read the problem of a ``.json`` or ``.json.gz`` file.

    Raises ProblemFileError, with a message that begins with the file's name, when the file is missing or not of this
    format.
    """
    path = Path(path)
    try:
        with rare_collection():  # the lists hold millions of numbers and live until the end: collections free nothing
            return _problem_of(_load(path))
    except OSError as error:
        raise ProblemFileError(f"{path} cannot be read: {error.strerror or error}.") from error
    # Before ValueError, of which it is a kind.
    except json.JSONDecodeError as error:
        raise ProblemFileError(f"{path} is not JSON: {error}.") from error
    # Raised for compressed files that are cut off or damaged, and for JSON that nests too deep.
    except (EOFError, zlib.error, RecursionError) as error:
        raise ProblemFileError(f"{path} cannot be read: it is cut off, damaged or no problem ({error}).") from error
    except (KeyError, TypeError, OverflowError) as error:
        raise ProblemFileError(
            f"{path} is no intra-op problem: {error} is missing or of the wrong kind. Needed are problem.nodes with "
            "intervals, costs and usages, and problem.edges with nodes and costs."
        ) from error
    except ValueError as error:
        raise ProblemFileError(f"{path}: {error}") from error


def _problem_of(data: Any) -> Problem:
    parts = data["problem"]
    nodes, edges = parts["nodes"], parts["edges"]
    # A `Problem` refuses usages that are never alive.
    live = [node for node, (start, end) in enumerate(nodes["intervals"]) if start < end]
    if not len(nodes["costs"]) == len(nodes["intervals"]) == len(nodes["usages"]):
        raise ValueError("nodes.costs, nodes.intervals and nodes.usages must have one entry for each node.")
    if len(edges["nodes"]) != len(edges["costs"]):
        raise ValueError("edges.nodes and edges.costs must have one entry for each edge.")
    limit = parts.get("usage_limit")
    return Problem(
        node_costs=_costs(nodes["costs"]),
        edge_nodes=np.array(edges["nodes"], dtype=np.intp).reshape(-1, 2),
        edge_costs=_costs(edges["costs"]),
        usage_nodes=np.array(live, dtype=np.intp),
        usage_times=np.array([nodes["intervals"][node] for node in live], dtype=np.intp).reshape(-1, 2),
        usage_bytes=_ragged([nodes["usages"][node] for node in live]),
        limit_bytes=None if limit is None else float(limit),
    )


def _load(path: Path) -> Any:
    opened = gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")
    with opened as file:
        return json.load(file)


def _ragged(vectors: Sequence[Sequence[float]]) -> Ragged:
    sizes = [len(vector) for vector in vectors]
    # In one pass, without an array per vector: a file may hold 10^7 numbers.
    values = np.fromiter(chain.from_iterable(vectors), dtype=np.float64, count=sum(sizes))
    return Ragged(values=values, starts=np.concatenate([[0], np.cumsum(sizes, dtype=np.intp)]))


def _costs(vectors: Sequence[Sequence[float]]) -> Ragged:
    ragged = _ragged(vectors)
    return Ragged(values=np.where(ragged.values >= INFINITY, np.inf, ragged.values), starts=ragged.starts)


def write_problem(problem: Problem, path: str | Path) -> None:
    """Write a problem as a file that ``read_problem`` reads.

    The format has one interval per node. A node with several usages therefore gets followers: nodes with the same
    strategies that an edge of zeros and infinities ties to it. Whole numbers are written as JSON integers.
    """
    usages: list[list[tuple[int, int, FloatArray]]] = [[] for _ in range(problem.num_nodes)]
    for usage in problem.usages:
        usages[usage.node].append((usage.start, usage.end, usage.bytes))
    costs = [_numbers(own) for own in problem.node_costs]
    pairs = problem.edge_nodes.tolist()
    matrices = [_numbers(matrix) for matrix in problem.edge_costs]
    intervals: list[list[int]] = []
    used: list[list[float]] = []
    followers: list[tuple[int, int, FloatArray]] = []
    for node, mine in enumerate(usages):
        # An interval from 0 to 0 is empty, so that the bytes of a node without usages never count.
        start, end, amount = mine[0] if mine else (0, 0, np.zeros(len(costs[node])))
        intervals.append([start, end])
        used.append(_numbers(amount))
        for start, end, amount in mine[1:]:
            pairs.append([node, problem.num_nodes + len(followers)])
            matrices.append(_numbers(np.where(np.eye(amount.size) > 0, 0.0, np.inf).reshape(-1)))
            # Followers are numbered after all nodes, so that a solution begins with the choices of the problem.
            followers.append((start, end, amount))
    for start, end, amount in followers:
        costs.append([0] * amount.size)
        intervals.append([start, end])
        used.append(_numbers(amount))
    data: dict[str, object] = {
        "name": Path(path).name.split(".")[0],
        "nodes": {"intervals": intervals, "costs": costs, "usages": used},
        "edges": {"nodes": pairs, "costs": matrices},
    }
    if problem.limit_bytes is not None:
        data["usage_limit"] = _number(problem.limit_bytes)
    _write(Path(path), {"problem": data})


def write_solution(solution: Solution, path: str | Path) -> None:
    """Write ``solution_data`` as a JSON file."""
    _write(Path(path), solution_data(solution))


def solution_data(solution: Solution) -> dict[str, object]:
    """Return a solution's JSON fields: choices, cost, bound, gap (null: infinite), status, seconds, solver, peak."""
    return {
        "choices": None if solution.choices is None else list(solution.choices),
        "cost": _number(solution.cost),
        "bound": _number(solution.bound),
        "gap": _number(solution.gap),
        "status": solution.status.value,
        "seconds": solution.seconds,
        "solver": solution.solver,
        "peak_bytes": _number(solution.peak_bytes),
    }


def _number(value: float) -> float | None:
    """Return an int for a whole number, and None (JSON null) for a number that is not finite."""
    if not math.isfinite(value):
        return None
    return int(value) if value.is_integer() and abs(value) < _EXACT else value


def _numbers(values: FloatArray) -> list[float]:
    return [INFINITY if math.isinf(value) else _number(value) or 0 for value in values.tolist()]


def _write(path: Path, data: dict[str, object]) -> None:
    opened = gzip.open(path, "wt", encoding="utf-8") if path.suffix == ".gz" else path.open("w", encoding="utf-8")
    with opened as file:
        json.dump(data, file)


SOLVERS_BY_NAME: dict[str, Solver] = {
    "portfolio": Portfolio(),
    # No problem with edges is then small enough for HiGHS to solve it whole.
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
        meant = did_you_mean(name.replace("-", "_"), SOLVERS_BY_NAME)
        raise ProblemFileError(f"There is no solver {name!r}.{meant} Choose one of {', '.join(SOLVERS_BY_NAME)}.")
    # Only the portfolio searches in rounds, which the seed and the number of rounds control.
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
    # Before the solve, which may take long.
    if out is not None and not Path(out).resolve().parent.is_dir():
        raise ProblemFileError(f"{out} cannot be written: there is no folder {Path(out).resolve().parent}.")
    problem = read_problem(path)
    left = max(time_limit_seconds - (time.perf_counter() - started), 0.0)
    try:
        with rare_collection(), control() as controlled:
            solution = (solver or Portfolio()).solve(problem, time_limit_seconds=left, control=controlled)
    # Some solvers refuse large problems by a ValueError.
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


def point_data(point: Point) -> dict[str, object]:
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
            # The name of the program stands in parentheses, and may contain spaces and parentheses itself. The start
            # time is field 22.
            ticks = int(stat.read().rpartition(")")[2].split()[19])
            return max(float(uptime.read().split()[0]) - ticks / os.sysconf("SC_CLK_TCK"), 0.0)
    except (OSError, ValueError, IndexError):
        return 0.0
