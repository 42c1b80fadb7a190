"""Hand-written kernels, in the interpreter of Pallas."""

from __future__ import annotations

from enum import Enum, auto
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.gpu.attention import mha
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

import tests.rules.cudnn_reference  # noqa: F401  (a lowering for CPUs)
from tests.rules.jax_primitives import jax_primitives
from tests.rules.row import Row, floats, integers, row

call = partial(pl.pallas_call, interpret=True)


def struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def doubled(x: Any) -> Any:
    """Blocks of two rows and four columns."""

    def kernel(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = 2 * x_ref[...]

    spec = pl.BlockSpec((2, 4), lambda i, j: (i, j))
    return call(kernel, grid=(8, 4), in_specs=[spec], out_specs=spec, out_shape=struct(16, 16))(x)


def product(x: Any, y: Any) -> Any:
    """A product whose sum is in scratch memory, over the last axis of the grid."""

    def kernel(x_ref: Any, y_ref: Any, o_ref: Any, sum_ref: Any) -> None:
        @pl.when(pl.program_id(2) == 0)
        def _() -> None:
            sum_ref[...] = jnp.zeros_like(sum_ref)

        sum_ref[...] += x_ref[...] @ y_ref[...]

        @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
        def _() -> None:
            o_ref[...] = sum_ref[...]

    return call(
        kernel,
        grid=(4, 8, 2),
        in_specs=[pl.BlockSpec((2, 8), lambda i, j, k: (i, k)), pl.BlockSpec((8, 1), lambda i, j, k: (k, j))],
        out_specs=pl.BlockSpec((2, 1), lambda i, j, k: (i, j)),
        out_shape=struct(8, 8),
        scratch_shapes=[pltpu.VMEM((2, 1), jnp.float32)],
    )(x, y)


def shared_heads(q: Any, k: Any) -> Any:
    """Two heads of q for each head of k."""

    def kernel(q_ref: Any, k_ref: Any, o_ref: Any) -> None:
        o_ref[...] = q_ref[...] * k_ref[...]

    return call(
        kernel,
        grid=(4, 8),
        in_specs=[
            pl.BlockSpec((None, None, 4), lambda b, h: (b, h, 0)),
            pl.BlockSpec((None, None, 4), lambda b, h: (b, h // 2, 0)),
        ],
        out_specs=pl.BlockSpec((None, None, 4), lambda b, h: (b, h, 0)),
        out_shape=struct(4, 8, 4),
    )(q, k)


def chosen(which: Any, x: Any) -> Any:
    """Rows of x by a prefetched table that the index map reads, times a number that the kernel reads of it."""

    def kernel(which_ref: Any, x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = x_ref[...] * (1 + which_ref[pl.program_id(0)]).astype(jnp.float32)

    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(8, 4),
        in_specs=[pl.BlockSpec((1, 4), lambda i, j, which_ref: (which_ref[i], j))],
        out_specs=pl.BlockSpec((1, 4), lambda i, j, which_ref: (i, j)),
    )
    return call(kernel, grid_spec=spec, out_shape=struct(8, 16))(which, x)


def attention(q: Any, k: Any, v: Any, *, causal: bool) -> Any:
    """The Triton kernel of JAX, with blocks of 16."""
    blocks = dict(block_q=16, block_k=16, block_q_dkv=16, block_kv_dkv=16, block_q_dq=16, block_kv_dq=16)
    from jax.experimental.pallas.ops.gpu.attention import BlockSizes

    return mha(q, k, v, segment_ids=None, causal=causal, interpret=True, block_sizes=BlockSizes(**blocks))


def splash(q: Any, k: Any, v: Any) -> Any:
    """The sparse kernel of JAX for TPUs with a causal mask, with two heads of queries per head of keys."""
    masks = [splash_attention_mask.CausalMask((q.shape[2], k.shape[2])) for _ in range(q.shape[1])]
    sizes = {name: 128 for name in ("block_q", "block_kv", "block_kv_compute")}
    kernel = splash_attention_kernel.make_splash_mha(
        mask=splash_attention_mask.MultiHeadMask(masks),
        head_shards=1,
        q_seq_shards=1,
        block_sizes=splash_attention_kernel.BlockSizes(**sizes),
        interpret=True,
    )
    return jax.vmap(kernel)(q, k, v)


@custom_partitioning
def scaled_rows(x: Any, y: Any) -> Any:
    return x * jnp.sum(y, axis=1, keepdims=True)


def _partition(mesh: Any, args: Any, result: Any) -> Any:
    return mesh, lambda x, y: x * jnp.sum(y, axis=1, keepdims=True), result.sharding, tuple(a.sharding for a in args)


scaled_rows.def_partition(partition=_partition, sharding_rule="i j, i k -> i j", need_replication_factors=("k",))


@custom_partitioning
def scaled_columns(x: Any, y: Any) -> Any:
    return x * y


scaled_columns.def_partition(
    partition=lambda mesh, args, result: (mesh, lambda x, y: x * y, result.sharding, tuple(a.sharding for a in args)),
    sharding_rule=lambda mesh, operands, results: ("i j, j -> i j", {"need_replication_factors": ("i",)}),
)

ROWS: tuple[Row, ...] = (
    row("pallas_call", doubled, floats(16, 16)),
    row("pallas_call product", product, floats(8, 16), floats(16, 8)),
    row("pallas_call shared heads", shared_heads, floats(4, 8, 4), floats(4, 4, 4)),
    row("pallas_call prefetch", chosen, integers(8, 8), floats(8, 16)),
    row("pallas_call attention", partial(attention, causal=False), *[floats(4, 64, 4, 16) for _ in range(3)]),
    row("pallas_call causal attention", partial(attention, causal=True), *[floats(4, 64, 4, 16) for _ in range(3)]),
    row("pallas_call splash", splash, floats(2, 4, 256, 128), *[floats(2, 2, 256, 128) for _ in range(2)]),
    row("custom_partitioning by function", scaled_columns, floats(8, 16), floats(16)),
    row("custom_partitioning", scaled_rows, floats(8, 16), floats(8, 4)),
)


class MaskType(Enum):
    """Masks of cuDNN, by the names of JAX's own (private) type."""

    NO_MASK = auto()
    PADDING = auto()
    CAUSAL = auto()


def cudnn(*, backward: bool = False, training: bool = True, mask: str = "NO_MASK", **options: Any) -> Any:
    """A call of cuDNN's attention on all of its operands."""
    chosen: dict[str, Any] = dict(scale=0.5, seed=0, dropout_rate=0.0, variadic_args=(False, False), layout=0)
    chosen |= dict(mask_type=MaskType[mask], sliding_window_length=None) | options
    chosen |= {} if backward else {"is_training": training}
    name = f"dot_product_attention_{'bwd' if backward else 'fwd'}_wrapper"
    return lambda *operands: jax_primitives()[name].bind(*operands, **chosen)


def attended(
    batch: int, length: int, heads: int, of_keys: int, *others: Any, backward: bool = False
) -> tuple[Any, ...]:
    """Its operands; `others` stand for bias, q_seqlen and kv_seqlen."""
    q, k, v = floats(batch, length, heads, 8), *[floats(batch, 12, of_keys, 8) for _ in range(2)]
    rest = [*others, *[jnp.zeros(0, jnp.float32)] * (7 - len(others))]
    if backward:
        rest += [floats(batch, heads, length), q, floats(batch, length, heads, 8)]
    return (q, k, v, *rest)


_FORWARD, _BACKWARD = "dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper"
_BIAS, _SHARED = dict(variadic_args=(True, True)), floats(1, 8, 16, 12)
_LENGTHS = jnp.zeros(0, jnp.float32), integers(16, 4, low=1), integers(12, 4, low=1)


def scaled_matmul(a: Any, b: Any, a_scales: Any, b_scales: Any) -> Any:
    """The product of cuDNN on numbers of eight bits, with a scale for each 32 of them."""
    narrow = [x.astype(jnp.float8_e4m3fn) for x in (a, b)]
    scales = [jnp.exp2(x.astype(jnp.float32)).astype(jnp.float8_e8m0fnu) for x in (a_scales, b_scales)]
    (made,) = jax_primitives()["scaled_matmul_wrapper"].bind(*narrow, *scales, preferred_element_type=jnp.float32)
    return made


ROWS += (
    row(
        "scaled_matmul_wrapper",
        scaled_matmul,
        *(integers(8, 4, n, 256, low=-8) for n in (8, 16)),
        *(integers(4, 4, n, 8, low=-4) for n in (8, 16)),
    ),
    row(_FORWARD, cudnn(), *attended(4, 16, 8, 8)),
    row(f"{_FORWARD} causal", cudnn(mask="CAUSAL", training=False), *attended(4, 16, 8, 4)),
    row(f"{_FORWARD} bias", cudnn(**_BIAS), *attended(4, 16, 8, 8, _SHARED)),
    row(f"{_FORWARD} padded", cudnn(mask="PADDING"), *attended(4, 16, 8, 8, *_LENGTHS)),
    row(_BACKWARD, cudnn(backward=True), *attended(4, 16, 8, 4, backward=True)),
    row(f"{_BACKWARD} bias", cudnn(backward=True, **_BIAS), *attended(4, 16, 8, 8, _SHARED, backward=True)),
)
