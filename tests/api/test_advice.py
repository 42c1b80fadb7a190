"""Advice: plans are those of their families, exported settings mean them, and sentences say what the numbers say."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import alpa_lite as al
from alpa_lite.api import advice
from alpa_lite.api.advice import Advice, SizedStep
from alpa_lite.cli.models.named_models import model_named
from alpa_lite.planners.trainer_configuration import TrainerConfiguration

MODEL = model_named("llama-8b:num_layers=4:hidden=1024:num_heads=8:inner=4096:vocab_size=8192")
STEP, ARGUMENTS = MODEL.training(32, 512)


@pytest.fixture(scope="module")
def found() -> Advice:
    return al.advise(STEP, *ARGUMENTS, cluster="dgx-a100:2", seconds=1000.0, dollars_per_device_hour=2.0)


def test_each_family_has_its_plan_and_the_last_is_the_fastest(found: Advice) -> None:
    names = [each.family.name for each in found.families]
    assert names == ["FSDP", "MaxText-like", "Megatron-like", "anything"]
    seconds = [each.plan.prediction.step_seconds for each in found.families if each.plan is not None]
    assert len(seconds) == 4 and seconds[3] <= min(seconds) * 1.0001
    assert found.fastest is not None and found.fastest.plan is not None
    assert found.fastest.plan.prediction.step_seconds == min(seconds)


def test_exported_settings_mean_the_plan(found: Advice) -> None:
    """Out and in again: the settings of each trainer are a plan of the same price."""
    given = SizedStep(name="", step=STEP, args=ARGUMENTS, cluster=found.cluster)
    request = advice._search(given, advice._traced(given, None)).request
    exports = found.exports()
    assert set(exports) == {"torchtitan", "maxtext", "megatron"}
    for each in found.families[:3]:
        planner = TrainerConfiguration(trainer=each.family.target, settings=exports[each.family.target])
        again = planner.plan(request)
        assert each.plan is not None
        assert again.prediction.step_seconds == pytest.approx(each.plan.prediction.step_seconds, rel=1e-6)
        assert again.num_microbatches == each.plan.num_microbatches


def test_other_sizes_are_those_of_the_hosts(found: Advice) -> None:
    assert [each.name for each in found.other_sizes] == ["1 host", "4 hosts"]
    plans = [each.plan for each in found.other_sizes if each.plan is not None]
    assert [plan.cluster.num_devices for plan in plans] == [8, 32]
    # The same degrees, with as many data-parallel devices as there are.
    best = found.fastest
    assert best is not None and best.point is not None
    for plan in plans:
        point = replace(best.point, samples=32 // (plan.cluster.num_devices * plan.num_microbatches))
        given = SizedStep(name="", step=STEP, args=ARGUMENTS, cluster=plan.cluster)
        alone = advice._search(given, advice._traced(given, None)).plan_at(point)
        assert isinstance(alone, al.Plan) and alone.prediction.step_seconds == plan.prediction.step_seconds


def test_prices_are_those_of_all_devices(found: Advice) -> None:
    best = found.fastest
    assert best is not None and best.plan is not None
    dollars = found.step_dollars(best.plan)
    assert dollars == pytest.approx(2.0 * 16 * best.plan.prediction.step_seconds / 3600)
    assert "a step costs" in str(found) and "a step costs" not in str(replace(found, dollars_per_device_hour=None))
    assert replace(found, dollars_per_device_hour=None).step_dollars(best.plan) is None


def test_sentences_name_the_fastest_and_what_cannot_be_told_from_it(found: Advice) -> None:
    best = found.fastest
    assert best is not None and best.plan is not None
    assert found.verdicts[0].startswith("The fastest is ") and best.family.name in found.verdicts[0]
    for each in found.families:
        same = each.point == best.point
        assert (each.family.name in found.verdicts[0]) == same
        if not same and each.plan is not None:
            alike = "cannot tell" in str(best.plan.diff(each.plan))
            assert alike == any("cannot tell" in line and each.family.name in line for line in found.verdicts)


def test_without_time_nothing_is_left_unsaid() -> None:
    text = str(al.advise(STEP, *ARGUMENTS, cluster="dgx-a100:2", seconds=1e-9))
    assert "The time ended before the search of FSDP" in text
    assert "4 hosts: no plan. The time was up. Give more seconds." in text


def test_steps_without_a_plan_say_why() -> None:
    def step(weights: jax.Array, x: jax.Array) -> jax.Array:
        return weights - 0.1 * jax.grad(lambda w: jnp.sum((x @ w) ** 2))(weights)

    odd = jax.ShapeDtypeStruct((3, 64), jnp.float32)
    found = al.advise(step, jax.ShapeDtypeStruct((64, 64), jnp.float32), odd, cluster="dgx-1", batch_argnums=1)
    assert found.families[0].plan is None and "FSDP: no plan." in str(found)
