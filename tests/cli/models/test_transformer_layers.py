"""Attention against JAX's own, positions, and experts."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa_lite.cli.models.transformer_layers import (
    MAX_DISTANCE,
    NUM_BUCKETS,
    Attention,
    Experts,
    FeedForward,
    Latent,
    Projected,
    activation_function,
    attention_core,
    auxiliary_loss,
    distance_buckets,
    rotate,
    route,
    windowed_core,
)


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
    found = attention_core(Projected(query, key, value), bias, causal)
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


MLP = FeedForward(hidden=4, inner=6, activation="relu", gated=False, bias=False, fused=True)


def draw_weights_of(shapes, seed=0):
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return {name: jax.random.normal(key, shape) for key, (name, shape) in zip(keys, shapes.items(), strict=True)}


def random_gates(groups=2, tokens=12, experts=4):
    return jax.nn.softmax(jax.random.normal(make_key(3), (groups, tokens, experts)), axis=-1)


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_every_token_visits_its_best_experts(top_k):
    gates = random_gates()
    combine = np.asarray(route(gates, top_k, capacity=12 * top_k))
    visited = (combine > 0).sum(axis=3)
    assert (visited.sum(axis=2) == top_k).all() and visited.max() == 1
    best = np.argsort(-np.asarray(gates), axis=-1)[..., :top_k]
    assert all(visited[g, s, e] for g in range(2) for s in range(12) for e in best[g, s])
    np.testing.assert_allclose(combine.sum(axis=(2, 3)), 1.0, rtol=1e-5)
    assert (combine > 0).sum(axis=1).max() == 1, "two tokens share a slot"


def test_full_experts_drop_late_tokens_and_second_choices():
    gates = jnp.asarray([[[0.6, 0.4], [0.7, 0.3], [0.2, 0.8], [0.9, 0.1]]])
    combine = np.asarray(route(gates, 2, capacity=3))
    sent = (combine > 0).any(axis=3)[0]
    # Expert 0: first choice of tokens 0, 1 and 3; full. Expert 1: first choice of 2, then second of 0 and 1.
    assert sent.tolist() == [[True, True], [True, True], [False, True], [True, False]]
    np.testing.assert_allclose(combine.sum(axis=3)[0], gates[0] * sent, rtol=1e-5)


@pytest.mark.parametrize("experts", [2, 4, 8])
def test_the_auxiliary_loss_is_least_where_all_experts_get_the_same(experts):
    tokens = jnp.arange(4 * experts) % experts
    even = 0.5 * jax.nn.one_hot(tokens, experts) + 0.5 / experts
    np.testing.assert_allclose(auxiliary_loss(even[None]), [1 / experts**2], rtol=1e-6)
    all_to_one = 0.5 * jax.nn.one_hot(0 * tokens, experts) + 0.5 / experts
    first = 0.5 + 0.5 / experts
    np.testing.assert_allclose(auxiliary_loss(all_to_one[None]), [first / experts], rtol=1e-6)


@pytest.mark.parametrize("capacity", [1, 2, 5])
def test_no_expert_takes_more_than_its_capacity(capacity):
    combine = np.asarray(route(random_gates(), 2, capacity))
    assert (combine > 0).any(axis=3).sum(axis=1).max() <= capacity
    assert (combine > 0).sum(axis=1).max() == 1, "two tokens share a slot"


@pytest.mark.parametrize("factor, top_k, tokens, experts, capacity", [(1.0, 2, 2048, 16, 256), (1.25, 1, 10, 4, 4)])
def test_capacity(factor, top_k, tokens, experts, capacity):
    assert Experts(num_experts=experts, top_k=top_k, capacity_factor=factor, group_size=tokens).capacity == capacity


@pytest.mark.parametrize("group_size", [4, 8, 16])
@pytest.mark.parametrize("gated", [True, False])
def test_experts_are_mlps_weighted_by_gates(gated, group_size):
    mlp = replace(MLP, gated=gated)
    experts = Experts(num_experts=3, top_k=2, capacity_factor=3.0, group_size=group_size)
    weights = draw_weights_of(experts.shapes(mlp))
    x = jax.random.normal(make_key(5), (2, 8, 4))
    found = np.asarray(experts.apply(x, weights, mlp)).reshape(-1, 4)
    for token, y in zip(np.asarray(x).reshape(-1, 4), found, strict=True):
        gates = np.exp(token @ weights["w_router"])
        best = np.argsort(-gates)[:2]
        expected = sum(gates[e] * one_expert(token, weights, e, gated) for e in best) / gates[best].sum()
        np.testing.assert_allclose(y, expected, rtol=2e-4, atol=1e-4)


def one_expert(token, weights, number, gated):
    up, down = np.asarray(weights["w_up"][number]), np.asarray(weights["w_down"][number])
    if gated:
        return (np.maximum(token @ up[:, 0], 0) * (token @ up[:, 1])) @ down
    return np.maximum(token @ up, 0) @ down


def test_groups_must_fit_sequences():
    experts = Experts(num_experts=2, group_size=6)
    with pytest.raises(ValueError, match="groups of 6 tokens for 2 sequences of 8"):
        experts.apply(jnp.zeros((2, 8, 4)), draw_weights_of(experts.shapes(MLP)), MLP)


def test_too_many_experts_per_token_are_refused():
    with pytest.raises(ValueError, match="top_k=3"):
        Experts(num_experts=2, top_k=3)


def test_fused_and_separate_gates_agree():
    fused = replace(MLP, gated=True)
    separate = replace(fused, fused=False)
    weights = draw_weights_of(separate.shapes())
    both = {"w_gate_up": jnp.stack([weights["w_gate"], weights["w_up"]], axis=1), "w_down": weights["w_down"]}
    assert {name: w.shape for name, w in both.items()} == fused.shapes()
    x = jax.random.normal(make_key(6), (2, 3, 4))
    np.testing.assert_allclose(fused.apply(x, both), separate.apply(x, weights), rtol=1e-5, atol=1e-6)


def test_activations():
    x = jnp.asarray([-2.0, 3.0])
    assert activation_function("squared_relu")(x).tolist() == [0.0, 9.0]
    with pytest.raises(ValueError, match="got 'elu'"):
        activation_function("elu")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("window", [2, 4])
def test_a_window_is_attention_with_a_mask(window):
    keys = jax.random.split(make_key(5), 3)
    query = jax.random.normal(keys[0], (2, 8, 3, 2, 4))
    key, value = (jax.random.normal(k, (2, 8, 3, 4)) for k in keys[1:])
    distance = jnp.arange(8)[:, None] - jnp.arange(8)
    bias = jnp.where((distance >= 0) & (distance < window), 0.0, -jnp.inf)[None, :, None]
    expected = attention_core(Projected(query, key, value), bias, False)
    np.testing.assert_allclose(windowed_core(Projected(query, key, value), window), expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="A window divides"):
        windowed_core(Projected(query, key, value), 3)


def test_latent_attention_is_attention_on_what_its_latents_make():
    latent = Latent(query_rank=6, key_rank=5, rotary_dim=2)
    attend = Attention(hidden=8, num_heads=3, num_kv_heads=3, head_dim=4, causal=True, rotary_base=100.0, bias=False,
                       fused=True, recompute_core=False, latent=latent)  # fmt: skip
    keys = iter(jax.random.split(make_key(6), 9))
    weights = {name: jax.random.normal(next(keys), shape) for name, shape in attend.shapes().items()}
    x = jax.random.normal(next(keys), (2, 7, 8))

    def normed(low, scale):
        return low / np.sqrt(np.mean(np.square(low), -1, keepdims=True) + 1e-5) * scale

    low = normed(x @ weights["w_query_latent"], weights["scale_query"])
    query = np.einsum("bsc,cgd->bsgd", low, weights["w_q"][:, :, 0])
    query = np.concatenate([query[..., :4], rotate(jnp.asarray(query[..., 4:]), 100.0)], -1)
    both = x @ weights["w_key_latent"]
    low, turned = normed(both[..., :5], weights["scale_key"]), rotate(both[:, :, None, 5:], 100.0)
    key = np.concatenate(
        [np.einsum("bsc,cgd->bsgd", low, weights["w_k"]), np.broadcast_to(turned, (2, 7, 3, 2))], axis=-1
    )
    value = np.einsum("bsc,cgd->bsgd", low, weights["w_v"])
    padded = np.pad(value, ((0, 0), (0, 0), (0, 0), (0, 2)))
    mixed = jax.nn.dot_product_attention(jnp.asarray(query), jnp.asarray(key), jnp.asarray(padded), is_causal=True)
    expected = np.einsum("bsgd,gdh->bsh", mixed[..., :4], weights["w_out"][:, 0])
    np.testing.assert_allclose(attend.apply(x, weights), expected, rtol=1e-4, atol=1e-4)
