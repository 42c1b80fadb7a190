"""How well the plan's collectives match the compiled programs: `python -m tests.zoo.fidelity [program ...]`.

Prints one row per program and planner: the collectives of one step by the plan, in the program handed to XLA, in the
executables, and which share of the plan's is found in these, each counted as often as it runs.
"""

from __future__ import annotations

import tests.conftest  # noqa: F401  # sets up the virtual devices before JAX is imported

# isort: split
import sys
from collections import defaultdict

import alpa_lite as al
from tests.end_to_end.cases import parallel
from tests.end_to_end.collectives import Counts, beyond, emitted, handed_over, planned
from tests.zoo.registry import PROGRAMS, load

SHOWN = ("data_parallel", "fsdp", "megatron", "pipeline_2", "hybrid")


def _share(part: Counts, whole: Counts) -> float:
    total = sum(whole.values())
    return sum(min(number, part.get(c, 0)) for c, number in whole.items()) / total if total else 1.0


def _kinds(counts: Counts) -> dict[str, float]:
    """How many of each kind, scalars apart."""
    total: dict[str, float] = defaultdict(float)
    for (kind, size, _), number in counts.items():
        total[f"{kind} of a scalar" if size <= 8 else kind] += number
    return total


def _notes(left_out: Counts, added: Counts) -> list[str]:
    """What XLA did. Kinds that are both missing and added were widened: it has no collectives of bfloat16 on CPU."""
    missing, more = _kinds(left_out), _kinds(added)
    resized = {kind: min(missing[kind], more[kind]) for kind in missing if kind in more}
    what = {
        "sent as float32": resized,
        "left out": {kind: n - resized.get(kind, 0) for kind, n in missing.items()},
        "added": {kind: n - resized.get(kind, 0) for kind, n in more.items()},
    }
    listed = {verb: ", ".join(f"{n:g} {kind}" for kind, n in sorted(k.items()) if n) for verb, k in what.items()}
    return [f"XLA {verb} {text}" for verb, text in listed.items() if text]


def row(name: str, planner: str) -> str:
    """One line of the table."""
    program = PROGRAMS[name]()
    step = parallel(program, planner)
    try:
        compiled = step.compiled(program.state, *program.inputs)
    except al.errors.AlpaLiteError as error:
        return f"| {name} | {planner} | – | – | – | – | – | refused: {str(error)[:60]}… |"
    plan, given, made = planned(compiled.plan), handed_over(compiled), emitted(compiled)
    left_out, added = beyond(plan, made), beyond(made, plan)
    notes = _notes(left_out, added)
    numbers = [f"{sum(c.values()):g}" for c in (plan, given, made)]
    shares = f"{_share(given, plan):.0%} | {_share(made, plan):.0%}" if not beyond(given, plan) else "ADDED | –"
    return f"| {name} | {planner} | {' | '.join(numbers)} | {shares} | {'; '.join(notes)} |"


def main(names: list[str]) -> None:
    """Print the table."""
    load()
    print("| program | planner | planned | handed to XLA | compiled | match handed | match compiled | notes |")
    print("|---|---|---:|---:|---:|---:|---:|---|")
    for name in names or PROGRAMS:
        for planner in SHOWN:
            print(row(name, planner), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
