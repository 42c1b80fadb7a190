"""Steps whose structure is unusual: loops, branches, ensembles, gradients accumulated or clipped by the user."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.zoo.network import X, Y, forward, init, loss_fn
from tests.zoo.registry import BATCH, Program, cross_entropy, descend, global_norm, integers, normal, program, weights

LABELS = integers(4, BATCH, seed=3)


def stacked(count: int) -> Any:
    """Weights of several networks, stacked."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *[init(seed) for seed in range(count)])


def plain(step: Any, *inputs: Any, **options: Any) -> Program:
    """A program whose state is the three-layer network."""
    return Program(step=step, state=init(), inputs=inputs or (X, Y), **options)


# --- gradients accumulated by the user --------------------------------------------------------------------------------


@program
def accumulate_in_scan():
    def step(params, x, y):
        parts = x.reshape(4, -1, 8), y.reshape(4, -1, 4)

        def add(total, part):
            loss, grads = jax.value_and_grad(loss_fn)(params, *part)
            return jax.tree.map(jnp.add, total, (loss, grads)), None

        zero = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        (loss, grads), _ = jax.lax.scan(add, zero, parts)
        return descend(params, jax.tree.map(lambda g: g / 4, grads)), {"loss": loss / 4}

    return plain(step)


@program
def accumulate_in_scan_of_given_parts():
    transform = optax.adam(1e-2)

    def step(state, x, y):
        params, opt_state = state

        def add(total, part):
            loss, grads = jax.value_and_grad(loss_fn)(params, *part)
            return jax.tree.map(jnp.add, total, grads), loss

        grads, losses = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), (x, y))
        grads = jax.tree.map(lambda g: g / x.shape[0], grads)
        updates, opt_state = transform.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": losses.mean(), "losses": losses}

    params = init()
    parts, batch = (jnp.stack([X, -X]), jnp.stack([Y, Y])), {"x": 1, "y": 1}
    return Program(step=step, state=(params, transform.init(params)), inputs=parts, batch_argnums=batch)


@program
def accumulate_in_fori_loop():
    def step(params, x, y):
        size = x.shape[0] // 4

        def add(i, total):
            part = [jax.lax.dynamic_slice_in_dim(v, i * size, size) for v in (x, y)]
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss_fn)(params, *part))

        zero = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        loss, grads = jax.lax.fori_loop(0, 4, add, zero)
        return descend(params, jax.tree.map(lambda g: g / 4, grads)), {"loss": loss / 4}

    return plain(step)


@program
def several_steps_in_scan():
    def step(params, xs, ys):
        def one(params, batch):
            loss, grads = jax.value_and_grad(loss_fn)(params, *batch)
            return descend(params, grads, 0.05), loss

        params, losses = jax.lax.scan(one, params, (xs, ys))
        return params, {"loss": losses[-1], "losses": losses}

    batch = {"xs": 1, "ys": 1}
    return plain(step, normal(3, BATCH, 8, seed=1), normal(3, BATCH, 4, seed=2), batch_argnums=batch)


# --- many models, many gradients --------------------------------------------------------------------------------------


@program
def ensemble_by_vmap():
    def step(params, x, y):
        def one(params):
            loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
            return descend(params, grads), loss

        params, losses = jax.vmap(one)(params)
        return params, {"loss": losses.mean(), "losses": losses}

    return Program(step=step, state=stacked(4), inputs=(X, Y))


@program
def ensemble_by_map():
    def step(params, x, y):
        losses, grads = jax.lax.map(lambda p: jax.value_and_grad(loss_fn)(p, x, y), params)
        return descend(params, grads), {"loss": losses.mean(), "losses": losses}

    return Program(step=step, state=stacked(3), inputs=(X, Y))


@program
def private_gradients():
    def step(state, x, y):
        params, key = state
        key, now = jax.random.split(key)

        def clipped(x, y):
            loss, grads = jax.value_and_grad(loss_fn)(params, x[None], y[None])
            scale = jnp.minimum(1.0, 0.5 / global_norm(grads))
            return loss, jax.tree.map(lambda g: g * scale, grads)

        losses, grads = jax.vmap(clipped)(x, y)
        leaves, structure = jax.tree.flatten(jax.tree.map(lambda g: g.sum(0), grads))
        keys = jax.random.split(now, len(leaves))
        noisy = [g + 0.1 * jax.random.normal(k, g.shape) for g, k in zip(leaves, keys, strict=True)]
        grads = jax.tree.map(lambda g: g / x.shape[0], jax.tree.unflatten(structure, noisy))
        return (descend(params, grads), key), {"loss": losses.mean()}

    return Program(step=step, state=(init(), jax.random.key(7)), inputs=(X, Y))


