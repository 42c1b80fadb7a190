"""Convolutions by sample, space, channel and filter: which collectives each takes, and that it is the same function."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import alpa_lite as al
from alpa_lite.planners import ConvolutionParallel
from tests.end_to_end.cases import MODELS, Training, assert_same, eager_cluster, make_batch, reference
from tests.end_to_end.collectives import beyond, emitted, handed_over, planned

SAMPLES, SIZE, CHANNELS = 8, 32, 16
ROW, KERNEL = 4 * SAMPLES * SIZE * CHANNELS, 4 * 9 * CHANNELS * CHANNELS
RESULT = 4 * SAMPLES * SIZE * SIZE * CHANNELS


def _convolve(w: Any, x: Any, **options: Any) -> Any:
    options = {"window_strides": (1, 1), "padding": "SAME", **options}
    return lax.conv_general_dilated(x, w, dimension_numbers=("NHWC", "HWIO", "NHWC"), **options)


def _forward(w: Any, x: Any) -> Any:
    return jnp.tanh(_convolve(w, x))


def _both(w: Any, x: Any) -> Any:
    grad, into = jax.grad(lambda w, x: jnp.sum(jnp.tanh(_convolve(w, x))), (0, 1))(w, x)
    return w - grad, into


def _counts(fun: Any, planner: ConvolutionParallel) -> Counter[tuple[str, float]]:
    shape = jax.ShapeDtypeStruct
    w, x = shape((3, 3, CHANNELS, CHANNELS), jnp.float32), shape((SAMPLES, SIZE, SIZE, CHANNELS), jnp.float32)
    found = al.plan(fun, w, x, cluster=eager_cluster(), planner=planner, num_microbatches=1, batch_argnums=1)
    return Counter((u.kind, u.bytes) for u in found.prediction.collectives for _ in range(round(u.count)))


@pytest.mark.parametrize(
    ("planner", "forward", "both"),
    [
        (ConvolutionParallel(), {}, {("all_reduce", KERNEL): 1}),
        (
            ConvolutionParallel(sample=1, height=8),
            {("permute", ROW): 2},
            {("permute", ROW): 6, ("all_reduce", KERNEL): 1},
        ),
        # Of two halves of the height; then of quarters of the width with the two rows that came.
        (
            ConvolutionParallel(sample=1, height=2, width=4),
            {("permute", ROW / 4): 2, ("permute", 4 * SAMPLES * (SIZE / 2 + 2) * CHANNELS): 2},
            None,
        ),
        # What a channel split sums may stay scattered; what a filter split makes is gathered for the caller.
        (ConvolutionParallel(sample=1, channel=8), {("reduce_scatter", RESULT): 1}, None),
        (ConvolutionParallel(sample=1, filter=8), {("all_gather", RESULT): 1}, {("reduce_scatter", RESULT): 1}),
    ],
    ids=lambda value: value.name if isinstance(value, ConvolutionParallel) else "",
)
def test_collectives_of_one_convolution(
    planner: ConvolutionParallel, forward: dict[Any, int], both: dict[Any, int] | None
) -> None:
    """3 × 3, SAME: the counts of the five ways, and halos of floor(K/2) rows to each side."""
    assert _counts(_forward, planner) == forward
    if both is not None:
        assert _counts(_both, planner) == both


def _step(options: Any) -> Any:
    def step(params: Any, images: Any) -> Any:
        def loss(p: Any) -> Any:
            h = jnp.tanh(_convolve(p["a"], images, **options))
            return jnp.mean(jnp.tanh(_convolve(p["b"], h)) ** 2)

        return jax.tree.map(lambda w, g: w - g, params, jax.grad(loss)(params))

    return step


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (16, {}),
        (16, {"window_strides": (2, 2)}),
        (16, {"rhs_dilation": (2, 2)}),
        (18, {"padding": "VALID"}),
        (14, {"window_strides": (2, 2)}),
    ],
    ids=["same", "strided", "dilated", "valid", "odd"],
)
@pytest.mark.parametrize(
    "planner",
    [ConvolutionParallel(sample=2, height=2, width=2), ConvolutionParallel(sample=2, channel=2, filter=2)],
    ids=lambda planner: planner.name,
)
def test_any_convolution_is_the_same_function(
    planner: ConvolutionParallel, size: int, options: Any, devices: Any
) -> None:
    rng = np.random.default_rng(0)
    params = {name: jnp.asarray(rng.normal(size=(3, 3, 4, 4)) / 6, jnp.float32) for name in "ab"}
    arguments = params, jnp.asarray(rng.normal(size=(4, size, size, 4)), jnp.float32)
    step = _step(options)
    compiled = al.parallelize(step, cluster=eager_cluster(), planner=planner, num_microbatches=1).compiled(*arguments)
    # XLA sends the border of an array once where two convolutions read it.
    assert handed_over(compiled) == planned(compiled.plan) and not beyond(emitted(compiled), planned(compiled.plan))
    assert_same(compiled(*arguments), jax.jit(step)(*arguments))


def test_a_network_with_pooling_strides_and_a_dense_layer(devices: Any) -> None:
    training = Training(model="cnn")
    planner = ConvolutionParallel(sample=4, height=2)
    step = al.parallelize(training.step(), cluster=eager_cluster(), planner=planner, num_microbatches=1)
    assert_same(training.run(step), reference(training))
    assert step.last_plan.stages[0].specs["batch/images"].dims[:2] == (("sample",), ("height",))


@pytest.mark.parametrize(
    ("planner", "message"),
    [
        (ConvolutionParallel(sample=1, height=8), "no convolution of the step has one"),
        (
            ConvolutionParallel(sample=1, filter=8),
            "Kernels are to be split by filter, but the step has no convolutions",
        ),
        (ConvolutionParallel(sample=4), "Choose sizes whose product is 8"),
        (ConvolutionParallel(sample=5), "splits each micro-batch over 5 devices"),
    ],
)
def test_what_has_no_such_dims_is_refused(planner: ConvolutionParallel, message: str) -> None:
    training = Training(model="mlp")
    arguments = training.start(), make_batch(MODELS["mlp"], 0), jax.random.key(0)
    with pytest.raises(al.errors.PlanError, match=message):
        al.plan(training.step(), *arguments, cluster=eager_cluster(), planner=planner, num_microbatches=1)


@pytest.mark.parametrize(("options", "dim"), [({"channel": 8}, 2), ({"filter": 8}, 3)])
def test_kernels_that_are_not_divided_are_named(options: dict[str, int], dim: int) -> None:
    params = {name: jnp.ones((3, 3, 12, 12)) for name in "ab"}
    with pytest.raises(
        al.errors.PlanError,
        match=rf"convolution_parallel\.py:\d+.* do not divide dim {dim} of this one, of the shape \[3, 3, 12, 12\]",
    ):
        planner = ConvolutionParallel(sample=1, **options)
        al.plan(_step({}), params, jnp.ones((8, 8, 8, 12)), cluster=eager_cluster(), planner=planner)
