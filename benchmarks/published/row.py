"""One row of the table of published runs: the run's description and, separately, its measurements.

Numbers may be missing (blank); a cell that is not a number where one is needed raises a `RowError`.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

Family = Literal["gpt", "llama", "moe", "bert", "t5", "wresnet"]


class RowError(Exception):
    """A row that cannot be built; the message says which cell, what it holds, and what is needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts: their number, how many each token visits, one layer in every `every`, tokens per group;
    experts that all tokens visit, and the width of the layers between, where it is another one.
    """

    count: int
    top_k: int
    every: int = 1
    group: int | None = None
    shared: int = 0
    dense_inner: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The description of a run; docs/cost-model.md says what the columns of a table are.

    Attributes:
        attention: the words in which tables say what kind of attention it is, if they do.
        parameters: as the table states them; None where it does not.
        encoder_layers, encoder_seq_len: of an encoder beside the decoder; 0 without.
        num_microbatches: of one data-parallel replica; None where the table does not say.
        measured_seconds: per step; None where it was not measured. Nothing but the score may read it.
    """

    id: str
    group: str
    quality: str
    hardware: str
    num_devices: int
    devices_per_host: int
    intra_link: str
    inter_link: str
    family: Family
    layers: int
    encoder_layers: int
    hidden: int
    parameters: float | None
    heads: int
    kv_heads: int
    inner: int
    seq_len: int
    encoder_seq_len: int
    vocab: int
    width: str
    experts: Experts | None
    global_batch: int | None
    micro_batch: int | None
    data: int
    model: int
    pipeline: int
    interleave: int | None
    context: int
    expert: int
    sharding: str
    sequence_parallel: bool
    recompute: str
    precision: str
    schedule: str
    blocks: tuple[int, ...]
    stage_devices: tuple[int, ...]
    stated_microbatches: int | None
    attention: str
    notes: str
    measured_seconds: float | None

    @property
    def num_microbatches(self) -> int | None:
        """Micro-batches per step of one replica; None where the table does not say."""
        if self.stated_microbatches is not None:
            return self.stated_microbatches
        if self.global_batch is None or self.micro_batch is None:
            return 1 if self.global_batch is None else None
        return max(1, round(self.global_batch / (self.data * self.micro_batch)))

    @property
    def batch_size(self) -> int:
        """The number of samples per step."""
        if self.global_batch is not None:
            return self.global_batch
        if self.micro_batch is None:
            raise RowError("global_batch and micro_batch are blank: one of them is needed.")
        return self.micro_batch * self.data


