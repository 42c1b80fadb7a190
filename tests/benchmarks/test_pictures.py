"""The pictures of the documentation are those that the code draws today."""

import re
from pathlib import Path

import pytest

from benchmarks import tutorial
from benchmarks.pictures import CHARTS, FOLDER, PICTURES
from tests.inspection.markup import parse

PAGES = [page.read_text(encoding="utf-8") for page in sorted(FOLDER.parent.rglob("*.md"))]


def test_every_picture_is_on_a_page_and_has_words() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(PICTURES)
    shown = [found for page in PAGES for found in re.findall(r"!\[([^\]]+)\]\(pictures/([\w-]+)\.svg\)", page)]
    assert {name for _, name in shown} == set(PICTURES)
    assert all(len(words) > 10 for words, _ in shown)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in CHARTS else pytest.mark.slow) for name in PICTURES]
)
def test_pictures_are_not_stale(name: str) -> None:
    drawn = PICTURES[name]()
    parse(drawn)
    path = Path(FOLDER / f"{name}.svg")
    assert path.read_text(encoding="utf-8") == drawn, f"run python -m benchmarks.pictures: {path.name} is stale"


@pytest.mark.slow
def test_the_page_of_a_plan_in_the_tutorial_is_not_stale() -> None:
    shown = tutorial.PLAN_PAGE.read_text(encoding="utf-8")
    assert tutorial.without_times(shown) == tutorial.without_times(tutorial.plan_page())
    assert "pages/tutorial-plan.html" in tutorial.PAGE.read_text(encoding="utf-8")
