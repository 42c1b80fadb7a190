"""Layers: the unit that the stage search moves about. Forward ops are clustered, everything else follows the data.

forward    contiguous clusters that cut where little data flows, balanced by FLOPs          (cluster_contiguous)
backward   the earliest layer among the loop values that an op reads                        (_backward_layers)
update     the layer of the largest value that an op reads: gradients stay where they arose  (_update_layers)
invariant  no layer: these ops are repeated wherever they are read
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from alpa_lite.clustering import cluster_contiguous
from alpa_lite.errors import PlanError
from alpa_lite.graph.ir import Graph, Op
from alpa_lite.graph.phases import Phase, StepGraph
from alpa_lite.rules import rule_of, view_of
from alpa_lite.rules.graph_facts import free_values

#: Contractions per layer that clustering aims at when the number of layers is free, and the most layers it makes.
CONTRACTIONS_PER_LAYER = 3
MAX_LAYERS = 8


@dataclass(frozen=True, kw_only=True)
class Layers:
    """Layer of each op (None for invariant ops) and home layer of each graph input."""

    num_layers: int
    of_op: tuple[int | None, ...]
    of_input: tuple[int, ...]


def op_flops(step: StepGraph) -> tuple[float, ...]:
    """Floating-point operations of each op at micro-batch size, loops multiplied by their trip count."""
    return tuple(_flops(step.graph, op) for op in step.graph.ops)


def _flops(graph: Graph, op: Op) -> float:
    if op.bodies:
        inner = sum(_flops(body, o) for body in op.bodies for o in body.ops)
        return inner * op.params.get("length", 1)
    return rule_of(view_of(graph, op)).flops


def default_num_layers(step: StepGraph) -> int:
    """Number of layers when the user gives none: by the number of forward contractions."""
    heavy = sum(
        1
        for op in step.graph.ops
        if step.phases[op.id] is Phase.FORWARD and rule_of(view_of(step.graph, op)).work_kind != "elementwise"
    )
    return max(1, min(MAX_LAYERS, heavy // CONTRACTIONS_PER_LAYER))


def make_layers(step: StepGraph, num_layers: int | None = None, *, imbalance: float = 0.3) -> Layers:
    """Cluster the forward ops into `num_layers` layers and let all other ops follow.

    No layer has more than `1 + imbalance` times the average FLOPs, if that is possible.

    Raises `PlanError` when there are fewer forward ops than layers.
    """
    graph = step.graph
    forward = [op for op in graph.ops if step.phases[op.id] is Phase.FORWARD]
    count = default_num_layers(step) if num_layers is None else num_layers
    if count > max(1, len(forward)):
        raise PlanError(
            f"{count} layers were asked for, but the forward pass has only {len(forward)} operations. "
            f"Ask for at most {max(1, len(forward))} layers or stages."
        )
    of_op: list[int | None] = [None] * len(graph.ops)
    index, free = {op.id: i for i, op in enumerate(forward)}, free_values(graph)
    flows = [
        (index[producer], index[consumer], float(graph.values[v].bytes))
        for op in forward
        for v in op.results
        if (producer := op.id) in index and v not in free
        for consumer in graph.consumers[v]
        if consumer in index
    ]
    if forward:
        flops = np.array([_flops(graph, op) for op in forward]) + 1.0
        for op, layer in zip(forward, cluster_contiguous(flops, flows, count, imbalance=imbalance), strict=True):
            of_op[op.id] = layer
    _backward_layers(step, of_op, count)
    _update_layers(step, of_op)
    return Layers(num_layers=count, of_op=tuple(of_op), of_input=_input_layers(step, of_op))


def _backward_layers(step: StepGraph, of_op: list[int | None], count: int) -> None:
    graph = step.graph
    backward = [op for op in graph.ops if step.phases[op.id] is Phase.BACKWARD]
    for op in backward:
        origins = [p for v in op.operands if (p := graph.producer[v]) is not None and step.phases[p].in_loop]
        if step.batch_size is not None and all(step.batch_dims[r] is None for r in op.results):
            # A weight gradient arises where its cotangent is (and the weight); its residual was an input there.
            origins = [p for p in origins if step.phases[p] is Phase.BACKWARD] or origins
        known = [of_op[p] for p in origins]
        layers = [layer for layer in known if layer is not None]
        of_op[op.id] = min(layers) if layers else None
    # An op that reads only batch data and parameters runs where it is needed first: in the last of its readers' layers.
    for op in reversed(backward):
        if of_op[op.id] is None:
            readers = [of_op[c] for r in op.results for c in graph.consumers[r] if step.phases[c] is Phase.BACKWARD]
            layers = [layer for layer in readers if layer is not None]
            of_op[op.id] = max(layers) if layers else count - 1


def _update_layers(step: StepGraph, of_op: list[int | None]) -> None:
    graph = step.graph
    updates = [op for op in graph.ops if step.phases[op.id] is Phase.UPDATE]
    homes = dict(zip(graph.inputs, _input_layers(step, of_op, known_only=True), strict=True))
    for op in updates:
        votes: list[tuple[int, int]] = []
        for v in op.operands:
            producer = graph.producer[v]
            layer = homes.get(v) if producer is None else of_op[producer]
            if layer is not None and layer >= 0:
                votes.append((-graph.values[v].bytes, layer))
        of_op[op.id] = min(votes)[1] if votes else None
    for op in reversed(updates):
        if of_op[op.id] is None:
            readers = [of_op[c] for r in op.results for c in graph.consumers[r]]
            of_op[op.id] = min((layer for layer in readers if layer is not None), default=0)


def _input_layers(step: StepGraph, of_op: list[int | None], *, known_only: bool = False) -> tuple[int, ...]:
    """Home of each input: the first layer whose loop reads it, else the first whose update does (-1 = unknown)."""
    graph = step.graph
    homes: list[int] = []
    for v in graph.inputs:
        readers = _readers(step, v)
        loop = [of_op[c] for c in readers if step.phases[c] is Phase.FORWARD]
        loop = loop or [of_op[c] for c in readers if step.phases[c] is Phase.BACKWARD]
        layers = [layer for layer in loop if layer is not None]
        if not layers and not known_only:
            layers = [layer for c in readers if (layer := of_op[c]) is not None]
        homes.append(min(layers) if layers else (-1 if known_only else 0))
    return tuple(homes)


def _readers(step: StepGraph, value: int) -> set[int]:
    """Ops that read a value, through invariant ops (which are repeated in their readers' layers)."""
    graph, readers, queue = step.graph, set[int](), [value]
    while queue:
        for c in graph.consumers[queue.pop()]:
            if c not in readers:
                readers.add(c)
                if step.phases[c] is Phase.INVARIANT:
                    queue += graph.ops[c].results
    return readers
