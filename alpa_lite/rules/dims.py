"""Equivalence classes of the dims of a step's values, by the factor rules of its ops, and names for these classes.

    (v, i) ~ (w, j)     if a rule gives both the same major factor                                     (`DimClasses`)
                        if a body reads v as w, or returns w as v, without the leading dim of scanned arrays
                        if w replaces v in the next step

A dim that is a product of factors is represented by its major factor, along which it can be split. The classes take the
place of dimension names: in a transformer the batch, the positions, the width, the heads and the hidden units of each
layer are one class each. `dim_names` derives names from the structure of the step, as a user of named dimensions would
give them:

    batch        the samples
    sequence     the other dim of integer arguments with two dims, of which one holds the samples: positions of tokens
    vocab        the dim that look-ups of arguments by integers of the samples search: the rows of embedding tables
    heads        the dims that all arrays of a contraction without weights share, and weights have: attention
    experts      the dims that weights share with all arrays of their contractions
    height, width, depth    spatial dims of the inputs of convolutions: the last is the width, the one before the height
    head_dim     feature dims of the operands of such a contraction without weights
    d_model      the feature dim of most weights, of several the one that is summed over first: the residual stream's
    d_ff         other feature dims that a contraction with a weight makes, and one with a weight sums over

A name may have several classes: the hidden units of each layer have their own. Weights are values without a batch that
contractions with samples read, and only the forward pass is considered.

`follow_batch` serves steps that run at one batch size only. A step that hard-codes or inspects its batch size cannot be
traced at another size to see which dims depend on it (`program.phases.batch_dims`). The batch is then followed from the
arguments through every factor that passes, into and out of the bodies of control flow. In a reshape, a batch of one
sample shares no factor with any result dim; it is assigned to the dim of size 1 with the same number of elements before
it. The result is a heuristic: a missed dim is only not split along the batch, and micro-batches are never formed from
it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

from alpa_lite.program.ir import Graph, Op, Value, Wiring, wiring_of
from alpa_lite.program.memo import memoized
from alpa_lite.program.phases import BodyScope, Phase, StepGraph
from alpa_lite.rules.op_info import rule_of_op
from alpa_lite.rules.registry import Dims, FactorKind, Rule


def major_factor(rule: Rule, factors: Sequence[int]) -> int | None:
    """Return the factor along which a dim can be split, or None for a dim of size 1."""
    return next((f for f in factors if rule.sizes[f] > 1), None)


class DimClasses:
    """The dim classes of a step, including the bodies of control flow (a union-find structure)."""

    def __init__(self, step: StepGraph) -> None:
        """Compute the classes of all dims of the step."""
        self.graph = step.graph
        self._first: dict[Graph, list[int]] = {}
        self._parents: list[int] = []
        self._add(step.graph)
        for result, argument in step.aliases.items():
            self._join_all(step.graph, argument, step.graph, result)

    @property
    def graphs(self) -> tuple[Graph, ...]:
        """The graph of the step and the graphs of all bodies."""
        return tuple(self._first)

    def of(self, graph: Graph, value: int, dim: int) -> int:
        """Return the class of a dim as a number."""
        return self._root(self._first[graph][value] + dim)

    def of_value(self, graph: Graph, value: int) -> tuple[int, ...]:
        """Return the class of each dim of a value."""
        return tuple(self.of(graph, value, dim) for dim in range(graph.values[value].rank))

    def of_factor(self, graph: Graph, op: Op, factor: int) -> int | None:
        """Return the class of the dims whose major factor in the op's rule is `factor`, or None if there are none."""
        found = (self.of(graph, v, d) for v, d, f in _majors(graph, op) if f == factor)
        return next(found, None)

    def _root(self, node: int) -> int:
        """Return the representative of a node, and shorten the path to it."""
        # Path halving (Tarjan and van Leeuwen, JACM 31(2), 1984) makes look-ups take almost constant time.
        while self._parents[node] != node:
            self._parents[node] = self._parents[self._parents[node]]
            node = self._parents[node]
        return node

    def _join(self, a: int, b: int) -> None:
        # The smaller number stays the representative, so that class numbers depend on the order of values alone.
        a, b = self._root(a), self._root(b)
        self._parents[max(a, b)] = min(a, b)

    def _join_all(self, graph: Graph, v: int, other: Graph, w: int, *, skip: int = 0) -> None:
        """Join the dims of two values pairwise, after skipping `skip` leading dims of the first."""
        first, second = self._first[graph][v] + skip, self._first[other][w]
        for dim in range(graph.values[v].rank - skip):
            self._join(first + dim, second + dim)

    def _add(self, graph: Graph) -> None:
        if graph in self._first:  # equal ops may share a body
            return
        places = self._first[graph] = []
        for value in graph.values:
            places.append(len(self._parents))
            self._parents.extend(range(len(self._parents), len(self._parents) + value.rank))
        for op in graph.ops:
            wiring = wiring_of(op)
            if wiring is not None:
                self._enter(graph, op, wiring)
                continue
            seen: dict[int, int] = {}
            for v, dim, factor in _majors(graph, op):
                node = places[v] + dim
                self._join(seen.setdefault(factor, node), node)

    def _enter(self, graph: Graph, op: Op, wiring: Wiring) -> None:
        for body, inputs, outputs in zip(op.bodies, wiring.inputs, wiring.outputs, strict=True):
            self._add(body)
            for inner, i in zip(body.inputs, inputs, strict=True):
                self._join_all(graph, op.operands[i], body, inner, skip=int(i in wiring.scanned))
            for inner, r in zip(body.outputs, outputs, strict=True):
                if r is not None:
                    self._join_all(graph, op.results[r], body, inner, skip=int(r in wiring.stacked))
        for r, i in wiring.carried.items():
            self._join_all(graph, op.operands[i], graph, op.results[r])


