"""Pipelines and gradient accumulation as modules of plain JAX: what `jax.jit` computes, in the order of the plan."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.errors import PlanError
from alpa_lite.export.degrees import programs_of
from alpa_lite.export.module_text import ranges
from alpa_lite.lower.plan_fits import as_planned
from alpa_lite.plan.instructions import InstructionKind
from alpa_lite.plan.program_builder import build_program
from alpa_lite.planners import FSDP, Hybrid
from tests.end_to_end.cases import TOLERANCE, relative_error

WIDTH, SAMPLES, LAYERS, WORDS, LENGTH = 32, 16, 4, 64, 8
CLUSTER = al.cluster("dgx-1")


def layers_step(params: Any, batch: Any) -> Any:
    """Layers one after the other, and the outputs of all samples."""

    def loss(params):
        x = batch["x"]
        for layer in params:
            x = x + jax.nn.gelu(x @ layer["up"]) @ layer["down"]
        return jnp.mean((x - batch["y"]) ** 2), x

    (value, x), grads = jax.value_and_grad(loss, has_aux=True)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), (value, x)


def language_step(state: Any, batch: Any) -> Any:
    """A mean over some tokens, dropout, shared embeddings, a penalty on weights, a clipped norm, and momentum."""
    params, momentum, key = state

    def loss(params):
        x = params["table"][batch["tokens"]]
        for layer in params["layers"]:
            x = x + jnp.tanh(x @ layer)
        x = x * jax.random.bernoulli(key, 0.9, x.shape)
        scores = jax.nn.log_softmax(x @ params["table"].T)
        rows, columns = jnp.arange(len(batch["tokens"]))[:, None], jnp.arange(LENGTH)
        each = -scores[rows, columns, batch["labels"]] * batch["mask"]
        penalty = 1e-2 * sum(jnp.sum(w**2) for w in jax.tree.leaves(params))
        return jnp.sum(each) / jnp.sum(batch["mask"]) + penalty

    value, grads = jax.value_and_grad(loss)(params)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
    grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, 0.5 / norm), grads)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum)
    return (params, momentum, jax.random.split(key)[0]), {
        "loss": value,
        "norm": norm,
        # Once more: what is hoisted out of the loop, and what is summed in it.
        "tokens": jnp.sum(batch["mask"]),
        # Counted from 1, which is added once and not for each micro-batch.
        "seen": jnp.ones(WORDS).at[batch["tokens"]].add(1.0),
    }


def looped_step(params: Any, batch: Any) -> Any:
    """A loop over layers."""

    def loss(params):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch["x"], params)
        return jnp.mean((x - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return params - 0.1 * grads, value


def dropout_step(state: Any, batch: Any) -> Any:
    """A loop whose trips, and loops in them, draw for each sample, count samples, and add a penalty on weights."""
    params, key = state

    def loss(params):
        def layer(carry, inputs):
            (x, penalty), (w, own) = carry, inputs
            x = jnp.tanh(x @ w) * jax.random.bernoulli(own, 0.8, x.shape)
            x, _ = jax.lax.scan(
                lambda x, n: (x + 0.1 * jax.random.normal(jax.random.fold_in(own, n), x.shape), None), x, jnp.arange(2)
            )
            each = x[jnp.arange(len(x)), batch["column"]] + 0.1 * jnp.arange(len(x))
            return (x + each[:, None], penalty + 1e-2 * jnp.sum(w**2)), jnp.mean(jnp.abs(x))

        (x, penalty), sizes = jax.lax.scan(layer, (batch["x"], 0.0), (params, jax.random.split(key, len(params))))
        return jnp.mean((x - batch["y"]) ** 2) + penalty, sizes

    (value, sizes), grads = jax.value_and_grad(loss, has_aux=True)(params)
    return (params - 0.01 * grads, jax.random.split(key)[0]), (value, sizes)


def branches_step(state: Any, batch: Any) -> Any:
    """Branches that draw for each sample or count samples, and loops without a known number of trips around them."""
    params, key = state

    def loss(params):
        def layer(carry, w):
            x, key = carry
            key, own = jax.random.split(key)
            x = jnp.tanh(x @ w)
            drawn = (lambda x: x * jax.random.bernoulli(own, 0.8, x.shape), lambda x: x + jnp.arange(len(x))[:, None])
            return (jax.lax.cond(jnp.sum(w) > 0, *drawn, x), key), None

        (x, _), _ = jax.lax.scan(layer, (batch["x"], key), params)
        return jnp.mean((x - batch["y"]) ** 2), x

    def noisy(carry):
        n, x = carry
        return n + 1, x + jax.random.normal(jax.random.fold_in(key, n), x.shape)

    def doublings(row):
        twice = jax.lax.while_loop(lambda c: jnp.sum(c[1]) < 4, lambda c: (c[0] + 1, 2 * c[1] + 0.1), (0, row**2))
        return twice[0]

    (value, x), grads = jax.value_and_grad(loss, has_aux=True)(params)
    noise = jax.lax.while_loop(lambda carry: carry[0] < 2 + (jnp.sum(params) > 9), noisy, (0, jnp.zeros_like(x)))[1]
    return (params - 0.01 * grads, jax.random.split(key)[0]), (value, noise, jax.vmap(doublings)(batch["x"]))


def _draw(*shape: int, scale: float = 0.1) -> np.ndarray:
    return (scale * np.random.default_rng(len(shape)).standard_normal(shape)).astype(np.float32)


def _layers() -> tuple[Any, ...]:
    params = [{"up": _draw(WIDTH, 2 * WIDTH), "down": _draw(2 * WIDTH, WIDTH)} for _ in range(LAYERS)]
    return layers_step, params, {"x": _draw(SAMPLES, WIDTH, scale=1.0), "y": _draw(SAMPLES, WIDTH, scale=0.5)}


def _language() -> tuple[Any, ...]:
    rng = np.random.default_rng(1)
    params = {"table": _draw(WORDS, WIDTH), "layers": [_draw(WIDTH, WIDTH) for _ in range(LAYERS)]}
    tokens, labels = (rng.integers(0, WORDS, (SAMPLES, LENGTH)).astype(np.int32) for _ in range(2))
    batch = {"tokens": tokens, "labels": labels, "mask": (rng.random((SAMPLES, LENGTH)) < 0.7).astype(np.float32)}
    return language_step, (params, jax.tree.map(np.zeros_like, params), jax.random.key(0)), batch


def _looped() -> tuple[Any, ...]:
    batch = {"x": _draw(SAMPLES, WIDTH), "y": _draw(SAMPLES, WIDTH, scale=0.5)}
    return looped_step, _draw(LAYERS, WIDTH, WIDTH), batch


def _with_columns() -> dict[str, np.ndarray]:
    columns = np.random.default_rng(2).integers(0, WIDTH, SAMPLES).astype(np.int32)
    return {**_looped()[2], "column": columns}


STEPS = {
    "layers": _layers,
    "language": _language,
    "looped": _looped,
    "dropout": lambda: (dropout_step, (_draw(LAYERS, WIDTH, WIDTH), jax.random.key(0)), _with_columns()),
    "branches": lambda: (branches_step, (_draw(LAYERS, WIDTH, WIDTH), jax.random.key(1)), _looped()[2]),
}


def _planned(step: str, planner: Any, num_microbatches: int, **options: Any) -> tuple[Any, Any, tuple[Any, ...]]:
    fun: Callable[..., Any]
    fun, *args = STEPS[step]()
    parallel = al.parallelize(fun, cluster=CLUSTER, planner=planner, num_microbatches=num_microbatches, **options)
    return parallel.trace(*args).plan(), fun, tuple(args)


def _module(text: str) -> Any:
    made = ModuleType("exported")
    exec(compile(text, "exported.py", "exec"), made.__dict__)
    return made


def _on_host(leaf: Any) -> np.ndarray:
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


@pytest.mark.parametrize(
    ("step", "planner", "num_microbatches"),
    [
        ("layers", Hybrid(pipeline=2, tensor=2, data=2, remat="full"), 2),
        ("language", Hybrid(pipeline=2, data=4), 4),
        ("looped", FSDP(), 2),
        ("dropout", FSDP(), 2),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("layers", Hybrid(pipeline=2, data=4, schedule=al.schedule.Interleaved1F1B(num_chunks=2)), 4),
                ("layers", Hybrid(pipeline=4, data=2, zero=1, schedule=al.schedule.ZeroBubbleH1()), 4),
                ("language", Hybrid(data=4, tensor=2, zero=3), 2),
                ("dropout", Hybrid(pipeline=2, data=4), 2),
                ("dropout", Hybrid(pipeline=4, data=2, remat="full"), 4),
                ("branches", FSDP(), 2),
                ("branches", Hybrid(pipeline=2, data=4, remat="full"), 2),
            )
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "name", value),
)
def test_an_exported_pipeline_computes_and_lies_as_planned(
    step: str, planner: Any, num_microbatches: int, devices: Any
) -> None:
    planned, fun, args = _planned(step, planner, num_microbatches)
    text = planned.last_plan.export("jax")
    assert "alpa_lite" not in text and f"from {__name__} import {fun.__name__} as _step" in text
    run, own = _module(text).parallel(fun, *args), planned.lower().compile()
    state, expected_state, own_state = args[0], args[0], args[0]
    # Twice: the state returns to where it came from.
    for _ in range(2):
        state, found = run(state, *args[1:])
        expected_state, expected = jax.jit(fun)(expected_state, *args[1:])
        own_state, ours = own(own_state, *args[1:])
        assert jax.tree.structure((state, found)) == jax.tree.structure((expected_state, expected))
        leaves = [jax.tree.leaves(each) for each in ((state, found), (expected_state, expected), (own_state, ours))]
        for got, wanted, mine in zip(*leaves, strict=True):
            assert got.sharding.is_equivalent_to(mine.sharding, got.ndim)
            assert relative_error(_on_host(got), _on_host(wanted)) < TOLERANCE


@pytest.mark.parametrize(("pipeline", "data", "num_microbatches"), [(4, 1, 4), (2, 4, 1)])
def test_equal_programs_give_equal_bits(pipeline: int, data: int, num_microbatches: int, devices: Any) -> None:
    """With one device for each stage, or one micro-batch, XLA sums as the plan's own programs do."""
    fun: Callable[..., Any]
    fun, *args = STEPS["layers"]()
    planner, cluster = Hybrid(pipeline=pipeline, data=data), CLUSTER.part(0, pipeline * data)
    parallel = al.parallelize(fun, cluster=cluster, planner=planner, num_microbatches=num_microbatches)
    planned = parallel.trace(*args).plan()
    found = _module(planned.last_plan.export("jax")).parallel(fun, *args)(*args)
    for got, ours in zip(jax.tree.leaves(found), jax.tree.leaves(planned.lower().compile()(*args)), strict=True):
        np.testing.assert_array_equal(got, ours)


