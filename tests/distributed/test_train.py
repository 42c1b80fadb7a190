"""A GPT trained by several processes, under plans of all kinds, is the one that `jax.jit` trains on one device.

Numbers are compared by each process for what it holds (`train`); here is what the plans had to be.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.launched import answers, run

SPMD = ["data_parallel", "data_parallel in micro-batches:rows", "fsdp:blocks", "megatron", "auto:rows"]
PIPELINES = [
    "a stage per process:blocks",
    "two stages",
    "two stages:rows",
    "uneven:blocks",
    "a stage per device",
    "workers and servers:rows",
    "two-dimensional stages:rows",
]


def trained(processes: int, devices: int, model: str, *plans: str) -> list[Any]:
    """What process 0 tells of each plan; the others tell the same."""
    found = answers(run(processes, devices, "-m", "tests.distributed.train", model, *plans, timeout=1500))
    assert set(found) == {*range(processes)}
    told = {number: [(row["plan"], row["stages"], row["sent_bytes"]) for row in rows] for number, rows in found.items()}
    assert all(told[number] == told[0] for number in told) and len(told[0]) == len(plans)
    return found[0]


@pytest.mark.long
def test_stages_inside_processes_and_one_stage_over_all() -> None:
    pipeline, spmd = trained(2, 2, "gpt_plain", "a stage per process:blocks", "fsdp")
    assert pipeline["stages"] == ["devices 0..1", "devices 2..3"] and pipeline["sent_bytes"] > 0
    assert spmd["stages"] == ["devices 0..3"]


@pytest.mark.parametrize("model", ["gpt_plain", "gpt_stacked"])
def test_stages_that_span_processes_and_uneven_ones(model: str) -> None:
    """Processes have devices 0, 1 and 2, 3 and 4, 5."""
    (uneven,) = trained(3, 2, model, "uneven:rows")
    assert uneven["stages"] == ["devices 0..3", "devices 4..4", "devices 5..5"]


@pytest.mark.slow
def test_workers_and_servers_on_processes_of_their_own() -> None:
    (served,) = trained(2, 2, "gpt_plain", "workers and servers:rows")
    assert served["stages"] == ["devices 0..1", "devices 2..2", "devices 3..3"]


@pytest.mark.long
@pytest.mark.parametrize("model", ["gpt", "gpt_stacked"])
@pytest.mark.parametrize(("processes", "devices"), [(2, 4), (4, 2), (3, 2)])
def test_everywhere(processes: int, devices: int, model: str) -> None:
    plans = [*SPMD, *PIPELINES]
    if processes * devices % 4:
        plans.pop()
    trained(processes, devices, model, *plans)
