"""Cutting a step into micro-batches: what is summed, what is kept, what is refused, and that sums come out right.

`run_in_micro_batches` executes a split step on one device, straight from the definition: every op of the loop once per
micro-batch, sums added, kept values concatenated. It shares no code with lowering.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa_lite import _jax
from alpa_lite.errors import BatchError, NonAdditiveError, TraceError
from alpa_lite.plan.plan import fingerprint
from alpa_lite.program.equations import Equation
from alpa_lite.program.ir import Op, wiring_of
from alpa_lite.program.phases import Phase, StepGraph
from alpa_lite.rules.dims import follow_batch
from alpa_lite.step.split import StepPrograms, TracedStep
from alpa_lite.trace.evaluate import evaluate, run_control_flow
from alpa_lite.trace.step_programs import SizedPrograms
from alpa_lite.trace.trace import trace
from tests.end_to_end.programs import PARAMS, PROGRAMS, X, Y, descend, forward, squared
from tests.step.splitting import split_step

#: What depends on which micro-batch it is (draws, positions, what counts once) is beyond this plain executor.
POSITIONAL = {
    "totals_that_start_from_one",
    "weighted_by_position",
    "rows_by_numpy_arange",
    "mask_in_outputs",
    "noise_from_a_raw_key",
    "noise_with_the_batch_last",
    "a_key_per_sample",
    "a_key_per_position",
    "sampled_labels",
    "another_generator",
    "recurrence_with_dropout",
}
NAMES = [name for name, program in PROGRAMS.items() if not program.refused and name not in POSITIONAL]


def _split(fun: Any, args: Any, num_microbatches: int = 4, **options: Any) -> TracedStep:
    return split_step(trace(fun, args, **options), num_microbatches)


@pytest.mark.parametrize("name", NAMES)
def test_steps_at_numbers_that_are_not_traced_are_those_that_would_be(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch of 16 is traced whole and in halves: fourths and eighths follow."""
    program = PROGRAMS[name]
    traced = trace(program.step, program.args, batch_argnums=program.batch_argnums)
    numbers = (4, 2, 8)
    found = [StepPrograms(traced=traced).at(number) for number in numbers]
    monkeypatch.setattr(SizedPrograms, "at_two_sizes", lambda self, size: iter([self.traced_at(size)]))
    for number, got in zip(numbers, found, strict=True):
        want = StepPrograms(traced=traced).at(number)
        assert fingerprint(got) == fingerprint(want), number
        assert (got.batch_dims, got.phases, got.full_shapes) == (want.batch_dims, want.phases, want.full_shapes)
        assert (got.aliases, got.loop_results) == (want.aliases, want.loop_results)


def run_in_micro_batches(split: TracedStep, args: Any) -> list[Any]:
    """The outputs of a step, from its definition."""
    step, graph = split.step, split.step.graph
    inputs = split.inputs(jax.tree.leaves(args))
    outside: dict[int, Any] = {v.id: np.asarray(v.literal, v.dtype) for v in graph.values if v.literal is not None}
    outside |= {v: x for v, x in zip(graph.inputs, inputs, strict=True) if step.batch_dims[v] is None}
    _run(split, outside, {Phase.INVARIANT})
    parts: dict[int, list[Any]] = {}
    for i in range(step.num_microbatches):
        inside = dict(outside)
        for v, x in zip(graph.inputs, inputs, strict=True):
            if (dim := step.batch_dims[v]) is not None:
                inside[v] = jnp.split(jnp.asarray(x), step.num_microbatches, axis=dim)[i]
        _run(split, inside, {Phase.FORWARD, Phase.BACKWARD})
        for op in graph.ops:
            if step.phases[op.id].in_loop:
                for r in op.results:
                    parts.setdefault(r, []).append(inside[r])
    for v, arrays in parts.items():
        dim = step.batch_dims[v]
        if dim is None:
            how = {None: sum, "same": lambda xs: xs[0], "max": max, "min": min}  # extremes here are scalars
            outside[v] = how[step.loop_results.combined[v].value if v in step.loop_results.combined else None](arrays)
        else:
            outside[v] = jnp.concatenate(arrays, axis=dim)
    _run(split, outside, {Phase.UPDATE})
    whole = dict(zip(graph.inputs, inputs, strict=True))
    return [outside.get(v, whole.get(v)) for v in graph.outputs]


