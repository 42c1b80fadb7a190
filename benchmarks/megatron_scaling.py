"""Predict Megatron-LM's scaling figure: `python -m benchmarks.megatron_scaling --out FILE.json`.

Shoeybi et al. 2019, weak scaling on DGX-2H: models of 1.2, 2.5, 4.2 and 8.3 billion weights with tensor parallelism
over 1, 2, 4 and 8 V100s, eight sequences at a time; then the same on 64 times as many devices with data parallelism.
The plans are those of that system, priced as a library of kernels without a compiler runs them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from alpa_lite.cli.models.alpa_cases import Case, gpt
from benchmarks.alpa.fixed_plans import PYTORCH, in_loops, megatron
from benchmarks.alpa.price import Desk

#: Tensor parallelism: width, layers, heads of the model.
MODELS = {1: (1536, 40, 16), 2: (1920, 54, 20), 4: (2304, 64, 24), 8: (3072, 72, 32)}
#: Data parallelism: percent of the first model on one device, for each degree of tensor parallelism, as published.
PUBLISHED = {1: (100, 95, 82, 77), 64: (96, 83, 79, 74)}
_SEQUENCES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRow:
    """A model on a number of devices.

    Attributes:
        published: TFLOPS per device in percent of those of the first model on one device.
        tflops: predicted TFLOPS per device, with recomputation.
    """

    data: int
    tensor: int
    billions: float
    published: int
    seconds: float
    tflops: float


def row(data: int, tensor: int, published: int) -> ScalingRow:
    """Return the prediction for one bar of the figure."""
    model = gpt(*MODELS[tensor])
    case = Case(
        id=f"megatron-{tensor}x{data}",
        family="gpt",
        model=model,
        num_devices=data * tensor,
        global_batch=_SEQUENCES * data,
        num_microbatches=1,
        host="dgx-2",
    )
    software = replace(PYTORCH, memory_bytes=None)
    plan = Desk().plan(in_loops(case, 1), megatron(data, tensor, 1), 1, software)
    seconds = plan.prediction.step_seconds
    return ScalingRow(
        data=data,
        tensor=tensor,
        billions=case.parameters / 1e9,
        published=published,
        seconds=seconds,
        tflops=case.tflops_per_device(seconds),
    )


def rows() -> list[ScalingRow]:
    """Return all bars."""
    return [
        row(data, tensor, percent)
        for data, published in PUBLISHED.items()
        for tensor, percent in zip(MODELS, published, strict=True)
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Predict, print, and keep the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="keep the figures")
    given = parser.parse_args(argv)
    found = rows()
    for each in found:
        share = 100 * each.tflops / found[0].tflops
        print(f"{each.tensor} × {each.data}: {each.tflops:.1f} TFLOPS, {share:.0f} % ({each.published} % published)")
    if given.out is not None:
        given.out.write_text(json.dumps({"rows": [asdict(each) for each in found]}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
