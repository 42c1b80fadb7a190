"""Plan the evaluation of Alpa and compare: `python -m benchmarks.alpa_paper --case gpt-39B --out FILE.json`.

The 21 models of Zheng et al. (OSDI 2022) on 1 to 64 V100s: the plans of our search, the plans that Alpa published, the
plans of the systems that it was compared with, and the best of a grid of manual plans, all priced by one cost model on
the described cluster. Published measurements are listed next to them (`benchmarks.alpa.fixed_plans`). Plans are
compared with each other as XLA ran them at the time; a prediction that is compared with a measurement of other software
assumes that software's execution. TFLOPS per device include recomputation, as in the paper
(`alpa_lite.cli.models.alpa_cases`).
The output ends with the paper's claims that the predictions confirm, and those that they do not.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from alpa_lite.cli.models.alpa_cases import FAMILIES, PUBLISHED, Case
from alpa_lite.inspection.text.progress_bar import shown_progress
from alpa_lite.plan.progress import Progress
from alpa_lite.planners import Auto
from benchmarks.alpa.fixed_plans import NO_MANUAL_PLAN, FixedPlan, fixed_plans
from benchmarks.alpa.manual_grid import grid_prices
from benchmarks.alpa.orderings import Claim, orderings
from benchmarks.alpa.price import Desk, Price, best
from benchmarks.alpa.verdicts import OURS, RIVALS, no_manual_plan, verdicts

_COLUMNS = (
    "case",
    "plan of",
    "plan",
    "micro-batches",
    "planned in",
    "step",
    "TFLOPS",
    "as it ran",
    "measured",
    "ratio",
    "peak",
)


def prices_of(case: Case, *, search: bool, grid: bool, say: Callable[[str], None]) -> Iterator[Price]:
    """Yield the price of our plan first, then of the published plans, then of the best of the grid."""
    found: list[Price] = []
    for plan in fixed_plans(case):
        say(f"{case.id}: {plan.system}")
        found.append(Desk().price(plan))
    if grid and (manual := best_of_grid(case, say)) is not None:
        found.append(manual)
    if search:
        found.insert(0, searched(case, counts_to_search(case, found), say))
    yield from found


def counts_to_search(case: Case, known: Sequence[Price]) -> tuple[int, ...]:
    """Return the numbers of micro-batches of Alpa's plan (an input of its search) and of each rival's best plan."""
    rivals = [best([price for price in known if price.system in systems]) for systems in RIVALS.values()]
    scaled = (each.num_microbatches * case.global_batch // each.global_batch for each in rivals if each is not None)
    return tuple(dict.fromkeys((case.num_microbatches, *scaled)))


def best_of_grid(case: Case, say: Callable[[str], None]) -> Price | None:
    """Return the best manual plan; None if none fits."""
    tried: list[Price] = []
    for price in grid_prices(Desk(), case):
        say(f"{case.id}: {price.plan}, {price.num_microbatches} micro-batches")
        tried.append(price)
    return best(tried)


def searched(case: Case, counts: Sequence[int], say: Callable[[str], None]) -> Price:
    """Return the best plan of our search over some numbers of micro-batches; planning times are summed over them."""
    tried: list[Price] = []
    progress = say if isinstance(say, Progress) else Progress()
    for count in counts:
        say(f"{case.id}: search with {count} micro-batches")
        # Plans as in the paper: all arrays on the devices.
        planner = Auto(idle_devices=False, host_memory=False)
        fixed = FixedPlan(system=OURS, case=case, planner=planner, num_microbatches=count)
        tried.append(Desk(progress=progress).price(fixed))
    return replace(best(tried) or tried[0], planning_seconds=sum(price.planning_seconds for price in tried))


def rendered(prices: Sequence[Price]) -> Table:
    """Return the table, grouped by case."""
    table = Table(*_COLUMNS, title="Alpa's evaluation: predicted and measured")
    for column in table.columns[3:]:
        column.justify = "right"
    for number, price in enumerate(prices):
        last = number + 1 == len(prices) or prices[number + 1].case != price.case
        first = number == 0 or prices[number - 1].case != price.case
        table.add_row(
            price.case if first else "",
            price.system,
            price.plan,
            str(price.num_microbatches),
            f"{price.planning_seconds:.1f} s",
            _shown(price.seconds, "{:.2f} s", "does not fit"),
            _shown(price.tflops, "{:.2f}"),
            _shown(price.as_run_tflops if price.as_run_tflops != price.tflops else None, "{:.2f}"),
            _shown(price.measured_tflops, "{:.2f}"),
            _shown(price.ratio, "{:.2f}"),
            _shown(None if price.peak_bytes is None else price.peak_bytes / 2**30, "{:.1f} GiB"),
            end_section=last,
        )
    return table


def _shown(value: float | None, form: str, missing: str = "") -> str:
    return missing if value is None else form.format(value)


def show_claims(claims: Sequence[Claim], console: Console) -> None:
    """Print the claims that hold, then those that do not."""
    for holds, title in ((True, "Holds"), (False, "Does not hold")):
        some = [claim for claim in claims if claim.holds is holds]
        console.print(f"\n{title} ({len(some)} of {len(claims)})")
        for claim in some:
            console.print(f"  {claim.text}: {claim.figures}", markup=False, highlight=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments, plan, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [case.id for case in PUBLISHED]
    parser.add_argument("--case", action="append", choices=names, metavar="ID", help="such as gpt-39B (default: all)")
    parser.add_argument("--family", action="append", choices=FAMILIES, help="default: all")
    parser.add_argument("--no-search", action="store_true", help="only the plans that others made")
    parser.add_argument("--no-grid", action="store_true", help="of manual plans only those that are published")
    parser.add_argument("--no-orderings", action="store_true", help="leave out the ablations")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="keep the figures")
    given = parser.parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 180)
    chosen = [case for case in PUBLISHED if _wanted(case, given.case, given.family)]
    prices: list[Price] = []
    claims: list[Claim] = []
    with shown_progress("compare") as say:
        for case in chosen:
            found = list(prices_of(case, search=not given.no_search, grid=not given.no_grid, say=say))
            claims += verdicts(found)
            if case.id in NO_MANUAL_PLAN and not given.no_grid:
                claims.append(no_manual_plan(case, found))
            prices += found
        if not given.no_orderings:
            claims += orderings(say)
    console.print(rendered(prices))
    show_claims(claims, console)
    if given.out is not None:
        rows = [{**asdict(price), "ratio": price.ratio} for price in prices]
        kept = {"rows": rows, "claims": [asdict(claim) for claim in claims]}
        given.out.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    return 0


def _wanted(case: Case, names: Sequence[str] | None, families: Sequence[str] | None) -> bool:
    if names is None and families is None:
        return True
    return case.id in (names or ()) or case.family in (families or ())


if __name__ == "__main__":
    raise SystemExit(main())
