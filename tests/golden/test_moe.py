"""Mixtures of experts on four devices (alpa-projects/alpa, tests/shard_parallel/test_moe.py and test_mixed_2d.py);
tolerance 1 %."""

from __future__ import annotations

import pytest

from tests.golden.alpha_beta import BOTH, ONE_DIM, AlphaBeta, line
from tests.golden.models import dense_and_experts, moe_layer, moe_lm
from tests.golden.search import data_parallel, search

BATCH, SEQ, HIDDEN, HEADS, GROUP, EXPERTS = 64, 16, 64, 16, 32, 16
SIZES: dict[str, int] = {
    "batch": BATCH,
    "seq": SEQ,
    "hidden": HIDDEN,
    "heads": HEADS,
    "group": GROUP,
    "experts": EXPERTS,
}


def experts_and_batch_split(model: AlphaBeta, dim: int) -> float:
    """Tokens to their experts and back in each pass; all but the experts is data parallel."""
    elements = [3 * HIDDEN * HIDDEN, 3 * HIDDEN, HIDDEN * HIDDEN, *[HIDDEN] * 5, HIDDEN * EXPERTS]
    reduced = sum(model.all_reduce(4 * n, dim) for n in elements)
    return 4 * model.all_to_all(BATCH * SEQ * HIDDEN * 2 * 4, dim) + reduced


@pytest.mark.parametrize("shape", ONE_DIM, ids=str)
def test_experts_are_split_and_all_else_splits_the_batch(shape: tuple[int, int]) -> None:
    model, dim = line(shape)
    found = search(moe_layer(**SIZES), model)
    expected = experts_and_batch_split(model, dim)
    assert found.objective == pytest.approx(expected, rel=1e-6) == pytest.approx(893_965.09, rel=1e-2)
    assert found.count == {"all_to_all": 4, "all_reduce": 9}
    for name, spec in found.specs.items():
        if name.startswith("params"):
            split_experts = name.endswith(("wi", "wo"))
            assert str(spec) == f"[{dim}, -, -]" if split_experts else spec.is_replicated, name


def test_two_dims_split_experts_over_all_devices() -> None:
    """Without gathers and permutes, tokens travel along one dim after the other: cheaper than along both as one."""
    model = AlphaBeta(shape=(2, 2), forbidden=("all_gather", "reduce_scatter", "permute"))
    found = search(moe_layer(**SIZES), model)
    assert found.objective < experts_and_batch_split(AlphaBeta(shape=(4, 1)), 0)
    assert set(found.count) == {"all_reduce", "all_to_all"} and found.count["all_to_all"] >= 8
    assert all(found.specs[f"params/experts/{name}"].axes == {"0", "1"} for name in ("wi", "wo"))


@pytest.mark.parametrize("shape", ONE_DIM, ids=str)
def test_a_language_model_with_experts_in_every_other_layer(shape: tuple[int, int]) -> None:
    model, dim = line(shape)
    program = moe_lm(layers=2, vocab=32, **SIZES)
    found = search(program, model)
    assert found.count["all_to_all"] == 4 and set(found.count) == {"all_reduce", "all_to_all"}
    assert all(str(found.specs[f"params/layers/0/experts/{name}"]) == f"[{dim}, -, -]" for name in ("wi", "wo"))


def test_a_language_model_with_experts_where_the_batch_is_split() -> None:
    model = AlphaBeta(shape=(4, 1))
    program = moe_lm(layers=2, vocab=32, **SIZES)
    found = search(program, model, restriction=data_parallel())
    assert set(found.count) == {"all_reduce"}
    assert found.objective >= search(program, model).objective


FEATURES = dense_and_experts(batch=256, experts=4, width=16)


def test_features_become_experts() -> None:
    """Dense layers before and after experts for parts of the features; nothing is gathered.

    Alpa states no price. Its way, tokens along both dims as one and dense gradients likewise, has that of the formula.
    """
    model = AlphaBeta(shape=(2, 2), forbidden=("all_gather",))
    found = search(FEATURES, model)
    assert found.count == {"all_to_all": 4, "all_reduce": 10}
    assert found.objective <= 4 * model.all_to_all(256 * 16 * 4, BOTH) + 4 * model.all_reduce(16 * 16 * 4, BOTH)


def test_features_become_experts_along_the_dear_dim() -> None:
    """With unequal dims Alpa prices what travels along both by the cheaper one, as no network would.

    Here each dim has its own price. Experts are split over the dear one, so that their gradients need the cheap one.
    """
    found = search(FEATURES, AlphaBeta(shape=(2, 2), beta=(1.0, 0.1)))
    assert found.count["all_to_all"] == 4
    assert all(str(found.specs[f"params/{name}"]) == "[0, -, -]" for name in ("wi", "wo"))
