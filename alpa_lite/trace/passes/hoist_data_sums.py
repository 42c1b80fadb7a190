"""Hoist the part of a step that depends on data alone: it is computed for the whole batch before the micro-batch loop.

    loss = Σ_i m_i c_i(params) / Σ_i m_i       the second sum reads no parameter

Inside the loop, each micro-batch would divide by its own number of tokens. Hoisted, that number is one more input of
the step, and the rest is a sum over samples again. The same holds for permutations of the data, returns computed by a
reverse scan over rewards, and statistics that normalise the data: these hold the batch dim, and each micro-batch takes
its rows of them.

`evaluate` runs a graph op by op on whole arrays. It computes the hoisted part, and is the reference in tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from alpa_lite import _jax
from alpa_lite.program.equations import Equation, GraphWithEquations, without_dead_ops
from alpa_lite.program.ir import Graph, Value, wiring_of
from alpa_lite.program.phases import LeafPart
from alpa_lite.trace.local_control_flow import run_control_flow
from alpa_lite.trace.passes.split_stacked import PartedProgram


def evaluate(graph: Graph, equations: Sequence[Equation], inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Return the outputs of a graph for the given inputs, in order."""
    values = all_values(graph, equations, inputs)
    return tuple(values[v] for v in graph.outputs)


def all_values(graph: Graph, equations: Sequence[Equation], inputs: Sequence[Any]) -> dict[int, Any]:
    """Return every value of a graph by its id, for the given inputs."""
    values: dict[int, Any] = dict(zip(graph.inputs, inputs, strict=True))
    values |= {v.id: np.asarray(v.literal, jax.numpy.dtype(v.dtype)) for v in graph.values if v.literal is not None}
    for op, equation in zip(graph.ops, equations, strict=True):
        operands, wiring = [values[v] for v in op.operands], wiring_of(op)
        if wiring is None:
            results = _jax.bind(equation.primitive, dict(equation.params), operands)
        else:
            # The defaults bind the loop variables of this iteration.
            def body(
                number: int,
                arrays: Mapping[int, Any],
                bodies: Sequence[Graph] = op.bodies,
                inner: Sequence[Sequence[Equation]] = equation.bodies,
                places: Sequence[Sequence[int]] = wiring.inputs,
                outside: Sequence[Any] = operands,
            ) -> tuple[Any, ...]:
                entering = [arrays.get(i, outside[i]) for i in places[number]]
                outputs = evaluate(bodies[number], inner[number], entering)
                return tuple(jax.numpy.asarray(x) for x in outputs)

            results = run_control_flow(op, wiring, body, operands)
        values.update(zip(op.results, results, strict=True))
    return values


@dataclass(frozen=True, kw_only=True)
class Precomputed:
    """The hoisted part of a step: computes further inputs of the step from its inputs.

    Attributes:
        program: the ops to run once per step.
        leaves: for each input of `program` the number of the step input that it reads.
    """

    program: GraphWithEquations
    leaves: tuple[int, ...]
    _compiled: list[Callable[..., tuple[Any, ...]]] = field(
        default_factory=list[Callable[..., tuple[Any, ...]]], repr=False, compare=False
    )

    def __call__(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Return the further inputs of the step, from its flat arguments followed by captured arrays."""
        if not self._compiled:
            self._compiled.append(jax.jit(self._run))
        return self._compiled[0](*(inputs[leaf] for leaf in self.leaves))

    def _run(self, *arrays: jax.Array) -> tuple[Any, ...]:
        return evaluate(self.program.graph, self.program.equations, arrays)


@dataclass(frozen=True, kw_only=True)
class RemainingStep:
    """A step at two batch sizes without its hoisted part, whose results both programs take as their last inputs.

    Attributes:
        full: the program at the full batch.
        other: the program at another batch size.
        precomputed: the hoisted part.
    """

    full: PartedProgram
    other: PartedProgram
    precomputed: Precomputed


def hoist_values(
    full: PartedProgram, other: PartedProgram, values: Sequence[int], batch_leaves: Sequence[int | None]
) -> RemainingStep:
    """Hoist the given values, which depend on inputs of data alone, out of a step.

    Args:
        full: the program at the full batch.
        other: the program at another batch size, with the same value ids.
        values: ids of the values to hoist.
        batch_leaves: for each argument leaf the dim that holds the batch, or None.
    """
    graph = full.program.graph
    alone = without_dead_ops(replace(full.program, graph=replace(graph, outputs=tuple(values))))
    read = [i for i, v in enumerate(alone.graph.inputs) if alone.graph.consumers[v] or v in alone.graph.outputs]
    inputs = tuple(alone.graph.inputs[i] for i in read)
    precomputed = Precomputed(
        program=replace(alone, graph=replace(alone.graph, inputs=inputs)),
        leaves=tuple(full.input_parts[i].leaf for i in read),
    )
    first = len(batch_leaves) + len(full.program.constants)
    parts = tuple(LeafPart(leaf=first + i) for i in range(len(values)))
    return RemainingStep(
        full=_taking(full, values, parts), other=_taking(other, values, parts), precomputed=precomputed
    )


def _taking(parted: PartedProgram, values: Sequence[int], parts: Sequence[LeafPart]) -> PartedProgram:
    """Return the program with some values as its last inputs instead of results of its ops."""
    program, taken = parted.program, set(values)
    graph = program.graph
    # An op may have other results that are still needed. It stays, with fresh ids without readers for hoisted results.
    spare = len(graph.values)
    renamed = {v: spare + i for i, v in enumerate(values)}
    extra = tuple(replace(graph.values[v], id=renamed[v], name="") for v in values)
    ops = tuple(
        op.numbered(op.id, op.operands, tuple(renamed.get(r, r) for r in op.results))
        if not taken.isdisjoint(op.results)
        else op
        for op in graph.ops
    )
    made = replace(graph, values=(*graph.values, *extra), ops=ops, inputs=(*graph.inputs, *values))
    rest = without_dead_ops(replace(program, graph=made))
    return replace(parted, program=rest, input_parts=(*parted.input_parts, *parts))


def inputs_of_data(graph: Graph, input_parts: Sequence[LeafPart], batch_leaves: Sequence[int | None]) -> frozenset[int]:
    """Return the inputs that may be read before the loop: data, random keys and captured arrays, but no parameters."""
    found = set[int]()
    for v, part in zip(graph.inputs, input_parts, strict=True):
        captured = part.leaf >= len(batch_leaves)
        if part.rows is None and (captured or _is_key(graph.values[v]) or batch_leaves[part.leaf] is not None):
            found.add(v)
    return frozenset(found)


def _is_key(value: Value) -> bool:
    return value.dtype.startswith("key<") or (value.dtype, value.shape) == ("uint32", (2,))
