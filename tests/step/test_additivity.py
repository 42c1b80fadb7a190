"""The proof of whole steps: each claim is compared with numbers, whatever the step does."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite import planners
from alpa_lite.errors import NonAdditiveError
from alpa_lite.trace.trace import trace
from tests.end_to_end.programs import PROGRAMS
from tests.step.claims import check_claims
from tests.step.splitting import split_step


@pytest.mark.parametrize("count", [2, 8, 16])
@pytest.mark.parametrize("name", PROGRAMS)
def test_claims_hold(name: str, count: int) -> None:
    program = PROGRAMS[name]
    traced = trace(program.step, program.args, batch_argnums=program.batch_argnums)
    if name == "two_rows_per_sample" and count == 16:
        count = 4
    checked = check_claims(traced, jax.tree.leaves(program.args), count)
    assert bool(checked.proof.refusals) == (program.refused and name != "printed_per_sample")
    assert checked.kinds or program.refused


def test_effects_on_samples_are_refused() -> None:
    program = PROGRAMS["printed_per_sample"]
    with pytest.raises(NonAdditiveError, match="would be called once per micro-batch"):
        split_step(trace(program.step, program.args), 2)


def test_what_a_loop_makes_of_parameters_alone_is_read_per_sample_and_after_it() -> None:
    """A regulariser that comes out of a loop over layers, weighs each sample, and is returned."""

    def step(p: Any, x: Any) -> Any:
        def loss(p: Any) -> Any:
            h, norms = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), jnp.sum(w**2)), x, p)
            penalty = jnp.sqrt(jnp.sum(norms))
            return jnp.mean(h**2 * penalty), (penalty, norms)

        (value, aux), grads = jax.value_and_grad(loss, has_aux=True)(p)
        return p - grads, value, aux

    args = (jnp.stack([jnp.eye(6)] * 4) * 0.5, jax.random.normal(jax.random.key(0), (8, 6)))
    check_claims(trace(step, args, batch_argnums=1), jax.tree.leaves(args), 2)
    want = jax.tree.leaves(jax.jit(step)(*args))
    for planner in (planners.Megatron(tensor=4), planners.Pipeline(pipeline=2)):
        got = al.parallelize(step, cluster="p3.16xlarge", planner=planner, num_microbatches=2, batch_argnums=1)(*args)
        for a, b in zip(jax.tree.leaves(got), want, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def test_a_batch_cut_by_hand_is_cut_alike_in_micro_batches() -> None:
    """Each micro-batch has rows of both halves; what is returned per sample comes back in order."""

    def step(p: Any, x: Any) -> Any:
        halves = x.reshape(2, x.shape[0] // 2, 6)

        def add(total: Any, half: Any) -> Any:
            value, grads = jax.value_and_grad(lambda p: jnp.mean(jnp.tanh(half @ p) ** 2))(p)
            return jax.tree.map(jnp.add, total, (value, grads)), half @ p

        (value, grads), rows = jax.lax.scan(add, (0.0, jnp.zeros_like(p)), halves)
        return p - grads, value, rows.reshape(x.shape)

    args = (jnp.eye(6) * 0.5, jax.random.normal(jax.random.key(0), (16, 6)))
    want = jax.tree.leaves(jax.jit(step)(*args))
    for planner in (planners.Megatron(tensor=2), planners.Megatron(tensor=4)):
        got = al.parallelize(step, cluster="p3.16xlarge", planner=planner, num_microbatches=4, batch_argnums=1)(*args)
        for a, b in zip(jax.tree.leaves(got), want, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def test_what_sums_start_from_counts_once() -> None:
    """Counts in the state that are not zero, a loop that begins at one, and a regulariser among gradients."""

    def step(p: Any, counts: Any, x: Any, y: Any) -> Any:
        def loss(p: Any) -> Any:
            h, norms = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), jnp.sum(w**2)), x, p)
            total, _ = jax.lax.scan(lambda c, w: (c + jnp.sum(h * w[0]), None), 1.0, p)
            return jnp.mean(h**2) + jnp.sum(norms) + total

        value, grads = jax.value_and_grad(loss)(p)
        return p - 0.1 * grads, counts.at[y].add(1.0), value

    x = jax.random.normal(jax.random.key(0), (8, 6))
    args = (jnp.stack([jnp.eye(6)] * 4) * 0.5, jnp.arange(6.0) + 1, x, jnp.arange(8) % 6)
    check_claims(trace(step, args, batch_argnums=(2, 3)), jax.tree.leaves(args), 2)
    want = jax.tree.leaves(jax.jit(step)(*args))
    for planner in (planners.Megatron(tensor=4), planners.Pipeline(pipeline=2)):
        parallel = al.parallelize(
            step, cluster="p3.16xlarge", planner=planner, num_microbatches=2, batch_argnums=(2, 3)
        )
        for a, b in zip(jax.tree.leaves(parallel(*args)), want, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)
