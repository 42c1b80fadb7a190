"""Layers, the unit of the stage search: their number, and the layer of every op and input.

The number of layers, and of parts of each loop over layers, follows from the work of the forward ops (`natural_cut`).
The forward ops are clustered (`clustering`); all other ops and the inputs follow the data (`followed`):

backward     the layer where the cotangent meets the forward values that the op reads   (`_backward_layers`)
             recomputed ops: the layer of the original                                  (`recomputation.originals`)
gradients    the layer of the parameter, unless large forward values would have to move (`_gradient_layers`)
update       the layer of the parameter; optimizer state goes with the parameter with which it is combined
             elementwise                                                                (`_update_layers`)
invariant    no layer: these ops are repeated wherever their results are read
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from alpa_lite.program.ir import MAX_TRIPS, Graph, Op, parts_of, wiring_of
from alpa_lite.program.phases import Phase, StepGraph
from alpa_lite.rules.op_info import flops_of, rule_of_op
from alpa_lite.step.recomputation import originals
from alpa_lite.step.repetition import FEW_LAYERS, MAX_LAYERS, MOST_UNEVEN, row_cut

LayerBalance = Literal["flops", "loops", "operators"]
"""The quantity balanced over layers: FLOPs, loops over layers as they are written, or number of forward ops."""

CONTRACTIONS_PER_LAYER = 3
"""The contractions per layer, of `FEW_LAYERS` or more, without a given number of layers."""


def op_flops(step: StepGraph) -> tuple[float, ...]:
    """Return the FLOPs of each op at micro-batch size, with loop bodies multiplied by their trip count."""
    return tuple(flops_of(step.graph, op) for op in step.graph.ops)


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
        shares: relative share of each layer of what is balanced; () for equal shares.
    """

    loop_parts: int
    num_layers: int
    equal: LayerBalance = "flops"
    imbalance: float = 0.3
    shares: tuple[float, ...] = ()

    @staticmethod
    def into(count: int) -> Cut:
        """Return a cut into `count` layers, each of which will be a stage, with no more loop parts than that needs."""
        return Cut(loop_parts=count if count > 1 else 0, num_layers=count, imbalance=0.1)

    @staticmethod
    def written_out(shares: Sequence[float]) -> Cut:
        """Return a cut into a layer for each share, each of which will be a stage, with each trip of a loop by itself.

        In a loop over several layers no part of the backward pass can be put off: the loop is one op.
        """
        # No loop that is cut has more trips than this.
        return Cut(loop_parts=MAX_TRIPS, num_layers=len(shares), imbalance=0.1, shares=tuple(shares))


