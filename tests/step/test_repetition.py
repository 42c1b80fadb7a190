"""Repeated layers are found by what they compute, whatever the names and the order of equations within them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import combinations, pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.cli.models.decoders import GPT
from alpa_lite.inter_op.solved_stages import StagePlace
from alpa_lite.inter_op.stage_costs import StageCosts
from alpa_lite.intra_op.stage import StageView
from alpa_lite.program.phases import Phase, StepGraph
from alpa_lite.rules.op_info import free_values, rule_of_op
from alpa_lite.sharding.meshes import LogicalMesh, Submesh
from alpa_lite.step.clustering import make_layers, subdivided
from alpa_lite.step.layers import Layers, natural_cut
from alpa_lite.step.repetition import RowCut, equal_runs, repetition
from alpa_lite.trace.trace import trace
from cost_models.composed import ComposedCostModel
from tests.step.splitting import split_step

HIDDEN, BATCH, SEED = 32, 64, 7
SUBMESH = Submesh(first_device=0, num_hosts=1, devices_per_host=4)
MESH = LogicalMesh(axis_names=("x",), shape=(4,))

Block = Callable[[Any, Any, Any, bool], Any]


def gated(p: Any, x: Any, key: Any, swapped: bool) -> Any:
    """A residual block with dropout; the order of its equations may be swapped."""
    mask = jax.random.bernoulli(key, 0.9, x.shape)
    if swapped:
        up = x @ p["up"]
        gate = jax.nn.sigmoid(x @ p["gate"])
    else:
        gate = jax.nn.sigmoid(x @ p["gate"])
        up = x @ p["up"]
    return x + jnp.where(mask, (gate * up) @ p["down"], 0.0)


def wide(p: Any, x: Any, key: Any, swapped: bool) -> Any:
    """A residual block of another kind."""
    del key, swapped
    return x + jnp.tanh(x @ p["up"]) @ p["down"] @ p["gate"]


def make_step(
    blocks: Sequence[Block], names: Sequence[str], *, shuffled: bool = False, head: int = HIDDEN
) -> tuple[Any, tuple[Any, ...]]:
    """Return a train step of some blocks with an embedding and a head of some width, and its arguments as shapes."""
    draw = random.Random(SEED)
    swapped = [shuffled and draw.random() < 0.5 for _ in blocks]

    def loss_of(params: Any, batch: Any, key: Any) -> Any:
        x = jnp.tanh(batch @ params["embedding"])
        for i, (block, name) in enumerate(zip(blocks, names, strict=True)):
            x = block(params[name], x, jax.random.fold_in(key, i), swapped[i])
        return jnp.mean((x @ params["head"]) ** 2)

    def step(params: Any, moments: Any, batch: Any, key: Any) -> Any:
        grads = jax.grad(loss_of)(params, batch, key)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
        moments = jax.tree.map(lambda m, g: 0.9 * m + g / jnp.maximum(norm, 1.0), moments, grads)
        return jax.tree.map(lambda p, m: p - 0.1 * m, params, moments), moments

    square = jax.ShapeDtypeStruct((HIDDEN, HIDDEN), jnp.float32)
    params = {name: dict.fromkeys(("up", "gate", "down"), square) for name in names}
    params |= {"embedding": square, "head": jax.ShapeDtypeStruct((HIDDEN, head), jnp.float32)}
    return step, (params, params, jax.ShapeDtypeStruct((BATCH, HIDDEN), jnp.float32), jax.random.key(0))


def step_of(*given: Any, **options: Any) -> StepGraph:
    """Return the step of `make_step` at four micro-batches."""
    return split_step(trace(*make_step(*given, **options)), 4).step


def weights_by_block(step: StepGraph, names: Sequence[str]) -> list[set[int]]:
    """Return for each name the blocks whose contractions read its weights."""
    graph, block_of = step.graph, repetition(step).block_of
    found: list[set[int]] = [set() for _ in names]
    for v in graph.inputs:
        parts = (graph.values[v].name or "").split("/")
        if parts[0] == "params" and parts[1] in names:
            found[names.index(parts[1])] |= {block_of[c] for c in graph.consumers[v] if c in block_of}
    return found


@pytest.mark.parametrize("shuffled", [False, True])
def test_each_layer_is_one_block_whatever_its_name_and_order_of_equations(shuffled: bool) -> None:
    # Names in no order, so that updates are in another order than layers.
    names = ["q", "b", "z", "a", "m", "k", "y", "c", "x"]
    step = step_of([gated] * len(names), names, shuffled=shuffled)
    (row,) = repetition(step).rows
    assert len(row) == len(names)
    assert weights_by_block(step, names) == [{block} for block in row]


def test_layers_that_take_turns_are_one_layer_together() -> None:
    names = [f"layer{i}" for i in range(8)]
    step = step_of([gated, wide] * 4, names)
    (row,) = repetition(step).rows
    assert weights_by_block(step, names) == [{row[i // 2]} for i in range(8)]


def test_a_model_may_have_rows_of_several_kinds() -> None:
    names = [f"layer{i}" for i in range(9)]
    step = step_of([gated] * 4 + [wide] * 5, names)
    first, second = repetition(step).rows
    assert len(first) == 4 and len(second) == 5 and first.stop <= second.start


def test_nothing_repeats_in_a_model_of_different_layers() -> None:
    assert not repetition(step_of([gated], ["only"])).rows


@pytest.mark.parametrize("seed", range(60))
def test_the_first_run_covers_as_much_as_any(seed: int) -> None:
    """Compare with all runs of a short word, by trying each first letter, length and number."""
    draw = random.Random(seed)
    word = "".join(draw.choices("abc", k=draw.randint(2, 12)))
    runs = list(equal_runs([Counter([letter]) for letter in word], [1.0] * len(word)))
    best = 0
    for first in range(len(word)):
        for length in range(1, len(word)):
            for number in range(2, len(word) + 1):
                if word[first : first + length] * number == word[first : first + length * number]:
                    best = max(best, length * number)
    assert max((length * number for _, length, number in runs), default=0) == best
    covered = [i for first, length, number in runs for i in range(first, first + length * number)]
    assert len(covered) == len(set(covered))
    for first, length, number in runs:
        assert word[first : first + length] * number == word[first : first + length * number]


def costs_of(step: StepGraph, layers: Layers) -> StageCosts:
    """Return the stage costs of a step on p3.16xlarge."""
    return StageCosts(step=step, layers=layers, cost_model=ComposedCostModel(al.cluster("p3.16xlarge")))


@pytest.mark.parametrize(("num_layers", "count"), [(16, 16), (24, 12)])
def test_equal_layers_have_one_structure(num_layers: int, count: int) -> None:
    step = step_of([gated] * num_layers, [f"block{i:02d}" for i in range(num_layers)])
    cut = natural_cut(step, (1, 2, 4))
    assert cut.num_layers == count and cut.loop_parts == 0
    structures = costs_of(step, make_layers(step, count, equal=cut.equal)).structure_of_layers()
    # The first layer has the embedding and the last one the loss. The sum for the norm starts in the first one.
    assert len(set(structures[1:-1])) == 1


@pytest.mark.parametrize(
    ("num_layers", "stages", "wanted"),
    [
        # Stages of 7 and of 3 or 4 layers are even; of 2, 14 layers would make 8 stages of up to 4 just as well, but 4
        # stages of 8.
        (28, (1, 2, 4, 8), 28),
        # Eight stages of twelve layers are not even, and four of six neither.
        (12, (1, 2, 4, 8), None),
        (9, (1, 2, 4), None),
        (6, (1, 2), None),
    ],
)
def test_layers_make_even_stages_or_are_cut_anywhere(
    num_layers: int, stages: Sequence[int], wanted: int | None
) -> None:
    cut = natural_cut(step_of([gated] * num_layers, [f"block{i:02d}" for i in range(num_layers)]), stages)
    assert (cut.num_layers if cut.equal == "loops" else None) == wanted


@pytest.mark.parametrize(("weight", "head_layers"), [(0.3, 0), (1.0, 1), (2.6, 1), (10.0, 1)])
def test_a_heavy_head_is_a_layer_beside_whole_layers(weight: float, head_layers: int) -> None:
    count = 16
    step = step_of([gated] * count, [f"block{i:02d}" for i in range(count)], head=round(3 * HIDDEN * weight))
    cut = natural_cut(step, (1, 2, 4))
    assert cut.num_layers == count + head_layers and cut.equal == "loops"
    layers = make_layers(step, cut.num_layers, equal=cut.equal, imbalance=cut.imbalance)
    # The first layer has the embedding, the last one before the head passes its gradient on.
    structures = costs_of(step, layers).structure_of_layers()
    assert len(set(structures[1 : count - 1])) == 1
    block_of = repetition(step).block_of
    for row in repetition(step).rows:
        held = [{layers.of_op[op] for op, b in block_of.items() if b == block} - {None} for block in row]
        assert all(len(homes) == 1 for homes in held) and len(set(map(frozenset, held))) == len(row)


def test_an_op_heavier_than_its_share_leaves_work_to_other_layers() -> None:
    """The head has as much work as all other layers, of which there are too few for whole ones."""
    step = step_of([gated] * 6, [f"block{i}" for i in range(6)], head=3 * HIDDEN * 6)
    assert natural_cut(step, (1, 2)).equal == "flops"
    layers = make_layers(step, 8)
    heavy = [0] * 8
    for op in step.graph.ops:
        layer = layers.of_op[op.id]
        if step.phases[op.id] is Phase.FORWARD and layer is not None:
            heavy[layer] += rule_of_op(step.graph, op.id).work_kind != "elementwise"
    # 20 contractions.
    assert min(heavy) >= 1 and max(heavy) <= 3


def test_layers_of_one_product_are_not_cut_anywhere() -> None:
    """Eight stages of twelve products are uneven wherever they are cut, but two, three and four are not."""

    def loss_of(params: Any, batch: Any) -> Any:
        x = batch
        for name in params:
            x = jnp.tanh(x @ params[name])
        return jnp.mean(x**2)

    def step(params: Any, batch: Any) -> Any:
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss_of)(params, batch))

    square = jax.ShapeDtypeStruct((HIDDEN, HIDDEN), jnp.float32)
    params = {f"{i:02}": square for i in range(12)}
    batch = jax.ShapeDtypeStruct((BATCH, HIDDEN), jnp.float32)
    cut = natural_cut(split_step(trace(step, (params, batch)), 1).step, (1, 2, 4, 8))
    assert cut.equal == "loops" and cut.num_layers >= 11


@pytest.mark.parametrize("seed", range(40))
def test_the_heaviest_of_runs_of_layers_is_the_least_of_all_cuts(seed: int) -> None:
    draw = random.Random(seed)
    flops = [draw.choice([1.0, 1.0, 2.5, draw.random()]) for _ in range(draw.randint(1, 8))]
    cut = RowCut(
        weights=np.ones(len(flops)), flops=np.array(flops), op_flops=np.array(flops)[::-1], num_repeated=len(flops)
    )
    for count in range(1, len(flops) + 1):
        ways = combinations(range(1, len(flops)), count - 1)
        sums = (max(sum(flops[a:b]) for a, b in pairwise([0, *places, len(flops)])) for places in ways)
        assert cut.heaviest(count) == pytest.approx(least := min(sums), rel=1e-9)
        assert cut.share(count) == pytest.approx(least, rel=1e-9)
    assert cut.heaviest(len(flops) + 1) == np.inf


def test_one_value_flows_from_layer_to_layer() -> None:
    """Targets and masks, which depend on no layer, are computed where they are read."""
    model = GPT(num_layers=8, hidden=32, num_heads=4, seq_len=16, vocab_size=64)
    params = jax.eval_shape(model.init, jax.random.key(0))
    step = split_step(trace(jax.value_and_grad(model.loss_fn), (params, model.batch_shapes(16))), 4).step
    graph, layers = step.graph, make_layers(step, 4, equal="loops")
    across: list[tuple[int, set[int]]] = []
    for op in graph.ops:
        home = layers.of_op[op.id]
        for v in op.results if step.phases[op.id] is Phase.FORWARD and home is not None else ():
            readers = [c for c in graph.consumers[v] if step.phases[c] is Phase.FORWARD]
            later = {layer for c in readers if (layer := layers.of_op[c]) is not None} - {home}
            if later and v not in free_values(graph):
                across.append((home or 0, later))
    assert across == [(0, {1}), (1, {2}), (2, {3})]


def test_a_stage_runs_its_own_ops_and_repeats_what_it_reads_of_the_free_ones() -> None:
    model = GPT(num_layers=8, hidden=32, num_heads=4, seq_len=16, vocab_size=64)
    params = jax.eval_shape(model.init, jax.random.key(0))
    step = split_step(trace(jax.value_and_grad(model.loss_fn), (params, model.batch_shapes(16))), 4).step
    graph, layers, free = step.graph, make_layers(step, 4, equal="loops"), free_values(step.graph)
    repeated = 0
    for layer in range(4):
        ops = StageView(step=step, layers=layers, first=layer, last=layer).ops
        assert list(ops) == sorted({*ops}) and {*ops} >= {*layers.ops_of(layer)}
        read = {v for op in ops for v in graph.ops[op].operands}
        # Nothing free or invariant comes from elsewhere, and nothing of another layer is computed in vain.
        assert all(graph.producer[v] in ops for v in read & free)
        for op in {*ops} - {*layers.ops_of(layer)}:
            repeated += not free.isdisjoint(graph.ops[op].results)
            assert not read.isdisjoint(graph.ops[op].results)
    assert repeated


def test_parts_of_layers_are_whole_repeated_layers() -> None:
    step = step_of([gated] * 8, [f"block{i}" for i in range(8)])
    layers = make_layers(step, 2, equal="loops")
    parts = subdivided(step, layers)
    assert parts.num_layers == 4
    assert len(set(costs_of(step, parts).structure_of_layers()[1:-1])) == 1


def test_written_out_layers_cost_what_the_trips_of_a_loop_cost() -> None:
    seconds: list[list[float]] = []
    for scanned in (False, True):
        model = GPT(num_layers=8, hidden=64, num_heads=4, seq_len=32, vocab_size=64, scan_layers=scanned)

        def train_step(params: Any, batch: Any, model: GPT = model) -> Any:
            loss, grads = jax.value_and_grad(model.loss_fn)(params, batch)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

        params = jax.eval_shape(model.init, jax.random.key(0))
        traced = trace(train_step, (params, model.batch_shapes(16)))
        step = split_step(traced, 4, loop_parts=8 if scanned else 0).step
        costs = costs_of(step, make_layers(step, 8, equal="loops"))
        solved = (costs.solution(StagePlace(i, i, SUBMESH, MESH)).cost for i in range(1, 7))
        seconds.append([cost.loop_seconds for cost in solved])
    written_out, trips = seconds
    assert written_out == pytest.approx(trips, rel=0.01)
    assert len(set(written_out)) == 1
