"""Small programs on four devices in a row (alpa-projects/alpa, tests/shard_parallel/test_basic.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from tests.golden.alpha_beta import AlphaBeta
from tests.golden.models import Program, array, dropout, squared_error, training
from tests.golden.search import search

MODEL = AlphaBeta(shape=(1, 4))

FREE: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
    (lambda x: x + 1, (array(128, 128),)),
    (lambda x: x.reshape(8, 18), (array(144),)),
    (lambda x: jnp.argmax(x, 0), (array(144, 144),)),
    (lambda x: jnp.argsort(x), (array(1024, dtype=jnp.int32),)),
    (lambda a, b: a @ b, (array(128), array(128, 256))),
    (
        lambda a, b: -(a.transpose(0, 2, 1).reshape(64, 1024) @ b.reshape(1024, 64)),
        (array(64, 256, 4), array(1024, 16, 4)),
    ),
]


@pytest.mark.parametrize(
    ("run", "args"), FREE, ids=["add", "reshape", "argmax", "argsort", "matrix times vector", "dot of reshaped"]
)
def test_nothing_needs_to_be_sent(run: Callable[..., Any], args: tuple[Any, ...]) -> None:
    found = search(Program(run=run, args=args), MODEL)
    assert found.objective == 0 and not found.solution.collectives


def test_dropout_is_drawn_where_it_is_used() -> None:
    """The batch is split, masks included: what is sent are the two gradients."""

    def loss(params: Any, x: jax.Array, y: jax.Array, key: jax.Array) -> jax.Array:
        return squared_error(dropout(x @ params[0], key) @ params[1], y)

    key = jax.eval_shape(lambda: jax.random.key(0))
    sizes = array(32, 32, 16)
    program = training(loss, [array(16, 16)] * 2, sizes, sizes, key, optimizer=optax.sgd(1e-2))
    found = search(Program(run=program.run, args=program.args, batch=(2, 3)), MODEL)
    assert found.objective == pytest.approx(2 * MODEL.all_reduce(16 * 16 * 4, 1), rel=1e-6)


def test_columns_are_picked_where_the_batch_is_split() -> None:
    """The pick and its gradient stay on each device."""

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return squared_error((x @ params[0])[:, jnp.arange(16)] @ params[1], y)

    weights = [array(32, 32), array(16, 16)]
    found = search(training(loss, weights, array(256, 32), array(256, 16), optimizer=optax.sgd(1e-2)), MODEL)
    expected = model_of_two(32 * 32, 16 * 16)
    assert found.objective == pytest.approx(expected, rel=1e-6)
    assert set(found.count) == {"all_reduce"}


def model_of_two(*elements: int) -> float:
    """Seconds to reduce gradients of so many elements."""
    return sum(MODEL.all_reduce(4 * n, 1) for n in elements)
