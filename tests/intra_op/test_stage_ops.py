"""What follows from the ops of a stage alone is shared by all views of these ops, and says what it says of each."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import alpa_lite as al
from alpa_lite.intra_op.formulate import Builders
from alpa_lite.intra_op.liveness import lives_of
from alpa_lite.intra_op.stage import GivenLayout, StageView
from alpa_lite.intra_op.stage_ops import stage_ops
from alpa_lite.intra_op.strategies import FREE_CHOICE
from alpa_lite.intra_op.strategy_catalogue import Catalogue
from alpa_lite.plan.op_places import TaskLayout
from alpa_lite.plan.pricing import Pricer
from alpa_lite.plan.slices import Slicer, slicer_of
from alpa_lite.program.phases import StepGraph
from alpa_lite.sharding.meshes import LogicalMesh, Submesh
from alpa_lite.sharding.specs import replicated
from alpa_lite.step.clustering import make_layers
from alpa_lite.step.layers import Layers
from cost_models.composed import ComposedCostModel

NUM_LAYERS = 4


def train_step(weights: Any, x: Any) -> Any:
    def loss(weights: Any) -> Any:
        y = x
        for w in weights:
            y = jnp.tanh(y @ w)
        return jnp.mean(y**2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))


@pytest.fixture(scope="module")
def step() -> StepGraph:
    weights = [jax.ShapeDtypeStruct((8, 8), jnp.float32)] * NUM_LAYERS
    return al.parallelize(train_step).trace(weights, jax.ShapeDtypeStruct((16, 8), jnp.float32)).step(2).step


@pytest.fixture(scope="module")
def layers(step: StepGraph) -> Layers:
    return make_layers(step, NUM_LAYERS)


def view_of(step: StepGraph, layers: Layers, first: int, last: int) -> StageView:
    return StageView(step=step, layers=layers, first=first, last=last)


def test_layers_that_hold_the_same_ops_have_the_same_stages(step: StepGraph, layers: Layers) -> None:
    one = make_layers(step, 1)
    assert stage_ops(step, layers, 0, NUM_LAYERS - 1) is stage_ops(step, one, 0, 0)
    # Two layers as one, between others.
    merged = replace(
        layers,
        num_layers=3,
        of_op=tuple(None if layer is None else (0, 1, 1, 2)[layer] for layer in layers.of_op),
        of_input=tuple((0, 1, 1, 2)[layer] for layer in layers.of_input),
    )
    assert stage_ops(step, layers, 1, 2) is stage_ops(step, merged, 1, 1)
    assert lives_of(view_of(step, layers, 1, 2)) is lives_of(view_of(step, merged, 1, 1))


def test_every_op_and_input_belongs_to_one_of_the_stages(step: StepGraph, layers: Layers) -> None:
    stages = [stage_ops(step, layers, i, i) for i in range(NUM_LAYERS)]
    of_op = [sum(stage.stage_of_op[op] == stage.own for stage in stages) for op in range(len(step.graph.ops))]
    assert of_op == [int(layer is not None) for layer in layers.of_op]
    assert all([stage.lives_here(v) for stage in stages].count(True) == 1 for v in step.graph.inputs)
    assert [(stage.own, stage.is_last, stage.is_whole) for stage in stages] == [
        (0, False, False),
        *[(1, False, False)] * (NUM_LAYERS - 2),
        (1, True, False),
    ]
    assert stage_ops(step, layers, 0, NUM_LAYERS - 1).is_whole


def test_equal_stages_are_told_from_others_by_their_signatures(step: StepGraph, layers: Layers) -> None:
    inner = [view_of(step, layers, i, i) for i in (1, 2)]
    assert inner[0].part is not inner[1].part
    assert inner[0].signature == inner[1].signature
    assert inner[0].signature != view_of(step, layers, 3, 3).signature
    weight = next(v for v in inner[0].external if step.graph.producer[v] is None)
    pinned = replace(inner[0], pins={weight: replicated(2)})
    assert pinned.part is inner[0].part
    assert pinned.signature != inner[0].signature
    # A prescribed output numbers the values of its own view alone.
    prescribed = replace(inner[0], outputs={step.graph.outputs[-1]: replicated(2)})
    assert prescribed.signature not in (inner[0].signature, pinned.signature)
    assert inner[0].signature == view_of(step, layers, 1, 1).signature


def test_a_stage_is_laid_out_once_for_equal_constraints(step: StepGraph, layers: Layers) -> None:
    pricer = Pricer(
        cost_model=ComposedCostModel(al.cluster("p3.16xlarge")),
        submesh=Submesh(first_device=0, num_hosts=1, devices_per_host=2),
        mesh=LogicalMesh(axis_names=("x",), shape=(2,)),
    )
    builders, view = Builders(Catalogue(pricer, FREE_CHOICE)), view_of(step, layers, 1, 2)
    builder = builders.of(view)
    assert builders.of(view_of(step, layers, 1, 2)) is builder
    weight = next(v for v in view.external if step.graph.producer[v] is None)
    others = [
        view_of(step, layers, 1, 1),
        replace(view, pins={weight: replicated(2)}),
        replace(view, outputs={step.graph.outputs[0]: replicated(2)}),
        replace(view, keeps_gathered=True),
        replace(view, layout=GivenLayout()),
    ]
    for other in others:
        assert builders.of(other) is not builder
        assert builders.of(view) is builder


def test_other_processes_get_the_ops_without_what_follows_from_them(step: StepGraph, layers: Layers) -> None:
    stage = stage_ops(step, layers, 1, 2)
    assert stage.signature
    assert lives_of(view_of(step, layers, 1, 2)).lives
    copied = pickle.loads(pickle.dumps(stage))
    assert sorted(vars(copied)) == ["is_last", "own", "stage_of_input", "stage_of_op", "step"]
    assert (copied.ops, copied.external, copied.crossing) == (stage.ops, stage.external, stage.crossing)


def every_view(step: StepGraph, layers: Layers) -> list[StageView]:
    ranges = [(first, last) for first in range(NUM_LAYERS) for last in range(first, NUM_LAYERS)]
    views = [view_of(step, layers, first, last) for first, last in ranges]
    pinned = replace(views[0], pins={views[0].external[0]: replicated(2)})
    # The same ops once more, in other objects.
    return [*views, pinned, view_of(step, layers, 0, 0)]


def test_views_of_equal_signature_have_equal_size(step: StepGraph, layers: Layers) -> None:
    views = every_view(step, layers)
    pairs = [(one, other) for one in views for other in views if one.signature == other.signature]
    assert len(pairs) > len(views)
    assert all(one.size == other.size for one, other in pairs)


@pytest.mark.parametrize("in_two", [False, True])
def test_a_stage_of_all_layers_has_the_tasks_of_the_step(step: StepGraph, layers: Layers, in_two: bool) -> None:
    part = view_of(step, layers, 0, NUM_LAYERS - 1).part
    layout = TaskLayout(
        stage_of_op=part.stage_of_op,
        stage_of_input=dict(zip(step.graph.inputs, part.stage_of_input, strict=True)),
        whole=False,
        fused=frozenset([0]),
        in_two=frozenset([0] if in_two else []),
    )
    shared = slicer_of(step, layout)
    assert shared is slicer_of(step, replace(layout, stage_of_input=dict(layout.stage_of_input)))
    others: list[dict[str, Any]] = [{"fused": frozenset()}, {"served": True}, {"stage_of_input": {}}]
    assert all(slicer_of(step, replace(layout, **other)) is not shared for other in others)
    # With the ops that its tasks can need alone it makes the same tasks.
    assert shared.outlines(0) == Slicer(layout, step, part.ops).outlines(0)
