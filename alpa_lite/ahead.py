"""What a step sums up over the data alone is known before its micro-batches run: the number of tokens under a mask.

    loss = Σ_i m_i c_i(params) / Σ_i m_i       the second sum reads no parameter

As it stands each micro-batch would divide by its own number of tokens. Computed ahead, on the whole batch, the number
is one more input of the step, and what is left is a sum over samples again                          (`computed_ahead`)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from alpa_lite import _jax
from alpa_lite.graph.equations import GraphWithEquations, without_dead_ops
from alpa_lite.graph.ir import Graph, Op, Value
from alpa_lite.graph.phases import Part, loop_ops
from alpa_lite.stacks import PartedProgram


@dataclass(frozen=True, kw_only=True)
class Ahead:
    """Computes further inputs of a step from those that it has: `leaves[i]` is the number of what input i reads."""

    program: GraphWithEquations
    leaves: tuple[int, ...]
    _compiled: list[Callable[..., tuple[Any, ...]]] = field(
        default_factory=list[Callable[..., tuple[Any, ...]]], repr=False, compare=False
    )

    def __call__(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """The further inputs, from arguments and captured arrays."""
        if not self._compiled:
            self._compiled.append(jax.jit(self._run))
        return self._compiled[0](*(inputs[leaf] for leaf in self.leaves))

    def _run(self, *arrays: jax.Array) -> tuple[Any, ...]:
        graph = self.program.graph
        known: dict[int, Any] = dict(zip(graph.inputs, arrays, strict=True))
        known |= {v.id: np.asarray(v.literal, jax.numpy.dtype(v.dtype)) for v in graph.values if v.literal is not None}
        for op, equation in zip(graph.ops, self.program.equations, strict=True):
            made = _jax.bind(equation.primitive, dict(equation.params), [known[v] for v in op.operands])
            known.update(zip(op.results, made, strict=True))
        return tuple(known[v] for v in graph.outputs)


@dataclass(frozen=True, kw_only=True)
class Rest:
    """A step at two batch sizes without what is computed ahead, which both take as their last inputs."""

    full: PartedProgram
    other: PartedProgram
    ahead: Ahead


def computed_ahead(
    full: PartedProgram, other: PartedProgram, batch: Sequence[int | None], batch_leaves: Sequence[int | None]
) -> Rest | None:
    """The step with sums over the data alone as inputs, where samples read them; None where there are none.

    `batch`: the batch dim of each value of both programs. `batch_leaves`: of each argument.
    """
    graph = full.program.graph
    sums = _sums_over_data(graph, full.input_parts, batch, batch_leaves)
    if not sums:
        return None
    alone = without_dead_ops(replace(full.program, graph=replace(graph, outputs=sums)))
    read = [i for i, v in enumerate(alone.graph.inputs) if alone.graph.consumers[v]]
    inputs = tuple(alone.graph.inputs[i] for i in read)
    ahead = Ahead(
        program=replace(alone, graph=replace(alone.graph, inputs=inputs)),
        leaves=tuple(full.input_parts[i].leaf for i in read),
    )
    first = len(batch_leaves) + len(full.program.constants)
    parts = tuple(Part(leaf=first + i) for i in range(len(sums)))
    return Rest(full=_taking(full, sums, parts), other=_taking(other, sums, parts), ahead=ahead)


def _taking(parted: PartedProgram, values: Sequence[int], parts: Sequence[Part]) -> PartedProgram:
    """The program with some values as its last inputs instead of computing them."""
    program, taken = parted.program, set(values)
    kept = [op for op in program.graph.ops if taken.isdisjoint(op.results)]
    graph = replace(
        program.graph,
        ops=tuple(op.numbered(i, op.operands, op.results) for i, op in enumerate(kept)),
        inputs=(*program.graph.inputs, *values),
    )
    equations = tuple(program.equations[op.id] for op in kept)
    rest = without_dead_ops(replace(program, graph=graph, equations=equations))
    return replace(parted, program=rest, input_parts=(*parted.input_parts, *parts))


def _sums_over_data(
    graph: Graph, input_parts: Sequence[Part], batch: Sequence[int | None], batch_leaves: Sequence[int | None]
) -> tuple[int, ...]:
    """Values reduced over the batch that depend on the data alone and that samples read again."""
    of_data = _of_data(graph, input_parts, batch_leaves)
    found: dict[int, None] = {}
    for reduction, _ in loop_ops(graph, tuple(batch))[1]:
        if all(r in of_data for r in reduction.results) and not any(batch[r] is not None for r in reduction.results):
            found.update(dict.fromkeys(reduction.results))
    return tuple(found)


def _of_data(graph: Graph, input_parts: Sequence[Part], batch_leaves: Sequence[int | None]) -> set[int]:
    """Values that no argument without the batch has a part in, but for random keys and captured arrays."""
    known = {v.id for v in graph.values if v.literal is not None}
    for v, part in zip(graph.inputs, input_parts, strict=True):
        captured = part.leaf >= len(batch_leaves)
        if part.rows is None and (captured or _is_key(graph.values[v]) or batch_leaves[part.leaf] is not None):
            known.add(v)
    for op in graph.ops:
        if _is_plain(op) and all(v in known for v in op.operands):
            known.update(op.results)
    return known


def _is_key(value: Value) -> bool:
    return value.dtype.startswith("key<") or (value.dtype, value.shape) == ("uint32", (2,))


def _is_plain(op: Op) -> bool:
    return not op.bodies and not op.effectful
