"""Micro-batches of one sample, and batches of one, compute what `jax.jit` computes on one device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import alpa_lite as al
from alpa_lite.cli.models.transformer import Computation, Recompute, Transformer
from alpa_lite.planners import Hybrid, Planner
from tests.end_to_end.cases import PLANNERS, assert_same, run_both


def _transformer(recompute: Recompute, *, dropout: float = 0.2, seq_len: int = 8) -> Transformer:
    return Transformer(
        vocab_size=16,
        num_layers=2,
        hidden=8,
        num_heads=2,
        inner=16,
        seq_len=seq_len,
        dropout=dropout,
        computation=Computation(recompute=recompute, dtype=jnp.float32),
    )


def _training(model: Transformer, batch_size: int, key: jax.Array | None) -> tuple[Any, Any]:
    """A step that returns loss, gradients and new weights, and its arguments."""
    rng = np.random.default_rng(0)
    params = model.init(jax.random.key(0))
    batch = {
        name: jnp.asarray(rng.integers(0, model.vocab_size, v.shape))
        for name, v in model.batch_shapes(batch_size).items()
    }

    def step(params: Any, batch: Any, key: Any) -> Any:
        loss, grads = jax.value_and_grad(model.loss_fn)(params, batch, key)
        return jax.tree.map(lambda p, g: p - 0.5 * g, params, grads), loss, grads

    return step, (params, batch, key)


#: Nothing that splits the batch: heads, positions and layers are what is left to split.
TWO_STAGES = Hybrid(pipeline=2, data=1, tensor=2, context=2)


@pytest.mark.parametrize(
    ("recompute", "planner"),
    [
        ("full", TWO_STAGES),
        pytest.param("selective", TWO_STAGES, marks=pytest.mark.long),
        pytest.param("none", PLANNERS["megatron"], marks=pytest.mark.long),
    ],
)
def test_a_transformer_in_micro_batches_of_one_sample(recompute: Recompute, planner: Planner, devices: Any) -> None:
    """With dropout: the masks must be those of the full batch."""
    step, args = _training(_transformer(recompute), 4, jax.random.key(1))
    got, want = run_both(step, args, planner=planner, num_microbatches=4)
    assert_same(got, want)


def _logits(p: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ p["w"] + p["b"]) @ p["out"]


LOSSES = {
    "integer_labels": lambda p, x, y: jnp.mean(
        optax.softmax_cross_entropy_with_integer_labels(_logits(p, x), y[:, :, 0])
    ),
    "take_along_axis": lambda p, x, y: -jnp.sum(jnp.take_along_axis(jax.nn.log_softmax(_logits(p, x)), y, axis=-1)),
}


@pytest.mark.parametrize(("loss", "batch_size"), [("integer_labels", 2), ("integer_labels", 4), ("take_along_axis", 3)])
def test_losses_of_labelled_positions_in_micro_batches_of_one_sample(loss: str, batch_size: int, devices: Any) -> None:
    rng = np.random.default_rng(1)
    params = {
        name: jnp.asarray(rng.normal(size=shape), jnp.float32)
        for name, shape in {"w": (6, 8), "b": (8,), "out": (8, 10)}.items()
    }
    x = jnp.asarray(rng.normal(size=(batch_size, 4, 6)), jnp.float32)
    y = jnp.asarray(rng.integers(0, 10, (batch_size, 4, 1)))

    def step(p: Any, x: Any, y: Any) -> Any:
        value, grads = jax.value_and_grad(LOSSES[loss])(p, x, y)
        return jax.tree.map(lambda a, g: a - 0.1 * g, p, grads), value

    got, want = run_both(step, (params, x, y), planner=TWO_STAGES, num_microbatches=batch_size)
    assert_same(got, want)


CONTEXT = Hybrid(data=1, tensor=2, context=4)


@pytest.mark.parametrize(
    ("recompute", "planner"), [("full", CONTEXT), pytest.param("selective", TWO_STAGES, marks=pytest.mark.long)]
)
def test_a_batch_of_one_sample(recompute: Recompute, planner: Planner, devices: Any) -> None:
    step, args = _training(_transformer(recompute), 1, jax.random.key(1))
    got, want = run_both(step, args, planner=planner)
    assert_same(got, want)


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_the_positions_of_one_sample_are_split_over_devices(recompute: Recompute) -> None:
    """A device does half the work that it does for two samples, whose program shows where the batch is."""
    flops: list[float] = []
    for batch_size in (1, 2):
        step, args = _training(_transformer(recompute, dropout=0.0, seq_len=64), batch_size, None)
        planner = Hybrid(data=1, tensor=1, context=8)
        plan = al.plan(step, *args, cluster=al.cluster("p3.16xlarge"), planner=planner, num_microbatches=1)
        flops.append(plan.prediction.flops_per_device)
    assert flops[0] == pytest.approx(flops[1] / 2, rel=0.05)
