"""The problems that planners give to the intra-op solver: `python -m benchmarks.stage_problems [--case ID ...]`.

Each case is planned in a process of its own, without workers, and one row summarises all problems that its search
solves: their number, the largest, the longest solve, whether all ended within their limits (5 % and 2 s tolerance), and
the longest time between two checks of the clock. Cases are those of the evaluation
(`alpa_lite.cli.models.alpa_cases`) with `Auto`,
and ``written-out-N``: a GPT of N layers without a loop, planned for eight devices by `Zero`, as one problem.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import alpa_lite as al
from alpa_lite.cli.models.alpa_cases import CASES
from alpa_lite.cli.models.decoders import GPT
from alpa_lite.errors import AlpaLiteError
from alpa_lite.intra_op.problem import Problem, Solution
from alpa_lite.intra_op.solvers import Control, Portfolio

MOST_OVERRUN, MOST_LATE_SECONDS = 1.05, 2.0
"""The tolerance of a solve's time limit: this factor, and these seconds in addition."""

_WRITTEN_OUT = "written-out-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Solve:
    """One call of the solver.

    Attributes:
        pairs: entries of all edges' cost matrices.
        longest_step_seconds: the longest time between two checks of the clock.
    """

    num_nodes: int
    pairs: int
    limit_seconds: float
    seconds: float
    longest_step_seconds: float
    status: str

    @property
    def within_limit(self) -> bool:
        """Whether it ended in time."""
        return self.seconds <= MOST_OVERRUN * self.limit_seconds + MOST_LATE_SECONDS


@contextmanager
def recorded_solves() -> Iterator[list[Solve]]:
    """Record every problem that `Portfolio` solves in this process inside the context."""
    solves: list[Solve] = []
    solve = Portfolio.solve

    def recorded(
        self: Portfolio, problem: Problem, *, time_limit_seconds: float = 60.0, control: Control | None = None
    ) -> Solution:
        given, looks = control or Control(), [time.perf_counter()]

        def stop() -> bool:
            looks.append(time.perf_counter())
            return given.stop()

        answer = solve(self, problem, time_limit_seconds=time_limit_seconds, control=replace(given, stop=stop))
        looks.append(time.perf_counter())
        solves.append(
            Solve(
                num_nodes=problem.num_nodes,
                pairs=problem.edge_costs.values.size,
                limit_seconds=time_limit_seconds,
                seconds=looks[-1] - looks[0],
                longest_step_seconds=max(after - before for before, after in itertools.pairwise(looks)),
                status=answer.status.value,
            )
        )
        return answer

    with patch.object(Portfolio, "solve", recorded):
        yield solves


def plan_case(name: str) -> None:
    """Plan a case, in this process."""
    if name.startswith(_WRITTEN_OUT):
        model = GPT(num_layers=int(name.removeprefix(_WRITTEN_OUT)), hidden=512, num_heads=8, seq_len=256)
        weights = jax.eval_shape(model.init, jax.random.key(0))
        tokens = jax.ShapeDtypeStruct((64, model.seq_len), jnp.int32)

        def step(weights: Any, batch: Any) -> tuple[Any, Any]:
            loss, slopes = jax.value_and_grad(model.loss_fn)(weights, batch)
            return jax.tree.map(lambda weight, slope: weight - 0.1 * slope, weights, slopes), loss

        batch = {"tokens": tokens, "targets": tokens}
        al.plan(step, weights, batch, cluster=al.cluster("dgx-a100"), planner=al.planners.Zero(), cache=False)
        return
    case = CASES[name]
    al.plan(case.train_step(), *case.arguments(), cluster=case.cluster, cache=False)


def measure(name: str) -> dict[str, Any]:
    """Plan a case and summarise its solves; runs in a process of its own."""
    started = time.perf_counter()
    with recorded_solves() as solves:
        try:
            plan_case(name)
            outcome = "planned"
        except AlpaLiteError as error:
            outcome = type(error).__name__
    return {
        "case": name,
        "outcome": outcome,
        "planning_seconds": time.perf_counter() - started,
        "num_solves": len(solves),
        "solve_seconds": sum(solve.seconds for solve in solves),
        "late": sum(not solve.within_limit for solve in solves),
        "longest_step_seconds": max((solve.longest_step_seconds for solve in solves), default=0.0),
        "longest": asdict(max(solves, key=lambda solve: solve.seconds)) if solves else None,
        "largest": asdict(max(solves, key=lambda solve: solve.pairs)) if solves else None,
    }


def measure_apart(name: str) -> dict[str, Any]:
    """Run ``measure`` in a process of its own without workers, so that every solve is recorded."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.stage_problems", "--child", name],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "ALPA_LITE_WORKERS": "0", "JAX_PLATFORMS": "cpu"},
    )
    if done.returncode:
        return {"case": name, "outcome": done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "failed"}
    return json.loads(done.stdout.splitlines()[-1])


def every_case(names: Sequence[str] = tuple(CASES)) -> Table:
    """Return one row for each case, by default all of the evaluation."""
    columns = ("outcome", "planned in", "solves", "in all", "largest (nodes, pairs)", "longest", "its limit", "step")
    table = Table("case", *columns, "late")
    for name in names:
        row = measure_apart(name)
        print(json.dumps(row), file=sys.stderr, flush=True)
        table.add_row(name, row["outcome"], *_cells(row))
    return table


def _cells(row: dict[str, Any]) -> list[str]:
    """Return a row's figures as text; empty if nothing was solved."""
    if not row.get("longest"):
        return []
    longest, largest = row["longest"], row["largest"]
    return [
        f"{row['planning_seconds']:.1f} s",
        str(row["num_solves"]),
        f"{row['solve_seconds']:.1f} s",
        f"{largest['num_nodes']:,}, {largest['pairs']:,}",
        f"{longest['seconds']:.2f} s",
        f"{longest['limit_seconds']:.0f} s",
        f"{row['longest_step_seconds']:.2f} s",
        str(row["late"]),
    ]


def main(arguments: list[str] | None = None) -> None:
    """Parse the arguments and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", metavar="ID", help="default: all of the evaluation")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.child:
        print(json.dumps(measure(given.child)))
        return
    Console(width=150).print(every_case(given.case or list(CASES)))


if __name__ == "__main__":
    main()
