"""Objectives beyond classification: contrastive, self-supervised, reinforcement, quantised, matched, distilled."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tests.zoo.registry import BATCH, EPSILON, SEQ, Program, cross_entropy, descend, integers, normal, program, weights


def network(seed: int, *sizes: int) -> list[jax.Array]:
    """Weights of a network with these sizes."""
    return [weights((a, b), seed=seed + i) for i, (a, b) in enumerate(itertools.pairwise(sizes))]


def apply(layers, x):
    for w in layers[:-1]:
        x = jnp.tanh(x @ w)
    return x @ layers[-1]


def unit(x):
    return x * jax.lax.rsqrt(jnp.sum(x**2, -1, keepdims=True) + 1e-6)


@program
def contrastive_image_text():
    transform = optax.adamw(1e-3, eps=EPSILON)

    def loss_fn(params, images, texts):
        a, b = unit(apply(params["image"], images)), unit(apply(params["text"], texts))
        logits = a @ b.T * jnp.exp(params["log_scale"])
        labels = jnp.arange(images.shape[0])
        loss = (cross_entropy(logits, labels).mean() + cross_entropy(logits.T, labels).mean()) / 2
        return loss, jnp.mean((logits.argmax(-1) == labels).astype(jnp.float32))

    def step(state, images, texts):
        params, opt_state = state
        (loss, accuracy), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, images, texts)
        updates, opt_state = transform.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss, "accuracy": accuracy}

    params = {"image": network(0, 16, 32, 8), "text": network(5, 8, 32, 8), "log_scale": jnp.float32(1.0)}
    inputs = (normal(BATCH, 16, seed=1), normal(BATCH, 8, seed=2))
    return Program(step=step, state=(params, transform.init(params)), inputs=inputs)


@program
def sigmoid_image_text():
    def loss_fn(params, images, texts):
        a, b = unit(apply(params["image"], images)), unit(apply(params["text"], texts))
        logits = a @ b.T * jnp.exp(params["log_scale"]) + params["bias"]
        signs = 2 * jnp.eye(images.shape[0]) - 1
        return -jnp.mean(jnp.sum(jax.nn.log_sigmoid(signs * logits), -1))

    def step(params, images, texts):
        loss, grads = jax.value_and_grad(loss_fn)(params, images, texts)
        return descend(params, grads), {"loss": loss}

    params = {"image": network(0, 16, 32, 8), "text": network(5, 8, 32, 8)}
    params = {**params, "log_scale": jnp.float32(1.0), "bias": jnp.float32(-2.0)}
    return Program(step=step, state=params, inputs=(normal(BATCH, 16, seed=1), normal(BATCH, 8, seed=2)))


@program
def views_without_labels():
    def loss_fn(params, x, key):
        noise = jax.random.normal(key, (2, *x.shape))
        views = jnp.concatenate([x + 0.1 * noise[0], x - 0.1 * noise[1]])
        z = unit(apply(params, views))
        similarity = z @ z.T / 0.5
        count = views.shape[0]
        similarity = jnp.where(jnp.eye(count, dtype=bool), -1e9, similarity)
        return cross_entropy(similarity, jnp.roll(jnp.arange(count), count // 2)).mean()

    def step(state, x):
        params, key = state
        key, now = jax.random.split(key)
        loss, grads = jax.value_and_grad(loss_fn)(params, x, now)
        return (descend(params, grads), key), {"loss": loss}

    return Program(step=step, state=(network(0, 16, 32, 8), jax.random.key(1)), inputs=(normal(BATCH, 16, seed=1),))


@program
def bootstrapped_targets():
    transform = optax.sgd(0.05, momentum=0.9)

    def loss_fn(params, target, first, second):
        def one_way(a, b):
            predicted = unit(apply(params["predictor"], apply(params["encoder"], a)))
            return 2 - 2 * jnp.sum(predicted * jax.lax.stop_gradient(unit(apply(target, b))), -1)

        return jnp.mean(one_way(first, second) + one_way(second, first))

    def step(state, first, second):
        params, target, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, target, first, second)
        updates, opt_state = transform.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        target = jax.tree.map(lambda t, p: 0.99 * t + 0.01 * p, target, params["encoder"])
        return (params, target, opt_state), {"loss": loss}

    params = {"encoder": network(0, 16, 32, 8), "predictor": network(5, 8, 16, 8)}
    x = normal(BATCH, 16, seed=1)
    state = (params, params["encoder"], transform.init(params))
    return Program(step=step, state=state, inputs=(x, x + 0.1 * normal(BATCH, 16, seed=2)))


@program
def decorrelated_views():
    def step(params, first, second):
        def loss_fn(params):
            a, b = (apply(params, v) for v in (first, second))
            a, b = ((v - v.mean(0)) / (v.std(0) + 1e-4) for v in (a, b))
            c = a.T @ b / a.shape[0]
            off = c - jnp.diag(jnp.diag(c))
            return jnp.sum((jnp.diag(c) - 1) ** 2) + 5e-2 * jnp.sum(off**2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return descend(params, grads, 1e-2), {"loss": loss}

    x = normal(BATCH, 16, seed=1)
    return Program(step=step, state=network(0, 16, 32, 8), inputs=(x, x + 0.3 * normal(BATCH, 16, seed=2)))


@program
def clipped_policy():
    def loss_fn(params, batch):
        hidden = jnp.tanh(batch["states"] @ params["body"])
        log_probs = jax.nn.log_softmax(hidden @ params["actor"])
        values = (hidden @ params["critic"])[..., 0]
        chosen = jnp.take_along_axis(log_probs, batch["actions"][..., None], -1)[..., 0]
        ratio = jnp.exp(chosen - batch["old_log_probs"])
        advantages = jax.lax.stop_gradient(batch["returns"] - values)
        clipped = jnp.clip(ratio, 0.8, 1.2)
        policy = -jnp.minimum(ratio * advantages, clipped * advantages).mean()
        entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, -1).mean()
        loss = policy + 0.5 * jnp.mean((values - batch["returns"]) ** 2) - 0.01 * entropy
        return loss, {"entropy": entropy, "clipped": jnp.mean((jnp.abs(ratio - 1) > 0.2).astype(jnp.float32))}

    transform = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-3, eps=EPSILON))

    def step(state, batch):
        params, opt_state = state
        (loss, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, batch)
        updates, opt_state = transform.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss, **aux}

    params = weights({"body": (8, 32), "actor": (32, 4), "critic": (32, 1)})
    batch = {
        "states": normal(BATCH, SEQ, 8, seed=1),
        "actions": integers(4, BATCH, SEQ, seed=2),
        "old_log_probs": -jnp.abs(normal(BATCH, SEQ, seed=3)),
        "returns": normal(BATCH, SEQ, seed=4),
    }
    return Program(step=step, state=(params, transform.init(params)), inputs=(batch,))


@program
def advantages_by_reverse_scan():
    def step(params, states, rewards, done):
        def loss_fn(params):
            values = apply(params, states)[..., 0]
            nexts = jnp.concatenate([values[:, 1:], jnp.zeros_like(values[:, :1])], 1)
            errors = jax.lax.stop_gradient(rewards + 0.9 * nexts * (1 - done) - values)

            def add(carry, part):
                error, done = part
                carry = error + 0.9 * 0.95 * (1 - done) * carry
                return carry, carry

            _, advantages = jax.lax.scan(add, jnp.zeros(states.shape[0]), (errors.T, done.T), reverse=True)
            return jnp.mean((values - jax.lax.stop_gradient(values + advantages.T)) ** 2), advantages.mean()

        (loss, mean), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        return descend(params, grads), {"loss": loss, "advantage": mean}

    done = (normal(BATCH, SEQ, seed=3) > 1).astype(jnp.float32)
    inputs = (normal(BATCH, SEQ, 8, seed=1), normal(BATCH, SEQ, seed=2), done)
    return Program(step=step, state=network(0, 8, 32, 1), inputs=inputs)


@program
def q_learning():
    transform = optax.rmsprop(1e-3)

    def step(state, batch):
        params, target, opt_state, count = state

        def loss_fn(params):
            q = jnp.take_along_axis(apply(params, batch["states"]), batch["actions"][:, None], 1)[:, 0]
            best = apply(params, batch["nexts"]).argmax(-1)
            following = jnp.take_along_axis(apply(target, batch["nexts"]), best[:, None], 1)[:, 0]
            goal = batch["rewards"] + 0.99 * following
            return optax.huber_loss(q, jax.lax.stop_gradient(goal)).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = transform.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        target = optax.periodic_update(params, target, count, 2)
        return (params, target, opt_state, count + 1), {"loss": loss}

    params = network(0, 8, 32, 5)
    batch = {
        "states": normal(BATCH, 8, seed=1),
        "nexts": normal(BATCH, 8, seed=2),
        "actions": integers(5, BATCH, seed=3),
        "rewards": normal(BATCH, seed=4),
    }
    return Program(step=step, state=(params, params, transform.init(params), jnp.int32(0)), inputs=(batch,))


@program
def preferences():
    def log_prob(params, tokens):
        hidden = jnp.tanh(params["embed"][tokens[:, :-1]] @ params["body"])
        return -cross_entropy(hidden @ params["head"], tokens[:, 1:]).sum(-1)

    def step(state, chosen, rejected):
        params, fixed = state

        def loss_fn(params):
            margin = log_prob(params, chosen) - log_prob(params, rejected)
            base = jax.lax.stop_gradient(log_prob(fixed, chosen) - log_prob(fixed, rejected))
            return -jax.nn.log_sigmoid(0.1 * (margin - base)).mean(), jnp.abs(margin).mean()

        (loss, margin), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        return (descend(params, grads), fixed), {"loss": loss, "margin": margin}

    shapes = {"embed": (50, 16), "body": (16, 16), "head": (16, 50)}
    inputs = (integers(50, BATCH, SEQ, seed=1), integers(50, BATCH, SEQ, seed=2))
    return Program(step=step, state=(weights(shapes), weights(shapes, seed=1)), inputs=inputs)


@program
def distillation():
    def step(state, x, labels):
        student, teacher = state

        def loss_fn(student):
            logits, soft = apply(student, x), jax.nn.softmax(apply(teacher, x) / 2)
            matched = optax.kl_divergence(jax.nn.log_softmax(logits / 2), soft).mean()
            return 4 * matched + optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        loss, grads = jax.value_and_grad(loss_fn)(student)
        return (descend(student, grads), teacher), {"loss": loss}

    state = (network(0, 16, 16, 10), network(3, 16, 64, 10))
    return Program(step=step, state=state, inputs=(normal(BATCH, 16, seed=1), integers(10, BATCH, seed=2)))


@program
def quantised_codes():
    def step(state, x):
        params, codes, counts = state

        def loss_fn(params):
            z = apply(params["encoder"], x)
            distances = jnp.sum(z**2, -1, keepdims=True) - 2 * z @ codes.T + jnp.sum(codes**2, -1)
            nearest = distances.argmin(-1)
            quantised = codes[nearest]
            straight = z + jax.lax.stop_gradient(quantised - z)
            commit = jnp.mean((z - jax.lax.stop_gradient(quantised)) ** 2)
            return jnp.mean((apply(params["decoder"], straight) - x) ** 2) + 0.25 * commit, (z, nearest)

        (loss, (z, nearest)), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        used = jax.nn.one_hot(nearest, codes.shape[0])
        counts = 0.9 * counts + 0.1 * used.sum(0)
        codes = 0.9 * codes + 0.1 * (used.T @ z) / jnp.maximum(used.sum(0), 1.0)[:, None]
        return (descend(params, grads), codes, counts), {"loss": loss, "nearest": nearest}

    params = {"encoder": network(0, 16, 32, 8), "decoder": network(5, 8, 32, 16)}
    state: Any = (params, normal(16, 8, seed=9), jnp.ones(16))
    return Program(step=step, state=state, inputs=(normal(BATCH, 16, seed=1),))


@program
def graph_messages():
    def step(params, nodes, senders, receivers, labels):
        def loss_fn(params):
            h = jnp.tanh(nodes @ params["in"])
            for w in params["hops"]:
                sums = jax.ops.segment_sum(h[senders], receivers, num_segments=nodes.shape[0])
                degree = jax.ops.segment_sum(jnp.ones(senders.shape), receivers, num_segments=nodes.shape[0])
                h = jnp.tanh(h @ w[0] + (sums / jnp.maximum(degree, 1.0)[:, None]) @ w[1])
            return cross_entropy(h @ params["out"], labels).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return descend(params, grads), {"loss": loss}

    params = weights({"in": (8, 16), "hops": [(2, 16, 16), (2, 16, 16)], "out": (16, 3)})
    inputs = (normal(24, 8), integers(24, 64, seed=1), integers(24, 64, seed=2), integers(3, 24, seed=3))
    return Program(step=step, state=params, inputs=inputs, batch_argnums=(1, 4))


@program
def two_tables_of_embeddings():
    transform = optax.adagrad(0.05)

    def step(state, dense, sparse, labels):
        params, opt_state = state

        def loss_fn(params):
            found = jnp.stack([table[sparse[:, i]] for i, table in enumerate(params["tables"])], 1)
            features = jnp.concatenate([apply(params["bottom"], dense)[:, None], found], 1)
            pairs = jnp.einsum("bid,bjd->bij", features, features)
            rows, columns = jnp.tril_indices(features.shape[1], -1)
            top = jnp.concatenate([features.reshape(dense.shape[0], -1), pairs[:, rows, columns]], 1)
            return optax.sigmoid_binary_cross_entropy(apply(params["top"], top)[:, 0], labels).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = transform.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

    tables = [0.1 * normal(size, 8, seed=i) for i, size in enumerate((64, 50, 24))]
    params = {"tables": tables, "bottom": network(0, 13, 16, 8), "top": network(3, 38, 16, 1)}
    inputs = (normal(BATCH, 13), integers(24, BATCH, 3), integers(2, BATCH, seed=2).astype(jnp.float32))
    return Program(step=step, state=(params, transform.init(params)), inputs=inputs)
