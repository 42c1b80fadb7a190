"""Primitives of other libraries run as what they compute."""

from __future__ import annotations

from typing import Any

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir

import alpa_lite as al
from alpa_lite import _jax


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


def looks_at_values(x: Any) -> Any:
    return x if float(x[0, 0]) > 0 else -x


def captures_an_array(x: Any) -> Any:
    return x + CAPTURED


def doubles(x: Any) -> Any:
    return x + x


CAPTURED = jnp.arange(8.0)


@pytest.mark.parametrize(
    ("function", "of_a_library", "opaque"),
    [(doubles, True, False), (doubles, False, True), (looks_at_values, True, True), (captures_an_array, True, False)],
)
def test_primitives_by_what_their_functions_do(
    function: Any, of_a_library: bool, opaque: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that cannot be replaced run whole, and so do the user's own, which may stand for a kernel."""
    monkeypatch.setattr(_jax, "in_a_library", lambda _: of_a_library)
    primitive = Primitive("of_a_test")
    primitive.def_impl(function)
    primitive.def_abstract_eval(lambda x: x)
    mlir.register_lowering(primitive, mlir.lower_fun(function, multiple_results=False))

    def step(weights: Any, batch: Any) -> Any:
        return weights, jnp.mean(primitive.bind(batch @ weights))

    shapes = jax.ShapeDtypeStruct((8, 8), "float32"), jax.ShapeDtypeStruct((16, 8), "float32")
    plan = al.plan(step, *shapes, cluster="p3.16xlarge", planner=al.planners.DataParallel(), cache=False)
    assert [use.primitive for use in plan.opaque] == ["of_a_test"] * opaque
