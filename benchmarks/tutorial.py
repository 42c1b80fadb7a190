"""Run the Python of `docs/tutorial.md` and keep one step of it: `python -m benchmarks.tutorial --out FILE.json`.

Kept are the tasks and transfers of the step as simulated and as measured, from which pictures of the page are drawn,
and the first and the last loss. Needs eight devices (`alpa-lite doctor` says how to have virtual ones). The plan for
devices that one does not have is made anew for its pictures, and for its page in docs/pages.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import sys
import tempfile
import types
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax

import alpa_lite as al
from alpa_lite.cli.bench.row import here
from alpa_lite.inspection.page.html import plan_html
from alpa_lite.schedule.tasks import SpanLike
from benchmarks.charts import TimedTask, spans_svg

_ROOT = Path(__file__).parents[1]
PAGE = _ROOT / "docs" / "tutorial.md"
PLAN_PAGE = _ROOT / "docs" / "pages" / "tutorial-plan.html"
KEPT = _ROOT / "benchmarks" / "results" / "tutorial.json"
_SHOWN = re.compile("forward|backward|update|gradient|send", re.IGNORECASE)


def namespace(until: str = "") -> dict[str, Any]:
    """Return the names that the Python of the page leaves behind, by its first block with the words `until`."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    last = next((number for number, block in enumerate(blocks) if until and until in block), len(blocks))
    module = types.ModuleType("tutorial")
    sys.modules[module.__name__] = module
    # The name of a file without a folder: plans keep the lines of the code that they were made from.
    exec(compile("\n".join(blocks[: last + 1]), "tutorial.py", "exec"), module.__dict__)
    return module.__dict__


@functools.cache
def described_plan() -> al.Plan:
    """Return the plan of the page for devices that one does not have."""
    return namespace(until="described = al.plan(")["described"]


def plan_page() -> str:
    """Return the page of that plan."""
    return plan_html(described_plan())


def without_times(page: str) -> str:
    """Return the page of a plan without what differs from run to run: seconds of planning, date and version."""
    return re.sub(r"found in [\d.]+ \w+|\d{4}-\d\d-\d\d by alpa_lite [\w.+]+", "", page)


def timed(spans: Iterable[SpanLike]) -> list[TimedTask]:
    """Return the tasks and transfers among the instructions of a step; bookkeeping takes no time and is left out."""
    return [
        TimedTask(stage=span.stage, kind=name, start=round(span.start_seconds, 7), end=round(span.end_seconds, 7))
        for span in spans
        if _SHOWN.search(name := f"{getattr(span, 'name', '')} {getattr(span.kind, 'value', span.kind)}".strip())
    ]


def kept() -> dict[str, Any]:
    """Return what was kept of the last run."""
    return json.loads(KEPT.read_text(encoding="utf-8"))


def timeline_svg(which: str) -> str:
    """Return the kept step as `which` says, "simulated" or "measured"."""
    tasks = [TimedTask(**task) for task in kept()[which]]
    return spans_svg(tasks, max(task.end for task in tasks))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the page in an empty folder and keep the step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json", help="keep the step")
    given = parser.parse_args(argv)
    out = given.out.resolve()
    os.chdir(tempfile.mkdtemp())
    found = namespace()
    step = {
        "environment": asdict(here(jax.devices()[0].device_kind)),
        "losses": [found["losses"][0], found["losses"][-1]],
        **{name: [asdict(task) for task in timed(found[name])] for name in ("simulated", "measured")},
    }
    out.write_text(json.dumps(step) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
