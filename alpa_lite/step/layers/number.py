"""Choose the number of layers of a step, and the number of parts of its loops over layers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from alpa_lite.program.ir import Graph, Op
from alpa_lite.program.phases import Phase, StepGraph
from alpa_lite.program.wiring import MAX_TRIPS, parts_of, wiring_of
from alpa_lite.rules.op_info import rule_of_op

LayerBalance = Literal["flops", "loops", "operators"]
"""The quantity balanced over layers: FLOPs, loops over layers as they are written, or number of forward ops."""

#: Without a given number of layers: the contractions per layer, the number of layers below which a layer may have fewer
#: contractions, and the maximum number of layers.
CONTRACTIONS_PER_LAYER = 3
FEW_LAYERS = 8
MAX_LAYERS = 16

#: Fraction by which a stage may exceed its share of loop trips if the number of stages does not divide them.
MOST_UNEVEN = 0.15


def op_flops(step: StepGraph) -> tuple[float, ...]:
    """Return the FLOPs of each op at micro-batch size, with loop bodies multiplied by their trip count."""
    return tuple(flops_of(step.graph, op) for op in step.graph.ops)


def flops_of(graph: Graph, op: Op) -> float:
    """Return the FLOPs of an op, with loop bodies multiplied by their trip count."""
    wiring = wiring_of(op)
    if wiring is not None:
        return wiring.trips * sum(flops_of(body, o) for body in op.bodies for o in body.ops)
    return rule_of_op(graph, op.id).flops


def default_num_layers(step: StepGraph) -> int:
    """Return the number of layers for a step when the user gives none, from its number of forward contractions."""
    heavy = int(sum(contractions(step.graph, op) for op in step.graph.ops if step.phases[op.id] is Phase.FORWARD))
    return max(1, min(MAX_LAYERS, max(heavy // CONTRACTIONS_PER_LAYER, min(heavy, FEW_LAYERS))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The number of layers, and the minimum number of parts of loops over layers.

    Attributes:
        loop_parts: minimum number of parts per loop; 0 leaves loops whole.
        num_layers: number of layers.
        equal: the quantity that is balanced over layers.
        imbalance: fraction by which a layer may exceed its share for the sake of smaller cuts.
    """

    loop_parts: int
    num_layers: int
    equal: LayerBalance = "flops"
    imbalance: float = 0.3

    @staticmethod
    def into(count: int) -> Cut:
        """Return a cut into `count` layers, each of which will be a stage, with no more loop parts than that needs."""
        return Cut(loop_parts=count if count > 1 else 0, num_layers=count, imbalance=0.1)


def natural_cut(step: StepGraph, stages: Collection[int] = (1,)) -> Cut:
    """Return layers that coincide with equal parts of the loops over layers, if these do most of the work.

    Args:
        step: the step with its loops whole.
        stages: candidate numbers of equal stages. As many of them as possible, and at least the smallest, divide the
            number of layers.
    """
    flops = op_flops(step)
    loops = [op for op in forward_loops(step) if _trips(step, op) <= MAX_TRIPS]
    total = sum(f for f, phase in zip(flops, step.phases, strict=True) if phase is Phase.FORWARD)
    if not loops or 2 * sum(flops[op] for op in loops) < total:
        count = max(default_num_layers(step), min(stages))
        return Cut(loop_parts=count if loops else 0, num_layers=count)
    trips = [_trips(step, op) for op in loops]
    longest, wanted = max(trips), max(1, MAX_LAYERS * max(trips) // sum(trips))

    def layers(parts: int) -> int:
        return sum(len(parts_of(count, parts)) for count in trips)

    def possible(parts: int) -> int:
        return sum(layers(parts) % count == 0 for count in even)

    even = [count for count in stages if -(-sum(trips) // count) * count <= (1 + MOST_UNEVEN) * sum(trips)]
    able = [d for d in range(1, wanted + 1) if len(parts_of(longest, d)) == d]
    parts = max(able, key=lambda d: (possible(d), longest % d == 0, d))
    if 2 * parts <= wanted and longest <= 2 * wanted and possible(longest) >= possible(parts):
        parts = longest  # the trip count has few divisors: one layer per trip is better than a few large ones
    if not possible(parts):
        return Cut.into(min(stages))
    return Cut(loop_parts=parts, num_layers=layers(parts), equal="loops")


def _trips(step: StepGraph, op: int) -> int:
    wiring = wiring_of(step.graph.ops[op])
    return int(wiring.trips) if wiring is not None else 1


def contractions(graph: Graph, op: Op) -> float:
    """Return the number of contractions that an op runs, with loop bodies multiplied by their trip count."""
    wiring = wiring_of(op)
    if wiring is not None:
        return wiring.trips * sum(contractions(body, o) for body in op.bodies for o in body.ops)
    return float(rule_of_op(graph, op.id).work_kind != "elementwise")


def forward_loops(step: StepGraph) -> tuple[int, ...]:
    """Return the ops of the forward pass that are loops over rows of arrays (scans)."""

    def is_loop(op: Op) -> bool:
        wiring = wiring_of(op)
        return step.phases[op.id] is Phase.FORWARD and wiring is not None and bool(wiring.scanned)

    return tuple(op.id for op in step.graph.ops if is_loop(op))
