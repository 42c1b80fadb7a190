"""Modules of plain JAX that plans are exported to: they compute what `jax.jit` does, and lie as the plan says."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.errors import PlanError
from tests.end_to_end.cases import TOLERANCE, relative_error

CLUSTER = al.cluster("dgx-1")
WIDTH, SAMPLES, LAYERS = 64, 32, 3


def scanned_step(params: Any, batch: Any) -> Any:
    """A loop over layers, recomputed in the backward pass."""

    @jax.checkpoint
    def layer(x, weights):
        return x + jax.nn.gelu(x @ weights["up"]) @ weights["down"], None

    def loss(params):
        x, _ = jax.lax.scan(layer, batch["x"] @ params["in"], params["layers"])
        return jnp.mean((x - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def attention_step(params: Any, batch: Any) -> Any:
    """Attention with shared embeddings, dropout, and a branch."""

    def loss(params):
        x = params["table"][batch["tokens"]]
        q, k, v = (jnp.einsum("bsd,dhk->bshk", x, params[name]) for name in "qkv")
        weights = jax.nn.softmax(jnp.einsum("bshk,bthk->bhst", q, k) / 4)
        x = x + jnp.einsum("bhst,bthk,hkd->bsd", weights, v, params["o"])
        x = x * jax.random.bernoulli(jax.random.key(3), 0.9, x.shape)
        x = jax.lax.cond(jnp.sum(x) > 0, lambda x: x @ params["up"], lambda x: jnp.tanh(x @ params["up"]), x)
        logits = jax.nn.relu(x) @ params["table"].T
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), batch["labels"][..., None], -1))

    value, grads = jax.value_and_grad(loss)(params)
    return {"params": jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), "loss": value}


def _shaped(shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _scanned() -> tuple[Any, ...]:
    layers = {"up": _shaped((LAYERS, WIDTH, 4 * WIDTH)), "down": _shaped((LAYERS, 4 * WIDTH, WIDTH))}
    batch = {name: _shaped((SAMPLES, WIDTH)) for name in "xy"}
    return scanned_step, {"in": _shaped((WIDTH, WIDTH)), "layers": layers}, batch


def _attention() -> tuple[Any, ...]:
    heads = {name: _shaped((WIDTH, 8, 16)) for name in "qkv"}
    params = {**heads, "o": _shaped((8, 16, WIDTH)), "up": _shaped((WIDTH, WIDTH)), "table": _shaped((128, WIDTH))}
    return attention_step, params, {name: _shaped((16, 8), jnp.int32) for name in ("tokens", "labels")}


STEPS = {"scanned": _scanned, "attention": _attention}
PLANNERS = {
    "data parallel": al.planners.DataParallel(),
    "FSDP": al.planners.FSDP(),
    "Megatron": al.planners.Megatron(),
    "hybrid": al.planners.Hybrid(data=2, tensor=4, zero=1),
}


def _values(tree: Any) -> Any:
    rng = np.random.default_rng(0)

    def draw(leaf: jax.ShapeDtypeStruct) -> Any:
        if leaf.dtype == jnp.int32:
            return rng.integers(0, 100, leaf.shape).astype(np.int32)
        return (0.2 * rng.standard_normal(leaf.shape)).astype(np.float32)

    return jax.tree.map(draw, tree)


def _planned(step: Callable[..., Any], *args: Any, planner: Any, **options: Any) -> Any:
    options = {"num_microbatches": 1, **options}
    return al.parallelize(step, cluster=CLUSTER, planner=planner, **options).trace(*args).plan()


def _module(text: str) -> Any:
    made = ModuleType("exported")
    exec(compile(text, "exported.py", "exec"), made.__dict__)
    return made


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("step", STEPS)
def test_an_exported_module_computes_and_lies_as_planned(step: str, planner: str, devices: Any) -> None:
    fun, *args = STEPS[step]()
    planned = _planned(fun, *args, planner=PLANNERS[planner])
    text = planned.last_plan.export("jax")
    assert f"from {__name__} import {fun.__name__} as _step" in text and "alpa_lite" not in text
    values = _values(args)
    compiled = _module(text).parallel(fun, *args).lower(*values).compile()
    found, expected = compiled(*jax.device_put(tuple(values), compiled.input_shardings[0])), jax.jit(fun)(*values)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for got, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert relative_error(np.asarray(got), np.asarray(wanted)) < TOLERANCE
    own = planned.lower().compile()
    results = own(*values)
    for got, ours in zip(jax.tree.leaves(found), jax.tree.leaves(results), strict=True):
        assert got.sharding.is_equivalent_to(ours.sharding, got.ndim)
    # Each device computes the same blocks of products as in the plan's own programs.
    texts = [executable.compiled.as_text() for executable in own.executor.executables]
    assert _products(compiled.as_text()) == _products("\n".join(texts))


def _products(text: str) -> Counter[int]:
    """Count the products of a compiled program by the elements of their blocks, of which XLA merges and swaps dims."""
    sizes = re.findall(r"= \w+\[([\d,]*)\]\S* dot\(", text)
    return Counter(prod(map(int, filter(None, found.split(",")))) for found in sizes)


def _gated(weights: Any, batch: Any) -> Any:
    def loss(weights):
        hidden = jax.nn.silu(batch["x"] @ weights["gate"]) * (batch["x"] @ weights["up"])
        return jnp.mean((hidden @ weights["down"] - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(weights)
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)))
    return jax.tree.map(lambda w, g: w - 0.1 * g / jnp.maximum(1.0, norm), weights, grads), value


def _gated_again(weights: Any, batch: Any) -> Any:
    (new, loss), squares = _gated(weights, batch), jnp.sum(jnp.square(weights["down"]))
    return new, loss + 1e-3 * squares


def test_results_are_arguments_of_the_next_step_and_a_changed_step_is_computed(devices: Any) -> None:
    """JAX traces a step for arguments on a mesh to other equations than for arrays on one device."""
    wide = {name: _shaped((WIDTH, 2 * WIDTH)) for name in ("gate", "up")}
    args = {**wide, "down": _shaped((2 * WIDTH, WIDTH))}, {name: _shaped((2 * WIDTH, WIDTH)) for name in "xy"}
    text = _planned(_gated, *args, planner=al.planners.Megatron()).last_plan.export("jax")
    # Not all of one kind lie alike; the changed step has one more.
    assert "('reduce_sum', ((),)): [" in text
    for fun in (_gated, _gated_again):
        weights, batch = _values(args)
        expected, step = weights, _module(text).parallel(fun, *args)
        for _ in range(3):
            (weights, loss), (expected, wanted) = step(weights, batch), jax.jit(fun)(expected, batch)
            for got, known in zip(jax.tree.leaves((weights, loss)), jax.tree.leaves((expected, wanted)), strict=True):
                assert relative_error(np.asarray(got), np.asarray(known)) < TOLERANCE
        placed, alone = step.trace(weights, batch).jaxpr, step.trace(*args).jaxpr
        assert [eqn.primitive for eqn in placed.eqns] == [eqn.primitive for eqn in alone.eqns]


def test_an_exported_module_needs_no_alpa_lite(tmp_path: Path, devices: Any) -> None:
    (tmp_path / "train.py").write_text(
        "import jax, jax.numpy as jnp\n\n\ndef train_step(w, x):\n"
        "    loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)\n    return w - 0.1 * grad, loss\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        train_step = import_module("train").train_step
    finally:
        sys.path.remove(str(tmp_path))
    plan = _planned(
        train_step, _shaped((WIDTH, WIDTH)), _shaped((SAMPLES, WIDTH)), planner=al.planners.FSDP(), donate_argnums=0
    ).last_plan
    plan.export("jax", tmp_path / "parallel_train.py")
    (tmp_path / "main.py").write_text(
        "import sys\nsys.modules['alpa_lite'] = sys.modules['cost_models'] = None\n"
        "import jax, numpy as np\nfrom parallel_train import parallel\nfrom train import train_step\n"
        f"w, x = np.ones(({WIDTH}, {WIDTH}), 'f4'), np.ones(({SAMPLES}, {WIDTH}), 'f4')\n"
        "step, (expected, loss) = parallel(train_step, w, x), jax.jit(train_step)(w, x)\n"
        "placed = jax.device_put(w, step.lower(w, x).compile().input_shardings[0][0])\n"
        "new, found = step(placed, x)\n"
        "assert placed.is_deleted(), 'w is donated'\n"
        "np.testing.assert_allclose(new, expected, rtol=1e-5)\n"
        "assert len(new.sharding.device_set) == 8 and not new.sharding.is_fully_replicated\n"
        "try:\n    parallel(train_step, w[:3], x)\nexcept ValueError as error:\n    print(error)\n"
    )
    ran = subprocess.run([sys.executable, "main.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert f"w is (3, {WIDTH}) instead of ({WIDTH}, {WIDTH})" in ran.stdout


def test_what_is_not_said_is_listed() -> None:
    fun, *args = _scanned()
    plan = _planned(fun, *args, planner=al.planners.Hybrid(data=8, remat="full")).last_plan
    assert f"Not said here: recomputation in the backward pass ({plan.recomputed})" in plan.export("jax")
    stored = _planned(fun, *args, planner=al.planners.Hybrid(data=8)).last_plan
    assert plan.recomputed and "Not said here" not in stored.export("jax")


def test_plans_of_another_form_are_refused(tmp_path: Path) -> None:
    fun, *args = _scanned()
    plan = _planned(fun, *args, planner=al.planners.FSDP()).last_plan
    with pytest.raises(PlanError, match=r"no target 'jaxx'.*Did you mean 'jax'"):
        plan.export("jaxx")
    with pytest.raises(PlanError, match="must be MODULE:FUNCTION"):
        plan.export("jax", step="train.py")
    assert "from my.train import step as _step" in plan.export("jax", step="my.train:step")
    plan.save(tmp_path / "plan.json")
    with pytest.raises(PlanError, match="is from a file"):
        al.Plan.load(tmp_path / "plan.json").export("jax")


def test_arguments_that_jit_has_no_shardings_for_are_refused() -> None:
    def step(w: Any, x: Any, rate: float) -> Any:
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return w - rate * grad, loss

    w, x = _shaped((WIDTH, WIDTH)), _shaped((SAMPLES, WIDTH))
    options = {"cluster": CLUSTER, "planner": al.planners.FSDP(), "num_microbatches": 1}
    static = al.parallelize(step, static_argnames="rate", **options).trace(w, x, rate=0.1).plan().last_plan
    with pytest.raises(PlanError, match="arguments or results that are no arrays"):
        static.export("jax")
    named = al.parallelize(step, **options).trace(w, x=x, rate=0.1).plan().last_plan
    with pytest.raises(PlanError, match="keyword arguments"):
        named.export("jax")
    # A function inside another one cannot be imported.
    local = al.parallelize(step, **options).trace(w, x, 0.1).plan().last_plan.export("jax")
    assert "_step" not in local.replace("train_step", "")
