"""Why a stage does not fit, in the user's own names."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.inter_op import stage_costs
from alpa_lite.intra_op.limits import Infeasibility
from alpa_lite.intra_op.shortage import Shortage, ValueBytes, explain_shortage
from alpa_lite.planners import Auto, DataParallel, OnMesh, Pipeline, Planner
from cost_models.cluster import with_memory

KIB = 1024.0


def step(params: Any, x: Any) -> Any:
    def loss(p: Any) -> Any:
        return jnp.mean((jnp.tanh(x @ p["wide"]) @ p["back"]) ** 2)

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))


PARAMS = {"wide": np.zeros((64, 256), np.float32), "back": np.zeros((256, 64), np.float32)}
ARGS = (PARAMS, np.zeros((64, 64), np.float32))
PLANNERS = (
    DataParallel(),
    Pipeline(pipeline=2),
    OnMesh(axes={"data": 8}, batch=("data",)),
    Auto(num_layers=2, manual=()),
)


def too_small(memory_bytes: float) -> Any:
    cluster = al.cluster("p3.16xlarge", num_hosts=1)
    return with_memory(cluster, memory_bytes)


@pytest.mark.parametrize("planner", PLANNERS, ids=lambda planner: planner.name)
def test_planners_name_what_is_alive_and_where_it_comes_from(planner: Planner, monkeypatch: pytest.MonkeyPatch):
    found: list[Shortage] = []

    def spy(*args: Any, **options: Any) -> Shortage:
        found.append(explain_shortage(*args, **options))
        return found[-1]

    monkeypatch.setattr(stage_costs, "explain_shortage", spy)
    with pytest.raises(al.errors.InfeasibleError) as caught:
        al.plan(step, *ARGS, cluster=too_small(KIB), planner=planner)
    message = str(caught.value)
    assert "too much, when " in message
    assert "s per step." in message
    assert "test_shortage.py:" in message
    assert found
    for shortage in found:
        held = [each.bytes for each in shortage.values]
        assert held == sorted(held, reverse=True)
        assert sum(held) == shortage.explained.smallest_limit_bytes == shortage.explained.over_bytes + KIB


def test_arguments_go_by_their_names():
    with pytest.raises(al.errors.InfeasibleError) as caught:
        al.plan(step, *ARGS, cluster=too_small(KIB), planner=DataParallel())
    for name in ("params/back float32[256,64]", "params/wide float32[64,256]"):
        assert f"64.00 KiB of {name}, " in str(caught.value)


def shortage(**changes: Any) -> Shortage:
    explained = Infeasibility(
        limit_bytes=10.0, impossible=False, smallest_limit_bytes=30.0, bound_bytes=30.0, choices=(0,), cost=0.5,
        bound=0.5, time=0, over_bytes=20.0,
    )  # fmt: skip
    values = tuple(ValueBytes(name=f"w{i}", bytes=5.0) for i in range(6))
    return Shortage(explained=dataclasses.replace(explained, **changes), when="at the end", values=values)


def test_the_sentence():
    assert shortage().sentence() == (
        "At best it is 20 bytes too much, at the end: 5 bytes of w0, 5 bytes of w1, 5 bytes of w2, 5 bytes of w3, "
        "10 bytes of 2 more. With 30 bytes its work would take 500 ms per step."
    )
    assert shortage(bound_bytes=1.0).sentence(show_bytes="{:.0f} B".format).startswith("At the best found it is 20 B")
    assert shortage(over_bytes=0.0).sentence() == shortage(choices=None).sentence() == ""
