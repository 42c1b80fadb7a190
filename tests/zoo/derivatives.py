"""Steps that differentiate in unusual ways: rules of one's own, policies of recomputation, gradients of gradients."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from tests.zoo.network import X, Y, forward, init, loss_fn
from tests.zoo.registry import (
    BATCH,
    Program,
    descend,
    global_norm,
    layer_norm,
    norm_weights,
    normal,
    program,
    register,
    weights,
)


def trained(loss: Any, state: Any = None, rate: float = 0.1) -> Program:
    """A program that descends along the gradient of `loss(params, x, y)`."""

    def step(params, x, y):
        value, grads = jax.value_and_grad(loss)(params, x, y)
        return descend(params, grads, rate), {"loss": value}

    return Program(step=step, state=init() if state is None else state, inputs=(X, Y))


# --- rules of one's own -----------------------------------------------------------------------------------------------


@jax.custom_vjp
def clipped_gradient(x):
    return x


clipped_gradient.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1e-3, 1e-3),))


@jax.custom_vjp
def straight_through(x):
    return jnp.round(x * 4) / 4


straight_through.defvjp(lambda x: (straight_through(x), x), lambda x, g: (jnp.where(jnp.abs(x) < 2, g, 0.0),))


@jax.custom_jvp
def softplus(x):
    return jnp.logaddexp(x, 0.0)


softplus.defjvps(lambda dx, _, x: dx * jax.nn.sigmoid(x))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def fixed_point(cell, params, drive):
    def body(state):
        return cell(params, drive, state[0]), state[0], state[2] + 1

    z = jnp.zeros_like(drive)
    go_on = lambda state: (jnp.max(jnp.abs(state[0] - state[1])) > 1e-6) & (state[2] < 50)  # noqa: E731
    return jax.lax.while_loop(go_on, body, (cell(params, drive, z), z, 0))[0]


def fixed_point_forward(cell, params, drive):
    z = fixed_point(cell, params, drive)
    return z, (params, drive, z)


def fixed_point_backward(cell, saved, g):
    params, drive, z = saved
    pull_z = jax.vjp(lambda z: cell(params, drive, z), z)[1]
    u = jax.lax.fori_loop(0, 20, lambda _, u: g + pull_z(u)[0], g)
    return jax.vjp(lambda params, drive: cell(params, drive, z), params, drive)[1](u)


fixed_point.defvjp(fixed_point_forward, fixed_point_backward)


@program
def gradient_clipped_inside():
    return trained(lambda p, x, y: jnp.mean((clipped_gradient(jnp.tanh(x @ p["a"])) @ p["b"] @ p["c"] - y) ** 2))


@program
def straight_through_rounding():
    def loss(params, x, y):
        h = straight_through(jnp.tanh(x @ params["a"]) * 1.7)
        return jnp.mean((jnp.tanh(h @ params["b"]) @ params["c"] - y) ** 2)

    return trained(loss)


@program
def own_forward_rule():
    return trained(lambda p, x, y: jnp.mean((softplus(softplus(x @ p["a"]) @ p["b"]) @ p["c"] - y) ** 2), rate=1e-3)


@program
def implicit_layer():
    cell = lambda params, drive, z: jnp.tanh(drive + 0.2 * z @ params)  # noqa: E731

    def loss(params, x, y):
        z = fixed_point(cell, params["b"], x @ params["a"])
        return jnp.mean((z @ params["c"] - y) ** 2)

    return trained(loss)


@program
def linear_solve_inside():
    def loss(params, x, y):
        h = jnp.tanh(x @ params["a"])
        gram = h.T @ h / x.shape[0] + jnp.eye(16)
        return jnp.mean((h @ jnp.linalg.solve(gram, params["b"]) @ params["c"] - y) ** 2)

    return trained(loss)


# --- recomputation ----------------------------------------------------------------------------------------------------

POLICIES = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots_without_batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "names": jax.checkpoint_policies.save_only_these_names("middle"),
    "other_names": jax.checkpoint_policies.save_anything_except_these_names("middle"),
}


def block(params, x):
    h = layer_norm(x, params["norm"])
    h = checkpoint_name(jax.nn.gelu(h @ params["up"]), "middle")
    return x + h @ params["down"]


def recomputed(policy: Any) -> Program:
    """Two blocks that are recomputed under a policy, in a third one that recomputes both."""

    def loss(params, x, y):
        apply = jax.checkpoint(block, policy=policy)
        both = jax.checkpoint(lambda params, h: apply(params[1], apply(params[0], h)))
        return jnp.mean((apply(params["last"], both(params["first"], x @ params["in"])) @ params["out"] - y) ** 2)

    blocks = [{**weights({"up": (16, 32), "down": (32, 16)}, seed=i), "norm": norm_weights(16)} for i in range(3)]
    return trained(loss, {**weights({"in": (8, 16), "out": (16, 4)}, seed=8), "first": blocks[:2], "last": blocks[2]})


for _name, _policy in POLICIES.items():
    register(f"recompute_saving_{_name}", lambda policy=_policy: recomputed(policy))


@program
def recompute_in_scan_by_name():
    policy = jax.checkpoint_policies.save_only_these_names("middle")

    def loss(params, x, y):
        body = jax.checkpoint(lambda h, p: (block(p, h), None), policy=policy, prevent_cse=False)
        h, _ = jax.lax.scan(body, x @ params["in"], params["blocks"])
        return jnp.mean((h @ params["out"] - y) ** 2)

    blocks = [{**weights({"up": (16, 32), "down": (32, 16)}, seed=i), "norm": norm_weights(16)} for i in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)
    return trained(loss, {**weights({"in": (8, 16), "out": (16, 4)}, seed=8), "blocks": stacked})


@program
def scan_unrolled_twice_in_reverse():
    def loss(params, x, y):
        body = lambda h, p: (block(p, h), jnp.mean(h**2))  # noqa: E731
        h, norms = jax.lax.scan(body, x @ params["in"], params["blocks"], reverse=True, unroll=2)
        return jnp.mean((h @ params["out"] - y) ** 2) + 1e-2 * norms.sum()

    blocks = [{**weights({"up": (16, 32), "down": (32, 16)}, seed=i), "norm": norm_weights(16)} for i in range(4)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)
    return trained(loss, {**weights({"in": (8, 16), "out": (16, 4)}, seed=8), "blocks": stacked})


# --- gradients of gradients -------------------------------------------------------------------------------------------


@program
def hypergradient():
    def step(state, x, y):
        params, log_rate, log_decay = state

        def after(logs):
            penalised = lambda p: loss_fn(p, x, y) + jnp.exp(logs[1]) * global_norm(p) ** 2  # noqa: E731
            new = descend(params, jax.grad(penalised)(params), jnp.exp(logs[0]))
            return loss_fn(new, x, y), new

        (loss, new), slopes = jax.value_and_grad(after, has_aux=True)((log_rate, log_decay))
        return (new, log_rate - 0.1 * slopes[0], log_decay - 0.1 * slopes[1]), {"loss": loss}

    return Program(step=step, state=(init(), jnp.float32(-2.0), jnp.float32(-3.0)), inputs=(X, Y))


@program
def meta_learning():
    def step(params, x, y):
        def adapted_loss(params, x, y):
            support, query = (x[:4], y[:4]), (x[4:], y[4:])
            fast = params
            for _ in range(2):
                fast = descend(fast, jax.grad(loss_fn)(fast, *support), 0.1)
            return loss_fn(fast, *query)

        tasks = lambda params: jax.vmap(adapted_loss, (None, 0, 0))(params, x, y).mean()  # noqa: E731
        loss, grads = jax.value_and_grad(tasks)(params)
        return descend(params, grads), {"loss": loss}

    return Program(step=step, state=init(), inputs=(normal(BATCH, 8, 8, seed=1), normal(BATCH, 8, 4, seed=2)))


@program
def gradient_penalty():
    def loss(params, x, y):
        slopes = jax.vmap(jax.grad(lambda x: forward(params, x).sum()))(x)
        return loss_fn(params, x, y) + 0.1 * jnp.mean((jnp.linalg.norm(slopes, axis=-1) - 1) ** 2)

    return trained(loss)


@program
def hessian_vector_products():
    def step(state, x, y):
        params, probe = state
        grad = lambda params: jax.grad(loss_fn)(params, x, y)  # noqa: E731
        grads, curved = jax.jvp(grad, (params,), (probe,))
        norm = global_norm(curved)
        probe = jax.tree.map(lambda h: h / norm, curved)
        return (descend(params, grads, 0.1 / (1 + norm)), probe), {"loss": loss_fn(params, x, y), "curvature": norm}

    return Program(step=step, state=(init(), init()), inputs=(X, Y))


@program
def physics_informed():
    def loss(params, x, y):
        u = lambda t: forward(params, t)[0]  # noqa: E731
        laplacian = jax.vmap(lambda t: jnp.trace(jax.hessian(u)(t)))(x)
        return jnp.mean((laplacian - jnp.sin(x[:, 0])) ** 2) + loss_fn(params, x, y)

    return trained(loss, rate=1e-2)


@program
def jacobian_regularised():
    def loss(params, x, y):
        jacobians = jax.vmap(jax.jacfwd(lambda x: forward(params, x)))(x)
        return loss_fn(params, x, y) + 1e-2 * jnp.mean(jacobians**2)

    return trained(loss)
