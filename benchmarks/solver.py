"""Benchmark the intra-op solver on problem files: `python -m benchmarks.solver FILE ... [--best-known CSV]`.

(nothing)       instance × solver: cost, ratio to the best known, bound, gap, seconds, whether the limit was respected
                (5 % and 2 s tolerance, reading included), seconds to the first feasible choices, the longest time
                between two checks of the clock, peak memory
--reductions    the size of an instance after each kind of reduction
--ablation      the portfolio without one of its parts, at equal time
--stages        the problems that planners give to the solver: longest solve and step (`benchmarks.stage_problems`)

Every run is a process of its own. A table of best known costs has the columns name, best_known_cost and
timeout_seconds; an instance's name is the last part of its file's name. The instances of the ASPLOS/EuroSys 2025
contest are at github.com/google/iopddl.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import math
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from alpa_lite.intra_op.problem_file import SOLVERS_BY_NAME, read_problem, solution_data
from alpa_lite.intra_op.simplify import Size, simplify
from alpa_lite.intra_op.solvers import Control, Portfolio, Rounds, SolveProgress, Solver
from alpa_lite.intra_op.solvers.compile_kernels import compile_kernels

_MOST_OVERRUN, _MOST_LATE_SECONDS = 1.05, 2.0

ABLATIONS: dict[str, Solver] = {
    "portfolio": Portfolio(),
    "without programs": Portfolio(max_program_entries=0),
    "without fixing": Portfolio(rounds=Rounds(fix=False)),
    "without recombination": Portfolio(rounds=Rounds(recombine=False)),
    "without heat": Portfolio(rounds=Rounds(heat=False)),
    "without exact blocks": Portfolio(rounds=Rounds(exact=False)),
    "on one thread": Portfolio(rounds=Rounds(num_threads=1)),
}
"""The portfolio, and the portfolio without one of its parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """The best known cost of an instance, and the contest's time limit in seconds."""

    best_cost: float
    timeout_seconds: float


def read_known(path: Path | None) -> dict[str, Known]:
    """Read the table of best known costs by instance name; empty without a file."""
    if path is None:
        return {}
    with path.open(encoding="utf-8") as file:
        return {
            row["name"]: Known(best_cost=float(row["best_known_cost"]), timeout_seconds=float(row["timeout_seconds"]))
            for row in csv.DictReader(file)
        }


def name_of(path: Path) -> str:
    """Return the last part of a file's name, for example G for asplos-2025-iopddl-G.json.gz."""
    return path.name.split(".")[0].rpartition("-")[2]


def run_one(path: Path, solver_name: str, timeout: float) -> dict[str, Any]:
    """Solve one file and return the result with the peak memory; runs in the child process."""
    solver = {**SOLVERS_BY_NAME, **ABLATIONS}[solver_name]
    compile_kernels()
    begun = time.perf_counter()
    problem = read_problem(path)
    read_seconds = time.perf_counter() - begun
    looks, feasible = [time.perf_counter()], list[float]()

    def stop() -> bool:
        looks.append(time.perf_counter())
        return False

    def report(progress: SolveProgress) -> None:
        if math.isfinite(progress.cost) and not feasible:
            feasible.append(time.perf_counter() - begun)

    control = Control(stop=stop, report=report)
    solution = solver.solve(problem, time_limit_seconds=timeout - read_seconds, control=control)
    looks.append(time.perf_counter())
    found = solution_data(solution)
    if found.pop("choices") is not None and not feasible:
        feasible.append(time.perf_counter() - begun)
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        **found,
        "read_seconds": read_seconds,
        "total_seconds": time.perf_counter() - begun,
        "feasible_after_seconds": feasible[0] if feasible else None,
        "longest_step_seconds": max(after - before for before, after in itertools.pairwise(looks)),
        "within_limit": time.perf_counter() - begun <= _MOST_OVERRUN * timeout + _MOST_LATE_SECONDS,
        "rss_bytes": kilobytes * 1024,
    }


