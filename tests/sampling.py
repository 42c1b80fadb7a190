"""Which cases of long parametrised tests `make test` runs; `make test-all` runs all of them.

A test function whose cases together take longer than `BUDGET_SECONDS` is sampled: every n-th case runs, and the others
are marked slow. `tests/sampled.json` holds n for each of these functions. So every function stays in `make test` with
at least one case, unless its shortest case alone takes longer than `LONGEST_SECONDS` (n = 0).

Renew the file when tests have changed (one line per test and phase is read from pytest's report):

    pytest -m "not long" --durations=0 --durations-min=0 … | python -m tests.sampling
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("sampled.json")
BUDGET_SECONDS = 0.5
LONGEST_SECONDS = 6.0

_DURATION = re.compile(r"\s*([\d.]+)s (?:call|setup|teardown)\s+(\S.*)")


def function_of(node: str) -> str:
    """Return the node id of a test's function, without the case."""
    return node.partition("[")[0]


def cases_to_skip(nodes: Sequence[str], sampled: dict[str, int]) -> list[int]:
    """Return the positions of the tests that `make test` leaves out."""
    seen: Counter[str] = Counter()
    skipped: list[int] = []
    for position, node in enumerate(nodes):
        function = function_of(node)
        every = sampled.get(function, 1)
        if every == 0 or seen[function] % every:
            skipped.append(position)
        seen[function] += 1
    return skipped


def mark_slow_cases(items: Iterable[Any], slow: Any) -> None:
    """Mark the items of a collection that `make test` leaves out."""
    items = list(items)
    sampled = json.loads(FILE.read_text(encoding="utf-8"))
    for position in cases_to_skip([item.nodeid for item in items], sampled):
        items[position].add_marker(slow)


def sampled_functions(report: Iterable[str]) -> dict[str, int]:
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
        if min(spent) > LONGEST_SECONDS:
            strides[function] = 0
        elif len(spent) > 1 and sum(spent) > BUDGET_SECONDS:
            strides[function] = min(len(spent), math.ceil(sum(spent) / BUDGET_SECONDS))
    return dict(sorted(strides.items()))


if __name__ == "__main__":
    FILE.write_text(json.dumps(sampled_functions(sys.stdin), indent=0) + "\n", encoding="utf-8")
