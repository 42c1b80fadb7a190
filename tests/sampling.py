"""Which cases of long parametrised tests `make test` and `make test-all` run.

A test function whose cases together take longer than the budget of a command is sampled: every n-th case runs, and the
others are marked for the next command. `tests/sampled.json` holds n for each of these functions, by mark. So every
function stays with at least one case, unless its shortest case alone takes too long (n = 0).

    mark    left out of           budget of a function    its shortest case, at most
    slow    make test             0.5 s                   6 s
    long    make test-all, too    6 s                     60 s

Renew the file when tests have changed (one line per test and phase is read from pytest's report):

    pytest -m "" --durations=0 --durations-min=0 … | python -m tests.sampling
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

FILE = Path(__file__).with_name("sampled.json")


class Budget(NamedTuple):
    """What a command spends on the cases of one test function, and on the shortest of them."""

    seconds: float
    shortest_seconds: float


BUDGETS = {"slow": Budget(0.5, 6.0), "long": Budget(6.0, 60.0)}
"""By the mark of the cases that are left out; those with the second one are left out of both commands."""

_DURATION = re.compile(r"\s*([\d.]+)s (?:call|setup|teardown)\s+(\S.*)")


def function_of(node: str) -> str:
    """Return the node id of a test's function, without the case."""
    return node.partition("[")[0]


def cases_to_skip(nodes: Sequence[str], sampled: dict[str, int]) -> list[int]:
    """Return the positions of the tests that are left out."""
    seen: Counter[str] = Counter()
    skipped: list[int] = []
    for position, node in enumerate(nodes):
        function = function_of(node)
        every = sampled.get(function, 1)
        if every == 0 or seen[function] % every:
            skipped.append(position)
        seen[function] += 1
    return skipped


def mark_cases(items: Iterable[Any]) -> None:
    """Mark the items of a collection that `make test` leaves out, and those that `make test-all` leaves out too."""
    items = list(items)
    nodes, sampled = [item.nodeid for item in items], json.loads(FILE.read_text(encoding="utf-8"))
    left = {*range(len(items))}
    for mark in BUDGETS:
        marked = {position for position in left if items[position].get_closest_marker(mark)}
        # What `make test` runs `make test-all` does not leave out, whatever the strides.
        left &= marked | {*cases_to_skip(nodes, sampled[mark])}
        for position in left:
            items[position].add_marker(getattr(pytest.mark, mark))


def sampled_functions(report: Iterable[str], budget: Budget) -> dict[str, int]:
    """Return n for each test function that takes too long, from the lines of a report with durations."""
    seconds: Counter[str] = Counter()
    for line in report:
        if found := _DURATION.match(line):
            seconds[found[2].strip()] += float(found[1])
    cases: dict[str, list[float]] = defaultdict(list)
    for node, spent in seconds.items():
        cases[function_of(node)].append(spent)
    strides: dict[str, int] = {}
    for function, spent in cases.items():
        if min(spent) > budget.shortest_seconds:
            strides[function] = 0
        elif len(spent) > 1 and sum(spent) > budget.seconds:
            strides[function] = min(len(spent), math.ceil(sum(spent) / budget.seconds))
    return dict(sorted(strides.items()))


if __name__ == "__main__":
    lines = [*sys.stdin]
    found = {mark: sampled_functions(lines, budget) for mark, budget in BUDGETS.items()}
    FILE.write_text(json.dumps(found, indent=0) + "\n", encoding="utf-8")
