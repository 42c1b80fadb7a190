"""The phases of a train step: which ops run once per micro-batch, and which once per step.

Micro-batching shards the batch over time. Two traces of one step at two batch sizes have the same ops and differ only
in shapes; the dims that differ carry the batch (`batch_dims`). The phases follow from these dims and from the data flow
(`assign_phases`):

    FORWARD, BACKWARD   the micro-batch loop: ops that depend on the batch, once per micro-batch
    UPDATE              once per step: ops that depend on results of the loop, and ops on arrays of state that the loop
                        does not read (for instance the norm of each weight, by which some optimizers scale)
    INVARIANT           ops that depend only on parameters, keys and counters; cheap, and repeated in every reader

A result of the loop that the update reads is combined over micro-batches by a rule that is proven to give its value at
the full batch (`step.additivity`); a step without a proof is rejected with an error that names the user's line.

The loop reads two sorts of values from outside: slices of the batch, and `parameters`, which are available before the
loop starts and are the same for all micro-batches.

For zero-bubble schedules, the backward pass of a stage is split in two (Qi et al., "Zero Bubble Pipeline Parallelism",
ICLR'24, section 2; here for any graph, by data flow):

    input part     backward ops on which the loop of another stage depends
    weight part    the other backward ops, mostly gradients of weights                       (`weight_gradient_ops`)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from alpa_lite.errors import TraceError
from alpa_lite.program.ir import Graph, Op
from alpa_lite.program.memo import memoized

GATHERED_AHEAD = 2
"""How many of the largest units of parameters a program may gather at a time: one that is read, and one for the next
op."""


class Phase(Enum):
    """The part of a train step in which an op runs; the module docstring defines the members."""

    INVARIANT = "invariant"
    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"

    @property
    def in_loop(self) -> bool:
        """Whether ops of this phase run once per micro-batch."""
        return self in (Phase.FORWARD, Phase.BACKWARD)


class Combination(Enum):
    """The reduction over micro-batches of a loop result without a batch dim, for results that are not summed.

    SAME means that all micro-batches compute the same value.
    """

    SAME = "same"
    MAX = "max"
    MIN = "min"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafPart:
    """The origin of a graph input (or output): a leaf of the step's arguments (or outputs), or a range of its rows.

    leaf    position among the flattened arguments (or outputs); arrays captured by the function follow the arguments
    rows    (start, stop) along the leading dim, or None for the whole array
    """

    leaf: int
    rows: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """The full batch of a step.

    size     number of samples; None if it is unknown
    problem  the reason why no size could be determined; empty otherwise
    """

    size: int | None
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopResults:
    """How the results that the micro-batches compute become those of the step; by default their values are summed.

    averaged  they are averaged instead, because the step is not a sum over its samples
    combined  results without a batch dim that are not summed → their reduction
    runs      graph output value → number of runs into which its samples are divided; 1 if absent
    """

    averaged: bool = False
    combined: Mapping[int, Combination] = field(default_factory=dict[int, Combination])
    runs: Mapping[int, int] = field(default_factory=dict[int, int])


@dataclass(frozen=True, kw_only=True)
class StepGraph:
    """A train step divided into phases, traced at the size of one micro-batch.

    graph             the ops at micro-batch shapes, with the literals of the full batch
    full_shapes       shape of each value in the full-batch step
    batch_dims        for each value the dim that carries the batch, or None
    phases            for each op its phase
    num_microbatches  how often the loop runs per step
    batch             the size of the full batch
    bodies            full shapes and batch dims of the values of each body of control flow, at any depth
    input_parts       the origin of each graph input; stacked arguments are split where the loops that read them are
    output_parts      the origin of each graph output
    aliases           graph output value → graph input value that it replaces in the next step (updated state)
    loop_parts        minimum number of parts into which loops over layers were split; 0 if they were not split
    loop_results      how the results of the micro-batches are combined
    num_updates       how often the update runs per step, each time for equally many micro-batches; above 1 in
                      asynchronous pipelines alone
    """

    graph: Graph
    full_shapes: tuple[tuple[int, ...], ...]
    batch_dims: tuple[int | None, ...]
    phases: tuple[Phase, ...]
    num_microbatches: int
    batch: StepBatch
    bodies: Mapping[Graph, BodyScope] = field(default_factory=dict[Graph, "BodyScope"])
    input_parts: tuple[LeafPart, ...]
    output_parts: tuple[LeafPart, ...]
    aliases: Mapping[int, int]
    loop_parts: int = 0
    loop_results: LoopResults = field(default_factory=LoopResults)
    num_updates: int = 1

    @property
    def microbatches_per_update(self) -> int:
        """The number of micro-batches whose sums one update reads."""
        return self.num_microbatches // self.num_updates

    @property
    def accumulates(self) -> bool:
        """Whether sums over micro-batches are added up: an update reads those of more than one."""
        return self.microbatches_per_update > 1

    def argument_paths(self) -> dict[int, str]:
        """Return the path of the argument of each input of the graph; rows of a stacked argument have one path."""
        names = {v: self.graph.values[v].name for v in self.graph.inputs}
        for v, part in zip(self.graph.inputs, self.input_parts, strict=True):
            if part.rows is not None:  # `name[first:last]`
                names[v] = names[v].rpartition("[")[0]
        return names

    def runs_of(self, op: Op) -> int:
        """Return the number of times that an op runs per step."""
        return self.num_microbatches if self.phases[op.id].in_loop else self.num_updates


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyScope:
    """The full-batch shapes and the batch dims of the values of one body of control flow, indexed by value id."""

    full_shapes: tuple[tuple[int, ...], ...]
    batch_dims: tuple[int | None, ...]


def body_scopes(graph: Graph, full: Graph, other: Graph) -> dict[Graph, BodyScope]:
    """Return the scope of each body in `graph`, given traces at the full batch and at another size (`batch_dims`)."""
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
    """Return a copy of the graph in which no two ops share a body object, at any depth.

    Tables about bodies are keyed by identity, and equal bodies can have different batch dims.
    """
    # The copy is a new object in any case: tables about graphs are keyed by identity.
    if not any(op.bodies for op in graph.ops):
        return replace(graph)
    ops = (replace(op, bodies=tuple(map(with_own_bodies, op.bodies))) if op.bodies else op for op in graph.ops)
    return replace(graph, ops=tuple(ops))


def check_same_structure(full: Graph, other: Graph) -> None:
    """Raise TraceError unless both traces have the same ops: a step must not branch on its batch size in Python."""
    checked: set[tuple[Graph, Graph]] = set()
    # Not strict: the first op that differs names a line of the user's code, which a difference in length does not.
    for a, b in zip(full.ops, other.ops, strict=False):
        if a.primitive != b.primitive or a.operands != b.operands:
            raise TraceError(
                f"The step changes with its batch size: at {a.source or 'an unknown line'} the full batch runs "
                f"{a.primitive!r} where a micro-batch runs {b.primitive!r}. Micro-batching needs a step whose Python "
                "code does not look at the batch size; use num_microbatches=1 otherwise."
            )
        for pair in zip(a.bodies, b.bodies, strict=True):
            # Many loops may share a body, which is compared once.
            if pair not in checked:
                check_same_structure(*pair)
                checked.add(pair)
    if len(full.ops) != len(other.ops) or len(full.values) != len(other.values):
        raise TraceError(
            f"The step changes with its batch size: {len(full.ops)} operations at the full batch, {len(other.ops)} "
            "at another size. Micro-batching needs the same program at every size; use num_microbatches=1 otherwise."
        )


def batch_dims(full: Graph, other: Graph) -> tuple[int | None, ...]:
    """Return for each value the first dim whose size differs between the two traces, or None."""
    table: list[int | None] = []
    for a, b in zip(full.values, other.values, strict=True):
        dims = (d for d, (m, n) in enumerate(zip(a.shape, b.shape, strict=True)) if m != n)
        table.append(next(dims, None))
    return tuple(table)


def loop_ops(graph: Graph, batch: tuple[int | None, ...]) -> set[int]:
    """Return the ids of the ops that read or compute a value with a batch dim, and of the ops between them.

    An op is between if it depends on one of them and another one depends on it.
    """
    touches = {op.id for op in graph.ops if any(batch[v] is not None for v in (*op.operands, *op.results))}
    return without_gaps(graph, touches)


def forward_or_backward(graph: Graph, loop: set[int], batch: Sequence[int | None] = ()) -> dict[int, Phase]:
    """Return the phase of each op of the loop, FORWARD or BACKWARD, by op id.

    Ops that JAX marked as transposed are backward, and so is every op that depends on one. In a step without marks
    (gradients written by hand) the backward pass starts after the op at which the last input is first used, since a
    forward pass reads every parameter once. A loop without marks has no backward pass at all if it computes nothing
    with the shape and dtype of a parameter. `batch` holds the batch dim of each value.
    """
    marked = any(_is_transposed(graph.ops[i]) for i in loop)
    if not marked and batch and not _sums_gradients(graph, loop, batch):
        return dict.fromkeys(sorted(loop), Phase.FORWARD)
    first_uses = (next((c for c in graph.consumers[v] if c in loop), -1) for v in graph.inputs)
    last_first_use = max(first_uses, default=-1)
    phases: dict[int, Phase] = {}
    backward_values: set[int] = set()
    for op in graph.ops:
        if op.id not in loop:
            # Ops outside the loop propagate the mark too, so that no forward op depends on a backward one.
            if any(v in backward_values for v in op.operands):
                backward_values.update(op.results)
            continue
        mark = _is_transposed(op) if marked else op.id > last_first_use
        if mark or any(v in backward_values for v in op.operands):
            phases[op.id] = Phase.BACKWARD
            backward_values.update(op.results)
        else:
            phases[op.id] = Phase.FORWARD
    return phases


def _is_transposed(op: Op) -> bool:
    """Return whether JAX's reverse mode added an op: it writes `transpose(` into the name stacks of all of these."""
    return "transpose(" in op.name_stack


