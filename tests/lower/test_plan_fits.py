"""Plans that were made up: what does not fit the ops of the step is refused, and what fits runs as the step does."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import alpa_lite as al
from alpa_lite.errors import AlpaLiteError, MismatchError
from alpa_lite.lower.plan_fits import check_fits
from alpa_lite.plan.plan import OpPlacement, Plan
from alpa_lite.planners import Hybrid
from alpa_lite.program.ir import wiring_of
from alpa_lite.rules.op_info import rule_of_op
from alpa_lite.sharding.specs import Spec
from tests.end_to_end.cases import Training, assert_same, eager_cluster, reference
from tests.mutations import mutated
from tests.plan.test_plan import planned


def _step(made: Any) -> Any:
    return made.lower().step.step


def _with_ops(plan: Plan, ops: Mapping[int, OpPlacement]) -> Plan:
    return replace(plan, stages=(replace(plan.stages[0], ops=ops), *plan.stages[1:]))


def _refused(plan: Plan, made: Any, sentence: str) -> None:
    with pytest.raises(MismatchError, match=sentence):
        check_fits(plan, _step(made))


def _split_op(made: Any) -> tuple[int, OpPlacement]:
    """An op of the first stage that is split over an axis, and its placement."""
    ops = made.last_plan.stages[0].ops
    return next((number, placement) for number, placement in ops.items() if any(placement.factors))


@pytest.mark.parametrize(("model", "planner"), [("mlp", "hybrid"), ("mlp", "zero_bubble_4")])
def test_real_plans_fit(model: str, planner: str) -> None:
    made = planned(model, planner)
    check_fits(made.last_plan, _step(made))


def test_numbers_of_ops_and_values_are_those_of_the_step() -> None:
    made = planned("mlp", "hybrid")
    plan, step = made.last_plan, _step(made)
    _refused(replace(plan, op_layers=plan.op_layers[1:]), made, "ops and .* inputs")
    _refused(replace(plan, buckets=((0, 0),)), made, "buckets")
    _refused(replace(plan, buckets=((10**6,),)), made, "buckets")
    beyond = {len(step.graph.values): Spec(())}
    _refused(replace(plan, stages=(replace(plan.stages[0], inputs=beyond), *plan.stages[1:])), made, "names value")
    for number in (len(step.graph.ops), -1):
        _refused(_with_ops(plan, {number: OpPlacement(factors=())}), made, "is placed")


def test_specs_have_the_dims_of_their_values() -> None:
    made = planned("mlp", "hybrid")
    stage = made.last_plan.stages[0]
    value, spec = next((v, s) for v, s in stage.inputs.items() if s.dims)
    for wrong in (Spec(spec.dims[1:]), Spec((*spec.dims, ()))):
        changed = replace(stage, inputs={**stage.inputs, value: wrong})
        _refused(replace(made.last_plan, stages=(changed, *made.last_plan.stages[1:])), made, f"has value {value}")


def test_ops_are_split_as_their_rules_allow() -> None:
    made = planned("mlp", "hybrid")
    plan, ops = made.last_plan, made.last_plan.stages[0].ops
    number, placement = _split_op(made)
    short = replace(placement, factors=placement.factors[1:])
    _refused(_with_ops(plan, {**ops, number: short}), made, "cannot be split")
    _refused(_with_ops(plan, {**ops, number: replace(placement, results=())}), made, "cannot have results")
    indivisible = [n for n, p in ops.items() if any(size % 4 for size in _sizes(made, n)) and len(p.factors)]
    for other in indivisible[:3]:
        split = replace(ops[other], factors=(("data", "model"),) * len(ops[other].factors))
        _refused(_with_ops(plan, {**ops, other: split}), made, "cannot be split")
    assert indivisible


def _sizes(made: Any, number: int) -> tuple[int, ...]:
    return rule_of_op(_step(made).graph, number).sizes


def _planned_loop() -> Any:
    def step(weights: Any, x: Any) -> Any:
        def loss(weights: Any) -> Any:
            return jnp.mean(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, weights)[0])

        return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights))

    parallel = al.parallelize(step, cluster=eager_cluster(), planner=Hybrid(data=8))
    return parallel.trace(jnp.ones((4, 8, 8)), jnp.ones((32, 8))).plan()


def test_loops_have_placements_for_each_body_and_operand() -> None:
    made = _planned_loop()
    plan, graph = made.last_plan, _step(made).graph
    ops = plan.stages[0].ops
    number = next(n for n in ops if wiring_of(graph.ops[n]) is not None)
    for wrong in (
        replace(ops[number], bodies=()),
        replace(ops[number], body_operands=ops[number].body_operands[1:]),
        replace(ops[number], body_operands=tuple(Spec((*s.dims, ())) for s in ops[number].body_operands)),
        replace(ops[number], bodies=({10**6: OpPlacement(factors=())},)),
    ):
        _refused(_with_ops(plan, {**ops, number: wrong}), made, r"is placed|cannot read")


@pytest.mark.parametrize("runs", [1, pytest.param(60, marks=pytest.mark.long)])
def test_made_up_plans_that_fit_run_as_the_step(runs: int) -> None:
    """Placements are changed at random; whatever is not refused computes what `jax.jit` does."""
    training, chance, done = Training(model="mlp", num_steps=1), random.Random(runs), 0
    while done < runs:
        made = planned("mlp", chance.choice(("hybrid", "zero_2", "pipeline_2")))
        data = json.loads(json.dumps(made.last_plan.to_json()))
        stage, part = chance.choice(data["stages"]), chance.choice(("ops", "ops", "accumulators", "inputs"))
        stage[part] = mutated(stage[part], chance, changes=chance.choice((2, 5, 20)), subtle=True)
        try:
            compiled = made.function.plan(planner=Plan.from_json(data)).lower().compile()
        except AlpaLiteError:
            continue
        if Plan.from_json(data).stages != made.last_plan.stages:
            assert_same(training.run(compiled), reference(training))
            done += 1
