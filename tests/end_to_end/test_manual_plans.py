"""The table of manual plans: what applies runs as planned and equals one device; the rest says why not."""

from __future__ import annotations

from typing import Any

import pytest

from tests.end_to_end.cases import TOLERANCE
from tests.end_to_end.manual_plans import CASES, PLANNERS, row

#: Of each planner a model that no other test of it has.
QUICK = {
    "DataParallel(bucket_bytes=2**12)": "CNN",
    "FSDP(replicas=2)": "transformer, scanned",
    "Megatron(tensor=2, pipeline=2)": "GPT, written out",
    "MeshTensorFlow(batch:rows;heads,d_ff:cols)": "mixture of experts",
    "OneWeirdTrick()": "CNN",
    "AxoNN(gx=2, gy=2, gz=2)": "CNN",
    "GShard(expert=4)": "mixture of experts",
    "TorchGPipe()": "transformer, scanned",
    "DeepSpeed3D(pipeline=2, tensor=2)": "transformer, scanned",
}

#: What the models lack that planners are about.
NOT_FOR = {
    "Megatron(tensor=4, vocab_parallel=True)": ({"MLP", "CNN"}, "by vocab"),
    "MeshTensorFlow(batch:rows;heads,d_ff:cols)": ({"MLP", "CNN", "GPT, written out"}, ""),
    "OneWeirdTrick()": (set(CASES) - {"CNN"}, "no convolutions"),
    "ConvolutionParallel(sample=2, height=2, filter=2)": (set(CASES) - {"CNN"}, "no convolution"),
    "GShard(expert=4)": (set(CASES) - {"mixture of experts"}, "by experts"),
}


def _check(planner: str, model: str) -> None:
    found = row(planner, model)
    models, why = NOT_FOR.get(planner, (set[str](), ""))
    if found.refused:
        assert model in models and why in found.refused, found.refused
        return
    assert found.error <= TOLERANCE
    assert found.as_planned and not found.added


@pytest.mark.parametrize(("planner", "model"), QUICK.items())
def test_manual_plans_run_as_planned(planner: str, model: str, devices: Any) -> None:
    _check(planner, model)


@pytest.mark.long
@pytest.mark.parametrize("model", CASES)
@pytest.mark.parametrize("planner", PLANNERS)
def test_the_whole_table(planner: str, model: str, devices: Any) -> None:
    _check(planner, model)
