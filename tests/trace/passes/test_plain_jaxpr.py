"""Steps with mutable arrays, meshes and primitives of other libraries give the numbers of `jax.jit`."""

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
from alpa_lite.errors import TraceError
from alpa_lite.trace.passes import plain_jaxpr
from tests.end_to_end.cases import eager_cluster

W = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
X = np.random.default_rng(1).normal(size=(16, 8)).astype(np.float32)


def _grads(w: Any, x: Any) -> Any:
    return jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)


def _top(w: Any, x: Any) -> Any:
    loss, grads = _grads(w, x)
    total = jax.new_ref(jnp.zeros(()))
    total[...] = total[...] + loss
    return w - 0.1 * grads, total[...]


def _in_loop(w: Any, x: Any) -> Any:
    loss, grads = _grads(w, x)
    norms = jax.new_ref(jnp.zeros(8))

    def body(i: Any, carry: Any) -> Any:
        norms[i] = jnp.sum(grads[i] ** 2)
        return carry

    jax.lax.fori_loop(0, 8, body, 0)
    return w - 0.1 * grads / (1 + norms[...][:, None]), loss


def _in_call(w: Any, x: Any) -> Any:
    @jax.jit
    def counted(x: Any) -> Any:
        count = jax.new_ref(jnp.zeros((), jnp.int32))
        count[...] += 3
        return x * count[...]

    loss, grads = _grads(w, x)
    return w - 0.1 * counted(grads), loss


def _in_branch(w: Any, x: Any) -> Any:
    loss, grads = _grads(w, x)
    scale = jax.new_ref(jnp.ones(()))

    def halve() -> None:
        scale[...] = 0.5

    jax.lax.cond(loss > 0.0, halve, lambda: None)
    return w - scale[...] * grads, loss


def _beside_a_solve(w: Any, x: Any) -> Any:
    """Solve linear systems by a function of the step's own, whose bodies JAX keeps in a named tuple."""

    def solve(matvec: Any, b: Any) -> Any:
        return jnp.linalg.solve(jax.jacobian(matvec)(b), b)

    def loss(w: Any) -> Any:
        matrix = w @ w.T + 8 * jnp.eye(8)
        return jnp.sum(jax.lax.custom_linear_solve(lambda v: matrix @ v, x[0], solve, solve) ** 2)

    value, grads = jax.value_and_grad(loss)(w)
    rate = jax.new_ref(0.1)
    return w - rate[...] * grads, value


@pytest.mark.parametrize("planner", [al.planners.DataParallel(), al.planners.Auto(), al.planners.Megatron(tensor=4)])
@pytest.mark.parametrize("step", [_top, _in_loop, _in_call, _in_branch, _beside_a_solve])
def test_a_step_with_mutable_arrays_of_its_own(step: Any, planner: Any, devices: Any) -> None:
    parallel = al.parallelize(step, cluster=eager_cluster(), planner=planner, num_microbatches=1, cache=False)
    for got, want in zip(parallel(W, X), jax.jit(step)(W, X), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_a_mutable_array_from_outside_is_refused(devices: Any) -> None:
    count = jax.new_ref(jnp.zeros(()))

    def captures(w: Any, x: Any) -> Any:
        count[...] += 1.0
        return _top(w, x)

    with pytest.raises(TraceError, match=r"captures reads or writes a jax.Ref from outside of it.*return the new one"):
        al.parallelize(captures, cluster=eager_cluster(), cache=False)(W, X)
    with pytest.raises(TraceError, match=r"count is a jax.Ref.*Pass its value \(count\[\.\.\.\]\)"):
        al.parallelize(lambda w, count, x: _top(w, x), cluster=eager_cluster(), cache=False)(W, count, X)


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
    monkeypatch.setattr(plain_jaxpr, "in_a_library", lambda _: of_a_library)
    primitive = Primitive("of_a_test")
    primitive.def_impl(function)
    primitive.def_abstract_eval(lambda x: x)
    mlir.register_lowering(primitive, mlir.lower_fun(function, multiple_results=False))

    def step(weights: Any, batch: Any) -> Any:
        return weights, jnp.mean(primitive.bind(batch @ weights))

    shapes = jax.ShapeDtypeStruct((8, 8), "float32"), jax.ShapeDtypeStruct((16, 8), "float32")
    plan = al.plan(step, *shapes, cluster="p3.16xlarge", planner=al.planners.DataParallel(), cache=False)
    assert [use.primitive for use in plan.opaque] == ["of_a_test"] * opaque


def test_a_step_with_constraints_keeps_the_arrays_that_it_captures(devices: Any) -> None:
    """A jaxpr of JAX 0.11 loses its constants when its variables are replaced."""
    captured = jnp.arange(8.0)
    mesh = jax.sharding.Mesh(np.array(devices), ("x",))

    def step(w: Any, x: Any) -> Any:
        x = jax.lax.with_sharding_constraint(x, jax.NamedSharding(mesh, jax.P("x")))
        return w, (x @ w + captured).sum()

    np.testing.assert_allclose(al.parallelize(step, batch_argnums=1)(W, X)[1], step(W, X)[1], rtol=1e-5)
