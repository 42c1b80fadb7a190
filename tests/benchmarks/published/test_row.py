"""Cells of published tables, odd ones too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.published.row import Experts, RowError, parse_row, read_rows
from tests.benchmarks.published.runs import PLAIN, cells, row


def test_a_plain_row() -> None:
    found = row()
    assert (found.layers, found.encoder_layers, found.seq_len, found.encoder_seq_len) == (4, 0, 128, 0)
    assert (found.data, found.model, found.pipeline, found.context, found.expert) == (8, 1, 1, 1, 1)
    assert found.kv_heads == 8 and found.parameters is None and found.measured_seconds == 0.5
    assert found.num_microbatches == 2 and found.batch_size == 64


@pytest.mark.parametrize(
    ("column", "text", "field", "value"),
    [
        ("n_devices", "1,024", "num_devices", 1024),
        ("devices_per_node", "", "devices_per_host", 8),
        ("kv_heads", "2", "kv_heads", 2),
        ("params_B", "1.5", "parameters", 1.5e9),
        ("global_batch", "", "global_batch", None),
        ("global_batch", "64.0", "global_batch", 64),
        ("interleave_v", "", "interleave", None),
        ("sequence_parallel", "Y", "sequence_parallel", True),
        ("sequence_parallel", "", "sequence_parallel", False),
        ("precision", " BF16-TE ", "precision", "bf16-te"),
        ("measured_step_time_s", " ", "measured_seconds", None),
        ("seq_len", "4,096", "seq_len", 4096),
        ("ep", "4", "expert", 4),
    ],
)
def test_single_cells(column: str, text: str, field: str, value: Any) -> None:
    assert getattr(row(**{column: text}), field) == value


def test_encoders_stand_in_front_of_the_plus() -> None:
    found = row(family="t5", layers="12+24", seq_len="512+128")
    assert (found.encoder_layers, found.layers) == (12, 24)
    assert (found.encoder_seq_len, found.seq_len) == (512, 128)


@pytest.mark.parametrize(
    ("text", "experts"),
    [
        ("", None),
        ("8/2", Experts(count=8, top_k=2)),
        (
            "16/2 (MoE in every 2nd layer, group size 2048)",
            Experts(count=16, top_k=2, every=2, group=2048),
        ),
        ("32 / 1 (every 4th layer, group 1024)", Experts(count=32, top_k=1, every=4, group=1024)),
        ("256/8 +1 shared; 3 dense layers ffn 18432; MLA", Experts(count=256, top_k=8, shared=1)),
        (
            "128/1 +1 shared; MoE every 2nd layer (dense ffn 16384)",
            Experts(count=128, top_k=1, every=2, shared=1, dense_inner=16384),
        ),
    ],
)
def test_experts(text: str, experts: Experts | None) -> None:
    assert row(family="moe", experts_topk=text).experts == experts


def test_images_have_no_heads() -> None:
    found = row(family="wresnet", hidden="base channels 160, width factor 2", heads="", ffn_hidden="", vocab="",
                seq_len="image 224x224", layers="50")  # fmt: skip
    assert found.width == "base channels 160, width factor 2" and (found.hidden, found.heads, found.seq_len) == (
        0,
        0,
        0,
    )


@pytest.mark.parametrize(("global_batch", "micro_batch", "count"), [(64, 1, 8), (64, 8, 1), (4, 8, 1), ("", 2, 1)])
def test_micro_batches_follow_from_batches_and_replicas(global_batch: Any, micro_batch: Any, count: int) -> None:
    assert row(global_batch=global_batch, micro_batch=micro_batch).num_microbatches == count


def test_notes_may_say_how_stages_are_cut() -> None:
    """Not all have equally many blocks, or equally many devices; then the micro-batches follow from nothing else."""
    notes = "PP-DP baseline plan: 3 stages 8/5/3 blocks on 2,1,1 GPUs; 32 micro-batches per step"
    found = row(notes=notes, pp=3, n_devices=4, micro_batch="")
    assert (found.blocks, found.stage_devices, found.num_microbatches) == ((8, 5, 3), (2, 1, 1), 32)
    plan = row(notes="4 stages 6/5/3/2 blocks, 1 GPU each", pp=4)
    assert (plan.blocks, plan.stage_devices, plan.num_microbatches) == ((6, 5, 3, 2), (), 8)
    assert (row().blocks, row().stage_devices, row().stated_microbatches) == ((), (), None)


def test_one_of_two_batches_is_enough() -> None:
    assert row(global_batch="", micro_batch=2).batch_size == 16
    assert row(micro_batch="").num_microbatches is None
    with pytest.raises(RowError, match="global_batch and micro_batch are blank"):
        _ = row(global_batch="", micro_batch="").batch_size


@pytest.mark.parametrize(
    ("column", "text", "message"),
    [
        ("family", "rnn", r"family is 'rnn': known are gpt, "),
        ("layers", "", r"layers is '': a number, or two joined by \+"),
        ("hidden", "", r"hidden is '': a whole number is needed"),
        ("tp", "two", r"tp is 'two': a whole number, or nothing"),
        ("params_B", "7B", r"params_B is '7B': a number, or nothing"),
        ("measured_step_time_s", "n/a", r"measured_step_time_s is 'n/a': a number, or nothing"),
    ],
)
def test_cells_that_cannot_be_read_are_named(column: str, text: str, message: str) -> None:
    with pytest.raises(RowError, match=message):
        row(**{column: text})


def test_tables_may_lack_columns_that_may_be_blank(tmp_path: Path) -> None:
    needed = ("id", "group", "hardware", "n_devices", "family", "layers", "hidden", "heads", "ffn_hidden", "seq_len",
              "vocab", "global_batch", "precision")  # fmt: skip
    path = tmp_path / "runs.csv"
    path.write_text(",".join(needed) + "\n" + ",".join(PLAIN[name] for name in needed) + "\n")
    (read,) = read_rows(path)
    found = parse_row(read)
    assert found.measured_seconds is None and found.devices_per_host == 8 and found.data == 8
    assert parse_row(cells()).hidden == found.hidden
