"""Attention: against JAX's own, and what positions may and may not do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa_lite.cli.models.attention import MAX_DISTANCE, NUM_BUCKETS, attention_core, distance_buckets, rotate


def make_key(seed):
    return jax.random.key(seed, impl="unsafe_rbg")  # compiles twice as fast as the default generator


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_core_is_attention(causal, biased):
    keys = jax.random.split(make_key(0), 4)
    batch, seq, group, ratio, dim = 2, 5, 3, 2, 4
    query = jax.random.normal(keys[0], (batch, seq, group, ratio, dim))
    key, value = (jax.random.normal(k, (batch, seq, group, dim)) for k in keys[1:3])
    bias = jax.random.normal(keys[3], (group, seq, ratio, seq)) if biased else None
    heads_first = None if bias is None else bias.transpose(0, 2, 1, 3).reshape(1, group * ratio, seq, seq)
    expected = jax.nn.dot_product_attention(
        query.reshape(batch, seq, group * ratio, dim), key, value, heads_first, is_causal=causal
    )
    found = attention_core(query, key, value, bias, causal)
    found = found.transpose(0, 2, 1, 3, 4).reshape(expected.shape)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_rotary_scores_know_only_distances():
    query, key = jax.random.normal(make_key(1), (2, 1, 1, 1, 8))
    turned_query = rotate(jnp.tile(query, (1, 6, 1, 1)), 100.0)[0, :, 0]
    turned_key = rotate(jnp.tile(key, (1, 6, 1, 1)), 100.0)[0, :, 0]
    scores = turned_query @ turned_key.T
    for distance in range(-5, 6):
        np.testing.assert_allclose(np.diag(scores, distance), scores.diagonal(distance)[0], rtol=1e-4, atol=1e-5)
    assert np.ptp(scores[0]) > 0.1
    np.testing.assert_allclose(jnp.linalg.norm(turned_key, axis=-1), jnp.linalg.norm(key[0, 0, 0]), rtol=1e-5)


def test_buckets_of_a_decoder():
    buckets = np.asarray(distance_buckets(300, 300, causal=True))
    assert (buckets[np.triu_indices(300)] == 0).all()
    assert buckets[15, :16].tolist() == list(range(15, -1, -1))
    assert (buckets[MAX_DISTANCE:, 0] == NUM_BUCKETS - 1).all()
    assert (np.diff(buckets[299]) <= 0).all() and buckets[299, 0] == NUM_BUCKETS - 1


def test_buckets_of_an_encoder_tell_directions_apart():
    buckets = np.asarray(distance_buckets(300, 300, causal=False))
    lower, upper = buckets[np.tril_indices(300)], buckets[np.triu_indices(300, 1)]
    assert set(lower) == set(range(NUM_BUCKETS // 2))
    assert set(upper) == set(range(NUM_BUCKETS // 2 + 1, NUM_BUCKETS))
    assert buckets[3, 1] == 2 and buckets[1, 3] == 2 + NUM_BUCKETS // 2
