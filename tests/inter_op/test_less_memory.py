"""Stages whose program needs more memory than the search sees, as of arrays on the way between them."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import alpa_lite as al
from alpa_lite.inter_op import best_programs
from alpa_lite.plan.plan import Plan
from tests.inter_op.test_stage_costs import chain_step

pytestmark = pytest.mark.slow


def _plan(planner: al.planners.Planner) -> Plan:
    shape = jax.ShapeDtypeStruct
    params, rows = [shape((4096, 4096), jnp.float32)] * 4, shape((4096, 4096), jnp.float32)
    cluster = replace(al.cluster("p3.16xlarge"), num_hosts=2, devices_per_host=2)
    function = al.parallelize(chain_step, cluster=cluster, planner=planner, num_microbatches=4, cache=False)
    plan = function.trace(params, rows).plan().last_plan
    assert plan is not None
    return plan


TWO = al.planners.Auto(pipeline=2, manual=(), idle_devices=False)


def test_a_stage_keeps_the_limit_that_it_had_to_keep_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """First the one stage has too much, then the other: with less for the latter, the former gets nothing back."""
    limits: list[dict[int, float]] = []
    with_less_memory = best_programs.with_less_memory

    def recorded(found, over, before):
        way, within = with_less_memory(found, over, before)
        limits.append(within)
        return way, within

    excesses = iter([{0: 1e3}, {1: 1e3}])
    monkeypatch.setattr(best_programs, "with_less_memory", recorded)
    monkeypatch.setattr(best_programs, "bytes_over", lambda plan: next(excesses, {}))
    assert len(_plan(TWO).stages) == 2
    assert [sorted(each) for each in limits] == [[0], [0, 1]] and limits[1][0] == limits[0][0]


def test_where_no_pipeline_has_room_for_what_is_on_the_way_one_stage_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipeline that cannot be is no reason to look for nothing slower."""
    bytes_over = best_programs.bytes_over
    monkeypatch.setattr(
        best_programs, "bytes_over", lambda plan: {0: 1e15} if len(plan.stages) > 1 else bytes_over(plan)
    )
    plan = _plan(al.planners.Auto(manual=(), idle_devices=False))
    assert len(plan.stages) == 1
    assert plan.prediction.step_seconds <= 1.005 * _plan(al.planners.Auto(intra_op_only=True)).prediction.step_seconds
