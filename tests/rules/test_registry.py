"""Rules of one's own, rules that do not fit, and what the plan says of ops without a rule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir

import alpa_lite as al
from alpa_lite.errors import RuleError
from alpa_lite.rules import FactorKind, OpView, Rule, RuleBuilder, registry

double_p = Primitive("double_rows")
double_p.def_impl(lambda x: 2 * x)
double_p.def_abstract_eval(lambda x: x)
mlir.register_lowering(double_p, mlir.lower_fun(lambda x: 2 * x, multiple_results=False))

W, X = jnp.eye(16) * 1.5, jnp.arange(512.0).reshape(32, 16)


def _step(w: Any, x: Any) -> Any:
    return w, double_p.bind(x @ w)


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))
    yield


def _plan(step: Any = _step, *args: Any) -> al.Plan:
    cluster = al.cluster("p3.16xlarge")
    return al.plan(step, *(args or (W, X)), cluster=cluster, planner=al.planners.DataParallel())


def test_primitives_without_a_rule_are_listed_once_with_their_lines() -> None:
    def step(w: Any, x: Any) -> Any:
        for _ in range(2):
            x = double_p.bind(x @ w)
        return w, x

    plan = _plan(step)
    (use,) = plan.opaque
    assert (use.primitive, use.num_ops, use.bytes) == ("double_rows", 2, 2 * X.nbytes)
    assert len(use.sources) == 1 and "test_registry.py:" in use.sources[0]
    text = " ".join(str(plan).split())
    assert "without a sharding rule" in text and "double_rows 2" in text and "test_registry.py:" in text
    assert al.Plan.from_json(plan.to_json()) == plan


def test_ops_inside_loops_over_layers_are_found() -> None:
    def step(ws: Any, x: Any) -> Any:
        return ws, jax.lax.scan(lambda h, w: (double_p.bind(h @ w), None), x, ws)[0]

    assert [use.primitive for use in _plan(step, jnp.stack([W, W]), X).opaque] == ["double_rows"]


def test_a_step_of_known_primitives_lists_nothing() -> None:
    plan = _plan(lambda w, x: (w, x @ w))
    assert plan.opaque == () and "without a sharding rule" not in str(plan)


def test_a_rule_of_ones_own_splits_the_primitive(devices: Any) -> None:
    @al.register_rule("double_rows")
    def _(view: OpView) -> Rule:
        b = RuleBuilder()
        dims = b.factors(view.operands[0].shape)
        return b.build((dims,), (dims,), linear=((0,),), flops=float(view.results[0].num_elements))

    step = al.parallelize(_step, planner=al.planners.DataParallel())
    np.testing.assert_allclose(step(W, X)[1], 2 * X @ W, rtol=1e-6)
    assert step.last_plan.opaque == () and not step.last_plan.prediction.collectives


def test_a_second_rule_is_refused() -> None:
    with pytest.raises(RuleError, match=r"'dot_general' has a rule already, alpa_lite\.rules\.contraction\."):
        al.register_rule("dot_general")(registry.opaque_rule)


@pytest.mark.parametrize("wrong", ["size", "rank", "operands"])
def test_a_rule_that_does_not_fit_its_op_is_refused_when_planning(wrong: str) -> None:
    @al.register_rule("double_rows")
    def _(view: OpView) -> Rule:
        b = RuleBuilder()
        rows, columns = b.factor(31 if wrong == "size" else 32), b.factor(16, FactorKind.REPLICATED)
        dims = ((rows,),) if wrong == "rank" else ((rows,), (columns,))
        return b.build(() if wrong == "operands" else (dims,), (dims,))

    with pytest.raises(RuleError, match=r"The rule of 'double_rows' says .* shapes \[\[32, 16\]\].* must multiply up"):
        _plan()


def test_factors_have_the_names_that_shardy_gives_them() -> None:
    b = RuleBuilder()
    factors = [(b.factor(2),) for _ in range(21)]
    rule = b.build(operands=[tuple(factors)], results=[tuple(factors)])
    assert str(rule).startswith("([i,j,k,") and ",y,z,z_1,z_2,z_3])->" in str(rule)