@pytest.mark.parametrize("schedule", [al.schedule.GPipe(), al.schedule.OneFOneB(), al.schedule.ZeroBubbleH1()])
def test_tasks_are_launched_in_the_order_of_the_schedule(schedule: Any) -> None:
    planned, _, _ = _planned("layers", Hybrid(pipeline=2, data=4, schedule=schedule), 4)
    plan = planned.last_plan
    step = as_planned(programs_of(plan).with_equations(4, plan.loop_parts), plan).step
    program, made = build_program(plan, step), _module(plan.export("jax"))
    runs = [i for i in program.instructions if i.kind is InstructionKind.RUN]
    ordered = [(program.tasks[i.task].name, i.microbatch) for i in runs]
    assert [(made.TASKS[task].name, microbatch) for task, microbatch in made.ORDER] == ordered


def test_what_a_plan_computes_again_is_in_both_tasks() -> None:
    stored, again = (_planned("layers", Hybrid(pipeline=2, data=4, remat=remat), 4)[0] for remat in ("none", "full"))

    def shared(planned: Any) -> set[int]:
        made = _module(planned.last_plan.export("jax"))
        forward, backward = (
            {n for task in made.TASKS if task.name == name for n in made.numbers(task.equations)}
            for name in ("stage 0 forward", "stage 0 backward")
        )
        return forward & backward

    assert not shared(stored) and len(shared(again)) > 8
    assert "Not said here" not in again.last_plan.export("jax")
    fused = _planned("looped", Hybrid(data=8, remat="full"), 2)[0].last_plan
    assert not fused.recomputed or "Not said here: recomputation" in fused.export("jax")


