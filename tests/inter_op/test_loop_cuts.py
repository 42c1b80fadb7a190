"""Pipelines cut between loops over layers where these are even pieces, and write them out where they are not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations_with_replacement, pairwise
from typing import Any, Literal

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import alpa_lite as al
from alpa_lite.errors import PlanError
from alpa_lite.inter_op.loop_cuts import IMBALANCE, is_even, least_largest, parts_that_may_do
from alpa_lite.planners import Auto, Hybrid, Planner
from alpa_lite.program.phases import Phase
from alpa_lite.schedule import Interleaved1F1B
from alpa_lite.step.clustering import make_layers

WIDTH, BATCH = 64, 64


def _loops(lengths: Sequence[int]) -> tuple[Any, Any]:
    """A step over loops of so many equal layers each, and the shapes of their weights."""

    def layer(x: Any, w: Any) -> tuple[Any, None]:
        return x + jnp.tanh(x @ w["up"]) @ w["down"], None

    def step(weights: Any, x: Any) -> Any:
        def loss(weights: Any) -> Any:
            h = x
            for stack in weights:
                h, _ = jax.lax.scan(layer, h, stack)
            return jnp.mean(h**2)

        value, grads = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value

    shapes = [
        {"up": _struct(n, WIDTH, 4 * WIDTH), "down": _struct(n, 4 * WIDTH, WIDTH)} for n in lengths
    ]  # fmt: skip
    return step, shapes


def _struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


@cache
def _plan(
    lengths: tuple[int, ...],
    pipeline: int,
    chunks: int = 1,
    equal: Literal["flops", "loops"] = "flops",
    shares: tuple[float, ...] = (),
) -> tuple[al.Plan, Any]:
    step, weights = _loops(lengths)
    traced = al.parallelize(step).trace(weights, _struct(BATCH, WIDTH))
    planner = Hybrid(pipeline=pipeline, schedule=Interleaved1F1B(num_chunks=chunks), equal=equal, shares=shares)
    plan = traced.plan(cluster=al.cluster("p3.16xlarge"), planner=planner, num_microbatches=4).last_plan
    return plan, traced.step(4, loop_parts=plan.loop_parts).step


def _loops_per_stage(plan: al.Plan, step: Any, phase: Phase) -> list[list[int]]:
    """The lengths of the loops that each stage runs in a phase."""
    found: list[list[int]] = [[] for _ in plan.stages]
    for op, layer in zip(step.graph.ops, plan.op_layers, strict=True):
        if op.primitive == "scan" and step.phases[op.id] is phase:
            found[plan.stage_of_layer(layer)].append(op.params["length"])
    return found


@pytest.mark.parametrize(("pipeline", "chunks", "per_stage"), [(4, 1, 1), (2, 1, 2), (2, 2, 1)])
def test_even_loops_are_kept_and_dealt_out(pipeline: int, chunks: int, per_stage: int) -> None:
    plan, step = _plan((2, 2, 2, 2), pipeline, chunks)
    assert plan.loop_parts == 0
    wanted = [[2] * per_stage] * (pipeline * chunks)
    assert _loops_per_stage(plan, step, Phase.FORWARD) == _loops_per_stage(plan, step, Phase.BACKWARD) == wanted
    # Each stage holds the weights of its own loops.
    held = [{name.split("/")[1] for name in stage.specs if name.startswith("weights/")} for stage in plan.stages]
    assert [len(names) for names in held] == [per_stage] * len(held)
    assert set().union(*held) == {"0", "1", "2", "3"}


@pytest.mark.parametrize(
    ("lengths", "pipeline", "num_parts", "per_stage"),
    [
        ((2, 1), 2, 0, [[2], [1]]),  # three layers are no more even on two stages however they are cut
        ((7, 8), 2, 0, [[7], [8]]),
        ((3, 3), 1, 0, [[3, 3]]),
        ((8,), 2, 2, [[4], [4]]),
        ((6, 6, 6), 2, 2, [[3] * 3] * 2),
        ((2, 2, 2), 2, 2, [[], []]),  # parts of one layer are no loops
        ((2, 2, 2, 2), 8, 8, [[]] * 8),
        ((12, 4), 2, 4, [[3, 3, 3], [3]]),  # in two parts each they would be 12 + 4
        ((4, 2), 2, 4, [[], []]),
    ],
)
def test_loops_are_cut_where_that_is_more_even(
    lengths: tuple[int, ...], pipeline: int, num_parts: int, per_stage: list[list[int]]
) -> None:
    plan, step = _plan(lengths, pipeline)
    assert plan.loop_parts == num_parts
    assert _loops_per_stage(plan, step, Phase.FORWARD) == per_stage


@pytest.mark.parametrize(
    ("lengths", "pipeline", "per_stage"),
    [((1, 5), 2, [[1], [5]]), ((4, 1, 1, 2), 4, [[4], [1], [1], [2]]), ((1, 2, 4, 1), 2, [[1, 2], [4, 1]])],
)
def test_stages_of_equally_many_loops(lengths: tuple[int, ...], pipeline: int, per_stage: list[list[int]]) -> None:
    plan, step = _plan(lengths, pipeline, equal="loops")
    assert _loops_per_stage(plan, step, Phase.FORWARD) == per_stage
    backward = _loops_per_stage(plan, step, Phase.BACKWARD)
    assert [lengths[::-1] for lengths in backward] == per_stage


def test_too_few_loops_are_a_sentence() -> None:
    with pytest.raises(PlanError, match=r"2 stages of equally many loops .* has 3 loops .* multiple of 2 calls"):
        _plan((2, 2, 2), 2, equal="loops")


@pytest.mark.parametrize(
    ("lengths", "shares", "per_stage"),
    [((1, 5), (1, 5), [[1], [5]]), ((3, 1, 2), (4, 2), [[3, 1], [2]]), ((2, 2, 2), (1, 2), [[2], [2, 2]])],
)
def test_stages_of_unequal_shares(lengths: tuple[int, ...], shares: tuple[float, ...], per_stage: list[Any]) -> None:
    plan, step = _plan(lengths, 2, shares=shares)
    assert _loops_per_stage(plan, step, Phase.FORWARD) == per_stage


def test_loops_are_cut_where_shares_part_them() -> None:
    plan, step = _plan((8,), 2, shares=(3, 1))
    assert _loops_per_stage(plan, step, Phase.FORWARD) == [[2, 2, 2], [2]]
    rows = [sorted(name.removeprefix("weights/0/up") for name in stage.specs if "up" in name) for stage in plan.stages]
    assert rows == [["[0:2]", "[2:4]", "[4:6]"], ["[6:8]"]]


@pytest.mark.parametrize(("shares", "equal"), [((1,), "flops"), ((1, 0), "flops"), ((1, 2), "loops")])
def test_shares_that_cannot_be_are_a_sentence(shares: tuple[float, ...], equal: Literal["flops", "loops"]) -> None:
    with pytest.raises(PlanError, match=r"The shares .* but there are 2 stages.* Give 2 numbers above 0"):
        _plan((2, 2), 2, equal=equal, shares=shares)


def test_rows_that_several_stages_read_are_parted() -> None:
    """Weights in one array, indexed layer by layer: no loop to write out, but each stage must hold its own rows."""

    def step(weights: Any, x: Any) -> Any:
        def loss(weights: Any) -> Any:
            h = x
            for i in range(4):
                h = jnp.tanh(h @ weights[i])
            return jnp.mean(h**2)

        value, grads = jax.value_and_grad(loss)(weights)
        return weights - 0.1 * grads, value

    args = _struct(4, WIDTH, WIDTH), _struct(BATCH, WIDTH)
    plan = al.plan(step, *args, cluster=al.cluster("p3.16xlarge"), planner=Hybrid(pipeline=2), num_microbatches=4)
    assert plan.loop_parts == 2
    assert [sorted(stage.specs) for stage in plan.stages] == [["weights[0:2]", "x"], ["weights[2:4]"]]


@given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=8), data=st.data())
def test_least_largest_is_that_of_the_best_cut(sizes: list[int], data: st.DataObject) -> None:
    shares = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=len(sizes)))
    cuts = combinations_with_replacement(range(len(sizes) + 1), len(shares) - 1)
    runs = ([sum(sizes[a:b]) for a, b in pairwise((0, *cut, len(sizes)))] for cut in cuts)
    best = min(max(total / share for total, share in zip(run, shares, strict=True)) for run in runs)
    assert least_largest(sizes, shares) == pytest.approx(best, rel=1e-5)


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("lengths", [(8,), (24,), (5, 12), (30,)])
def test_fewer_parts_than_may_do_give_no_even_stages(lengths: tuple[int, ...], count: int) -> None:
    step, weights = _loops(lengths)
    traced = al.parallelize(step).trace(weights, _struct(BATCH, WIDTH))
    shares = tuple(1.0 + i for i in range(count))
    wanted = parts_that_may_do(traced.step(1).step, 1, shares)
    for parts in range(1, wanted):
        cut = traced.step(1, loop_parts=parts).step
        if 2 * parts > wanted or wanted % parts:
            continue
        layers = make_layers(cut, count, imbalance=IMBALANCE, shares=shares)
        assert not is_even(cut, layers, shares), parts


def test_a_cluster_of_more_devices_than_trips_runs_a_stage_on_each() -> None:
    """Seven devices divide neither six layers nor the batch nor a width: one stage has little to do."""

    def step(weights: Any, x: Any) -> Any:
        def loss(weights: Any) -> Any:
            return jnp.mean(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, weights)[0])

        return weights - 0.1 * jax.grad(loss)(weights)

    traced = al.parallelize(step, batch_argnums=(1,), cache=False).trace(_struct(6, 4096, 4096), _struct(8192, 4096))
    cluster = replace(al.cluster("p4d.24xlarge"), num_hosts=7, devices_per_host=1)

    def planned(planner: Planner) -> al.Plan:
        plan = traced.plan(cluster=cluster, planner=planner, num_microbatches=32, cache=False).last_plan
        assert plan is not None
        return plan

    found, by_hand = planned(Auto(manual=(), host_memory=False, idle_devices=False)), planned(Hybrid(pipeline=7))
    assert len(found.stages) == 7
    assert found.prediction.step_seconds <= by_hand.prediction.step_seconds
