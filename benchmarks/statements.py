"""The tables and charts of `docs/lecture.md` and `docs/accelerators.md`, from kept results and from printed numbers.

Alpa's evaluation is kept as the table of `docs/cost-model.md` (`python -m benchmarks.alpa_paper`).

What the page prints stands on it, and the tests of pages compare it with what its Python computes; charts of such
numbers are drawn from the page. Tables of larger runs come from `benchmarks/results`:

    megatron_scaling.json    python -m benchmarks.megatron_scaling --out benchmarks/results/megatron_scaling.json
    experts.jsonl            alpa-lite bench --model moe-10B --simulate --json --cluster FILE --planners ..., where FILE
                             is two hosts of p3.16xlarge with "memory_reserve": 0: auto and auto:inter_op_only=1 with
                             --num-microbatches 32, auto:intra_op_only=1
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alpa_lite.cli.models.alpa_cases import CASES
from alpa_lite.text import show_count
from benchmarks.charts import Series, bars_svg, lines_svg, shares_svg

_ROOT = Path(__file__).parents[1]
PAGE = _ROOT / "docs" / "lecture.md"
_RESULTS = _ROOT / "benchmarks" / "results"
_NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?")
#: Published TFLOPS per device of moe-10B under restricted searches.
_EXPERTS_PUBLISHED = {"intra-op only": 22.91, "inter-op only": 31.12}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRow:
    """A search on moe-10B: published and predicted TFLOPS per device, and the shares of a device's time.

    Attributes:
        plan: its stages; "none fits" without a plan, which has no shares.
    """

    search: str
    plan: str
    published: float | None
    tflops: float | None = None
    shares: tuple[float, ...] = ()


def printed(start: str) -> list[list[float]]:
    """Return the numbers in the lines of the printed block of the page that begins with `start`."""
    blocks = re.findall(r"^```text\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    (block,) = [each for each in blocks if each.lstrip().startswith(start)]
    return [[float(n.replace(",", "")) for n in _NUMBER.findall(line)] for line in block.splitlines()]


def communication_svg() -> str:
    """Return the numbers sent per step under data and tensor parallelism, by samples."""
    rows = [row for row in printed("B ") if row]
    series = [
        Series(name="data parallel: gradients", values=tuple(row[2] for row in rows)),
        Series(name="tensor parallel: activations", values=tuple(row[3] for row in rows)),
    ]
    return lines_svg([row[0] for row in rows], series, axis="samples B", unit="millions")


def convolutions_svg() -> str:
    """Return the shares of convolutions and dense layers in weights and FLOPs."""
    # The number in "VGG-16" is one of those found.
    rows = [
        (f"{name}, {what}", (row[place] / 100, 1 - row[place] / 100))
        for name, row in zip(("AlexNet", "VGG-16"), printed("AlexNet"), strict=True)
        for what, place in (("weights", -2), ("computation", -1))
    ]
    return shares_svg(rows, ("convolutions", "dense layers"))


def zero_svg() -> str:
    """Return the model states per device of 7.5 billion parameters on 64 devices, by ZeRO stage."""
    values = printed("[120.0")[0]
    names = ["data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3"]
    return bars_svg(names, [Series(name="each device holds", values=tuple(values))], unit="GB", digits=1)


def amoebanet_svg() -> str:
    """Return throughputs of AmoebaNet-D under GPipe, as published and with equal stages."""
    rows = printed("m =  1")
    groups = [f"{k}, m = {row[0]:.0f}" for row in rows for k in (2, 4, 8)]
    series = [
        Series(name="measured", values=tuple(value for row in rows for value in row[1:4])),
        Series(name="equal stages", values=tuple(value for row in rows for value in row[4:7])),
    ]
    return bars_svg(groups, series, unit="relative", digits=2)


def megatron_rows() -> list[tuple[str, float, float]]:
    """Return for each bar of Megatron's figure its label, and the published and the predicted percentage."""
    rows = _read("megatron_scaling.json")["rows"]
    first = rows[0]["tflops"]
    return [
        (f"{row['tensor'] * row['data']} GPUs", row["published"], round(100 * row["tflops"] / first)) for row in rows
    ]


