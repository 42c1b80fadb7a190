"""The built site needs no network, its search works without a server, and its home page shows all of its code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.docs.run_pages import BLOCK

ROOT = Path(__file__).parents[2]
_FETCHED = re.compile(
    r"<(?:script|img|iframe)[^>]*src=\"?(https?:[^\" >]+)|<link[^>]*rel=\"?stylesheet[^>]*(https?:[^\" >]+)"
)


@pytest.mark.slow
def test_nothing_is_fetched_from_other_hosts(built_site: Path) -> None:
    pages = list(built_site.rglob("*.html"))
    assert len(pages) > 40
    assert not [(page.name, found[0]) for page in pages if (found := _FETCHED.findall(page.read_text()))]


def test_code_of_the_home_page_fits_beside_its_navigation() -> None:
    (code,) = BLOCK.findall((ROOT / "docs" / "index.md").read_text())
    assert max(map(len, code.splitlines())) <= 76


@pytest.mark.slow
def test_search_colours_and_copying_work_in_pages_opened_as_files(built_site: Path, browser: Any) -> None:
    page = browser.new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto((built_site / "index.html").as_uri())
    page.click(".md-search__input")
    page.keyboard.type("zero-bubble", delay=30)
    page.locator(".md-search-result__item").first.wait_for()
    assert "Schedules" in page.locator(".md-search-result__list").inner_text()
    page.keyboard.press("Escape")
    for scheme, paper in (("dark", "slate"), ("light", "default")):
        page.locator(f"input[data-md-color-media='(prefers-color-scheme: {scheme})']").evaluate("e => e.click()")
        assert page.locator("body").get_attribute("data-md-color-scheme") == paper
        assert page.locator("article img").first.evaluate("e => getComputedStyle(e).colorScheme") == scheme
    assert page.locator("article .md-code__button").count() == 1
    assert page.evaluate("document.querySelector('pre code').scrollWidth <= document.querySelector('pre').clientWidth")
    assert said == []
