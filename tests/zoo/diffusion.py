"""Generative models: denoising with random times, a variational autoencoder, an adversarial pair, a flow."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from tests.zoo.registry import BATCH, EPSILON, Program, descend, normal, program, weights

SIZE, STEPS = 8, 16


def conv(x, w):
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def group_norm(x, groups=4):
    grouped = x.reshape(*x.shape[:-1], groups, -1)
    mean = grouped.mean((1, 2, 4), keepdims=True)
    variance = grouped.var((1, 2, 4), keepdims=True)
    return ((grouped - mean) * jax.lax.rsqrt(variance + 1e-5)).reshape(x.shape)


def time_features(t, size):
    angles = t[:, None] * jnp.exp(-jnp.arange(size // 2) * (jnp.log(1000.0) / (size // 2)))
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)


def denoise(params, x, t):
    embedded = jax.nn.silu(time_features(t, 16) @ params["time_1"]) @ params["time_2"]
    h = conv(x, params["in"])
    for p in params["blocks"]:
        shift, scale = jnp.split(embedded @ p["modulation"], 2, axis=-1)
        inner = group_norm(h) * (1 + scale[:, None, None]) + shift[:, None, None]
        h = h + conv(jax.nn.silu(inner), p["conv"])
    return conv(jax.nn.silu(h), params["out"])


def init_denoiser() -> Any:
    """Weights of a small network that sees an image and a time."""
    block = {"conv": (3, 3, 16, 16), "modulation": (16, 32)}
    shapes = {"in": (3, 3, 3, 16), "out": (3, 3, 16, 3), "time_1": (16, 16), "time_2": (16, 16)}
    return weights({**shapes, "blocks": [block, block]})


@program
def denoising_diffusion():
    transform = optax.adam(1e-3, eps=EPSILON)
    alphas = jnp.cumprod(1 - jnp.linspace(1e-3, 0.2, STEPS))

    def step(state, images):
        key, time_key, noise_key = jax.random.split(state["key"], 3)
        t = jax.random.randint(time_key, (images.shape[0],), 0, STEPS)
        noise = jax.random.normal(noise_key, images.shape)

        def loss_fn(params):
            alpha = alphas[t][:, None, None, None]
            noisy = jnp.sqrt(alpha) * images + jnp.sqrt(1 - alpha) * noise
            errors = jnp.mean((denoise(params, noisy, t) - noise) ** 2, (1, 2, 3))
            signal = alphas[t] / (1 - alphas[t])
            return jnp.mean(errors * jnp.minimum(signal, 5.0) / signal)

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt_state = transform.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        ema = optax.incremental_update(params, state["ema"], 0.01)
        return {"params": params, "ema": ema, "opt_state": opt_state, "key": key}, {"loss": loss}

    params = init_denoiser()
    state = {"params": params, "ema": params, "opt_state": transform.init(params), "key": jax.random.key(0)}
    return Program(step=step, state=state, inputs=(normal(BATCH, SIZE, SIZE, 3),))


@program
def flow_matching_with_guidance():
    def step(state, images, labels):
        params, key = state
        key, *keys = jax.random.split(key, 4)
        t = jax.nn.sigmoid(jax.random.normal(keys[0], (images.shape[0],)))
        noise = jax.random.normal(keys[1], images.shape)
        dropped = jax.random.bernoulli(keys[2], 0.2, labels.shape)
        labels = jnp.where(dropped, 10, labels)

        def loss_fn(params):
            mixed = (1 - t)[:, None, None, None] * images + t[:, None, None, None] * noise
            mixed = mixed + params["classes"][labels][:, None, None, :]
            return jnp.mean((denoise(params, mixed, 100 * t) - (noise - images)) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return (descend(params, grads, 0.01), key), {"loss": loss}

    params = {**init_denoiser(), "classes": weights((11, 3))}
    inputs = (normal(BATCH, SIZE, SIZE, 3), jnp.arange(BATCH) % 10)
    return Program(step=step, state=(params, jax.random.key(1)), inputs=inputs)


@program
def sampling_from_a_denoiser():
    def step(state, labels):
        params, key = state
        key, start, walk = jax.random.split(key, 3)
        x = jax.random.normal(start, (labels.shape[0], SIZE, SIZE, 3))

        def body(i, x):
            t = jnp.full(labels.shape, STEPS - 1 - i)
            drift = denoise(params, x, t)
            return x - 0.1 * drift + 0.01 * jax.random.normal(jax.random.fold_in(walk, i), x.shape)

        x = jax.lax.fori_loop(0, 3, body, x)
        return (params, key), {"loss": jnp.mean(x**2), "images": x}

    return Program(step=step, state=(init_denoiser(), jax.random.key(0)), inputs=(jnp.arange(BATCH),))


@program
def variational_autoencoder():
    transform = optax.adam(1e-3, eps=EPSILON)

    def loss_fn(params, x, key):
        h = jax.nn.relu(x @ params["encoder"])
        mean, log_variance = jnp.split(h @ params["latent"], 2, axis=-1)
        z = mean + jnp.exp(0.5 * log_variance) * jax.random.normal(key, mean.shape)
        logits = jax.nn.relu(z @ params["decoder"]) @ params["out"]
        fit = jnp.sum(optax.sigmoid_binary_cross_entropy(logits, x), -1)
        divergence = -0.5 * jnp.sum(1 + log_variance - mean**2 - jnp.exp(log_variance), -1)
        return jnp.mean(fit + divergence), {"fit": fit.mean(), "divergence": divergence.mean()}

    def step(state, x):
        params, opt_state, key = state
        key, now = jax.random.split(key)
        (loss, parts), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, x, now)
        updates, opt_state = transform.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state, key), {"loss": loss, **parts}

    params = weights({"encoder": (64, 32), "latent": (32, 16), "decoder": (8, 32), "out": (32, 64)})
    params = jax.tree.map(lambda w: 0.5 * w, params)
    x = (normal(BATCH, 64) > 0).astype(jnp.float32)
    return Program(step=step, state=(params, transform.init(params), jax.random.key(0)), inputs=(x,))


@program
def adversarial_pair():
    generator_rule, critic_rule = optax.adam(1e-3, b1=0.5, eps=EPSILON), optax.adam(2e-3, b1=0.5, eps=EPSILON)

    def generate(params, z):
        return jnp.tanh(jax.nn.leaky_relu(z @ params["a"]) @ params["b"])

    def judge(params, x):
        return (jax.nn.leaky_relu(x @ params["a"]) @ params["b"])[:, 0]

    def step(state, real):
        key, first, second = jax.random.split(state["key"], 3)
        generator, critic = state["generator"], state["critic"]

        def critic_loss(critic):
            fake = jax.lax.stop_gradient(generate(generator, jax.random.normal(first, (real.shape[0], 8))))
            return jnp.mean(jax.nn.softplus(-judge(critic, real)) + jax.nn.softplus(judge(critic, fake)))

        loss_c, grads = jax.value_and_grad(critic_loss)(critic)
        updates, critic_state = critic_rule.update(grads, state["critic_state"])
        critic = optax.apply_updates(critic, updates)

        def generator_loss(generator):
            fake = generate(generator, jax.random.normal(second, (real.shape[0], 8)))
            return jnp.mean(jax.nn.softplus(-judge(critic, fake)))

        loss_g, grads = jax.value_and_grad(generator_loss)(generator)
        updates, generator_state = generator_rule.update(grads, state["generator_state"])
        new = {
            "generator": optax.apply_updates(generator, updates),
            "critic": critic,
            "generator_state": generator_state,
            "critic_state": critic_state,
            "key": key,
        }
        return new, {"loss": loss_g, "critic_loss": loss_c}

    generator, critic = weights({"a": (8, 32), "b": (32, 16)}), weights({"a": (16, 32), "b": (32, 1)}, 1)
    state = {
        "generator": generator,
        "critic": critic,
        "generator_state": generator_rule.init(generator),
        "critic_state": critic_rule.init(critic),
        "key": jax.random.key(0),
    }
    return Program(step=step, state=state, inputs=(normal(BATCH, 16),))


@program
def adversarial_pair_with_inner_loop():
    """Several steps of the critic in a scan, with a penalty on its slope, before one of the generator."""

    def generate(params, z):
        return jnp.tanh(z @ params["a"]) @ params["b"]

    def judge(params, x):
        return (jnp.tanh(x @ params["a"]) @ params["b"])[..., 0]

    def step(state, real):
        generator, critic, key = state
        key, inner, last = jax.random.split(key, 3)

        def critic_loss(critic, key):
            noise, share = jax.random.split(key)
            fake = generate(generator, jax.random.normal(noise, (real.shape[0], 8)))
            share = jax.random.uniform(share, (real.shape[0], 1))
            between = share * real + (1 - share) * fake
            slopes = jax.vmap(jax.grad(judge, argnums=1), (None, 0))(critic, between)
            penalty = jnp.mean((jnp.sqrt(jnp.sum(slopes**2, -1) + 1e-6) - 1) ** 2)
            return jnp.mean(judge(critic, fake) - judge(critic, real)) + 10 * penalty

        def body(critic, key):
            loss, grads = jax.value_and_grad(critic_loss)(critic, key)
            return descend(critic, grads, 0.01), loss

        critic, losses = jax.lax.scan(body, critic, jax.random.split(inner, 3))
        z = jax.random.normal(last, (real.shape[0], 8))
        loss, grads = jax.value_and_grad(lambda g: -jnp.mean(judge(critic, generate(g, z))))(generator)
        return (descend(generator, grads, 0.01), critic, key), {"loss": loss, "critic_losses": losses}

    generator, critic = weights({"a": (8, 32), "b": (32, 16)}), weights({"a": (16, 32), "b": (32, 1)}, 1)
    return Program(step=step, state=(generator, critic, jax.random.key(0)), inputs=(normal(BATCH, 16),))


@program
def normalising_flow():
    def step(params, x):
        def loss_fn(params):
            z, log_det = x, jnp.zeros(x.shape[0])
            for i, p in enumerate(params):
                kept, moved = jnp.split(z, 2, axis=-1)
                shift, log_scale = jnp.split(jnp.tanh(kept @ p["a"]) @ p["b"], 2, axis=-1)
                log_scale = jnp.tanh(log_scale)
                moved = moved * jnp.exp(log_scale) + shift
                log_det = log_det + log_scale.sum(-1)
                z = jnp.concatenate([moved, kept] if i % 2 else [kept, moved], -1)[:, ::-1] @ p["mix"]
                log_det = log_det + jnp.linalg.slogdet(p["mix"])[1]
            return jnp.mean(0.5 * jnp.sum(z**2, -1) - log_det)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return descend(params, grads, 1e-2), {"loss": loss}

    params = [
        {**weights({"a": (4, 16), "b": (16, 8)}, i), "mix": jnp.eye(8) + 0.1 * normal(8, 8, seed=i)} for i in range(2)
    ]
    return Program(step=step, state=params, inputs=(normal(BATCH, 8),))
