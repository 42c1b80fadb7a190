"""Small programs whose best layout has a closed price; communication alone is priced.

The cases are those of Alpa's pure Python search (alpa-projects/alpa, playground/auto_sharding_solver:
test_solver_mlp.py and test_solver_attention.py), within its tolerance of 0.1 %.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import pytest

from alpa_lite.intra_op.strategies import FREE_CHOICE, Restriction
from tests.golden.alpha_beta import ONE_DIM, AlphaBeta, line
from tests.golden.models import Program, array, attention_forward, linear_network, whole
from tests.golden.search import DATA_AND_MODEL, data_parallel, search

TOLERANCE = 1e-3
TWO_DIMS = [(4, 8), (8, 4), (3, 4)]


def divided_batch(shape: tuple[int, int]) -> int:
    """The next multiple of all devices from 1024 on."""
    devices = shape[0] * shape[1]
    return -(-1024 // devices) * devices


def same(expected: float) -> Any:
    """Equal within the tolerance of the playground."""
    return pytest.approx(expected, rel=TOLERANCE)


# ---------------------------------------------------------------------------------------------------- perceptrons


@pytest.mark.parametrize("shape", ONE_DIM, ids=str)
@pytest.mark.parametrize("layers", [2, 12])
def test_small_weights_are_reduced(layers: int, shape: tuple[int, int]) -> None:
    model, dim = line(shape)
    found = search(linear_network(layers=layers, batch=1024, hidden=128), model)
    assert found.objective == same(layers * model.all_reduce(128 * 128 * 4, dim))
    assert found.count == {"all_reduce": layers}


@pytest.mark.parametrize("shape", ONE_DIM, ids=str)
@pytest.mark.parametrize("layers", [2, 12])
def test_small_activations_are_reduced(layers: int, shape: tuple[int, int]) -> None:
    model, dim = line(shape)
    found = search(linear_network(layers=layers, batch=128, hidden=1024), model)
    assert found.objective == same((layers - 1) * model.all_reduce(128 * 1024 * 4, dim))
    assert found.count == {"all_reduce": layers - 1}


@pytest.mark.parametrize("shape", TWO_DIMS, ids=str)
@pytest.mark.parametrize("layers", [2, 4, 12])
def test_dear_and_cheap_dims(layers: int, shape: tuple[int, int]) -> None:
    """The dear dim splits the batch, the cheap one the weights.

    Devices split only what they divide, so that on the mesh (3, 4) the batch is 1032 instead of 1024.
    """
    model, batch = AlphaBeta(shape=shape, beta=(1.0, 0.01)), divided_batch(shape)
    program = linear_network(layers=layers, batch=batch, hidden=128)
    weights = layers * model.all_reduce(128 * 128 * 4 / shape[1], 0)
    expected = weights + (layers - 1) * model.all_reduce(batch * 128 * 4 / shape[0], 1)
    found = search(program, model, restriction=DATA_AND_MODEL)
    assert found.objective == same(expected)
    assert found.count == {"all_reduce": 2 * layers - 1}
    # With free dims, gradients may also be scattered over the cheap dim before they are reduced over the dear one.
    scattered = model.reduce_scatter(128 * 128 * 4, 1) + model.all_gather(128 * 128 * 4, 1)
    free = search(program, model).objective
    assert free == same(min(expected, weights + layers * scattered))


@pytest.mark.parametrize("shape", ONE_DIM, ids=str)
def test_biases_are_reduced_with_their_weights(shape: tuple[int, int]) -> None:
    model, dim = line(shape)
    found = search(linear_network(layers=2, batch=1024, hidden=128, bias=True), model)
    assert found.objective == same(2 * model.all_reduce(128 * 128 * 4, dim) + 2 * model.all_reduce(128 * 4, dim))


@pytest.mark.parametrize("shape", ONE_DIM, ids=str)
def test_biases_cost_nothing_where_activations_are_reduced(shape: tuple[int, int]) -> None:
    model, dim = line(shape)
    found = search(linear_network(layers=2, batch=128, hidden=1024, bias=True), model)
    assert found.objective == same(model.all_reduce(128 * 1024 * 4, dim))


@pytest.mark.parametrize("shape", TWO_DIMS, ids=str)
def test_biases_on_dear_and_cheap_dims(shape: tuple[int, int]) -> None:
    """A bias behind a sum of parts is whole on the cheap dim: its gradient is reduced so, or in parts and gathered.

    Alpa does the first, which is what is left when nothing is gathered.
    """
    options: dict[str, Any] = {"shape": shape, "beta": (1.0, 0.01)}
    model, batch = AlphaBeta(**options), divided_batch(shape)
    program = linear_network(layers=2, batch=batch, hidden=128, bias=True)
    weights = 2 * model.all_reduce(128 * 128 * 4 / shape[1], 0) + model.all_reduce(batch * 128 * 4 / shape[0], 1)
    part, gathered = model.all_reduce(128 * 4 / shape[1], 0), model.all_gather(128 * 4, 1)
    alpa = weights + part + model.all_reduce(128 * 4, 0)
    without = AlphaBeta(**options, forbidden=("all_gather",))
    assert search(program, without, restriction=DATA_AND_MODEL).objective == same(alpa)
    found = search(program, model, restriction=DATA_AND_MODEL).objective
    assert found == same(weights + 2 * part + gathered) and found <= alpa


def test_the_batch_on_a_dim_where_that_is_dear() -> None:
    model = AlphaBeta(shape=(4, 1))
    found = search(linear_network(layers=2, batch=128, hidden=1024), model, restriction=data_parallel())
    assert found.objective == same(2 * model.all_reduce(1024 * 1024 * 4, 0))


# ---------------------------------------------------------------------------------------------------- one product


def transposed(x: jax.Array, y: jax.Array) -> jax.Array:
    return whole((x.T @ y.T).T)


def transposed_often(x: jax.Array, y: jax.Array) -> jax.Array:
    return whole((x.T.T.T @ y.T.T.T).T.T)


def reshaped(x: jax.Array, y: jax.Array) -> jax.Array:
    return whole(x.reshape(128, 2048) @ y.reshape(2048, 128))


def reshaped_often(x: jax.Array, y: jax.Array) -> jax.Array:
    left = x.reshape(128, 2048).reshape(32, 4, 2048).reshape(128, 2048)
    right = y.reshape(2048, 128).reshape(512, 4, 128).reshape(2048, 128)
    return whole((left @ right).reshape(128, 2, 64))


def plain(x: jax.Array, y: jax.Array) -> jax.Array:
    return whole(x @ y)


LONG = 2048
PRODUCTS: list[tuple[Callable[..., Any], tuple[int, ...], tuple[int, ...]]] = [
    (plain, (128, LONG), (LONG, 128)),
    (transposed, (LONG, 128), (128, LONG)),
    (transposed_often, (LONG, 128), (128, LONG)),
    (reshaped, (128, LONG // 2, 2), (LONG // 2, 2, 128)),
    (reshaped_often, (128, LONG // 2, 2), (LONG // 2, 2, 128)),
]


@pytest.mark.parametrize("shape", ONE_DIM, ids=str)
@pytest.mark.parametrize(("run", "x", "y"), PRODUCTS, ids=[run.__name__ for run, _, _ in PRODUCTS])
def test_a_product_of_long_rows_is_reduced_once(
    run: Callable[..., Any], x: tuple[int, ...], y: tuple[int, ...], shape: tuple[int, int]
) -> None:
    """Nothing can be gathered, and each device must have the result: the long dim is split."""
    model, dim = line(shape, forbidden=("all_gather",))
    found = search(Program(run=run, args=(array(*x), array(*y))), model)
    assert found.objective == same(model.all_reduce(128 * 128 * 4, dim))


def test_two_products_that_are_added_are_reduced_once() -> None:
    """Alpa reduces each of the two; here the sum of two partial sums is one."""

    def run(x: jax.Array, y: jax.Array) -> jax.Array:
        return whole(x @ y + x @ y)

    model, dim = line((1, 4), forbidden=("all_gather",))
    found = search(Program(run=run, args=(array(128, LONG), array(LONG, 128))), model)
    assert found.objective == same(model.all_reduce(128 * 128 * 4, dim))


def test_three_products_that_are_added_to_an_array() -> None:
    """As the array is whole, each sum with it is."""

    def run(x: jax.Array, y: jax.Array, z: jax.Array) -> Any:
        for _ in range(3):
            z = z + (x @ y).reshape(32, 4, 128)
        results = [jax.numpy.exp(z) for _ in range(6)]
        return results, whole(results[-1])

    model, dim = line((1, 4), forbidden=("all_gather",))
    found = search(Program(run=run, args=(array(128, LONG), array(LONG, 128), array(32, 4, 128))), model)
    assert found.objective == same(3 * model.all_reduce(128 * 128 * 4, dim))


# ---------------------------------------------------------------------------------------------------- attention


@pytest.mark.parametrize("shape", ONE_DIM, ids=str)
def test_attention_is_split_by_head_and_reduced_once(shape: tuple[int, int]) -> None:
    model, dim = line(shape, forbidden=("all_gather",))
    found = search(attention_forward(batch=4, seq=128, hidden=512, heads=16, whole_output=True), model)
    assert found.objective == same(model.all_reduce(4 * 128 * 512 * 4, dim))


@pytest.mark.parametrize("restriction", [DATA_AND_MODEL, FREE_CHOICE], ids=["roles", "free"])
def test_attention_is_split_by_sample_and_by_head(restriction: Restriction) -> None:
    model = AlphaBeta(shape=(4, 4), forbidden=("all_gather",))
    program = attention_forward(batch=4, seq=128, hidden=2048, heads=16, whole_output=False)
    found = search(program, model, restriction=restriction)
    assert found.objective == same(model.all_reduce(4 * 128 * 2048 * 4 / 4, 1))
    assert found.count == {"all_reduce": 1}
