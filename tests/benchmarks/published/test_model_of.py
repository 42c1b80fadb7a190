"""Models that descriptions mean: usual forms of families, and the form whose size is the stated one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from alpa_lite.cli.models.transformer import Architecture, Encoder, Transformer
from alpa_lite.cli.models.transformer_layers import Latent
from benchmarks.published.model_of import model_of, training_of
from benchmarks.published.row import RowError
from tests.benchmarks.published.runs import row


def transformer(**changes: Any) -> Transformer:
    model = model_of(row(**changes))
    assert isinstance(model, Transformer)
    return model


def test_families_have_their_usual_forms() -> None:
    gpt, llama, bert = (transformer(family=name) for name in ("gpt", "llama", "bert"))
    assert gpt.architecture == Architecture(num_kv_heads=gpt.num_heads, head_dim=gpt.hidden // gpt.num_heads)
    llama_like = replace(
        gpt.architecture, gated=True, activation="silu", norm="rms", positions="rotary", bias=False, tied=False
    )
    assert llama.architecture == llama_like
    assert bert.num_masked == 19  # 15 % of 128
    t5 = transformer(family="t5", layers="2+4", seq_len="64+32")
    assert (t5.encoder, t5.num_layers, t5.seq_len) == (Encoder(num_layers=2, seq_len=64), 4, 32)
    assert t5.architecture.positions == "relative" and not t5.computation.fused


def test_the_stated_size_decides_what_tables_leave_out() -> None:
    plain = transformer()
    gated = transformer(params_B=(plain.parameter_count() + 4 * 256 * 1024) / 1e9)
    untied = transformer(params_B=(plain.parameter_count() + 256 * 1024) / 1e9)
    assert gated.architecture.gated and gated.architecture.tied
    assert not untied.architecture.gated and not untied.architecture.tied
    # A size that no form has is somebody's rounding: the usual form stays.
    assert transformer(params_B=1.0) == plain
    assert transformer(params_B=1.01 * plain.parameter_count() / 1e9) == plain


def test_experts_and_narrow_numbers() -> None:
    mixture = transformer(family="moe", experts_topk="4/2 (every 2nd layer, group size 64)")
    assert mixture.experts is not None
    assert (mixture.experts.num_experts, mixture.experts.every, mixture.experts.group_size) == (4, 2, 64)
    eight = transformer(precision="fp8")
    assert eight.computation.narrow and eight.computation.dtype == jnp.bfloat16
    assert transformer(precision="fp32").computation.dtype == jnp.float32


@pytest.mark.parametrize(
    ("changes", "tokens"),
    [
        # Of 256 tokens with two experts each, one of 16 gets 32 on average.
        ({}, 32),
        ({"ep": 16}, 40),  # the busiest of sixteen devices has a quarter more
        ({"ep": 4}, 36),  # of four experts, half of that
        ({"ep": 16, "notes": "MoE tokens force-balanced"}, 32),
        ({"notes": "dropped (capacity) MoE"}, 40),
        # Blocks of 512 rows straddle the experts of a TPU: of 2048 tokens, eight sequences of 2048 have 16 for each.
        ({"hardware": "TPU v5e", "micro_batch": 8}, 40),
    ],
)
def test_tokens_of_the_busiest_device(changes: dict[str, Any], tokens: int) -> None:
    model = transformer(**{"family": "moe", "experts_topk": "16/2", "seq_len": 2048, "n_devices": 16, **changes})
    assert model.experts is not None and model.experts.capacity == tokens


def test_groups_have_room_for_the_average() -> None:
    experts = transformer(family="moe", experts_topk="16/2 (group size 64)", ep=8).experts
    assert experts is not None and experts.capacity == 8


def test_heads_of_128_are_told_from_the_stated_size() -> None:
    usual = transformer(family="llama")
    wide = replace(usual, architecture=replace(usual.architecture, head_dim=128))
    billions = round(wide.parameter_count() / 1e9, 6)
    assert transformer(family="llama", params_B=billions) == wide
    assert transformer(family="llama", params_B=1.004 * usual.parameter_count() / 1e9) == usual
    # Models of the time of float16 shared their width among heads.
    assert transformer(family="gpt", precision="fp16", params_B=billions).architecture.head_dim == 32


def test_notes_may_state_the_width_of_heads() -> None:
    assert transformer(notes="head dim 64; tuned").architecture.head_dim == 64
    assert transformer().architecture.head_dim == 32


@pytest.mark.parametrize(("hidden", "heads", "width"), [(2880, 64, 64), (2048, 32, 64), (640, 8, 80), (1000, 8, 128)])
def test_widths_of_heads_are_multiples_of_8(hidden: int, heads: int, width: int) -> None:
    """2880 shared among 64 heads would be 45 each, which no kernel takes."""
    assert transformer(hidden=hidden, heads=heads, kv_heads=heads).architecture.head_dim == width


def test_dropout_draws_as_kernels_of_libraries_do_or_as_jax() -> None:
    library, compiled = (training_of(row(precision="fp16", notes=notes)).key.dtype for notes in ("", "JAX/XLA"))
    assert (str(library), str(compiled)) == ("key<rbg>", "key<fry>")


def test_dropout_belongs_to_float16() -> None:
    old, new = (training_of(row(precision=precision)) for precision in ("fp16", "bf16"))
    assert old.key is not None and new.key is None
    assert {leaf.dtype for leaf in jax.tree.leaves(old.state.params)} == {jnp.dtype(jnp.float16)}
    assert jax.tree.leaves(new.state.opt_state.master)[0].dtype == jnp.float32


def test_unknown_precision_is_refused() -> None:
    with pytest.raises(RowError, match="precision is 'int4': known are fp16"):
        model_of(row(precision="int4"))


@pytest.mark.parametrize(
    "precision", ["fp8", "fp8-te", "mxfp8", "nvfp4", "tensorwise", "float8 rowwise", "fp8_blockwise"]
)
def test_every_eight_bit_recipe_is_narrow(precision: str) -> None:
    model = transformer(precision=precision)
    assert model.computation.narrow and model.computation.dtype == jnp.bfloat16


def test_latent_attention_shared_experts_and_windows_are_built_as_stated() -> None:
    model = transformer(family="moe", experts_topk="8/2 +1 shared; MLA", notes="1:1 sliding window 32", layers=4)
    assert model.architecture.latent == Latent() and model.architecture.head_dim == 128
    assert model.experts is not None and model.experts.shared == 1
    assert (model.architecture.window, model.architecture.global_every, model.period) == (32, 2, 2)
