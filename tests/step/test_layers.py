"""Layers: forward ops in balanced runs, everything else near the data that it works on."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from alpa_lite.errors import PlanError
from alpa_lite.program.phases import Phase, StepGraph
from alpa_lite.rules.op_info import free_values
from alpa_lite.step.clustering import make_layers
from alpa_lite.step.layers import default_num_layers, natural_cut, op_flops
from alpa_lite.step.recomputation import originals, read_originals_across
from alpa_lite.trace.trace import trace
from tests.end_to_end.cases import MODELS, Training, make_batch
from tests.end_to_end.programs import PARAMS, X, Y, descend, squared
from tests.end_to_end.test_across_stages import encoder_decoder, encoder_decoder_arguments
from tests.step.splitting import split_step


@cache
def _step_of(model: str, *, num_microbatches: int = 4, loop_parts: int = 2) -> StepGraph:
    training = Training(model=model, optimizer="adamw+clip")
    args = training.start(), make_batch(MODELS[model], 0), jax.random.key(0)
    return split_step(trace(training.step(), args), num_microbatches, loop_parts=loop_parts).step


def _small_step() -> StepGraph:
    def step(p: Any, x: Any, y: Any) -> Any:
        loss, grads = jax.value_and_grad(squared)(p, x, y)
        return descend(p, grads), loss

    return split_step(trace(step, (PARAMS, X, Y)), 4).step


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("model", ["mlp", "gpt", "gpt_scan", "gpt_remat", "cnn"])
def test_data_flows_up_through_the_layers_and_down_again(model: str, count: int) -> None:
    step = _step_of(model)
    layers = make_layers(step, count)
    graph = read_originals_across(step, layers.of_op).graph
    free = free_values(graph)
    assert layers.num_layers == count
    for op in graph.ops:
        layer = layers.of_op[op.id]
        assert (layer is None) == (step.phases[op.id] is Phase.INVARIANT)
        for v in op.operands:
            producer = graph.producer[v]
            before = layers.of_op[producer] if producer is not None else None
            if layer is None or before is None or v in free:
                continue
            pair = step.phases[producer or 0], step.phases[op.id]
            if pair == (Phase.FORWARD, Phase.FORWARD):
                assert before <= layer
            if pair == (Phase.BACKWARD, Phase.BACKWARD):
                assert before >= layer
            if pair == (Phase.FORWARD, Phase.BACKWARD):
                # No forward value climbs for the backward pass only.
                forward = [layers.of_op[c] for c in graph.consumers[v] if step.phases[c] is Phase.FORWARD]
                assert max(f for f in (before, *forward) if f is not None) >= layer


@pytest.mark.parametrize("model", ["mlp", "gpt_scan"])
def test_no_layer_is_empty_and_work_is_balanced(model: str) -> None:
    step = _step_of(model)
    flops, layers = op_flops(step), make_layers(step, 2, imbalance=0.3)
    work = [0.0, 0.0]
    for op, layer in enumerate(layers.of_op):
        if step.phases[op] is Phase.FORWARD and layer is not None:
            work[layer] += flops[op]
    assert min(work) > 0 and max(work) <= 1.6 * sum(work) / 2


@pytest.mark.parametrize("count", [2, 3, 7])
@pytest.mark.parametrize("model", ["gpt", "cnn"])
def test_layers_of_operators_have_as_many_wherever_that_cuts(model: str, count: int) -> None:
    step = _step_of(model)
    layers = make_layers(step, count, equal="operators").of_op
    forward = [layer for op, layer in enumerate(layers) if step.phases[op] is Phase.FORWARD]
    sizes = [forward.count(layer) for layer in range(count)]
    assert sum(sizes) == len(forward) and max(sizes) - min(sizes) <= 1
    assert forward == sorted(forward, key=lambda layer: layer or 0)


def test_weights_gradients_and_updates_live_together() -> None:
    step = _small_step()
    layers, graph = make_layers(step, 3), step.graph
    homes = {graph.values[v].name: layer for v, layer in zip(graph.inputs, layers.of_input, strict=True)}
    assert [homes[f"p/w{i}"] for i in (1, 2, 3)] == [0, 1, 2]
    assert homes["x"] == 0 and homes["y"] == 2
    for op in graph.ops:
        if op.primitive == "sub" and step.phases[op.id] is Phase.UPDATE:
            weight = graph.values[op.operands[0]].name
            assert layers.of_op[op.id] == homes[weight]
            gradient = graph.producer[graph.ops[graph.producer[op.operands[1]] or 0].operands[1]]
            assert gradient is not None and layers.of_op[gradient] == homes[weight]


def test_optimizer_state_lives_with_its_parameter() -> None:
    step = _step_of("mlp")
    layers, graph = make_layers(step, 4), step.graph
    homes = {graph.values[v].name: layer for v, layer in zip(graph.inputs, layers.of_input, strict=True)}
    for name, home in homes.items():
        if "/mu/" in name or "/nu/" in name:
            assert home == homes["state/params/" + name.split("u/", 1)[1]], name


def test_the_number_of_layers_follows_the_model() -> None:
    """One for each of few contractions, here three; else one for three of them, but no fewer than eight."""
    assert default_num_layers(_small_step()) == 3
    assert default_num_layers(_step_of("gpt")) == 8


@pytest.mark.parametrize(("trips", "stages"), [(40, (1, 3, 6, 12)), (32, (1, 3, 9)), (35, (1, 2, 4))])
def test_trips_that_no_number_of_stages_divides_are_taken_apart(trips: int, stages: tuple[int, ...]) -> None:
    step = split_step(trace(encoder_decoder, encoder_decoder_arguments(trips, trips)), 1).step
    cut = natural_cut(step, stages)
    assert any(cut.num_layers % count == 0 for count in stages if count > 1)
    parted = split_step(trace(encoder_decoder, encoder_decoder_arguments(trips, trips)), 4, loop_parts=cut.loop_parts)
    layers = make_layers(parted.step, cut.num_layers, equal=cut.equal, imbalance=cut.imbalance)
    assert layers.num_layers == cut.num_layers


@pytest.mark.parametrize("trips", [(8, 8), (6, 12), (12, 4), (2, 6), (1, 5)])
def test_no_layer_holds_trips_of_an_encoder_and_of_a_decoder(trips: tuple[int, int]) -> None:
    traced = trace(encoder_decoder, encoder_decoder_arguments(*trips))
    cut = natural_cut(split_step(traced, 1).step, (1, 2, 4))
    step = split_step(traced, 4, loop_parts=cut.loop_parts).step
    layers = make_layers(step, cut.num_layers, equal=cut.equal, imbalance=cut.imbalance)
    held: dict[str, set[int]] = {"encoder": set(), "decoder": set()}
    for v, home in zip(step.graph.inputs, layers.of_input, strict=True):
        for side in held:
            if f"/{side}/" in step.graph.values[v].name:
                readers = {layers.of_op[c] for c in step.graph.consumers[v]}
                held[side] |= {home, *(layer for layer in readers if layer is not None)}
    assert max(held["encoder"]) < min(held["decoder"])
    assert held["encoder"] | held["decoder"] == set(range(layers.num_layers))


def _tower(params: Any, x: Any) -> Any:
    """Residual layers that begin with a norm without parameters, and read their first row after it."""

    def layer(x: Any, row: Any) -> Any:
        normed = (x - x.mean(axis=1, keepdims=True)) / (1 + jnp.abs(x).mean(axis=1, keepdims=True))
        x = x + jnp.tanh(normed @ row["first"])
        normed = (x - x.mean(axis=1, keepdims=True)) / (1 + jnp.abs(x).mean(axis=1, keepdims=True))
        return x + jnp.tanh(normed @ row["second"]), None

    loss, grads = jax.value_and_grad(lambda p: (jax.lax.scan(layer, x, p)[0] ** 2).mean())(params)
    return descend(params, grads), loss


@pytest.mark.parametrize("count", [2, 4, 8])
def test_layers_of_a_scan_hand_on_one_value_each_way(count: int) -> None:
    params = {name: jnp.zeros((8, 16, 16)) for name in ("first", "second")}
    step = split_step(trace(_tower, (params, jnp.zeros((12, 16)))), 4, loop_parts=8).step
    layers, graph = make_layers(step, count, imbalance=0.1), step.graph
    sent = {Phase.FORWARD: [0] * count, Phase.BACKWARD: [0] * count}
    for value, producer in zip(graph.values, graph.producer, strict=True):
        if producer is None or not step.phases[producer].in_loop or value.num_elements < 3 * 16:
            continue
        readers = {layers.of_op[c] for c in graph.consumers[value.id] if step.phases[c] is step.phases[producer]}
        sent[step.phases[producer]][layers.of_op[producer] or 0] += len(readers - {layers.of_op[producer]})
    assert sent[Phase.FORWARD] == [1] * (count - 1) + [0]
    assert sent[Phase.BACKWARD] == [0] + [1] * (count - 1)


def test_more_layers_than_forward_ops_are_refused() -> None:
    with pytest.raises(
        PlanError, match=r"1000 layers were asked for, but .* has only \d+ operations\. Ask for at most \d+ l"
    ):
        make_layers(_small_step(), 1000)


@pytest.mark.parametrize(
    ("results", "found"),
    [
        (lambda w, x: w - jax.grad(lambda w: jnp.mean(x @ w))(w), "no operation"),
        (lambda w, x: w - jnp.mean(x, 0), "only 1 operation"),
    ],
)
def test_a_forward_pass_of_little_is_one_layer(results: Any, found: str) -> None:
    """A loss that is not asked for, with a gradient that is a mean of the batch; and that mean without a gradient."""
    traced = split_step(trace(results, (jnp.ones(8), jnp.ones((16, 8)))), 1).step
    with pytest.raises(PlanError, match=rf"before the gradients\) has {found}\. Ask for 1 layer or stage\."):
        make_layers(traced, 2)


def test_flops_count_loops_by_their_trips() -> None:
    whole, in_parts = (sum(op_flops(_step_of("gpt_scan", loop_parts=u))) for u in (0, 2))
    assert whole == pytest.approx(in_parts, rel=0.05)


@pytest.mark.parametrize("count", [2, 3, 5])
def test_what_is_recomputed_stays_with_its_weights(count: int) -> None:
    step = _step_of("gpt_remat")
    layers, graph = make_layers(step, count), step.graph
    homes = dict(zip(graph.inputs, layers.of_input, strict=True))
    contractions = 0
    for op in graph.ops:
        if op.primitive != "dot_general" or op.results[0] not in originals(step):
            continue
        contractions += 1
        barriers = [graph.ops[p] for v in op.operands if (p := graph.producer[v]) is not None]
        weights = [v for b in barriers if b.primitive == "optimization_barrier" for v in b.operands if v in homes]
        for v in weights:
            assert layers.of_op[op.id] == homes[v], graph.values[v].name
    assert contractions == 10, "five of each block; the one that XLA could drop is dropped by JAX"


def test_originals_are_recomputed_values_and_nothing_else() -> None:
    def step(p: Any, x: Any, y: Any) -> Any:
        def block(w: Any, h: Any) -> Any:
            return jnp.sin(h @ w)

        def loss(p: Any) -> Any:
            h = jax.checkpoint(block)(p["w1"], x)
            return jnp.sum((block(p["w2"], h) - y) ** 2)

        value, grads = jax.value_and_grad(loss)(p)
        return jax.tree.map(lambda a, g: a - 0.1 * g, p, grads), value

    weights = {"w1": PARAMS["w1"], "w2": jnp.ones((PARAMS["w1"].shape[1], 3))}
    cut = split_step(trace(step, (weights, X, jnp.ones((len(X), 3)))), 2).step
    again = {cut.graph.ops[cut.graph.producer[v] or 0].primitive for v in originals(cut)}
    assert again == {"dot_general", "optimization_barrier"}
    for copy, found in originals(cut).items():
        (original,) = found
        producer = cut.graph.producer[original]
        assert producer is None or cut.phases[producer] is Phase.FORWARD
        assert cut.graph.values[copy].shape == cut.graph.values[original].shape


@pytest.mark.parametrize("model", ["mlp", "gpt", "gpt_remat"])
@pytest.mark.parametrize("count", [2, 3, 5])
def test_gradients_of_weights_arise_where_the_weights_are_updated(model: str, count: int) -> None:
    step = _step_of(model)
    layers, graph = make_layers(step, count), step.graph
    # A tied embedding is read in the first and in the last layer: its gradients arise in both.
    tied = {tuple(sorted(graph.values[v].shape)) for v in graph.inputs if "embedding" in graph.values[v].name}
    apart: list[str] = []
    for op in graph.ops:
        if op.primitive != "dot_general" or step.phases[op.id] is not Phase.BACKWARD:
            continue
        (gradient,) = op.results
        if step.batch_dims[gradient] is None and tuple(sorted(graph.values[gradient].shape)) not in tied:
            apart += [op.source for c in graph.consumers[gradient] if layers.of_op[c] != layers.of_op[op.id]]
    assert not apart
