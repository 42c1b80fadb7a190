"""The benchmark on one GPU, with small programs on a CPU: plans give the numbers of `jax.jit`, and results are kept."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from benchmarks import on_gpu
from benchmarks.gpu_programs import cases
from cost_models import load_cluster

TINY = {case.name: case for case in cases(tiny=True)}
KEPT = Path(on_gpu.__file__).parent / "results" / "on_gpu.json"


def test_a_program_is_measured(devices: Any) -> None:
    turns: list[int] = []
    cluster = replace(load_cluster("dgx-h100"), num_hosts=1, devices_per_host=1)
    row = on_gpu.measured(TINY["MLP, bf16"], cluster, lambda: turns.append(1))
    assert turns == [1] and row.equal and row.predicted_bytes > 0
    assert 0 < row.plan_seconds and 0 < row.jit_seconds
    assert row == on_gpu.Row(**json.loads(json.dumps(asdict(row))))


def test_differences_of_states() -> None:
    a, b = {"w": jnp.array([3.0, 4.0]), "n": jnp.array([1])}, {"w": jnp.array([3.0, 4.5]), "n": jnp.array([1])}
    whole, largest = on_gpu.difference(a, b, 0.5)
    assert float(whole) == pytest.approx(0.5 / (3**2 + 4.5**2 + 1) ** 0.5)
    assert float(largest) == pytest.approx(0.5 / (4.5 + 0.5))


@pytest.mark.parametrize(
    ("kind", "cluster"), [("NVIDIA H100 80GB HBM3", "dgx-h100"), ("NVIDIA A100-SXM4-40GB", "dgx-a100-40gb")]
)
def test_the_cluster_of_a_device(kind: str, cluster: str) -> None:
    assert on_gpu.cluster_with(kind) == cluster


def test_small_and_large_programs_have_the_same_names() -> None:
    assert {*TINY} < {case.name for case in cases(tiny=False)}


def test_the_kept_figures_are_shown(capsys: Any) -> None:
    found = json.loads(KEPT.read_text())
    assert all(on_gpu.Row(**row).peak_bytes > 0 for row in found["rows"])
    assert len(on_gpu.rendered(found)) == 2


def test_a_process_that_fails_is_a_row_with_its_error(tmp_path: Path) -> None:
    worker = on_gpu.Worker(["--case", "no such program", "--cluster", "dgx-h100", "--tiny"], tmp_path / "log")
    found = worker.run(on_gpu.time.monotonic() + 120)
    worker.end()
    assert "no such program" in found["error"]
