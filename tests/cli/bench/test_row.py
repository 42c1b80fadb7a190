"""Rows: their fields, and lines of JSON that give them back."""

import json

import pytest

from alpa_lite.cli.bench.row import here, json_line, row_of_line
from tests.cli.bench.conftest import ENVIRONMENT

PROMISED = {
    "planner",
    "model",
    "cluster",
    "predicted_step_seconds",
    "measured_step_seconds",
    "measured_quartiles",
    "predicted_peak_bytes",
    "allocated_peak_bytes",
    "planning_seconds",
    "solver_status",
    "solver_gap",
    "num_microbatches",
    "num_stages",
    "communication_seconds",
    "idle_seconds",
    "reason",
    "git",
    "versions",
    "machine",
}


def test_a_line_has_what_is_promised_and_gives_the_row_back(row):
    one = row().measured([3.0, 1.0, 2.0, 10.0])
    line = json_line(one, ENVIRONMENT)
    data = json.loads(line)
    assert data.keys() >= PROMISED and "\n" not in line
    assert (data["git"], data["versions"], data["machine"]) == ("abc", {"jax": "1"}, "a <machine>")
    assert row_of_line(line) == one
    assert row_of_line(json_line(row(reason="no"), ENVIRONMENT)) == row(reason="no")


def test_what_was_measured_is_summed_up(row):
    one = row().measured([3.0, 1.0, 2.0, 10.0, 4.0], same_as="auto")
    assert one.measured_step_seconds == 3.0 and one.same_as == "auto"
    assert one.measured_quartiles == pytest.approx((1.5, 7.0))
    assert row().measured([2.5]).measured_quartiles == (2.5, 2.5)


def test_measured_counts_before_predicted(row):
    assert row().step_seconds == 2.0
    assert row().measured([3.0]).step_seconds == 3.0


def test_the_environment_names_versions_and_machine():
    found = here("a device")
    assert found.versions["jax"] and found.machine.endswith("a device")
    assert found.git == "" or len(found.git.rstrip("+")) == 40
