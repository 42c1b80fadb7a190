"""Micro-batching is sharding the batch over time: which ops run once per micro-batch, and which once per step.

Two traces of one step at two batch sizes have the same ops and differ in shapes; the dims that differ carry the
batch (batch_dims). From them, and from the data flow, follow the phases of the ops (assign_phases):

    FORWARD, BACKWARD   the loop: ops that touch the batch, once per micro-batch
    UPDATE              ops that follow what the loop sums up, once per step, and those on arrays of state that the loop
                        does not read (the size of each weight, by which some optimizers scale)
    INVARIANT           ops that depend on parameters, keys and counters alone; cheap, repeated wherever they are read

What the loop hands to the update is put together from its micro-batches, in the way that is proven to give the full
batch's value (`step.additivity`); a step for which there is no proof is refused with the user's line.

The values of a step that are there before its loop begins and that no micro-batch has one of its own of.

The part of a stage's backward pass that no other stage waits for: mostly the gradients of its weights.

    input part     backward ops from which a value of another stage's loop descends
    weight part    the other backward ops of the stage                                       (`weight_gradient_ops`)

Qi et al., "Zero Bubble Pipeline Parallelism" (ICLR'24), section 2, for any graph: the data flow decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from alpa_lite.errors import TraceError
from alpa_lite.program.ir import Graph, Op
from alpa_lite.program.memo import memoized


class Phase(Enum):
    """When an op runs."""

    INVARIANT = "invariant"
    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"

    @property
    def in_loop(self) -> bool:
        """True for ops that run once per micro-batch."""
        return self in (Phase.FORWARD, Phase.BACKWARD)


class Combination(Enum):
    """How the micro-batches' parts of a value without samples are combined, where they are not added up."""

    SAME = "same"
    MAX = "max"
    MIN = "min"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafPart:
    """What a graph input (or output) is: an argument (or output) of the step, by number, or some rows of it.

    `rows` are the first and last + 1 of the leading dim. Arrays that the function captured count after the arguments.
    """

    leaf: int
    rows: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True)
class StepGraph:
    """A train step cut into phases, at the size of one micro-batch.

    graph        the ops at micro-batch shapes, with the literals of the full batch
    full_shapes  shape of each value in the full-batch step
    batch_dims   for each value the dim that carries the batch, or None
    phases       for each op its phase
    bodies       the same of the values of each body of control flow, at any depth
    input_parts  what each graph input is; stacked arguments come in parts where loops do
    output_parts what each graph output is
    aliases      graph output value → graph input value that it replaces in the next step (state in, state out)
    batch_problem  why there is no batch size
    loop_parts   into how many parts at least loops over layers were cut; 0 when they were kept
    averaged     the loop's results are averaged over micro-batches, as the step is no sum over its samples
    combined     results of the loop without samples that are not added up over micro-batches: how they are combined
    runs         graph output → into how many runs its samples are dealt out again (1)
    """

    graph: Graph
    full_shapes: tuple[tuple[int, ...], ...]
    batch_dims: tuple[int | None, ...]
    phases: tuple[Phase, ...]
    num_microbatches: int
    batch_size: int | None
    bodies: Mapping[Graph, BodyScope] = field(default_factory=dict[Graph, "BodyScope"])
    input_parts: tuple[LeafPart, ...]
    output_parts: tuple[LeafPart, ...]
    aliases: Mapping[int, int]
    batch_problem: str = ""
    loop_parts: int = 0
    averaged: bool = False
    combined: Mapping[int, Combination] = field(default_factory=dict[int, Combination])
    runs: Mapping[int, int] = field(default_factory=dict[int, int])

    def runs_of(self, op: Op) -> int:
        """How often an op runs per step."""
        return self.num_microbatches if self.phases[op.id].in_loop else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyScope:
    """Shapes at the full batch and batch dims of the values of one loop body."""

    full_shapes: tuple[tuple[int, ...], ...]
    batch_dims: tuple[int | None, ...]


