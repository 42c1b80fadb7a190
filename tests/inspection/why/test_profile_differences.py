"""Measured ops beside predicted ones."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import alpa_lite as al
from alpa_lite.errors import MismatchError, PlanError
from alpa_lite.inspection.why.profile_differences import profile_differences
from alpa_lite.plan.instructions import InstructionKind
from alpa_lite.runtime.execute.step_profile import KernelTime, StepProfile, shared_seconds
from tests.runtime.pipelines import compiled


def kernel(name, seconds, *ops, opcode="fusion", product=False, sums=False):
    return KernelTime(name=name, opcode=opcode, ops=ops, product=product, sums=sums, seconds=seconds)


@pytest.fixture(scope="module")
def lowered():
    """Two layers, whose first product has a transposed result."""

    def step(w, x):
        def loss(w):
            return jnp.sum(jnp.sin(jnp.tanh((x @ w).T).T @ w))

        return w - 0.1 * jax.grad(loss)(w)

    shapes = jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((32, 64), jnp.float32)
    planner = al.planners.DataParallel()
    function = al.parallelize(step, cluster="p3.16xlarge", planner=planner, num_microbatches=1)
    return function.trace(*shapes).plan().lower()


def profile_of(lowered, kernels):
    """A step of the predicted times, with these kernels in its task."""
    times = lowered.simulate().times
    shown = [i for i, each in enumerate(lowered.program.instructions) if each.kind is not InstructionKind.FREE]
    runs = [kernels if lowered.program.instructions[i].kind is InstructionKind.RUN else () for i in shown]
    return StepProfile(
        program=lowered.program, step=lowered.step.step, times=times, numbers=tuple(shown), kernels=tuple(runs)
    )


def rows_of(lowered, *kernels):
    found = profile_differences(lowered.planned.last_plan, profile_of(lowered, kernels))
    return {(row.what, row.phase): row for row in found.rows}, found


def ops(lowered, primitive, phase="forward"):
    step = lowered.step.step
    return [op.id for op in step.graph.ops if op.primitive == primitive and step.phases[op.id].value == phase]


def test_both_sides_add_up(devices):
    step = compiled([1.0, 1.0], al.planners.Pipeline(pipeline=2), 2)
    profile = step.profile()
    found = profile_differences(step.plan, profile)
    # Measured, one instruction runs after the other; predicted, stages run side by side.
    assert sum(row.measured_seconds for row in found.rows) == pytest.approx(found.measured_seconds)
    spans = [(time.start_seconds, time.end_seconds) for time in found.predicted]
    alone = sum(end - start for start, end in spans) + found.predicted_seconds - sum(shared_seconds(spans))
    assert sum(row.predicted_seconds for row in found.rows) == pytest.approx(alone)
    assert [abs(row.seconds) for row in found.rows] == sorted((abs(row.seconds) for row in found.rows), reverse=True)
    products = [row for row in found.rows if row.what == "dot_general"]
    assert {row.phase for row in products} == {"forward", "backward"}
    for row in products:
        assert "pipelines.py:" in row.source and row.stages == (0, 1) and row.kernels
        assert row.predicted_seconds > 0 and row.measured_seconds > 0
    assert step.plan.explain_profile(profile) == str(found) and "Largest differences" in str(found)
    assert len(json.loads(json.dumps(found.to_json()))["differences"]) == len(found.rows)


def test_a_kernel_of_several_ops_is_shared_out_by_their_prices(lowered):
    (tanh,) = ops(lowered, "tanh")
    first, second = ops(lowered, "dot_general")
    alone, _ = rows_of(lowered)
    rows, _ = rows_of(lowered, kernel("f", 1.0, (tanh,), (first,)))
    parts = [rows[what, "forward"].measured_seconds for what in ("tanh", "dot_general")]
    assert sum(parts) == pytest.approx(1.0)
    # Both products are of one size, so that each has half of the predicted row.
    prices = alone["tanh", "forward"].predicted_seconds, alone["dot_general", "forward"].predicted_seconds / 2
    assert min(prices) > 0 and parts[0] / parts[1] == pytest.approx(prices[0] / prices[1])
    assert all(row.predicted_seconds == alone[key].predicted_seconds for key, row in rows.items() if key in alone)
    both, _ = rows_of(lowered, kernel("f", 1.0, (first,), (second,)), kernel("g", 2.0, (second,)))
    assert both["dot_general", "forward"].measured_seconds == pytest.approx(3.0)
    assert both["dot_general", "forward"].kernels == ("g", "f")


def test_a_product_under_the_name_of_a_transpose_is_the_product(lowered):
    transpose = ops(lowered, "transpose")[0]
    rows, _ = rows_of(lowered, kernel("dot.4", 1.0, (transpose,), opcode="dot", product=True))
    assert rows["dot_general", "forward"].measured_seconds == pytest.approx(1.0)
    # A transpose that is a kernel of its own is one.
    rows, _ = rows_of(lowered, kernel("copy", 1.0, (transpose,), opcode="copy"))
    assert rows["transpose", "forward"].measured_seconds == pytest.approx(1.0)


def test_what_belongs_to_no_op_has_rows_too(lowered):
    _, found = rows_of(
        lowered,
        kernel("copy.1", 1.0, opcode="copy"),
        kernel("add.3", 2.0, sums=True),
        kernel("psum.2", 4.0, (0,), opcode="all-reduce-start"),
        kernel("permute", 8.0, opcode="collective-permute"),
    )
    seconds = {row.what: row.measured_seconds for row in found.rows}
    assert seconds["copy that XLA adds"] == 1 and seconds["adding to sums"] == 2
    assert seconds["all_reduce"] == 4 and seconds["permute"] == 8
    (reduced,) = [row for row in found.rows if row.what == "all_reduce"]
    plan = lowered.planned.last_plan
    # Data parallelism reduces gradients, in the plan and in the program.
    assert reduced.predicted_seconds == pytest.approx(
        sum(use.seconds * use.count for use in plan.prediction.collectives), rel=0.3
    )
    # Less than nothing is left of the task, so that everything adds up.
    assert seconds["outside of kernels"] < -14
    assert sum(row.seconds for row in found.rows) == pytest.approx(0.0, abs=1e-9)


def test_other_plans_are_refused(lowered):
    plan, profile = lowered.planned.last_plan, profile_of(lowered, ())
    with pytest.raises(PlanError, match="comes from a file"):
        profile_differences(replace(plan, request=None), profile)
    with pytest.raises(MismatchError, match="another plan"):
        profile_differences(plan, replace(profile, times=profile.times[1:]))
