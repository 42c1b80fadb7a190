"""Floats as integers in the same order: what lets a maximum over devices keep NaN."""

import jax.numpy as jnp
import numpy as np
import pytest

from alpa_lite.lower.run_local import floats_in_order, ordered_integers

IN_ORDER = [-np.inf, -3e38, -1.5, -1e-38, -0.0, 0.0, 1e-38, 1.0, 2.0, 3e38, np.inf]


@pytest.mark.parametrize("nan_is_largest", [True, False])
def test_integers_keep_the_order_of_floats(nan_is_largest):
    x = jnp.asarray(IN_ORDER, jnp.float32)
    ordered = np.asarray(ordered_integers(x, nan_is_largest=nan_is_largest)).astype(np.int64)
    assert (np.diff(ordered) > 0).all()


@pytest.mark.parametrize("nan", [np.nan, -np.nan])
def test_nan_is_beyond_infinity(nan):
    x = jnp.asarray([nan, np.inf, -np.inf], jnp.float32)
    largest = np.asarray(ordered_integers(x, nan_is_largest=True))
    smallest = np.asarray(ordered_integers(x, nan_is_largest=False))
    assert largest.argmax() == 0
    assert smallest.argmin() == 0


@pytest.mark.parametrize("nan_is_largest", [True, False])
def test_floats_come_back(nan_is_largest):
    x = jnp.asarray([*IN_ORDER, np.nan], jnp.float32)
    back = floats_in_order(ordered_integers(x, nan_is_largest=nan_is_largest), x.dtype)
    np.testing.assert_array_equal(np.asarray(back), np.asarray(x))
    np.testing.assert_array_equal(np.signbit(back[:-1]), np.signbit(x[:-1]))