@memoized
def trains_in_bodies(graph: Graph) -> bool:
    """Return whether gradients are taken in bodies of ops alone, as where each trip of a scan is a step of training.

    Such a program has no backward pass of its own.
    """
    return not any(map(_is_transposed, graph.ops)) and _has_transposed_bodies(graph)


@memoized
def _has_transposed_bodies(graph: Graph) -> bool:
    bodies = {body for op in graph.ops for body in op.bodies}
    return any(any(map(_is_transposed, body.ops)) or _has_transposed_bodies(body) for body in bodies)


def _sums_gradients(graph: Graph, loop: set[int], batch: Sequence[int | None]) -> bool:
    """Return whether the loop has a result without a batch dim that has the shape and dtype of such an argument."""
    # A gradient has the shape and dtype of its parameter.
    forms = {(v.shape, v.dtype) for v in map(graph.values.__getitem__, graph.inputs) if v.rank and batch[v.id] is None}
    outputs = set(graph.outputs)
    return any(
        batch[r] is None
        and (graph.values[r].shape, graph.values[r].dtype) in forms
        and (r in outputs or any(c not in loop for c in graph.consumers[r]))
        for i in loop
        for r in graph.ops[i].results
    )


def assign_phases(
    graph: Graph, loop: set[int], batch: Sequence[int | None] = (), *, forward_only: bool = False
) -> tuple[Phase, ...]:
    """Return the phase of every op of the graph, given the op ids of the loop and the batch dim of each value.

    forward_only: whether the loop has no backward pass, whatever marks its ops have.
    """
    inside = dict.fromkeys(loop, Phase.FORWARD) if forward_only else forward_or_backward(graph, loop, batch)
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
            # Invariant ops are repeated in every reader. An effect must happen once, and repeating an op on an array of
            # state would send this array to all readers.
            phases.append(Phase.UPDATE)
            depends.update(op.results)
        else:
            phases.append(Phase.INVARIANT)
    return tuple(phases)


