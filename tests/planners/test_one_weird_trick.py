"""Convolutions by sample, dense layers by weight: what is sent, and when it is not worth it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import alpa_lite as al
from alpa_lite.cli.models.skip_networks import ResNet
from alpa_lite.planners import Auto, DataParallel, Megatron, OneWeirdTrick, OnMesh, PlanRequest
from cost_models.cluster import with_memory
from cost_models.hardware import Backend
from tests.end_to_end.cases import assert_same, eager_cluster
from tests.end_to_end.collectives import emitted, handed_over, planned

#: AlexNet's widths (Krizhevsky et al. 2012), without its first stride, so that 48 × 48 images do.
CHANNELS, DENSE, SIZE = (3, 64, 192, 384, 256, 256), (256 * 36, 4096, 4096, 1000), 48
SMALL = ((3, 8, 8, 8, 8, 8), (8 * 4, 64, 64, 16), 16)


def _loss(params: Any, images: Any, labels: Any) -> Any:
    x = images
    for i in range(5):
        numbers = ("NHWC", "HWIO", "NHWC")
        x = jax.nn.relu(lax.conv_general_dilated(x, params[f"c{i}"], (1, 1), "SAME", dimension_numbers=numbers))
        if i in (0, 1, 4):
            x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")
    x = x.reshape(x.shape[0], -1)
    for i in range(2):
        x = jax.nn.relu(x @ params[f"f{i}"])
    scores = jax.nn.log_softmax(x @ params["f2"])
    return -jnp.mean(jnp.take_along_axis(scores, labels[:, None], 1))


def _step(params: Any, images: Any, labels: Any) -> Any:
    loss, grads = jax.value_and_grad(_loss)(params, images, labels)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), loss


def _shapes(num_samples: int, sizes: Any = (CHANNELS, DENSE, SIZE)) -> Any:
    channels, dense, size = sizes
    params = {f"c{i}": (3, 3, a, b) for i, (a, b) in enumerate(pairwise(channels))}
    params |= {f"f{i}": (a, b) for i, (a, b) in enumerate(pairwise(dense))}
    shape = jax.ShapeDtypeStruct
    return (
        {name: shape(s, jnp.float32) for name, s in params.items()},
        shape((num_samples, size, size, 3), jnp.float32),
        shape((num_samples,), jnp.int32),
    )


def _plan(num_samples: int, planner: Any) -> al.Plan:
    return al.plan(_step, *_shapes(num_samples), cluster="p3.16xlarge", planner=planner, num_microbatches=1)


@pytest.mark.parametrize("num_samples", [128, 1024])
def test_gradients_of_kernels_are_summed_and_of_dense_layers_never(num_samples: int) -> None:
    found = _plan(num_samples, OneWeirdTrick())
    specs = found.stages[0].specs
    assert all(not specs[f"params/c{i}"].axes for i in range(5))
    assert all(specs[f"params/f{i}"].axes == {"x"} for i in range(3))
    kernels = {4.0 * 9 * a * b for a, b in pairwise(CHANNELS)}
    updates = [(u.kind, u.bytes) for u in found.prediction.collectives if u.phase == "update" and u.bytes > 4]
    assert sorted(updates) == sorted(("all_reduce", size) for size in kernels)
    # What goes into the first dense layer is gathered, and its gradient scattered; likewise between the layers.
    boundary = {"forward": "all_gather", "backward": "reduce_scatter"}
    for phase, kind in boundary.items():
        inside = [(u.kind, u.bytes) for u in found.prediction.collectives if u.phase == phase and u.bytes > 4e3]
        assert (kind, 4.0 * num_samples * DENSE[0]) in inside
        assert sum(size for _, size in inside) <= 4.0 * num_samples * sum(DENSE) * 1.01


@pytest.mark.parametrize("num_samples", [128, 256, 512, 1024])
def test_it_beats_both_of_its_parts_and_the_integer_program_is_no_worse(num_samples: int) -> None:
    seconds = {
        type(p).__name__: _plan(num_samples, p).prediction.step_seconds
        for p in (OneWeirdTrick(), DataParallel(), Megatron(), OnMesh(axes={"x": 8}))
    }
    assert seconds["OneWeirdTrick"] < min(seconds["DataParallel"], seconds["Megatron"])
    assert seconds["OnMesh"] <= 1.001 * seconds["OneWeirdTrick"]


def test_a_residual_network_comes_out_data_parallel() -> None:
    """Its one dense layer is small against its batch."""
    model = ResNet(image_size=32, channels=16, stage_sizes=(1, 1), num_classes=10, norm_batch=8)
    params = jax.eval_shape(lambda: model.init(jax.random.key(0)))
    batch = {
        name: jax.ShapeDtypeStruct(s, t)
        for name, s, t in (("images", (512, 32, 32, 3), "float32"), ("labels", (512,), "int32"))
    }

    def step(params: Any, batch: Any) -> Any:
        return jax.tree.map(lambda w, g: w - g, params, jax.grad(model.loss_fn)(params, batch))

    found, plain = (
        al.plan(step, params, batch, cluster="p3.16xlarge", planner=p, num_microbatches=1)
        for p in (OneWeirdTrick(), DataParallel())
    )
    assert found.prediction.step_seconds <= 1.001 * plain.prediction.step_seconds
    activations = 4.0 * 512 * 128  # what the dense layer reads, the smallest of them
    assert not [u for u in found.prediction.collectives if u.phase != "update" and u.bytes >= activations]
    weights = {name: spec for name, spec in found.stages[0].specs.items() if name.startswith("params/")}
    assert all(not spec.axes for name, spec in weights.items() if len(spec.dims) == 4)


@pytest.mark.parametrize(("num_samples", "pays"), [(128, True), (1024, True), (2**16, False)])
def test_it_is_refused_at_once_where_no_dense_layer_is_larger_than_what_it_reads_and_makes(
    num_samples: int, pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B · (C_in or C_out) < C_in · C_out."""
    solved = list[str]()
    where = "alpa_lite.planners.convolution_parallel.plan_on_mesh"
    monkeypatch.setattr(where, lambda name, *_, **__: solved.append(name))
    planner = OneWeirdTrick(where_it_pays=True)
    if pays:
        planner.plan(_request(num_samples))
    else:
        with pytest.raises(al.errors.PlanError, match="larger than the arrays between them, but the step has few"):
            planner.plan(_request(num_samples))
    assert bool(solved) == pays


