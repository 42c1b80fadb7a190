"""What cuDNN's attention (without packed sequences) and its scaled products compute, in plain JAX, for CPUs.

Importing this module lets programs with these primitives run on the virtual devices of the tests.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import mlir

from tests.rules.jax_primitives import jax_primitives

NO_OPERAND = jnp.zeros(0, jnp.float32)


def _heads(x: Any, layout: int) -> Any:
    """[batch, length, heads, width], whatever the layout."""
    return x if layout == 0 else jnp.swapaxes(x, 1, 2)


def _attention(q: Any, k: Any, v: Any, bias: Any, lengths: tuple[Any, Any], params: Any) -> tuple[Any, Any]:
    layout, mask_type = params["layout"], params["mask_type"].name
    q, k, v = (_heads(x, layout).astype(jnp.float32) for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, group, 2), jnp.repeat(v, group, 2)
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * params["scale"]
    if bias.size:
        scores = scores + bias
    rows, columns = jnp.arange(scores.shape[2])[:, None], jnp.arange(scores.shape[3])
    seen = jnp.ones(scores.shape, bool)
    if "CAUSAL" in mask_type:
        seen &= rows >= columns
    if params["sliding_window_length"] is not None:
        seen &= rows - columns < params["sliding_window_length"]
    if "PADDING" in mask_type:
        seen &= columns < lengths[1][:, None, None, None]
    scores = jnp.where(seen, scores, -1e30)
    sums = jax.nn.logsumexp(scores, axis=-1)
    made = jnp.einsum("bnts,bsnh->btnh", jnp.exp(scores - sums[..., None]), v)
    if "PADDING" in mask_type:
        made = jnp.where(rows[:, :, None] < lengths[0][:, None, None, None], made, 0)
    return _heads(made, layout), sums


def _forward(q: Any, k: Any, v: Any, bias: Any, q_len: Any, k_len: Any, *_: Any, **params: Any) -> list[Any]:
    made, sums = _attention(q, k, v, bias, (q_len, k_len), params)
    return [made.astype(q.dtype), sums][: 1 + params["is_training"]]


def _backward(q: Any, k: Any, v: Any, bias: Any, q_len: Any, k_len: Any, *rest: Any, **params: Any) -> list[Any]:
    wrt = (q, k, v, bias) if params["variadic_args"][1] else (q, k, v)

    def run(*arrays: Any) -> Any:
        return _attention(*arrays[:3], arrays[3] if len(arrays) > 3 else bias, (q_len, k_len), params)[0]

    _, pull = jax.vjp(run, *wrt)
    return list(pull(rest[-1].astype(jnp.float32)))


for _name, _function in (("dot_product_attention_fwd", _forward), ("dot_product_attention_bwd", _backward)):
    mlir.register_lowering(jax_primitives()[_name], mlir.lower_fun(_function, multiple_results=True), platform="cpu")


def _scaled_matmul(a: Any, b: Any, a_scale: Any, b_scale: Any, *, preferred_element_type: Any) -> list[Any]:
    wide = [
        x.astype(jnp.float32) * jnp.repeat(scale.astype(jnp.float32), x.shape[2] // scale.shape[2], axis=2)
        for x, scale in ((a, a_scale), (b, b_scale))
    ]
    return [jnp.einsum("bmk,bnk->bmn", *wide).astype(preferred_element_type)]


mlir.register_lowering(
    jax_primitives()["scaled_matmul"], mlir.lower_fun(_scaled_matmul, multiple_results=True), platform="cpu"
)