def megatron_tflops() -> list[float]:
    """Return the predicted TFLOPS per device of each bar."""
    return [row["tflops"] for row in _read("megatron_scaling.json")["rows"]]


def megatron_table() -> str:
    """Return the rows of Megatron's figure as a table."""
    rows = _read("megatron_scaling.json")["rows"]
    return _table(
        ("GPUs", "weights", "tensor × data", "published", "predicted"),
        [
            (label.split()[0], f"{row['billions']:.1f}B", f"{row['tensor']} × {row['data']}", f"{old} %", f"{new} %")
            for row, (label, old, new) in zip(rows, megatron_rows(), strict=True)
        ],
    )


def megatron_svg() -> str:
    """Return Megatron's figure, published and predicted."""
    labels, old, new = zip(*megatron_rows(), strict=True)
    series = [Series(name="published", values=old), Series(name="predicted", values=new)]
    return bars_svg(labels, series, unit="percent")


def expert_rows() -> list[ExpertRow]:
    """Return the three searches on moe-10B."""
    text = (_RESULTS / "experts.jsonl").read_text(encoding="utf-8")
    return [_expert_row(json.loads(line)) for line in text.splitlines()]


def _expert_row(row: Any) -> ExpertRow:
    search = next((name for name in _EXPERTS_PUBLISHED if name in row["planner"]), "both levels")
    known: dict[str, Any] = {"search": search, "published": _EXPERTS_PUBLISHED.get(search)}
    if row["reason"]:
        return ExpertRow(plan="none fits", **known)
    waiting = [row[what] / row["simulated_step_seconds"] for what in ("communication_seconds", "idle_seconds")]
    shares = (1 - sum(waiting), *waiting)
    return ExpertRow(plan=row["plan"], tflops=row["predicted_tflops_per_device"], shares=shares, **known)


def experts_table() -> str:
    """Return the searches on moe-10B as a table."""
    return _table(
        ("search", "plan", "measured by Alpa", "predicted", "at work", "communication", "idle"),
        [
            (row.search, row.plan, _tflops(row.published), _tflops(row.tflops))
            + (tuple(f"{100 * share:.1f} %" for share in row.shares) or ("", "", ""))
            for row in expert_rows()
        ],
    )


def experts_svg() -> str:
    """Return where the time of a device goes under each search on moe-10B that has a plan."""
    rows = [(row.search, row.shares) for row in expert_rows() if row.shares]
    return shares_svg(rows, ("at work", "communication", "idle"))


@dataclass(frozen=True, slots=True, kw_only=True)
class AlpaRow:
    """A model of Alpa's evaluation, in TFLOPS per device; a plan of others as predicted and as measured.

    Attributes:
        case: such as "gpt-350M".
        ours: predicted for the plan of this project's search.
        alpa: Alpa's own plan; the first figure is predicted as it ran, the second measured, None where it was not.
        rival: the plan of the system that Alpa was compared with; both None without one.
    """

    case: str
    ours: float
    alpa: tuple[float, float | None]
    rival: tuple[float | None, float | None]


def alpa_rows() -> list[AlpaRow]:
    """Return Alpa's evaluation as it is kept in the table of the page on the cost model."""
    text = (_ROOT / "docs" / "cost-model.md").read_text(encoding="utf-8")
    _, _, table = text.partition("\n| case | ours | Alpa |")
    # After the rest of the head and the line below it.
    lines = itertools.takewhile(lambda line: line.startswith("|"), table.splitlines()[2:])
    rows = list[AlpaRow]()
    for line in lines:
        case, ours, alpa, rival, *_ = (cell.strip() for cell in line.strip("|").split("|"))
        predicted, measured = _pair(alpa)
        assert predicted is not None, f"a plan of Alpa for {case}"
        figure = float(ours.partition(" ")[0])
        rows.append(AlpaRow(case=case, ours=figure, alpa=(predicted, measured), rival=_pair(rival)))
    return rows


