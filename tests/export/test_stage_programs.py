"""A plan as StableHLO: the programs that run, each with the mesh of its stage, in a form that MLIR reads."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.interpreters import mlir
from jaxlib.mlir import ir

import alpa_lite as al
from alpa_lite.errors import PlanError
from alpa_lite.planners import FSDP, Hybrid


def step(params: Any, x: Any) -> Any:
    def loss(params):
        y = x
        for w in params:
            y = jnp.tanh(y @ w)
        return jnp.mean((y - x) ** 2)

    return [p - 0.1 * g for p, g in zip(params, jax.grad(loss)(params), strict=True)]


ARGUMENTS = ([jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 4, jax.ShapeDtypeStruct((32, 64), jnp.float32))


@pytest.mark.parametrize("planner", [FSDP(), Hybrid(pipeline=2, data=2, tensor=2)], ids=lambda p: p.name)
def test_the_programs_are_those_that_run(planner: Any) -> None:
    planned = al.parallelize(step, cluster="dgx-1", num_microbatches=2).trace(*ARGUMENTS).plan(planner=planner)
    text = planned.last_plan.export("stablehlo", platform="cpu")
    assert text.endswith(planned.lower().as_text(platform="cpu"))
    assert all(f"// stage {number}: " in text for number in range(len(planned.last_plan.stages)))
    modules = re.split(r"^(?=module )", text, flags=re.MULTILINE)[1:]
    axes = planned.last_plan.stages[0].mesh_shape.axis_sizes
    assert modules
    with mlir.make_ir_context():
        for module in modules:
            # The comment before the next module is the end of this one's text.
            assert ir.Module.parse(module).operation.verify()
    shown = ", ".join(f'"{name}"={size}' for name, size in axes.items())
    assert any(f"sdy.mesh @mesh = <[{shown}]>" in module for module in modules)


def test_plans_from_files_are_refused(tmp_path: Any) -> None:
    plan = al.plan(step, *ARGUMENTS, cluster="dgx-1", planner=FSDP())
    plan.save(tmp_path / "plan.json")
    with pytest.raises(PlanError, match="Replay the plan first"):
        al.Plan.load(tmp_path / "plan.json").export("stablehlo")
