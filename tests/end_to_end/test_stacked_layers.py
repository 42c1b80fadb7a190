"""A model that scans over its layers is cut into stages as it is: each stage holds the weights of its own layers."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.planners import Auto, Pipeline
from alpa_lite.runtime.execute.stacked import STAGE_AXIS
from tests.end_to_end.cases import MODELS, Training, assert_same, eager_cluster, make_batch, reference, run_both

pytestmark = pytest.mark.usefixtures("compiled_afresh")

# Adam would divide the gradients of the keys' biases, which are zero but for rounding, by themselves.
TRAINING = Training(model="gpt_scan", optimizer="momentum+clip")


@pytest.fixture(scope="module")
def compiled(devices: Any) -> Any:
    """Two stages of one layer, four micro-batches."""
    step = al.parallelize(
        TRAINING.step(),
        cluster=eager_cluster(),
        planner=Pipeline(pipeline=2),
        num_microbatches=4,
        donate_argnums=0,
    )
    return step.compiled(TRAINING.start(), make_batch(MODELS["gpt_scan"], 0), jax.random.key(0))


def _stacked(tree: Any) -> list[Any]:
    return [x for path, x in jax.tree_util.tree_leaves_with_path(tree) if "layers" in jax.tree_util.keystr(path)]


def test_stages_hold_the_weights_of_their_layers_alone(compiled: Any) -> None:
    names = [{n for n in stage.specs if "/layers/" in n} for stage in compiled.plan.stages]
    assert {n.removesuffix("[0:1]") for n in names[0]} == {n.removesuffix("[1:2]") for n in names[1]}
    assert all(n.endswith("[0:1]") for n in names[0]) and all(n.endswith("[1:2]") for n in names[1])
    sent = {i.reads[0].value for i in compiled.executor.program.instructions if i.kind == "SEND"}
    stacked = {
        v for v, p in zip(compiled.step.step.graph.inputs, compiled.step.step.input_parts, strict=True) if p.rows
    }
    assert stacked and not stacked & sent


def test_state_stays_where_it_is_from_step_to_step(compiled: Any) -> None:
    state, metrics = TRAINING.run(compiled)
    assert_same((state, metrics), reference(TRAINING))
    wanted = compiled.input_shardings()[0][0]
    for array, sharding in zip(_stacked(state), _stacked(wanted), strict=True):
        assert STAGE_AXIS in sharding.mesh.axis_names and len(array.devices()) == 8
        assert array.sharding == sharding
        # Each device holds the rows of its stage.
        assert {s.data.shape[0] for s in array.addressable_shards} == {1}


def test_stacked_state_is_built_in_place(compiled: Any) -> None:
    state = al.init_sharded(TRAINING.start, like=compiled)
    for array, want in zip(_stacked(state), _stacked(TRAINING.start()), strict=True):
        assert STAGE_AXIS in array.sharding.mesh.axis_names
        np.testing.assert_allclose(array, want, rtol=1e-6)


def _stacked_step(weights: Any, x: Any) -> Any:
    def loss(weights: Any) -> Any:
        trip = lambda h, w: (h + jnp.tanh(h @ w["in"]) @ w["out"] + w["bias"], None)  # noqa: E731
        return jnp.mean(jax.lax.scan(trip, x, weights["layers"])[0] ** 2)

    value, grads = jax.value_and_grad(loss)(weights)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
    return jax.tree.map(lambda a, g: a - 0.1 * g / (1 + norm), weights, grads), value


@pytest.mark.parametrize("num_stages", [3, 5, 6])
def test_stages_may_hold_different_numbers_of_rows(num_stages: int, devices: Any) -> None:
    """Eight layers: as many stages as there are devices, or half as many."""
    rng = np.random.default_rng(num_stages)
    draw = lambda *shape: np.asarray(rng.normal(size=shape) * 0.3, np.float32)  # noqa: E731
    weights = {"layers": {"in": draw(8, 12, 24), "out": draw(8, 24, 12), "bias": draw(8, 12)}}
    x, count = draw(24, 12), num_stages * (2 if num_stages == 3 else 1)
    planner = Auto(pipeline=num_stages, manual=())
    cluster = dataclasses.replace(eager_cluster(), devices_per_host=count)
    step = al.parallelize(_stacked_step, cluster=cluster, planner=planner, num_microbatches=4, donate_argnums=0)
    compiled = step.compiled(weights, x)
    held = [sum(s.dims[0] for n, s in stage.shapes.items() if "/in" in n) for stage in compiled.plan.stages]
    assert len({*held}) > 1 and sum(held) == 8
    got, want = al.init_sharded(lambda: jax.tree.map(jnp.asarray, weights), like=compiled), weights
    for _ in range(3):
        before = got
        got, value = step(got, x)
        want, wanted = jax.jit(_stacked_step)(want, x)
        assert_same((got, value), (want, wanted))
    assert all(isinstance(x, jax.Array) and x.is_deleted() for x in jax.tree.leaves(before))
    for array, sharding in zip(jax.tree.leaves(got), jax.tree.leaves(compiled.input_shardings()[0][0]), strict=True):
        assert array.sharding == sharding
        assert max(s.data.nbytes for s in array.addressable_shards) < array.nbytes / 2


def test_loops_over_samples_are_not_taken_for_layers(devices: Any) -> None:
    """They grow with the batch: written out, the step would be another program at each batch size."""
    rng = np.random.default_rng(0)
    w = [np.asarray(rng.normal(size=(8, 8)) * 0.3, np.float32) for _ in range(2)]
    x = np.asarray(rng.normal(size=(16, 8)), np.float32)

    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            return jnp.mean(jax.lax.map(lambda row: jnp.tanh(row @ w[0]) @ w[1], x) ** 2)

        value, grads = jax.value_and_grad(loss)(w)
        return jax.tree.map(lambda a, g: a - g, w, grads), value

    got, want = run_both(step, (w, x), planner=Pipeline(pipeline=2))
    assert_same(got, want)