def _run(split: TracedStep, values: dict[int, Any], phases: set[Phase]) -> None:
    graph = split.step.graph
    for op, equation in zip(graph.ops, split.equations, strict=True):
        if split.step.phases[op.id] in phases:
            values.update(zip(op.results, _results(op, equation, [values[v] for v in op.operands]), strict=True))


def _results(op: Op, equation: Equation, operands: list[Any]) -> list[Any]:
    wiring = wiring_of(op)
    if wiring is None:
        return list(_jax.bind(equation.primitive, dict(equation.params), operands))

    # The parameters hold the bodies as they were traced, at another batch size.
    def body(number: int, arrays: Mapping[int, Any]) -> tuple[Any, ...]:
        entering = [arrays.get(i, operands[i]) for i in wiring.inputs[number]]
        return tuple(map(jnp.asarray, evaluate(op.bodies[number], equation.bodies[number], entering)))

    return run_control_flow(op, wiring, body, operands)


@pytest.mark.parametrize("num_microbatches", [2, 8])
@pytest.mark.parametrize("name", NAMES)
def test_sums_over_micro_batches_give_the_full_batch(name: str, num_microbatches: int) -> None:
    program = PROGRAMS[name]
    if name == "two_rows_per_sample" and num_microbatches == 8:
        num_microbatches = 4
    split = _split(program.step, program.args, num_microbatches, batch_argnums=program.batch_argnums)
    got = run_in_micro_batches(split, program.args)
    for a, b in zip(got, jax.tree.leaves(jax.jit(program.step)(*program.args)), strict=True):
        assert np.shape(a) == b.shape
        assert np.allclose(np.asarray(a, float), np.asarray(b, float), rtol=1e-4, atol=1e-5)


# --- what a split step looks like -------------------------------------------------------------------------------------


def _step(p: Any, x: Any, y: Any) -> Any:
    loss, grads = jax.value_and_grad(squared)(p, x, y)
    return descend(p, grads), loss


def _inputs(step: StepGraph) -> dict[str, tuple[tuple[int, ...], int | None]]:
    graph = step.graph
    return {graph.values[v].name: (graph.values[v].shape, step.batch_dims[v]) for v in graph.inputs}


def test_micro_batches_shrink_the_batch_and_keep_the_literals() -> None:
    full, small = _split(_step, (PARAMS, X, Y), 1).step, _split(_step, (PARAMS, X, Y), 4).step
    assert _inputs(small) == {**_inputs(full), "x": ((4, 8), 0), "y": ((4, 4), 0)}
    literals = [[v.literal for v in step.graph.values if v.literal is not None] for step in (full, small)]
    assert literals[0] == literals[1] and float(X.shape[0] * Y.shape[1]) in literals[1]
    assert small.full_shapes == tuple(v.shape for v in full.graph.values)


def test_one_micro_batch_keeps_the_full_shapes() -> None:
    step = _split(_step, (PARAMS, X, Y), 1).step
    assert step.num_microbatches == 1 and step.batch.size == 16
    assert step.full_shapes == tuple(v.shape for v in step.graph.values)


def test_the_loop_touches_the_batch_and_the_update_does_not() -> None:
    step = _split(_step, (PARAMS, X, Y), 4).step
    graph = step.graph
    for op in graph.ops:
        touches = any(step.batch_dims[v] is not None for v in (*op.operands, *op.results))
        assert step.phases[op.id].in_loop == touches, op
    assert {step.phases[op.id] for op in graph.ops} >= {Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE}


