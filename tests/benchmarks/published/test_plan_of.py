"""Plans and backends that the words of a table mean."""

from __future__ import annotations

from typing import Any

import pytest

from alpa_lite.schedule import Interleaved1F1B, OneFOneB
from benchmarks.published.plan_of import (
    Sharding,
    Window,
    backend_of,
    chunks_of,
    computed_length,
    devices_of_stages,
    expert_devices,
    has_expert_axis,
    is_recent,
    loops_of,
    periods_of,
    recompute_of,
    schedule_of,
    sharding_of,
    window_of,
)
from tests.benchmarks.published.runs import row


@pytest.mark.parametrize(
    ("text", "devices", "sharding"),
    [
        ("", 8, Sharding(stage=0)),
        ("none", 8, Sharding(stage=0)),
        ("distributed optimizer (ZeRO-1)", 8, Sharding(stage=1)),
        ("ZeRO-2", 8, Sharding(stage=1)),
        ("ZeRO-3", 8, Sharding(stage=3)),
        ("FSDP FULL_SHARD", 8, Sharding(stage=3)),
        ("shard-largest heuristic", 8, Sharding(stage=3)),
        ("FSDP16", 64, Sharding(stage=3, replicas=4)),
        ("FSDP 16", 64, Sharding(stage=3, replicas=4)),
        ("FSDP2", 64, Sharding(stage=3)),
        ("FSDP2 8", 64, Sharding(stage=3, replicas=8)),
        ("Megatron FSDP 8", 16, Sharding(stage=3, replicas=2)),
        ("FSDP256 in slice (ICI), DP4 across slices (DCN)", 1024, Sharding(stage=3, replicas=4)),
        ("FSDP+DP (split not stated)", 16, Sharding(stage=3)),
        ("FSDP128", 8, Sharding(stage=3)),
        # Eight divide the width of 256, and 24 do not.
        ("ZeRO-3", 24, Sharding(stage=3, replicas=3)),
    ],
)
def test_sharding(text: str, devices: int, sharding: Sharding) -> None:
    assert sharding_of(row(zero_fsdp=text, n_devices=devices)) == sharding


@pytest.mark.parametrize(
    ("changes", "recompute"),
    [
        ({"act_recompute": "none"}, "none"),
        ({"act_recompute": ""}, "none"),
        ({"act_recompute": "full"}, "full"),
        ({"act_recompute": "Full (every layer)"}, "full"),
        ({"act_recompute": "remat policy not stated"}, "full"),  # the policy of `jax.checkpoint` by default
        ({"act_recompute": "selective"}, "selective"),
        ({"act_recompute": "selective (SAVE_DOT_ONLY)"}, "dots"),
        ({"act_recompute": "selective (SAVE_DOT_WITH_NO_BATCH_DIM)"}, "dots_without_batch"),
        ({"act_recompute": "selective (per-op)"}, "alternate"),
        ({"act_recompute": "custom (layer input + projections offloaded to host)"}, "projections"),
        # A fused kernel computes the scores again.
        ({"act_recompute": "none", "hardware": "H100-SXM-80GB"}, "selective"),
        ({"act_recompute": "full", "hardware": "H100-SXM-80GB"}, "full"),
    ],
)
def test_recomputation(changes: dict[str, str], recompute: str) -> None:
    assert recompute_of(row(**changes)) == recompute


@pytest.mark.parametrize(
    ("changes", "fused"),
    [
        ({"precision": "fp16"}, False),
        ({"precision": "bf16"}, False),
        ({"precision": "bf16-te"}, True),
        ({"zero_fsdp": "FSDP FULL_SHARD"}, True),
        ({"hardware": "H100-SXM-80GB"}, True),
        ({"hardware": "B200-180GB", "precision": "fp8"}, True),
        ({"hardware": "H100-SXM-80GB", "precision": "fp16"}, False),
    ],
)
def test_who_has_fused_attention(changes: dict[str, str], fused: bool) -> None:
    assert backend_of(row(**changes)).fused_attention == fused


@pytest.mark.parametrize(
    ("zero_fsdp", "ported"), [("FSDP FULL_SHARD", True), ("FSDP2 8", True), ("FSDP8", False), ("FSDP256", False)]
)
def test_who_has_attention_kernels_of_an_earlier_generation(zero_fsdp: str, ported: bool) -> None:
    assert backend_of(row(zero_fsdp=zero_fsdp, precision="bf16")).ported_attention == ported


@pytest.mark.parametrize(
    ("changes", "loops"),
    [
        ({"pp": 1}, 1),
        ({"pp": 2, "interleave_v": 2, "layers": 8}, 4),
        ({"pp": 4, "layers": 2}, 1),
        ({"family": "moe", "experts_topk": "8/2 (every 2nd layer)", "pp": 4, "layers": 8}, 4),
        ({"family": "moe", "experts_topk": "8/2 (every 2nd layer)", "pp": 4, "layers": 6}, 1),
    ],
)
def test_loops(changes: dict[str, Any], loops: int) -> None:
    """One for each stage, if stages can hold whole periods of layers."""
    assert loops_of(row(**changes)) == loops


def test_devices_that_stages_cannot_share_alike_go_to_the_first() -> None:
    assert devices_of_stages(row(n_devices=8, pp=4)) == ()
    assert devices_of_stages(row(n_devices=8, pp=3)) == (3, 3, 2)
    assert devices_of_stages(row(n_devices=4, pp=3, notes="3 stages 8/5/3 blocks on 1,2,1 GPUs")) == (1, 2, 1)


