"""Settings of other trainers as plans: what they say, and that exported plans come back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import alpa_lite as al
from alpa_lite.errors import PlanError
from alpa_lite.planners import Hybrid, TrainerConfiguration
from alpa_lite.planners.by_name import planner_by_name
from alpa_lite.planners.trainer_configuration import settings_of
from alpa_lite.schedule import GPipe, Interleaved1F1B, OneFOneB, ZeroBubbleV

WIDTH, LAYERS, SAMPLES = 32, 4, 32


def step(state: Any, batch: Any) -> Any:
    """Layers in a loop, with momentum."""
    params, momentum = state

    def loss(params):
        def layer(x, weights):
            return x + jax.nn.relu(x @ weights["up"]) @ weights["down"], None

        return jnp.mean((jax.lax.scan(layer, batch["x"], params)[0] - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
    return (jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum), momentum), value


def _shaped(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


PARAMS = {"up": _shaped(LAYERS, WIDTH, 4 * WIDTH), "down": _shaped(LAYERS, 4 * WIDTH, WIDTH)}
BATCH = {name: _shaped(SAMPLES, WIDTH) for name in "xy"}


def _plan(planner: Any, num_microbatches: int | str = "auto", samples: int = SAMPLES) -> al.Plan:
    batch = {name: _shaped(samples, WIDTH) for name in "xy"}
    return al.plan(
        step, (PARAMS, PARAMS), batch, cluster="dgx-1", planner=planner, num_microbatches=num_microbatches, cache=False
    )


@pytest.mark.parametrize(
    ("trainer", "planner", "number"),
    [
        ("megatron", Hybrid(data=8, zero=1), 2),
        ("megatron", Hybrid(data=8), 1),
        ("megatron", Hybrid(tensor=4, data=2, projections=True), 2),
        ("megatron", Hybrid(pipeline=2, tensor=2, data=2, zero=1, projections=True), 4),
        ("megatron", Hybrid(pipeline=2, data=4, schedule=Interleaved1F1B(num_chunks=2)), 4),
        ("nemo", Hybrid(data=8, zero=1), 2),
        ("nemo", Hybrid(pipeline=2, tensor=2, data=2, projections=True), 4),
        ("nemo", Hybrid(pipeline=2, data=4, schedule=Interleaved1F1B(num_chunks=2)), 4),
        ("torchtitan", Hybrid(data=8, zero=3), 2),
        ("torchtitan", Hybrid(data=8, replicas=2, zero=3), 1),
        ("torchtitan", Hybrid(data=8), 4),
        ("torchtitan", Hybrid(pipeline=2, data=4, schedule=ZeroBubbleV()), 4),
        ("maxtext", Hybrid(data=8), 2),
        ("maxtext", Hybrid(data=8, zero=1), 1),
        ("maxtext", Hybrid(data=8, replicas=2, zero=3), 2),
        ("maxtext", Hybrid(tensor=4, data=2, projections=True, sequence_parallel=False, remat="full"), 2),
        ("maxtext", Hybrid(pipeline=2, tensor=2, data=2, zero=1, projections=True, schedule=GPipe()), 4),
        ("deepspeed", Hybrid(data=8, zero=3), 2),
        ("deepspeed", Hybrid(pipeline=2, data=4, zero=1), 4),
    ],
)
def test_an_exported_plan_comes_back(trainer: str, planner: Hybrid, number: int) -> None:
    plan = _plan(planner, number)
    text = plan.export(trainer)
    back = _plan(TrainerConfiguration(trainer=trainer, settings=text))
    assert back.num_microbatches == number and back.schedule == plan.schedule
    assert back.export(trainer) == text
    # One stage is priced whole; the cut of the other plans is the same, and so are their prices.
    assert back.prediction.step_seconds == pytest.approx(plan.prediction.step_seconds, rel=1e-9)


def test_flags_of_a_launch_script_are_read(tmp_path: Path) -> None:
    flags = """
    --num-layers 32 --lr 3e-4 \\
    --tensor-model-parallel-size=4 --pipeline-model-parallel-size 4  # inside of hosts
    --num-layers-per-virtual-pipeline-stage 2 --micro_batch_size 2 --global-batch-size 1024
    --use-distributed-optimizer --sequence-parallel --recompute-activations
    """
    found = settings_of("megatron", flags)
    assert (found.tensor, found.pipeline, found.samples, found.batch_size) == (4, 4, 2, 1024)
    assert found.schedule == Interleaved1F1B(num_chunks=4)
    assert (found.zero, found.sequence_parallel, found.remat) == (1, True, "selective")
    (tmp_path / "flags.sh").write_text(flags)
    assert settings_of("megatron", str(tmp_path / "flags.sh")) == found
    plain = settings_of("megatron", "--global-batch-size 8")
    assert (plain.schedule, plain.zero, plain.remat, plain.samples) == (OneFOneB(), 0, "none", 1)
    # What torchtitan does where nothing is said.
    default = settings_of("torchtitan", "[training]\nlocal_batch_size = 4")
    assert (default.zero, default.remat, default.shards, default.samples) == (3, "selective", None, 4)


def test_an_edited_file_is_another_planner(tmp_path: Path) -> None:
    file = tmp_path / "flags.sh"
    found = []
    for size in (1, 2):
        file.write_text(f"--micro-batch-size {size}")
        found.append(planner_by_name(f"megatron:{file}", ()))
    # Cached plans go by the planner's value.
    assert found[0] != found[1] and found[0] == TrainerConfiguration(
        trainer="megatron", settings="--micro-batch-size 1"
    )


def test_the_name_on_the_command_line_holds_the_settings() -> None:
    planner = planner_by_name("megatron:--tensor-model-parallel-size 2 --micro-batch-size 4", ())
    plan = _plan(planner)
    assert plan.num_microbatches == 2 and dict(plan.stages[0].mesh_shape.axis_sizes) == {"data": 4, "model": 2}
    assert plan.name.startswith("megatron settings (")
    with pytest.raises(PlanError, match="take no options"):
        planner_by_name("megatron:--micro-batch-size 4", ("pipeline=2",))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ("megatron:--tensor-model-parallel-size 3", "whose product 3 does not divide the 8 devices"),
        ("megatron:--global-batch-size 64", "of a batch of 64 samples, but the step has 32"),
        ("megatron:--micro-batch-size 3", "of a batch of 24 samples, but the step has 32"),
        ("megatron:--tensor-model-parallel-size two", "cannot be read"),
        ("megatron:--num-layers-per-virtual-pipeline-stage 2", "needs --num-layers"),
        ("megatron:--recompute-granularity some", "recomputation 'some' is none of"),
        ("torchtitan:[parallelism", "cannot be read"),
        ("torchtitan:[parallelism]\ndata_parallel_shard_degree = 4", "say 1 × 4 data-parallel devices"),
        ("maxtext:settings.yml", "no file of that name"),
        ('deepspeed:{"train_micro_batch_size_per_gpu": "auto"}', "needed, as a number"),
        ("megatron:flags.sh", "no file of that name"),
        ("megatronn:--micro-batch-size 4", "Did you mean 'megatron'"),
    ],
)
def test_settings_that_say_no_plan_are_refused(settings: str, why: str) -> None:
    with pytest.raises(PlanError, match=why):
        _plan(planner_by_name(settings, ()))


def test_a_number_of_micro_batches_beside_the_settings_is_refused() -> None:
    with pytest.raises(PlanError, match="num_microbatches=8 was asked for"):
        _plan(TrainerConfiguration(trainer="megatron", settings="--micro-batch-size 2"), 8)
