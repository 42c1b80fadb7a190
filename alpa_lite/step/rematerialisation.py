"""Rematerialise: let the backward pass of layers recompute the values of their forward pass that it reads.

In loops over layers, each trip of the backward pass repeats the forward trip whose residuals it reads
(`recomputed_trips`). Outside of loops, copies of forward ops become ops of the backward pass (`rematerialise`):

read      forward values of a layer that its own backward ops read, from the last layer to the first
stored    outputs, values that backward ops of other layers read, and values that higher layers receive
copied    the forward ops of the layer between stored values and values that are read    (`_StepWriter._closure`)

Values that a layer receives (from other layers, the batch, keys) reach the copies through `optimization_barrier`s, as
under `jax.checkpoint`, which keeps XLA from merging copies with their originals; parameters reach them directly. The
result is an ordinary step, so that the search, prices, memory and lowering need no special cases.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from alpa_lite import _jax
from alpa_lite.errors import PlanError
from alpa_lite.program.editor import Origin, ProgramEditor
from alpa_lite.program.equations import Equation
from alpa_lite.program.ir import MOVES, Graph, Op, Value
from alpa_lite.program.phases import Phase, StepGraph
from alpa_lite.rules.op_info import free_values
from alpa_lite.step.recomputation import Remat as Remat
from alpa_lite.step.recomputation import keeps_results
from alpa_lite.step.recomputed_trips import closure, repeat_trips
from alpa_lite.trace import inserted


@dataclass(frozen=True, kw_only=True, eq=False)
class LayeredStep:
    """A step with the layer of each op, as it was traced or rewritten.

    Attributes:
        step: the step.
        of_op: layer of each op; None for ops that are repeated where they are read.
        origins: for each rewritten graph or body, the traced op that each op is or repeats; None for barriers
            and copies to the host and back.
    """

    step: StepGraph
    of_op: tuple[int | None, ...]
    origins: Mapping[Graph, tuple[Origin | None, ...]]

    @staticmethod
    def of(step: StepGraph, of_op: Sequence[int | None]) -> LayeredStep:
        """Return the step as it was traced, in layers."""
        return LayeredStep(step=step, of_op=tuple(of_op), origins={})

    @property
    def graph(self) -> Graph:
        """The graph of the step."""
        return self.step.graph

    def equations(self, traced: Graph, equations: Sequence[Equation]) -> tuple[Equation, ...]:
        """Return the equation of each op, from those of the graph as it was traced: copies take that of their origin.

        Ops that have none are optimization barriers, or copies to the host and back.
        """
        # By graph, since an op is identified by its number within the graph or body that contains it.
        known, own = dict[Graph, tuple[Equation, ...]](), tuple(equations)
        _register(known, traced, own)
        # A graph without origins has the ops of the traced one in their order, though some may be rewired.
        made = dict[Graph, tuple[Equation, ...]]() if self.graph in self.origins else {self.graph: own}

        # Loop bodies are shared between ops: each one is rewritten once, so that equal bodies remain one object.
        def of_graph(written: Graph) -> tuple[Equation, ...]:
            if written not in made:
                if written not in self.origins:
                    return known[written]
                pairs = zip(written.ops, self.origins[written], strict=True)
                made[written] = tuple(of_written(written, op, origin) for op, origin in pairs)
            return made[written]

        def of_written(written: Graph, op: Op, origin: Origin | None) -> Equation:
            if origin is None and op.primitive in MOVES:
                return Equation(primitive=inserted.MOVE_PRIMITIVES[op.primitive], params={})
            if origin is None:
                value = written.values[op.operands[0]]
                eqn = inserted.barrier_equation(_jax.struct(value.shape, value.dtype))
                return Equation(primitive=eqn.primitive, params=eqn.params)
            equation = known.get(origin.graph, own)[origin.op]
            return replace(equation, bodies=tuple(map(of_graph, op.bodies))) if op.bodies else equation

        return of_graph(self.graph)


def _register(known: dict[Graph, tuple[Equation, ...]], graph: Graph, equations: tuple[Equation, ...]) -> None:
    """Add the equations of `graph` and of all bodies nested in it to `known`."""
    if graph in known:
        return
    known[graph] = equations
    for op, equation in zip(graph.ops, equations, strict=True):
        for body, inner in zip(op.bodies, equation.bodies, strict=True):
            _register(known, body, inner)


def rematerialise(step: StepGraph, of_op: Sequence[int | None], remat: Sequence[Remat]) -> LayeredStep:
    """Return the step whose layers follow the policies of `remat`; it computes the same values.

    Values retain their ids, and new ones are appended; ops are renumbered.

    Args:
        step: the step as it was traced.
        of_op: layer of each op of `step`, or None.
        remat: the policy of each layer.

    Raises:
        PlanError: there are fewer policies than layers.
    """
    num_layers = 1 + max((layer for layer in of_op if layer is not None), default=0)
    if len(remat) < num_layers:
        raise PlanError(f"{len(remat)} policies of rematerialisation were given for {num_layers} layers.")
    if all(policy is Remat.NONE for policy in remat):
        return LayeredStep.of(step, of_op)
    remat = [policy.recomputed for policy in remat]
    looped = repeat_trips(step, of_op, remat)
    writer = _StepWriter(looped.step, of_op, remat, looped.forward)
    for op in looped.step.graph.ops:
        writer.write(op)
    made = writer.finished()
    # Loops were rewritten under the ids of the traced ops, so that these are the origins.
    origins = {made.step.graph: tuple(o and Origin(step.graph, o.op) for o in writer.editor.origins)}
    return replace(made, origins={**looped.origins, **origins})


class _StepWriter:
    """Rewrite a step with copies of forward ops before the backward ops that read them."""

    def __init__(
        self, step: StepGraph, of_op: Sequence[int | None], remat: Sequence[Remat], loops: frozenset[int]
    ) -> None:
        """Decide which values are stored.

        `loops` are the forward loops that `repeat_trips` handled. Their results are stored, since their trips are
        repeated one by one inside the backward loop, if at all.
        """
        self.step, self.graph, self.layer_of, self.remat = step, step.graph, of_op, remat
        self.editor = ProgramEditor(step.graph)
        self.layers: list[int | None] = []
        self.phases: list[Phase] = []
        self.again: dict[int, int] = {}  # forward value → its copy
        self.held: dict[tuple[int, int], int] = {}  # (layer, received value) → the value behind a barrier
        self.constant = _constants(step.graph)
        self.stored = {r for loop in loops for r in step.graph.ops[loop].results}
        self._find_stored()

    def _find_stored(self) -> None:
        """Collect the values that are stored, into `stored`."""
        graph, reads = self.graph, dict[int, list[int]]()
        self.stored |= set(graph.outputs)
        for op in graph.ops:
            here = self.layer_of[op.id]
            if self.step.phases[op.id] is not Phase.BACKWARD or here is None:
                continue
            reads.setdefault(here, []).extend(op.operands)
            # Another layer may be on another stage, which cannot recompute the value.
            self.stored |= {v for v in op.operands if self._home(v) != here}
        for op in graph.ops:
            layer = self.layer_of[op.id] if self.step.phases[op.id] is Phase.FORWARD else None
            if layer is not None and keeps_results(self.remat[layer], graph, op, self.step.batch_dims):
                self.stored |= set(op.results)
        # From the last layer on: what its copies receive is stored by lower layers, before those decide what they copy.
        for layer in sorted(reads, reverse=True):
            copied = self._closure(layer, reads[layer])
            self.stored |= {v for o in copied for v in graph.ops[o].operands if self._home(v) not in (None, layer)}

    def _home(self, value: int) -> int | None:
        """Return the layer whose forward pass computes a value, or None."""
        producer = self.graph.producer[value]
        if producer is None or self.step.phases[producer] is not Phase.FORWARD:
            return None
        return self.layer_of[producer]

    def _is_made_again(self, value: int, layer: int) -> bool:
        """Return whether a layer recomputes a value."""
        return self._home(value) == layer and value not in self.stored and value not in self.constant

    def _closure(self, layer: int, reads: Sequence[int]) -> list[int]:
        """Return the ops to copy before an op of a layer that reads these values, in order, without earlier copies."""

        def is_made_again(value: Value) -> bool:
            return value.id not in self.again and self._is_made_again(value.id, layer)

        # Ids ascend in program order.
        return sorted(closure(self.graph, reads, is_made_again))

    def write(self, op: Op) -> None:
        """Append an op; a backward op is preceded by the copies that it needs."""
        layer, phase = self.layer_of[op.id], self.step.phases[op.id]
        operands = op.operands
        if phase is Phase.BACKWARD and layer is not None and self.remat[layer] is not Remat.NONE:
            for number in self._closure(layer, operands):
                self._copy(self.graph.ops[number], layer)
            operands = tuple(self.again[v] if self._is_made_again(v, layer) else v for v in operands)
        self._append(op, operands, op.results, layer, phase)

    def _append(self, op: Op, operands: Sequence[int], results: Sequence[int], layer: int | None, phase: Phase) -> None:
        self.editor.emit(op, operands, results, origin=Origin(self.graph, op.id))
        self._note(layer, phase)

    def _note(self, layer: int | None, phase: Phase) -> None:
        self.layers.append(layer)
        self.phases.append(phase)

    def _copy(self, op: Op, layer: int) -> None:
        operands = [self._operand(v, layer, op.source) for v in op.operands]
        results = [self.editor.copy(self.graph, r) for r in op.results]
        self.again.update(zip(op.results, results, strict=True))
        # A copy runs with the backward pass, for which it is made.
        self._append(op, operands, results, layer, Phase.BACKWARD)

    def _operand(self, value: int, layer: int, source: str) -> int:
        """Return the value that a copy reads in place of an original: a copy, or a received value behind a barrier."""
        if self._is_made_again(value, layer):
            return self.again[value]
        if not self._is_received(value):
            return value
        # One barrier per layer, however many of its copies read the value.
        if (layer, value) not in self.held:
            self.held[layer, value] = self.editor.barrier(value, source)
            self._note(layer, Phase.BACKWARD)
        return self.held[layer, value]

    def _is_received(self, value: int) -> bool:
        """Return whether a value goes to copies through a barrier, which keeps XLA from merging copies with originals.

        Parameters do not: a parameter behind a barrier would be gathered once for the copies and once for the
        gradients.
        """
        v, producer = self.graph.values[value], self.graph.producer[value]
        if v.literal is not None or value in self.constant:
            return False
        in_loop = producer is not None and self.step.phases[producer].in_loop
        return in_loop or self.step.batch_dims[value] is not None or not v.is_float

    def finished(self) -> LayeredStep:
        """Return the rewritten step."""
        step = self.step
        graph = self.editor.graph(step.graph.inputs, step.graph.outputs)
        written = replace(
            step,
            graph=graph,
            full_shapes=self.editor.table(lambda _: step.full_shapes),
            batch_dims=self.editor.table(lambda _: step.batch_dims),
            phases=tuple(self.phases),
        )
        return LayeredStep.of(written, self.layers)


def _constants(graph: Graph) -> frozenset[int]:
    """Return the free values computed from literals alone, which are remade wherever they are read.

    Dropout masks are excluded, since they depend on a key.
    """
    free, found = free_values(graph), set[int]()
    for op in graph.ops:
        if not free.isdisjoint(op.results) and all(
            v in found or graph.values[v].literal is not None for v in op.operands
        ):
            found.update(op.results)
    return frozenset(found)
