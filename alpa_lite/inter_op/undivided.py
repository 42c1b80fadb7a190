"""Dims of arguments that the devices do not divide stay whole; here is what padding them would buy.

A dim of local size s on an axis of n unused devices, padded to p = ⌈s / n⌉ · n, would save

    bytes    = local bytes · (1 - p / (s n))
    seconds  = Σ over the contractions that read the argument: seconds · runs per step · (1 - p / (s n))
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil, prod

from alpa_lite.intra_op.choice import Choice
from alpa_lite.plan.plan import UndividedDim
from alpa_lite.plan.pricing import Pricer, local_bytes
from alpa_lite.program.ir import Value
from alpa_lite.program.phases import StepGraph
from alpa_lite.rules.op_info import rule_of_op
from alpa_lite.sharding.specs import Spec

LEAST_SHARE = 0.01
"""Arguments below this share of the largest one are not worth a line."""


def undivided_dims(
    step: StepGraph, stage: int, choice: Choice, pricer: Pricer, arguments: Sequence[int]
) -> tuple[UndividedDim, ...]:
    """The dims of a stage's arguments that an axis would split if it divided them, the most bytes first.

    Only axes count that split some argument here: others are not for state in this plan.
    """
    values = [step.graph.values[v] for v in arguments if step.batch_dims[v] is None and v in choice.inputs]
    used = {axis for v in values for axis in choice.inputs[v.id].axes}
    largest = max((v.bytes for v in values), default=0)
    found = [
        dim
        for value in values
        if value.bytes >= LEAST_SHARE * largest and not value.dtype.startswith("key<")
        for dim in _of_value(step, stage, value, choice, pricer, used)
    ]
    return tuple(sorted(found, key=lambda dim: -dim.bytes_saved))


def _of_value(
    step: StepGraph, stage: int, value: Value, choice: Choice, pricer: Pricer, used: set[str]
) -> Iterator[UndividedDim]:
    spec, sizes = choice.inputs[value.id], pricer.sizes
    for axis in sorted(used - spec.axes):
        count = sizes[axis]
        blocks = [n // prod(sizes[a] for a in axes) for n, axes in zip(value.shape, spec.dims, strict=True)]
        if any(block % count == 0 for block in blocks):
            continue  # it stays whole by choice
        for dim, block in enumerate(blocks):
            if block < count:
                continue
            padded = ceil(block / count) * count
            share = 1 - padded / (block * count)
            yield UndividedDim(
                name=value.name,
                dim=dim,
                size=value.shape[dim],
                axis=axis,
                num_devices=count,
                padded=padded * (value.shape[dim] // block),
                bytes_saved=local_bytes(value, spec, sizes) * share,
                seconds_saved=_contraction_seconds(step, value, dim, spec, choice, pricer) * share,
                stage=stage,
            )


def _contraction_seconds(step: StepGraph, value: Value, dim: int, spec: Spec, choice: Choice, pricer: Pricer) -> float:
    """Seconds per step of the contractions that read this dim of a value whole."""
    graph, total = step.graph, 0.0
    for op in (graph.ops[c] for c in graph.consumers[value.id]):
        rule = rule_of_op(graph, op.id)
        if op.id in choice.ops and rule.work_kind != "elementwise":
            factors = rule.operands[op.operands.index(value.id)][dim]
            if any(f in rule.shardable and choice.ops[op.id].factors[f] == spec.dims[dim] for f in factors):
                total += pricer.price(graph, op, choice.ops[op.id]).seconds * step.runs_of(op)
    return total
