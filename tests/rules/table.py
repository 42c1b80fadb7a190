"""The table of primitives: `python -m tests.rules.table [EXAMPLES] [--write]` prints it, or writes docs/primitives.md.

For each primitive with a rule: the rule in a typical case, how it compares with Shardy's, and how many drawn calls gave
the same numbers on blocks as on whole arrays.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tests.conftest  # noqa: F401  (sets the devices up, before JAX is imported)

import jax  # isort: skip
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh

from alpa_lite.rules import known_primitives
from tests.lower.blocks import assert_blocks_agree
from tests.lower.draws import examples
from tests.lower.pick import CALLS
from tests.rules.opaque import FAMILIES
from tests.rules.row import Row
from tests.rules.rows import ROWS
from tests.rules.shardy import COMBINER, CROPPED, HALO, MINOR, NO_RULE, SUBTRACTED, WINDOW, WRITTEN, reasons

PAGE = Path(__file__).parents[2] / "docs" / "primitives.md"
LABELS = {
    MINOR: "minor factors",
    HALO: "halos",
    WINDOW: "local windows",
    COMBINER: "combiners",
    SUBTRACTED: "subtraction",
    CROPPED: "cropping",
    WRITTEN: "updates",
}
INTRODUCTION = """# Primitives

Every primitive of JAX that alpa_lite can split, as the tests see it. Primitives that are not here are inlined (`jit`,
`remat`, custom derivatives), or control flow whose body is looked into (`scan`, `while`, `cond`), or opaque: each
device runs them whole ([below](#opaque-primitives)).

- **Rule**: the factor rule in a typical case, in Shardy's notation. Factors pass unless they are listed behind it;
  only the major factor of a dim can be split, and a `permutation` counts as `replicated`.
- **Shardy**: how the rule compares with what `sdy-populate-op-sharding-rules` of jaxlib says of the same operation, on
  the rows of the tests and on drawn calls; the differences are explained [below](#differences-from-shardy).
- **Drawn calls**: calls with random shapes, dtypes, parameters and assignments of mesh axes to factors (and to partial
  sums) that gave the same numbers on the blocks of eight devices as on whole arrays. Calls without a dim that the drawn
  mesh divides are not counted.

Made by `PYTHONPATH=. python -m tests.rules.table {count} --write`; the same check runs in the tests
(`tests/lower/test_fuzz.py`, `tests/rules/test_shardy.py`). How to add a primitive: [A primitive](extend/primitive.md).
"""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One primitive."""

    primitive: str
    rule: str
    shardy: str
    passed: int


def line_of(primitive: str, devices: list[Any], count: int) -> Line:
    """Run the fuzz of a primitive; raises when a call disagrees."""
    own = [row for row in ROWS if row.primitive == primitive]
    drawn: list[Row] = []
    passed = 0

    @settings(max_examples=count)
    @given(st.data())
    def agree(data: st.DataObject) -> None:
        nonlocal passed
        example = data.draw(examples(primitive))
        drawn.append(example.row)
        if example.placements:
            mesh = Mesh(np.array(devices).reshape(example.mesh), tuple("xyz"[: len(example.mesh)]))
            assert_blocks_agree(example.case, example.placements, mesh)
            passed += 1

    agree()
    typical = own[0] if own else max(drawn, key=lambda row: (len(row.case.rule.shardable), -len(str(row.case.rule))))
    return Line(
        primitive=primitive, rule=str(typical.case.rule), shardy=_comparison(primitive, own + drawn), passed=passed
    )


def _comparison(primitive: str, rows: list[Row]) -> str:
    if primitive in NO_RULE:
        return "no rule"
    found = {reason for row in rows if row.oracle for reason in reasons(row)}
    return "differs: " + ", ".join(sorted(LABELS[reason] for reason in found)) if found else "agrees"


def table(lines: list[Line]) -> str:
    """The lines in Markdown."""
    text = "| Primitive | Rule | Shardy | Drawn calls |\n|---|---|---|---:|\n"
    return text + "".join(f"| `{x.primitive}` | `{x.rule}` | {x.shardy} | {x.passed} |\n" for x in lines)


def summary(lines: list[Line]) -> str:
    """Counts over the table."""
    count = lambda word: sum(x.shardy.startswith(word) for x in lines)  # noqa: E731
    return (
        f"{len(lines)} primitives have a rule. {count('agrees')} agree with Shardy's, {count('differs')} differ in "
        f"some cases, {count('no rule')} have none there. {sum(x.passed for x in lines)} drawn calls agree on blocks; "
        f"{sum(map(len, map(str.split, FAMILIES.values())))} primitives are opaque.\n"
    )


def page(lines: list[Line], count: int) -> str:
    """docs/primitives.md."""
    differences = "".join(f"- **{label}**: {reason}\n" for reason, label in LABELS.items())
    missing: dict[str, list[str]] = {}
    for name, reason in NO_RULE.items():
        missing.setdefault(reason, []).append(name)
    none = "".join(f"- {reason}: {_names(names)}\n" for reason, names in missing.items())
    opaque = "".join(f"- {reason}: {_names(names.split())}\n" for reason, names in FAMILIES.items())
    sections = [
        INTRODUCTION.format(count=count),
        summary(lines),
        table(lines),
        f"## Differences from Shardy\n\n{differences}\nShardy has no rule of its own for\n\n{none}",
        f"## Opaque primitives\n\n{opaque}",
    ]
    return "\n".join(sections)


def _names(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("examples", nargs="?", type=int, default=20, help="drawn calls per primitive")
    parser.add_argument("--write", action="store_true", help="write docs/primitives.md")
    options = parser.parse_args()
    devices = jax.devices()
    lines = [line_of(p, devices, options.examples) for p in known_primitives() if p in CALLS]
    if options.write:
        PAGE.write_text(page(lines, options.examples))
    print(summary(lines) if options.write else table(lines) + "\n" + summary(lines))


if __name__ == "__main__":
    main()
