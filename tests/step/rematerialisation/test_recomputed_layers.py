"""Layers that compute values again: the same step, less kept, and as much more work as was asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_lite.errors import PlanError
from alpa_lite.intra_op.liveness import lives_of
from alpa_lite.intra_op.stage import StageView
from alpa_lite.program.ir import Value, verify
from alpa_lite.program.phases import Phase, StepGraph
from alpa_lite.rules.op_info import free_values
from alpa_lite.step.clustering import make_layers
from alpa_lite.step.layers import Layers, op_flops
from alpa_lite.step.recomputation import Remat, originals
from alpa_lite.step.rematerialisation import LayeredStep, rematerialise
from tests.end_to_end.cases import assert_same
from tests.step.rematerialisation.steps import COLUMNS, ROWS, WIDE, again, blocks, outputs_of, traced_model
from tests.step.splitting import split_step

POLICIES = st.lists(st.sampled_from(Remat), min_size=3, max_size=3)


@pytest.mark.parametrize(("model", "loop_parts"), [("mlp", 0), ("gpt", 0), ("gpt_scan", 0), ("gpt_scan", 2)])
def test_any_policies_leave_a_valid_step_that_computes_the_same(model: str, loop_parts: int) -> None:
    made = traced_model(model, loop_parts)
    want = outputs_of(made)

    @settings(max_examples=4)
    @given(policies=POLICIES)
    def check(policies: list[Remat]) -> None:
        changed = again(made, policies)
        verify(changed.step.graph)
        assert changed.step.graph.inputs == made.step.graph.inputs
        assert changed.step.graph.outputs == made.step.graph.outputs
        assert changed.step.graph.values[: len(made.step.graph.values)] == made.step.graph.values
        assert_same(outputs_of(made, changed), want)

    check()


def _check_batch(values: Sequence[Value], full_shapes: Sequence[tuple[int, ...]], dims: Sequence[int | None]) -> None:
    """At the full batch each value is as at one of four micro-batches, but four times as large in its dim."""
    for value, full, dim in zip(values, full_shapes, dims, strict=True):
        assert full == tuple(4 * n if d == dim else n for d, n in enumerate(value.shape))


@pytest.mark.parametrize("model", ["mlp", "gpt", "gpt_scan", "gpt_remat", "cnn"])
def test_tables_have_a_row_for_every_value_and_every_op(model: str) -> None:
    changed = again(traced_model(model, num_microbatches=4), (Remat.FULL, Remat.SELECTIVE))
    step, graph = changed.step, changed.step.graph
    assert len(step.phases) == len(changed.of_op) == len(graph.ops) == len(changed.origins[graph])
    _check_batch(graph.values, step.full_shapes, step.batch_dims)
    rewritten = [body for body in changed.origins if body is not graph]
    assert bool(rewritten) == (model == "gpt_scan")
    for body in rewritten:
        _check_batch(body.values, step.bodies[body].full_shapes, step.bodies[body].batch_dims)


def _copies(before: StepGraph, changed: LayeredStep) -> list[int]:
    """The ops that were added and are no barriers."""
    seen, copies = set[Any](), list[int]()
    for op, origin in reversed(list(enumerate(changed.origins[changed.step.graph]))):
        # What is repeated stands first: the last of a kind, from the end, is the op itself.
        if origin is not None and before.phases[origin.op] is not changed.step.phases[op]:
            copies.append(op)
        seen.add(origin)
    return copies


@pytest.mark.parametrize("model", ["mlp", "gpt"])
def test_copies_are_known_as_recomputation_and_run_in_their_layer(model: str) -> None:
    made = traced_model(model)
    layers = make_layers(made.step, 3)
    changed = rematerialise(made.step, layers.of_op, (Remat.FULL,) * 3)
    copies, known = _copies(made.step, changed), originals(changed.step)
    assert copies
    for number in copies:
        op, origin = changed.step.graph.ops[number], changed.origins[changed.step.graph][number]
        assert origin is not None and changed.of_op[number] == layers.of_op[origin.op]
        assert changed.step.phases[number] is Phase.BACKWARD
        pairs = zip(op.results, origin.graph.ops[origin.op].results, strict=True)
        assert all(original in known[copy] for copy, original in pairs)


@pytest.mark.parametrize("model", ["mlp", "gpt"])
def test_a_layer_keeps_what_crosses_its_borders_and_nothing_else(model: str) -> None:
    made = traced_model(model)
    layers = make_layers(made.step, 3)
    changed = rematerialise(made.step, layers.of_op, (Remat.FULL,) * 3)
    graph = changed.step.graph

    def home(value: int) -> int | None:
        producer = graph.producer[value]
        forward = producer is not None and changed.step.phases[producer] is Phase.FORWARD
        return changed.of_op[producer] if producer is not None and forward else None

    crossing = {v for op in graph.ops for v in op.operands if home(v) not in (None, changed.of_op[op.id])}
    for op in graph.ops:
        if changed.step.phases[op.id] is Phase.BACKWARD:
            inside = {v for v in op.operands if home(v) is not None} - crossing - set(graph.outputs)
            makers = [graph.ops[graph.producer[v] or 0].primitive for v in inside - free_values(graph)]
            assert not makers, "what is the same in every step is free, and made wherever it is read"
    held = {v for op in graph.ops if changed.step.phases[op.id] is Phase.BACKWARD for v in op.operands} & crossing
    for number in _copies(made.step, changed):
        origin = changed.origins[graph][number]
        assert origin is not None and held.isdisjoint(origin.graph.ops[origin.op].results)


def _saved_bytes(step: StepGraph, layers: Layers) -> float:
    view = StageView(step=step, layers=layers, first=0, last=layers.num_layers - 1)
    return sum(step.graph.values[life.value].bytes for life in lives_of(view).lives if life.saved)


NUM_LAYERS = 4


def _by_blocks(step: StepGraph) -> Layers:
    layers = make_layers(step, NUM_LAYERS)
    heavy = [layers.of_op[op.id] for op in step.graph.ops[:16] if op.primitive == "dot_general"]
    assert heavy[: 2 * NUM_LAYERS] == [i // 2 for i in range(2 * NUM_LAYERS)]
    return layers


@pytest.mark.parametrize(("policy", "kept", "repeated"), [(Remat.FULL, 0, 1), (Remat.SELECTIVE, 1, 0)])
def test_what_is_kept_and_what_is_repeated_is_what_one_counts_by_hand(policy: Remat, kept: int, repeated: int) -> None:
    """Of h → tanh(h up) down a layer keeps h, which the batch is for the first; selective: h up, not the tanh."""
    step = split_step(blocks(NUM_LAYERS, scan=False), 1).step
    layers = _by_blocks(step)
    changed = rematerialise(step, layers.of_op, (policy,) * NUM_LAYERS)
    after = Layers(num_layers=NUM_LAYERS, of_op=changed.of_op, of_input=layers.of_input)
    # The loss reads the last h, which the last layer makes again if it keeps no products.
    saved = (NUM_LAYERS + kept) * ROWS * COLUMNS + kept * NUM_LAYERS * ROWS * WIDE
    assert _saved_bytes(changed.step, after) == 4 * saved
    assert _saved_bytes(step, layers) >= 4 * ((NUM_LAYERS + 1) * ROWS * COLUMNS + NUM_LAYERS * ROWS * WIDE)
    more = sum(op_flops(changed.step)) - sum(op_flops(step))
    product = 2 * ROWS * COLUMNS * WIDE
    products = (NUM_LAYERS + 1) * repeated * product
    assert products <= more <= products + NUM_LAYERS * 16 * ROWS * WIDE


def test_nothing_changes_where_no_layer_computes_again() -> None:
    made = traced_model("mlp")
    changed = again(made, (Remat.NONE, Remat.NONE))
    assert changed.step is made.step
    assert not changed.origins and changed.equations(made.step.graph, made.equations) == made.equations


def test_a_policy_for_each_layer_is_needed() -> None:
    made = traced_model("mlp")
    with pytest.raises(PlanError, match="1 policies of rematerialisation were given for 2 layers"):
        rematerialise(made.step, make_layers(made.step, 2).of_op, (Remat.FULL,))


def test_random_bits_are_drawn_again_and_parameters_read_directly() -> None:
    made = traced_model("gpt")
    changed = again(made, (Remat.FULL,) * 3)
    graph = changed.step.graph
    copied = {graph.ops[i].primitive for i in _copies(made.step, changed)}
    assert {"random_bits", "dot_general"} <= copied
    held = [graph.values[op.operands[0]] for op in graph.ops if op.primitive == "optimization_barrier"]
    assert any(value.dtype.startswith("key<") for value in held)
    parameters = {v for v in graph.inputs if changed.step.batch_dims[v] is None and graph.values[v].is_float}
    assert parameters.isdisjoint(value.id for value in held)
