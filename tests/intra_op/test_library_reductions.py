"""What the library of reductions reads as arrays, at both sides of the size from which on its kernels go on."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from alpa_lite.intra_op.library_reductions import LIBRARY_ELEMENTS
from benchmarks import memory

WIDTH = 64


def _norm(x):
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred * centred).mean(-1, keepdims=True) + 1e-5)


def _step(params, batch):
    def loss(params):
        hidden = jnp.tanh(_norm(batch["x"] @ params["a"] * params["s"]) @ params["b"])
        return jnp.mean((_norm(hidden) * params["t"] - batch["y"]) ** 2)

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))


def _row(rows: int) -> memory.Row:
    square, row, batch = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((WIDTH, WIDTH), (WIDTH,), (rows, WIDTH)))
    arguments = ({"a": square, "b": square, "s": row, "t": row}, {"x": batch, "y": batch})
    case = memory.Case(name="norms", step=_step, arguments=arguments)
    (found,) = memory.run([case], {"one device": memory.PLANS["one device"]}, lambda _: None)
    return found


def test_kernels_of_few_rows_end_with_their_reduction(devices):
    row = _row(LIBRARY_ELEMENTS - WIDTH)
    assert row.ratio == pytest.approx(1.0, abs=0.02), row


def test_kernels_of_many_rows_read_more_arrays(devices):
    below, at = _row(LIBRARY_ELEMENTS - WIDTH), _row(LIBRARY_ELEMENTS)
    grown = at.xla_bytes / below.xla_bytes * (LIBRARY_ELEMENTS - WIDTH) / LIBRARY_ELEMENTS
    assert grown > 1.2
    assert at.predicted_bytes > 1.08 * below.predicted_bytes
    # The account lacks two arrays that the larger program writes; it was 0.75 as if kernels never went on.
    assert 0.8 < at.ratio < 1.03, at
