"""The choice of the cases that `make test` runs."""

import pytest

from tests import sampling
from tests.sampling import cases_to_skip, sampled_functions


def test_a_long_function_keeps_every_nth_case_and_others_keep_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "BUDGET_SECONDS", 2.5)
    monkeypatch.setattr(sampling, "LONGEST_SECONDS", 8.0)
    report = [f"{seconds}s call     a.py::test[{case}]" for case, seconds in enumerate([1.0, 2.0, 3.0, 1.0])]
    report += ["0.5s setup    a.py::test[0]", "7.0s call     a.py::alone", "0.1s call     a.py::quick[0]"]
    report += ["9.5s call     a.py::long", "(7 durations < 0.005s hidden.)"]
    strides = sampled_functions(report)
    assert strides == {"a.py::long": 0, "a.py::test": 3}
    nodes = ["a.py::test[0]", "a.py::alone", "a.py::test[1]", "a.py::test[2]", "a.py::long", "a.py::test[3]"]
    assert cases_to_skip(nodes, strides) == [2, 3, 4]
