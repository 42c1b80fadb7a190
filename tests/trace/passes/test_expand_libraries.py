"""Primitives of other libraries run as what they compute."""

from __future__ import annotations

from typing import Any

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

import alpa_lite as al


def test_a_primitive_that_forbids_vmap_computes_nothing(devices: Any) -> None:
    def step(weights: Any, batch: Any) -> Any:
        def loss(weights: Any) -> Any:
            return jnp.mean(jnp.tanh(eqxi.nonbatchable(batch) @ weights) ** 2)

        value, slope = jax.value_and_grad(loss)(weights)
        return weights - 0.1 * slope, value

    weights, batch = np.ones((8, 8), np.float32) / 8, np.ones((16, 8), np.float32)
    parallel = al.parallelize(step, planner="data_parallel", cluster="p3.16xlarge", num_microbatches=2, cache=False)
    got, expected = parallel(weights, batch), jax.jit(step)(weights, batch)
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-5)
    assert not parallel.last_plan.opaque


def test_a_primitive_whose_function_cannot_be_traced_runs_whole() -> None:
    primitive = Primitive("looks_at_values")

    def looks(x: Any) -> Any:
        return x if float(x[0, 0]) > 0 else -x

    primitive.def_impl(looks)
    primitive.def_abstract_eval(lambda x: x)
    mlir.register_lowering(primitive, lambda _, x: [x])

    def step(weights: Any, batch: Any) -> Any:
        return weights, jnp.mean(primitive.bind(batch @ weights))

    shapes = jax.ShapeDtypeStruct((8, 8), "float32"), jax.ShapeDtypeStruct((16, 8), "float32")
    plan = al.plan(step, *shapes, cluster="p3.16xlarge", planner=al.planners.DataParallel(), cache=False)
    assert [use.primitive for use in plan.opaque] == ["looks_at_values"]
