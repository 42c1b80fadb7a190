"""The model and train step of a published run, from its description."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from alpa_lite.cli.models.skip_networks import ResNet
from alpa_lite.cli.models.train import Adam, TrainStep, init_state, make_train_step
from alpa_lite.cli.models.transformer import Architecture, Computation, Encoder, Transformer
from alpa_lite.cli.models.transformer_layers import Experts, Latent
from benchmarks.published.cluster_of import device_name
from benchmarks.published.plan_of import computed_length, is_recent, issues_kernels, recompute_of, window_of
from benchmarks.published.row import Experts as RowExperts
from benchmarks.published.row import Row, RowError

_DTYPES = {"fp16": jnp.float16, "bf16": jnp.bfloat16, "fp32": jnp.float32, "tf32": jnp.float32}
#: Share of the tokens that the masked-language task predicts (Devlin et al. 2019, section 3.1).
_MASKED_SHARE = 0.15
#: Dropout rate of the models of the time before bfloat16 (Devlin et al. 2019; Shoeybi et al. 2019).
_DROPOUT = 0.1
#: A form whose parameters differ by less than this part from what a row states is taken to be the row's.
_CLOSE = 0.03
#: The same for a form that differs in the width of its heads alone: what rounding to three digits leaves.
_EXACT = 0.005
_WIDE_HEAD = 128
#: What the widths of heads are multiples of in kernels of attention (FlashAttention, and tensor cores in 16 bits).
_HEAD_MULTIPLE = 8


@dataclass(frozen=True, kw_only=True)
class Training:
    """A train step and the shapes of its arguments."""

    step: TrainStep
    state: Any
    batch: Any
    key: Any
    parameters: int


def training_of(row: Row, *, num_segments: int = 1) -> Training:
    """Return the train step of a run with shapes to trace it with; nothing is allocated."""
    model = model_of(row, num_segments=num_segments)
    dtype = model.computation.dtype if isinstance(model, Transformer) else model.dtype
    optimizer = Adam(weight_decay=0.01, trust_ratio=row.family == "bert", master_weights=dtype != jnp.float32)
    state = jax.eval_shape(lambda: init_state(model.init(jax.random.key(0)), optimizer))
    return Training(
        step=make_train_step(model.loss_fn, optimizer),
        state=state,
        batch=model.batch_shapes(row.batch_size),
        key=jax.eval_shape(lambda: jax.random.key(0, impl=generator_of(row)))
        if getattr(model, "dropout", 0.0)
        else None,
        parameters=model.parameter_count(),
    )


def generator_of(row: Row) -> str:
    """Return JAX's name of the random generator: Philox in the kernels of libraries, Threefry in programs of JAX."""
    return "rbg" if issues_kernels(row) else "threefry2x32"


def model_of(row: Row, *, num_segments: int = 1) -> Transformer | ResNet:
    """Return the model of a row. Raises `RowError` if the description is not sufficient.

    Tables seldom say whether layers are gated and embeddings tied, and some count widths in their own way. Of the usual
    forms of a family, the one is built whose number of parameters comes closest to the stated one.
    """
    dtype = _dtype(row)
    if row.family == "wresnet":
        return _residual(row, dtype)
    usual = _transformer(row, dtype, num_segments)
    if row.parameters is None:
        return usual
    forms = [usual]
    if row.family in ("moe", "gpt"):
        # Grok counts the experts of a token, Alpa's tables a quarter of the width.
        kinds = [
            replace(usual.architecture, tied=tied, gated=gated) for tied in (False, True) for gated in (False, True)
        ]
        forms += [replace(usual, architecture=kind) for kind in kinds]
    if row.family == "moe":
        forms += [replace(form, inner=2 * form.inner) for form in forms]
    best = _closest(forms, row.parameters, _CLOSE)
    if not is_recent(row) or best.architecture.latent is not None:
        return best
    # Heads are as wide as the layer shared among them, or of 128 whatever its width, which is a small part of a model.
    wide = replace(best, architecture=replace(best.architecture, head_dim=_WIDE_HEAD))
    return _closest([best, wide], row.parameters, _EXACT)


def _closest(forms: Sequence[Transformer], parameters: float, limit: float) -> Transformer:
    """Return the form whose parameters come closest to a number, within `limit`; the first where it is within that."""
    error = [abs(form.parameter_count() / parameters - 1) for form in forms]
    best = min(range(len(forms)), key=error.__getitem__)
    return forms[best] if error[best] < limit < error[0] else forms[0]


