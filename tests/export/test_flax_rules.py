"""Logical axis rules of Flax: every array has the spec of the plan, and Flax's own functions read them."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.errors import PlanError
from alpa_lite.planners import FSDP, DataParallel, Hybrid, Megatron, OnMesh, Zero

nn = pytest.importorskip("flax.linen")
nnx = pytest.importorskip("flax.nnx")
optax = pytest.importorskip("optax")

WIDTH, SAMPLES = 32, 16


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        for _ in range(2):
            # A square weight: both of its dims are those of the residual stream.
            x = x + nn.Dense(WIDTH)(nn.Dense(WIDTH, use_bias=False)(nn.gelu(nn.Dense(4 * WIDTH)(x))))
        return x


OPTIMIZER = optax.adam(1e-2)


def step(state: Any, batch: Any) -> Any:
    params, moments = state

    def loss(params):
        return jnp.mean((Block().apply(params, batch["x"]) - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    updates, moments = OPTIMIZER.update(grads, moments, params)
    return (optax.apply_updates(params, updates), moments), value


def _arguments() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    batch = {name: rng.normal(size=(SAMPLES, WIDTH)).astype(np.float32) for name in "xy"}
    params = jax.device_get(Block().init(jax.random.key(0), batch["x"]))
    return (params, jax.device_get(OPTIMIZER.init(params))), batch


def _exported(plan: al.Plan) -> ModuleType:
    text = plan.export("flax")
    assert "alpa_lite" not in text
    module = ModuleType("rules")
    exec(compile(text, "rules.py", "exec"), module.__dict__)
    return module


PLANNERS = [
    DataParallel(),
    FSDP(),
    Zero(stage=1),
    Megatron(tensor=4, data=2),
    Hybrid(data=4, tensor=2, zero=3),
    OnMesh(axes={"a": 2, "b": 4}),
]


@pytest.mark.parametrize("planner", PLANNERS, ids=lambda planner: planner.name)
def test_rules_give_every_array_the_spec_of_the_plan(planner: Any) -> None:
    plan = al.plan(step, *_arguments(), cluster="dgx-1", planner=planner)
    module, (stage,) = _exported(plan), plan.stages
    assert set(module.NAMES) == set(stage.specs)
    for path, spec in stage.specs.items():
        axes = tuple(nn.logical_to_mesh_axes(module.NAMES[path], module.RULES))
        assert tuple((axis,) if isinstance(axis, str) else axis or () for axis in axes) == spec.dims, path
    assert len(dict(module.RULES)) == len(module.RULES)


def test_dims_have_the_names_of_the_structure() -> None:
    module = _exported(al.plan(step, *_arguments(), cluster="dgx-1", planner=FSDP()))
    assert module.NAMES["batch/x"][0].startswith("batch")
    named = {name for dims in module.NAMES.values() for name in dims if name}
    assert any(name.startswith("d_ff") for name in named) and any(name.startswith("d_model") for name in named)


def test_arrays_lie_as_the_rules_say_and_the_step_is_that_of_jit(devices: Any) -> None:
    state, batch = _arguments()
    plan = al.plan(step, state, batch, cluster="dgx-1", planner=Hybrid(data=4, tensor=2, zero=3))
    module = _exported(plan)
    mesh = module.mesh()
    shardings = [module.sharding_of(name, tree, mesh) for name, tree in (("state", state), ("batch", batch))]
    found, loss = jax.jit(step, in_shardings=shardings, out_shardings=(shardings[0], None))(state, batch)
    expected, alone = jax.jit(step)(state, batch)
    np.testing.assert_allclose(loss, alone, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), found, expected)
    lying = found[0]["params"]["Dense_0"]["kernel"].sharding.spec
    name = "state/0/params/Dense_0/kernel"
    assert tuple(lying) == tuple(nn.logical_to_mesh_axes(module.NAMES[name], module.RULES))
    # One result of the initialiser as Flax annotates it.
    boxed = nn.with_logical_partitioning(nn.initializers.ones, module.NAMES[name])(
        jax.random.key(0), (WIDTH, 4 * WIDTH)
    )
    assert nn.logical_to_mesh(nn.get_partition_spec(boxed), module.RULES) == lying


def test_variables_of_nnx_get_their_names_as_metadata() -> None:
    class Network(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.first = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
            self.second = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.second(nnx.relu(self.first(x)))

    def train(model: Any, batch: Any) -> Any:
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(batch["x"]) - batch["y"]) ** 2))(model)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model), grads))
        return loss

    model = Network(nnx.Rngs(0))
    plan = al.plan(train, model, _arguments()[1], cluster="dgx-1", planner=FSDP())
    module = _exported(plan)
    specs = nnx.get_partition_spec(nnx.state(module.annotate("model", model)))
    for path, variable in nnx.to_flat_state(specs):
        wanted = plan.stages[0].specs["/".join(map(str, ("model", *path, "value")))].dims
        axes = tuple(variable.get_value()) + ((),) * (len(wanted) - len(variable.get_value()))
        assert tuple((axis,) if isinstance(axis, str) else axis or () for axis in axes) == wanted


def test_several_stages_are_refused() -> None:
    plan = al.plan(step, *_arguments(), cluster="dgx-1", planner=Hybrid(pipeline=2, data=4))
    with pytest.raises(PlanError, match="rules are for one mesh"):
        plan.export("flax")
