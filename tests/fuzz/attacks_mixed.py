"""Attacks that mix samples which depend on parameters: no sum over samples, so micro-batches must refuse them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tests.fuzz.attacks import (
    LABELS,
    SEQUENCES,
    SQUARE,
    B,
    D,
    Expectation,
    V,
    X,
    Z,
    attack,
    descend,
    floats,
    logp,
    losses,
    net,
)

refused = Expectation.REFUSED


# --- statistics over the batch ----------------------------------------------------------------------------------------


@attack(refused)
def batch_norm(p, x, y):
    h = net(p, x)
    return (((h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-3)) @ p["v"]).max(1).mean()


@attack(refused)
def batch_norm_without_gradient(p, x, y):
    h = net(p, x)
    mean, variance = jax.lax.stop_gradient((h.mean(0), h.var(0)))
    return (((h - mean) / jnp.sqrt(variance + 1e-3)) ** 2 @ p["v"]).mean()


@attack(refused)
def batch_norm_in_a_scan_over_layers(p, x, y):
    def layer(h, w):
        h = jnp.tanh(h @ w)
        return (h - h.mean(0)) / (h.std(0) + 0.1), None

    return (jax.lax.scan(layer, x, p["s"])[0] ** 3).mean()


@attack(refused)
def centred_samples(p, x, y):
    h = net(p, x)
    return ((h - h.mean(0)) ** 2).mean()


@attack(refused)
def centred_without_gradient(p, x, y):
    h = net(p, x)
    return -(jax.nn.softmax(h - jax.lax.stop_gradient(h.mean(0))) * logp(p, x)).mean()


@attack(refused)
def scaled_by_the_largest_of_the_batch(p, x, y):
    h = net(p, x)
    return (jnp.round(h / jnp.abs(h).max() * 8) * h).mean()


@attack(refused)
def scaled_by_the_norm_of_the_batch(p, x, y):
    h = net(p, x)
    return (h / jnp.linalg.norm(h) * x).sum()


@attack(refused)
def compared_with_a_quantile(p, x, y):
    h = net(p, x).sum(1)
    return jnp.where(h > jnp.quantile(h, 0.5), h, 0.0).mean()


@attack(refused)
def compared_with_the_mean_of_classes(p, x, y):
    h = net(p, x)
    means = jax.ops.segment_sum(h, y, V) / (jnp.bincount(y, length=V)[:, None] + 1)
    return ((h - means[y]) ** 2).mean()


@attack(refused)
def predicted_baseline(p, x, y):
    value = net(p, x).sum(1)
    return (losses(p, x, y) * jax.lax.stop_gradient(value - value.mean())).mean()


@attack(refused)
def whitened_by_the_covariance(p, x, y):
    h = net(p, x)
    root = jnp.linalg.cholesky(h.T @ h / h.shape[0] + jnp.eye(D))
    return (jax.lax.linalg.triangular_solve(root, h, lower=True, transpose_a=True) ** 3).mean()


@attack(refused)
def cross_correlation(p, x, y):
    return ((net(p, x).T @ jnp.tanh(x @ p["v"]) / x.shape[0] - jnp.eye(D)) ** 2).sum()


@attack(refused)
def least_squares_in_the_loss(p, x, y):
    h = net(p, x)
    return ((h @ jnp.linalg.solve(h.T @ h + jnp.eye(D), h.T @ x) - x) ** 2).mean()


# --- losses that are no sum -------------------------------------------------------------------------------------------


@attack(refused)
def largest_loss(p, x, y):
    return losses(p, x, y).max()


@attack(refused)
def smallest_loss(p, x, y):
    return losses(p, x, y).min()


@attack(refused)
def product_over_samples(p, x, y):
    return (1 + 0.1 * losses(p, x, y)).prod()


@attack(refused)
def logsumexp_over_samples(p, x, y):
    return jax.nn.logsumexp(losses(p, x, y))


@attack(refused)
def softmax_over_samples(p, x, y):
    own = losses(p, x, y)
    return (jax.nn.softmax(own) * own).sum()


@attack(refused)
def softmax_over_samples_without_gradient(p, x, y):
    own = losses(p, x, y)
    return (jax.lax.stop_gradient(jax.nn.softmax(own)) * own).sum()


@attack(refused)
def spread_of_losses(p, x, y):
    return losses(p, x, y).std()


@attack(refused)
def spread_by_two_moments(p, x, y):
    own = losses(p, x, y)
    return (own**2).mean() - own.mean() ** 2


@attack(refused)
def root_of_the_mean(p, x, y):
    return jnp.sqrt(losses(p, x, y).mean())


@attack(refused)
def mean_clipped(p, x, y):
    return jnp.minimum(losses(p, x, y).mean(), 1.0)


@attack(refused)
def divided_by_itself(p, x, y):
    value = losses(p, x, y).mean()
    return value / jax.lax.stop_gradient(value)


@attack(refused)
def divided_by_a_hidden_sum(p, x, y):
    return losses(p, x, y).sum() / (net(p, x) ** 2).sum()


@attack(refused)
def product_of_two_means(p, x, y):
    return losses(p, x, y).mean() * (net(p, x) ** 2).mean()


@attack(refused)
def balanced_experts(p, x, y):
    gates = jax.nn.softmax(net(p, x))
    chosen = jax.nn.one_hot(gates.argmax(1), D)
    return D * (gates.mean(0) * chosen.mean(0)).sum()


@attack(refused)
def entropy_of_the_mean_prediction(p, x, y):
    mean = jnp.exp(logp(p, x)).mean(0)
    return -(mean * jnp.log(mean)).sum()


@attack(refused)
def masked_by_predictions(p, x, y):
    kept = jax.lax.stop_gradient(jnp.exp(logp(p, x)).max(1) > 0.3)
    return (losses(p, x, y) * kept).sum() / (kept.sum() + 1)


# --- pairs ------------------------------------------------------------------------------------------------------------


@attack(refused)
def gram_matrix(p, x, y):
    h = net(p, x)
    return ((h @ h.T) ** 2).mean()


@attack(refused, X, Z)
def contrast_between_samples(p, x, z):
    logits = net(p, x) @ jnp.tanh(z @ p["v"]).T
    return -jnp.diagonal(jax.nn.log_softmax(logits)).mean()


@attack(refused, X, Z)
def contrast_both_ways_by_arange(p, x, z):
    logits = net(p, x) @ jnp.tanh(z @ p["v"]).T
    rows = jnp.arange(x.shape[0])
    return -(jax.nn.log_softmax(logits)[rows, rows] + jax.nn.log_softmax(logits.T)[rows, rows]).mean()


@attack(refused)
def differences_of_pairs(p, x, y):
    h = net(p, x)
    return (jnp.abs(h[:, None] - h[None]) ** 2).mean()


@attack(refused)
def pairs_of_one_class(p, x, y):
    h = net(p, x)
    return ((h @ h.T) * (y[:, None] == y[None])).mean()


@attack(refused)
def attention_between_samples(p, x, y):
    h = net(p, x)
    return ((jax.nn.softmax(h @ h.T) @ x) ** 2).mean()


@attack(refused, SQUARE, params={"w": floats(B, B, scale=0.4)})
def transposed_square_batch(p, x):
    return (jnp.tanh(jnp.tanh(x @ p["w"]).T @ p["w"]) ** 2).mean()


@attack(refused, SQUARE, params={"w": floats(B, B, scale=0.4)})
def square_batch_times_itself(p, x):
    h = jnp.tanh(x @ p["w"])
    return ((h @ h) ** 2).mean()


@attack(refused, X, Z)
def both_encoded_then_paired(p, x, z):
    h = net(p, jnp.concatenate([x, z]))
    return ((h @ h.T) ** 2).mean()


@attack(refused)
def transport_by_rows_and_columns(p, x, y):
    plan = jnp.exp(net(p, x))
    for _ in range(2):
        plan = plan / plan.sum(0)
        plan = plan / plan.sum(1, keepdims=True)
    return -(jax.lax.stop_gradient(plan) * logp(p, x)).mean()


# --- neighbours and orders --------------------------------------------------------------------------------------------


@attack(refused)
def differences_of_neighbours(p, x, y):
    h = net(p, x)
    return ((h[1:] - h[:-1]) ** 2).mean()


@attack(refused)
def rolled(p, x, y):
    h = net(p, x)
    return (h * jnp.roll(h, 1, axis=0)).mean()


@attack(refused)
def flipped(p, x, y):
    h = net(p, x)
    return (h * h[::-1]).mean()


@attack(refused)
def shifted_by_padding(p, x, y):
    h = net(p, x)
    return (h * jnp.pad(h, ((1, 0), (0, 0)))[:-1]).mean()


@attack(refused)
def convolved_over_samples(p, x, y):
    h = net(p, x)
    kernel = jnp.ones((3, D, D)) * 0.1
    return (
        jax.lax.conv_general_dilated(h[None], kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")) ** 2
    ).mean()


@attack(refused)
def windows_over_samples(p, x, y):
    h = net(p, x)
    return (jax.lax.reduce_window(h, -jnp.inf, jax.lax.max, (2, 1), (1, 1), "SAME") * x).mean()


@attack(refused)
def transformed_over_samples(p, x, y):
    return (jnp.abs(jnp.fft.fft(net(p, x), axis=0)) ** 3).mean()


@attack(refused)
def hardest_samples(p, x, y):
    return jax.lax.top_k(losses(p, x, y), 3)[0].mean()


@attack(refused)
def sorted_then_weighted(p, x, y):
    return (jnp.sort(losses(p, x, y)) * jnp.arange(x.shape[0])).mean()


@attack(refused)
def ranks_of_losses_as_weights(p, x, y):
    own = losses(p, x, y)
    return (own * jnp.argsort(jnp.argsort(own))).mean()


@attack(refused)
def median_loss(p, x, y):
    return jnp.median(losses(p, x, y))


@attack(refused)
def mixup_with_flipped_hidden_values(p, x, y):
    h = net(p, x)
    return (jnp.tanh((0.7 * h + 0.3 * h[::-1]) @ p["v"]) ** 2).mean()


@attack(refused, key=True)
def mixup_with_permuted_hidden_values(p, x, y, key):
    h = net(p, x)
    return (jnp.tanh((0.7 * h + 0.3 * h[jax.random.permutation(key, h.shape[0])]) @ p["v"]) ** 2).mean()


@attack(refused)
def first_sample_as_anchor(p, x, y):
    h = net(p, x)
    return ((h - h[0]) ** 2).mean()


@attack(refused)
def last_sample_as_anchor(p, x, y):
    h = net(p, x)
    return ((h - jax.lax.stop_gradient(h[-1])) ** 2).mean()


# --- running values ---------------------------------------------------------------------------------------------------


@attack(refused)
def running_sum(p, x, y):
    return (jnp.cumsum(net(p, x), axis=0) ** 2).mean()


@attack(refused)
def running_maximum(p, x, y):
    return (jax.lax.cummax(net(p, x), axis=0) * x).mean()


@attack(refused)
def running_logsumexp(p, x, y):
    return (jax.lax.cumlogsumexp(net(p, x), axis=0) * x).mean()


@attack(refused)
def running_product_by_an_associative_scan(p, x, y):
    return (jax.lax.associative_scan(jnp.multiply, 1 + net(p, x), axis=0) * x).mean()


@attack(refused)
def maximum_by_a_scan(p, x, y):
    return jax.lax.scan(lambda m, own: (jnp.maximum(m, own), None), 0.0, losses(p, x, y))[0]


@attack(refused)
def online_logsumexp(p, x, y):
    return jax.lax.scan(lambda m, own: (jnp.logaddexp(m, own), None), -1e9, losses(p, x, y))[0]


@attack(refused)
def product_by_a_scan(p, x, y):
    return jax.lax.scan(lambda m, own: (m * (1 + 0.1 * own), None), 1.0, losses(p, x, y))[0]


@attack(refused)
def running_values_returned_by_a_scan(p, x, y):
    return (jax.lax.scan(lambda m, h: (0.9 * m + h, m * h), jnp.zeros(D), net(p, x))[1] ** 2).mean()


@attack(refused)
def product_by_a_fori_loop(p, x, y):
    own = losses(p, x, y)
    return jax.lax.fori_loop(0, own.shape[0], lambda i, m: m * (1 + 0.1 * own[i]), 1.0)


@attack(refused, X, floats(B))
def advantages_of_predictions_by_a_reverse_scan(p, x, rewards):
    values = net(p, x).sum(1)
    _, back = jax.lax.scan(lambda c, d: (d + 0.9 * c, d + 0.9 * c), 0.0, rewards - values, reverse=True)
    return (back**2).mean()


@attack(refused, floats(B, 5, D))
def recurrence_over_the_batch(p, x):
    def cell(h, now):
        h = jnp.tanh(now @ p["w"] + h @ p["v"])
        return h, h

    return (jax.lax.scan(cell, jnp.zeros((5, D)), x)[1] ** 2).mean()


@attack(refused, floats(B, B, D))
def recurrence_over_as_many_times_as_samples(p, x):
    def cell(h, now):
        h = jnp.tanh(now @ p["w"] + h @ p["v"])
        return h, h

    return (jax.lax.scan(cell, jnp.zeros((x.shape[1], D)), x)[1] ** 2).mean()


@attack(refused, step=True)
def descent_one_sample_after_the_other(p, x, y):
    def one(p, sample):
        value, grads = jax.value_and_grad(lambda p: losses(p, sample[0][None], sample[1][None])[0])(p)
        return descend(p, grads), value

    p, values = jax.lax.scan(one, p, (x, y))
    return p, values.mean()


@attack(refused, step=True)
def descent_in_minibatches_by_a_scan(p, x, y):
    def one(p, part):
        value, grads = jax.value_and_grad(lambda p: losses(p, *part).mean())(p)
        return descend(p, grads), value

    p, values = jax.lax.scan(one, p, (x.reshape(2, -1, D), y.reshape(2, -1)))
    return p, values.mean()


@attack(refused, step=True)
def two_steps_in_one(p, x, y):
    for _ in range(2):
        value, grads = jax.value_and_grad(lambda p: losses(p, x, y).mean())(p)
        p = descend(p, grads)
    return p, value


@attack(refused, step=True)
def sharpness_aware(p, x, y):
    gradient = jax.grad(lambda p: losses(p, x, y).mean())
    first = gradient(p)
    norm = jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(first)))
    return descend(p, gradient(jax.tree.map(lambda w, g: w + 0.05 * g / norm, p, first))), norm


@attack(refused, step=True)
def loss_after_the_update(p, x, y):
    value, grads = jax.value_and_grad(lambda p: losses(p, x, y).mean())(p)
    new = descend(p, grads)
    return new, value, losses(new, x, y).mean()


# --- rows by number ---------------------------------------------------------------------------------------------------


@attack(refused)
def next_sample(p, x, y):
    h = net(p, x)
    return (h * h[jnp.arange(h.shape[0]) + 1]).mean()


@attack(refused)
def sample_before(p, x, y):
    h = net(p, x)
    return (h * h[jnp.arange(-1, h.shape[0] - 1)]).mean()


@attack(refused, X, jnp.asarray([5, 2, 7, 0, 1, 3, 6, 4]))
def sample_by_label(p, x, y):
    h = net(p, x)
    return (h * h[y]).mean()


@attack(refused, X, jnp.asarray([5, 2, 1, 0, 1, 3, 4, 4]))
def row_by_label_column_by_position(p, x, y):
    h = net(p, x)
    return (h[y, jnp.arange(h.shape[0]) % D] ** 2 * x[:, 0]).mean()


@attack(refused, X, jnp.asarray([5, 2, 7, 0, 1, 3, 6, 4]))
def own_row_or_another(p, x, y):
    h = net(p, x)
    return (h[jnp.where(y > 3, jnp.arange(h.shape[0]), y)] * x).mean()


@attack(refused)
def added_to_the_next_sample(p, x, y):
    h = net(p, x)
    return (h.at[jnp.arange(h.shape[0]) + 1].add(h) ** 2).mean()


@attack(refused, X, jnp.asarray([5, 2, 7, 0, 1, 3, 6, 4]))
def added_to_the_sample_of_the_label(p, x, y):
    h = net(p, x)
    return (h.at[y].add(h) ** 2).mean()


# --- control flow and named axes --------------------------------------------------------------------------------------


@attack(refused)
def branch_by_a_hidden_mean(p, x, y):
    h = net(p, x)
    return (jax.lax.cond(h.mean() > 0, lambda h: h, lambda h: 2 * h, h) ** 2).mean()


@attack(refused)
def loop_until_a_mean_is_small(p, x, y):
    h = jax.lax.stop_gradient(net(p, x))
    h = jax.lax.while_loop(lambda h: jnp.abs(h).sum() > 1.0, lambda h: h * 0.9, h)
    return (h * net(p, x)).mean()


@attack(refused)
def pmean_fed_back(p, x, y):
    def each(a):
        h = jnp.tanh(a @ p["w"])
        return ((h - jax.lax.pmean(h, "samples")) ** 2).mean()

    return jax.vmap(each, axis_name="samples")(x).mean()


@attack(refused)
def pmax_fed_back(p, x, y):
    def each(a):
        h = jnp.tanh(a @ p["w"])
        return (h / jax.lax.pmax(jax.lax.stop_gradient(jnp.abs(h)), "samples")).sum()

    return jax.vmap(each, axis_name="samples")(x).mean()


@attack(refused)
def all_gather_of_samples(p, x, y):
    def each(a):
        h = jnp.tanh(a @ p["w"])
        return ((jax.lax.all_gather(h, "samples") @ h) ** 2).mean()

    return jax.vmap(each, axis_name="samples")(x).mean()


@attack(refused)
def ppermute_of_samples(p, x, y):
    def each(a):
        h = jnp.tanh(a @ p["w"])
        return (h * jax.lax.ppermute(h, "samples", [(i, (i + 1) % B) for i in range(B)])).mean()

    return jax.vmap(each, axis_name="samples")(x).mean()


@attack(refused)
def batch_as_features(p, x, y):
    return (jnp.tanh(net(p, x).T.reshape(-1, D) @ p["v"]) ** 2).mean()


@attack(refused, X, LABELS)
def solved_among_samples(p, x, y):
    h = net(p, x)
    return (jnp.linalg.solve(h @ h.T + jnp.eye(h.shape[0]), x) ** 2).mean()


@attack(refused, SEQUENCES)
def tokens_of_all_samples_compete(p, x):
    scores = net(p, x.reshape(-1, D)).sum(1)
    return (jax.nn.softmax(scores) * scores).sum()
