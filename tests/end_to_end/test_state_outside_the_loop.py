"""State that no micro-batch reads (copies of weights, their average over time) stays with the stage of its layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import alpa_lite as al
from alpa_lite.cli.models.train import Adam, with_master_weights
from alpa_lite.intra_op.stage import StageView
from alpa_lite.planners import Pipeline
from alpa_lite.program.phases import Phase
from alpa_lite.step.clustering import make_layers
from tests.end_to_end.cases import assert_same, eager_cluster

NUM_LAYERS, BATCH, WIDTH = 4, 16, 8


def _block(h: jax.Array, layer: Any) -> tuple[jax.Array, None]:
    return h + jnp.tanh(h @ layer["w"] + layer["b"]), None


def _loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """Of layers in a list, or stacked in arrays."""
    if isinstance(params, list):
        for layer in params:
            x, _ = _block(x, layer)
    else:
        x, _ = jax.lax.scan(_block, x, params)
    return jnp.mean((x - y) ** 2)


def _averaged() -> optax.GradientTransformation:
    """Descent, and beside it the average of the weights before each step."""

    def update(grads: Any, average: Any, params: Any = None) -> Any:
        average = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, average, params)
        return jax.tree.map(lambda g: -0.1 * g, grads), average

    return optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)


OPTIMIZERS: dict[str, optax.GradientTransformation] = {
    "LAMB on copies": Adam(1e-2, eps=1e-2, trust_ratio=True, master_weights=True),
    "Adafactor on copies": with_master_weights(optax.adafactor(1e-2, min_dim_size_to_factor=4)),
    "average of old weights": _averaged(),
}


def _step(optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    def step(state: Any, x: jax.Array, y: jax.Array) -> Any:
        params, opt_state = state
        loss, grads = jax.value_and_grad(_loss)(params, x, y)
        changes, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, changes), opt_state), loss

    return step


def _arguments(optimizer: optax.GradientTransformation, form: str) -> tuple[Any, jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    shapes = {"w": (NUM_LAYERS, WIDTH, WIDTH), "b": (NUM_LAYERS, WIDTH)}
    params: Any = {name: jnp.asarray(0.3 * rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}
    if form == "listed":
        params = [jax.tree.map(lambda a, i=i: a[i], params) for i in range(NUM_LAYERS)]
    x, y = (jnp.asarray(rng.normal(size=(BATCH, WIDTH)), jnp.float32) for _ in range(2))
    return (params, optimizer.init(params)), x, y


@pytest.mark.parametrize("form", ["listed", "stacked"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_stage_reads_the_state_of_its_own_layers(name: str, form: str) -> None:
    optimizer = OPTIMIZERS[name]
    step = al.parallelize(_step(optimizer)).trace(*_arguments(optimizer, form)).step(4, loop_parts=2).step
    layers, graph = make_layers(step, 2), step.graph
    state = {v for v in graph.inputs if graph.values[v].name.startswith("state/") and graph.values[v].rank > 0}
    outside = {v for v in state if graph.values[v].name.startswith("state/1/")}
    assert all(step.phases[c] is Phase.UPDATE for v in outside for c in graph.consumers[v])
    views = [StageView(step=step, layers=layers, first=i, last=i) for i in range(2)]
    reads = [state & set(view.external) for view in views]
    assert reads[0] | reads[1] == state and not reads[0] & reads[1]
    assert all(view.lives_here(v) for view, read in zip(views, reads, strict=True) for v in read)
    assert outside & reads[0] and outside & reads[1]


@pytest.mark.parametrize("form", ["listed", "stacked"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_stages_equal_one_device(name: str, form: str, devices: Any) -> None:
    optimizer = OPTIMIZERS[name]
    step, (start, x, y) = _step(optimizer), _arguments(optimizer, form)
    plan = {"planner": Pipeline(pipeline=2), "num_microbatches": 4}
    parallel, alone = al.parallelize(step, cluster=eager_cluster(), **plan), jax.jit(step)
    got, want = start, start
    for _ in range(2):
        got, loss = parallel(got, x, y)
        want, expected = alone(want, x, y)
    assert len(parallel.last_plan.stages) == 2
    assert_same((got, loss), (want, expected))
