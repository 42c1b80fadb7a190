"""What the targets of `Plan.export` can say: `python -m benchmarks.exports`.

Small models of every kind are planned for eight devices in four ways, and each plan is written for each target: how
many of the models are written, and why the others are refused. `--write` keeps the outcome under benchmarks/results,
from which the table of docs/export.md is made (`table`).
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import alpa_lite as al
from alpa_lite.cli.bench.request import ZOO, find_target
from alpa_lite.errors import AlpaLiteError
from alpa_lite.export.targets import TARGETS
from alpa_lite.planners import FSDP, Auto, Hybrid, Megatron, Planner

RESULTS = Path(__file__).parent / "results" / "exports.json"

MODELS = tuple(name for name in ZOO if name.endswith("-tiny"))
"""The models whose plans are exported."""

PLANS: Mapping[str, tuple[Planner, int]] = {
    "FSDP": (FSDP(), 1),
    "2 tensor × 4 data": (Megatron(tensor=2), 1),
    "2 pipeline × 4 data": (Hybrid(pipeline=2, data=4), 4),
    "Auto": (Auto(), 1),
}
"""Planners with their micro-batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """A plan written for a target.

    Attributes:
        refused: why it is not, in a sentence without what differs between models; "" if it is written.
    """

    model: str
    plan: str
    target: str
    refused: str


def exports(model: str, plan: str, targets: Iterable[str] = TARGETS) -> list[Export]:
    """Plan a model in one of the ways of `PLANS`, and write the plan for each target."""
    (planner, num_microbatches), target = PLANS[plan], find_target(model)
    task = {"cluster": "p3.16xlarge", "planner": planner, "num_microbatches": num_microbatches, "cache": False}
    try:
        found = al.plan(target.step, *target.arguments, **task)
    except AlpaLiteError as error:
        return [Export(model=model, plan=plan, target=each, refused=f"no plan: {_kind(error)}") for each in targets]
    return [Export(model=model, plan=plan, target=each, refused=_refusal(found, each)) for each in targets]


def _refusal(plan: al.Plan, target: str) -> str:
    try:
        plan.export(target)
    except AlpaLiteError as error:
        return _kind(error)
    return ""


def _kind(error: AlpaLiteError) -> str:
    """Return the first sentence of an error, without the names and numbers of a model."""
    first = re.split(r"(?<=[a-z\"')])\. ", str(error).replace("\n", " "))[0]
    # Meshes of stages are listed.
    return re.sub(r"(\S+)(?:, \1)+", r"\1", re.sub(r"\d+", "n", first))


def table(rows: Sequence[Export]) -> str:
    """Return the outcome as a Markdown table: for each target and plan how many models are written."""
    plans = list(dict.fromkeys(row.plan for row in rows))
    lines = [" | ".join(["| target", *plans]) + " |", "| --- |" + " --: |" * len(plans)]
    for target in dict.fromkeys(row.target for row in rows):
        cells = [f'`"{target}"`']
        for plan in plans:
            here = [row for row in rows if (row.target, row.plan) == (target, plan)]
            cells.append(f"{sum(not row.refused for row in here)} of {len(here)}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def reasons(rows: Iterable[Export]) -> Counter[tuple[str, str, str]]:
    """Return how many models are refused by target, plan and reason."""
    return Counter((row.target, row.plan, row.refused) for row in rows if row.refused)


def stored() -> list[Export]:
    """Return the outcome that was kept."""
    return [Export(**row) for row in json.loads(RESULTS.read_text())]


def main() -> None:
    """Export all plans, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="names of models, with commas between them")
    parser.add_argument("--write", action="store_true", help=f"keep the outcome in {RESULTS.name}")
    given = parser.parse_args()
    rows = list[Export]()
    for model in given.models.split(","):
        for plan in PLANS:
            rows += exports(model, plan)
            written = [row.target for row in rows if (row.model, row.plan) == (model, plan) and not row.refused]
            print(f"{model}, {plan}: {', '.join(written) or 'nothing'}", flush=True)
    print(table(rows))
    for (target, plan, reason), number in sorted(reasons(rows).items()):
        print(f"{target}, {plan}, {number} models: {reason}")
    if given.write:
        RESULTS.write_text(json.dumps([asdict(row) for row in rows], indent=0) + "\n")


if __name__ == "__main__":
    main()