def loop_without_batch(graph: Graph) -> set[int]:
    """Return the op ids of the loop of a step whose batch is unknown.

    These are the ops that JAX marked as differentiated, and the ops between them; without marks, all ops.
    """
    marked = [op.id for op in graph.ops if "jvp(" in op.name_stack or "transpose(" in op.name_stack]
    # The ops behind the last mark belong to the update.
    last = max(marked, default=len(graph.ops) - 1)
    depends: set[int] = set()
    loop: set[int] = set()
    for op in graph.ops[: last + 1]:
        if op.id in marked or not marked or any(v in depends for v in op.operands):
            loop.add(op.id)
            depends.update(op.results)
    return loop


def with_differentiated(graph: Graph, loop: set[int]) -> set[int]:
    """Return the ids of the loop's ops, and of the ops that JAX differentiated and that depend on one of them.

    These compute the loss and its gradients from what was summed over the samples.
    """
    found, made = set(loop), set[int]()
    for op in graph.ops:
        marked = "jvp(" in op.name_stack or _is_transposed(op)
        if op.id in loop or (marked and any(v in made for v in op.operands)):
            found.add(op.id)
            made.update(op.results)
    return without_gaps(graph, found)


def without_gaps(graph: Graph, loop: set[int]) -> set[int]:
    """Return the ids of the loop's ops, and of the ops that depend on one of them while another one depends on them.

    Such an op can run neither before nor after the loop, even if none of its values has a batch dim.
    """
    needed, closed, made = _needed_by(graph, loop), set(loop), set[int]()
    for op in graph.ops:
        if op.id in needed and any(v in made for v in op.operands):
            closed.add(op.id)
        if op.id in closed:
            made.update(op.results)
    return closed