@memoized
def dim_classes(step: StepGraph) -> DimClasses:
    """Return the dim classes of a step; they are computed once."""
    return DimClasses(step)


def _majors(graph: Graph, op: Op) -> Iterator[tuple[int, int, int]]:
    """Yield (value id, dim, major factor) for each dim of the operands and results of an op without bodies."""
    rule = rule_of_op(graph, op.id)
    tensors: tuple[Dims, ...] = (*rule.operands, *rule.results)
    for v, dims in zip((*op.operands, *op.results), tensors, strict=True):
        for dim, factors in enumerate(dims):
            factor = major_factor(rule, factors)
            if factor is not None:
                yield v, dim, factor


SPATIAL = ("width", "height", "depth")

Names = Mapping[str, frozenset[int]]
"""The classes of each name."""


class Contraction(NamedTuple):
    """An op that multiplies arrays: the major factors of operands and result, and which of these hold samples."""

    graph: Graph
    op: Op
    factors: tuple[frozenset[int], ...]
    batched: tuple[bool, ...]

    @property
    def weights(self) -> tuple[int, ...]:
        """The numbers of the operands without samples, if the result has samples."""
        return tuple(i for i, batched in enumerate(self.batched[:-1]) if not batched) if self.batched[-1] else ()


def contractions(step: StepGraph) -> Iterator[Contraction]:
    """Yield the products and convolutions of the forward pass, bodies included."""
    for graph, op in forward_ops(step):
        rule = rule_of_op(graph, op.id)
        if op.bodies or rule.work_kind == "elementwise" or len(op.operands) != 2:
            continue
        batch = batch_dims_of(step, graph)
        tensors = (*rule.operands, *rule.results)
        majors = ((major_factor(rule, factors) for factors in dims) for dims in tensors)
        factors = tuple(frozenset(f for f in found if f is not None) for found in majors)
        batched = tuple(batch[v] is not None for v in (*op.operands, *op.results))
        yield Contraction(graph=graph, op=op, factors=factors, batched=batched)


def forward_ops(step: StepGraph) -> Iterator[tuple[Graph, Op]]:
    """Yield the ops of the forward pass with their graphs, those of bodies included."""
    for op in step.graph.ops:
        if step.phases[op.id] is Phase.FORWARD:
            yield step.graph, op
            for body in op.bodies:
                yield from body.walk()


def batch_dims_of(step: StepGraph, graph: Graph) -> Sequence[int | None]:
    """Return the batch dim of each value of the step's graph or of a body."""
    if graph is step.graph:
        return step.batch_dims
    scope = step.bodies.get(graph)
    return scope.batch_dims if scope is not None else (None,) * len(graph.values)


