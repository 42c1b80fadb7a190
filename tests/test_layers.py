"""Layers: forward ops in balanced runs, everything else near the data that it works on."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from alpa_lite.errors import PlanError
from alpa_lite.graph.phases import Phase, StepGraph
from alpa_lite.layers import default_num_layers, make_layers, op_flops
from alpa_lite.microbatch import split_step
from alpa_lite.trace import trace
from tests.end_to_end.cases import MODELS, Training, make_batch
from tests.end_to_end.programs import PARAMS, X, Y, descend, squared


def _step_of(model: str, *, num_microbatches: int = 4, unroll: bool = True) -> StepGraph:
    training = Training(model=model, optimizer="adamw+clip")
    args = training.start(), make_batch(MODELS[model], 0), jax.random.key(0)
    return split_step(trace(training.step(), args), num_microbatches, unroll=unroll).step


def _small_step() -> StepGraph:
    def step(p: Any, x: Any, y: Any) -> Any:
        loss, grads = jax.value_and_grad(squared)(p, x, y)
        return descend(p, grads), loss

    return split_step(trace(step, (PARAMS, X, Y)), 4).step


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("model", ["mlp", "gpt", "gpt_scan", "cnn"])
def test_data_flows_up_through_the_layers_and_down_again(model: str, count: int) -> None:
    step = _step_of(model)
    layers, graph = make_layers(step, count), step.graph
    assert layers.num_layers == count
    for op in graph.ops:
        layer = layers.of_op[op.id]
        assert (layer is None) == (step.phases[op.id] is Phase.INVARIANT)
        for v in op.operands:
            producer = graph.producer[v]
            before = layers.of_op[producer] if producer is not None else None
            if layer is None or before is None:
                continue
            pair = step.phases[producer or 0], step.phases[op.id]
            if pair == (Phase.FORWARD, Phase.FORWARD):
                assert before <= layer
            if pair == (Phase.BACKWARD, Phase.BACKWARD):
                assert before >= layer
            if pair == (Phase.FORWARD, Phase.BACKWARD) and all(step.batch_dims[r] is not None for r in op.results):
                assert before >= layer


@pytest.mark.parametrize("model", ["mlp", "gpt_scan"])
def test_no_layer_is_empty_and_work_is_balanced(model: str) -> None:
    step = _step_of(model)
    flops, layers = op_flops(step), make_layers(step, 2, imbalance=0.3)
    work = [0.0, 0.0]
    for op, layer in enumerate(layers.of_op):
        if step.phases[op] is Phase.FORWARD and layer is not None:
            work[layer] += flops[op]
    assert min(work) > 0 and max(work) <= 1.6 * sum(work) / 2


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
    assert default_num_layers(_small_step()) == 1
    assert 1 < default_num_layers(_step_of("gpt")) <= 8


def test_more_layers_than_forward_ops_are_refused() -> None:
    with pytest.raises(PlanError, match=r"1000 layers were asked for, but the forward pass has only \d+ operations"):
        make_layers(_small_step(), 1000)


def test_flops_count_loops_by_their_trips() -> None:
    looped, unrolled = (sum(op_flops(_step_of("gpt_scan", unroll=u))) for u in (False, True))
    assert looped == pytest.approx(unrolled, rel=0.05)
