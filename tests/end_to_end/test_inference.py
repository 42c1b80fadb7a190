"""Functions without gradients are pipelined by the schedule of inference, and their outputs put together again."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.errors import PlanError
from alpa_lite.planners import Auto, Hybrid, Pipeline, Planner
from tests.end_to_end.cases import eager_cluster

WIDTH = 16


def _params(num_layers: int = 4) -> list[dict[str, jax.Array]]:
    keys = jax.random.split(jax.random.key(0), num_layers)
    return [
        {"into": jax.random.normal(k, (WIDTH, 3 * WIDTH)) / 4, "back": jax.random.normal(k, (3 * WIDTH, WIDTH)) / 7}
        for k in keys
    ]


def _hidden(params: Any, x: jax.Array) -> jax.Array:
    for layer in params:
        x = x + jnp.tanh(x @ layer["into"]) @ layer["back"]
    return x


def forward(params: Any, x: jax.Array) -> dict[str, jax.Array]:
    y = _hidden(params, x)
    return {"y": y, "length": jnp.sqrt(jnp.sum(y * y, axis=-1))}


def evaluate(params: Any, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    y = _hidden(params, batch["x"])
    right = jnp.argmax(y, axis=-1) == batch["label"]
    return {"loss": jnp.mean((y - batch["x"]) ** 2), "right": jnp.sum(right), "guess": jnp.argmax(y, axis=-1)}


def noisy(params: Any, x: jax.Array, key: jax.Array) -> jax.Array:
    return _hidden(params, x * jax.random.bernoulli(key, 0.8, x.shape))


X = np.random.default_rng(1).normal(size=(16, WIDTH)).astype(np.float32)
CALLS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "forward": (forward, (_params(), X)),
    "evaluate": (evaluate, (_params(), {"x": X, "label": np.arange(16) % WIDTH})),
    "noisy": (noisy, (_params(), X, jax.random.key(3))),
}
PLANS: dict[str, tuple[Planner, int]] = {
    "4 stages": (Pipeline(pipeline=4), 8),
    "2 stages, tensor": (Hybrid(pipeline=2, tensor=4), 4),
    "interleaved": (Hybrid(pipeline=2, schedule=al.schedule.Interleaved1F1B(num_chunks=2)), 4),
    "search, 2 stages": (Auto(pipeline=2, manual=()), 4),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("way", PLANS)
def test_micro_batches_through_stages_give_the_same_outputs(call: str, way: str, devices: Any) -> None:
    fun, args = CALLS[call]
    planner, num_microbatches = PLANS[way]
    step = al.parallelize(fun, cluster=eager_cluster(), planner=planner, num_microbatches=num_microbatches)
    found, expected = step(*args), jax.jit(fun)(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), found, expected)
    plan = step.last_plan
    assert len(plan.stages) > 1 and plan.num_microbatches == num_microbatches
    assert (plan.schedule == al.schedule.Inference()) == (way != "interleaved")


def test_every_task_is_a_forward_and_nothing_is_kept_for_later(devices: Any) -> None:
    fun, args = CALLS["forward"]
    planned = (
        al.parallelize(fun).trace(*args).plan(cluster=eager_cluster(), planner=Pipeline(pipeline=4), num_microbatches=8)
    )
    program = planned.lower().program
    assert {task.kind for task in program.tasks} == {"forward"}
    assert all(stage.cost.activation_bytes == stage.cost.backward_seconds == 0 for stage in planned.last_plan.stages)


def test_a_schedule_of_forward_passes_alone_is_refused_for_a_train_step(devices: Any) -> None:
    def train(params: Any, x: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(lambda p: jnp.mean(_hidden(p, x) ** 2))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    planner = Hybrid(pipeline=2, schedule=al.schedule.Inference())
    with pytest.raises(PlanError, match=r"inference runs forward passes alone, but train computes gradients"):
        al.parallelize(train).trace(_params(), X).plan(
            cluster=eager_cluster(), planner=planner, num_microbatches=4
        ).lower()