def dim_names(step: StepGraph, classes: DimClasses) -> Names:
    """Return the names of a step's dims, each with its classes; names without any are left out."""
    # `made` and `summed` are the dims that contractions with weights make and sum over, in the order of the forward
    # pass; `alone` holds the shared and the other dims of contractions without weights, which attention consists of.
    found: dict[str, set[int]] = {"batch": _batch(step, classes), "sequence": _sequence(step, classes)}
    found["vocab"] = _searched(step, classes)
    found["experts"], found["heads"], found["head_dim"] = set(), set(), set()
    made, summed, alone = set[int](), dict[int, None](), list[tuple[set[int], set[int]]]()
    uses = Counter[int]()
    for each in contractions(step):
        rule = rule_of_op(each.graph, each.op.id)
        if rule.work_kind == "convolution":
            for name, node in _spatial(each, classes):
                found.setdefault(name, set()).add(node)
            continue
        of = _classes_of_factors(each, classes)
        shared = {of[f] for f in of if all(f in factors for factors in each.factors)} - found["batch"]
        if each.weights:
            found["experts"] |= shared
            weights = frozenset[int]().union(*(each.factors[i] for i in each.weights))
            made |= {of[f] for f in weights & each.factors[-1]}
            summed |= dict.fromkeys(of[f] for f in weights - each.factors[-1])
            uses.update(of[f] for f in weights)
        elif all(each.batched):
            alone.append((shared, {*of.values()} - shared))
    # Heads and their width come from weights; dims that two activations share otherwise, such as positions, do not.
    features = made | summed.keys()
    for shared, others in alone:
        if heads := shared & features:
            found["heads"] |= heads
            found["head_dim"] |= others & features
    found["head_dim"] -= found["heads"]
    taken = set[int]().union(*found.values())
    # The residual stream is the input or the result of most weights; of equally many the one that is summed over first.
    widths = [node for node in summed if node not in taken]
    found["d_model"] = {max(widths, key=uses.__getitem__)} if widths else set()
    found["d_ff"] = (made & summed.keys()) - taken - found["d_model"]
    return {name: frozenset(nodes) for name, nodes in found.items() if nodes}


def _classes_of_factors(each: Contraction, classes: DimClasses) -> dict[int, int]:
    found = ((f, classes.of_factor(each.graph, each.op, f)) for f in frozenset[int]().union(*each.factors))
    return {f: node for f, node in found if node is not None}


def _batch(step: StepGraph, classes: DimClasses) -> set[int]:
    graph = step.graph
    return {classes.of(graph, v, d) for v in graph.inputs if (d := step.batch_dims[v]) is not None}


def _sequence(step: StepGraph, classes: DimClasses) -> set[int]:
    graph, found = step.graph, set[int]()
    for v in graph.inputs:
        value, batch = graph.values[v], step.batch_dims[v]
        if batch is not None and value.rank == 2 and value.dtype.startswith(("int", "uint")):
            found.add(classes.of(graph, v, 1 - batch))
    return found


def _searched(step: StepGraph, classes: DimClasses) -> set[int]:
    found = set[int]()
    for graph, op in forward_ops(step):
        batch = batch_dims_of(step, graph)
        if op.primitive != "gather" or batch[op.operands[0]] is not None or batch[op.operands[1]] is None:
            continue
        rule = rule_of_op(graph, op.id)
        for dim, factors in enumerate(rule.operands[0]):
            factor = major_factor(rule, factors)
            if factor is not None and rule.kinds[factor] is FactorKind.REDUCTION:
                found.add(classes.of(graph, op.operands[0], dim))
    return found


def _spatial(each: Contraction, classes: DimClasses) -> Iterator[tuple[str, int]]:
    """Yield names and classes of the spatial dims of the samples that a convolution reads."""
    if not each.weights:
        return
    numbers = each.op.params["dimension_numbers"]
    dims = [int(d) for d in numbers["lhs_spec"][2:]]
    # From the last one on: a convolution over one dim has a width, over two a height too.
    for name, dim in zip(SPATIAL, reversed(dims), strict=False):
        yield name, classes.of(each.graph, each.op.operands[0], dim)