def _pair(cell: str) -> tuple[float | None, float | None]:
    """Return what a cell says was predicted, and what was measured."""
    predicted, _, measured = cell.partition(" / ")
    return (float(predicted) if predicted else None, float(measured) if measured else None)


def alpa_svg(family: str) -> str:
    """Return the models of one family of Alpa's evaluation, by devices."""
    rows = [row for row in alpa_rows() if row.case.startswith(f"{family}-")]
    series = [
        Series(name="Alpa, measured", values=tuple(row.alpa[1] for row in rows)),
        Series(name="Alpa's plan, predicted", values=tuple(row.alpa[0] for row in rows)),
        Series(name="found here, predicted", values=tuple(row.ours for row in rows)),
    ]
    names = [f"{row.case.partition('-')[2]}, {CASES[row.case].num_devices}" for row in rows]
    return bars_svg(names, series, unit="TFLOPS", digits=1)


def alpa_table() -> str:
    """Return the paper's statements on its systems as a table: ratios of throughputs, measured and predicted."""
    rows = {row.case: row for row in alpa_rows()}
    first = rows["wrn-250M"]

    def line(name: str, of: AlpaRow, to: tuple[float | None, float | None], ours_to: float | None) -> tuple[str, ...]:
        return (name, *(_ratio(a, b) for a, b in ((of.alpa[1], to[1]), (of.alpa[0], to[0]), (of.ours, ours_to))))

    def rival(name: str, case: str) -> tuple[str, ...]:
        row = rows[case]
        return line(f"{name} ({case}, {show_count(CASES[case].num_devices, 'GPU')})", row, row.rival, row.rival[0])

    return _table(
        ("ratio of throughputs", "measured", "predicted", "found here"),
        [
            rival("Alpa over Megatron-LM", "gpt-2.6B"),
            rival("Alpa over Megatron-LM", "gpt-15B"),
            rival("Alpa over DeepSpeed", "moe-2.4B"),
            rival("Alpa over DeepSpeed", "moe-10B"),
            rival("Alpa over DeepSpeed", "moe-27B"),
            line("Alpa on 32 GPUs over one (Wide-ResNet), of each", rows["wrn-6.8B"], first.alpa, first.ours),
        ],
    )


def _ratio(one: float | None, other: float | None) -> str:
    return "" if one is None or other is None else f"{one / other:.2f}"


def gpu_table() -> str:
    """Return the steps that were run on one GPU as a table."""
    return _table(
        ("program", "plan", "`jax.jit`", "ratio"),
        [
            (
                row["name"],
                f"{1e3 * row['plan_seconds']:.1f}",
                f"{1e3 * row['jit_seconds']:.1f}",
                f"{row['plan_seconds'] / row['jit_seconds']:.2f}",
            )
            for row in _read("accelerator/nvidia-h100-80gb-hbm3.json")["rows"]
        ],
    )


def three_dimensions_svg() -> str:
    """Return 32 devices as pipeline stages (colours) of replicas (rows) of tensor-parallel devices (in a row)."""
    pipeline, data, tensor = 4, 2, 4
    parts = list[str]()
    for stage in range(pipeline):
        left = 180 * stage
        parts.append(f'<text x="{left + 4}" y="14">stage {stage}, host {stage}</text>')
        for replica in range(data):
            for part in range(tensor):
                device = (stage * data + replica) * tensor + part
                x, y = left + 4 + 40 * part, 24 + 42 * replica
                parts.append(
                    f'<rect class="device stage-{stage}" x="{x}" y="{y}" width="36" height="34" rx="3"/>'
                    f'<text class="on" x="{x + 18}" y="{y + 21}">{device}</text>'
                )
        parts.append(
            f'<text class="small" x="{left + 4}" y="118">across: one layer in {tensor}; down: {data} replicas</text>'
        )
    return f'<svg viewBox="0 0 {180 * pipeline} 124">\n' + "\n".join(parts) + "\n</svg>\n"


def _tflops(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _read(name: str) -> Any:
    return json.loads((_RESULTS / name).read_text(encoding="utf-8"))
