"""The choice of the cases that `make test` and `make test-all` run."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests import sampling
from tests.sampling import Budget, cases_to_skip, mark_cases, sampled_functions


def test_a_long_function_keeps_every_nth_case_and_others_keep_all() -> None:
    report = [f"{seconds}s call     a.py::test[{case}]" for case, seconds in enumerate([1.0, 2.0, 3.0, 1.0])]
    report += ["0.5s setup    a.py::test[0]", "7.0s call     a.py::alone", "0.1s call     a.py::quick[0]"]
    report += ["9.5s call     a.py::long", "(7 durations < 0.005s hidden.)"]
    strides = sampled_functions(report, Budget(2.5, 8.0))
    assert strides == {"a.py::long": 0, "a.py::test": 3}
    nodes = ["a.py::test[0]", "a.py::alone", "a.py::test[1]", "a.py::test[2]", "a.py::long", "a.py::test[3]"]
    assert cases_to_skip(nodes, strides) == [2, 3, 4]


class Item:
    """A test of a collection."""

    def __init__(self, nodeid: str, *marks: str) -> None:
        self.nodeid, self.marks = nodeid, {*marks}

    def get_closest_marker(self, name: str) -> bool:
        """As pytest's."""
        return name in self.marks

    def add_marker(self, mark: Any) -> None:
        """As pytest's."""
        self.marks.add(mark.name)


def test_what_make_test_runs_make_test_all_does_not_leave_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "FILE", tmp_path / "sampled.json")
    sampling.FILE.write_text(json.dumps({"slow": {"a::test": 3, "a::alone": 0}, "long": {"a::test": 2, "a::hand": 2}}))
    items = [Item(f"a::test[{case}]") for case in range(5)] + [Item("a::alone"), Item("a::other")]
    items += [Item("a::hand[0]", "slow"), Item("a::hand[1]", "slow"), Item("a::hours", "long")]
    mark_cases(items)
    marks = ["", "long slow", "slow", "", "slow", "slow", "", "slow", "long slow", "long"]
    assert [" ".join(sorted(item.marks)) for item in items] == marks
