"""What the logger `alpa_lite` says of a call: planning, the plan in a line, its file, programs, and warnings."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite import _jax
from alpa_lite.inspection.text.log_lines import plan_line, plan_warnings
from alpa_lite.planners import FSDP, DataParallel
from alpa_lite.runtime.execute.measure import short_of_memory
from cost_models.cluster import with_memory
from tests.end_to_end.cases import eager_cluster
from tests.runtime.pipelines import arguments, step_with

CLUSTER = eager_cluster()
STEP = step_with([0.5] * 4)


def _messages(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "alpa_lite" and record.levelno == level]


def test_a_first_call_is_told_step_by_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("alpa_lite.api.plan_cache.only_own_rules", lambda: True)
    weights, x = arguments(4)
    with caplog.at_level(logging.INFO, logger="alpa_lite"):
        step = al.parallelize(STEP, cluster=CLUSTER, planner=DataParallel(), cache=tmp_path)
        step(weights, x)
    plan = step.last_plan
    assert plan is not None
    told = "\n".join(_messages(caplog, logging.INFO))
    (file,) = tmp_path.iterdir()
    expected = ["planning by data parallel for", re.escape(plan_line(plan)), re.escape(f"kept in {file}")]
    expected += [r"compiling (\d+) programs?", r"compiled \1 of \1 programs?", "compiled in"]
    assert re.search(".*".join(expected), told, re.DOTALL), told
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="alpa_lite"):
        al.parallelize(STEP, cluster=CLUSTER, planner=DataParallel(), cache=tmp_path).trace(weights, x).plan()
    assert f"from the cache, {file}" in "\n".join(_messages(caplog, logging.INFO))


def test_the_line_of_a_plan() -> None:
    weights, x = arguments(4)
    plan = al.plan(STEP, weights, x, cluster=CLUSTER, planner=al.planners.Pipeline(pipeline=2), num_microbatches=4)
    line = plan_line(plan)
    assert "2 stages on 8 devices, 4 micro-batches, predicted step" in line and "\n" not in line
    assert re.search(r"memory [\d.]+ \w+ of [\d.]+ \w+, gap [\d.]+ %$", line)


WIDTH = 1024
ARRAY_BYTES = 4 * WIDTH**2


def _wide(memory: float, planner: al.planners.Planner) -> al.Plan:
    """A step with one parameter of 4 MiB, on eight devices with so much memory."""

    def step(w: Any, x: Any) -> Any:
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return w - 0.1 * grad, loss

    cluster = with_memory(CLUSTER, memory)
    shape = jax.ShapeDtypeStruct
    return al.plan(
        step, shape((WIDTH, WIDTH), np.float32), shape((64, WIDTH), np.float32), cluster=cluster, planner=planner
    )


def test_arrays_that_every_device_holds_are_warned_about_where_they_are_large() -> None:
    told = plan_warnings(_wide(9 * ARRAY_BYTES, DataParallel()))
    assert "Each of the 8 devices of stage 0 holds 1 array whole, 4.00 MiB in all: w." in told
    assert plan_warnings(_wide(11 * ARRAY_BYTES, DataParallel())) == ""
    assert "holds" not in plan_warnings(_wide(9 * ARRAY_BYTES, FSDP()))


def test_memory_that_is_nearly_full_is_warned_about() -> None:
    plan = _wide(9 * ARRAY_BYTES, DataParallel())
    (peak,) = plan.prediction.peak_bytes
    full, nearly = (replace(plan, cluster=with_memory(plan.cluster, peak / share)) for share in (0.96, 0.94))
    assert "Stage 0 is predicted to use 96.0 % of its devices' memory" in plan_warnings(full)
    assert "predicted to use" not in plan_warnings(nearly)
    kept = replace(full.cluster.device, memory_bytes=2 * full.capacity_bytes(0), memory_reserve=0.5)
    # As full, with as much again for the allocator.
    assert "predicted to use" not in plan_warnings(replace(full, cluster=replace(full.cluster, device=kept)))


def test_memory_that_needs_a_setting_is_warned_about_and_noted() -> None:
    plan = _wide(9 * ARRAY_BYTES, DataParallel())
    (peak,) = plan.prediction.peak_bytes
    device = replace(plan.cluster.device, memory_bytes=peak / 0.8, memory_reserve=0.1)
    more, less = (
        replace(plan, cluster=replace(plan.cluster, device=replace(device, default_memory_fraction=fraction)))
        for fraction in (0.79, 0.81)
    )
    needed = "start it with XLA_CLIENT_MEM_FRACTION=0.9, or plan for less with Auto(max_memory_bytes="
    assert needed in plan_warnings(more) and needed in " ".join(str(more).split())
    assert "MEM_FRACTION" not in plan_warnings(less) + str(less)


def test_allocators_with_less_than_a_plan_needs_are_warned_about(
    devices: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plan = _wide(9 * ARRAY_BYTES, DataParallel())
    (peak,) = plan.prediction.peak_bytes
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()), ("x",))
    last = jax.devices()[-1]
    for limit, told in ((0.99 * peak, True), (1.01 * peak, False)):
        monkeypatch.setattr(_jax, "allocatable_bytes", lambda device, limit=limit: limit if device == last else None)
        sentences = [*short_of_memory(plan, [mesh])]
        assert bool(sentences) == told and all(f"on {last}" in sentence for sentence in sentences)
    monkeypatch.setattr(_jax, "allocatable_bytes", lambda device: 1.0)
    weights, x = arguments(4)
    with caplog.at_level(logging.WARNING, logger="alpa_lite"):
        al.parallelize(STEP, cluster=CLUSTER, planner=DataParallel()).trace(weights, x).plan().lower().compile()
    assert any("JAX's allocator has 1 B on" in message for message in _messages(caplog, logging.WARNING))


def test_idle_devices_are_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    plan = replace(_wide(99 * ARRAY_BYTES, DataParallel()), idle_devices=8)
    assert plan_warnings(plan).startswith("8 of 16 devices stay idle")
    weights, x = arguments(4)
    with caplog.at_level(logging.WARNING, logger="alpa_lite"):
        # Too small for eight devices: the search takes fewer.
        assert al.plan(STEP, weights, x, cluster="p3.16xlarge").idle_devices
    assert any("devices stay idle" in message for message in _messages(caplog, logging.WARNING))
