"""Exported pipelines whose stages have parts of a loop over layers: what `jax.jit` computes, lying as planned."""

from __future__ import annotations

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
from alpa_lite.planners import Hybrid
from tests.end_to_end.cases import TOLERANCE, relative_error
from tests.export.test_pipeline_jax import looped_step

WIDTH, SAMPLES, LENGTH, WORDS = 16, 16, 8, 32
CLUSTER = al.cluster("dgx-1")


def language_step(state: Any, batch: Any) -> Any:
    """Layers with a weight in common and a mask, results of each layer, shared embeddings, a clipped norm, momentum."""
    params, momentum = state

    def loss(params):
        mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))

        def layer(carry, weights):
            x, spread = carry
            scores = jnp.where(mask, jnp.einsum("bsd,btd->bst", x @ weights["q"], x), -1e9)
            x = x + jnp.einsum("bst,btd->bsd", jax.nn.softmax(scores), x) @ params["common"]
            x = x + jnp.tanh(x @ weights["up"]) * weights["scale"]
            return (x, spread + 1e-3 * jnp.mean(x**2)), jnp.mean(jnp.abs(weights["up"]))

        (x, spread), sizes = jax.lax.scan(layer, (params["table"][batch["tokens"]], 0.0), params["layers"])
        scores = jax.nn.log_softmax(x @ params["table"].T)
        each = jnp.take_along_axis(scores, batch["labels"][..., None], -1)
        return spread - jnp.mean(each), sizes

    (value, sizes), grads = jax.value_and_grad(loss, has_aux=True)(params)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
    grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, 0.5 / norm), grads)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum)
    of_layers = jnp.sum(grads["layers"]["up"] ** 2, axis=(1, 2))
    return (params, momentum), {"loss": value, "norm": norm, "sizes": sizes, "of layers": of_layers}