@program
def noise_scale_of_gradients():
    def step(params, x, y):
        parts = jax.vmap(jax.grad(loss_fn), (None, 0, 0))(params, x.reshape(2, -1, 8), y.reshape(2, -1, 4))
        grads = jax.tree.map(lambda g: g.mean(0), parts)
        spread = sum(jnp.sum((p - g) ** 2) for p, g in zip(jax.tree.leaves(parts), jax.tree.leaves(grads), strict=True))
        return descend(params, grads), {"loss": loss_fn(params, x, y), "noise": spread}

    return plain(step)


# --- branches ---------------------------------------------------------------------------------------------------------


@program
def skip_connection_by_flag():
    def step(state, x, y, use_skip):
        params, count = state

        def loss(params):
            h = jnp.tanh(x @ params["a"])
            deeper = lambda h: jnp.tanh(h @ params["b"])  # noqa: E731
            h = jax.lax.cond(use_skip, lambda h: h + deeper(h), deeper, h)
            return jnp.mean((h @ params["c"] - y) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return (descend(params, grads), count + 1), {"loss": value}

    return Program(step=step, state=(init(), jnp.zeros((), jnp.int32)), inputs=(X, Y, jnp.array(True)))


@program
def layers_dropped_at_random():
    def step(state, x, y):
        params, key = state
        key, now = jax.random.split(key)

        def loss(params):
            h = jnp.tanh(x @ params["a"])
            for layer_key in jax.random.split(now, 3):
                keep = jax.random.bernoulli(layer_key, 0.5)
                h = jax.lax.cond(keep, lambda h: h + jnp.tanh(h @ params["b"]), lambda h: h, h)
            return jnp.mean((h @ params["c"] - y) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return (descend(params, grads), key), {"loss": value}

    return Program(step=step, state=(init(), jax.random.key(3)), inputs=(X, Y))


@program
def activation_by_switch():
    def step(state, x, y):
        params, count = state

        def loss(params):
            h = x @ params["a"]
            h = jax.lax.switch(count % 3, [jnp.tanh, jax.nn.gelu, lambda h: jax.nn.silu(2 * h)], h)
            return jnp.mean((jnp.tanh(h @ params["b"]) @ params["c"] - y) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return (descend(params, grads), count + 1), {"loss": value}

    return Program(step=step, state=(init(), jnp.zeros((), jnp.int32)), inputs=(X, Y))


@program
def update_every_other_step():
    transform = optax.adam(1e-2)

    def step(state, x, y):
        params, opt_state, sums, count = state
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        sums = jax.tree.map(jnp.add, sums, grads)

        def update(_):
            updates, new = transform.update(jax.tree.map(lambda g: g / 2, sums), opt_state, params)
            return optax.apply_updates(params, updates), new, jax.tree.map(jnp.zeros_like, sums)

        params, opt_state, sums = jax.lax.cond(count % 2 == 1, update, lambda _: (params, opt_state, sums), None)
        return (params, opt_state, sums, count + 1), {"loss": loss}

    params = init()
    zeros = jax.tree.map(jnp.zeros_like, params)
    return Program(step=step, state=(params, transform.init(params), zeros, jnp.zeros((), jnp.int32)), inputs=(X, Y))


@program
def metrics_every_other_step():
    def step(state, x, labels):
        params, count = state

        def loss(params):
            logits = forward(params, x)
            return cross_entropy(logits, labels).mean(), logits

        (value, logits), grads = jax.value_and_grad(loss, has_aux=True)(params)
        accuracy = lambda: jnp.mean((logits.argmax(-1) == labels).astype(jnp.float32))  # noqa: E731
        accuracy = jax.lax.cond(count % 2 == 0, accuracy, lambda: jnp.float32(-1))
        return (descend(params, grads), count + 1), {"loss": value, "accuracy": accuracy}

    return Program(step=step, state=(init(), jnp.zeros((), jnp.int32)), inputs=(X, LABELS))


# --- loops without a fixed length -------------------------------------------------------------------------------------


@program
def fixed_point_without_gradient():
    def step(params, x, y):
        def loss(params):
            drive = x @ params["a"]
            cell = lambda z: jnp.tanh(drive + 0.3 * z @ params["b"])  # noqa: E731
            go_on = lambda c: (jnp.max(jnp.abs(c[0] - c[1])) > 1e-3) & (c[2] < 30)  # noqa: E731
            start = (cell(jnp.zeros_like(drive)), jnp.zeros_like(drive), 0)
            z, _, count = jax.lax.while_loop(
                go_on, lambda c: (cell(c[0]), c[0], c[2] + 1), jax.lax.stop_gradient(start)
            )
            z = cell(jax.lax.stop_gradient(z))
            return jnp.mean((z @ params["c"] - y) ** 2), count

        (value, count), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return descend(params, grads), {"loss": value, "iterations": count}

    return plain(step)


@program
def layers_in_fori_loop():
    def step(params, x, y):
        def loss(params):
            layer = lambda i, h: h + jnp.tanh(h @ params["stack"][i])  # noqa: E731
            h = jax.lax.fori_loop(0, 3, layer, x @ params["a"])
            return jnp.mean((h @ params["c"] - y) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return descend(params, grads, 0.05), {"loss": value}

    params = {**weights({"a": (8, 16), "c": (16, 4)}), "stack": 0.3 * weights((3, 16, 16), seed=4)}
    return Program(step=step, state=params, inputs=(X, Y))


@program
def power_iteration():
    def step(state, x, y):
        params, vectors = state

        def largest(w, u):
            body = lambda _, u: _unit(w @ _unit(w.T @ u))  # noqa: E731
            u = jax.lax.stop_gradient(jax.lax.fori_loop(0, 2, body, u))
            v = jax.lax.stop_gradient(_unit(w.T @ u))
            return u @ w @ v, u

        def loss(params):
            norms = {name: largest(params[name], vectors[name]) for name in params}
            scaled = {name: params[name] / norms[name][0] for name in params}
            return loss_fn(scaled, x, y), {name: u for name, (_, u) in norms.items()}

        (value, vectors), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return (descend(params, grads), vectors), {"loss": value}

    params = init()
    vectors = {name: _unit(normal(p.shape[0], seed=i)) for i, (name, p) in enumerate(params.items())}
    return Program(step=step, state=(params, vectors), inputs=(X, Y))


def _unit(v):
    return v / (jnp.linalg.norm(v) + 1e-6)


# --- effects ----------------------------------------------------------------------------------------------------------


@program
def printing():
    def step(params, x, y):
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        jax.debug.print("loss {loss}", loss=loss)
        return descend(params, grads), {"loss": loss}

    return plain(step)


@program
def host_callback():
    def step(params, x, y):
        double = lambda h: np.asarray(h * 2, np.float32)  # noqa: E731
        extra = jax.pure_callback(double, jax.ShapeDtypeStruct(x.shape, jnp.float32), x)
        loss, grads = jax.value_and_grad(loss_fn)(params, x + 0.1 * extra, y)
        return descend(params, grads), {"loss": loss}

    return plain(step)


@program
def host_callback_on_scalars():
    def step(params, x, y):
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        rate = jax.pure_callback(lambda v: np.float32(0.1 / (1 + v)), jax.ShapeDtypeStruct((), jnp.float32), loss)
        return jax.tree.map(lambda p, g: p - rate * g, params, grads), {"loss": loss, "rate": rate}

    return plain(step)


@program
def leaves_without_elements():
    """Arrays of no rows beside the weights, one of which is concatenated to them."""

    def step(state, x, y):
        def loss(state):
            params = {**state["params"], "b": jnp.concatenate([state["params"]["b"], state["rows"]])}
            return loss_fn(params, x, y) + jnp.sum(state["rows"])

        value, grads = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), {"loss": value, "nothing": x[:, :0]}

    state = {"params": init(), "rows": jnp.zeros((0, 16))}
    return Program(step=step, state=state, inputs=(X, Y))