def _transformer(row: Row, dtype: Any, num_segments: int) -> Transformer:
    """Return the usual form of a family."""
    # Experts are gated, norms without means and projections without biases since Mixtral (2023) at the latest.
    plain = row.family in ("llama", "t5") or (row.family == "moe" and is_recent(row))
    recompute, window = recompute_of(row), window_of(row)
    latent = re.search(r"\bMLA\b", row.attention) is not None
    return Transformer(
        vocab_size=row.vocab,
        num_layers=row.layers,
        hidden=row.hidden,
        num_heads=row.heads,
        inner=row.inner,
        seq_len=computed_length(row),
        architecture=Architecture(
            num_kv_heads=row.heads if latent else row.kv_heads,
            head_dim=_head_dim(row),
            activation="silu" if row.family == "llama" else "gelu",
            gated=plain,
            norm="rms" if plain else "layer",
            bias=not plain and row.family != "moe",
            positions="rotary" if row.family == "llama" else "relative" if row.family == "t5" else "learned",
            tied=row.family in ("gpt", "bert"),
            window=window.size,
            global_every=window.global_every,
            latent=Latent() if latent else None,
        ),
        num_masked=round(_MASKED_SHARE * row.seq_len) if row.family == "bert" else None,
        experts=_experts(row),
        encoder=Encoder(num_layers=row.encoder_layers, seq_len=row.encoder_seq_len) if row.encoder_layers else None,
        dropout=0.0 if is_recent(row) else _DROPOUT,
        computation=Computation(
            fused=recompute != "alternate" and row.family != "t5",
            num_segments=num_segments,
            recompute=recompute,
            narrow=precision_is_narrow(row),
            dtype=dtype,
            param_dtype=dtype,
        ),
    )


def precision_is_narrow(row: Row) -> bool:
    """Whether projections compute in eight bits or less, in whatever blocks their scales hold for."""
    return re.search(r"fp8|float8|fp4|float4|tensorwise|rowwise|blockwise", row.precision) is not None


def _dtype(row: Row) -> Any:
    if precision_is_narrow(row):
        return jnp.bfloat16
    stated = re.match(r"(?:mixed[- ])?(bf16|fp16|tf32|fp32)", row.precision)
    if not stated:
        known = (*_DTYPES, "fp8", "mxfp8", "nvfp4", "tensorwise", "rowwise")
        raise RowError(f"precision is {row.precision!r}: known are {', '.join(known)}.")
    return _DTYPES[stated[1]]


def _head_dim(row: Row) -> int:
    stated = re.search(r"head dim(?:ension)? (\d+)", row.notes)
    if stated:
        return int(stated[1])
    # Latent attention has heads of 128 at any width (DeepSeek-AI 2024).
    if re.search(r"\bMLA\b", row.attention):
        return 128
    shared = row.hidden // row.heads
    # Kernels of attention take widths that are multiples of 8: another quotient means that heads have a width of their
    # own, which is taken to be the next power of two.
    return shared if shared % _HEAD_MULTIPLE == 0 else 1 << (shared - 1).bit_length()


def _experts(row: Row) -> Experts | None:
    if row.experts is None:
        return None
    group = min(row.experts.group or 256, row.seq_len)
    average = row.experts.top_k * group / row.experts.count
    return Experts(
        num_experts=row.experts.count,
        top_k=row.experts.top_k,
        capacity_factor=max(1, round(_busiest(row, row.experts) * average)) / average,
        group_size=group,
        every=row.experts.every,
        shared=row.experts.shared,
        dense_inner=row.experts.dense_inner,
    )


#: Tokens of the expert that gets most, or the room that experts have, above the average of all experts.
_MOST = 0.25
#: Rows of the blocks in which TPUs multiply sorted tokens by the weights of their experts: MaxText's default tile.
_SORTED_ROWS = 512


def _busiest(row: Row, experts: RowExperts) -> float:
    """Return the tokens that the busiest device computes, relative to the average of all.

    GShard's groups have room for what experts get on average, and so do experts if routers are forced to balance them;
    where they have a capacity, it is a quarter above the average (the recipes of MaxText). Systems that sort tokens
    wait for the busiest device: of n experts on each, which get more or less than others independently, it has the
    excess of one by the square root of n. A device with all experts has all tokens. On TPUs one kernel multiplies all
    of them, in blocks of which those with tokens of two experts are computed for both (megablox).
    """
    text = row.notes.lower()
    if "capacity" in text:
        return 1 + _MOST
    if experts.group:
        return 1.0
    even = row.expert == 1 or "balanced" in text
    busiest = 1.0 if even else 1 + _MOST / (experts.count / row.expert) ** 0.5
    if not device_name(row.hardware).startswith("tpu"):
        return busiest
    per_device = row.micro_batch or row.batch_size / row.data
    return busiest + _SORTED_ROWS / (per_device * row.seq_len * experts.top_k * row.expert / experts.count)


def _residual(row: Row, dtype: Any) -> ResNet:
    channels = re.search(r"channels (\d+)", row.width)
    factor = re.search(r"width factor (\d+)", row.width)
    return ResNet(
        channels=int(channels[1]) if channels else 64,
        width_factor=int(factor[1]) if factor else 1,
        num_classes=1024 if channels else 1000,
        norm_batch=1,
        dtype=dtype,
        param_dtype=jnp.float32 if dtype == jnp.float32 else dtype,
    )