def test_key_work_is_repeated_wherever_it_is_read() -> None:
    def step(p: Any, x: Any, y: Any, key: Any) -> Any:
        new, now = jax.random.split(key)
        mask = jax.random.bernoulli(now, 0.5, x.shape)
        return *_step(p, x * mask, y), new

    split = _split(step, (PARAMS, X, Y, jax.random.key(0)), 4).step
    phases = {op.primitive: split.phases[op.id] for op in split.graph.ops}
    assert phases["random_split"] is Phase.INVARIANT
    assert phases["random_bits"] is Phase.FORWARD


def test_values_that_hold_the_batch_in_another_dim_are_followed() -> None:
    def step(p: Any, x: Any, y: Any) -> Any:
        h = x.T.reshape(2, 4, x.shape[0])
        return *_step(p, h.reshape(8, -1).T, y), h

    split = _split(step, (PARAMS, X, Y), 4).step
    assert split.batch_dims[split.graph.outputs[-1]] == 2
    assert split.graph.values[split.graph.outputs[-1]].shape == (2, 4, 4)


def test_own_numbers_count_from_the_micro_batch_where_they_pick() -> None:
    rows = _split(PROGRAMS["rows_by_arange"].step, PROGRAMS["rows_by_arange"].args).step
    picking = {op.primitive: op.own_columns for op in rows.graph.ops if op.own_columns}
    assert picking == {"gather": (0,), "scatter-add": (0,)}
    weights = _split(PROGRAMS["weighted_by_position"].step, PROGRAMS["weighted_by_position"].args).step
    assert not any(op.own_columns for op in weights.graph.ops)


def test_loop_bodies_keep_their_place_in_the_batch() -> None:
    program = PROGRAMS["recurrence_with_dropout"]
    step = _split(program.step, program.args).step
    drawn = [
        (body.values[op.results[0]].shape, step.bodies[body].full_shapes[op.results[0]])
        for outer in step.graph.ops
        for body in outer.bodies
        for op in body.ops
        if op.primitive == "random_bits"
    ]
    assert drawn and all(small == (4, 16) and full == (16, 16) for small, full in drawn)


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_a_step_over_samples_in_two_orders_is_refused() -> None:
    def step(p: Any, x: Any, y: Any) -> Any:
        h = forward(p, x)
        return *_step(p, x, y), jnp.sum(h.T.reshape(-1) * h.reshape(-1))

    with pytest.raises(NonAdditiveError, match="samples are in different orders"):
        _split(step, (PARAMS, X, Y))


def test_a_nonlinear_use_of_a_sum_inside_a_loop_is_refused() -> None:
    def step(p: Any, x: Any) -> Any:
        total, _ = jax.lax.scan(lambda c, row: (jnp.tanh(c + jnp.sum(x * row)), None), 0.0, p["w1"].T)
        return descend(p, p), total

    with pytest.raises(NonAdditiveError, match="is not linear in a sum"):
        _split(step, (PARAMS, X), batch_argnums=1)


def test_neighbouring_samples_that_meet_in_a_convolution_are_refused() -> None:
    def step(p: Any, x: Any) -> Any:
        """The correlation of each sample with the one before, itself, and the one after."""
        numbers = ("0NC", "0IO", "0NC")
        h = forward(p, x)
        lags = jax.lax.conv_general_dilated(h[:, None], h[..., None], (1,), [(1, 1)], dimension_numbers=numbers)
        return descend(p, p), jnp.sum(lags * jnp.arange(3.0)[:, None, None])

    with pytest.raises(NonAdditiveError, match=r"conv_general_dilated .* mixes the samples"):
        _split(step, (PARAMS, X), batch_argnums=1)


