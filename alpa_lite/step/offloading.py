"""Offload: let arrays wait in the memory of the host while no op reads them.

Two kinds of arrays can wait there, since a step knows long before when it reads them next:

activations       what the backward pass of a layer reads of the forward pass      written to the host where it is made,
                                                                                   read back one layer ahead
optimizer state   arguments that only the update reads, and that it replaces       on the host between steps and during
                                                                                   all micro-batches, read and written
                                                                                   back by the update

Copies are ops of the step (`program.ir.MOVES`), and arrays on the host are values of it (`Value.on_host`), so that the
search, prices, memory and lowering need no special cases. The update is reordered so that each argument comes and goes
alone (`_depth_first`): devices then hold the state of a few parameters at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from alpa_lite.program.editor import Origin, ProgramEditor
from alpa_lite.program.ir import Graph, Op
from alpa_lite.program.memo import memoized
from alpa_lite.program.phases import Phase, StepGraph
from alpa_lite.rules.op_info import free_values
from alpa_lite.step.recomputation import Remat
from alpa_lite.step.rematerialisation import LayeredStep


@memoized
def waiting_state(step: StepGraph) -> tuple[int, ...]:
    """Return the arguments that only the update reads, and that it replaces: the moments of an optimizer.

    Scalars, keys, and arguments that the program holds in parts are left out.
    """
    graph, replaced = step.graph, set(step.aliases.values())
    parts = zip(graph.inputs, step.input_parts, strict=True)
    return tuple(
        v
        for v, part in parts
        if v in replaced
        and part.rows is None
        and step.batch_dims[v] is None
        and graph.values[v].rank > 0
        and graph.values[v].is_float
        and v not in graph.outputs
        and all(step.phases[c] is Phase.UPDATE for c in graph.consumers[v])
    )


def offload(planned: LayeredStep, remat: Sequence[Remat] = (), *, optimizer: bool = False) -> LayeredStep:
    """Return the step whose arrays wait on the host as asked for; it computes the same values.

    Values retain their ids, and new ones are appended; ops are renumbered.

    Args:
        planned: the step with the recomputation of its layers.
        remat: the policy of each layer, of which `Remat.OFFLOAD` matters here; () if there is none.
        optimizer: whether the state of the optimizer waits on the host.
    """
    layers = {layer for layer, policy in enumerate(remat) if policy is Remat.OFFLOAD}
    saved = _saved(planned, layers) if layers else {}
    state = _moved_state(planned) if optimizer else ()
    if not saved and not state:
        return planned
    return _Writer(planned, saved, state).written()


def _saved(planned: LayeredStep, layers: set[int]) -> dict[int, list[int]]:
    """Return for each of some layers the values of the forward pass that its backward pass alone reads later.

    Values that the backward pass of another layer reads too stay on the device for it.
    """
    step, graph, of_op = planned.step, planned.graph, planned.of_op
    free, outputs, found = free_values(graph), set(graph.outputs), dict[int, list[int]]()
    for value in graph.values:
        v, producer = value.id, graph.producer[value.id]
        if producer is None or step.phases[producer] is not Phase.FORWARD or step.batch_dims[v] is None:
            continue
        readers = {of_op[c] for c in graph.consumers[v] if step.phases[c] is Phase.BACKWARD}
        if value.rank == 0 or v in free or v in outputs or value.dtype.startswith("key<") or len(readers) != 1:
            continue
        (layer,) = readers
        if layer is not None and layer in layers:
            found.setdefault(layer, []).append(v)
    return found


def _moved_state(planned: LayeredStep) -> tuple[int, ...]:
    """Return the arguments to let wait on the host: those that one layer reads and replaces."""
    graph, made_by = planned.graph, {old: new for new, old in planned.step.aliases.items()}

    def layers(v: int) -> set[int | None]:
        producer = graph.producer[made_by[v]]
        home = {None} if producer is None else {planned.of_op[producer]}
        return home | {planned.of_op[c] for c in graph.consumers[v]}

    return tuple(v for v in waiting_state(planned.step) if len(layers(v)) == 1 and None not in layers(v))


class _Writer:
    """Rewrites a step with copies to the host and back."""

    def __init__(self, planned: LayeredStep, saved: Mapping[int, Sequence[int]], state: Sequence[int]) -> None:
        """Decide where copies run: to the host after the producer, back before `back`.

        saved: the values of each layer that wait on the host.
        state: the arguments that do.
        """
        self.planned, self.step, self.graph = planned, planned.step, planned.graph
        self.editor = ProgramEditor(self.graph)
        self.origins = planned.origins.get(self.graph)
        self.layers: list[int | None] = []
        self.phases: list[Phase] = []
        self.state, next_of = set(state), {old: new for new, old in self.step.aliases.items()}
        self.new_state = {next_of[v] for v in state}
        self.layer_of = {v: layer for layer, values in saved.items() for v in values}
        self.saved, self.back = saved, self._places(saved)
        self.on_host: dict[int, int] = {}  # saved value → its copy on the host
        self.on_device: dict[int, int] = {}  # saved value or argument → its copy for the readers
        self.made: dict[int, int] = {}  # new state → the value on the device that its readers read

    def _places(self, saved: Mapping[int, Sequence[int]]) -> dict[int, list[int]]:
        """Return for each op before which values come back the layers of these values.

        They come back where the backward pass begins with the layer above, so that the copy overlaps with it.
        """
        first = dict[int, int]()
        for op in self.graph.ops:
            layer = self.planned.of_op[op.id]
            if self.step.phases[op.id] is Phase.BACKWARD and layer is not None:
                first.setdefault(layer, op.id)
        found = dict[int, list[int]]()
        for layer in saved:
            above = min((other for other in first if other > layer and first[other] < first[layer]), default=layer)
            found.setdefault(first[above], []).append(layer)
        return found

    def written(self) -> LayeredStep:
        """Return the rewritten step."""
        for v in self.state:
            self.editor.rest_on_host(v)
        ops = self.graph.ops
        if self.state:
            in_update = [op for op in ops if self.step.phases[op.id] is Phase.UPDATE]
            before = [op for op in ops if self.step.phases[op.id] is not Phase.UPDATE]
            ops = (*before, *_depth_first(self.graph, in_update))
        for op in ops:
            self._write(op)
        graph, step = self.editor.graph(self.graph.inputs, self.graph.outputs), self.step
        written = replace(
            step,
            graph=graph,
            full_shapes=self.editor.table(lambda _: step.full_shapes),
            batch_dims=self.editor.table(lambda _: step.batch_dims),
            phases=tuple(self.phases),
        )
        origins = {**self.planned.origins, graph: tuple(self.editor.origins)}
        return LayeredStep(step=written, of_op=tuple(self.layers), origins=origins)

    def _write(self, op: Op) -> None:
        """Append an op with the copies before and after it."""
        layer, phase = self.planned.of_op[op.id], self.step.phases[op.id]
        for above in self.back.get(op.id, ()):
            for v in self.saved[above]:
                self.on_device[v] = self.editor.move(self.on_host[v], on_host=False, source=op.source)
                self._note(above, Phase.BACKWARD)
        for v in op.operands:
            if v in self.state and v not in self.on_device:
                self.on_device[v] = self.editor.move(v, on_host=False, source=op.source)
                # The result of a copy is like its operand, but for its place.
                self._note(layer, phase)
        results = [self._made(r) for r in op.results]
        self.editor.emit(op, [self._operand(v, phase) for v in op.operands], results, origin=self._origin(op))
        self._note(layer, phase)
        for r in op.results:
            if r in self.new_state:
                self.editor.move(self.made[r], on_host=True, source=op.source, result=r)
                self._note(layer, phase)
            elif r in self.layer_of:
                self.on_host[r] = self.editor.move(r, on_host=True, source=op.source)
                # The stage that reads the copy stores it.
                self._note(self.layer_of[r], phase)

    def _operand(self, value: int, phase: Phase) -> int:
        if value in self.state:
            return self.on_device[value]
        if value in self.made:
            return self.made[value]
        return self.on_device[value] if phase is Phase.BACKWARD and value in self.layer_of else value

    def _made(self, result: int) -> int:
        """Return the value that an op makes in place of a result: new state is made on the device, and copied."""
        if result not in self.new_state:
            return result
        self.made[result] = self.editor.copy(self.graph, result)
        return self.made[result]

    def _origin(self, op: Op) -> Origin | None:
        return Origin(self.graph, op.id) if self.origins is None else self.origins[op.id]

    def _note(self, layer: int | None, phase: Phase) -> None:
        self.layers.append(layer)
        self.phases.append(phase)


def _depth_first(graph: Graph, ops: Sequence[Op]) -> list[Op]:
    """Return ops in an order in which each result of the graph is made after what it needs alone, one after the other.

    Optimizers are mostly written as one operation on all parameters after another, which would hold all of their state
    at once. Effects keep their order.
    """
    here, placed, order = {op.id for op in ops}, set[int](), list[Op]()
    effects = [op.id for op in ops if op.effectful]

    def place(roots: Iterable[int]) -> None:
        stack = [(op, False) for op in reversed([*roots])]
        while stack:
            number, ready = stack.pop()
            if number in placed or number not in here:
                continue
            if ready:
                placed.add(number)
                order.append(graph.ops[number])
                continue
            stack.append((number, True))
            needs = [graph.producer[v] for v in graph.ops[number].operands]
            earlier = [e for e in effects if e < number and e not in placed] if graph.ops[number].effectful else []
            stack += [(need, False) for need in reversed([*earlier, *needs]) if need is not None]

    place(p for v in graph.outputs if (p := graph.producer[v]) is not None)
    place(op.id for op in ops)
    return order
