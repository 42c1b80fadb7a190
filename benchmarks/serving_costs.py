"""Compare solvers of serving problems over thresholds of accuracy: `python -m benchmarks.serving_costs`.

python -m benchmarks.serving_costs                                  the published medium VQA instance
python -m benchmarks.serving_costs vqa-medium-p90 --json
python -m benchmarks.serving_costs --random 200                     JellyBean above the optimum on random problems
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from alpa_lite.errors import InfeasibleError
from alpa_lite.serving import (
    Allocation,
    BestAccuracy,
    CloudOnly,
    EdgeFirst,
    Exact,
    JellyBean,
    ServingProblem,
    ServingSizes,
    ServingSolver,
    random_serving_problem,
    read_serving_problem,
)

SOLVERS: tuple[ServingSolver, ...] = (
    JellyBean(),
    JellyBean(allocation=Allocation.GREEDY_BACKTRACE),
    Exact(),
    EdgeFirst(),
    CloudOnly(),
    BestAccuracy(),
)
THRESHOLDS = (54.0, 55.0, 56.0, 56.7, 57.0, 58.0, 58.3)


@dataclass(frozen=True, kw_only=True)
class ServedCost:
    """What a solver's plan costs.

    Attributes:
        threshold: accuracy that was asked for.
        solver: name of the solver.
        worker_dollars_per_hour: price of the workers; None if there is no plan.
        link_dollars_per_hour: price of the traffic; None if there is no plan.
        accuracy: accuracy of the plan; None if there is no plan.
        seconds: seconds of processor time that the solver took.
    """

    threshold: float
    solver: str
    worker_dollars_per_hour: float | None
    link_dollars_per_hour: float | None
    accuracy: float | None
    seconds: float


def served_cost(problem: ServingProblem, solver: ServingSolver, threshold: float) -> ServedCost:
    """Run a solver."""
    begun = time.process_time()
    try:
        plan = solver.plan(problem, threshold)
    except InfeasibleError:
        plan = None
    return ServedCost(
        threshold=threshold,
        solver=solver.name,
        worker_dollars_per_hour=None if plan is None else plan.worker_dollars_per_hour,
        link_dollars_per_hour=None if plan is None else plan.link_dollars_per_hour,
        accuracy=None if plan is None else plan.accuracy,
        seconds=time.process_time() - begun,
    )


def costs(problem: ServingProblem, thresholds: Sequence[float] = THRESHOLDS) -> list[ServedCost]:
    """Run all solvers at all thresholds."""
    return [served_cost(problem, solver, threshold) for threshold in thresholds for solver in SOLVERS]


def excesses(count: int) -> dict[str, list[float]]:
    """Return by allocation how much dearer JellyBean's plans are than the optimum, on random problems."""
    found: dict[str, list[float]] = {}
    for seed in range(count):
        problem = random_serving_problem(seed, ServingSizes(operators=3, variants=3, workers=9))
        for solver in SOLVERS[:2]:
            try:
                cost, optimum = solver.plan(problem, 0.0), Exact().plan(problem, 0.0)
            except InfeasibleError:
                continue
            found.setdefault(solver.name, []).append(cost.dollars_per_hour / optimum.dollars_per_hour - 1.0)
    return found


def _table(problem: ServingProblem, rows: Sequence[ServedCost]) -> Table:
    table = Table("threshold", "solver", "$/h", "workers", "links", "accuracy", "seconds", title=problem.name)
    for row in rows:
        workers, links = row.worker_dollars_per_hour, row.link_dollars_per_hour
        prices = ("no plan", "", "")
        if workers is not None and links is not None:
            prices = (f"{workers + links:.4f}", f"{workers:.4f}", f"{links:.4f}")
        table.add_row(f"{row.threshold:g}", row.solver, *prices, f"{row.accuracy or ''}", f"{row.seconds:.2f}")
    return table


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("problem", nargs="?", default="vqa-medium", help="a file, or a name that ships")
    parser.add_argument("--random", type=int, metavar="N", help="compare on N random problems instead")
    parser.add_argument("--json", action="store_true", help="print one line of JSON per row")
    given = parser.parse_args()
    if given.random:
        for name, found in excesses(given.random).items():
            print(
                f"{name}: {len(found)} problems, optimal in {sum(each < 1e-6 for each in found)}, "
                f"{statistics.mean(found):.1%} above the optimum on average, {max(found):.1%} at most"
            )
        return
    problem = read_serving_problem(given.problem)
    rows = costs(problem)
    if given.json:
        print(*(json.dumps(asdict(row)) for row in rows), sep="\n")
    else:
        Console().print(_table(problem, rows))


if __name__ == "__main__":
    main()