@pytest.mark.parametrize(
    "write",
    [
        lambda h: h.at[0].set(1.0),
        lambda h: h.at[jnp.array([1, 3])].mul(2.0),
        lambda h: jax.lax.dynamic_update_slice(h, jnp.ones((2, 4)), (1, 0)),
    ],
    ids=["set", "mul", "dynamic_update_slice"],
)
def test_samples_that_are_written_to_by_their_numbers_are_refused(write: Any) -> None:
    """Each micro-batch has a first sample."""

    def step(p: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(lambda p: jnp.sum(write(forward(p, x))))(p)
        return descend(p, grads), value

    with pytest.raises(NonAdditiveError, match=r"by their numbers|mixes the samples"):
        _split(step, (PARAMS, X), batch_argnums=1)
    assert _split(step, (PARAMS, X), num_microbatches=1, batch_argnums=1).step.num_microbatches == 1


@pytest.mark.parametrize("number", [3, 32, -1, 0])
def test_numbers_that_do_not_divide_are_refused(number: int) -> None:
    with pytest.raises(BatchError, match=r"16 samples. Choose one of \[1, 2, 4, 8, 16\]"):
        _split(_step, (PARAMS, X, Y), number)


def test_a_step_that_branches_on_its_batch_size_is_refused() -> None:
    def step(p: Any, x: Any, y: Any) -> Any:
        return _step(p, jnp.sin(x) if x.shape[0] == 16 else jnp.cos(x), y)

    with pytest.raises(TraceError, match=r"full batch runs 'sin' where a micro-batch runs 'cos'"):
        _split(step, (PARAMS, X, Y))


def test_micro_batches_run_the_full_batch_s_program_where_code_looks_at_its_batch_size() -> None:
    """Below six samples the code computes something else, which no step of sixteen samples does."""

    def step(p: Any, x: Any, y: Any) -> Any:
        return _step(p, jnp.sin(x) if x.shape[0] > 5 else jnp.cos(x), y)

    want = jax.tree.leaves(step(PARAMS, X, Y))
    for number in (2, 4, 8, 16):
        got = run_in_micro_batches(_split(step, (PARAMS, X, Y), number), (PARAMS, X, Y))
        for mine, other in zip(got, want, strict=True):
            np.testing.assert_allclose(mine, other, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("number", [2, 4, 8, 16])
def test_columns_that_the_batch_size_chooses_are_those_of_the_full_batch(number: int) -> None:
    def step(p: Any, x: Any, y: Any) -> Any:
        def loss(p: Any) -> Any:
            h = forward(p, x)
            n = x.shape[0]
            return jnp.mean(jax.lax.integer_pow(jnp.tanh(h[:, n % 3] - y[:, n % 3]), n))

        value, grads = jax.value_and_grad(loss)(p)
        return descend(p, grads), value

    want = jax.tree.leaves(step(PARAMS, X, Y))
    got = run_in_micro_batches(_split(step, (PARAMS, X, Y), number), (PARAMS, X, Y))
    for mine, other in zip(got, want, strict=True):
        np.testing.assert_allclose(mine, other, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda p, h: jnp.mean((h[1:] - h[:-1]) ** 2), r"\): slice of \[16, .* picks samples of the batch by their"),
        (lambda p, h: jnp.sum(jnp.pad(h, ((0, 3), (0, 0))) ** 2), r"\): pad of .* adds padding between samples"),
        (lambda p, h: jnp.sum(jnp.tile(p["w1"].ravel(), 9)[: h.shape[0]] * h[:, 0]), r"slice of \[\d+\] takes a part"),
        (lambda p, h: jnp.sum(h) + jnp.sum(jnp.zeros(h.shape[0] + 1) + h[0, 0]), "an array .* is no multiple of it"),
    ],
)
def test_the_line_that_is_named_is_the_first_that_mixes_samples(loss: Any, words: str) -> None:
    """Not one of the backward pass, which comes before the loss among the outputs."""

    def step(p: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(lambda p: loss(p, forward(p, x)))(p)
        return descend(p, grads), value

    with pytest.raises(NonAdditiveError, match=words):
        _split(step, (PARAMS, X), 4, batch_argnums=1)


def test_a_half_of_one_sample_asks_for_fewer_micro_batches() -> None:
    def step(p: Any, x: Any, y: Any) -> Any:
        half = x.shape[0] // 2
        return _step(p, x[:half], y[:half])

    words = r"slice has, at batches of 8, 16 samples, 4, 8, which would be 1/2 at one sample\. .* fewer micro-batches"
    with pytest.raises(TraceError, match=words):
        _split(step, (PARAMS, X, Y), 16)
    assert _split(step, (PARAMS, X, Y), 4).step.num_microbatches == 4


@pytest.mark.parametrize("loop_parts", [0, 2])
def test_a_step_is_traced_at_two_sizes_whatever_the_number_of_micro_batches(loop_parts: int) -> None:
    sizes = list[int]()

    def step(p: Any, x: Any, y: Any) -> Any:
        sizes.append(x.shape[0])
        return _step(p, x, y)

    steps = StepPrograms(traced=trace(step, (PARAMS, X, Y), batch_argnums=(1, 2)))
    sizes.clear()
    for number in (1, 2, 4, 8, 16):
        steps.at(number, loop_parts)
    assert sizes == [8]


def _stacked(p: Any, x: Any) -> Any:
    """A step of layers that are written out, with their weights in one array."""

    def loss(p: Any) -> Any:
        h = x
        for layer in range(4):
            h = jnp.tanh(h @ p[layer])
        return jnp.mean(h**2)

    return p - 0.1 * jax.grad(loss)(p)


def _scanned(p: Any, x: Any) -> Any:
    """The same step with a loop over the layers."""

    def loss(p: Any) -> Any:
        return jnp.mean(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p)[0] ** 2)

    return p - 0.1 * jax.grad(loss)(p)


