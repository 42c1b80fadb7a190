"""docs/primitives.md lists every rule, and every opaque primitive with its reason."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from alpa_lite.rules import known_primitives
from tests.lower.pick import CALLS
from tests.lower.test_fuzz import ELSEWHERE, INSERTED
from tests.rules.opaque import FAMILIES, OPAQUE

PAGE = (Path(__file__).parents[2] / "docs" / "primitives.md").read_text()
LINE = re.compile(r"^\| `([\w-]+)` \| `(.+)` \| (agrees|no rule|differs: [\w, ]+) \| (\d+) \|$", re.MULTILINE)
AGAIN = "Run `PYTHONPATH=. python -m tests.rules.table --write`."


def test_the_page_lists_every_rule():
    listed = [match[1] for match in LINE.finditer(PAGE)]
    assert listed == [p for p in known_primitives() if p not in ELSEWHERE | INSERTED], AGAIN
    assert set(listed) == set(CALLS)


def test_a_drawn_call_of_every_primitive_was_split():
    assert not [match[1] for match in LINE.finditer(PAGE) if match[4] == "0"]


@pytest.mark.parametrize("reason", FAMILIES)
def test_the_page_says_why_primitives_are_opaque(reason):
    assert reason in PAGE and all(f"`{name}`" in PAGE for name in OPAQUE), AGAIN
