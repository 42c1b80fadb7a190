"""How many layers a step is cut into, and into how many parts its loops over layers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from alpa_lite.program.ir import Graph, Op
from alpa_lite.program.phases import Phase, StepGraph
from alpa_lite.program.wiring import MAX_TRIPS, parts_of, wiring_of
from alpa_lite.rules.op_info import rule_of_op

LayerBalance = Literal["flops", "loops", "operators"]
"""What layers have equal shares of: FLOPs, the loops over layers as they are written, or ops of the forward pass."""

#: Contractions per layer that clustering aims at when the number of layers is free, where there are enough for as many
#: layers as a small model has, and the most layers it makes.
CONTRACTIONS_PER_LAYER = 3
FEW_LAYERS = 8
MAX_LAYERS = 16

#: By how much a stage may exceed its share of the trips of loops where their number does not divide these.
MOST_UNEVEN = 0.15


def op_flops(step: StepGraph) -> tuple[float, ...]:
    """Floating-point operations of each op at micro-batch size, loops multiplied by their trip count."""
    return tuple(flops_of(step.graph, op) for op in step.graph.ops)


def flops_of(graph: Graph, op: Op) -> float:
    """Floating-point operations of an op."""
    wiring = wiring_of(op)
    if wiring is not None:
        return wiring.trips * sum(flops_of(body, o) for body in op.bodies for o in body.ops)
    return rule_of_op(graph, op.id).flops


def default_num_layers(step: StepGraph) -> int:
    """Number of layers when the user gives none: by the number of forward contractions."""
    heavy = int(sum(contractions(step.graph, op) for op in step.graph.ops if step.phases[op.id] is Phase.FORWARD))
    return max(1, min(MAX_LAYERS, max(heavy // CONTRACTIONS_PER_LAYER, min(heavy, FEW_LAYERS))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Into how many parts at least loops over layers are cut, and how many layers are made.

    equal        what layers have equal shares of
    imbalance    by how much one may exceed its share for the sake of smaller cuts
    """

    loop_parts: int
    num_layers: int
    equal: LayerBalance = "flops"
    imbalance: float = 0.3

    @staticmethod
    def into(count: int) -> Cut:
        """So many layers, each of which will be a stage, and loops in no more parts than these need."""
        return Cut(loop_parts=count if count > 1 else 0, num_layers=count, imbalance=0.1)


def natural_cut(step: StepGraph, stages: Collection[int] = (1,)) -> Cut:
    """Layers that fall on equal parts of the loops over layers, if these do most of the work; see `MAX_LAYERS`.

    `step` has its loops whole; `stages`: numbers of equal stages of which as many as can be should be possible, and the
    least at any rate.
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
        parts = longest  # a number with few divisors
    if not possible(parts):
        return Cut.into(min(stages))
    return Cut(loop_parts=parts, num_layers=layers(parts), equal="loops")


def _trips(step: StepGraph, op: int) -> int:
    wiring = wiring_of(step.graph.ops[op])
    return int(wiring.trips) if wiring is not None else 1


def contractions(graph: Graph, op: Op) -> float:
    """How many contractions an op runs."""
    wiring = wiring_of(op)
    if wiring is not None:
        return wiring.trips * sum(contractions(body, o) for body in op.bodies for o in body.ops)
    return float(rule_of_op(graph, op.id).work_kind != "elementwise")


def forward_loops(step: StepGraph) -> tuple[int, ...]:
    """The ops of the forward pass that are loops over rows of arrays (scans)."""

    def is_loop(op: Op) -> bool:
        wiring = wiring_of(op)
        return step.phases[op.id] is Phase.FORWARD and wiring is not None and bool(wiring.scanned)

    return tuple(op.id for op in step.graph.ops if is_loop(op))
