"""The ops that one stage of a step runs, and the data flow across its borders.

What is derived here depends on no decision about the stage: plans of one step whose stages run the same ops share one
`StageOps`, as the classic plans of one stage do with the search.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

from alpa_lite.program.identity import FirstUses, params_texts, structure
from alpa_lite.program.ir import Graph, Op
from alpa_lite.program.memo import memoized
from alpa_lite.program.phases import Phase, StepGraph
from alpa_lite.rules.op_info import free_ops, op_class
from alpa_lite.step.layers import Layers


def stage_ops(step: StepGraph, layers: Layers, first: int, last: int) -> StageOps:
    """Return the ops of the layers `first..last` of a step; the same object for layers that hold the same ops."""
    own = int(first > 0)

    def stage_of(layer: int) -> int:
        return own + (layer > last) - (layer < first)

    numbers = [stage_of(layer) for layer in range(layers.num_layers)]
    of_op = tuple([None if layer is None else numbers[layer] for layer in layers.of_op])
    of_input = tuple([numbers[layer] for layer in layers.of_input])
    return _stage_ops(step, of_op, of_input, own, last == layers.num_layers - 1)


@memoized
def _stage_ops(
    step: StepGraph, of_op: tuple[int | None, ...], of_input: tuple[int, ...], own: int, is_last: bool
) -> StageOps:
    return StageOps(step=step, stage_of_op=of_op, stage_of_input=of_input, own=own, is_last=is_last)


def _loop_kind(graph: Graph, op: Op) -> tuple[object, ...]:
    """Return a key that is equal for ops whose bodies do the same to the same shapes."""
    literals = tuple([v.literal for v in graph.operands(op)])
    results = tuple([(v.shape, v.dtype) for v in graph.results(op)])
    return (op.primitive, params_texts(graph)[op.id], tuple(map(structure, op.bodies)), literals, results)


# Without slots, which would leave no place for cached properties.
@dataclass(frozen=True, kw_only=True, eq=False)
class StageOps:
    """The ops of one stage, between a stage of all layers before and one of all layers after it.

    Attributes:
        step: the step.
        stage_of_op: stage of each op; None for invariant ops.
        stage_of_input: stage on which each graph input is stored, in the order of the inputs.
        own: number of this stage: 0 if no layers are before it, else 1.
        is_last: whether no layers are after it.
    """

    step: StepGraph
    stage_of_op: tuple[int | None, ...]
    stage_of_input: tuple[int, ...]
    own: int
    is_last: bool

    def __getstate__(self) -> dict[str, object]:
        """Return the state that is pickled for other processes: the fields, without what was derived from them."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @property
    def graph(self) -> Graph:
        """The graph of the whole step, which value and op ids refer to."""
        return self.step.graph

    @property
    def is_whole(self) -> bool:
        """Whether this stage is the whole step."""
        return self.own == 0 and self.is_last

    @cached_property
    def ops(self) -> tuple[int, ...]:
        """The ids of the ops of this stage in order, with the free and invariant ops of others that it repeats."""
        graph, of_op, free = self.graph, self.stage_of_op, free_ops(self.graph)
        chosen = {op for op, stage in enumerate(of_op) if stage == self.own}
        waiting = [v for op_id in chosen for v in graph.ops[op_id].operands]
        if self.own == 0 or self.step.num_updates > 1:
            # Outputs that depend on nothing but inputs (step counters, new keys) are made by the first stage, and by
            # all that read them where stages do not wait for each other's updates.
            waiting += [v for v in graph.outputs if self.is_invariant_value(v)]
        while waiting:
            maker = graph.producer[waiting.pop()]
            if maker is not None and maker not in chosen and (of_op[maker] is None or maker in free):
                chosen.add(maker)
                waiting += graph.ops[maker].operands
        return tuple(sorted(chosen))  # ids are in execution order

    def is_invariant_value(self, value: int) -> bool:
        """Return True for results of invariant ops."""
        producer = self.graph.producer[value]
        return producer is not None and self.step.phases[producer] is Phase.INVARIANT

    def is_read_in_loop(self, value: int) -> bool:
        """Return True for values that forward or backward ops read, directly or through invariant ops."""
        graph, phases, queue, seen = self.graph, self.step.phases, [value], {value}
        while queue:
            for c in graph.consumers[queue.pop()]:
                if phases[c].in_loop:
                    return True
                if phases[c] is Phase.INVARIANT:
                    queue += [r for r in graph.ops[c].results if r not in seen]
                    seen.update(graph.ops[c].results)
        return False

    @cached_property
    def op_set(self) -> frozenset[int]:
        """The ids of `ops` as a set."""
        return frozenset(self.ops)

    @cached_property
    def external(self) -> tuple[int, ...]:
        """The values read here but computed elsewhere: graph inputs and values of other stages (no literals)."""
        # A dict serves as an ordered set: `remap` pairs the values of two stages by their order.
        graph, found = self.graph, dict[int, None]()
        for op_id in self.ops:
            for v in graph.ops[op_id].operands:
                producer = graph.producer[v]
                if graph.values[v].literal is None and (producer is None or producer not in self.op_set):
                    found[v] = None
        for v in graph.inputs:
            # State that passes through unread still takes memory on some stage.
            if not graph.consumers[v] and self.lives_here(v):
                found[v] = None
        return tuple(found)

    def lives_here(self, value: int) -> bool:
        """Return True for graph inputs that are stored in this stage."""
        return self._homes.get(value) == self.own

    @cached_property
    def _homes(self) -> dict[int, int]:
        return dict(zip(self.graph.inputs, self.stage_of_input, strict=True))

    @cached_property
    def leaves(self) -> frozenset[int]:
        """The values computed here that other stages or the caller read."""
        outputs = set(self.graph.outputs)
        return frozenset(
            r
            for op_id in self.ops
            for r in self.graph.ops[op_id].results
            if r in outputs or not self.op_set.issuperset(self.graph.consumers[r])
        )

    @cached_property
    def crossing(self) -> tuple[int, ...]:
        """The values that the loop of this stage sums over micro-batches, for updates or for the caller."""
        graph, step = self.graph, self.step
        outputs = set(graph.outputs)
        return tuple(
            r
            for op_id in self.ops
            if step.phases[op_id].in_loop
            for r in graph.ops[op_id].results
            if step.batch_dims[r] is None
            and (r in outputs or any(step.phases[c] is Phase.UPDATE for c in graph.consumers[r]))
        )

    def runs_of(self, op: Op) -> int:
        """Return how often an op runs per step here; invariant ops run as often as their most frequent reader."""
        if self.step.phases[op.id] is not Phase.INVARIANT:
            return self.step.runs_of(op)
        return self.step.num_microbatches if op.id in self._invariant_in_loop else self.step.num_updates

    @cached_property
    def _invariant_in_loop(self) -> frozenset[int]:
        graph, step, found, needed = self.graph, self.step, set[int](), set[int]()
        # Backwards: an invariant op is in the loop if a reader is, and readers follow the ops that they read.
        for op_id in reversed(self.ops):
            op = graph.ops[op_id]
            if step.phases[op_id].in_loop or any(r in needed for r in op.results):
                needed.update(op.operands)
                if step.phases[op_id] is Phase.INVARIANT:
                    found.add(op_id)
        return frozenset(found)

    @property
    def numbers(self) -> FirstUses[int]:
        """The number of each value by its first use, so that the place of the stage in the graph plays no part."""
        return self._numbered[0]

    @property
    def signature(self) -> tuple[object, ...]:
        """A key that is equal for stages that run the same ops on the same shapes, wherever they lie in the graph."""
        return self._numbered[1]

    @cached_property
    def _numbered(self) -> tuple[FirstUses[int], tuple[object, ...]]:
        graph, number = self.graph, FirstUses[int]()
        local = number.__getitem__
        values, batch_dims, rows = graph.values, self.step.batch_dims, list[object]()
        for op_id in self.ops:
            op = graph.ops[op_id]
            # The class covers shapes, but compares bodies by identity; `_loop_kind` compares contents.
            kind = _loop_kind(graph, op) if op.bodies else op_class(graph, op_id).price
            operands = tuple([local(v) if values[v].literal is None else None for v in op.operands])
            results = tuple([(local(r), batch_dims[r]) for r in op.results])
            rows.append((kind, operands, results, self.step.phases[op_id].value))
        outer = tuple(
            (local(v), graph.values[v].shape, graph.values[v].dtype, self.step.batch_dims[v], self.lives_here(v))
            for v in self.external
        )
        # State that is replaced must come back in its own spec, which ties nodes of the problem together.
        aliases = tuple((local(o), local(i)) for o, i in self.step.aliases.items() if o in number and i in number)
        # A value that other stages read is kept in memory, and is not recomputed by its readers.
        leaves = tuple(sorted(local(v) for v in self.leaves))
        runs = self.step.num_microbatches, self.step.num_updates
        return number, (tuple(rows), outer, aliases, leaves, runs)