_BatchDims = tuple[int | None, ...]
_Known = Mapping[Graph, Mapping[int, int | None]]
"""Per graph or body the values whose batch dim, or that they have none, is known."""


def follow_batch(
    graph: Graph, inputs: Sequence[int | None], known: _Known | None = None
) -> tuple[_BatchDims, dict[Graph, BodyScope]]:
    """Return the batch dim of each value (or None), and the scope of every body, given those of the graph inputs."""
    # Dims that the caller knows for certain take precedence over those that are followed here.
    known = known or {}
    given = known.get(graph, {})
    found: list[int | None] = [None] * len(graph.values)
    bodies: dict[Graph, BodyScope] = {}
    for v, dim in zip(graph.inputs, inputs, strict=True):
        found[v] = given.get(v, dim)
    for op in graph.ops:
        wiring = wiring_of(op)
        operands = [found[v] for v in op.operands]
        if wiring is None:
            results = _through(graph, op, operands)
        else:
            results = _around(op, wiring, operands, bodies, known)
        for r, dim in zip(op.results, results, strict=True):
            found[r] = given.get(r, dim)
    return tuple(found), bodies


def _through(graph: Graph, op: Op, operands: Sequence[int | None]) -> list[int | None]:
    if op.primitive == "reshape" and operands[0] is not None and graph.values[op.operands[0]].shape[operands[0]] == 1:
        return [_same_place(graph.values[op.operands[0]], operands[0], graph.values[op.results[0]])]
    rule = rule_of_op(graph, op.id)
    # Operands may hold the batch in different factors, for instance in an outer product of two samples.
    carried = {
        _major(rule, dims[dim]) for dims, dim in zip(rule.operands, operands, strict=True) if dims and dim is not None
    }
    # A batch that is reduced or replicated is gone from the results: they hold no samples any more.
    passed = {f for f in carried if f is not None and rule.kinds[f] is FactorKind.PASS}
    return [next((d for d, f in enumerate(dims) if _major(rule, f) in passed), None) for dims in rule.results]


def _same_place(operand: Value, dim: int, result: Value) -> int | None:
    """Return the result's dim of size 1 that has as many elements in front of it as `dim` of the operand has."""
    before = prod(operand.shape[:dim])
    places = (d for d, n in enumerate(result.shape) if n == 1 and prod(result.shape[:d]) == before)
    return next(places, None)


def _major(rule: Rule, factors: tuple[int, ...]) -> int | None:
    """Return the factor that a split of a dim would split; for a dim of size 1, its first one."""
    return next((f for f in factors if rule.sizes[f] > 1), factors[0] if factors else None)


def _around(
    op: Op, wiring: Wiring, operands: Sequence[int | None], bodies: dict[Graph, BodyScope], known: _Known
) -> list[int | None]:
    """Return the batch dims of an op with bodies, in which carried values leave with a batch if they enter with one."""
    inside = [_slice(dim) if i in wiring.scanned else dim for i, dim in enumerate(operands)]
    while True:
        results: list[int | None] = [None] * len(op.results)
        for body, inputs, outputs in zip(op.bodies, wiring.inputs, wiring.outputs, strict=True):
            dims, inner = follow_batch(body, [inside[i] for i in inputs], known)
            bodies.update(inner)
            bodies[body] = BodyScope(full_shapes=tuple(v.shape for v in body.values), batch_dims=dims)
            for v, r in zip(body.outputs, outputs, strict=True):
                if r is not None and dims[v] is not None and results[r] is None:
                    results[r] = dims[v]
        # What a body returns with a batch is what its next trip reads: the bodies are followed again with it.
        entered = {i: results[r] for r, i in wiring.carried.items() if inside[i] is None and results[r] is not None}
        if not entered:
            return [dim + 1 if dim is not None and r in wiring.stacked else dim for r, dim in enumerate(results)]
        for i, dim in entered.items():
            # Every round gives a batch to at least one more operand, so that the loop ends.
            inside[i] = dim


def _slice(dim: int | None) -> int | None:
    """Return the batch dim of a slice along the leading dim, or None: a batch that is scanned over is gone."""
    return None if not dim else dim - 1
