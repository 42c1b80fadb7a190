"""Images are split where that is best: over samples when there are many, along their height when there is one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al
from tests.end_to_end.cases import assert_same, eager_cluster
from tests.end_to_end.collectives import handed_over, planned

KERNELS = {"wide": (5, 3, 4, 16), "strided": (3, 3, 16, 16), "up": (4, 4, 16, 8)}


def _loss(params: Any, x: Any) -> Any:
    """A convolution, pooling with overlap, a strided convolution, a transposed one."""
    layout = dict(dimension_numbers=("NHWC", "HWIO", "NHWC"))
    x = jax.nn.relu(jax.lax.conv_general_dilated(x, params["wide"], (1, 1), "SAME", **layout))
    x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    x = jax.nn.relu(jax.lax.conv_general_dilated(x, params["strided"], (2, 2), "SAME", rhs_dilation=(2, 1), **layout))
    x = jax.lax.reduce_window(x, 0.0, jax.lax.add, (1, 2, 2, 1), (1, 1, 1, 1), "SAME")
    x = jax.lax.conv_transpose(x, params["up"], (2, 2), "SAME", **layout)
    return jnp.mean(x**2)


def _step(params: Any, x: Any) -> Any:
    loss, grads = jax.value_and_grad(_loss)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def _arguments(num_samples: int, side: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    params = {name: (0.2 * rng.normal(size=shape)).astype(np.float32) for name, shape in KERNELS.items()}
    return params, rng.normal(size=(num_samples, side, side, 4)).astype(np.float32)


@pytest.mark.parametrize("axes", [{"x": 8}, {"x": 2, "y": 4}], ids=str)
def test_one_image_is_split_along_its_height_with_halos(axes: dict[str, int], devices: Any) -> None:
    arguments = _arguments(1, 128)
    planner = al.planners.OnMesh(axes=axes)
    step = al.parallelize(_step, cluster=eager_cluster(), planner=planner, num_microbatches=1)
    compiled = step.compiled(*arguments)
    plan = planned(compiled.plan)
    assert any(kind == "permute" for kind, _, _ in plan)
    assert handed_over(compiled) == plan
    assert_same(step(*arguments), jax.jit(_step)(*arguments))


def test_many_images_are_split_by_sample(devices: Any) -> None:
    plan = al.plan(
        _step,
        *_arguments(8, 32),
        cluster=eager_cluster(),
        planner=al.planners.OnMesh(axes={"x": 8}),
        num_microbatches=1,
    )
    assert not [use for use in plan.prediction.collectives if use.kind == "permute"]
