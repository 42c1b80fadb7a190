"""Invented runs in the columns of published ones."""

from __future__ import annotations

from typing import Any

from benchmarks.published.row import Row, parse_row

PLAIN: dict[str, str] = {
    "id": "tiny-1",
    "group": "tiny",
    "quality": "A",
    "hardware": "A100-SXM-80GB",
    "n_devices": "8",
    "devices_per_node": "8",
    "intra_link": "NVLink3 600 GB/s/GPU bidir, NVSwitch",
    "inter_link": "8x200 Gb/s HDR IB",
    "model": "tiny",
    "family": "gpt",
    "params_B": "",
    "layers": "4",
    "hidden": "256",
    "heads": "8",
    "kv_heads": "",
    "ffn_hidden": "1024",
    "seq_len": "128",
    "vocab": "1024",
    "experts_topk": "",
    "global_batch": "64",
    "micro_batch": "4",
    "tp": "1",
    "pp": "1",
    "interleave_v": "",
    "cp": "",
    "ep": "",
    "zero_fsdp": "",
    "sequence_parallel": "n",
    "act_recompute": "none",
    "precision": "bf16",
    "schedule": "",
    "measured_step_time_s": "0.5",
    "notes": "",
}


def cells(**changes: Any) -> dict[str, str]:
    """The cells of the plain row with some others."""
    return {**PLAIN, **{name: str(value) for name, value in changes.items()}}


def row(**changes: Any) -> Row:
    """The plain row with other cells."""
    return parse_row(cells(**changes))
