"""Blocks that keep, swap or recompute: the best choice of all, within memory, and the same numbers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.errors import InfeasibleError, PlanError
from alpa_lite.plan.plan import Plan
from alpa_lite.planners import Hybrid, Karma, karma
from alpa_lite.planners.karma import BlockCost, best_choices, time_and_peak
from alpa_lite.step.recomputation import Remat
from tests.end_to_end.cases import MODELS, TOLERANCE, Training, assert_same, eager_cluster, make_batch, reference

KEEP, SWAP, RECOMPUTE = range(3)
Block = list[BlockCost]


def _block(rng: random.Random, link: float) -> Block:
    """A block of random work and memory, whose copies take `link` seconds per byte."""
    seconds, size, part = rng.uniform(0.5, 2.0), rng.choice([1.0, 2.0, 5.0, 8.0]), rng.choice([0.2, 0.5, 1.0])
    return [
        BlockCost(seconds, 2.0 * seconds, 0.0, size, 0.0, 1.0),
        BlockCost(seconds, 2.3 * seconds, size * part * link, 0.0, size * part, 1.0 + size * part),
        BlockCost(seconds, 3.0 * seconds, 0.0, 0.3, 0.0, 1.0 + size),
    ]


def _chosen(blocks: Sequence[Block], choices: Sequence[int]) -> Block:
    return [options[choice] for options, choice in zip(blocks, choices, strict=True)]


@pytest.mark.parametrize("seed", range(60))
def test_the_dynamic_program_finds_the_best_of_all_choices(seed: int) -> None:
    """Of at most eight blocks, on links from fast to slow and in little to much memory."""
    rng = random.Random(seed)
    link = rng.choice([0.05, 0.3, 1.0])
    blocks = [_block(rng, link) for _ in range(8 if seed % 20 == 0 else rng.randint(1, 6))]
    memory = rng.uniform(2.0, 30.0)
    outcomes = [time_and_peak(_chosen(blocks, choices), 1 / link) for choices in product(range(3), repeat=len(blocks))]
    fitting = [outcome.seconds for outcome in outcomes if outcome.peak_bytes <= memory]
    found = best_choices(blocks, memory, 1 / link)
    if found is None:
        assert not fitting
        return
    outcome = time_and_peak(_chosen(blocks, found), 1 / link)
    assert outcome.peak_bytes <= memory
    assert outcome.seconds == pytest.approx(min(fitting))


def test_the_limits() -> None:
    """In much memory all is kept; over a link without delay nothing is recomputed; a mixture is never slower."""
    rng = random.Random(1)
    blocks = [_block(rng, 0.3) for _ in range(8)]
    assert best_choices(blocks, 1e9, 1 / 0.3) == (KEEP,) * 8
    assert best_choices([], 1.0, 1.0) == ()
    assert best_choices(blocks, 0.0, 1 / 0.3) is None
    at_once = [_block(rng, 0.0) for _ in range(8)]
    for memory in (12.0, 16.0, 24.0):
        found = best_choices(at_once, memory, 0.0)
        assert found is not None and RECOMPUTE not in found
    for policy in (SWAP, RECOMPUTE):
        alone = time_and_peak(_chosen(blocks, (policy,) * 8), 1 / 0.3)
        found = best_choices(blocks, alone.peak_bytes, 1 / 0.3)
        assert found is not None
        assert time_and_peak(_chosen(blocks, found), 1 / 0.3).seconds <= alone.seconds


def test_copies_overlap_with_the_blocks_beside_them() -> None:
    """By hand: three blocks of 1 s forward and 2 s backward, of which the first swaps for 3 s each way."""
    keep, swap = BlockCost(1.0, 2.0, 0.0, 4.0, 0.0, 0.0), BlockCost(1.0, 2.0, 3.0, 0.0, 3.0, 0.0)
    # Forward the copy ends at 4 s, 1 s after the kernels; it comes back in 3 s beside the second block's 2 s.
    assert time_and_peak([swap, keep, keep], 1.0).seconds == pytest.approx(4.0 + 2.0 + 3.0 + 2.0)
    # At first 3 bytes wait for the link and are gone when the last two blocks are stored, and then come back.
    assert time_and_peak([swap, keep, keep], 1.0).peak_bytes == pytest.approx(9.0)


def _arguments(training: Training) -> tuple[Any, ...]:
    return training.start(), make_batch(training.architecture, 0), jax.random.key(0)


# With all blocks recomputed, and the state of the optimizer on the host, the stage needs 0.78 of the peak.
@pytest.mark.parametrize("part", [0.85, pytest.param(0.79, marks=pytest.mark.slow)])
def test_a_plan_within_less_memory_gives_the_same_numbers(part: float, devices: Any) -> None:
    """As those of `jax.jit` up to the order of sums; without recomputation, which XLA fuses otherwise, to the bit those
    of plain data parallelism.
    """
    training = Training(model="gpt", optimizer="momentum", num_steps=3)
    step, arguments, cluster = training.step(), _arguments(training), eager_cluster()
    plain = al.plan(step, *arguments, cluster=cluster, planner=Hybrid(data=8))
    memory = part * plain.prediction.peak_bytes[0]
    with pytest.raises(InfeasibleError):
        small = replace(cluster, device=replace(cluster.device, memory_bytes=memory, memory_reserve=0.0))
        al.plan(step, *arguments, cluster=small, planner=Hybrid(data=8))
    karma = al.parallelize(step, cluster=cluster, planner=Karma(memory_bytes=memory))
    got = training.run(karma)
    plan = karma.last_plan
    assert plan.prediction.peak_bytes[0] <= memory and plan.prediction.step_seconds >= plain.prediction.step_seconds
    assert plan.host_optimizer or Remat.OFFLOAD in plan.remat or Remat.FULL in plan.remat
    assert_same(got, reference(training), TOLERANCE)
    same = training.run(al.parallelize(step, cluster=cluster, planner=Hybrid(data=8)))
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(same), strict=True)
    assert plan.remat or all(np.array_equal(a, b) for a, b in pairs)


@pytest.fixture
def deep(monkeypatch: pytest.MonkeyPatch) -> Training:
    """A GPT of four blocks: computing one of two again takes as much memory as not keeping its values saves."""
    monkeypatch.setitem(MODELS, "deep gpt", replace(MODELS["gpt"], num_layers=4))
    return Training(model="deep gpt", optimizer="momentum")


def test_none_of_the_plain_choices_is_faster(deep: Training, devices: Any) -> None:
    """As priced: a plan that fits is no slower than with all blocks recomputed, or all swapped, on devices as large."""
    training = deep
    step, arguments, cluster = training.step(), _arguments(training), eager_cluster()
    peak = al.plan(step, *arguments, cluster=cluster, planner=Hybrid(data=8)).prediction.peak_bytes[0]
    for part in (0.97, 0.92):
        limit = part * peak
        found = al.plan(step, *arguments, cluster=cluster, planner=Karma(memory_bytes=limit, host_optimizer=False))
        assert found.prediction.peak_bytes[0] <= limit
        for remat in ("full", "offload"):
            plain = al.plan(step, *arguments, cluster=cluster, planner=Hybrid(data=8, remat=remat))  # type: ignore[arg-type]
            if plain.prediction.peak_bytes[0] <= limit:
                assert found.prediction.step_seconds <= plain.prediction.step_seconds * (1 + 1e-9)


def test_few_programs_are_priced(deep: Training, devices: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes as long as a whole manual plan: those that are far slower by the model are left out."""
    priced, assembled = list[Plan](), karma.assembled

    def recorded(*given: Any) -> Plan:
        priced.append(assembled(*given))
        return priced[-1]

    step, arguments, cluster = deep.step(), _arguments(deep), eager_cluster()
    peak = al.plan(step, *arguments, cluster=cluster, planner=Hybrid(data=8)).prediction.peak_bytes[0]
    limit = 0.97 * peak
    on_devices = al.plan(step, *arguments, cluster=cluster, planner=Karma(memory_bytes=limit, host_optimizer=False))
    monkeypatch.setattr(karma, "assembled", recorded)
    found = al.plan(step, *arguments, cluster=cluster, planner=Karma(memory_bytes=limit))
    assert found.host_optimizer and found.prediction.step_seconds < on_devices.prediction.step_seconds
    assert len(priced) <= 3


