"""The structure of the packages: rooms, names, imports, sizes; `tests.architecture.measures` prints the figures."""

from __future__ import annotations

import ast
import os
import re

import pytest

from tests.architecture.measures import ROOT, Structure, structure

MOST_LINES = 600
MOST_ENTRIES = 22
"""Rooms and loose modules of `alpa_lite`, with ``__init__`` and the marker of typed packages."""
LONGEST_CHAIN = 32
SHARE_OF_ONE_READER = 0.17


@pytest.fixture(scope="module")
def found() -> Structure:
    return structure()


def test_the_package_has_few_entries() -> None:
    entries = {entry.name for entry in os.scandir(ROOT / "alpa_lite") if not entry.name.startswith("__pycache__")}
    assert len(entries) <= MOST_ENTRIES, entries


def test_only_errors_text_and_the_border_to_jax_are_in_no_room(found: Structure) -> None:
    assert {module.path.stem for module in found.loose} == {"errors", "text", "_jax"}


def test_every_room_says_what_comes_in_what_goes_out_and_what_to_read_first(found: Structure) -> None:
    for module in found.modules.values():
        if module.is_package and module.name.count(".") == 1 and module.name.startswith("alpa_lite."):
            text = ast.get_docstring(module.tree) or ""
            for words in ("Comes in|Input", "Goes out|Output", r"\bRead\b"):
                assert re.search(words, text), (module.name, words)


def test_a_type_has_one_meaning(found: Structure) -> None:
    assert not found.types_of_several_meanings()


def test_a_file_name_occurs_once(found: Structure) -> None:
    # Each package has its exceptions.
    assert set(found.stems_of_several_modules()) <= {"errors"}


def test_no_module_is_both_short_and_read_by_one_neighbour(found: Structure) -> None:
    # Planners and commands are one file each, and a module with tests of its own is more than a piece of its reader.
    tested = {path.stem.removeprefix("test_") for path in (ROOT / "tests").rglob("test_*.py")}
    crumbs = [
        module.name
        for module in found.read_by_one_neighbour
        if module.num_lines < 60
        and not module.name.startswith(("alpa_lite.planners.", "alpa_lite.cli."))
        and module.path.stem not in tested
    ]
    assert not crumbs


def test_few_modules_are_read_by_one_neighbour(found: Structure) -> None:
    assert len(found.read_by_one_neighbour) <= SHARE_OF_ONE_READER * len(found.files)


def test_imports_make_no_cycle_and_no_longer_chain_than_today(found: Structure) -> None:
    # A cycle ends in a RecursionError. The aim is a chain of 18.
    assert len(found.longest_chain()) <= LONGEST_CHAIN


@pytest.mark.parametrize("package", ["alpa_lite", "cost_models", "benchmarks"])
def test_no_module_is_long(package: str) -> None:
    lines = {path: len(path.read_text().splitlines()) for path in (ROOT / package).rglob("*.py")}
    assert lines and not {str(path.relative_to(ROOT)): n for path, n in lines.items() if n > MOST_LINES}


def test_tests_lie_where_the_modules_lie(found: Structure) -> None:
    rooms = {path.name for path in (ROOT / "alpa_lite").iterdir() if (path / "__init__.py").exists()}
    others = {"architecture", "benchmarks", "cost_models", "distributed", "docs", "end_to_end", "fuzz", "golden", "zoo"}
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and not path.name.startswith("__")}
    assert folders <= rooms | others, folders - rooms - others
