"""What is decided for one stage: specs, placements and how sums are kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from alpa_lite.intra_op.stage import StageView
from alpa_lite.plan.plan import Accumulator, OpPlacement
from alpa_lite.sharding.specs import Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A decoded solution of one stage."""

    inputs: Mapping[int, Spec]
    ops: Mapping[int, OpPlacement]
    accumulators: Mapping[int, Accumulator]


def remap(choice: Choice, source: StageView, target: StageView) -> Choice:
    """The same decisions for a stage with an equal `signature`."""
    ops = dict(zip(source.ops, target.ops, strict=True))
    values = dict(zip(source.external, target.external, strict=True))
    sums = dict(zip(source.crossing, target.crossing, strict=True))
    return replace(
        choice,
        inputs={values[v]: s for v, s in choice.inputs.items()},
        ops={ops[o]: p for o, p in choice.ops.items()},
        accumulators={sums[v]: a for v, a in choice.accumulators.items()},
    )
