"""Models by name have the numbers of parameters that were published."""

from __future__ import annotations

import pytest

from alpa_lite.cli.models.named_models import MODELS, model_named
from alpa_lite.errors import PlanError

PUBLISHED = {
    # Billions: the released weights (Llama, Mixtral), and the tables of the papers (GPT).
    "llama-7b": 6.738,
    "llama-13b": 13.016,
    "llama-8b": 8.030,
    "llama-70b": 70.554,
    "llama-405b": 405.853,
    "mixtral-8x7b": 46.703,
    "mixtral-8x22b": 140.630,
    "gpt-1.7b": 1.7,
    "gpt-3.6b": 3.6,
    "gpt-7.5b": 7.5,
    "gpt-18b": 18.4,
    "gpt-39b": 39.1,
    "gpt-76b": 76.1,
    "gpt-145b": 145.6,
    "gpt-175b": 174.6,
    "gpt-310b": 310.1,
    "gpt-530b": 529.6,
    "gpt-1t": 1008.0,
}


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_as_published(name: str) -> None:
    billions = model_named(name).transformer().parameter_count() / 1e9
    # Tables of papers are rounded to a digit after the point; released weights are counted exactly.
    tolerance = 0.05 + 0.005 * billions if name.startswith("gpt") else 0.0005 * billions
    assert billions == pytest.approx(PUBLISHED[name], abs=tolerance)


def test_sizes_are_options() -> None:
    model = model_named("Llama-70b:num_layers=8:hidden=1024:num_heads=8").transformer(512)
    assert (model.num_layers, model.hidden, model.num_heads, model.inner, model.seq_len) == (8, 1024, 8, 28672, 512)
    assert model.architecture.num_kv_heads == 8
    # Of models without groups of queries each head has its own keys, however many there are.
    assert model_named("gpt:num_heads=48").transformer().architecture.num_kv_heads == 48
    assert model_named("llama").sizes == MODELS["llama-7b"]
    assert model_named("mixtral:num_experts=4").transformer().experts is not None


def test_the_step_takes_its_batch() -> None:
    _, (state, batch) = model_named("llama-8b:num_layers=2").training(16, 128)
    assert batch["tokens"].shape == (16, 128) and state.params["head"].dtype == "bfloat16"


def test_unknown_families_are_told() -> None:
    with pytest.raises(PlanError, match="There is no model 'bloom'"):
        model_named("bloom")
