"""What a step recomputes as it is written, in the words of trainers: by models whose policies are known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import alpa_lite as al
from alpa_lite.cli.models.train import Adam, init_state, make_train_step
from alpa_lite.cli.models.transformer import Computation, Recompute, Transformer
from alpa_lite.program.phases import StepGraph
from alpa_lite.step.model_flops import executed_ops, needed_flops
from alpa_lite.step.recomputation import Remat
from alpa_lite.step.written_recomputation import written_recomputation

MODEL = Transformer(seq_len=256, computation=Computation(dtype=jnp.float32))


def step_of(fun: Any, *args: Any) -> StepGraph:
    return al.parallelize(fun, cluster="dgx-1").trace(*args).step().step


def trained(recompute: Recompute, num_segments: int = 1) -> StepGraph:
    model = replace(MODEL, computation=replace(MODEL.computation, recompute=recompute, num_segments=num_segments))
    state = jax.eval_shape(lambda: init_state(model.init(jax.random.key(0)), Adam()))
    return step_of(make_train_step(model.loss_fn, Adam()), state, model.batch_shapes(16))


@pytest.mark.parametrize("num_segments", [1, 2])
@pytest.mark.parametrize(
    ("recompute", "plain", "in_a_kernel"),
    [
        ("none", Remat.NONE, Remat.NONE),
        ("full", Remat.FULL, Remat.FULL),
        # Of the core alone nothing is left that the kernel does not compute again anyway.
        ("selective", Remat.SELECTIVE, Remat.NONE),
        ("dots", Remat.SELECTIVE, Remat.SELECTIVE),
        ("dots_without_batch", Remat.SELECTIVE, Remat.SELECTIVE),
    ],
)
def test_policies_of_a_model(recompute: Recompute, plain: Remat, in_a_kernel: Remat, num_segments: int) -> None:
    step = trained(recompute, num_segments)
    assert written_recomputation(step) is plain
    assert written_recomputation(step, True) is in_a_kernel


@pytest.mark.parametrize(("layers", "expected"), [((), Remat.NONE), ((0,), Remat.SELECTIVE), ((0, 1, 2), Remat.FULL)])
def test_layers_written_out(layers: tuple[int, ...], expected: Remat) -> None:
    """Without a loop; a layer out of five is less than a quarter of the products."""

    def layer(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.tanh(jnp.tanh(x @ w["up"]) @ w["down"])

    def step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            y = x
            for number, w in enumerate(params):
                y = (jax.checkpoint(layer) if number in layers else layer)(w, y)
            return jnp.sum(y**2)

        grads = jax.grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    sizes = {"up": jax.ShapeDtypeStruct((64, 256), jnp.float32), "down": jax.ShapeDtypeStruct((256, 64), jnp.float32)}
    found = step_of(step, [sizes] * 5, jax.ShapeDtypeStruct((32, 64), jnp.float32))
    assert written_recomputation(found) is expected


def test_needed_flops_are_those_of_the_step_without_recomputation() -> None:
    plain, full = trained("none"), trained("full")
    assert needed_flops(full) == pytest.approx(needed_flops(plain))
    assert any(each.is_again for each in executed_ops(full))