def test_blocks_are_recomputed_where_the_host_has_no_room(deep: Training, devices: Any) -> None:
    training = deep
    step, arguments, cluster = training.step(), _arguments(training), eager_cluster()
    peak = al.plan(step, *arguments, cluster=cluster, planner=Hybrid(data=8)).prediction.peak_bytes[0]
    assert cluster.host_memory is not None
    full = replace(cluster, host_memory=replace(cluster.host_memory, memory_bytes=1000.0))
    plan = al.plan(step, *arguments, cluster=full, planner=Karma(memory_bytes=0.95 * peak))
    assert not plan.prediction.host_bytes and Remat.FULL in plan.remat
    with pytest.raises(InfeasibleError, match="would wait in the memory of a host"):
        al.plan(step, *arguments, cluster=full, planner=Karma(memory_bytes=0.8 * peak, host_optimizer=True))


def test_what_cannot_be_is_a_sentence(devices: Any) -> None:
    training = Training(model="mlp", optimizer="momentum")
    step, arguments, cluster = training.step(), _arguments(training), eager_cluster()
    with pytest.raises(PlanError, match="states none"):
        al.plan(step, *arguments, cluster=replace(cluster, host_memory=None), planner=Karma())
    with pytest.raises(PlanError, match="must be a number of bytes above 0"):
        al.plan(step, *arguments, cluster=cluster, planner=Karma(memory_bytes=-1.0))
    with pytest.raises(InfeasibleError, match="with every block recomputed a device needs"):
        al.plan(step, *arguments, cluster=cluster, planner=Karma(memory_bytes=1e3))


def test_a_choice_whose_program_does_not_fit_leaves_the_others(devices: Any) -> None:
    """Products in float32, whose blocks by themselves hold less than the program: all of these memories do."""

    def step(weights: Any, x: Any) -> Any:
        def loss(weights: Any) -> Any:
            h = x
            for up, down in weights:
                h = h + jnp.tanh(h @ up) @ down
            return jnp.mean(h**2)

        value, grads = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value

    shape, cluster = jax.ShapeDtypeStruct, eager_cluster()
    weights = [(shape((64, 256), jnp.float32), shape((256, 64), jnp.float32))] * 6
    arguments = weights, shape((16384, 64), jnp.float32)
    peak = al.plan(step, *arguments, cluster=cluster, planner=Hybrid(data=8)).prediction.peak_bytes[0]
    for part in (0.95, 0.85, 0.75, 0.65):
        plan = al.plan(step, *arguments, cluster=cluster, planner=Karma(memory_bytes=part * peak))
        assert plan.prediction.peak_bytes[0] <= part * peak
        assert Remat.OFFLOAD in plan.remat and plan.semantics == "synchronous"
    with pytest.raises(InfeasibleError, match="with every block swapped a device needs"):
        al.plan(step, *arguments, cluster=cluster, planner=Karma(memory_bytes=0.3 * peak))
