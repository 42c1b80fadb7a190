"""Sums that wait: gradients that a loop over layers stacks up are reduced once per step, whatever else it repeats."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import jax
import pytest

import alpa_lite as al
from alpa_lite.planners import DataParallel, Hybrid
from tests.end_to_end.transformers import WIDE, Training, plan, traced

MICROBATCHES = 4
TRAINING = Training(model=WIDE, batch_size=64)
MASKED = Training(model=replace(WIDE, dropout=0.1), batch_size=64)


def parameter_bytes(training: Training, stage: Any) -> list[float]:
    """Per parameter the bytes of its gradient on one device of a stage."""
    sizes, found = stage.mesh_shape.axis_sizes, list[float]()
    for path, leaf in jax.tree_util.tree_leaves_with_path(training.shapes()[0].params):
        name = "state/params/" + "/".join(str(getattr(k, "key", getattr(k, "idx", ""))) for k in path)
        split = {a for dim in stage.specs[name].dims for a in dim}
        found.append(4.0 * leaf.size / prod(sizes[a] for a in split))
    return found


def test_data_parallel_gradients_of_a_loop_are_reduced_once_per_step() -> None:
    found = plan(TRAINING, DataParallel(), num_microbatches=MICROBATCHES)
    (stage,), uses = found.stages, found.prediction.collectives
    assert {(use.kind, use.phase, use.count) for use in uses} == {("all_reduce", "update", 1)}
    loss = 4.0
    assert sorted(use.bytes for use in uses) == sorted([loss, *parameter_bytes(TRAINING, stage)])


def test_gradients_of_a_loop_wait_beside_tensor_parallelism() -> None:
    """What is for "data" runs once per step, what layers exchange over "model" once per trip and micro-batch."""
    found = plan(TRAINING, Hybrid(tensor=2), num_microbatches=MICROBATCHES)
    (stage,), uses = found.stages, found.prediction.collectives
    assert stage.mesh_shape.axis_sizes == {"data": 4, "model": 2}
    over_data = [use for use in uses if "data" in use.axis]
    assert {(use.phase, use.count) for use in over_data} == {("update", 1)}
    reduced = [use for use in over_data if use.kind != "all_gather"]
    assert len(reduced) == len(parameter_bytes(TRAINING, stage)) + 1, "every parameter and the loss"
    layers = {use.count for use in uses if use.axis == "model" and use.phase != "update"}
    assert MICROBATCHES * WIDE.num_layers in layers


def test_the_first_micro_batch_costs_no_other_reductions() -> None:
    once, often = (plan(TRAINING, DataParallel(), num_microbatches=m).prediction.collectives for m in (1, MICROBATCHES))
    assert sorted((u.kind, u.bytes, u.count) for u in once) == sorted((u.kind, u.bytes, u.count) for u in often)


# --- free values that a loop stacks up --------------------------------------------------------------------------------


def masks(training: Training, found: al.Plan) -> list[tuple[tuple[int, ...], Any]]:
    """Shape and spec of the dropout masks that a loop hands to the backward pass."""
    graph = traced(training).step(found.num_microbatches, loop_parts=found.loop_parts).step.graph
    stage = found.stages[0]
    return [
        (graph.values[v].shape, spec)
        for op in graph.ops
        if op.primitive == "scan" and op.id in stage.ops
        for v, spec in zip(op.results, stage.ops[op.id].results, strict=True)
        if graph.values[v].dtype == "bool" and graph.values[v].rank > 2
    ]


@pytest.mark.parametrize(("planner", "axes"), [(DataParallel(), {"data"}), (Hybrid(tensor=2), {"data"})])
def test_stacked_masks_are_made_in_parts(planner: Any, axes: set[str]) -> None:
    """Every device could make all of each mask, out of a key: it makes and keeps what belongs to its samples."""
    found = plan(MASKED, planner)
    stacked = masks(MASKED, found)
    assert {len(shape) for shape, _ in stacked} >= {4}, "those of branches, [layers, batch, positions, features]"
    for shape, spec in stacked:
        assert shape[0] == WIDE.num_layers and axes <= spec.axes, (shape, str(spec))


def test_stacked_masks_are_not_communicated() -> None:
    with_masks, without = (plan(t, DataParallel()).prediction.collectives for t in (MASKED, TRAINING))
    assert sum(u.bytes * u.count for u in with_masks) == sum(u.bytes * u.count for u in without)
