"""Layers: the unit that the stage search moves about. Forward ops are clustered, everything else follows the data.

forward      contiguous clusters that cut where little data flows, balanced by FLOPs   (cluster_contiguous)
backward     where its cotangent meets the forward values that it reads                 (_backward_layers)
             recomputed ops: where they were computed first                             (recomputation)
gradients    with their parameters, unless large forward values would have to move      (_gradient_layers)
update       with the parameter; optimizer state is what it is combined with elementwise (_update_layers)
invariant    no layer: these ops are repeated wherever they are read
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np
from numpy.typing import NDArray

from alpa_lite.clustering import Flow, cluster_contiguous
from alpa_lite.errors import PlanError
from alpa_lite.graph.ir import Graph, Op
from alpa_lite.graph.phases import Phase, StepGraph
from alpa_lite.graph.recomputation import originals
from alpa_lite.graph.wiring import MAX_TRIPS, parts_of, wiring_of
from alpa_lite.rules.graph_facts import free_values, rule_of_op

FloatArray = NDArray[np.float64]

#: Contractions per layer that clustering aims at when the number of layers is free, and the most layers it makes.
CONTRACTIONS_PER_LAYER = 3
MAX_LAYERS = 16

#: Contractions outside of loops per layer that `subdivided` aims at: those of one block of a transformer.
CONTRACTIONS_PER_PART = 6


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
    wiring = wiring_of(op)
    if wiring is not None:
        return wiring.trips * sum(_flops(body, o) for body in op.bodies for o in body.ops)
    return rule_of_op(graph, op.id).flops


def default_num_layers(step: StepGraph) -> int:
    """Number of layers when the user gives none: by the number of forward contractions."""
    heavy = sum(_contractions(step.graph, op) for op in step.graph.ops if step.phases[op.id] is Phase.FORWARD)
    return max(1, min(MAX_LAYERS, int(heavy) // CONTRACTIONS_PER_LAYER))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Into how many parts at least loops over layers are cut, and how many layers are made."""

    loop_parts: int
    num_layers: int

    @staticmethod
    def into(count: int) -> Cut:
        """So many layers, and loops in no more parts than these need."""
        return Cut(loop_parts=count if count > 1 else 0, num_layers=count)


