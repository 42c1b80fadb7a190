"""Plans that do not serve their workflow are refused, whoever made them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from alpa_lite.errors import VerificationError
from alpa_lite.serving import Exact, read_serving_problem

PLAN = Exact().plan(read_serving_problem("vqa-medium"), 56)


def _with(**loads: dict[str, float]) -> dict[str, dict[str, float]]:
    return {**{name: dict(load) for name, load in PLAN.loads.items()}, **loads}


@pytest.mark.parametrize(
    ("loads", "sentence"),
    [
        (_with(VQA={"gpu-1": 40.0}), "a worker serves two operators"),
        (_with(VQA={"cpu-1": 40.0}), "a worker serves two operators"),
        (_with(VQA={"cpu-6": 30.0}), "do not handle 40 messages"),
        (_with(VQA={"cpu-6": 30.0, "gpu-2": 10.0, "gpu-3": 0.0}), "gets 0 messages per second"),
        (_with(SpeechRecognition={"gpu-1": 40.0}), "of at most 37.182"),
        (_with(VQA={"cpu-3": 40.0}), "SpeechRecognition sends messages back to a lower tier"),
    ],
)
def test_loads_that_do_not_serve(loads: dict[str, dict[str, float]], sentence: str) -> None:
    with pytest.raises(VerificationError, match=sentence):
        replace(PLAN, loads=loads)


def test_models_that_are_not_accurate_enough() -> None:
    with pytest.raises(VerificationError, match=r"the accuracy is 56\.59, below 57"):
        replace(PLAN, min_accuracy=57.0)


def test_traffic_is_priced_by_hand() -> None:
    # Images stay at the edge; of speech cpu-4 handles what it can, the GPU the rest, which comes from the source.
    edge = 1000 / 283.15181 / 40
    kib = (1 - edge) * 97.07174682617188 + edge * 0.1 + 2.00390625
    assert PLAN.link_dollars_per_hour == pytest.approx(0.1 * 40 * 3600 * kib / 1024**2)