def body_scopes(graph: Graph, full: Graph, other: Graph) -> dict[Graph, BodyScope]:
    """The scope of each body in `graph`, from the traces at the full batch and at another size; see `batch_dims`."""
    table: dict[Graph, BodyScope] = {}
    for a, b, c in zip(graph.ops, full.ops, other.ops, strict=True):
        for body, large, small in zip(a.bodies, b.bodies, c.bodies, strict=True):
            if body in table:
                continue
            shapes = tuple(v.shape for v in large.values)
            table[body] = BodyScope(full_shapes=shapes, batch_dims=batch_dims(large, small))
            table.update(body_scopes(body, large, small))
    return table


def with_own_bodies(graph: Graph) -> Graph:
    """The graph with bodies of which none is one object with another, at any depth."""
    if not any(op.bodies for op in graph.ops):
        return replace(graph)
    ops = (replace(op, bodies=tuple(map(with_own_bodies, op.bodies))) if op.bodies else op for op in graph.ops)
    return replace(graph, ops=tuple(ops))


def check_same_structure(full: Graph, other: Graph) -> None:
    """Both traces must be one program at two sizes; a step that branches on its batch size in Python is refused."""
    checked: set[tuple[Graph, Graph]] = set()
    for a, b in zip(full.ops, other.ops, strict=False):
        if a.primitive != b.primitive or a.operands != b.operands:
            raise TraceError(
                f"The step changes with its batch size: at {a.source or 'an unknown line'} the full batch runs "
                f"{a.primitive!r} where a micro-batch runs {b.primitive!r}. Micro-batching needs a step whose Python "
                "code does not look at the batch size; use num_microbatches=1 otherwise."
            )
        for pair in zip(a.bodies, b.bodies, strict=True):
            if pair not in checked:
                check_same_structure(*pair)
                checked.add(pair)
    if len(full.ops) != len(other.ops) or len(full.values) != len(other.values):
        raise TraceError(
            f"The step changes with its batch size: {len(full.ops)} operations at the full batch, {len(other.ops)} "
            "at another size. Micro-batching needs the same program at every size; use num_microbatches=1 otherwise."
        )


def batch_dims(full: Graph, other: Graph) -> tuple[int | None, ...]:
    """For each value the dim whose size differs between the two traces; the first where several do."""
    table: list[int | None] = []
    for a, b in zip(full.values, other.values, strict=True):
        dims = (d for d, (m, n) in enumerate(zip(a.shape, b.shape, strict=True)) if m != n)
        table.append(next(dims, None))
    return tuple(table)


def loop_ops(graph: Graph, batch: tuple[int | None, ...]) -> set[int]:
    """Ops that touch the batch, and those between them: which follow from some and which others wait for."""
    touches = {op.id for op in graph.ops if any(batch[v] is not None for v in (*op.operands, *op.results))}
    follows: set[int] = set()  # values
    between: list[Op] = []
    for op in graph.ops:
        if op.id in touches:
            follows.update(op.results)
        elif any(v in follows for v in op.operands):
            follows.update(op.results)
            between.append(op)
    needed = {v for i in touches for v in graph.ops[i].operands}
    loop = set(touches)
    for op in reversed(between):
        if any(r in needed for r in op.results):
            needed.update(op.operands)
            loop.add(op.id)
    return loop


def forward_or_backward(graph: Graph, loop: set[int], batch: Sequence[int | None] = ()) -> dict[int, Phase]:
    """Phase of each op of the loop: by JAX's transpose marks and data flow; without marks by the last first use.

    `batch`: the batch dim of each value. A loop without marks that sums up nothing of the form of a parameter has no
    backward pass.
    """
    marked = any("transpose(" in graph.ops[i].name_stack for i in loop)
    if not marked and batch and not _sums_gradients(graph, loop, batch):
        return dict.fromkeys(sorted(loop), Phase.FORWARD)
    first_uses = (next((c for c in graph.consumers[v] if c in loop), -1) for v in graph.inputs)
    last_first_use = max(first_uses, default=-1)
    phases: dict[int, Phase] = {}
    backward_values: set[int] = set()
    for op in graph.ops:
        if op.id not in loop:
            # An op outside the loop hands the mark on, so that no forward op ever follows a backward one.
            if any(v in backward_values for v in op.operands):
                backward_values.update(op.results)
            continue
        mark = "transpose(" in op.name_stack if marked else op.id > last_first_use
        if mark or any(v in backward_values for v in op.operands):
            phases[op.id] = Phase.BACKWARD
            backward_values.update(op.results)
        else:
            phases[op.id] = Phase.FORWARD
    return phases


