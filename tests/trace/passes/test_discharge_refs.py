"""Steps with mutable arrays of their own (`jax.new_ref`) give the numbers of `jax.jit`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.errors import TraceError
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
