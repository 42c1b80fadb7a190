"""Convolutions with batch normalisation on four devices (alpa-projects/alpa, tests/shard_parallel/test_conv.py)."""

from __future__ import annotations

from math import prod

import jax
import pytest

from alpa_lite.intra_op.strategies import BatchSplit
from tests.golden.alpha_beta import ONE_DIM, AlphaBeta, line
from tests.golden.models import convolutions, depthwise_convolutions
from tests.golden.search import DATA_AND_MODEL, data_parallel, search

SMALL = convolutions(layers=3, batch=16, image=16, channels=4)


@pytest.mark.parametrize("shape", ONE_DIM, ids=str)
def test_many_images_are_split(shape: tuple[int, int]) -> None:
    """The gradient of each parameter, and two sums in each pass through a normalisation. Alpa's tolerance is 5 %.

    Alpa adds its penalty of 3 for each parameter and twice for each statistic, and the same for both in its tests.
    """
    model, dim = line(shape)
    params, _, statistics, *_ = SMALL.args
    sizes = [4 * prod(leaf.shape) for leaf in jax.tree.leaves((params, statistics, statistics))]
    expected = sum(model.all_reduce(size, dim) for size in sizes)
    found = search(SMALL, model)
    assert found.objective == pytest.approx(expected, rel=1e-6)
    assert found.objective + 3 * len(sizes) == pytest.approx(expected + 3 * len(sizes), rel=0.05)
    assert found.count == {"all_reduce": len(sizes)}
    assert all(spec.is_replicated for name, spec in found.specs.items() if name.startswith("params"))


@pytest.mark.parametrize("shape", ONE_DIM, ids=str)
def test_many_images_are_split_and_the_optimizer_state_with_them(shape: tuple[int, int]) -> None:
    """The sums within the normalisations stay; the statistics, which only the update reads, are split and gathered."""
    found = search(SMALL, line(shape)[0], restriction=data_parallel(optimizer=BatchSplit.MUST))
    assert found.count == {"all_reduce": 4 * 3, "reduce_scatter": 3 * 3, "all_gather": 3 * 3 + 2 * 3}
    kernels = [spec for name, spec in found.specs.items() if name.startswith("state") and len(spec.dims) > 1]
    assert len(kernels) == 3 and not any(spec.is_replicated for spec in kernels)


@pytest.mark.parametrize("shape", ONE_DIM, ids=str)
def test_many_channels_are_split(shape: tuple[int, int]) -> None:
    """Channels out, in, out, in: two sums in the forward pass, one in the backward pass.

    Scattered instead of made whole, the sums cost less, as the normalisation behind them is elementwise.
    """
    model, dim = line(shape, forbidden=("reduce_scatter",))
    program = convolutions(layers=4, batch=8, image=16, channels=256)
    second, fourth = (8 * side * side * 256 * 4 for side in (4, 1))
    expected = 2 * model.all_reduce(second, dim) + model.all_reduce(fourth, dim)
    found = search(program, model)
    assert found.objective == pytest.approx(expected, rel=1e-6)
    assert found.count == {"all_reduce": 3}
    assert search(program, AlphaBeta(shape=shape)).objective < 0.7 * expected


def test_two_dims() -> None:
    """Alpa states no price. Free dims are no dearer than any fixed roles."""
    model = AlphaBeta(shape=(2, 2), beta=(1.0, 0.1))
    program = convolutions(layers=4, batch=8, image=32, channels=8)
    free, roles, batch = (
        search(program, model, **options).objective
        for options in ({}, {"restriction": DATA_AND_MODEL}, {"restriction": data_parallel()})
    )
    assert free <= min(roles, batch)


@pytest.mark.parametrize("shape", ONE_DIM, ids=str)
def test_a_convolution_of_each_channel_needs_no_sum(shape: tuple[int, int]) -> None:
    model, dim = line(shape)
    found = search(depthwise_convolutions(batch=4, image=8, channels=256), model)
    assert found.objective == pytest.approx(model.all_reduce(4 * 8 * 8 * 256 * 4, dim), rel=1e-6)
    assert found.count == {"all_reduce": 1}
    names = ("widen", "depthwise", "narrow")
    specs = [f"[-, -, -, {dim}]", f"[-, -, -, {dim}]", f"[-, -, {dim}, -]"]
    assert [str(found.specs[f"params/{name}"]) for name in names] == specs
