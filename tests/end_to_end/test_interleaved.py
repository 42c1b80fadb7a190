"""Interleaved pipelines: devices that run several stages compute what `jax.jit` computes, as it was planned."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import pytest

import alpa_lite as al
from alpa_lite.planners import Hybrid
from alpa_lite.schedule import Interleaved1F1B, OneFOneB
from tests.end_to_end.cases import MODELS, Training, assert_same, eager_cluster, make_batch, reference
from tests.end_to_end.collectives import emitted, handed_over, planned


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
    ("gpt", 2, 2, 4, "momentum"),
    ("gpt", 4, 2, 4, "momentum+clip"),
    ("gpt", 4, 2, 8, "momentum"),
    ("gpt_untied", 2, 3, 4, "momentum+clip"),
    ("gpt_scan", 2, 2, 4, "momentum+clip"),
    ("gpt_remat", 2, 2, 2, "momentum"),
    ("mlp", 4, 2, 8, "momentum"),
    ("mlp", 2, 1, 4, "momentum"),
    # Stages on the same devices one after the other: what is sent stays where it is, and must not be given away.
    ("gpt", 1, 3, 2, "momentum+clip"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_five_steps_give_the_same_loss_gradients_and_state(case: tuple[str, int, int, int, str], devices: Any) -> None:
    model, pipeline, chunks, num_microbatches, optimizer = case
    training = Training(model=model, optimizer=optimizer)
    compiled = _compiled(training, _interleaved(pipeline, chunks), num_microbatches)
    assert len(compiled.plan.stages) == pipeline * chunks
    assert_same(training.run(compiled), reference(training))


def test_stages_run_on_the_devices_that_the_schedule_deals_them(devices: Any) -> None:
    compiled = _compiled(Training(model="gpt", optimizer="momentum+clip"), _interleaved(4, 2), 4)
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


@pytest.mark.parametrize(("model", "num_microbatches"), [("mlp", 4), ("gpt", 4)])
def test_the_collectives_that_run_are_those_of_the_plan(model: str, num_microbatches: int, devices: Any) -> None:
    training = Training(model=model, optimizer="momentum+clip")
    compiled = _compiled(training, _interleaved(2, 2, model=2), num_microbatches)
    assert handed_over(compiled) == emitted(compiled) == planned(compiled.plan)


def test_each_chunk_has_its_own_transfers(devices: Any) -> None:
    """A chain of p stages sends p-1 activations ahead per micro-batch and as many back; of p·v stages, p·v-1."""
    training, sent = Training(model="mlp"), list[int]()
    for planner in (Hybrid(pipeline=2, schedule=OneFOneB()), _interleaved(2, 2)):
        instructions = _compiled(training, planner, 4).executor.program.instructions
        sent.append(sum(i.kind == "SEND" and i.microbatch is not None for i in instructions))
    assert sent == [2 * 4 * 1, 2 * 4 * 3]
