"""Attacks that are sums over their samples, or become so by what data alone fixes: micro-batches must accept them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tests.fuzz.attacks import (
    IMAGES,
    LABELS,
    PARAMS,
    SEQUENCES,
    SQUARE,
    TOKENS,
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
    logp,
    losses,
    net,
    trained,
)

exact = Expectation.EXACT
IMAGE_DIMS = ("NHWC", "HWIO", "NHWC")


# --- tokens and heads in the batch dim --------------------------------------------------------------------------------


@attack(exact, TOKENS)
def loss_on_flat_logits(p, tokens):
    logits = jnp.tanh(p["e"][tokens] @ p["w"]) @ p["v"]
    flat, targets = logits.reshape(-1, V), tokens.reshape(-1)
    return -jax.nn.log_softmax(flat)[jnp.arange(targets.shape[0]), targets].mean()


@attack(exact, SEQUENCES)
def flattened_and_back(p, x):
    flat = net(p, x.reshape(-1, D))
    return (flat.reshape(-1, T, D).sum(1) ** 2).mean()


@attack(exact, SEQUENCES)
def flattened_twice(p, x):
    flat = net(p, x.reshape(-1, D)).reshape(-1, T, D)
    return (net(p, flat.reshape(-1, 2, D).sum(1)).reshape(-1, T // 2, D).max(1) ** 2).mean()


@attack(exact, SEQUENCES)
def experts_on_flat_tokens(p, x):
    flat = x.reshape(-1, D)
    gates = jax.nn.softmax(flat @ p["w"][:, :2])
    experts = jnp.einsum("nd,edf->nef", flat, p["s"])
    return (jnp.einsum("ne,nef->nf", gates, jnp.tanh(experts)).reshape(x.shape) ** 2).mean()


@attack(exact, SEQUENCES)
def top_expert_of_flat_tokens(p, x):
    flat = x.reshape(-1, D)
    gates = jax.nn.softmax(flat @ p["w"][:, :2])
    best = jnp.argmax(gates, -1)
    chosen = jax.nn.one_hot(best, 2) * gates
    out = jnp.einsum("ne,nd,edf->nf", chosen, flat, p["s"])
    return (jnp.tanh(out).reshape(x.shape).mean(1) ** 2).sum()


@attack(exact, SEQUENCES)
def heads_folded_into_the_batch(p, x):
    def heads(z):
        return z.reshape(-1, T, 2, 3).transpose(0, 2, 1, 3).reshape(-1, T, 3)

    q, k = heads(x @ p["w"]), heads(x @ p["v"])
    out = jax.nn.softmax(q @ k.swapaxes(1, 2)) @ heads(x)
    return (out.reshape(-1, 2, T, 3).transpose(0, 2, 1, 3).reshape(-1, T, D) ** 2).mean()


@attack(exact, SEQUENCES)
def attention(p, x):
    q, k, v = x @ p["w"], x @ p["v"], x @ p["s"][0]
    weights = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((T, T), bool)), q @ k.swapaxes(1, 2), -1e9))
    return ((weights @ v) ** 2).mean()


@attack(exact, floats(B, B, D))
def attention_with_as_many_tokens_as_samples(p, x):
    weights = jax.nn.softmax((x @ p["w"]) @ x.swapaxes(1, 2))
    return ((weights @ x) ** 2).mean()


@attack(exact, SEQUENCES)
def tokens_by_lax_map_over_samples(p, x):
    return jax.lax.map(lambda sample: (net(p, sample).sum(0) ** 2).sum(), x).mean()


# --- denominators -----------------------------------------------------------------------------------------------------


@attack(exact)
def masked_mean(p, x, y):
    mask = (y > 1).astype(jnp.float32)
    return (losses(p, x, y) * mask).sum() / mask.sum()


@attack(exact)
def two_data_sums_in_a_denominator(p, x, y):
    return (losses(p, x, y) * (y > 1)).sum() / ((y > 1).sum() + (x[:, 0] > 0).sum())


@attack(exact)
def three_data_sums_and_a_floor_in_a_denominator(p, x, y):
    count = (y > 1).sum() * 2 + jnp.maximum((x[:, 0] > 0).sum(), 1) + x.mean() ** 2
    return (losses(p, x, y) * (y > 1)).sum() / count


@attack(exact)
def weights_of_classes_from_their_counts(p, x, y):
    counts = jnp.zeros(V).at[y].add(1.0)
    return (losses(p, x, y) / counts[y]).mean()


@attack(exact)
def weights_by_softmax_over_data(p, x, y):
    return (losses(p, x, y) * jax.nn.softmax(x[:, 0])).sum()


@attack(exact, TOKENS)
def mean_over_tokens_then_over_samples(p, tokens):
    mask = (tokens != 0).astype(jnp.float32)
    each = (jnp.tanh(p["e"][tokens] @ p["w"]) ** 2).sum(-1)
    return ((each * mask).sum(1) / jnp.maximum(mask.sum(1), 1)).mean()


# --- scans over layers ------------------------------------------------------------------------------------------------


@attack(exact)
def weight_decay_in_the_ys_of_a_scan(p, x, y):
    h, norms = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), (w**2).sum()), x, p["s"])
    return (h**2).mean() + norms.sum()


@attack(exact)
def counter_carried_over_layers(p, x, y):
    def layer(carry, w):
        h, count = carry
        return (jnp.tanh(h @ w) / (1.0 + count), count + 1.0), count

    (h, count), counts = jax.lax.scan(layer, (x, 0.0), p["s"])
    return (h**2).mean() * count + counts.sum()


@attack(exact)
def counter_of_layers_used_per_sample(p, x, y):
    def layer(carry, w):
        h, count = carry
        return (jnp.tanh(h @ w), count + 1.0), count

    (h, count), counts = jax.lax.scan(layer, (x, 0.0), p["s"])
    return ((h * (count + counts.sum())) ** 2).mean()


@attack(exact, key=True)
def key_carried_over_layers(p, x, y, key):
    def layer(carry, w):
        h, key = carry
        key, own = jax.random.split(key)
        return (jnp.tanh(h @ w) * jax.random.bernoulli(own, 0.7, h.shape), key), None

    (h, _), _ = jax.lax.scan(layer, (x, key), p["s"])
    return (h**2).mean()


@attack(exact, key=True, step=True)
def key_returned_by_a_scan(p, x, y, key):
    def loss(p):
        def layer(carry, w):
            h, key = carry
            key, own = jax.random.split(key)
            return (jnp.tanh(h @ w) * jax.random.bernoulli(own, 0.7, h.shape), key), (w**2).mean()

        (h, last), norms = jax.lax.scan(layer, (x, key), p["s"])
        return (h**2).mean(), (last, norms)

    (value, aux), grads = jax.value_and_grad(loss, has_aux=True)(p)
    return descend(p, grads), value, aux


@attack(exact)
def own_label_in_a_scan_body(p, x, y):
    def layer(h, w):
        return jnp.tanh(h @ w), -jax.nn.log_softmax(h)[jnp.arange(h.shape[0]), y].mean()

    return jax.lax.scan(layer, x, p["s"])[1].sum()


@attack(exact)
def losses_of_samples_in_the_ys_of_a_scan(p, x, y):
    def layer(h, w):
        return jnp.tanh(h @ w), -jnp.take_along_axis(jax.nn.log_softmax(h), y[:, None], 1)[:, 0]

    return jax.lax.scan(layer, x, p["s"])[1].mean()


@attack(exact)
def loop_over_layers(p, x, y):
    return (jax.lax.fori_loop(0, 2, lambda i, h: jnp.tanh(h @ p["s"][i]), x) ** 2).mean()


@attack(exact, SEQUENCES)
def recurrence_over_time(p, x):
    def cell(h, now):
        h = jnp.tanh(now @ p["w"] + h @ p["v"])
        return h, h.sum(-1)

    h, sums = jax.lax.scan(cell, jnp.zeros((x.shape[0], D)), x.swapaxes(0, 1))
    return (h**2).mean() + sums.mean()


@attack(exact, SEQUENCES.swapaxes(0, 1), batch_argnums={1: 1})
def recurrence_over_time_major_data(p, x):
    def cell(h, now):
        h = jnp.tanh(now @ p["w"] + h @ p["v"])
        return h, h

    return (jax.lax.scan(cell, jnp.zeros((x.shape[1], D)), x)[1] ** 2).mean()


@attack(exact)
def checkpointed_layers(p, x, y):
    return (jax.lax.scan(jax.checkpoint(lambda h, w: (jnp.tanh(h @ w), None)), x, p["s"])[0] ** 2).mean()


# --- own rows, one-hots, positions ------------------------------------------------------------------------------------


@attack(exact)
def own_label(p, x, y):
    return -logp(p, x)[jnp.arange(x.shape[0]), y].mean()


@attack(exact)
def one_hot_by_set(p, x, y):
    return -(logp(p, x) * jnp.zeros((x.shape[0], V)).at[jnp.arange(x.shape[0]), y].set(1.0)).mean()


@attack(exact)
def one_hot_by_add(p, x, y):
    return -(logp(p, x) * jnp.zeros((x.shape[0], V)).at[jnp.arange(x.shape[0]), y].add(1.0)).mean()


@attack(exact)
def own_logit_lowered(p, x, y):
    return jax.nn.logsumexp(net(p, x).at[jnp.arange(x.shape[0]), y].add(-1.0), axis=1).mean()


@attack(exact)
def linspace_over_the_batch(p, x, y):
    return (losses(p, x, y) * jnp.linspace(0.0, 1.0, x.shape[0])).mean()


@attack(exact)
def positions_plus_one(p, x, y):
    return (losses(p, x, y) * (jnp.arange(x.shape[0]) + 1)).mean()


@attack(exact)
def positions_squared(p, x, y):
    return (losses(p, x, y) * jnp.arange(x.shape[0]) ** 2).mean()


@attack(exact)
def positions_reversed(p, x, y):
    return (losses(p, x, y) * jnp.arange(x.shape[0])[::-1]).mean()


@attack(exact)
def geometric_weights_by_cumprod(p, x, y):
    return (losses(p, x, y) * jnp.cumprod(jnp.full(x.shape[0], 0.9))).sum()


@attack(exact)
def even_samples_only(p, x, y):
    return jnp.where(jnp.arange(x.shape[0]) % 2 == 0, losses(p, x, y), 0.0).sum()


# --- arrays that are encoded together ---------------------------------------------------------------------------------


@attack(exact)
def two_views_encoded_as_one(p, x, y):
    return sum(jnp.abs(z).mean() for z in jnp.split(net(p, jnp.concatenate([x, 2 * x])), 2))


@attack(exact, X, Z)
def two_arrays_encoded_as_one(p, x, z):
    a, b = jnp.split(net(p, jnp.concatenate([x, z])), 2)
    return ((a - b) ** 2).mean()


@attack(exact, X, Z)
def three_arrays_encoded_as_one(p, x, z):
    n = x.shape[0]
    h = net(p, jnp.concatenate([x, z, x * z]))
    return ((h[:n] * h[n : 2 * n] + h[2 * n :]) ** 2).mean()


@attack(exact, X, Z)
def stacked_and_unstacked(p, x, z):
    a, b = net(p, jnp.stack([x, z]))
    return (a * b).mean()


@attack(exact)
def repeated_samples(p, x, y):
    return (net(p, jnp.repeat(x, 2, axis=0) * 1.5).reshape(-1, 2, D).prod(1) ** 2).mean()


@attack(exact)
def tiled_samples(p, x, y):
    h = net(p, jnp.tile(x, (2, 1)))
    return (h.reshape(2, -1, D)[0] * h.reshape(2, -1, D)[1] ** 2).mean()


@attack(exact, floats(B, 2, D))
def contrast_within_a_sample(p, x):
    h = net(p, x)
    return jax.nn.logsumexp(h @ h.swapaxes(1, 2), axis=(1, 2)).mean()


@attack(exact, X, Z)
def two_batches_of_one_size(p, x, z):
    return (net(p, x) * jnp.tanh(z @ p["v"])).mean()


@attack(exact)
def one_batch_used_twice(p, x, y):
    return (net(p, x) * jnp.tanh(x @ p["v"])).mean() + losses(p, x, y).mean()


@attack(exact, SQUARE, params={"w": floats(B, B, scale=0.4)})
def as_many_features_as_samples(p, x):
    return (jnp.tanh(x @ p["w"]) ** 2).mean()


# --- draws ------------------------------------------------------------------------------------------------------------


@attack(exact, key=True)
def dropout(p, x, y, key):
    return (net(p, x) * jax.random.bernoulli(key, 0.5, (x.shape[0], D))).mean()


@attack(exact, key=True)
def normal_noise(p, x, y, key):
    return (net(p, x + jax.random.normal(key, x.shape)) ** 2).mean()


@attack(exact, key=True)
def gamma_noise(p, x, y, key):
    return net(p, x * jax.random.gamma(key, 2.0, x.shape)).mean()


@attack(exact, key=True)
def poisson_noise(p, x, y, key):
    return net(p, x + jax.random.poisson(key, 2.0, x.shape)).mean()


@attack(exact, key=True)
def gamma_of_samples(p, x, y, key):
    return net(p, x * jax.random.gamma(key, jnp.abs(x) + 1.0)).mean()


@attack(exact, key=True)
def key_split_per_sample(p, x, y, key):
    noise = jax.vmap(lambda k: jax.random.normal(k, (D,)))(jax.random.split(key, x.shape[0]))
    return (net(p, x + noise) ** 2).mean()


@attack(exact, key=True)
def key_folded_with_positions(p, x, y, key):
    noise = jax.vmap(lambda i: jax.random.uniform(jax.random.fold_in(key, i), (D,)))(jnp.arange(x.shape[0]))
    return (net(p, x + noise) ** 2).mean()


@attack(exact, key=True)
def features_shuffled_per_sample(p, x, y, key):
    shuffled = jax.vmap(jax.random.permutation)(jax.random.split(key, x.shape[0]), x)
    return (net(p, shuffled) ** 2).mean()


@attack(exact, key=True)
def labels_sampled(p, x, y, key):
    drawn = jax.random.categorical(key, jax.lax.stop_gradient(logp(p, x)))
    return losses(p, x, drawn).mean()


@attack(exact, key=True)
def gumbel_softmax(p, x, y, key):
    return (jax.nn.softmax(net(p, x) + jax.random.gumbel(key, x.shape)) @ p["v"]).std(1).mean()


@attack(exact, key=True)
def same_mask_for_all_samples(p, x, y, key):
    return (net(p, x) * jax.random.bernoulli(key, 0.5, (D,))).mean()


# --- what data alone fixes --------------------------------------------------------------------------------------------


@attack(exact)
def standardised_data(p, x, y):
    return losses(p, (x - x.mean(0)) / (x.std(0) + 1e-5), y).mean()


@attack(exact)
def data_scaled_by_a_quantile(p, x, y):
    return losses(p, x / jnp.quantile(jnp.abs(x), 0.9), y).mean()


@attack(exact, key=True)
def data_shuffled(p, x, y, key):
    order = jax.random.permutation(key, x.shape[0])
    return losses(p, x[order], y[order]).mean()


@attack(exact, key=True)
def mixup_with_permuted_data(p, x, y, key):
    order = jax.random.permutation(key, x.shape[0])
    mixed, other = 0.7 * x + 0.3 * x[order], y[order]
    return (0.7 * losses(p, mixed, y) + 0.3 * losses(p, mixed, other)).mean()


@attack(exact)
def mixup_with_flipped_data(p, x, y):
    return (0.7 * losses(p, (x + x[::-1]) / 2, y) + 0.3 * losses(p, (x + x[::-1]) / 2, y[::-1])).mean()


@attack(exact)
def ranks_of_data_as_weights(p, x, y):
    return (losses(p, x, y) * jnp.argsort(jnp.argsort(x[:, 0]))).mean()


@attack(exact)
def running_sum_of_data(p, x, y):
    return losses(p, jnp.cumsum(x, axis=0) / 3, y).mean()


@attack(exact, SEQUENCES, floats(B, T))
def returns_by_a_reverse_scan_over_time(p, x, rewards):
    _, returns = jax.lax.scan(
        lambda c, r: (r + 0.9 * c, r + 0.9 * c), jnp.zeros(rewards.shape[0]), rewards.T, reverse=True
    )
    return -(jax.nn.log_softmax(net(p, x))[..., 0] * returns.T).mean()


@attack(exact, X, floats(B))
def returns_by_a_reverse_scan_over_the_batch(p, x, rewards):
    _, returns = jax.lax.scan(lambda c, r: (r + 0.9 * c, r + 0.9 * c), 0.0, rewards, reverse=True)
    return -(jax.nn.log_softmax(net(p, x))[:, 0] * returns).mean()


@attack(exact, X, floats(B))
def normalised_advantages(p, x, rewards):
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-8)
    ratio = jnp.exp(jax.nn.log_softmax(net(p, x))[:, 0] + 1.5)
    return -jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.2) * advantages).mean()


@attack(exact)
def kernel_sums_of_data(p, x, y):
    return (losses(p, x, y) * jnp.exp(-((x[:, None] - x[None]) ** 2).sum(-1)).sum(1)).mean()


@attack(exact)
def running_mean_of_data_by_a_scan(p, x, y):
    _, means = jax.lax.scan(lambda m, v: (0.9 * m + 0.1 * v, 0.9 * m + 0.1 * v), jnp.zeros(D), x)
    return losses(p, x - means, y).mean()


# --- one sample at a time ---------------------------------------------------------------------------------------------


@attack(exact)
def while_loop_per_sample(p, x, y):
    def halved(v):
        return jax.lax.while_loop(lambda c: jnp.abs(c).sum() > 0.5, lambda c: c * 0.5, v)

    return net(p, jax.vmap(halved)(x)).mean()


@attack(exact)
def while_loop_per_sample_on_hidden_values(p, x, y):
    def halved(v):
        return jax.lax.while_loop(lambda c: jnp.abs(c).sum() > 0.5, lambda c: c * 0.5, v)

    return (jax.vmap(halved)(jax.lax.stop_gradient(net(p, x))) * net(p, x)).mean()


@attack(exact)
def triangular_solve_with_samples_on_the_right(p, x, y):
    lower = jnp.tril(p["w"]) + 2 * jnp.eye(D)
    return (jax.lax.linalg.triangular_solve(lower, x, left_side=False, lower=True) ** 2).mean()


@attack(exact)
def triangular_solve_with_samples_in_the_columns(p, x, y):
    lower = jnp.tril(p["w"]) + 2 * jnp.eye(D)
    return (jax.lax.linalg.triangular_solve(lower, x.T, left_side=True, lower=True) ** 2).mean()


@attack(exact, floats(B, 2 * B), params={"w": floats(2 * B, 2 * B, scale=0.2)})
def small_triangular_solve_with_samples_on_the_right(p, x):
    lower = jnp.tril(p["w"]) + 2 * jnp.eye(2 * B)
    return (jax.lax.linalg.triangular_solve(lower, x, left_side=False, lower=True) ** 2).mean()


@attack(exact, floats(B, 2 * B), params={"w": floats(2 * B, 2 * B, scale=0.2)})
def small_triangular_solve_with_samples_in_the_columns(p, x):
    lower = jnp.tril(p["w"]) + 2 * jnp.eye(2 * B)
    return (jax.lax.linalg.triangular_solve(lower, x.T, left_side=True, lower=True) ** 2).mean()


@attack(exact, step=True)
def clipped_per_sample(p, x, y):
    value, grads = jax.vmap(lambda a, b: jax.value_and_grad(lambda p: losses(p, a[None], b[None])[0])(p))(x, y)
    norm = jnp.sqrt(sum((g**2).reshape(g.shape[0], -1).sum(1) for g in jax.tree.leaves(grads)))
    scale = jnp.minimum(1.0, 0.5 / norm)
    return descend(p, jax.tree.map(lambda g: jnp.einsum("n,n...->...", scale, g), grads)), value.mean(), norm


@attack(exact, IMAGES, step=True, params={"k": floats(3, 3, 2, 3, scale=0.3)})
def convolution_clipped_per_sample(p, x):
    def loss(p, image):
        out = jax.lax.conv_general_dilated(
            image[None], p["k"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return (jnp.tanh(out) ** 2).mean()

    value, grads = jax.vmap(jax.value_and_grad(loss), in_axes=(None, 0))(p, x)
    norm = jnp.sqrt((grads["k"] ** 2).sum((1, 2, 3, 4)))
    clipped = grads["k"] * jnp.minimum(1.0, 0.1 / norm)[:, None, None, None, None]
    return {"k": p["k"] - clipped.sum(0)}, value.mean()


@attack(exact, IMAGES, params={"k": floats(3, 3, 2, 3, scale=0.3)})
def convolution_and_pooling(p, x):
    h = jax.lax.conv_general_dilated(x, p["k"], (1, 1), "SAME", dimension_numbers=IMAGE_DIMS)
    return (jax.lax.reduce_window(h, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") ** 2).mean()


@attack(exact)
def inner_step_per_sample(p, x, y):
    def task(a, b):
        own = jax.grad(lambda w: -jax.nn.log_softmax(a @ w)[b])(p["w"])
        return -jax.nn.log_softmax(a @ (p["w"] - 0.1 * own))[b]

    return jax.vmap(task)(x, y).mean()


@attack(exact)
def psum_of_losses(p, x, y):
    def each(a, b):
        return jax.lax.psum(losses(p, a[None], b[None])[0], "samples")

    return jax.vmap(each, axis_name="samples")(x, y)[0]


@attack(exact)
def pmean_of_losses(p, x, y):
    def each(a, b):
        return jax.lax.pmean(losses(p, a[None], b[None])[0], "samples")

    return jax.vmap(each, axis_name="samples", out_axes=None)(x, y)


@attack(exact, step=True)
def pmean_of_gradients(p, x, y):
    def each(a, b):
        value, grads = jax.value_and_grad(lambda p: losses(p, a[None], b[None])[0])(p)
        return jax.lax.pmean(value, "samples"), jax.lax.pmean(grads, "samples")

    value, grads = jax.vmap(each, axis_name="samples", out_axes=None)(x, y)
    return descend(p, grads), value


@attack(exact)
def scaled_by_the_largest_of_a_sample(p, x, y):
    h = net(p, x)
    scale = jnp.abs(h).max(1, keepdims=True)
    return (jnp.round(h / scale * 8) * scale * h).mean()


# --- minibatches cut by hand ------------------------------------------------------------------------------------------


@attack(exact, exact_at=(2, 4))
def halves_by_hand(p, x, y):
    (a, b), (c, d) = x.reshape(2, x.shape[0] // 2, D), y.reshape(2, y.shape[0] // 2)
    return (losses(p, a, c).mean() + losses(p, b, d).mean()) / 2


@attack(exact, step=True, exact_at=(2, 4))
def accumulation_by_hand(p, x, y):
    parts = x.reshape(2, x.shape[0] // 2, D), y.reshape(2, y.shape[0] // 2)
    grads = jax.tree.map(jnp.zeros_like, p)
    value = 0.0
    for i in range(2):
        one, own = jax.value_and_grad(lambda p, i=i: losses(p, parts[0][i], parts[1][i]).mean())(p)
        grads, value = jax.tree.map(lambda a, b: a + b / 2, grads, own), value + one / 2
    return descend(p, grads), value


@attack(exact, step=True, exact_at=(2, 4))
def accumulation_by_a_scan(p, x, y):
    def body(carry, part):
        grads, value = carry
        one, own = jax.value_and_grad(lambda p: losses(p, *part).mean())(p)
        return (jax.tree.map(jnp.add, grads, own), value + one), None

    start = (jax.tree.map(jnp.zeros_like, p), 0.0)
    (grads, value), _ = jax.lax.scan(body, start, (x.reshape(2, -1, D), y.reshape(2, -1)))
    return descend(p, jax.tree.map(lambda g: g / 2, grads)), value / 2


# --- what follows the sum ---------------------------------------------------------------------------------------------


@attack(exact, step=True)
def clipped_by_the_norm_of_the_sum(p, x, y):
    value, grads = jax.value_and_grad(lambda p: losses(p, x, y).mean())(p)
    norm = jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grads)))
    return descend(p, jax.tree.map(lambda g: g * jnp.minimum(1.0, 0.1 / norm), grads)), value, norm


@attack(exact, step=True)
def rate_by_the_loss(p, x, y):
    value, grads = jax.value_and_grad(lambda p: losses(p, x, y).mean())(p)
    return jax.tree.map(lambda w, g: w - jnp.where(value > 1.0, 0.3, 0.1) * g / value, p, grads), jnp.exp(value)


@attack(exact, step=True)
def skipped_unless_finite(p, x, y):
    value, grads = jax.value_and_grad(lambda p: losses(p, x, y).mean())(p)
    finite = jnp.all(jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]))
    return jax.tree.map(lambda w, g: jnp.where(finite, w - 0.1 * g, w), p, grads), value, finite


@attack(exact, step=True)
def branch_by_the_loss_in_the_update(p, x, y):
    value, grads = jax.value_and_grad(lambda p: losses(p, x, y).mean())(p)
    return jax.lax.cond(value > 1.0, lambda g: descend(p, g), lambda g: p, grads), value


@attack(exact, X, LABELS, step=True, params={"net": PARAMS, "m": PARAMS, "mean": floats(D), "n": jnp.zeros(V)})
def statistics_kept_in_the_state(state, x, y):
    def loss(p):
        h = net(p, x)
        return losses(p, x, y).mean() + 0.0 * h.sum(), h.mean(0)

    (value, mean), grads = jax.value_and_grad(loss, has_aux=True)(state["net"])
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["m"], grads)
    new = {
        "net": descend(state["net"], momentum),
        "m": momentum,
        "mean": 0.9 * state["mean"] + 0.1 * mean,
        "n": state["n"].at[y].add(1.0),
    }
    return new, value


@attack(exact, X, LABELS, step=True, params={**PARAMS, "n": jnp.zeros(V, jnp.int32)})
def class_counts_added_to_the_state(p, x, y):
    value, grads = jax.value_and_grad(lambda q: losses({**p, **q}, x, y).mean())({k: p[k] for k in PARAMS})
    return {**descend({k: p[k] for k in PARAMS}, grads), "n": p["n"].at[y].add(1)}, value


@attack(exact, TOKENS, step=True, params={**PARAMS, "n": jnp.zeros(V)})
def token_counts_added_to_the_state(p, tokens):
    value, grads = jax.value_and_grad(lambda e: (jnp.tanh(e[tokens]) ** 2).mean())(p["e"])
    return {**p, "e": p["e"] - grads, "n": p["n"].at[tokens.reshape(-1)].add(1.0)}, value


# --- results ----------------------------------------------------------------------------------------------------------


def _with(metric: Any) -> Any:
    """A step that returns a metric of hidden values, data and labels beside its loss."""

    def step(p: Any, x: Any, y: Any) -> Any:
        new, value = trained(lambda p, x, y: losses(p, x, y).mean())(p, x, y)
        return new, value, metric(net(p, x), logp(p, x), y)

    return step


def _returns(name: str, metric: Any) -> None:
    step = _with(metric)
    step.__name__ = f"returns_{name}"
    attack(exact, step=True)(step)


_returns("its_samples", lambda h, logits, y: (h, logits.argmax(1), h[:, 0] > 0))
_returns("maxima_and_minima", lambda h, logits, y: (h.max(), h.min(0), jnp.abs(logits).max(), logits.max(1).min()))
_returns("any_and_all", lambda h, logits, y: ((h > 0.9).any(), (h > 0).all(0), jnp.isnan(h).any()))
_returns("an_accuracy", lambda h, logits, y: ((logits.argmax(1) == y).mean(), (logits.argmax(1) == y).sum()))
_returns("accuracy_among_the_top_two", lambda h, logits, y: (jax.lax.top_k(logits, 2)[1] == y[:, None]).any(1).mean())
_returns("a_confusion_matrix", lambda h, logits, y: jnp.zeros((V, V), jnp.int32).at[y, logits.argmax(1)].add(1))
_returns("a_histogram", lambda h, logits, y: jnp.zeros(4).at[jnp.clip((h * 2 + 2).astype(int), 0, 3)].add(1.0))
_returns("counts_by_bincount", lambda h, logits, y: jnp.bincount(y, length=V))
_returns("sums_of_classes", lambda h, logits, y: (jax.ops.segment_sum(h, y, V), jax.nn.one_hot(y, V).T @ h))
_returns("second_moments", lambda h, logits, y: (h.T @ h, jnp.sqrt((h**2).mean()), jnp.linalg.norm(h)))
_returns("a_variance_by_two_moments", lambda h, logits, y: (h**2).mean(0) - h.mean(0) ** 2)
_returns("a_masked_accuracy", lambda h, logits, y: ((logits.argmax(1) == y) * (y > 1)).sum() / (y > 1).sum())
_returns("a_perplexity", lambda h, logits, y: jnp.exp(-logits.mean()))


@attack(exact)
def z_loss(p, x, y):
    return losses(p, x, y).mean() + 1e-2 * (jax.nn.logsumexp(net(p, x), axis=1) ** 2).mean()


@attack(exact)
def gradient_penalty(p, x, y):
    slopes = jax.grad(lambda x: net(p, x).sum())(x)
    return losses(p, x, y).mean() + (jnp.sqrt((slopes**2).sum(1)) - 1.0).__pow__(2).mean()


@attack(exact)
def sorted_and_summed_over_features(p, x, y):
    return (jnp.cumsum(jnp.sort(net(p, x), axis=1), axis=1)[:, ::-1] * jnp.roll(x, 1, axis=1)).mean()


@attack(exact, tolerance=2e-2)
def halves_in_bfloat16(p, x, y):
    h = jnp.tanh(x.astype(jnp.bfloat16) @ p["w"].astype(jnp.bfloat16)).astype(jnp.float32)
    return (h**2).sum(1).mean()


@attack(exact)
def own_derivative(p, x, y):
    @jax.custom_vjp
    def clipped(h):
        return h

    clipped.defvjp(lambda h: (h, h), lambda h, g: (jnp.clip(g * h, -0.01, 0.01),))
    return (clipped(net(p, x)) ** 2).mean()


@attack(exact, X, LABELS, jnp.arange(B) % 3 == 0)
def samples_switched_one_by_one(p, x, y, flags):
    def each(a, flag):
        return jax.lax.switch(flag.astype(int), [jnp.sin, lambda v: v * 2], a)

    return losses(p, jax.vmap(each)(x, flags), y).mean()
