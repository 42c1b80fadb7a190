"""The Python on every page runs, block after block in one process; links lead to files; the contents list all pages."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.docs.run_pages import BLOCK

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
Outcome = Callable[[tuple[Path, ...]], dict[str, str]]
_LINK = re.compile(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)")


def _name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


WITH_PYTHON = [page for page in PAGES if BLOCK.search(page.read_text())]
#: Pages that compile several pipelines.
SLOW = [ROOT / "docs" / f"{name}.md" for name in ("tutorial", "training-loop", "libraries")]
QUICK = [page for page in WITH_PYTHON if page not in SLOW]


def test_the_pages_that_show_python_are_found() -> None:
    shown = {_name(page) for page in WITH_PYTHON}
    recipes = {f"docs/extend/{what}.md" for what in ("primitive", "planner", "solver", "schedule", "device")}
    assert shown >= {"README.md", "docs/index.md", "docs/quickstart.md", "docs/cost-model.md"} | recipes


@pytest.fixture(scope="module")
def outcome_of(python_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Runs some pages, once: page → traceback."""

    @functools.cache
    def run(pages: tuple[Path, ...]) -> dict[str, str]:
        done = subprocess.run(
            [sys.executable, str(ROOT / "tests" / "docs" / "run_pages.py"), *map(str, pages)],
            cwd=tmp_path_factory.mktemp("pages"),
            env=python_environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


@pytest.mark.parametrize("page", QUICK, ids=_name)
def test_python_blocks_run_in_order(page: Path, outcome_of: Outcome) -> None:
    said = outcome_of(tuple(QUICK))[str(page)]
    assert said == "", said


@pytest.mark.slow
@pytest.mark.parametrize("page", SLOW, ids=_name)
def test_python_blocks_of_pages_that_train_run_in_order(page: Path, outcome_of: Outcome) -> None:
    said = outcome_of((page,))[str(page)]
    assert said == "", said


def test_the_command_of_the_quickstart_plans(printed_by_python: Callable[..., str]) -> None:
    """The `alpa-lite` line that plans an example, run as a module."""
    lines = (ROOT / "docs" / "quickstart.md").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("alpa-lite plan plan_without_devices:example")]
    command = ["-m", "alpa_lite.cli", *line.split()[1:]]
    assert "4-stage pipeline" in printed_by_python(*command, cwd=ROOT / "docs" / "examples", timeout=120)


def test_links_lead_to_files() -> None:
    pages = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
    links = [(page, target) for page in pages for target in _LINK.findall(page.read_text())]
    assert len(links) > 20
    assert not [f"{_name(page)}: {target}" for page, target in links if not (page.parent / target).exists()]


def test_the_contents_list_every_page() -> None:
    listed = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    docs = ROOT / "docs"
    assert listed == {page.relative_to(docs).as_posix() for page in docs.rglob("*.md")}


def test_no_page_speaks_of_a_place_on_one_machine() -> None:
    home = os.path.expanduser("~")
    pages = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.py")]
    assert not [_name(page) for page in pages if str(ROOT) in page.read_text() or f"{home}/" in page.read_text()]
