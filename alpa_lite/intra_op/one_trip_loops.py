"""Replace loops of one trip by their bodies, as XLA does, so that their ops are fused and ordered with all others.

    operands     the body reads what the loop reads, and of a stacked array its only element, a reshape of it
    results      an op of the body makes a carried result of the loop; a stacked result is a reshape of its only element

Loops of more trips stay, with bodies in which this was done. Values of the graph retain their ids; `Flattened` tells
for each op and value where it stands in the program as traced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from alpa_lite.intra_op.stage_ops import StageOps
from alpa_lite.program.editor import ProgramEditor
from alpa_lite.program.ir import Graph, Op, is_one_trip_loop, wiring_of
from alpa_lite.program.memo import memoized
from alpa_lite.program.phases import BodyScope, StepGraph

Path = tuple[tuple[int, int], ...]
"""The position of a body in the graph of the step: pairs of an op id and the index of one of its bodies, outermost
first.
"""

Place = tuple[Path, int]
"""The place of an op or a value: the path of its graph, and its id there."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Flattened:
    """A graph without loops of one trip.

    Attributes:
        graph: the graph.
        ops: for each of its ops the place in the original; reshapes that were added have that of their loop.
        values: for each of its values the place in the original.
        bodies: what was made of the bodies of its ops, by op id and number of the body.
        inlined: the places of the loops whose ops are now ops of this graph, with the number of these.
    """

    graph: Graph
    ops: Sequence[Place]
    values: Sequence[Place]
    bodies: Mapping[tuple[int, int], Flattened]
    inlined: Mapping[Place, int]

    def body(self, path: Path) -> tuple[Path, Flattened]:
        """Return the original path of a body at a path of this graph, and what was made of that body."""
        found, here = (), self
        for op, number in path:
            outer, original = here.ops[op]
            found, here = (*found, *outer, (original, number)), here.bodies[op, number]
        return found, here


def without_one_trip_loops(stage: StageOps) -> tuple[StageOps, Flattened] | None:
    """Return the stage with a graph that has no loops of one trip, and where its ops and values stood.

    None if it has no such loops.
    """
    if not _has_one_trip_loop(stage.graph):
        return None
    found = _flattened(stage.graph)
    of_op = [stage.stage_of_op[_outermost(place)] for place in found.ops]
    return replace(stage, step=_flat_step(stage.step), stage_of_op=tuple(of_op)), found


@memoized
def _flat_step(step: StepGraph) -> StepGraph:
    found = _flattened(step.graph)
    scopes = dict[Path, BodyScope]()
    scopes[()] = BodyScope(full_shapes=step.full_shapes, batch_dims=step.batch_dims)
    for path in {path for path, _ in found.values} - scopes.keys():
        scopes[path] = step.bodies[body_at(step.graph, path)]
    return replace(
        step,
        graph=found.graph,
        phases=tuple([step.phases[_outermost(place)] for place in found.ops]),
        batch_dims=tuple([scopes[path].batch_dims[v] for path, v in found.values]),
        full_shapes=tuple([scopes[path].full_shapes[v] for path, v in found.values]),
    )


def body_at(graph: Graph, path: Path) -> Graph:
    """Return the body at the end of a path."""
    for op, number in path:
        graph = graph.ops[op].bodies[number]
    return graph


def _outermost(place: Place) -> int:
    """Return the op of the outermost graph that an op is or belongs to."""
    path, op_id = place
    return path[0][0] if path else op_id


@memoized
def _has_one_trip_loop(graph: Graph) -> bool:
    return any(is_one_trip_loop(op) or any(map(_has_one_trip_loop, op.bodies)) for op in graph.ops)


@memoized
def _flattened(graph: Graph) -> Flattened:
    flattening = _Flattening(graph)
    flattening.add(graph, (), {v.id: v.id for v in graph.values})
    return flattening.done(graph)


class _Flattening:
    """Collects the ops of a graph and of the bodies of its loops of one trip."""

    def __init__(self, graph: Graph) -> None:
        self.editor = ProgramEditor(graph)
        self.ops: list[Place] = []
        self.values: list[Place] = [((), v.id) for v in graph.values]
        self.bodies: dict[tuple[int, int], Flattened] = {}
        self.inlined: dict[Place, int] = {}

    def done(self, graph: Graph) -> Flattened:
        return Flattened(
            graph=self.editor.graph(graph.inputs, graph.outputs),
            ops=self.ops,
            values=self.values,
            bodies=self.bodies,
            inlined=self.inlined,
        )

    def add(self, graph: Graph, path: Path, numbers: dict[int, int]) -> None:
        """Add the ops of a graph. `numbers`: its values → those here; those without an entry are copied."""
        for op in graph.ops:
            if is_one_trip_loop(op):
                self._add_body(graph, op, path, numbers)
                continue
            made = op
            if op.bodies:
                bodies = [_flattened(body) for body in op.bodies]
                self.bodies |= {(len(self.ops), number): body for number, body in enumerate(bodies)}
                made = replace(op, bodies=tuple(body.graph for body in bodies))
            operands, results = (
                [self._number(graph, path, v, numbers) for v in values] for values in (op.operands, op.results)
            )
            self._emit(made, operands, results, (path, op.id))

    def _add_body(self, graph: Graph, op: Op, path: Path, numbers: dict[int, int]) -> None:
        (body,), wiring, place = op.bodies, wiring_of(op), (path, op.id)
        assert wiring is not None
        inside, own = (*path, (op.id, 0)), dict[int, int]()
        self.inlined[place] = len(body.ops)
        for v, i in zip(body.inputs, wiring.inputs[0], strict=True):
            source = self._number(graph, path, op.operands[i], numbers)
            if i in wiring.scanned:
                own[v] = self._number(body, inside, v, own)
                self._reshape(source, own[v], place)
            else:
                own[v] = source
        stacked: list[tuple[int, int]] = []
        for v, r in zip(body.outputs, wiring.outputs[0], strict=True):
            assert r is not None
            result = self._number(graph, path, op.results[r], numbers)
            if r in wiring.stacked or v in own or body.producer[v] is None:
                stacked.append((v, result))
            else:
                own[v] = result
        self.add(body, inside, own)
        for v, result in stacked:
            self._reshape(self._number(body, inside, v, own), result, place)

    def _number(self, graph: Graph, path: Path, value: int, numbers: dict[int, int]) -> int:
        if value not in numbers:
            numbers[value] = self.editor.copy(graph, value)
            self.values.append((path, value))
        return numbers[value]

    def _reshape(self, source: int, result: int, place: Place) -> None:
        """Add an op by which the only element of a stacked array becomes an array, or the reverse."""
        params = {"new_sizes": self.editor.values[result].shape, "dimensions": None, "sharding": None}
        self._emit(Op(id=0, primitive="reshape", operands=(), results=(), params=params), [source], [result], place)

    def _emit(self, op: Op, operands: Sequence[int], results: Sequence[int], place: Place) -> None:
        self.editor.emit(op, operands, results)
        self.ops.append(place)
