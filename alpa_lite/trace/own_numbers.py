"""Give the extrapolated program of a micro-batch the numbers that the user's code computes at its size.

A step that is no sum over its samples may run as the mean of what its micro-batches give by themselves. Each then runs
the step of its own size: the 1 / B of a mean is 1 for one sample. JAX writes another program for one sample, in which
dims of size 1 are squeezed or summed over, so that what holds the batch can be seen in the extrapolated program alone.
Its ops are matched with those of the program that was traced at that size (`alignment`):

    matched ops      have equal parameters, and the literals become those of the traced program
    other ops        compute the same at all sizes; apart from layout, both programs have as many of each on each line
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from alpa_lite.errors import TraceError
from alpa_lite.program.identity import params_text
from alpa_lite.program.ir import Graph, Op, Value
from alpa_lite.trace.alignment import align

#: Ops that JAX adds, leaves out or replaces for dims of size 1.
_LAYOUT = frozenset("reshape squeeze expand_dims broadcast_in_dim transpose reduce_sum".split())


def with_own_numbers(made: Graph, own: Graph, inputs: Mapping[int, int], sizes: tuple[Graph, Graph]) -> Graph:
    """Return the extrapolated program with the literals of the traced one.

    Args:
        made: the extrapolated program.
        own: the program as traced at the same size.
        inputs: inputs of `own` → the same inputs of `made`.
        sizes: the programs from which `made` was extrapolated.

    Raises:
        TraceError: the programs compute different things, or a number of the extrapolated one is not known.
    """
    counterparts = {
        other: _Counterpart(graph, {w: v for v, w in values.items()})
        for graph, (other, values) in align(own, made, inputs).items()
    }
    return _numbered(made, sizes, counterparts)


@dataclass(frozen=True, slots=True)
class _Counterpart:
    """The traced graph or body that corresponds to an extrapolated one, and the values of the latter → its own."""

    graph: Graph
    values: Mapping[int, int]

    def op(self, op: Op) -> Op | None:
        """Return the op that makes the same results, or None."""
        producers = {self.graph.producer[self.values[r]] if r in self.values else None for r in op.results}
        number = producers.pop() if len(producers) == 1 else None
        found = None if number is None else self.graph.ops[number]
        return found if found is not None and found.primitive == op.primitive else None


def _numbered(made: Graph, sizes: tuple[Graph, Graph], counterparts: Mapping[Graph, _Counterpart]) -> Graph:
    """Return a graph or body with the literals of its counterpart."""
    own = counterparts.get(made, _Counterpart(Graph(values=(), ops=(), inputs=(), outputs=()), {}))
    matched = {op.id: other for op in made.ops if (other := own.op(op)) is not None}
    _compare_others(made, own.graph, matched)
    literals = dict[int, Value]()
    ops: list[Op] = []
    for op in made.ops:
        other = matched.get(op.id)
        if other is not None and not op.bodies:
            if not _alike(op.params, other.params):
                raise _unknown(*_place(op))
            # By place, since the same literal may be read by several ops in one of the programs.
            pairs = zip(made.operands(op), own.graph.operands(other), strict=True)
            literals.update((v.id, w) for v, w in pairs if v.literal is not None and w.literal is not None)
        first, second = (graph.ops[op.id].bodies for graph in sizes)
        pairs = zip(op.bodies, first, second, strict=True)
        bodies = [_numbered(body, (one, two), counterparts) for body, one, two in pairs]
        ops.append(replace(op, bodies=tuple(bodies)) if bodies else op)
    readers = {v: op for op in reversed(made.ops) for v in op.operands}
    values = list(made.values)
    for v in made.values:
        first, second = (graph.values[v.id].literal for graph in sizes)
        if v.id in literals:
            values[v.id] = replace(v, literal=literals[v.id].literal)
        elif repr(first) != repr(second) and v.id in readers:
            raise _unknown(*_place(readers[v.id]))
    return replace(made, values=tuple(values), ops=tuple(ops))


def _compare_others(made: Graph, own: Graph, matched: Mapping[int, Op]) -> None:
    """Raise `TraceError` unless the ops without a counterpart are the same in both programs, apart from layout."""
    taken = {op.id for op in matched.values()}
    here = Counter(_place(op) for op in made.ops if op.id not in matched)
    there = Counter(_place(op) for op in own.ops if op.id not in taken)
    for place in sorted((here - there) + (there - here)):
        if place[1] not in _LAYOUT:
            raise _unknown(*place)


def _alike(params: Mapping[str, object], others: Mapping[str, object]) -> bool:
    """Return whether two ops have equal parameters; JAX numbers the dims of indexed arrays anew where one is 1."""
    kept, found = ({k: v for k, v in each.items() if k != "dimension_numbers"} for each in (params, others))
    return params_text(kept) == params_text(found)


def _place(op: Op) -> tuple[str, str]:
    return op.source or "an unknown line", op.primitive


def _unknown(source: str, primitive: str) -> TraceError:
    return TraceError(
        f"{source}: {primitive} differs in the program of a micro-batch of so few samples. Use fewer micro-batches, "
        "of more samples each."
    )