def natural_cut(step: StepGraph, stages: Collection[int] = (1,)) -> Cut:
    """Layers that fall on equal parts of the loops over layers, if these do most of the work; see `MAX_LAYERS`.

    `step` has its loops whole; `stages`: numbers of equal stages of which as many as can be should be possible, and the
    least at any rate.
    """
    flops = op_flops(step)
    loops = [op for op in forward_loops(step) if _trips(step, op) <= MAX_TRIPS]
    total = sum(f for f, phase in zip(flops, step.phases, strict=True) if phase is Phase.FORWARD)
    if 2 * sum(flops[op] for op in loops) < total:
        count = max(default_num_layers(step), min(stages))
        return Cut(loop_parts=count if loops else 0, num_layers=count)
    trips = [_trips(step, op) for op in loops]
    longest, wanted = max(trips), max(1, MAX_LAYERS * max(trips) // sum(trips))

    def layers(parts: int) -> int:
        return sum(len(parts_of(count, parts)) for count in trips)

    def possible(parts: int) -> int:
        return sum(layers(parts) % count == 0 for count in stages)

    parts = max((d for d in range(1, wanted + 1) if longest % d == 0), key=lambda d: (possible(d), d))
    if 2 * parts <= wanted and longest <= 2 * wanted and possible(longest) >= possible(parts):
        parts = longest  # a number with few divisors
    if not possible(parts):
        return Cut.into(min(stages))
    return Cut(loop_parts=parts, num_layers=layers(parts))


def _trips(step: StepGraph, op: int) -> int:
    wiring = wiring_of(step.graph.ops[op])
    return int(wiring.trips) if wiring is not None else 1


def _contractions(graph: Graph, op: Op) -> float:
    """How many contractions an op runs."""
    wiring = wiring_of(op)
    if wiring is not None:
        return wiring.trips * sum(_contractions(body, o) for body in op.bodies for o in body.ops)
    return float(rule_of_op(graph, op.id).work_kind != "elementwise")


def forward_loops(step: StepGraph) -> tuple[int, ...]:
    """The ops of the forward pass that are loops over rows of arrays (scans)."""

    def is_loop(op: Op) -> bool:
        wiring = wiring_of(op)
        return step.phases[op.id] is Phase.FORWARD and wiring is not None and bool(wiring.scanned)

    return tuple(op.id for op in step.graph.ops if is_loop(op))


def make_layers(
    step: StepGraph,
    num_layers: int | None = None,
    *,
    imbalance: float = 0.3,
    by_loops: bool = False,
    shares: Sequence[float] = (),
) -> Layers:
    """Cluster the forward ops into `num_layers` layers and let all other ops follow.

    No layer has more than `1 + imbalance` times the average FLOPs, if that is possible; `by_loops`: of the loops. With
    `shares`, one for each layer, the FLOPs of layers are to be in proportion to them.

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
    index = _blocks(step, forward, count)
    if forward:
        flops = _flops_of_blocks(graph, index)
        if by_loops:  # all FLOPs together weigh a hundredth of a loop: they move no loop to another layer
            flops /= 100 * flops.sum()
            flops[[index[loop] for loop in forward_loops(step)]] += 1.0
        if shares:
            flops = _in_shares(flops, shares)
        layers = cluster_contiguous(flops, _flows(graph, index), count, imbalance=imbalance)
        for op in forward:
            of_op[op.id] = layers[index[op.id]]
    return _followed(step, of_op, count)


def subdivided(step: StepGraph, layers: Layers, *, imbalance: float = 0.3) -> Layers:
    """Each layer cut into equally many of about a transformer's block each: layer i becomes i·n to (i + 1)·n - 1."""
    graph = step.graph
    forward = [
        [op for op in graph.ops if step.phases[op.id] is Phase.FORWARD and layers.of_op[op.id] == layer]
        for layer in range(layers.num_layers)
    ]
    loops = {loop for loop in forward_loops(step) if _contractions(graph, graph.ops[loop])}
    heavy = sum(_contractions(graph, op) for ops in forward for op in ops if op.id not in loops)
    units = len(loops) + ceil(heavy / CONTRACTIONS_PER_PART)
    count = max(1, min(MAX_LAYERS, round(units / layers.num_layers), *map(len, forward)))
    of_op: list[int | None] = [None] * len(graph.ops)
    for layer, ops in enumerate(forward):
        index = {op.id: i for i, op in enumerate(ops)}
        parts = cluster_contiguous(_flops_of_blocks(graph, index), _flows(graph, index), count, imbalance=imbalance)
        for op in ops:
            of_op[op.id] = layer * count + parts[index[op.id]]
    return _followed(step, of_op, layers.num_layers * count)


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
        flops[block] += _flops(graph, graph.ops[op]) + 1.0
    return flops


def _followed(step: StepGraph, of_op: list[int | None], count: int) -> Layers:
    """The layers when those of the forward ops are given."""
    _backward_layers(step, of_op, count)
    homes = _homes_by_parameter(step, of_op)
    _gradient_layers(step, of_op, homes)
    _update_layers(step, of_op, homes)
    return Layers(num_layers=count, of_op=tuple(of_op), of_input=_input_layers(step, of_op, homes))


def _in_shares(flops: FloatArray, shares: Sequence[float]) -> FloatArray:
    """FLOPs stretched so that layers with the shares of the given ones have one each."""
    ends = np.concatenate([[0.0], np.cumsum(flops)])
    borders = np.concatenate([[0.0], np.cumsum(shares)]) * (ends[-1] / sum(shares))
    return np.diff(np.interp(ends, borders, np.arange(borders.size)))


def _blocks(step: StepGraph, forward: Sequence[Op], count: int) -> dict[int, int]:
    """Runs of forward ops that stay together, by op: those that read one part of stacked arguments, else single ops.

    Single ops throughout when these runs are fewer than the layers to make.
    """
    graph = step.graph
    rows = {v: part.rows for v, part in zip(graph.inputs, step.input_parts, strict=True) if part.rows is not None}
    read: dict[int, set[tuple[int, int]]] = {}
    for v, part in rows.items():
        for c in _readers(step, v):
            read.setdefault(c, set()).add(part)
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


def _backward_layers(step: StepGraph, of_op: list[int | None], count: int) -> None:
    """The last layer that holds all that an op reads: a forward value reaches from its own to its last reader's."""
    graph, backward = step.graph, [op for op in step.graph.ops if step.phases[op.id] is Phase.BACKWARD]
    reach, twins = _forward_reach(step, of_op), originals(step)
    for op in backward:
        known = [layer for v in op.operands if (layer := reach.get(v)) is not None]
        layer = min(known) if known else None
        if op.primitive == "optimization_barrier":
            # It holds back what it is read for: it runs with its readers, below.
            reach.update({r: reach[v] for r, v in zip(op.results, op.operands, strict=True) if v in reach})
            continue
        twin = graph.producer[twins[op.results[0]][0]] if op.results and op.results[0] in twins else None
        if twin is not None and of_op[twin] is not None:
            layer = of_op[twin]
        for v in op.operands:
            # What descends with the cotangents cannot be read above; what is only computed again can (recomputation).
            producer = graph.producer[v]
            made = of_op[producer] if producer is not None and step.phases[producer] is Phase.BACKWARD else None
            if layer is not None and made is not None and made < layer and v not in twins:
                layer = made
        of_op[op.id] = layer
        if layer is not None:
            for r in op.results:
                reach[r] = max(reach.get(v, layer) for v in twins.get(r, (r,)))
    # An op that reads only batch data and parameters runs where it is needed first: in the last of its readers' layers.
    for op in reversed(backward):
        if of_op[op.id] is None:
            readers = [of_op[c] for r in op.results for c in graph.consumers[r] if step.phases[c] is Phase.BACKWARD]
            layers = [layer for layer in readers if layer is not None]
            of_op[op.id] = max(layers) if layers else count - 1


def _forward_reach(step: StepGraph, of_op: Sequence[int | None]) -> dict[int, int]:
    """The last layer of the forward pass that holds a value: that of its last reader, or of the op that computed it."""
    graph, reach = step.graph, dict[int, int]()
    for value in graph.values:
        producer = graph.producer[value.id]
        made = of_op[producer] if producer is not None else None
        phase = step.phases[producer] if producer is not None else Phase.INVARIANT
        if value.literal is not None or phase not in (Phase.FORWARD, Phase.INVARIANT):
            continue
        readers = (of_op[c] for c in _readers(step, value.id) if step.phases[c] is Phase.FORWARD)
        layers = [layer for layer in (made, *readers) if layer is not None]
        operands = graph.ops[producer].operands if producer is not None else ()
        known = [reach[v] for v in operands if v in reach]
        if layers:
            reach[value.id] = max(layers)
        elif known:
            # An invariant value that only the backward pass reads (a transposed weight) is made from these.
            reach[value.id] = min(known)
    return reach


def _homes_by_parameter(step: StepGraph, of_op: Sequence[int | None]) -> dict[int, int]:
    """Home of each value that the update combines elementwise with a parameter: gradients, moments, new parameters.

    Such values have as many elements as the parameter; scalars (learning rates, norms) are combined with everything.
    """
    graph = step.graph
    group = list(range(len(graph.values)))

    def root(v: int) -> int:
        while group[v] != v:
            group[v] = group[group[v]]
            v = group[v]
        return v

    for op in graph.ops:
        if step.phases[op.id] is Phase.UPDATE:
            size = max((graph.values[r].num_elements for r in op.results), default=1)
            tied = [v for v in (*op.operands, *op.results) if graph.values[v].num_elements == size > 1]
            for v in tied[1:]:
                group[root(v)] = root(tied[0])
    homes: dict[int, int] = {}
    for v, home in zip(graph.inputs, _loop_homes(step, of_op), strict=True):
        if home is not None:
            homes[root(v)] = min(home, homes.get(root(v), home))
    return {v.id: homes[root(v.id)] for v in graph.values if root(v.id) in homes}


def _gradient_layers(step: StepGraph, of_op: list[int | None], homes: Mapping[int, int]) -> None:
    """Move gradients down to their parameter, as far as what they are computed from is held there too."""
    graph, lowest = step.graph, _lowest_reads(step, of_op)
    alone = _leading_to_updates_alone(step)
    for op_id in alone:
        op, here = graph.ops[op_id], of_op[op_id]
        if here is None:
            continue
        readers = {c for r in op.results for c in graph.consumers[r] if step.phases[c] is Phase.BACKWARD}
        wanted = [homes[r] for r in op.results if r in homes]
        wanted += [layer for c in readers if (layer := of_op[c]) is not None]
        held = [lowest[v] for v in op.operands if v in lowest and graph.producer[v] not in alone]
        if wanted:
            of_op[op_id] = min(here, max(*wanted, *held, 0))


def _leading_to_updates_alone(step: StepGraph) -> dict[int, None]:
    """Backward ops whose results were summed over the batch and are read by updates in the end, last first."""
    graph, alone = step.graph, dict[int, None]()
    for op in reversed(graph.ops):
        readers = {c for r in op.results for c in graph.consumers[r]}
        summed = step.batch_size is not None and all(step.batch_dims[r] is None for r in op.results)
        if step.phases[op.id] is Phase.BACKWARD and summed and readers:
            if all(step.phases[c] is Phase.UPDATE or c in alone for c in readers):
                alone[op.id] = None
    return alone


def _lowest_reads(step: StepGraph, of_op: Sequence[int | None]) -> dict[int, int]:
    """The lowest layer that holds a value anyway: where a forward value is computed, where a cotangent is read."""
    graph, lowest = step.graph, dict[int, int]()
    for value in graph.values:
        producer = graph.producer[value.id]
        made = of_op[producer] if producer is not None else None
        if made is None or producer is None:
            continue
        if step.phases[producer] is Phase.BACKWARD:
            readers = [of_op[c] for c in graph.consumers[value.id] if step.phases[c] is Phase.BACKWARD]
            made = min((layer for layer in readers if layer is not None), default=made)
        lowest[value.id] = made
    return lowest


def _update_layers(step: StepGraph, of_op: list[int | None], homes: Mapping[int, int]) -> None:
    """With the parameter of the largest result or operand; ops on scalars where the first of those is computed."""
    graph = step.graph
    updates = [op for op in graph.ops if step.phases[op.id] is Phase.UPDATE]
    for op in updates:
        votes: list[tuple[int, int]] = []
        for v in (*op.results, *op.operands):
            producer = graph.producer[v]
            layer = homes[v] if v in homes else of_op[producer] if producer is not None else None
            if layer is not None:
                votes.append((-graph.values[v].bytes, layer))
        of_op[op.id] = min(votes)[1] if votes else None
    for op in reversed(updates):
        if of_op[op.id] is None:
            readers = [of_op[c] for r in op.results for c in graph.consumers[r]]
            of_op[op.id] = min((layer for layer in readers if layer is not None), default=0)


def _input_layers(step: StepGraph, of_op: Sequence[int | None], homes: Mapping[int, int]) -> tuple[int, ...]:
    """Home of each input: the first layer whose loop reads it, its parameter's, or the first whose update reads it."""
    table: list[int] = []
    for v, home in zip(step.graph.inputs, _loop_homes(step, of_op), strict=True):
        readers = (of_op[c] for c in _readers(step, v))
        later = min((layer for layer in readers if layer is not None), default=0)
        table.append(home if home is not None else homes.get(v, later))
    return tuple(table)


def _loop_homes(step: StepGraph, of_op: Sequence[int | None]) -> Iterator[int | None]:
    """For each input the first layer whose forward pass reads it, else whose backward pass does."""
    for v in step.graph.inputs:
        readers = _readers(step, v)
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            layers = [layer for c in readers if step.phases[c] is phase and (layer := of_op[c]) is not None]
            if layers:
                yield min(layers)
                break
        else:
            yield None


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
