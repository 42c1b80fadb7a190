"""What XLA:GPU runs later than it stands: gradients of weights, and the loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import alpa_lite as al
from alpa_lite.intra_op.liveness import Life, LiveSpan, lives_of
from alpa_lite.intra_op.stage import StageView
from alpa_lite.intra_op.stored_values import KernelModel
from alpa_lite.program.ir import Op
from alpa_lite.program.phases import Phase
from alpa_lite.step.clustering import make_layers
from alpa_lite.step.recomputation import Remat
from alpa_lite.step.rematerialisation import rematerialise
from cost_models.composed import ComposedCostModel

LAYERS, SAMPLES, WIDTH = 5, 1024, 64
IN_ORDER = KernelModel()
LATE = replace(IN_ORDER, puts_off_results=True)


def view_of(step: Any, weights: Any) -> StageView:
    arrays = weights, jax.ShapeDtypeStruct((SAMPLES, WIDTH), jnp.float32)
    traced = al.parallelize(step, batch_argnums=(1,)).trace(*arrays).step(1).step
    return StageView(step=traced, layers=make_layers(traced, 1), first=0, last=0)


def spans_of(view: StageView, kernels: KernelModel) -> Mapping[int, LiveSpan]:
    """The times of the ops outside of loops, each of which must run after what makes its operands."""
    spans = lives_of(view, kernels).spans
    found = {op.id: spans[(), op.id] for op in view.graph.ops}
    makers = ((op, view.graph.producer[v]) for op in view.graph.ops for v in op.operands)
    assert all(found[maker].end <= found[op.id].start for op, maker in makers if maker is not None)
    return found


def backward(view: StageView) -> list[Op]:
    return [op for op in view.graph.ops if view.step.phases[op.id] is Phase.BACKWARD]


def making(view: StageView, shape: tuple[int, ...]) -> list[Op]:
    """The products of the backward pass of a shape."""
    values = view.graph.values
    return [op for op in backward(view) if op.primitive == "dot_general" and values[op.results[0]].shape == shape]


def looped(*, recomputes: bool = True) -> StageView:
    """Layers of two products in a loop, before a wide head; the loss is returned too."""

    def layer(x: Any, w: Any) -> tuple[Any, None]:
        return jnp.tanh(x @ w) @ w.T, None

    def step(weights: Any, x: Any) -> Any:
        def loss(weights: Any) -> Any:
            hidden, _ = lax.scan(jax.checkpoint(layer) if recomputes else layer, x, weights[0])
            return jnp.mean(jnp.tanh(hidden @ weights[1]) ** 2)

        value, gradients = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value

    shapes = (LAYERS, WIDTH, 4 * WIDTH), (WIDTH, 20 * WIDTH)
    return view_of(step, tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))


def written_out(step: Any) -> StageView:
    return view_of(step, [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * LAYERS)


def layers_of(layer: Any) -> Any:
    def step(ws: Any, x: Any) -> Any:
        def loss(ws: Any) -> Any:
            h = x
            for w in ws:
                h = layer(h, w)
            return jnp.mean(h**2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, jax.grad(loss)(ws))

    return step


def values_of(view: StageView, kernels: KernelModel, shape: tuple[int, ...]) -> list[Life]:
    """The lifetimes of values of a shape that are outside of loops, in order of their start."""
    lives = [life for life in lives_of(view, kernels).lives if not life.path]
    return [life for life in lives if view.graph.values[life.value].shape == shape]


def test_gradients_of_weights_are_made_at_the_end_of_the_backward_pass():
    view = written_out(layers_of(lambda h, w: jnp.tanh(h @ w)))
    gradients, others = making(view, (WIDTH, WIDTH)), making(view, (SAMPLES, WIDTH))
    assert (len(gradients), len(others)) == (LAYERS, LAYERS - 1)
    in_order, late = spans_of(view, IN_ORDER), spans_of(view, LATE)
    end = max(late[op.id].end for op in others)
    assert all(late[op.id].start >= end for op in gradients)
    assert any(in_order[op.id].start < max(in_order[o.id].end for o in others) for op in gradients)
    # What they read is in memory until then: the gradients of activations are all there at once.
    read = {v for op in gradients for v in op.operands}
    kept = [life for life in lives_of(view, LATE).lives if life.value in read and not life.path]
    assert all(life.end > end for life in kept) and len(kept) >= 2 * LAYERS - 1


def test_gradients_are_made_before_the_recomputation_that_waits_for_them():
    view = written_out(layers_of(jax.checkpoint(lambda h, w: jnp.tanh(h @ w))))
    spans = spans_of(view, LATE)
    gradients = [spans[op.id] for op in making(view, (WIDTH, WIDTH))]
    again = [spans[op.id] for op in backward(view) if op.primitive == "tanh"]
    assert len(gradients) == len(again) == LAYERS
    # The first one waits until the layer after the next one is computed again, the last two until the end.
    for number, gradient in enumerate(gradients):
        assert number > 2 or again[number + 1].end <= gradient.start < gradient.end <= again[number + 2].start
        assert number <= 2 or gradient.start >= again[-1].end


@pytest.mark.parametrize("recomputes", [False, True])
def test_gradients_and_the_loss_are_made_before_the_loop_that_waits_for_them(recomputes: bool):
    view = looped(recomputes=recomputes)
    spans = spans_of(view, LATE)
    (loop,) = (op for op in backward(view) if op.bodies)
    (head,) = making(view, (20 * WIDTH, WIDTH))
    (handed_on,) = making(view, (SAMPLES, WIDTH))
    (loss,) = (op for op in view.graph.ops if op.primitive == "reduce_sum")
    for late in (head, loss):
        assert spans[handed_on.id].end <= spans[late.id].start < spans[late.id].end <= spans[loop.id].start
    # Neither the logits nor their gradients are in memory while the loop runs.
    logits = values_of(view, LATE, (SAMPLES, 20 * WIDTH))
    assert logits and all(life.end <= spans[loop.id].start for life in logits)


def test_trips_stack_gradients_last_and_scatter_them_while_the_next_trip_runs():
    view = looped()
    (loop,) = (op for op in backward(view) if op.bodies)
    (body,), path = loop.bodies, ((loop.id, 0),)
    in_order, late = lives_of(view, IN_ORDER), lives_of(view, LATE)
    outputs = {body.values[r].shape: op for op in body.ops for r in op.results if r in body.outputs}
    made, handed_on = outputs[WIDTH, 4 * WIDTH], outputs[SAMPLES, WIDTH]
    span, ends = late.spans[path, made.id], [late.spans[path, op.id].end for op in body.ops]
    assert in_order.spans[path, handed_on.id].start > in_order.spans[path, made.id].start
    assert late.spans[path, handed_on.id].end <= span.start and span.end == max(ends)
    # Before it is scattered, that of the trip before is in memory from the start of the trip to its end.
    first = min(late.spans[path, op.id].start for op in body.ops)
    assert (late.filled[path, made.id], late.completed[path, made.id]) == (first, span.end - 1)
    assert not in_order.filled and not in_order.completed


def test_gradients_that_a_loop_waits_for_are_scattered_after_the_backward_pass():
    view = looped()
    lives, spans = lives_of(view, LATE), spans_of(view, LATE)
    (head,) = making(view, (20 * WIDTH, WIDTH))
    assert lives.completed[(), head.id] >= max(spans[op.id].end for op in backward(view)) - 1


def test_what_nothing_reads_is_not_put_off():
    """The planner's recomputation leaves such ops in the forward pass: they do not run, and keep nothing in memory."""
    view = written_out(layers_of(lambda h, w: h + jnp.tanh(h @ jnp.tile(w, 4)) @ jnp.tile(w, 4).T))
    layers = make_layers(view.step, LAYERS)
    changed = rematerialise(view.step, layers.of_op, (Remat.FULL,) * LAYERS)
    again = StageView(step=changed.step, layers=make_layers(changed.step, 1), first=0, last=0)
    unread = [op for op in again.graph.ops if not any(again.graph.consumers[r] for r in op.results)]
    assert any(again.step.phases[op.id] is Phase.FORWARD for op in unread)
    end = max(span.end for o, span in spans_of(again, LATE).items() if again.step.phases[o] is Phase.FORWARD)
    wide = [life for life in values_of(again, LATE, (SAMPLES, 4 * WIDTH)) if life.start < end]
    assert len(wide) >= LAYERS
    assert all(life.end <= later.start for life, later in pairwise(wide))


def test_a_reduction_to_one_number_ends_a_kernel():
    """The number takes no memory, and is read late, but what it is made of is not kept until then."""

    def step(ws: Any, x: Any) -> Any:
        size, h = jnp.sum((x @ jnp.tile(ws[0], 4)) ** 2), x
        for w in ws:
            h = jnp.tanh(h @ w)
        return h * size

    view = written_out(step)
    (wide,) = values_of(view, IN_ORDER, (SAMPLES, 4 * WIDTH))
    (reduction,) = (op for op in view.graph.ops if op.primitive == "reduce_sum")
    assert wide.end == spans_of(view, IN_ORDER)[reduction.id].end


@pytest.mark.parametrize(
    ("cluster", "num_devices", "expected"), [("dgx-h100", 8, True), ("dgx-h100", 1, False), ("tpu-v3", 8, False)]
)
def test_one_device_has_no_collectives_to_hide(cluster: str, num_devices: int, expected: bool):
    kernels = KernelModel.of(ComposedCostModel(al.cluster(cluster)), num_devices)
    assert kernels.puts_off_results is expected
