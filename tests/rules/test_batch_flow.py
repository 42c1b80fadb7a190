"""Where the batch goes by the rules alone; a batch of one sample is followed through dims of size 1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from alpa_lite.program.ir import Graph
from alpa_lite.rules.batch_flow import follow_batch
from alpa_lite.trace.from_jaxpr import from_jaxpr


def _graph(fun: Callable[..., Any], batch_size: int) -> Graph:
    x, w = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((batch_size, 6, 4), (4, 8)))
    return from_jaxpr(jax.make_jaxpr(fun)(x, w), ["x", "w"]).graph


FUNCTIONS: dict[str, tuple[Callable[..., Any], int | None]] = {
    "elementwise": (lambda x, w: jnp.tanh(x) * 2, 0),
    "product": (lambda x, w: x @ w, 0),
    "transposed": (lambda x, w: jnp.transpose(x @ w, (1, 2, 0)), 2),
    "heads": (lambda x, w: (x @ w).reshape(x.shape[0], 6, 2, 4), 0),
    "heads_behind": (lambda x, w: jnp.transpose(x, (1, 0, 2)).reshape(6, x.shape[0], 2, 2), 1),
    "scanned": (lambda x, w: jax.lax.scan(lambda h, _: (jnp.tanh(h), h), x, None, length=3)[1], 1),
    "gradient": (lambda x, w: jnp.einsum("bsi,bsj->ij", x, x @ w), None),
    "weights": (lambda x, w: jnp.tanh(w)[None], None),
}


@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_batch_is_followed_through_every_op(name: str, batch_size: int) -> None:
    fun, want = FUNCTIONS[name]
    graph = _graph(fun, batch_size)
    dims, _ = follow_batch(graph, (0, None))
    assert [dims[v] for v in graph.outputs] == [want]


def test_what_is_known_is_taken_over() -> None:
    graph = _graph(lambda x, w: jnp.tanh(jnp.sum(x, axis=0)[None]), 1)
    (summed,) = (op.results[0] for op in graph.ops if op.primitive == "broadcast_in_dim")
    for known, want in ({}, None), ({graph: {summed: 0}}, 0):
        dims, _ = follow_batch(graph, (0, None), known)
        assert [dims[v] for v in graph.outputs] == [want]