def effects_before(graph: Graph, loop: set[int]) -> set[int]:
    """Return the ids of the ops with an effect on which the loop depends; these run in the loop."""
    return {i for i in _needed_by(graph, loop) if graph.ops[i].effectful}


def _needed_by(graph: Graph, loop: set[int]) -> set[int]:
    """Return the ids of the ops outside the loop on which it depends, directly or indirectly."""
    needed = {v for i in loop for v in graph.ops[i].operands}
    found: set[int] = set()
    for op in reversed(graph.ops):
        if op.id not in loop and any(r in needed for r in op.results):
            needed.update(op.operands)
            found.add(op.id)
    return found


@memoized
def parameters(step: StepGraph) -> frozenset[int]:
    """Return the ids of the values that are available before the loop and are the same for all micro-batches.

    These are the inputs and literals without a batch dim, and the results of invariant ops without one.
    """
    graph = step.graph
    ready = ((v.id, graph.producer[v.id]) for v in graph.values if step.batch_dims[v.id] is None)
    return frozenset(v for v, producer in ready if producer is None or step.phases[producer] is Phase.INVARIANT)


def is_parameter(step: StepGraph, graph: Graph, value: int) -> bool:
    """Return True for a value that enters the loop, or a trip of a loop in it, without a batch dim.

    `graph`: that of the step, or a body in it.
    """
    if graph is step.graph:
        return value in parameters(step)
    scope = step.bodies.get(graph)
    return graph.producer[value] is None and (scope is None or scope.batch_dims[value] is None)


def weight_gradient_ops(step: StepGraph, ops: Iterable[int]) -> frozenset[int]:
    """Return the backward ops of a stage, given its op ids, on which nothing in the loop of another stage depends."""
    graph, phases = step.graph, step.phases
    mine = sorted(o for o in ops if phases[o] is Phase.BACKWARD)
    awaited, here = set[int](), frozenset(mine)
    # Readers have higher ids, so that one pass from the end suffices.
    for op_id in reversed(mine):
        readers = (c for r in graph.ops[op_id].results for c in graph.consumers[r])
        # Another stage may wait for a result directly, or through later ops of this stage.
        if any(c in awaited or (c not in here and phases[c].in_loop) for c in readers):
            awaited.add(op_id)
    return here - awaited
