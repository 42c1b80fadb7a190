"""Predict published training runs and compare: `python -m benchmarks.published_runs --runs FILE.csv --out FILE.json`.

Each row goes the project's ordinary way: its model is traced, its manual plan is made for its cluster, and the plan is
simulated. Rows without a measured step time are predicted only; a row that cannot be built is listed with its reason.
The columns are those that `benchmarks.published.row` reads; the scoring rule is in `benchmarks.published.score`. Beside
the error of each group stands the one with the group left out, and the numbers of the model that were set on measured
steps are counted (`benchmarks.published.parameters`).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.published.ablation import ABLATIONS
from benchmarks.published.parameters import parameters
from benchmarks.published.predict import Predictor
from benchmarks.published.row import RowError, measured_seconds, parse_row, read_rows
from benchmarks.published.score import Outcome, Score, score

Cells = Mapping[str, str]
#: Rows that a process is given at a time: many enough to share what was traced, few enough to share the work.
_BATCH = 6


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The outcome of a row, the breakdown of its time, and its plan."""

    outcome: Outcome
    breakdown: Mapping[str, Any]


def predict_rows(batch: Sequence[Cells], ablation: str) -> list[Prediction]:
    """Predict some rows, in a process of their own."""
    # Planning makes many small objects that stay: to look through them less often saves a fifth of the time.
    gc.set_threshold(100_000, 50, 100)
    predictor = ABLATIONS[ablation](Predictor())
    return [_predict(cells, predictor) for cells in batch]


def _predict(cells: Cells, predictor: Predictor) -> Prediction:
    known: dict[str, Any] = {"id": cells["id"], "group": cells["group"], "hardware": cells["hardware"]}
    try:
        known["measured_seconds"] = measured_seconds(cells)
        run = predictor.predict(parse_row(cells))
    except RowError as error:
        known.setdefault("measured_seconds", None)
        return Prediction(outcome=Outcome(predicted_seconds=None, reason=str(error), **known), breakdown={})
    outcome = Outcome(predicted_seconds=run.seconds, likely_seconds=run.plan.likely_seconds, **known)
    return Prediction(outcome=outcome, breakdown=run.breakdown())


def all_predictions(rows: Sequence[Cells], ablation: str, num_processes: int) -> Iterator[Prediction]:
    """Yield the predictions of all rows as they arrive; rows of one model share a process, which traces it once."""
    models = [list(batch) for _, batch in groupby(rows, key=lambda cells: (cells["group"], cells["model"]))]
    batches = [model[i : i + _BATCH] for model in models for i in range(0, len(model), _BATCH)]
    context = get_context("spawn")
    with ProcessPoolExecutor(num_processes, mp_context=context) as pool:
        for found in pool.map(predict_rows, batches, [ablation] * len(batches)):
            yield from found


def report(found: Score, console: Console) -> None:
    """Print the table of groups."""
    table = Table(title="Step time of published runs: predicted against measured")
    for column in ("group", "rows", "not built", "error", "bias", "largest", "left out", "in range", "left out"):
        table.add_column(column, justify="left" if column == "group" else "right")
    for group in found.groups:
        table.add_row(
            group.group,
            str(group.num_rows),
            str(group.num_failed) if group.num_failed else "",
            *(_percent(x) for x in (group.error, group.bias, group.largest, group.left_out_error)),
            *(_percent(x, 0) for x in (group.covered, group.left_out_covered)),
        )
    table.add_section()
    means = (_percent(found.covered, 0), _percent(found.left_out_covered, 0))
    table.add_row("mean of groups", "", "", _percent(found.error), "", "", _percent(found.left_out_error), *means)
    console.print(table)
    kinds = Counter(parameter.kind for parameter in parameters())
    console.print(
        f"{kinds.total()} numbers were set on measured steps: {kinds['device']} of devices, {kinds['link']} of links, "
        f"{kinds['program']} of programs, {kinds['range']} of the ranges.",
        highlight=False,
    )


def _percent(value: float | None, decimals: int = 1) -> str:
    return "" if value is None else f"{100 * value:.{decimals}f} %"


def to_json(predictions: Sequence[Prediction], found: Score) -> dict[str, Any]:
    """Return rows and groups as plain data."""
    rows = [
        {
            "id": p.outcome.id,
            "predicted_step_seconds": p.outcome.predicted_seconds,
            "likely_step_seconds": p.outcome.likely_seconds,
            "measured_step_seconds": p.outcome.measured_seconds,
            "error": p.outcome.error,
            "breakdown": p.breakdown,
            **({"reason": p.outcome.reason} if p.outcome.reason else {}),
        }
        for p in predictions
    ]
    scores = {name: value for name, value in asdict(found).items() if name != "groups"}
    numbers = [asdict(parameter) for parameter in parameters()]
    return {"rows": rows, "groups": [asdict(group) for group in found.groups], **scores, "parameters": numbers}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", required=True, nargs="+", type=Path, help="tables of runs, CSV, scored together")
    parser.add_argument("--out", type=Path, help="where to write predictions, JSON")
    parser.add_argument("--ablate", action="store_true", help="also switch off each term of the model in turn")
    parser.add_argument("--only", nargs="+", default=(), help="groups, or starts of ids, to predict")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 120)
    rows = [row for path in options.runs for row in read_rows(path)]
    if options.only:
        rows = [c for c in rows if c["group"] in options.only or c["id"].startswith(tuple(options.only))]
    errors: dict[str, float | None] = {}
    for ablation in ABLATIONS if options.ablate else ("nothing",):
        running = all_predictions(rows, ablation, options.processes)
        title = "Predicting" if ablation == "nothing" else f"Without {ablation}"
        predictions = list(track(running, description=title, total=len(rows), console=console))
        found = score([p.outcome for p in predictions])
        errors[ablation] = found.error
        if ablation == "nothing":
            _show(predictions, found, console)
            if options.out:
                options.out.write_text(json.dumps(to_json(predictions, found), indent=1), encoding="utf-8")
    if options.ablate:
        table = Table("switched off", "error", title="Ablation")
        for name, error in errors.items():
            table.add_row(name, _percent(error))
        console.print(table)


def _show(predictions: Sequence[Prediction], found: Score, console: Console) -> None:
    for p in predictions:
        if p.outcome.reason:
            console.print(f"{p.outcome.id}: {p.outcome.reason}", markup=False, highlight=False)
    report(found, console)
    known = [p.outcome for p in predictions if p.outcome.error is not None]
    for outcome in sorted(known, key=lambda o: -abs(o.error or 0.0))[:3]:
        console.print(
            f"{outcome.id}: {outcome.predicted_seconds:.4g} s predicted, {outcome.measured_seconds:.4g} s measured, "
            f"{_percent(outcome.error)}",
            markup=False,
            highlight=False,
        )


if __name__ == "__main__":
    main()
