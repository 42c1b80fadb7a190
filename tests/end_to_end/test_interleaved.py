"""Interleaved pipelines: devices that run several stages compute what `jax.jit` computes, as it was planned."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.planners import Hybrid
from alpa_lite.schedule import (
    DualPipeV,
    Interleaved1F1B,
    OneFOneB,
    Schedule,
    Synthesised,
    Wave,
    ZeroBubbleH2,
    ZeroBubbleV,
)
from tests.end_to_end.cases import MODELS, Training, assert_same, eager_cluster, make_batch, reference
from tests.end_to_end.collectives import emitted, handed_over, planned

pytestmark = pytest.mark.usefixtures("compiled_afresh")


def _interleaved(pipeline: int, chunks: int, **options: Any) -> Hybrid:
    return Hybrid(pipeline=pipeline, schedule=Interleaved1F1B(num_chunks=chunks), **options)


@cache
def _compiled(training: Training, planner: Hybrid, num_microbatches: int) -> Any:
    step = al.parallelize(
        training.step(),
        cluster=eager_cluster(),
        planner=planner,
        num_microbatches=num_microbatches,
        donate_argnums=0,
    )
    args = training.start(), make_batch(MODELS[training.model], 0), jax.random.key(0)
    return step.compiled(*args)


CASES = [
    ("gpt", 2, 2, 2, "momentum+clip"),
    ("mlp", 4, 2, 4, "momentum+clip"),
    ("mlp", 2, 1, 4, "momentum"),
    ("mlp", 1, 3, 2, "adamw+clip"),
]
SLOW = [
    ("gpt", 4, 2, 8, "momentum"),
    ("gpt_scan", 2, 2, 4, "momentum+clip"),
    ("gpt", 2, 2, 4, "momentum"),
    ("gpt", 4, 2, 4, "momentum+clip"),
    ("gpt", 1, 3, 2, "momentum+clip"),
    ("gpt_untied", 2, 3, 4, "momentum+clip"),
    ("gpt_remat", 2, 2, 2, "momentum"),
    ("cnn", 2, 2, 4, "momentum+clip"),
    ("mlp", 4, 2, 8, "momentum"),
]


@pytest.mark.parametrize(
    "case",
    [*CASES, *(pytest.param(case, marks=pytest.mark.long) for case in SLOW)],
    ids=lambda case: "-".join(map(str, case)),
)
def test_five_steps_give_the_same_loss_gradients_and_state(case: tuple[str, int, int, int, str], devices: Any) -> None:
    model, pipeline, chunks, num_microbatches, optimizer = case
    training = Training(model=model, optimizer=optimizer)
    compiled = _compiled(training, _interleaved(pipeline, chunks), num_microbatches)
    assert len(compiled.plan.stages) == pipeline * chunks
    assert_same(training.run(compiled), reference(training))


@pytest.mark.parametrize(
    ("schedule", "model", "pipeline", "num_microbatches"),
    [
        (ZeroBubbleV(), "mlp", 2, 4),
        (Wave(num_waves=2), "mlp", 2, 2),
        pytest.param(ZeroBubbleV(), "gpt", 2, 4, marks=pytest.mark.slow),
        pytest.param(ZeroBubbleV(memory=0.5), "mlp", 4, 4, marks=pytest.mark.long),
        pytest.param(DualPipeV(), "gpt", 2, 4, marks=pytest.mark.long),
        pytest.param(DualPipeV(), "mlp", 4, 8, marks=pytest.mark.long),
        pytest.param(Wave(), "gpt", 2, 4, marks=pytest.mark.long),
        pytest.param(ZeroBubbleH2(), "gpt", 4, 4, marks=pytest.mark.long),
        pytest.param(Synthesised(forward=(1.0, 2.0), backward=(3.0, 1.0)), "mlp", 2, 4, marks=pytest.mark.slow),
        pytest.param(Synthesised(processors=(0, 1, 1, 0)), "gpt", 2, 4, marks=pytest.mark.long),
    ],
    ids=lambda value: str(value),
)
def test_stages_that_go_back_and_forth_compute_the_same(
    schedule: Schedule, model: str, pipeline: int, num_microbatches: int, devices: Any
) -> None:
    training = Training(model=model, optimizer="momentum+clip")
    compiled = _compiled(training, Hybrid(pipeline=pipeline, schedule=schedule), num_microbatches)
    plan, count = compiled.plan, pipeline * schedule.stages_per_processor
    homes = [schedule.processor_of(stage, count) for stage in range(count)]
    assert [stage.submesh.devices[0] * pipeline // 8 for stage in plan.stages] == homes
    assert_same(training.run(compiled), reference(training))
    assert al.Plan.from_json(plan.to_json()) == plan


def test_stages_run_on_the_devices_that_the_schedule_deals_them(devices: Any) -> None:
    compiled = _compiled(Training(model="mlp", optimizer="momentum+clip"), _interleaved(4, 2), 4)
    plan, meshes = compiled.plan, compiled.executor.meshes
    assert plan.stages_together == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert [stage.submesh.devices for stage in plan.stages] == 2 * [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert [set(mesh.devices.flat) for mesh in meshes[:4]] == [set(mesh.devices.flat) for mesh in meshes[4:]]
    ran = [
        (compiled.executor.program.tasks[i.task].stage, i.microbatch)
        for i in compiled.executor.program.instructions
        if i.kind == "RUN" and compiled.executor.program.tasks[i.task].kind == "forward" and i.stage % 4 == 0
    ]
    assert ran == [(stage, b) for stage in (0, 4) for b in range(4)]


@pytest.mark.parametrize("model", ["mlp", pytest.param("gpt", marks=pytest.mark.long)])
def test_the_collectives_that_run_are_those_of_the_plan(model: str, devices: Any) -> None:
    compiled = _compiled(Training(model=model, optimizer="momentum+clip"), _interleaved(2, 2, tensor=2), 4)
    assert handed_over(compiled) == emitted(compiled) == planned(compiled.plan)


def test_each_chunk_has_its_own_transfers(devices: Any) -> None:
    """A chain of p stages sends p-1 activations ahead per micro-batch and as many back; of p·v stages, p·v-1."""
    training, sent = Training(model="mlp"), list[int]()
    for planner in (Hybrid(pipeline=2, schedule=OneFOneB()), _interleaved(2, 2)):
        instructions = _compiled(training, planner, 4).executor.program.instructions
        sent.append(sum(i.kind == "SEND" and i.microbatch is not None for i in instructions))
    assert sent == [2 * 4 * 1, 2 * 4 * 3]


@pytest.mark.parametrize(("pipeline", "chunks"), [(1, 2), (2, 2), (4, 2)])
@pytest.mark.parametrize("rounds", [1, 2])
def test_weights_of_several_stages(pipeline: int, chunks: int, rounds: int, devices: Any) -> None:
    """The first and the last stage read `tied` and `w0`, the update of `last` reads `w0` too: where these are on the
    same devices, the update of the first must not give it away."""
    rng = np.random.default_rng(0)
    sizes = {"tied": (16, 16), **{f"w{i}": (16, 16) for i in range(6)}, "last": (16, 32)}
    weights = {name: np.asarray(rng.normal(size=size) * 0.3, np.float32) for name, size in sizes.items()}
    x = np.asarray(rng.normal(size=(32, 16)), np.float32)

    def step(weights: Any, x: Any) -> Any:
        def loss(weights: Any) -> Any:
            h = jnp.tanh(x @ weights["tied"])
            for i in range(6):
                h = jnp.tanh(h @ weights[f"w{i}"])
            h = h @ weights["tied"].T + h @ jax.lax.stop_gradient(weights["w0"])
            return jnp.mean((jnp.tanh(h) @ weights["last"]) ** 2)

        value, grads = jax.value_and_grad(loss)(weights)
        new = jax.tree.map(lambda w, g: w - g, weights, grads)
        return {**new, "last": new["last"] - 0.01 * weights["w0"] @ weights["last"]}, value, grads

    compiled = al.parallelize(
        step,
        cluster=eager_cluster(),
        planner=_interleaved(pipeline, chunks),
        num_microbatches=2 if pipeline == 1 else rounds * pipeline,
        donate_argnums=0,
    ).compiled(weights, x)
    got, want = weights, weights
    for _ in range(3):
        got, *results = compiled(got, x)
        want, *wanted = jax.jit(step)(want, x)
        assert_same((got, results), (want, wanted))


def test_loops_that_are_even_pieces_run_as_they_are(devices: Any) -> None:
    """Four loops over layers on four stages of two groups of devices: none is written out."""
    rng = np.random.default_rng(0)
    weights = [np.asarray(rng.normal(size=(2, 16, 16)) * 0.2, np.float32) for _ in range(4)]
    x = np.asarray(rng.normal(size=(32, 16)), np.float32)

    def step(weights: Any, x: Any) -> Any:
        def loss(weights: Any) -> Any:
            h = x
            for stack in weights:
                h, _ = jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), h, stack)
            return jnp.mean(h**2)

        value, grads = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - g, weights, grads), value, grads

    parallel = al.parallelize(step, cluster=eager_cluster(), planner=_interleaved(2, 2), num_microbatches=4)
    assert_same(parallel(weights, x), jax.jit(step)(weights, x))
    assert parallel.last_plan.loop_parts == 0 and parallel.last_plan.stages_together == ((0, 2), (1, 3))