def run_apart(path: Path, solver_name: str, timeout: float) -> dict[str, Any]:
    """Run ``run_one`` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.solver", "--child", str(path), solver_name, str(timeout)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return {"status": done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "failed"}
    return json.loads(done.stdout)


def compare(files: list[Path], solvers: list[str], known: dict[str, Known], timeout: float, out: Path | None) -> Table:
    """Return one row for each instance and solver."""
    columns = ("status", "cost", "ratio", "bound / cost", "gap", "seconds", "kept", "first", "step", "peak GB")
    table = Table("instance", "solver", *columns)
    rows: list[dict[str, Any]] = []
    for path in files:
        best = known.get(name_of(path))
        for solver in solvers:
            seconds = best.timeout_seconds if best is not None and timeout == 0.0 else timeout or 60.0
            found = run_apart(path, solver, seconds)
            rows.append({**found, "instance": name_of(path), "solver": solver, "timeout": seconds})
            table.add_row(name_of(path), solver, str(found["status"]), *_cells(found, best))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    if out is not None:
        out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return table


def _cells(found: dict[str, Any], best: Known | None) -> list[str]:
    """Return a run's figures as text, with a dash for missing ones."""
    cost, bound, gap = (found.get(name) for name in ("cost", "bound", "gap"))
    return [
        "-" if cost is None else f"{cost:.12g}",
        "-" if cost is None or best is None else f"{cost / best.best_cost:.6f}",
        "-" if not cost or bound is None else f"{bound / cost:.6f}",
        "-" if gap is None else f"{gap:.4%}",
        f"{found.get('total_seconds', 0.0):.1f}",
        "yes" if found.get("within_limit") else "no",
        "-" if (first := found.get("feasible_after_seconds")) is None else f"{first:.1f}",
        f"{found.get('longest_step_seconds', 0.0):.2f}",
        f"{found.get('rss_bytes', 0) / 1e9:.2f}",
    ]


def reductions(files: list[Path]) -> Table:
    """Return the remaining size after each kind of reduction, in the order in which they first apply."""
    table = Table("instance", "after", "nodes", "strategies", "edges", "pairs", "seconds")
    for path in files:
        problem = read_problem(path)
        seen: dict[str, tuple[Size, float]] = {}
        begun = time.perf_counter()

        def observe(name: str, size: Size, seen: dict[str, tuple[Size, float]] = seen, begun: float = begun) -> None:
            if name not in seen:
                seen[name] = (size, time.perf_counter() - begun)

        reduced = simplify(problem, observe=observe).problem
        end = Size(
            nodes=reduced.num_nodes,
            strategies=reduced.node_costs.values.size,
            edges=len(reduced.edge_costs),
            pairs=reduced.edge_costs.values.size,
        )
        seen["all, to the end"] = (end, time.perf_counter() - begun)
        for name, (size, seconds) in seen.items():
            numbers = (size.nodes, size.strategies, size.edges, size.pairs)
            table.add_row(name_of(path), name, *(f"{number:,}" for number in numbers), f"{seconds:.1f}")
        table.add_section()
    return table


def main(arguments: list[str] | None = None) -> None:
    """Parse the arguments and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--solver", action="append", choices=list(SOLVERS_BY_NAME), help="default: portfolio")
    parser.add_argument("--best-known", type=Path, metavar="CSV")
    parser.add_argument("--timeout", type=float, default=0.0, help="seconds; default: those of the table, or 60")
    parser.add_argument("--reductions", action="store_true")
    parser.add_argument("--ablation", action="store_true")
    parser.add_argument("--stages", action="store_true")
    parser.add_argument("--out", type=Path, metavar="JSON", help="keep the figures")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.child:
        path, solver, timeout = given.child
        print(json.dumps(run_one(Path(path), solver, float(timeout))))
        return
    known = read_known(given.best_known)
    if given.stages:
        # Imported here, since it imports JAX, whose memory would count as the solver's in the children.
        from benchmarks.stage_problems import every_case

        table = every_case()
    elif given.reductions:
        table = reductions(given.files)
    else:
        solvers = list(ABLATIONS) if given.ablation else given.solver or ["portfolio"]
        table = compare(given.files, solvers, known, given.timeout, given.out)
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
