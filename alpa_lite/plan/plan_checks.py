"""Check that a plan from a file is consistent in itself, so that lowering can rely on it for any step.

    stages      follow each other without gaps; submeshes lie in the cluster and match the devices of their meshes
    layers      of ops, inputs and recomputed layers exist
    specs       use axes of their stage's mesh, each once
    prediction  refers to existing stages, with numbers that times and sizes can have

Whether the plan fits the ops of a given step is checked by `lower.fits`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from itertools import chain
from math import prod
from typing import Any

from alpa_lite.errors import PlanError
from alpa_lite.plan.parts import OpPlacement, StagePlan
from alpa_lite.schedule.tasks import MOST_MICROBATCHES
from alpa_lite.sharding.specs import Spec

_MOST_PARTS = 2**16
_MOST_DIMS = 64
_MOST_ELEMENTS = 2**48
_DTYPE = re.compile(r"[a-z][a-z0-9_]{0,20}|key<\w{1,20}>")
_LARGEST = 1e30


def check_plan(plan: Any) -> None:
    """Raise `PlanError` for a `Plan` that contradicts itself."""
    # The checks are generators: later ones may rely on earlier ones, as the first problem raises.
    for problem in chain(_numbers(plan), _layers(plan), _stages(plan), _prediction(plan)):
        raise PlanError(f"The plan of {plan.function!r} contradicts itself: {problem}. Make a new one with al.plan.")


def _numbers(plan: Any) -> Iterator[str]:
    """Yield the problems of counts and sizes, which must be small enough for lowering to handle."""
    if not plan.stages:
        yield "it has no stage"
    if not 1 <= plan.num_microbatches <= MOST_MICROBATCHES // max(1, len(plan.stages)):
        yield f"it has {plan.num_microbatches} micro-batches in {len(plan.stages)} stages"
    if plan.batch is not None and not all(0 <= dim < _MOST_DIMS for dim in plan.batch.dims.values()):
        yield "its batch is along a dim that no array has"
    if plan.batch is not None and not 1 <= plan.batch.size <= _MOST_ELEMENTS:
        yield f"its batch has {plan.batch.size} samples"
    if not 0 <= plan.loop_parts <= _MOST_PARTS:
        yield f"loops are cut into {plan.loop_parts} parts"
    plan.schedule.num_processors(len(plan.stages))


def _layers(plan: Any) -> Iterator[str]:
    """Yield the problems of layers: gaps between stages, and layers that do not exist."""
    begins = 0
    for number, stage in enumerate(plan.stages):
        first, last = stage.layers
        if first != begins or last < first:
            yield f"stage {number} has the layers {first} to {last}, but should begin with {begins}"
        begins = last + 1
    if begins != plan.num_layers:
        yield f"its stages have {begins} layers, of {plan.num_layers}"
    for layer in chain(plan.op_layers, plan.input_layers, plan.traced_layers):
        if layer is not None and not 0 <= layer < plan.num_layers:
            yield f"it uses layer {layer} of {plan.num_layers}"
    if plan.remat and len(plan.remat) != plan.num_layers:
        yield f"it has rematerialisation policies for {len(plan.remat)} layers, of {plan.num_layers}"


def _stages(plan: Any) -> Iterator[str]:
    """Yield the problems of stages: submeshes, meshes, axes and ops that do not exist."""
    for number, stage in enumerate(plan.stages):
        submesh, name = stage.submesh, f"stage {number}"
        if submesh.first_device + submesh.num_devices > plan.cluster.num_devices:
            yield f"{name} has {submesh}, of {plan.cluster.num_devices}"
        if stage.mesh_shape.num_devices != submesh.num_devices:
            yield f"{name} has {submesh.num_devices} devices in a mesh of {stage.mesh_shape.num_devices}"
        axes = stage.mesh_shape.axis_names
        for spec in _specs(stage):
            yield from (f"{name}: {problem}" for problem in _misuse((*spec.dims, spec.partial), axes))
        for placement in _placements(stage.ops.values()):
            yield from (f"{name}: {x}" for x in _misuse((*placement.factors, placement.partial), axes))
        yield from (f"{name} {problem}" for problem in _shapes(stage))
        if any(op >= len(plan.op_layers) for op in stage.ops):
            yield f"{name} places ops beyond the {len(plan.op_layers)} that there are"


def _shapes(stage: StagePlan) -> Iterator[str]:
    """Yield the problems of argument shapes: other ranks than the specs, or shapes that no array has."""
    for name, shape in stage.shapes.items():
        spec = stage.specs.get(name)
        if spec is None or len(spec.dims) != len(shape.dims):
            yield f"has an argument {name!r} of shape {shape}, in the spec {spec}"
        elif not _DTYPE.fullmatch(shape.dtype) or min(shape.dims, default=0) < 0 or prod(shape.dims) > _MOST_ELEMENTS:
            yield f"has an argument {name!r} of shape {shape}, which no array has"


def _specs(stage: StagePlan) -> Iterator[Spec]:
    """Yield every spec of a stage."""
    yield from stage.specs.values()
    yield from stage.inputs.values()
    yield from stage.outputs.values()
    for accumulator in stage.accumulators.values():
        yield from (accumulator.stored, accumulator.resolved)
    for placement in _placements(stage.ops.values()):
        yield from (*placement.results, *placement.body_operands)


def _placements(placements: Iterable[OpPlacement]) -> Iterator[OpPlacement]:
    """Yield all placements, those inside bodies included."""
    for placement in placements:
        yield placement
        for body in placement.bodies:
            yield from _placements(body.values())


def _misuse(groups: Sequence[Sequence[str]], known: Sequence[str]) -> Iterator[str]:
    """Yield the problems of axis groups: axes that the mesh lacks, and axes used twice."""
    named = [axis for group in groups for axis in group]
    if not set(named) <= set(known):
        yield f"the axes {sorted(set(named) - set(known))} are named, of {list(known)}"
    if len(set(named)) != len(named):
        yield f"an axis is used twice in {named}"


def _prediction(plan: Any) -> Iterator[str]:
    """Yield the problems of the prediction: stages that do not exist, and numbers that are negative or not finite."""
    prediction, count = plan.prediction, len(plan.stages)
    if len(prediction.peak_bytes) != count:
        yield f"it predicts the memory of {len(prediction.peak_bytes)} stages, of {count}"
    for use in (*prediction.collectives, *plan.undivided):
        if not 0 <= use.stage < count:
            yield f"it predicts something of stage {use.stage}, of {count}"
    for part in (*plan.stages, prediction, *prediction.collectives, *plan.opaque, *plan.undivided):
        for each in fields(part):
            value = getattr(part, each.name)
            numbers = value if each.name == "peak_bytes" else (value,) if isinstance(value, float) else ()
            if not all(0 <= number <= _LARGEST or each.name == "bubble_fraction" for number in numbers):
                yield f"it predicts {each.name} of {value}"
    if not abs(prediction.bubble_fraction) <= 1:
        yield f"it predicts bubble_fraction of {prediction.bubble_fraction}"