def test_steps_without_loops_and_stacked_arrays_are_made_once_for_all_numbers_of_parts() -> None:
    plain = StepPrograms(traced=trace(_step, (PARAMS, X, Y), batch_argnums=(1, 2)))
    assert plain.with_equations(4, 2) is plain.with_equations(4, 0)
    for step in (_stacked, _scanned):
        steps = StepPrograms(traced=trace(step, (jnp.ones((4, 8, 8)), jnp.ones((16, 8)))))
        whole, parted = steps.at(4, 0), steps.at(4, 2)
        assert [part.rows for part in whole.input_parts if part.leaf == 0] == [None]
        assert [part.rows for part in parted.input_parts if part.leaf == 0] == [(0, 2), (2, 4)]


def test_without_micro_batches_nothing_is_refused() -> None:
    for program in PROGRAMS.values():
        split = _split(program.step, program.args, 1, batch_argnums=program.batch_argnums)
        assert split.step.num_microbatches == 1


def test_a_batch_size_written_into_the_step_is_followed_through_it() -> None:
    def step(p: Any, x: Any, y: Any) -> Any:
        def loss(p: Any) -> Any:
            start = jnp.zeros((16, p["w1"].shape[1]))  # 16 samples, and no other number
            h, _ = jax.lax.scan(lambda h, _: (jnp.tanh(h + x @ p["w1"]), None), start, None, length=3)
            return jnp.mean(((h.reshape(16, 2, -1).reshape(16, -1) @ p["w2"])[:, :4] - y) ** 2)

        value, grads = jax.value_and_grad(loss)(p)
        return descend(p, grads), value

    traced = trace(step, (PARAMS, X, Y), batch_argnums=(1, 2))
    found = split_step(traced, 1).step
    assert found.batch.size == 16 and "batch was lost" in found.batch.problem
    loop = next(op for op in found.graph.ops if op.primitive == "scan")
    assert found.batch_dims[loop.results[0]] == 0
    assert [op.id for op in found.graph.ops if found.phases[op.id] is Phase.UPDATE]
    with pytest.raises(TraceError, match="cannot be traced at 8 samples"):
        split_step(traced, 2)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_batch_flows_where_other_sizes_show_it(name: str) -> None:
    program = PROGRAMS[name]
    step = split_step(trace(program.step, program.args, batch_argnums=program.batch_argnums), 1).step
    assert step.batch.size is not None and not step.batch.problem
    followed, bodies = follow_batch(step.graph, [step.batch_dims[v] for v in step.graph.inputs])
    assert all(dim in (None, seen) for dim, seen in zip(followed, step.batch_dims, strict=True))
    for body, scope in bodies.items():
        seen = step.bodies[body].batch_dims
        assert all(dim in (None, other) for dim, other in zip(scope.batch_dims, seen, strict=True))
