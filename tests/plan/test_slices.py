"""Tasks of stages: whatever one reads of another stage was handed on by an earlier task."""

from __future__ import annotations

import random
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import alpa_lite as al
from alpa_lite.plan.op_places import TaskLayout
from alpa_lite.plan.parts import TaskRole
from alpa_lite.plan.slices import Slicer

LAYERS = 4


def _step(state: dict[str, Any], x: Any) -> Any:
    """Scalars that all layers and updates read, some of them as arrays of one element."""

    def loss(state: dict[str, Any]) -> Any:
        h = x
        for w in state["layers"]:
            h = jnp.tanh(h @ w)
        return jnp.mean((h + state["shift"][0]) ** 2)

    value, grads = jax.value_and_grad(loss)(state)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
    damped = jnp.reshape(grads["shift"], ()) / (1.0 + jnp.reshape(norm, (1,)))
    return jax.tree.map(lambda w, g: w - 0.1 * damped * g, state, grads), value


@pytest.mark.parametrize("seed", range(20))
def test_what_a_task_reads_of_another_stage_was_handed_on(seed: int) -> None:
    state = {"layers": [jnp.ones((8, 8))] * LAYERS, "shift": jnp.zeros((1,))}
    step = al.parallelize(_step).trace(state, jnp.ones((4, 8))).step(2).step
    draw = random.Random(seed)
    # The loop runs forth and back over the border; an update may be on any stage.
    forward = [op for op, phase in enumerate(step.phases) if phase.value == "forward"]
    first = {*forward[: draw.randrange(1, len(forward))]}
    producers = step.graph.producer
    stage_of_op: list[int | None] = []
    for op, phase in enumerate(step.phases):
        if phase.value == "invariant":
            stage_of_op.append(None)
        elif phase.value == "forward":
            stage_of_op.append(0 if op in first else 1)
        elif phase.value == "backward":
            # A backward op that reads a result of another one on stage 0 comes after it there.
            before = [producers[v] for v in step.graph.ops[op].operands]
            read = {stage_of_op[p] for p in before if p is not None and step.phases[p].value == "backward"}
            stage_of_op.append(0 if 0 in read else draw.randrange(2))
        else:
            stage_of_op.append(draw.randrange(2))
    homes = {v: draw.randrange(2) for v in step.graph.inputs}
    layout = TaskLayout(
        stage_of_op=stage_of_op, stage_of_input=homes, whole=False, fused=frozenset(), in_two=frozenset()
    )
    slicer = Slicer(layout, step)
    handed_on = set[tuple[int, bool]]()
    for outline in slicer.outlines():
        place = outline.place
        is_update = place.kind is TaskRole.UPDATE
        for v, _ in outline.inputs:
            origin = slicer.place_of_value(v)
            if origin is not None and origin.stage != place.stage:
                # A sum of the loop is an accumulator: an update of another stage reads what an update made of it.
                resolved = is_update and slicer.is_sum(v)
                assert (v, resolved) in handed_on, f"{place} reads %{v} of stage {origin.stage}"
        handed_on.update((v, is_update and slicer.is_sum(v)) for v, _ in outline.outputs)
