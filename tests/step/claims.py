"""What `step.additivity` claims of a step, checked by numbers.

`check_claims` runs the program of the full batch once and that of a micro-batch once per micro-batch, on one device,
op by op, and compares every value by the equation of its relation. It shares no code with lowering, and none with the
transfer functions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from alpa_lite import _jax
from alpa_lite.program.editor import without_dead_ops
from alpa_lite.program.equations import Equation
from alpa_lite.program.ir import Graph, wiring_of
from alpa_lite.step.additivity import Proof, prove
from alpa_lite.step.merged_sizes import merge
from alpa_lite.step.relations import Own, Relation, RelationKind
from alpa_lite.step.split import StepPrograms, by_micro_batch
from alpa_lite.trace.evaluate import all_values, run_control_flow
from alpa_lite.trace.passes.code_motion import HoistValues, TwoSizes, inputs_of_data
from alpa_lite.trace.passes.split_stacked import PartedProgram
from alpa_lite.trace.trace import Traced

_SOURCES = ("iota", "random_bits", "random_split")


@dataclass(frozen=True, kw_only=True)
class Checked:
    """How many values of each kind were compared, and what was proven."""

    kinds: Counter[RelationKind]
    primitives: Counter[str]
    proof: Proof


def check_claims(traced: Traced, arguments: Sequence[Any], count: int, *, runs: int = 1) -> Checked:
    """Compare all values of a step in `count` micro-batches with what is claimed of them."""
    pair = next(StepPrograms(traced=traced).sized(0).at_two_sizes(traced.require_batch() // count))
    full, other = pair.full, pair.other
    inputs = [*arguments, *full.program.constants]
    cut = {leaf: runs for leaf, dim in enumerate(traced.batch.dims) if dim is not None and runs > 1}
    data = inputs_of_data(full.program.graph, full.input_parts, traced.batch.dims)
    proof = prove(full.program, other.program, count, of_data=data, runs=cut)
    while proof.hoisted:
        first = len(traced.batch.dims) + len(full.program.constants)
        rest = HoistValues(values=tuple(proof.hoisted), first_leaf=first).apply(TwoSizes(full=full, other=other))
        assert rest.precomputed is not None
        inputs += rest.precomputed(inputs)
        full, other = rest.full, rest.other
        proof = prove(full.program, other.program, count, runs=cut)
    if proof.refusals:
        # The claims about what is not refused are to hold all the same.
        left = [
            i for i, v in enumerate(full.program.graph.outputs) if proof.relations[v].kind is not RelationKind.MIXED
        ]
        full, other = (_with_outputs(program, left) for program in (full, other))
        inputs = inputs[: len(full.program.graph.inputs)]
        told, proof = proof, prove(full.program, other.program, count, runs=cut)
        if proof.refusals or not left:
            return Checked(kinds=Counter(), primitives=Counter(), proof=told)
        checked = _compared(full, other, proof, inputs, count)
        return replace(checked, proof=told)
    return _compared(full, other, proof, inputs, count)


def _with_outputs(parted: PartedProgram, numbers: Sequence[int]) -> PartedProgram:
    graph = parted.program.graph
    kept = replace(graph, outputs=tuple(graph.outputs[i] for i in numbers))
    return replace(parted, program=without_dead_ops(replace(parted.program, graph=kept)))


def _compared(full: PartedProgram, other: PartedProgram, proof: Proof, inputs: Sequence[Any], count: int) -> Checked:
    whole = all_values(full.program.graph, full.program.equations, [jnp.asarray(x) for x in inputs])
    merged = merge(full.program, other.program, proof.marks)
    parts = [
        _Part(number=m, shapes=full.program.graph).values(merged.graph, merged.equations, taken)
        for m, taken in enumerate(_rows(full.program.graph, proof, inputs, count))
    ]
    kinds, primitives = Counter[RelationKind](), Counter[str]()
    graph = full.program.graph
    for value in graph.values:
        relation = proof.relations[value.id]
        if relation.kind in (RelationKind.MIXED, RelationKind.AFTER):
            continue
        check(relation, whole[value.id], [part[value.id] for part in parts], str(value))
        kinds[relation.kind] += 1
        producer = graph.producer[value.id]
        primitives[graph.ops[producer].primitive if producer is not None else "input"] += 1
    return Checked(kinds=kinds, primitives=primitives, proof=proof)


def _rows(graph: Graph, proof: Proof, inputs: Sequence[Any], count: int) -> list[list[Any]]:
    """The inputs of each micro-batch."""
    found: list[list[Any]] = [[] for _ in range(count)]
    for v, x in zip(graph.inputs, inputs, strict=True):
        relation = proof.relations[v]
        if relation.kind is not RelationKind.SAMPLES:
            for taken in found:
                taken.append(x)
            continue
        sorted_rows = by_micro_batch(jnp.asarray(x), relation.dim, relation.blocks or 1, count)
        for taken, rows in zip(found, jnp.split(sorted_rows, count, axis=relation.dim), strict=True):
            taken.append(rows)
    return found


def check(relation: Relation, whole: Any, parts: Sequence[Any], name: str) -> None:
    """One value by the equation of its relation."""
    want = _numbers(whole)
    got = [_numbers(part) for part in parts]
    if relation.kind is RelationKind.SAMPLES:
        for m, part in enumerate(got):
            for blocks in [relation.blocks] if relation.blocks is not None else [1, part.shape[relation.dim]]:
                _same(part, _block(want, relation.dim, blocks, m, len(got)), name)
        if isinstance(relation.fact, Own):
            for m, part in enumerate(got):
                own = part if relation.fact.columns is None else part[..., list(relation.fact.columns)]
                assert (own >= m * relation.fact.rows).all() and (own < (m + 1) * relation.fact.rows).all(), name
        elif relation.fact is not None:
            assert (want == relation.fact).all(), name
        return
    combined = {
        RelationKind.SUM: lambda: sum(got[1:], got[0]),
        RelationKind.MAX: lambda: np.max(np.stack(got), axis=0),
        RelationKind.MIN: lambda: np.min(np.stack(got), axis=0),
    }
    if relation.kind in combined:
        _same(combined[relation.kind](), want, name)
        return
    for part in got:
        _same(part, want, name)
    if relation.kind is RelationKind.ZERO:
        assert not want.any(), name


def _block(x: np.ndarray, dim: int, blocks: int, number: int, count: int) -> np.ndarray:
    rows = x.shape[dim] // (blocks * count)
    seen = x.reshape(*x.shape[:dim], blocks, count, rows, *x.shape[dim + 1 :])
    return np.take(seen, number, axis=dim + 1).reshape(*x.shape[:dim], blocks * rows, *x.shape[dim + 1 :])


def _numbers(x: Any) -> np.ndarray:
    if jnp.issubdtype(jnp.asarray(x).dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(x))
    array = np.asarray(x)
    return array.astype(np.float64) if array.dtype.kind not in "biuc" else array


def _same(a: np.ndarray, b: np.ndarray, name: str) -> None:
    assert a.shape == b.shape, (name, a.shape, b.shape)
    if b.dtype.kind in "biu":
        assert (a == b).all(), name
        return
    scale = float(np.max(np.abs(b), initial=0.0, where=np.isfinite(b))) or 1.0
    assert np.allclose(a, b, rtol=2e-4, atol=2e-5 * scale, equal_nan=True), (name, np.max(np.abs(a - b)))


@dataclass(kw_only=True)
class _Part:
    """Runs the program of a micro-batch from its definition: sources count from its start, marks are kept."""

    number: int
    shapes: Graph

    def values(self, graph: Graph, equations: Sequence[Equation], inputs: Sequence[Any]) -> dict[int, Any]:
        """Every value outside of bodies."""
        return self._run(graph, equations, inputs, self.shapes)

    def _run(
        self, graph: Graph, equations: Sequence[Equation], inputs: Sequence[Any], full: Graph | None
    ) -> dict[int, Any]:
        values: dict[int, Any] = dict(zip(graph.inputs, map(jnp.asarray, inputs), strict=True))
        values |= {v.id: np.asarray(v.literal, jnp.dtype(v.dtype)) for v in graph.values if v.literal is not None}
        for op, equation in zip(graph.ops, equations, strict=True):
            operands = [values[v] for v in op.operands]
            if self.number:
                operands = [
                    jnp.zeros_like(x) if v in op.once else x for v, x in zip(op.operands, operands, strict=True)
                ]
            if op.own_columns:
                numbers = op.params["dimension_numbers"]
                dims = numbers["start_index_map" if op.primitive == "gather" else "scatter_dims_to_operand_dims"]
                for column in op.own_columns:
                    rows = self.number * operands[0].shape[dims[column]]
                    operands[1] = operands[1].at[..., column].add(-rows)
            wiring = wiring_of(op)
            if wiring is not None:
                results = run_control_flow(op, wiring, self._body(op, equation, wiring, operands, full), operands)
            elif op.primitive in _SOURCES and full is not None:
                results = self._source(op, equation, operands, full)
            else:
                results = _jax.bind(equation.primitive, dict(equation.params), operands)
            values.update(zip(op.results, results, strict=True))
        return values

    def _body(self, op: Any, equation: Equation, wiring: Any, operands: Any, full: Graph | None) -> Callable[..., Any]:
        def body(number: int, arrays: Any) -> tuple[Any, ...]:
            inner = full.ops[op.id].bodies[number] if full is not None else None
            entering = [arrays.get(i, operands[i]) for i in wiring.inputs[number]]
            graph = op.bodies[number]
            values = self._run(graph, equation.bodies[number], entering, inner)
            return tuple(jnp.asarray(values[v]) for v in graph.outputs)

        return body

    def _source(self, op: Any, equation: Equation, operands: Sequence[Any], full: Graph) -> list[Any]:
        """The rows of this micro-batch of what the full batch makes."""
        shape, own = (
            full.values[op.results[0]].shape,
            jax.eval_shape(lambda *xs: _jax.bind(equation.primitive, dict(equation.params), xs)[0], *operands).shape,
        )
        dims = [d for d, (n, m) in enumerate(zip(shape, own, strict=True)) if n != m]
        keys = operands[0].ndim if operands else 0
        if not dims or dims[0] < keys:
            return _jax.bind(equation.primitive, dict(equation.params), operands)
        made = _jax.bind(equation.primitive, {**equation.params, "shape": shape[keys:]}, operands)[0]
        (dim,) = dims
        return [jax.lax.slice_in_dim(made, self.number * own[dim], (self.number + 1) * own[dim], axis=dim)]
