"""Plans under schedules that the search does not search for: stages that go back and forth, orders of its own."""

from dataclasses import replace
from itertools import pairwise

import jax
import jax.numpy as jnp
import pytest

import alpa_lite as al
from alpa_lite.schedule import SCHEDULES, AsynchronousSchedule, Inference, Synthesised
from tests.inter_op.test_stage_costs import chain_step


@pytest.mark.slow
def test_a_pipeline_that_waits_gets_a_better_order_than_1f1b() -> None:
    """Uneven layers on devices with a slow network: the plan is no slower than under any schedule that one can name."""
    shape = jax.ShapeDtypeStruct
    widths = (4096, 8192, 4096, 16384, 4096, 12288, 4096, 4096, 8192)
    params = [shape((a, b), jnp.float32) for a, b in pairwise(widths)]
    batch = shape((256, widths[0]), jnp.float32)
    traced = al.parallelize(chain_step, cache=False).trace(params, batch)
    cluster = replace(al.cluster("p3.16xlarge"), num_hosts=4, devices_per_host=1)

    def seconds(planner: al.planners.Planner, num_microbatches: int) -> tuple[float, al.Plan]:
        plan = traced.plan(cluster=cluster, planner=planner, num_microbatches=num_microbatches, cache=False).last_plan
        assert plan is not None
        return plan.prediction.step_seconds, plan

    best, plan = seconds(al.planners.Auto(manual=()), 8)
    assert len(plan.stages) > 1
    assert isinstance(plan.schedule, Synthesised)
    others = (Inference, AsynchronousSchedule)
    by_name = [s for s in SCHEDULES if s.stages_per_processor == 1 and not isinstance(s, others)]
    for schedule in by_name:
        assert best <= seconds(al.planners.Auto(manual=(), schedule=schedule), 8)[0] * 1.005