def _sums_gradients(graph: Graph, loop: set[int], batch: Sequence[int | None]) -> bool:
    """Whether the loop hands on a value without the batch that has the form of an argument without the batch."""
    forms = {(v.shape, v.dtype) for v in map(graph.values.__getitem__, graph.inputs) if v.rank and batch[v.id] is None}
    outputs = set(graph.outputs)
    return any(
        batch[r] is None
        and (graph.values[r].shape, graph.values[r].dtype) in forms
        and (r in outputs or any(c not in loop for c in graph.consumers[r]))
        for i in loop
        for r in graph.ops[i].results
    )


def assign_phases(graph: Graph, loop: set[int], batch: Sequence[int | None] = ()) -> tuple[Phase, ...]:
    """Phase of every op of the graph, given the ops of the loop, and the batch dim of each value."""
    inside = forward_or_backward(graph, loop, batch)
    needed, of_state, depends = _needed_by(graph, loop), set(graph.inputs), set[int]()
    phases: list[Phase] = []
    for op in graph.ops:
        arrays = [v for v in op.operands if v in of_state and graph.values[v].rank > 0]
        if arrays:
            of_state.update(op.results)
        if op.id in inside:
            phases.append(inside[op.id])
            depends.update(op.results)
        elif op.effectful or any(v in depends for v in op.operands) or (arrays and op.id not in needed):
            # What has an effect happens once, not wherever it is read; and state is not brought to all its readers.
            phases.append(Phase.UPDATE)
            depends.update(op.results)
        else:
            phases.append(Phase.INVARIANT)
    return tuple(phases)


def loop_without_batch(graph: Graph) -> set[int]:
    """The loop of a step whose batch is unknown: the ops that JAX marked as differentiated, and what lies between."""
    marked = [op.id for op in graph.ops if "jvp(" in op.name_stack or "transpose(" in op.name_stack]
    last = max(marked, default=len(graph.ops) - 1)
    depends: set[int] = set()
    loop: set[int] = set()
    for op in graph.ops[: last + 1]:
        if op.id in marked or not marked or any(v in depends for v in op.operands):
            loop.add(op.id)
            depends.update(op.results)
    return loop


def without_gaps(graph: Graph, loop: set[int]) -> set[int]:
    """Return the loop with the ops through which one of its ops reads what another one made.

    Such an op has no batch (a part of the batch that the user cut out, say), but can run neither before nor after the
    loop.
    """
    needed, closed, made = _needed_by(graph, loop), set(loop), set[int]()
    for op in graph.ops:
        if op.id in needed and any(v in made for v in op.operands):
            closed.add(op.id)
        if op.id in closed:
            made.update(op.results)
    return closed


def effects_before(graph: Graph, loop: set[int]) -> set[int]:
    """Ops with an effect that the loop waits for: they run in it."""
    return {i for i in _needed_by(graph, loop) if graph.ops[i].effectful}


def _needed_by(graph: Graph, loop: set[int]) -> set[int]:
    """Ops outside the loop whose results it reads, through others too."""
    needed = {v for i in loop for v in graph.ops[i].operands}
    found: set[int] = set()
    for op in reversed(graph.ops):
        if op.id not in loop and any(r in needed for r in op.results):
            needed.update(op.operands)
            found.add(op.id)
    return found


@memoized
def parameters(step: StepGraph) -> frozenset[int]:
    """Arguments without a batch, and what invariant ops make."""
    graph = step.graph
    ready = ((v.id, graph.producer[v.id]) for v in graph.values if step.batch_dims[v.id] is None)
    return frozenset(v for v, producer in ready if producer is None or step.phases[producer] is Phase.INVARIANT)


def weight_gradient_ops(step: StepGraph, ops: Iterable[int]) -> frozenset[int]:
    """Of the ops of a stage, by number, the backward ones that nothing in the loop of another stage waits for."""
    graph, phases = step.graph, step.phases
    mine = sorted(o for o in ops if phases[o] is Phase.BACKWARD)
    awaited, here = set[int](), frozenset(mine)
    for op_id in reversed(mine):
        readers = (c for r in graph.ops[op_id].results for c in graph.consumers[r])
        if any(c in awaited or (c not in here and phases[c].in_loop) for c in readers):
            awaited.add(op_id)
    return here - awaited
