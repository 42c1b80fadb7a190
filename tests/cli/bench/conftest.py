"""Rows that were made up, and those of a small model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import alpa_lite as al
from alpa_lite.cli.bench.entries import PlannedEntry, contest_of, planned_entries
from alpa_lite.cli.bench.request import BenchTarget, find_target, named_contenders
from alpa_lite.cli.bench.row import Environment, Row, row_of_data

CLUSTER = al.cluster("p3.16xlarge")
ENVIRONMENT = Environment(git="abc", versions={"jax": "1"}, machine="a <machine>")
MADE_UP: dict[str, Any] = {
    "model": "model",
    "cluster": "cluster",
    "num_devices": 8,
    "planner": "data parallel",
    "searched": False,
    "auto": False,
    "batch_size": 32,
    "plan": "1 stage (8)",
    "num_microbatches": 1,
    "num_stages": 1,
    "planning_seconds": 0.5,
    "solver_status": "optimal",
    "solver_gap": 0.1,
    "predicted_step_seconds": 2.0,
    "predicted_likely_seconds": [1.8, 2.4],
    "predicted_peak_bytes": 2.0**30,
    "simulated_step_seconds": 2.0,
    "communication_seconds": 0.5,
    "idle_seconds": 0.25,
}


@pytest.fixture
def row() -> Callable[..., Row]:
    """Makes a row."""
    return lambda **changes: row_of_data({**MADE_UP, **changes})


@pytest.fixture
def auto_row() -> Callable[..., Row]:
    """Makes a row of the search."""
    return lambda **changes: row_of_data({**MADE_UP, "planner": "auto", "searched": True, "auto": True, **changes})


@pytest.fixture(scope="session")
def target() -> BenchTarget:
    """A small model."""
    return find_target("mlp-tiny")


@pytest.fixture(scope="session")
def entries(target: BenchTarget) -> list[PlannedEntry]:
    """Its plans: two alike, and one that cannot be made."""
    contenders = named_contenders(["auto:intra_op_only=1,data_parallel,pipeline,hybrid:data=8,hybrid:data=3"], CLUSTER)
    return list(planned_entries(contest_of(target, CLUSTER), contenders, ["auto"], lambda _: None))