def read_rows(path: str | Path) -> list[Mapping[str, str]]:
    """Return the cells of a table, row by row."""
    with Path(path).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def parse_row(cells: Mapping[str, str]) -> Row:
    """Return the row of these cells. Raises `RowError` for a cell that cannot be read."""
    families: Mapping[str, Family] = {name: name for name in get_args(Family)}
    family = families.get(cells["family"].strip())
    if family is None:
        raise RowError(f"family is {cells['family']!r}: known are {', '.join(families)}.")
    layers, encoder_layers = _pair(cells, "layers")
    lengths = _pair(cells, "seq_len", order="first")
    image = family == "wresnet"
    devices, model, pipeline = _count(cells, "n_devices"), _count(cells, "tp", 1), _count(cells, "pp", 1)
    context = _count(cells, "cp", 1)
    data = max(1, devices // (model * pipeline * context))
    billions = _amount(cells, "params_B")
    heads = 0 if image else _count(cells, "heads")
    notes = cells.get("notes") or ""
    blocks, stage_devices = _stages(notes)
    microbatches = re.search(r"(\d+) micro-batches per step", notes)
    return Row(
        id=cells["id"],
        group=cells["group"],
        quality=cells.get("quality", ""),
        hardware=cells["hardware"].strip(),
        num_devices=devices,
        devices_per_host=_count(cells, "devices_per_node", 8),
        intra_link=cells.get("intra_link", ""),
        inter_link=cells.get("inter_link", ""),
        family=family,
        layers=layers,
        encoder_layers=encoder_layers,
        hidden=0 if image else _count(cells, "hidden"),
        parameters=1e9 * billions if billions else None,
        heads=heads,
        kv_heads=0 if image else _count(cells, "kv_heads", heads),
        inner=0 if image else _count(cells, "ffn_hidden"),
        seq_len=0 if image else lengths[0] if not encoder_layers else lengths[1],
        encoder_seq_len=lengths[0] if encoder_layers else 0,
        vocab=0 if image else _count(cells, "vocab"),
        width=cells["hidden"] if image else "",
        experts=_experts(cells.get("experts_topk", "")),
        global_batch=_optional(cells, "global_batch"),
        micro_batch=_optional(cells, "micro_batch"),
        data=data,
        model=model,
        pipeline=pipeline,
        interleave=_optional(cells, "interleave_v"),
        context=context,
        expert=_count(cells, "ep", 1),
        sharding=cells.get("zero_fsdp", "").strip(),
        sequence_parallel=cells.get("sequence_parallel", "").strip().lower() in ("y", "yes", "true"),
        recompute=cells.get("act_recompute", "").strip(),
        precision=cells["precision"].strip().lower(),
        schedule=cells.get("schedule", "").strip(),
        blocks=blocks,
        stage_devices=stage_devices,
        stated_microbatches=int(microbatches[1]) if microbatches else None,
        attention=cells.get("experts_topk", "") + " " + notes,
        notes=notes,
        measured_seconds=measured_seconds(cells),
    )


def measured_seconds(cells: Mapping[str, str]) -> float | None:
    """Return the measured seconds of a step; None if there are none."""
    return _amount(cells, "measured_step_time_s")


def _count(cells: Mapping[str, str], column: str, default: int | None = None) -> int:
    found = _optional(cells, column)
    if found is None:
        if default is None:
            raise RowError(f"{column} is {cells.get(column, '')!r}: a whole number is needed.")
        return default
    return found


def _optional(cells: Mapping[str, str], column: str) -> int | None:
    found = _amount(cells, column, kind="whole number")
    return None if found is None else int(found)


def _amount(cells: Mapping[str, str], column: str, *, kind: str = "number") -> float | None:
    text = (cells.get(column) or "").strip().replace(",", "")
    if not text:
        return None
    try:
        return float(text)
    except ValueError as error:
        raise RowError(f"{column} is {text!r}: a {kind}, or nothing, is needed.") from error


def _pair(cells: Mapping[str, str], column: str, *, order: str = "last") -> tuple[int, int]:
    """Parse a number, or two ("24+24": encoder + decoder): (the last, the first or 0), or in the order of the text."""
    numbers = [int(n) for n in re.findall(r"\d+", (cells.get(column) or "").replace(",", ""))]
    if not numbers:
        raise RowError(f"{column} is {cells.get(column, '')!r}: a number, or two joined by +, is needed.")
    if len(numbers) == 1 or "+" not in cells[column]:
        return numbers[0], 0
    return (numbers[1], numbers[0]) if order == "last" else (numbers[0], numbers[1])


def _stages(notes: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Parse blocks and devices of each stage; () if none.

    Texts are like "3 stages 8/5/3 blocks on 2,1,1 GPUs" and "3 stages 2+2+4 of 8 groups on 2,2,4 GPUs".
    """
    found = re.search(r"stages ([\d/+]+) (?:blocks|of \d+ groups)(?: on ([\d,]+) GPUs)?", notes)
    found = found or re.search(r"stages (\d+(?:\+\d+)+)(?: on ([\d,]+) GPUs)?", notes)
    if not found:
        return (), ()
    return tuple(map(int, re.findall(r"\d+", found[1]))), tuple(map(int, re.findall(r"\d+", found[2] or "")))


def _experts(text: str) -> Experts | None:
    """Parse text like "16/2 (MoE in every 2nd layer, group size 2048)"."""
    found = re.match(r"\s*(\d+)\s*/\s*(\d+)", text)
    if not found:
        return None
    every = re.search(r"every (\d+)", text)
    group = re.search(r"group(?: size)? (\d+)", text)
    shared = re.search(r"\+\s*(\d+) shared", text)
    # A first few dense layers ("3 dense layers ffn 18432") are as much work as the experts of a token, and become such.
    dense = re.search(r"\(dense ffn (\d+)\)", text) if every else None
    return Experts(
        count=int(found[1]),
        top_k=int(found[2]),
        every=int(every[1]) if every else 1,
        group=int(group[1]) if group else None,
        shared=int(shared[1]) if shared else 0,
        dense_inner=int(dense[1]) if dense else None,
    )