def test_communication_was_not_hidden_in_the_days_of_float16() -> None:
    old, new, sequence = (
        backend_of(row(**changes))
        for changes in (
            {"precision": "fp16"},
            {"precision": "bf16"},
            {"precision": "bf16", "sequence_parallel": "y", "hardware": "H100-SXM-80GB"},
        )
    )
    assert (old.overlap_gradients, new.overlap_gradients) == (False, True)
    assert (old.overlap, new.overlap) == (False, True)
    assert backend_of(row(precision="fp16", sequence_parallel="y")).overlap
    assert backend_of(row(precision="fp32", hardware="TPU v4")).overlap
    assert (new.overlap_products, sequence.overlap_products) == (False, True)
    # Before Hopper no library had such products; XLA for TPUs has them whatever a table says.
    assert not backend_of(row(precision="bf16", sequence_parallel="y")).overlap_products
    assert backend_of(row(precision="bf16", hardware="TPU v5e", tp=2)).overlap_products
    assert not backend_of(row(precision="bf16", notes="JAX/XLA")).overlap_gradients


def test_the_fsdp_of_pytorch_makes_one_array_of_a_block() -> None:
    torch, compiled, deepspeed = (
        backend_of(row(precision="bf16", zero_fsdp=text))
        for text in ("FSDP FULL_SHARD", "FSDP16", "ZeRO-3 (DeepSpeed)")
    )
    assert (torch.flat_parameters, compiled.flat_parameters, deepspeed.flat_parameters) == (True, False, False)


def test_megatron_that_recomputes_layers_whole_and_splits_no_positions_is_of_the_days_of_float16() -> None:
    old = {"precision": "bf16", "tp": 2, "act_recompute": "full"}
    assert not is_recent(row(**old)) and not backend_of(row(**old)).overlap
    for newer in (
        {"sequence_parallel": "y"},
        {"act_recompute": "selective"},
        {"tp": 1},
        {"notes": "JAX/XLA"},
        {"hardware": "TPU v4"},
        {"hardware": "H100-SXM-80GB"},
        {"zero_fsdp": "FSDP FULL_SHARD"},
    ):
        assert is_recent(row(**{**old, **newer})), newer


def test_experts_on_more_devices_than_replicas_fold_over_the_tensor_devices() -> None:
    folded = row(family="moe", experts_topk="16/2", n_devices=32, tp=4, ep=16)
    assert (folded.data, expert_devices(folded)) == (8, 8)
    assert expert_devices(row(family="moe", experts_topk="16/2", n_devices=32, ep=8)) == 8


@pytest.mark.parametrize(
    ("changes", "fixed"),
    [({"ep": 4}, True), ({"ep": 4, "cp": 2}, False), ({"ep": 1}, False), ({"zero_fsdp": "ILP (searched)"}, False)],
)
def test_experts_lie_where_the_table_says(changes: dict[str, Any], fixed: bool) -> None:
    assert has_expert_axis(row(family="moe", experts_topk="8/2", **changes)) == fixed


def test_masked_models_without_a_compiler_read_what_sequences_have() -> None:
    assert computed_length(row(family="bert", seq_len=512)) == 288
    assert computed_length(row(family="bert", seq_len=128)) == 128
    for padded in ({"notes": "TensorFlow 2 + XLA"}, {"tp": 2}, {"zero_fsdp": "ZeRO-1"}, {"family": "gpt"}):
        assert computed_length(row(**{"family": "bert", "seq_len": 512, **padded})) == 512


@pytest.mark.parametrize(
    ("notes", "window"),
    [
        ("MaxText; 5:1 sliding window 1024 attention", Window(1024, 6)),
        ("sliding window 64", Window(64, 0)),
        ("sliding-window attention 4096", Window()),  # as long as the sequence
        ("", Window()),
    ],
)
def test_windows(notes: str, window: Window) -> None:
    assert window_of(row(notes=notes, seq_len=4096, layers=12)) == window
    assert periods_of(row(notes=notes, seq_len=4096, layers=12)) == 12 // (window.global_every or 1)


def test_stages_of_groups_of_layers_are_loops() -> None:
    cut = row(layers=8, n_devices=8, pp=3, notes="3 stages 1+1+2 of 4 groups on 2,2,4 GPUs, logical (2,1)")
    assert (cut.blocks, cut.stage_devices, loops_of(cut)) == ((1, 1, 2), (2, 2, 4), 4)


@pytest.mark.parametrize(
    ("changes", "chunks"),
    [
        ({"pp": 1}, 1),
        ({"pp": 4}, 1),
        ({"pp": 2, "interleave_v": 2}, 2),
        ({"pp": 2, "interleave_v": 8}, 2),  # a chunk holds a layer at least
        ({"pp": 2, "interleave_v": 1}, 1),
        ({"pp": 2, "layers": 24}, 6),  # not stated: as finely as recipes do
        ({"pp": 2, "layers": 22}, 1),
    ],
)
def test_chunks(changes: dict[str, Any], chunks: int) -> None:
    found = row(**changes)
    assert chunks_of(found) == chunks
    schedule = schedule_of(found)
    assert schedule == (Interleaved1F1B(num_chunks=chunks) if chunks > 1 else OneFOneB())


def test_chunks_need_rounds_of_micro_batches() -> None:
    """Of 3 micro-batches two stages cannot take 2 at a time."""
    assert schedule_of(row(pp=2, interleave_v=2, global_batch=48)) == OneFOneB()


@pytest.mark.parametrize(
    ("changes", "devices"),
    [
        ({}, 1),
        ({"ep": 4, "experts_topk": "8/2"}, 4),
        ({"experts_topk": "8/2", "zero_fsdp": "ILP (searched)"}, 8),
        ({"experts_topk": "8/2", "zero_fsdp": "FSDP8"}, 1),
    ],
)
def test_devices_for_experts(changes: dict[str, Any], devices: int) -> None:
    assert expert_devices(row(family="moe" if changes else "gpt", **changes)) == devices