def two_loops_step(params: Any, batch: Any) -> Any:
    """A loop whose layers all read the result of another loop, of another length and in reverse."""

    def loss(params):
        first, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), batch["x"], params["first"], reverse=True)
        second, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh((x + first) @ w), None), batch["y"], params["second"])
        return jnp.mean((second - batch["x"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def read_by_row_step(params: Any, batch: Any) -> Any:
    """Layers that are written out and read their rows of stacked arrays."""

    def loss(params):
        x = batch["x"]
        for layer in range(4):
            x = x + jnp.tanh(x @ params["w"][layer] + params["b"][layer])
        return jnp.mean((x - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def _draw(*shape: int) -> np.ndarray:
    return (0.2 * np.random.default_rng(len(shape)).standard_normal(shape)).astype(np.float32)


def _pairs() -> dict[str, np.ndarray]:
    return {"x": _draw(SAMPLES, WIDTH), "y": 2 * _draw(SAMPLES, WIDTH)}


def _language() -> tuple[Any, ...]:
    layers = {"q": _draw(4, WIDTH, WIDTH), "up": 2 * _draw(4, WIDTH, WIDTH), "scale": _draw(4, WIDTH)}
    params = {"table": _draw(WORDS, WIDTH), "common": _draw(WIDTH, WIDTH), "layers": layers}
    words = np.random.default_rng(0).integers(0, WORDS, (2, SAMPLES, LENGTH)).astype(np.int32)
    return language_step, (params, jax.tree.map(np.zeros_like, params)), {"tokens": words[0], "labels": words[1]}


STEPS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "plain": lambda: (looped_step, _draw(4, WIDTH, WIDTH), _pairs()),
    "six layers": lambda: (looped_step, _draw(6, WIDTH, WIDTH), _pairs()),
    "language": _language,
    "two loops": lambda: (
        two_loops_step,
        {"first": _draw(4, WIDTH, WIDTH), "second": _draw(6, WIDTH, WIDTH)},
        _pairs(),
    ),
    "read by row": lambda: (read_by_row_step, {"w": _draw(4, WIDTH, WIDTH), "b": _draw(4, WIDTH)}, _pairs()),
}


def _planned(step: str, planner: Any, num_microbatches: int, **options: Any) -> tuple[Any, Any, tuple[Any, ...]]:
    fun, *args = STEPS[step]()
    options = {"cluster": CLUSTER, **options}
    parallel: Any = al.parallelize(fun, planner=planner, num_microbatches=num_microbatches, **options)
    return parallel.trace(*args).plan(), fun, tuple(args)


def _module(text: str) -> Any:
    made = ModuleType("exported")
    exec(compile(text, "exported.py", "exec"), made.__dict__)
    return made


SCHEDULES = al.schedule.GPipe(), al.schedule.Interleaved1F1B(num_chunks=2), al.schedule.ZeroBubbleH1()


@pytest.mark.parametrize(
    ("step", "planner", "num_microbatches"),
    [
        ("language", Hybrid(pipeline=2, data=4), 2),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("language", Hybrid(pipeline=4, tensor=2, zero=1), 1),
                ("language", Hybrid(pipeline=2, data=4, remat="full"), 4),
                *(("language", Hybrid(pipeline=2, tensor=2, data=2, schedule=each), 4) for each in SCHEDULES),
                # Stages of one and two layers: the rows lie in equal blocks between steps.
                ("six layers", Hybrid(pipeline=4, data=2), 2),
                ("two loops", Hybrid(pipeline=2, data=4, zero=1), 2),
                ("read by row", Hybrid(pipeline=2, data=4), 2),
            )
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "name", value),
)
def test_stages_run_their_trips_and_hold_their_rows(
    step: str, planner: Any, num_microbatches: int, devices: Any
) -> None:
    planned, fun, args = _planned(step, planner, num_microbatches)
    text = planned.last_plan.export("jax")
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
            assert relative_error(np.asarray(got), np.asarray(wanted)) < TOLERANCE


@pytest.mark.parametrize("num_microbatches", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_stages_of_one_device_give_equal_bits(num_microbatches: int, devices: Any) -> None:
    cluster = CLUSTER.part(0, 2)
    planned, fun, args = _planned("plain", Hybrid(pipeline=2), num_microbatches, cluster=cluster)
    found = _module(planned.last_plan.export("jax")).parallel(fun, *args)(*args)
    for got, ours in zip(found, planned.lower().compile()(*args), strict=True):
        np.testing.assert_array_equal(got, ours)


def test_tasks_have_the_loops_of_their_stage() -> None:
    """Two loops of half the trips each in both passes, and the update of a stage on its rows alone."""
    made = _module(_planned("plain", Hybrid(pipeline=2, data=4), 2)[0].last_plan.export("jax"))
    fun, *args = STEPS["plain"]()
    program = made.trace(fun, args)
    lengths, rows = dict[str, list[int]](), dict[str, set[int]]()
    for task in made.TASKS:
        equations = [program.equations[e] for e in made.numbers(task.equations)]
        lengths[task.name] = [eqn.params["length"] for eqn in equations if eqn.primitive.name == "scan"]
        shapes = [program.avals[v].shape for eqn in equations for v in eqn.results]
        rows[task.name] = {shape[0] for shape in shapes if shape[1:] == (WIDTH, WIDTH)}
    assert lengths == {
        "stage 0 forward": [2],
        "stage 1 forward+backward": [2, 2],
        "stage 0 backward": [2],
        "stage 0 update": [],
        "stage 1 update": [],
    }
    assert rows["stage 0 update"] == rows["stage 1 update"] == {2}


def test_a_loop_that_the_plan_recomputes_runs_again_in_the_backward_pass() -> None:
    def shared(remat: Any) -> int:
        plan = _planned("plain", Hybrid(pipeline=2, data=4, remat=remat), 2)[0].last_plan
        made = _module(plan.export("jax"))
        tasks = {task.name: set(made.numbers(task.equations)) for task in made.TASKS}
        return len(tasks["stage 0 forward"] & tasks["stage 0 backward"])

    assert (shared("none"), shared("full")) == (0, 1)


@pytest.mark.slow
def test_parts_of_loops_need_no_alpa_lite(tmp_path: Path, devices: Any) -> None:
    (tmp_path / "scanned.py").write_text(
        "import jax, jax.numpy as jnp\n\n\ndef train_step(ws, x):\n    def loss(ws):\n"
        "        y, _ = jax.lax.scan(lambda y, w: (jnp.tanh(y @ w), None), x, ws)\n"
        "        return jnp.mean((y - x) ** 2)\n\n"
        "    value, grads = jax.value_and_grad(loss)(ws)\n    return ws - 0.1 * grads, value\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        train_step: Callable[..., Any] = import_module("scanned").train_step
    finally:
        sys.path.remove(str(tmp_path))
    args = jax.ShapeDtypeStruct((4, WIDTH, WIDTH), jnp.float32), jax.ShapeDtypeStruct((SAMPLES, WIDTH), jnp.float32)
    planner = Hybrid(pipeline=2, data=4, zero=1)
    parallel = al.parallelize(train_step, cluster=CLUSTER, planner=planner, num_microbatches=4, donate_argnums=0)
    parallel.trace(*args).plan().last_plan.export("jax", tmp_path / "parallel_scanned.py")
    (tmp_path / "main.py").write_text(
        "import sys\nsys.modules['alpa_lite'] = sys.modules['cost_models'] = None\n"
        "import jax, numpy as np\nfrom parallel_scanned import parallel\nfrom scanned import train_step\n"
        f"rng = np.random.default_rng(0)\nws = rng.standard_normal((4, {WIDTH}, {WIDTH})).astype('f4') / 8\n"
        f"x = rng.standard_normal(({SAMPLES}, {WIDTH})).astype('f4')\n"
        "step, (expected, loss) = parallel(train_step, ws, x), jax.jit(train_step)(ws, x)\n"
        "first, found = step(ws, x)\nnp.testing.assert_allclose(found, loss, rtol=1e-5)\n"
        "np.testing.assert_allclose(first, expected, rtol=1e-4, atol=1e-6)\n"
        "rows = {shard.device.id // 4: shard.index[0] for shard in first.addressable_shards}\n"
        "assert rows == {0: slice(0, 2), 1: slice(2, 4)}, rows\n"
        "second, _ = step(first, x)\nassert first.is_deleted(), 'ws are donated'\n"
        "jax.block_until_ready(second)\n"
    )
    ran = subprocess.run([sys.executable, "main.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
