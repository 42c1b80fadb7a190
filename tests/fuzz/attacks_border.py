"""Attacks of which a refusal is legitimate, but a wrong result is not."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tests.fuzz.attacks import (
    LABELS,
    PARAMS,
    SEQUENCES,
    SQUARE,
    B,
    D,
    Expectation,
    T,
    V,
    X,
    Z,
    attack,
    descend,
    floats,
    losses,
    net,
)

either = Expectation.EXACT_OR_REFUSED
LONG = {**PARAMS, "pos": floats(2 * B, D), "decay": jnp.float32(0.9), "ema": jnp.float32(1.0)}


def _updated(p, x, y, **new):
    own = {k: p[k] for k in PARAMS}
    value, grads = jax.value_and_grad(lambda q: losses(q, x, y).mean())(own)
    return {**p, **descend(own, grads), **new}, value


# --- the number of samples in Python ----------------------------------------------------------------------------------


@attack(either, X, LABELS, step=True, params=LONG)
def decay_to_the_power_of_samples(p, x, y):
    decay = p["decay"] ** x.shape[0]
    new, value = _updated(p, x, y)
    return {**new, "ema": decay * p["ema"] + (1 - decay) * value}, value, decay


@attack(either, X, LABELS, step=True, params=LONG)
def decay_in_a_loop_over_samples(p, x, y):
    decay = jax.lax.fori_loop(0, x.shape[0], lambda i, c: c * p["decay"], 1.0)
    return (*_updated(p, x, y, ema=decay * p["ema"]), decay)


@attack(either, X, LABELS, step=True, params=LONG)
def samples_seen(p, x, y):
    return _updated(p, x, y, ema=p["ema"] + x.shape[0])


@attack(either)
def hidden_to_the_power_of_samples(p, x, y):
    return (net(p, x) ** x.shape[0]).mean()


@attack(either)
def dtype_by_samples(p, x, y):
    dtype = jnp.bfloat16 if x.shape[0] >= B else jnp.float16
    return (net(p, x).astype(dtype).astype(jnp.float32) ** 2).mean()


@attack(either)
def column_by_samples(p, x, y):
    return (net(p, x)[:, x.shape[0] // 4] ** 2).mean()


@attack(either)
def direction_by_samples(p, x, y):
    return (jax.lax.cumsum(net(p, x), 1, reverse=x.shape[0] >= B) ** 3).mean()


@attack(either)
def roll_by_samples(p, x, y):
    return (jnp.roll(net(p, x), x.shape[0] // 3, axis=1) * x).mean()


@attack(either)
def branch_by_samples(p, x, y):
    own = losses(p, x, y)
    return own.mean() if x.shape[0] >= B else (own**2).mean()


@attack(either)
def layers_by_samples(p, x, y):
    h = x
    for _ in range(x.shape[0] // 4):
        h = net(p, h)
    return (h**2).mean()


@attack(either)
def iterations_by_samples(p, x, y):
    return (jax.lax.fori_loop(0, x.shape[0], lambda i, h: jnp.tanh(h @ p["w"]), x) ** 2).mean()


@attack(either)
def groups_by_samples(p, x, y):
    return (net(p, x).reshape(-1, 2, 3).sum(x.shape[0] // 8 + 1) ** 2).mean()


@attack(either)
def root_of_the_number_of_samples(p, x, y):
    return losses(p, x, y).sum() / x.shape[0] ** 0.5


@attack(either)
def counted_by_ones(p, x, y):
    return losses(p, x, y).sum() / jnp.ones(x.shape[0]).sum()


@attack(either)
def counted_by_the_last_position(p, x, y):
    return losses(p, x, y).sum() / (jnp.arange(x.shape[0])[-1] + 1)


@attack(either)
def counted_by_a_mask_of_positions(p, x, y):
    kept = jnp.arange(x.shape[0]) < 3
    return (losses(p, x, y) * kept).sum() / kept.sum()


@attack(either, key=True)
def drawn_by_samples(p, x, y, key):
    return (net(p, x) * jax.random.normal(key, (x.shape[0] + 1, D))[1:]).mean()


@attack(either, key=True)
def key_folded_with_the_number_of_samples(p, x, y, key):
    return (net(p, x) * jax.random.normal(jax.random.fold_in(key, x.shape[0]), (D,))).mean()


@attack(either, key=True)
def drawn_with_the_samples_last(p, x, y, key):
    return (net(p, x) * jax.random.normal(key, (D, x.shape[0])).T).mean()


# --- parameters over the batch ----------------------------------------------------------------------------------------


@attack(either, X, LABELS, params=LONG)
def parameters_sliced_by_samples(p, x, y):
    return (net(p, x) * p["pos"][: x.shape[0]]).mean()


@attack(either, X, LABELS, params=LONG)
def parameters_by_position(p, x, y):
    return (net(p, x) * p["pos"][jnp.arange(x.shape[0])]).mean()


@attack(either, X, LABELS, params=LONG)
def parameters_by_position_from_the_end(p, x, y):
    return (net(p, x) * p["pos"][2 * x.shape[0] - 1 - jnp.arange(x.shape[0])]).mean()


@attack(either, X, LABELS, params={**PARAMS, "own": floats(B, D)})
def parameters_of_each_sample(p, x, y):
    return (net(p, x) * p["own"]).mean()


@attack(either, X, LABELS, step=True, params={**PARAMS, "memory": floats(4, D)})
def memory_overwritten_by_label(p, x, y):
    new, value = _updated(p, x, y)
    return {**new, "memory": p["memory"].at[y % 4].set(x)}, value


@attack(either, X, LABELS, step=True, params={**PARAMS, "memory": floats(2 * B, D)})
def queue_of_hidden_values(p, x, y):
    new, value = _updated(p, x, y)
    return {**new, "memory": jnp.concatenate([net(p, x), p["memory"]])[: 2 * B]}, value


@attack(either, X, LABELS, step=True, params={**PARAMS, "memory": floats(2 * B, D)})
def memory_overwritten_by_position(p, x, y):
    new, value = _updated(p, x, y)
    return {**new, "memory": p["memory"].at[jnp.arange(x.shape[0]) + 3].set(net(p, x))}, value


@attack(either, X, LABELS, step=True, params={**PARAMS, "best": jnp.zeros(V)})
def largest_of_each_class_in_the_state(p, x, y):
    new, value = _updated(p, x, y)
    return {**new, "best": p["best"].at[y].max(net(p, x)[:, 0])}, value


# --- groups of samples ------------------------------------------------------------------------------------------------


@attack(either)
def pairs_of_neighbours(p, x, y):
    h = net(p, x)
    return (h[::2] * h[1::2]).mean()


@attack(either)
def statistics_of_groups_of_two(p, x, y):
    h = net(p, x).reshape(-1, 2, D)
    return (((h - h.mean(1, keepdims=True)) * x.reshape(-1, 2, D)) ** 2).mean()


@attack(either)
def first_half_against_second(p, x, y):
    h = net(p, x)
    return (h[: h.shape[0] // 2] * h[h.shape[0] // 2 :]).mean()


@attack(either)
def first_half_only(p, x, y):
    return losses(p, x, y)[: x.shape[0] // 2].sum()


@attack(either)
def first_three_only(p, x, y):
    return losses(p, x, y)[:2].sum()


@attack(either)
def quarters_by_hand(p, x, y):
    own = losses(p, x, y).reshape(4, -1)
    return sum(own[i].mean() * (i + 1) for i in range(4))


@attack(either)
def halves_weighed_differently(p, x, y):
    own = losses(p, x, y).reshape(2, -1).sum(1)
    return own[0] + 2 * own[1]


@attack(either)
def interleaved_halves(p, x, y):
    own = losses(p, x, y).reshape(-1, 2)
    return own[:, 0].sum() + 2 * own[:, 1].sum()


@attack(either)
def columns_of_a_reshaped_batch(p, x, y):
    return (net(p, x).reshape(D, -1) * jnp.arange(D)[:, None]).mean()


@attack(either, X, Z)
def concatenated_and_strided(p, x, z):
    h = net(p, jnp.concatenate([x, z]))
    return (h[::2] * h[1::2]).mean()


@attack(either, X, Z)
def interleaved_and_split(p, x, z):
    h = net(p, jnp.stack([x, z], 1).reshape(-1, D))
    return (h[::2] * h[1::2]).mean()


@attack(either, X, Z)
def interleaved_and_halved(p, x, z):
    h = net(p, jnp.stack([x, z], 1).reshape(-1, D))
    return (h[: x.shape[0]] * h[x.shape[0] :]).mean()


@attack(either, X, Z)
def concatenated_and_rolled_by_half(p, x, z):
    h = net(p, jnp.concatenate([x, z]))
    return (h * jnp.roll(h, x.shape[0], axis=0)).mean()


@attack(either, X, Z)
def concatenated_and_reversed_pairs(p, x, z):
    a, b = jnp.split(net(p, jnp.concatenate([x, z[::-1]])), 2)
    return (a * b).mean()


@attack(either, X, Z)
def concatenated_and_folded(p, x, z):
    return (net(p, jnp.concatenate([x, z])).reshape(-1, 2, D).prod(1) ** 2).mean()


@attack(either)
def tiled_and_folded(p, x, y):
    return (net(p, jnp.tile(x, (2, 1))).reshape(-1, 2, D).prod(1) ** 2).mean()


# --- sums by scans over samples ---------------------------------------------------------------------------------------


@attack(either)
def sum_by_a_scan(p, x, y):
    return jax.lax.scan(lambda s, own: (s + own, None), 0.0, losses(p, x, y))[0]


@attack(either)
def sum_by_a_scan_from_five(p, x, y):
    return jax.lax.scan(lambda s, own: (s + own, None), 5.0, losses(p, x, y))[0]


@attack(either)
def sum_by_a_scan_from_the_parameters(p, x, y):
    return jax.lax.scan(lambda s, own: (s + own, None), (p["w"] ** 2).sum(), losses(p, x, y))[0]


@attack(either)
def sum_by_a_scan_with_a_network_inside(p, x, y):
    return jax.lax.scan(lambda s, v: (s + (net(p, v) ** 2).sum(), s * 0.0), 0.0, x)[0]


@attack(either)
def sum_of_weighted_samples_by_a_scan(p, x, y):
    def body(c, own):
        return (c[0] + own * c[1], c[1] + 1.0), None

    return jax.lax.scan(body, (0.0, 0.0), losses(p, x, y))[0][0]


@attack(either)
def running_mean_by_a_scan(p, x, y):
    return jax.lax.scan(lambda m, own: (0.9 * m + 0.1 * own, None), 0.0, losses(p, x, y))[0]


@attack(either)
def sum_by_a_fori_loop(p, x, y):
    own = losses(p, x, y)
    return jax.lax.fori_loop(0, own.shape[0], lambda i, s: s + own[i], 0.0)


@attack(either)
def outputs_of_a_scan_without_a_carry(p, x, y):
    return jax.lax.scan(lambda c, own: (c, own**2), 1.0, losses(p, x, y))[1].mean()


@attack(either)
def constant_carry_used_in_the_body(p, x, y):
    return jax.lax.scan(lambda c, own: (c, own * c), p["b"][0], losses(p, x, y))[1].mean()


@attack(either)
def maximum_returned_by_a_scan(p, x, y):
    own = jax.lax.stop_gradient(losses(p, x, y))
    return losses(p, x, y).mean() + 0 * jax.lax.scan(lambda m, v: (jnp.maximum(m, v), None), 0.0, own)[0]


@attack(either, SEQUENCES)
def sum_over_time_of_a_batch_taken_for_time(p, x):
    return (jax.lax.scan(lambda h, now: (h + net(p, now), None), jnp.zeros((T, D)), x)[0]).mean()


# --- results that mix samples -----------------------------------------------------------------------------------------


@attack(either, step=True)
def returns_samples_in_reverse(p, x, y):
    return (*_updated(p, x, y), net(p, x)[::-1])


@attack(either, step=True)
def returns_pairs(p, x, y):
    return (*_updated(p, x, y), net(p, x) @ net(p, x).T)


@attack(either, step=True)
def returns_sorted_losses(p, x, y):
    return (*_updated(p, x, y), jnp.sort(losses(p, x, y)))


@attack(either, step=True)
def returns_the_place_of_the_largest(p, x, y):
    return (*_updated(p, x, y), losses(p, x, y).argmax(), losses(p, x, y).max())


@attack(either, step=True)
def returns_a_variance(p, x, y):
    return (*_updated(p, x, y), net(p, x).var(0))


@attack(either, step=True)
def returns_the_first_sample(p, x, y):
    return (*_updated(p, x, y), net(p, x)[0], losses(p, x, y)[-1])


@attack(either, step=True)
def returns_the_last_two(p, x, y):
    return (*_updated(p, x, y), net(p, x)[-2:])


@attack(either, step=True)
def returns_samples_flattened(p, x, y):
    return (*_updated(p, x, y), net(p, x).reshape(-1), net(p, x).T)


@attack(either, step=True)
def returns_norms_of_layers(p, x, y):
    h, norms = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), (jnp.abs(h).max(), h.mean(), (h**2).sum())), x, p["s"])
    return (*_updated(p, x, y), norms, h.mean())


@attack(either, step=True)
def returns_positions(p, x, y):
    return (*_updated(p, x, y), jnp.arange(x.shape[0]), jnp.arange(x.shape[0]).sum(), jnp.float32(x.shape[0]))


@attack(either, step=True)
def returns_whether_all_samples_agree(p, x, y):
    best = net(p, x).argmax(1)
    return (*_updated(p, x, y), (best == best[0]).all())


@attack(either, step=True)
def returns_a_product_and_bits(p, x, y):
    return (*_updated(p, x, y), (1 + 0.1 * net(p, x)).prod(), jax.lax.reduce_or(y, (0,)), jax.lax.reduce_and(y, (0,)))


@attack(either, step=True)
def returns_a_count_that_wraps(p, x, y):
    return (*_updated(p, x, y), (y * 40).astype(jnp.uint8).sum(dtype=jnp.uint8))


@attack(either, step=True)
def returns_a_sum_of_integers_divided(p, x, y):
    return (*_updated(p, x, y), y.sum() // 3, y.sum() % 3, y.sum() > 10)


@attack(either, step=True)
def returns_unique_labels(p, x, y):
    return (*_updated(p, x, y), jnp.unique(y, size=V, fill_value=-1))


# --- shapes that coincide ---------------------------------------------------------------------------------------------


@attack(either, SQUARE, params={"w": floats(B, B, scale=0.4)})
def diagonal_of_a_square_batch(p, x):
    return (jnp.diagonal(jnp.tanh(x @ p["w"])) ** 2).mean()


@attack(either, SQUARE, params={"w": floats(B, B, scale=0.4)})
def own_row_and_own_column(p, x):
    i = jnp.arange(x.shape[0])
    return (jnp.tanh(x @ p["w"])[i, i] ** 2).mean()


@attack(either, SQUARE, params={"w": floats(B, B, scale=0.4)})
def trace_of_a_square_batch(p, x):
    return jnp.trace(jnp.tanh(x @ p["w"]))


@attack(either, SQUARE, params={"w": floats(B, B, scale=0.4)})
def batch_as_a_mask_of_itself(p, x):
    return jnp.where(jnp.eye(x.shape[0], dtype=bool), 0.0, jnp.tanh(x @ p["w"])).mean()


@attack(either, SQUARE, params={"w": floats(B, B, scale=0.4)})
def batch_in_the_place_of_weights(p, x):
    return (jnp.tanh(p["w"] @ x) ** 2).mean()


@attack(either, SQUARE, params={"w": floats(B, B, scale=0.4)})
def broadcast_along_the_other_dim(p, x):
    h = jnp.tanh(x @ p["w"])
    return (h * h.sum(1)).mean()


@attack(either)
def broadcast_where_one_sample_would_fit(p, x, y):
    h = net(p, x)
    return (h * h.sum(1, keepdims=True) + h.mean(1).reshape(-1, 1)).mean()


@attack(either, floats(1, D), floats(1, D))
def one_sample(p, x, z):
    return ((net(p, x) - z) ** 2).mean()


@attack(either, X, floats(1, D))
def one_row_beside_the_batch(p, x, z):
    return ((net(p, x) - z) ** 2).mean()


@attack(either, X, floats(2, D), batch_argnums=(1,))
def two_rows_beside_the_batch(p, x, z):
    return ((net(p, x)[:, None] - z[None]) ** 2).min(1).mean()


@attack(either, X, floats(B, D), batch_argnums=(1,))
def as_many_prototypes_as_samples(p, x, z):
    return ((net(p, x)[:, None] - z[None]) ** 2).sum(-1).min(1).mean()


@attack(either, X, floats(B, D), batch_argnums=(1,))
def other_array_of_the_same_size_by_rows(p, x, z):
    return ((net(p, x) - z) ** 2).mean()


@attack(either)
def axis_index_of_samples(p, x, y):
    def each(a):
        return (net(p, a) ** 2).sum() * jax.lax.axis_index("samples")

    return jax.vmap(each, axis_name="samples")(x).mean()


@attack(either)
def axis_size_of_samples(p, x, y):
    def each(a):
        return (net(p, a) ** 2).sum() / jax.lax.psum(1, "samples")

    return jax.vmap(each, axis_name="samples")(x).sum()
