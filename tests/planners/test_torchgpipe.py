"""Stages by block partition: as even as one layer allows, and the same function."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.inter_op.loop_cuts import block_partition
from alpa_lite.planners import Pipeline, TorchGPipe
from alpa_lite.schedule import GPipe
from tests.end_to_end.cases import assert_same, eager_cluster
from tests.end_to_end.collectives import emitted, handed_over, planned


def _sums(costs: list[float], sizes: tuple[int, ...]) -> list[float]:
    ends = np.cumsum([0, *sizes])
    return [sum(costs[a:b]) for a, b in pairwise(ends)]


@pytest.mark.parametrize("seed", range(20))
def test_blocks_differ_by_one_layer_at_most(seed: int) -> None:
    """max <= min + 1 in costs scaled to [0, 1]; and so not far from the best cut of all."""
    rng = np.random.default_rng(seed)
    for _ in range(50):
        number = int(rng.integers(2, 11))
        count = int(rng.integers(1, number + 1))
        costs = [float(c) for c in rng.choice([rng.random(number), rng.integers(0, 4, number).astype(float)])]
        sizes = block_partition(costs, count)
        assert sum(sizes) == number and len(sizes) == count and min(sizes) >= 0
        low, high = min(costs), max(costs)
        scaled = [(c - low) / (high - low) if high > low else 0.0 for c in costs]
        sums = _sums(scaled, sizes)
        assert max(sums) <= min(sums) + 1 + 1e-6
        cuts = combinations(range(1, number), count - 1)
        best = min(max(_sums(scaled, tuple(np.diff([0, *cut, number])))) for cut in cuts)
        assert max(sums) <= best + 1 + 1e-6


def _as_published(costs: list[float], count: int) -> tuple[int, ...] | None:
    """The rule as torchgpipe (Kim et al. 2020) follows it: of equal blocks the dearest is the last, the cheapest the
    first. None where that takes from an empty block."""
    low, high = min(costs), max(costs)
    scaled = [(c - low) / (high - low) if high > low else 0.0 for c in costs]
    ends = [0, *(len(costs) // count * i for i in range(1, count)), len(costs)]

    def ranked() -> list[tuple[float, int]]:
        return [(sum(scaled[ends[i] : ends[i + 1]]), i) for i in range(count)]

    most, dearest = max(ranked())
    while most > min(ranked())[0] + 1:
        cheapest = min(ranked())[1]
        beside = cheapest + (1 if cheapest < dearest else -1)
        if ends[beside] >= ends[beside + 1]:
            return None
        border, change = (cheapest + 1, 1) if cheapest < dearest else (cheapest, -1)
        ends[border] += change
        if beside == dearest:
            most, dearest = max(ranked())
    return tuple(b - a for a, b in pairwise(ends))


@pytest.mark.parametrize("draw", ["uniform", "whole numbers", "skewed"])
def test_blocks_are_those_of_the_published_rule(draw: str) -> None:
    rng, same = np.random.default_rng(1), 0
    for _ in range(1000):
        number = int(rng.integers(1, 30))
        count = int(rng.integers(1, min(number, 8) + 1))
        sizes = {
            "uniform": rng.random(number),
            "whole numbers": rng.integers(1, 9, number),
            "skewed": rng.exponential(1, number),
        }
        costs = [float(c) for c in sizes[draw]]
        published = _as_published(costs, count)
        if published is not None:
            same += 1
            assert block_partition(costs, count) == published
    assert same > 900


def test_equal_layers_stay_where_they_are_put_first() -> None:
    assert block_partition([3.0] * 7, 3) == (2, 2, 3)


def test_one_large_layer_is_alone() -> None:
    assert block_partition([0.0, 0.0, 0.0, 5.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0], 2) in ((5, 5), (4, 6), (6, 4))
    assert block_partition([1.0, 1.0, 1.0, 1.0, 9.0, 9.0], 2) == (5, 1)


def test_more_blocks_than_layers_are_refused() -> None:
    with pytest.raises(al.errors.PlanError, match="2 layers cannot be cut into 3 blocks"):
        block_partition([1.0, 2.0], 3)


def _step(params: Any, x: Any) -> Any:
    """Four cheap layers and two whose weights are large but whose products are small."""

    def loss(p: Any) -> Any:
        h = x
        for w in p["wide"]:
            h = jnp.tanh(h @ w)
        h = h.sum(1)
        for w in p["large"]:
            h = jnp.tanh(h @ w)
        return jnp.mean(h**2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value


def _arguments() -> Any:
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape) * 0.2, jnp.float32)  # noqa: E731
    params = {"wide": [draw(16, 16) for _ in range(4)], "large": [draw(16, 128), draw(128, 128)]}
    return params, draw(16, 256, 16)


@pytest.mark.parametrize("balance", ["time", "size"])
def test_stages_are_balanced_by_what_was_asked_for(balance: Any, devices: Any) -> None:
    options = dict(cluster=eager_cluster(), num_microbatches=2, batch_argnums=1)
    step = al.parallelize(_step, planner=TorchGPipe(pipeline=2, balance=balance), **options)
    compiled = step.compiled(*_arguments())
    plan = compiled.plan
    assert str(plan.schedule) == str(GPipe())
    homes = {name: i for i, stage in enumerate(plan.stages) for name in stage.specs if name.startswith("params")}
    first = sorted(name for name, stage in homes.items() if stage == 0)
    # 4 · 256 · 16² multiplications per sample against 16 · 128 + 128²; 4 · 16² numbers against 16 · 128 + 128².
    assert "params/wide/1" in first and "params/large/1" not in first
    assert ("params/wide/2" in first) == (balance == "size")
    assert handed_over(compiled) == planned(plan) and emitted(compiled) == planned(plan)
    assert_same(compiled(*_arguments()), jax.jit(_step)(*_arguments()))


def test_layers_compute_again_unless_told_not_to() -> None:
    options = dict(cluster=eager_cluster(), num_microbatches=2, batch_argnums=1)
    again, kept, pipeline = (
        al.plan(_step, *_arguments(), planner=planner, **options)
        for planner in (TorchGPipe(), TorchGPipe(checkpoint=False), Pipeline(schedule=GPipe()))
    )
    assert again.remat and not kept.remat and not pipeline.remat
    assert again.stages[0].cost.activation_bytes <= kept.stages[0].cost.activation_bytes


@pytest.mark.parametrize("num_microbatches", [2, 4, 8])
def test_a_stage_holds_its_inputs_and_the_values_of_one_layer(num_microbatches: int) -> None:
    """m boundaries and the inside of what is computed again (Huang et al. 2019, section 2.3); without, all of both."""
    width, samples = 64, 512

    def step(ws: Any, x: Any) -> Any:
        def loss(ws: Any) -> Any:
            h = x
            for up, down in ws:
                h = h + jnp.tanh(h @ up) @ down
            return jnp.mean(h**2)

        return jax.tree.map(lambda w, g: w - g, ws, jax.grad(loss)(ws))

    shape = jax.ShapeDtypeStruct
    layer = shape((width, 4 * width), jnp.float32), shape((4 * width, width), jnp.float32)
    arguments = [layer] * 4, shape((samples, width), jnp.float32)
    again, kept = (
        al.plan(step, *arguments, cluster=eager_cluster(), planner=planner, num_microbatches=num_microbatches)
        for planner in (TorchGPipe(pipeline=2), TorchGPipe(pipeline=2, checkpoint=False))
    )
    boundary = 4 * width * samples / num_microbatches / 4  # four devices share each stage
    # Of each of two layers also the four times wider values inside, and what goes from one to the other.
    assert (
        again.stages[0].cost.activation_bytes == boundary
        and kept.stages[0].cost.activation_bytes == (1 + 4 + 4 + 1) * boundary
    )
    for plan in (again, kept):
        stage = plan.stages[0]
        held = stage.cost.state_bytes + stage.cost.accumulator_bytes + stage.cost.temporary_bytes
        on_the_way = plan.prediction.peak_bytes[0] - held - num_microbatches * stage.cost.activation_bytes
        # At most the result that is being sent, and the gradient that has arrived for the next task; beside them a
        # token and the addresses of at most ten results.
        assert on_the_way % boundary < 100 and on_the_way // boundary in (0, 1, 2)
    assert again.prediction.peak_bytes[0] < kept.prediction.peak_bytes[0]
