"""Steps that scale their loss, and steps that compute in low precision."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from tests.zoo.network import X, Y, forward, init, loss_fn
from tests.zoo.registry import Program, global_norm, program


@program
def dynamic_loss_scale():
    transform = optax.adam(1e-2)

    def step(state, x, y):
        params, opt_state, scale, good = state
        loss, grads = jax.value_and_grad(lambda p: scale * loss_fn(p, x, y))(params)
        grads = jax.tree.map(lambda g: g / scale, grads)
        finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]))
        updates, new_opt = transform.update(grads, opt_state, params)
        choose = lambda a, b: jax.tree.map(lambda a, b: jnp.where(finite, a, b), a, b)  # noqa: E731
        params, opt_state = choose(optax.apply_updates(params, updates), params), choose(new_opt, opt_state)
        good = jnp.where(finite, good + 1, 0)
        scale = jnp.where(finite, jnp.where(good % 2 == 0, 2 * scale, scale), scale / 2)
        return (params, opt_state, scale, good), {"loss": loss / scale, "finite": finite}

    params = init()
    state = (params, transform.init(params), jnp.float32(2.0**10), jnp.zeros((), jnp.int32))
    return Program(step=step, state=state, inputs=(X, Y))


@program
def half_precision_with_loss_scale():
    def make(dtype):
        def step(state, x, y):
            params, scale = state

            def loss(params):
                low = jax.tree.map(lambda p: p.astype(dtype), params)
                out = forward(low, x.astype(dtype)).astype(jnp.float32)
                return jnp.mean((out - y) ** 2) * scale

            value, grads = jax.value_and_grad(loss)(params)
            grads = jax.tree.map(lambda g: g / scale, grads)
            finite = jnp.isfinite(global_norm(grads))
            params = jax.tree.map(lambda p, g: jnp.where(finite, p - 0.1 * g, p), params, grads)
            return (params, jnp.where(finite, scale * 2, scale / 2)), {"loss": value / scale}

        return step

    state = (init(), jnp.float32(64.0))
    return Program(step=make(jnp.float16), state=state, inputs=(X, Y), dtype=jnp.float16, exact=make(jnp.float32))


@program
def weights_rounded_to_eight_bits():
    """Weights and activations rounded to integers, products summed in int32, gradients straight through."""

    def quantised(v, axis):
        scale = jax.lax.stop_gradient(jnp.max(jnp.abs(v), axis, keepdims=True) / 127)
        return jnp.clip(jnp.round(v / scale), -127, 127).astype(jnp.int8), scale

    @jax.custom_vjp
    def product(x, w):
        (a, scale_a), (b, scale_b) = quantised(x, 1), quantised(w, 0)
        return jax.lax.dot(a, b, preferred_element_type=jnp.int32).astype(jnp.float32) * scale_a * scale_b

    product.defvjp(lambda x, w: (product(x, w), (x, w)), lambda saved, g: (g @ saved[1].T, saved[0].T @ g))

    def step(params, x, y):
        def loss(params):
            return jnp.mean((product(jnp.tanh(product(x, params["a"])), params["c"]) - y) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), {"loss": value}

    return Program(step=step, state=init(), inputs=(X, Y))


@program
def weights_rounded_at_random():
    """Weights rounded at random to the upper bits of a float."""

    def rounded(key, v):
        noise = jax.random.bits(key, v.shape, jnp.uint16).astype(jnp.uint32)
        raised = jax.lax.bitcast_convert_type(v, jnp.uint32) + noise
        return jax.lax.bitcast_convert_type(raised & jnp.uint32(0xFFFF0000), jnp.float32)

    def step(state, x, y):
        params, key = state
        key, *keys = jax.random.split(key, 4)
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        new = {name: p - 0.1 * grads[name] for name, p in params.items()}
        drift = {name: rounded(k, new[name]) - new[name] for k, name in zip(keys, sorted(new), strict=True)}
        return (new, key), {"loss": loss, "drift": global_norm(jax.tree.map(jnp.abs, drift)) > 0}

    return Program(step=step, state=(init(), jax.random.key(0)), inputs=(X, Y))


@program
def adapters_on_weights_of_four_bits():
    """Frozen weights of four bits with a scale each column, and low-rank adapters that are trained."""

    def step(state, x, y):
        frozen, adapters = state

        def loss(adapters):
            h = x
            for (weights, scale), (down, up) in zip(frozen, adapters, strict=True):
                h = jnp.tanh(h @ (weights.astype(jnp.float32) * scale) + h @ down @ up)
            return jnp.mean((h[:, : y.shape[1]] - y) ** 2)

        value, grads = jax.value_and_grad(loss)(adapters)
        return (frozen, jax.tree.map(lambda a, g: a - 0.1 * g, adapters, grads)), {"loss": value}

    width, rank, frozen, adapters = X.shape[1], 2, [], []
    for key in jax.random.split(jax.random.key(3), 3):
        a, b, c = jax.random.split(key, 3)
        frozen.append((jax.random.randint(a, (width, width), -8, 8).astype(jnp.int4), jnp.full((width,), 0.1)))
        adapters.append((jax.random.normal(b, (width, rank)) / 4, jax.random.normal(c, (rank, width)) / 4))
    return Program(step=step, state=(frozen, adapters), inputs=(X, Y))


@program
def momentum_of_eight_bits():
    def make(dtype):
        def step(state, x, y):
            params, momentum = state
            loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
            # A factor keeps the momentum within the range of eight bits.
            new = jax.tree.map(lambda m, g: 0.9 * m.astype(jnp.float32) + 64.0 * g, momentum, grads)
            momentum = jax.tree.map(lambda old, m: m.astype(dtype).astype(old.dtype), momentum, new)
            return (jax.tree.map(lambda p, m: p - 1e-3 * m, params, new), momentum), {"loss": loss}

        return step

    params, eight = init(), jnp.float8_e4m3fn
    state = (params, jax.tree.map(lambda p: jnp.zeros(p.shape, eight), params))
    return Program(step=make(eight), state=state, inputs=(X, Y), dtype=eight, exact=make(jnp.float32))


@program
def complex_weights():
    """Layers of complex numbers; the conjugate of a derivative points uphill."""

    def step(params, x, y):
        def loss(params):
            h = x.astype(jnp.complex64)
            for w in params:
                h = h @ w
                h = h / (1.0 + jnp.abs(h))
            return jnp.mean((jnp.abs(h[:, : y.shape[1]]) - y) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda w, g: w - 0.1 * jnp.conj(g), params, grads), {"loss": value}

    width = X.shape[1]
    parts = jax.random.normal(jax.random.key(4), (3, 2, width, width)) / width**0.5
    return Program(step=step, state=[re + 1j * im for re, im in parts], inputs=(X, Y))