def test_a_pipeline_needs_no_alpa_lite(tmp_path: Path, devices: Any) -> None:
    (tmp_path / "piped.py").write_text(
        "import jax, jax.numpy as jnp\n\n\ndef train_step(ws, x):\n    def loss(ws):\n        y = x\n"
        "        for w in ws:\n            y = jnp.tanh(y @ w)\n        return jnp.mean((y - x) ** 2)\n\n"
        "    value, grads = jax.value_and_grad(loss)(ws)\n"
        "    return [w - 0.1 * g for w, g in zip(ws, grads)], value\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        train_step: Callable[..., Any] = import_module("piped").train_step
    finally:
        sys.path.remove(str(tmp_path))
    args = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * 4, jax.ShapeDtypeStruct((SAMPLES, WIDTH), jnp.float32)
    planner = Hybrid(pipeline=2, data=4, zero=1)
    parallel = al.parallelize(train_step, cluster=CLUSTER, planner=planner, num_microbatches=4, donate_argnums=0)
    parallel.trace(*args).plan().last_plan.export("jax", tmp_path / "parallel_train.py")
    (tmp_path / "main.py").write_text(
        "import sys\nsys.modules['alpa_lite'] = sys.modules['cost_models'] = None\n"
        "import jax, numpy as np\nfrom parallel_train import parallel\nfrom piped import train_step\n"
        f"rng = np.random.default_rng(0)\nws = [rng.standard_normal(({WIDTH}, {WIDTH})).astype('f4') / 8] * 4\n"
        f"x = rng.standard_normal(({SAMPLES}, {WIDTH})).astype('f4')\n"
        "step, (expected, loss) = parallel(train_step, ws, x), jax.jit(train_step)(ws, x)\n"
        "first, found = step(ws, x)\nnp.testing.assert_allclose(found, loss, rtol=1e-5)\n"
        "jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), first, expected)\n"
        "assert [len(w.sharding.device_set) for w in first] == [4] * 4\n"
        "assert first[0].sharding.device_set.isdisjoint(first[3].sharding.device_set)\n"
        "second, _ = step(first, x)\nassert all(w.is_deleted() for w in first), 'ws are donated'\n"
        "jax.block_until_ready(second)\n"
        "for other in (lambda ws, x: train_step(ws, 2 * x), None):\n    try:\n"
        "        parallel(other, ws, x) if other else parallel(train_step, ws, x[:3])\n"
        "    except ValueError as error:\n        print(error)\n"
    )
    ran = subprocess.run([sys.executable, "main.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "traced to other equations" in ran.stdout and f"x is (3, {WIDTH}) instead of" in ran.stdout


def test_a_step_with_another_loop_is_refused() -> None:
    planned, _, (params, batch) = _planned("looped", FSDP(), 2)

    def other(params: Any, batch: Any) -> Any:
        def loss(params):
            x, _ = jax.lax.scan(lambda x, w: (jnp.sin(x @ w), None), batch["x"], params)
            return jnp.mean((x - batch["y"]) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return params - 0.1 * grads, value

    with pytest.raises(ValueError, match="traced to other equations"):
        _module(planned.last_plan.export("jax")).parallel(other, params, batch)


def test_what_a_loop_of_stage_functions_cannot_say_is_refused() -> None:
    refused = [
        ("layers", Hybrid(pipeline=2, data=4, schedule=al.schedule.PipeDream2BW()), {}, "several updates in a step"),
        ("language", Hybrid(pipeline=2, data=4, host_optimizer=True), {}, "memory of the host"),
    ]
    for step, planner, options, why in refused:
        planned, _, _ = _planned(step, planner, 4, **options)
        with pytest.raises(PlanError, match=why):
            planned.last_plan.export("jax")


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([3], "3"), ([1, 0, 2, 5], "0-2 5"), (range(4), "0-3"), ([7, 9], "7 9")]
)
def test_numbers_are_written_as_ranges_that_the_module_reads(numbers: Any, text: str) -> None:
    assert ranges(numbers) == text
    source = _planned("layers", Hybrid(data=8), 2)[0].last_plan.export("jax")
    assert _module(source).numbers(text) == sorted(numbers)
    assert re.search(r"^NUM_MICROBATCHES = 2$", source, re.MULTILINE)