def test_a_small_head_does_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head of 1 % of the weights is larger than what it reads, but all it could save is 1 % of what is sent."""
    monkeypatch.setattr("alpa_lite.planners.convolution_parallel.plan_on_mesh", lambda *_, **__: pytest.fail("solved"))

    def step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            convolved = jax.lax.conv(x, params["kernel"], (1, 1), "VALID")
            return jnp.mean(jnp.mean(convolved, (2, 3)) @ params["head"])

        return jax.tree.map(jnp.subtract, params, jax.grad(loss)(params))

    shape = jax.ShapeDtypeStruct
    params = {"kernel": shape((256, 256, 3, 3), jnp.float32), "head": shape((256, 24), jnp.float32)}
    with pytest.raises(al.errors.PlanError, match="the step has few or none"):
        al.plan(
            step,
            params,
            shape((16, 256, 8, 8), jnp.float32),
            cluster="p3.16xlarge",
            planner=OneWeirdTrick(where_it_pays=True),
            num_microbatches=1,
        )


def test_kernels_that_do_not_fit_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alpa_lite.planners.convolution_parallel.plan_on_mesh", lambda *_, **__: pytest.fail("solved"))
    host, kernels = al.cluster("p3.16xlarge"), sum(4 * 9 * a * b for a, b in pairwise(CHANNELS))
    small = with_memory(host, kernels - 1)
    with pytest.raises(al.errors.InfeasibleError, match="state of convolutions alone, which every device holds whole"):
        OneWeirdTrick().plan(replace(_request(128), cluster=small))


def test_the_search_is_no_slower() -> None:
    """Its integer program does not see that gradients are summed beside the backward pass, where that is priced so."""
    backend = Backend(overlap_gradients=True)
    trick = OneWeirdTrick().plan(_request(1024, backend))
    found = Auto(num_layers=1, remat="none").plan(_request(1024, backend))
    names = [found.name, *(name for name, _ in found.alternatives)]
    assert any(trick.name in name for name in names)
    assert found.prediction.step_seconds <= trick.prediction.step_seconds


def _request(num_samples: int, backend: Backend | None = None) -> PlanRequest:
    traced = al.parallelize(_step).trace(*_shapes(num_samples))
    return traced.request(al.cluster("p3.16xlarge"), backend=backend, num_microbatches=1)


def test_it_runs_as_planned(devices: Any) -> None:
    rng = np.random.default_rng(0)
    params, images, _ = _shapes(32, SMALL)
    params = {
        n: jnp.asarray(rng.normal(size=s.shape) / np.sqrt(prod(s.shape[:-1])), s.dtype) for n, s in params.items()
    }
    arguments = params, jnp.asarray(rng.normal(size=images.shape), jnp.float32), jnp.asarray(rng.integers(0, 16, 32))
    step = al.parallelize(_step, cluster=eager_cluster(), planner=OneWeirdTrick(), num_microbatches=1)
    compiled = step.compiled(*arguments)
    assert handed_over(compiled) == emitted(compiled) == planned(compiled.plan)
    assert_same(compiled(*arguments), jax.jit(_step)(*arguments))


def test_what_has_no_convolutions_or_not_enough_samples_is_refused() -> None:
    def dense(w: Any, x: Any) -> Any:
        return w - jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w), x.sum()

    options = dict(cluster="p3.16xlarge", planner=OneWeirdTrick(), num_microbatches=1)
    with pytest.raises(al.errors.PlanError, match="has no convolutions"):
        al.plan(dense, jnp.ones((8, 8)), jnp.ones((16, 8)), **options)
    with pytest.raises(al.errors.PlanError, match="Use a multiple of 8 samples"):
        _plan(12, OneWeirdTrick())