def natural_cut(step: StepGraph, stages: Collection[int] = (1,)) -> Cut:
    """Return layers that coincide with equal parts of the loops over layers, or of the rows of equal layers, if these
    do most of the work.

    Args:
        step: the step with its loops whole.
        stages: candidate numbers of equal stages. As many of them as possible, and at least the smallest, divide the
            number of layers.
    """
    trips = _trips_over_layers(step)
    if not trips:
        # Unlike a loop, layers that are written out can be cut anywhere.
        rows = None if forward_loops(step) else row_cut(step, stages)
        return Cut(loop_parts=0, num_layers=rows.num_layers, equal="loops") if rows else _cut_anywhere(step, stages)
    longest, wanted = max(trips), max(1, MAX_LAYERS * max(trips) // sum(trips))

    def layers(parts: int) -> int:
        return sum(len(parts_of(count, parts)) for count in trips)

    def possible(parts: int) -> int:
        return sum(layers(parts) % count == 0 for count in even)

    # Numbers of stages of which some would take many more trips than their share are left out.
    even = [count for count in stages if -(-sum(trips) // count) * count <= (1 + MOST_UNEVEN) * sum(trips)]
    # `parts_of` may make more parts than were asked for.
    able = [d for d in range(1, wanted + 1) if len(parts_of(longest, d)) == d]
    # First the parts that suit most numbers of stages, then equal parts, then more of them.
    parts = max(able, key=lambda d: (possible(d), longest % d == 0, d))
    if 2 * parts <= wanted and longest <= 2 * wanted and possible(longest) >= possible(parts):
        parts = longest  # the trip count has few divisors: one layer per trip is better than a few large ones
    if not possible(parts):
        return Cut.into(min(stages))
    return Cut(loop_parts=parts, num_layers=layers(parts), equal="loops")


def _cut_anywhere(step: StepGraph, stages: Collection[int]) -> Cut:
    """Return layers of equal FLOPs."""
    count = max(default_num_layers(step), min(stages))
    return Cut(loop_parts=count if _loops(step) else 0, num_layers=count)


def _trips_over_layers(step: StepGraph) -> list[int]:
    """Return the trip counts of loops over layers; none unless these do half of the work."""
    flops, loops = op_flops(step), _loops(step)
    total = sum(f for f, phase in zip(flops, step.phases, strict=True) if phase is Phase.FORWARD)
    return [_trips(step, op) for op in loops] if loops and 2 * sum(flops[op] for op in loops) >= total else []


def _loops(step: StepGraph) -> list[int]:
    """Return the loops of the forward pass that can be cut into parts."""
    return [op for op in forward_loops(step) if _trips(step, op) <= MAX_TRIPS]


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


@dataclass(frozen=True, kw_only=True)
class Layers:
    """The layers of a step.

    Attributes:
        num_layers: number of layers.
        of_op: layer of each op; None for invariant ops.
        of_input: home layer of each graph input.
    """

    num_layers: int
    of_op: tuple[int | None, ...]
    of_input: tuple[int, ...]

    def ops_of(self, layer: int | None) -> tuple[int, ...]:
        """Return the ops of a layer (None: those without one), in program order."""
        return self._ops.get(layer, ())

    @cached_property
    def _ops(self) -> dict[int | None, tuple[int, ...]]:
        found: dict[int | None, list[int]] = {}
        for op, layer in enumerate(self.of_op):
            found.setdefault(layer, []).append(op)
        return {layer: tuple(ops) for layer, ops in found.items()}


def followed(step: StepGraph, of_op: list[int | None], count: int) -> Layers:
    """Return the layers of all ops and inputs; `of_op` holds those of the forward ops and is completed in place."""
    # In this order: homes follow from the layers of both passes, and gradients and the update from the homes.
    _backward_layers(step, of_op, count)
    homes = _homes_by_parameter(step, of_op)
    _gradient_layers(step, of_op, homes)
    _update_layers(step, of_op, homes)
    return Layers(num_layers=count, of_op=tuple(of_op), of_input=_input_layers(step, of_op, homes))


def _backward_layers(step: StepGraph, of_op: list[int | None], count: int) -> None:
    """Assign to each backward op the last layer that holds all values that it reads.

    A forward value is held from its own layer to the layer of its last reader.
    """
    graph, backward = step.graph, [op for op in step.graph.ops if step.phases[op.id] is Phase.BACKWARD]
    reach, twins = _forward_reach(step, of_op), originals(step)
    for op in backward:
        known = [layer for v in op.operands if (layer := reach.get(v)) is not None]
        layer = min(known) if known else None
        if op.primitive == "optimization_barrier":
            # A barrier delays the recomputation that reads it, so it is placed with its readers, below.
            reach.update({r: reach[v] for r, v in zip(op.results, op.operands, strict=True) if v in reach})
            continue
        twin = graph.producer[twins[op.results[0]][0]] if op.results and op.results[0] in twins else None
        if twin is not None and of_op[twin] is not None:
            layer = of_op[twin]
        for v in op.operands:
            # Cotangents descend, so a layer above the producer cannot read them; a recomputed value it can, as its
            # forward original (`recomputation.read_originals_across`).
            producer = graph.producer[v]
            made = of_op[producer] if producer is not None and step.phases[producer] is Phase.BACKWARD else None
            if layer is not None and made is not None and made < layer and v not in twins:
                layer = made
        of_op[op.id] = layer
        if layer is not None:
            for r in op.results:
                reach[r] = max(reach.get(v, layer) for v in twins.get(r, (r,)))
    # An op that reads only batch data and parameters runs in the last of its readers' layers, whose backward pass is
    # first.
    for op in reversed(backward):
        if of_op[op.id] is None:
            readers = [of_op[c] for r in op.results for c in graph.consumers[r] if step.phases[c] is Phase.BACKWARD]
            layers = [layer for layer in readers if layer is not None]
            of_op[op.id] = max(layers) if layers else count - 1


def _forward_reach(step: StepGraph, of_op: Sequence[int | None]) -> dict[int, int]:
    """Return for each value the last layer that holds it in the forward pass: its last reader's, or its own."""
    graph, reach = step.graph, dict[int, int]()
    for value in graph.values:
        producer = graph.producer[value.id]
        made = of_op[producer] if producer is not None else None
        phase = step.phases[producer] if producer is not None else Phase.INVARIANT
        if value.literal is not None or phase not in (Phase.FORWARD, Phase.INVARIANT):
            continue
        readers = (of_op[c] for c in readers_of(step, value.id) if step.phases[c] is Phase.FORWARD)
        layers = [layer for layer in (made, *readers) if layer is not None]
        operands = graph.ops[producer].operands if producer is not None else ()
        known = [reach[v] for v in operands if v in reach]
        if layers:
            reach[value.id] = max(layers)
        elif known:
            # An invariant value that only the backward pass reads (a transposed weight) is held where its operands are.
            reach[value.id] = min(known)
    return reach


def _homes_by_parameter(step: StepGraph, of_op: Sequence[int | None]) -> dict[int, int]:
    """Return the home layer of each value that the update combines elementwise with a parameter.

    These are gradients, moments and new parameters, which have as many elements as the parameter. Scalars (learning
    rates, norms) are excluded: they are combined with every parameter.
    """
    import networkx as nx

    graph, sizes = step.graph, [v.num_elements for v in step.graph.values]
    of_input = dict(zip(graph.inputs, _loop_homes(step, of_op), strict=True))
    combined: nx.Graph[int] = nx.Graph()
    # A parameter that no update reads is a group of its own.
    combined.add_nodes_from(of_input)
    for op in graph.ops:
        if step.phases[op.id] is Phase.UPDATE:
            size = max([sizes[r] for r in op.results], default=1)
            nx.add_path(combined, [v for v in (*op.operands, *op.results) if sizes[v] == size > 1])
    homes: dict[int, int] = {}
    for group in nx.connected_components(combined):
        known = [home for v in group if (home := of_input.get(v)) is not None]
        if known:
            homes.update(dict.fromkeys(group, min(known)))
    return homes


def _gradient_layers(step: StepGraph, of_op: list[int | None], homes: Mapping[int, int]) -> None:
    """Move gradients down to the layer of their parameter, as far as their operands are held there too."""
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
            # No lower than the layers that read it and those that hold what it reads.
            of_op[op_id] = min(here, max(*wanted, *held, 0))


def _leading_to_updates_alone(step: StepGraph) -> dict[int, None]:
    """Return the backward ops that sum over the batch and whose results only updates read in the end, last op first."""
    graph, alone = step.graph, dict[int, None]()
    for op in reversed(graph.ops):
        readers = {c for r in op.results for c in graph.consumers[r]}
        summed = step.batch.size is not None and all(step.batch_dims[r] is None for r in op.results)
        if step.phases[op.id] is Phase.BACKWARD and summed and readers:
            if all(step.phases[c] is Phase.UPDATE or c in alone for c in readers):
                alone[op.id] = None
    return alone


def _lowest_reads(step: StepGraph, of_op: Sequence[int | None]) -> dict[int, int]:
    """Return for each value the lowest layer that holds it: the producer's, or for a cotangent its lowest reader's."""
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
    """Assign to each update op the layer of its largest result or operand.

    Ops on scalars without a layer of their own go to the first layer that reads their results.
    """
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
    """Return the home of each input.

    It is the first layer whose forward or backward pass reads the input, else its parameter's, else the first layer
    whose update reads it.
    """
    table: list[int] = []
    for v, home in zip(step.graph.inputs, _loop_homes(step, of_op), strict=True):
        readers = (of_op[c] for c in readers_of(step, v))
        later = min((layer for layer in readers if layer is not None), default=0)
        table.append(home if home is not None else homes.get(v, later))
    return tuple(table)


def _loop_homes(step: StepGraph, of_op: Sequence[int | None]) -> Iterator[int | None]:
    """Yield for each input the first layer whose forward pass reads it, else whose backward pass does, else None."""
    for v in step.graph.inputs:
        readers = readers_of(step, v)
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            layers = [layer for c in readers if step.phases[c] is phase and (layer := of_op[c]) is not None]
            if layers:
                yield min(layers)
                break
        else:
            yield None


def readers_of(step: StepGraph, value: int) -> set[int]:
    """Return the ops that read a value, directly or through invariant ops, which are repeated with their readers."""
    graph, readers, queue = step.graph, set[int](), [value]
    while queue:
        for c in graph.consumers[queue.pop()]:
            if c not in readers:
                readers.add(c)
                if step.phases[c] is Phase.INVARIANT:
                    queue += graph.ops[c].results
    return readers
