"""Steps of one sample: micro-batches of one have the program of larger ones; a batch of one keeps its own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from alpa_lite.cli.models.transformer import Computation, Recompute, Transformer
from alpa_lite.errors import TraceError
from alpa_lite.program.ir import Graph
from alpa_lite.program.phases import Phase, StepGraph
from alpa_lite.program.show import show
from alpa_lite.step.split import StepPrograms
from alpa_lite.trace.from_jaxpr import from_jaxpr
from alpa_lite.trace.passes.code_motion import SinkFreeValues
from alpa_lite.trace.passes.split_stacked import PartedProgram
from alpa_lite.trace.trace import Traced, trace
from tests.step.splitting import split_step

#: A number of positions that no other dim has.
SEQ_LEN = 7


def _traced(recompute: Recompute, batch_size: int) -> Traced:
    model = Transformer(
        vocab_size=16,
        num_layers=2,
        hidden=8,
        num_heads=2,
        inner=16,
        seq_len=SEQ_LEN,
        dropout=0.2,
        computation=Computation(recompute=recompute, dtype=jnp.float32),
    )

    def step(params: Any, batch: Any, key: Any) -> Any:
        loss, grads = jax.value_and_grad(model.loss_fn)(params, batch, key)
        return jax.tree.map(lambda p, g: p - g, params, grads), loss

    params = jax.eval_shape(model.init, jax.random.key(0))
    return trace(step, (params, model.batch_shapes(batch_size), jax.random.key(0)))


def _scopes(step: StepGraph) -> list[tuple[Graph, tuple[int | None, ...]]]:
    return [(step.graph, step.batch_dims), *((body, scope.batch_dims) for body, scope in step.bodies.items())]


@pytest.mark.parametrize("loop_parts", [0, 2])
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_a_batch_of_one_is_known_wherever_there_are_positions(recompute: Recompute, loop_parts: int) -> None:
    """In both directions and inside bodies; what a reduction drops it from, or what never had it, has none."""
    step = split_step(_traced(recompute, 1), 1, loop_parts=loop_parts).step
    assert step.batch.size == 1 and not step.batch.problem
    seen = 0
    for graph, dims in _scopes(step):
        for op in graph.ops:
            reads = any(dims[v] is not None for v in op.operands)
            for r in op.results:
                shape = graph.values[r].shape
                if reads and SEQ_LEN in shape and not op.primitive.startswith("reduce_"):
                    assert dims[r] is not None and shape[dims[r] or 0] == 1, op
                    seen += 1
    assert seen > 100
    backward = [op for op in step.graph.ops if step.phases[op.id] is Phase.BACKWARD]
    assert any(step.batch_dims[r] is not None for op in backward for r in op.results)


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_weights_and_what_is_summed_over_a_batch_of_one_have_no_batch(recompute: Recompute) -> None:
    step = split_step(_traced(recompute, 1), 1).step
    assert all(step.batch_dims[v] is None for v in step.graph.outputs)
    named = {step.graph.values[v].name: step.batch_dims[v] for v in step.graph.inputs}
    assert {name for name, dim in named.items() if dim == 0} == {"batch/targets", "batch/tokens"}


def test_a_batch_of_one_keeps_its_own_program() -> None:
    traced = _traced("full", 1)
    own = SinkFreeValues().apply(PartedProgram.of(from_jaxpr(traced.jaxpr, traced.inputs.names))).graph
    step = split_step(traced, 1).step
    assert [(op.primitive, op.params) for op in step.graph.ops] == [(op.primitive, op.params) for op in own.ops]
    assert step.graph.values == own.values


def test_micro_batches_of_one_have_the_program_of_larger_ones() -> None:
    traced = _traced("full", 4)
    one, two = (split_step(traced, m, loop_parts=2).step for m in (4, 2))
    assert [op.primitive for op in one.graph.ops] == [op.primitive for op in two.graph.ops]
    assert one.batch_dims == two.batch_dims and one.phases == two.phases and one.full_shapes == two.full_shapes
    for v, w, dim in zip(one.graph.values, two.graph.values, one.batch_dims, strict=True):
        halved = tuple(n // 2 if d == dim else n for d, n in enumerate(w.shape))
        assert v.shape == halved and v.literal == w.literal


@pytest.mark.parametrize("loop_parts", [0, 2])
def test_a_number_of_micro_batches_has_the_same_program_whatever_was_asked_before(loop_parts: int) -> None:
    """The program at the full batch is kept for other numbers: of one sample each, of several, and of all."""
    programs = StepPrograms(traced=_traced("full", 4))
    for m in (2, 4, 1, 2):
        again = programs.with_equations(m, loop_parts)
        alone = split_step(_traced("full", 4), m, loop_parts=loop_parts)
        assert show(again.step.graph, step=again.step) == show(alone.step.graph, step=alone.step)
        assert again.step.full_shapes == alone.step.full_shapes and again.step.batch_dims == alone.step.batch_dims
        assert [tuple(e.params) for e in again.equations] == [tuple(e.params) for e in alone.equations]
        bodies = (list(step.step.bodies.values()) for step in (again, alone))
        assert next(bodies) == next(bodies)


def _step(p: Any, x: Any) -> Any:
    loss, grads = jax.value_and_grad(lambda p: -jnp.mean(jax.nn.log_softmax(x @ p)[..., 0]))(p)
    return p - grads, loss


def test_a_step_that_looks_for_a_batch_of_one_keeps_its_meaning() -> None:
    def step(p: Any, x: Any) -> Any:
        return _step(p, jnp.sin(x) if x.shape[0] == 1 else x)

    args = (jnp.ones((4, 5)), jnp.ones((1, 3, 4)))
    found = split_step(trace(step, args), 1).step
    (sine,) = [op for op in found.graph.ops if op.primitive == "sin"]
    assert found.batch_dims[sine.results[0]] == 0


def test_a_step_that_looks_at_its_batch_size_is_refused_in_micro_batches_of_one() -> None:
    def step(p: Any, x: Any) -> Any:
        return _step(p, jnp.sin(x) if x.shape[0] == 4 else x)

    with pytest.raises(TraceError, match="The step changes with its batch size"):
        split_step(trace(step, (jnp.ones((4, 5)), jnp.ones((4, 3, 4)))), 4)


def test_rows_of_samples_are_no_layers() -> None:
    """Two arrays of one sample are joined to two rows, as the weights of two layers would be."""

    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            n = x.shape[0]
            z = jnp.tanh(jnp.concatenate([x, 2 * x]) @ w)
            return (z[:n] * z[n:]).mean()

        value, grads = jax.value_and_grad(loss)(w)
        return w - grads, value

    traced = trace(step, (jnp.ones((4, 4)), jnp.ones((4, 4))), batch_argnums=1)
    split = split_step(traced, 4, loop_parts=2).step
    assert split.num_microbatches == 4 and not any(part.rows for part in split.input_parts)
