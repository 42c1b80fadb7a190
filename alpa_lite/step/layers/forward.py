"""Clusters of the ops of the forward pass: contiguous, cut where little data flows; equal in FLOPs, or otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil

import numpy as np
from numpy.typing import NDArray

from alpa_lite.errors import PlanError
from alpa_lite.program.ir import Graph, Op
from alpa_lite.program.phases import Phase, StepGraph
from alpa_lite.rules.op_info import free_values
from alpa_lite.step.layers.clustering import Flow, cluster_contiguous
from alpa_lite.step.layers.following import Layers, followed, readers_of
from alpa_lite.step.layers.number import MAX_LAYERS, Equal, contractions, default_num_layers, flops_of, forward_loops

FloatArray = NDArray[np.float64]

#: Contractions outside of loops per layer that `subdivided` aims at: those of one block of a transformer.
CONTRACTIONS_PER_PART = 6


def make_layers(
    step: StepGraph,
    num_layers: int | None = None,
    *,
    imbalance: float = 0.3,
    equal: Equal = "flops",
    shares: Sequence[float] = (),
) -> Layers:
    """Cluster the forward ops into `num_layers` layers and let all other ops follow.

    No layer has more than `1 + imbalance` times the average of what is to be `equal`, if that is possible. With
    `shares`, one for each layer, layers have it in proportion to them. Of "operators" each layer has as many as any
    other, wherever that cuts: what clustering gains is measured against that.

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
    if equal == "operators":
        for place, op in enumerate(forward):
            of_op[op.id] = place * count // len(forward)
    elif forward:
        index = _blocks(step, forward, count)
        weights = _weights(step, index, equal)
        if shares:
            weights = _in_shares(weights, shares)
        layers = cluster_contiguous(weights, _flows(graph, index), count, imbalance=imbalance)
        for op in forward:
            of_op[op.id] = layers[index[op.id]]
    return followed(step, of_op, count)


def subdivided(step: StepGraph, layers: Layers, *, imbalance: float = 0.3) -> Layers:
    """Each layer cut into equally many of about a transformer's block each: layer i becomes i·n to (i + 1)·n - 1."""
    graph = step.graph
    forward = [
        [op for op in graph.ops if step.phases[op.id] is Phase.FORWARD and layers.of_op[op.id] == layer]
        for layer in range(layers.num_layers)
    ]
    loops = {loop for loop in forward_loops(step) if contractions(graph, graph.ops[loop])}
    heavy = sum(contractions(graph, op) for ops in forward for op in ops if op.id not in loops)
    units = len(loops) + ceil(heavy / CONTRACTIONS_PER_PART)
    count = max(1, min(MAX_LAYERS, round(units / layers.num_layers), *map(len, forward)))
    of_op: list[int | None] = [None] * len(graph.ops)
    for layer, ops in enumerate(forward):
        index = {op.id: i for i, op in enumerate(ops)}
        parts = cluster_contiguous(_flops_of_blocks(graph, index), _flows(graph, index), count, imbalance=imbalance)
        for op in ops:
            of_op[op.id] = layer * count + parts[index[op.id]]
    return followed(step, of_op, layers.num_layers * count)


def _weights(step: StepGraph, index: Mapping[int, int], equal: Equal) -> FloatArray:
    """What layers shall have equal shares of, by block."""
    flops = _flops_of_blocks(step.graph, index)
    if equal == "loops":  # all FLOPs together weigh a hundredth of a loop: they move no loop to another layer
        flops /= 100 * flops.sum()
        # A part of a loop of one trip is no loop any more, but reads its rows of stacked arguments.
        parts = [*forward_loops(step), *(op for op in _rows_read(step) if op in index)]
        flops[list({index[op] for op in parts})] += 1.0
    return flops


def _flows(graph: Graph, index: Mapping[int, int]) -> list[Flow]:
    """What flows from block to block of the ops in `index`."""
    free = free_values(graph)
    return [
        (here, index[consumer], float(graph.values[v].bytes))
        for op, here in index.items()
        for v in graph.ops[op].results
        if v not in free
        for consumer in graph.consumers[v]
        if consumer in index and index[consumer] != here
    ]


def _flops_of_blocks(graph: Graph, index: Mapping[int, int]) -> FloatArray:
    flops = np.zeros(max(index.values()) + 1)
    for op, block in index.items():
        flops[block] += flops_of(graph, graph.ops[op]) + 1.0
    return flops


def _in_shares(weights: FloatArray, shares: Sequence[float]) -> FloatArray:
    """Weights stretched so that layers with the shares of the given ones have one each."""
    ends = np.concatenate([[0.0], np.cumsum(weights)])
    borders = np.concatenate([[0.0], np.cumsum(shares)]) * (ends[-1] / sum(shares))
    return np.diff(np.interp(ends, borders, np.arange(borders.size)))


def _blocks(step: StepGraph, forward: Sequence[Op], count: int) -> dict[int, int]:
    """Runs of forward ops that stay together, by op: those that read one part of stacked arguments, else single ops.

    Single ops throughout when these runs are fewer than the layers to make.
    """
    read = _rows_read(step)
    reading = [i for i, op in enumerate(forward) if op.id in read]
    index: dict[int, int] = {}
    block, current = -1, set[tuple[int, int]]()
    for i, op in enumerate(forward):
        inside = bool(reading) and reading[0] < i <= reading[-1]
        fresh = not read.get(op.id, current) & current
        if not inside or fresh:
            block += 1
        if op.id in read:
            current = read[op.id]
        index[op.id] = block
    return index if block + 1 >= count else {op.id: i for i, op in enumerate(forward)}


def _rows_read(step: StepGraph) -> dict[int, set[tuple[int, int]]]:
    """The rows of stacked arguments that ops read, by op."""
    read: dict[int, set[tuple[int, int]]] = {}
    for v, part in zip(step.graph.inputs, step.input_parts, strict=True):
        if part.rows is not None:
            for c in readers_of(step, v):
                read.setdefault(c, set()).add(part.rows)
    return read
