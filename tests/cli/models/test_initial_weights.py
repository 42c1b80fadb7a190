"""Weights from shapes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa_lite.cli.models.initial_weights import count, draw, segment_sizes, stacked

SHAPES = {"w": (3, 4), "layers": [{"w_up": (5, 2), "b_up": (5, 2), "norm": {"scale": (5, 2)}}]}


def test_count():
    assert count(SHAPES) == 12 + 3 * 10


def test_stacked():
    assert stacked([{"w": (2,)}, {"w": ()}], 7) == [{"w": (7, 2)}, {"w": (7,)}]


@pytest.mark.parametrize(
    "total, segments, sizes",
    [(5, 1, (5,)), (6, 3, (2, 2, 2)), (7, 3, (2, 3, 2)), (9, 4, (2, 3, 2, 2)), (3, 3, (1, 1, 1))],
)
def test_longer_segments_are_in_the_middle(total, segments, sizes):
    assert segment_sizes(total, segments) == sizes


def test_segments_are_parts_of_the_same_weights():
    whole = draw(jax.random.key(0), SHAPES, jnp.float32, 1)
    parts = draw(jax.random.key(0), SHAPES, jnp.float32, 2)
    assert [len(part[0]["w_up"]) for part in parts["layers"]] == [3, 2]
    joined = jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts["layers"])
    jax.tree.map(np.testing.assert_array_equal, joined, whole["layers"][0])


def test_names_say_how_weights_are_drawn():
    (layer,) = draw(jax.random.key(0), SHAPES, jnp.bfloat16, 1)["layers"][0]
    assert (layer["b_up"] == 0).all() and (layer["norm"]["scale"] == 1).all()
    assert 0 < jnp.std(layer["w_up"].astype(jnp.float32)) < 0.1
    assert {leaf.dtype for leaf in jax.tree.leaves(layer)} == {jnp.dtype(jnp.bfloat16)}
