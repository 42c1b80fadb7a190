"""Names for the dims of a step, found from its structure, as a user of named dimensions would have given them.

    batch        the samples
    sequence     the other dim of integer arguments with two dims, of which one holds the samples: positions of tokens
    vocab        what look-ups of arguments by integers of the samples search: the rows of embedding tables
    heads        what all arrays of a contraction without weights share, and weights have: attention
    experts      what weights share with all arrays of their contractions
    height, width, depth    spatial dims of what convolutions read: the last is the width, the one before the height
    head_dim     feature dims of what such a contraction reads
    d_model      the feature dim of most weights, of several the one that is summed over first: the residual stream's
    d_ff         other feature dims that a contraction with a weight makes, and one with a weight sums over

A name may have several classes (`dims.DimClasses`): the hidden units of each layer are one of their own. Weights are
values without a batch that contractions with samples read, and only the forward pass is looked at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from alpa_lite.program.ir import Graph, Op
from alpa_lite.program.phases import Phase, StepGraph
from alpa_lite.rules.dims import DimClasses, major_factor
from alpa_lite.rules.op_info import rule_of_op
from alpa_lite.rules.registry import FactorKind

SPATIAL = ("width", "height", "depth")

Names = Mapping[str, frozenset[int]]
"""The classes of each name."""


class Contraction(NamedTuple):
    """An op that multiplies arrays: the factors of each of its operands and its result, and which hold samples."""

    graph: Graph
    op: Op
    factors: tuple[frozenset[int], ...]
    batched: tuple[bool, ...]

    @property
    def weights(self) -> tuple[int, ...]:
        """Numbers of the operands without samples, where the result has some."""
        return tuple(i for i, batched in enumerate(self.batched[:-1]) if not batched) if self.batched[-1] else ()


def contractions(step: StepGraph) -> Iterator[Contraction]:
    """The products and convolutions of the forward pass, bodies included."""
    for graph, op in _forward(step):
        rule = rule_of_op(graph, op.id)
        if op.bodies or rule.work_kind == "elementwise" or len(op.operands) != 2:
            continue
        batch = batch_dims_of(step, graph)
        tensors = (*rule.operands, *rule.results)
        majors = ((major_factor(rule, factors) for factors in dims) for dims in tensors)
        factors = tuple(frozenset(f for f in found if f is not None) for found in majors)
        batched = tuple(batch[v] is not None for v in (*op.operands, *op.results))
        yield Contraction(graph=graph, op=op, factors=factors, batched=batched)


def _forward(step: StepGraph) -> Iterator[tuple[Graph, Op]]:
    for op in step.graph.ops:
        if step.phases[op.id] is Phase.FORWARD:
            yield step.graph, op
            for body in op.bodies:
                yield from body.walk()


def batch_dims_of(step: StepGraph, graph: Graph) -> Sequence[int | None]:
    """The batch dim of each value of the step's graph or of a body."""
    if graph is step.graph:
        return step.batch_dims
    scope = step.bodies.get(graph)
    return scope.batch_dims if scope is not None else (None,) * len(graph.values)


def dim_names(step: StepGraph, classes: DimClasses) -> Names:
    """The names that a step's dims have, each with its classes; names without any are left out."""
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
    features = made | summed.keys()
    for shared, others in alone:
        if heads := shared & features:
            found["heads"] |= heads
            found["head_dim"] |= others & features
    found["head_dim"] -= found["heads"]
    taken = set[int]().union(*found.values())
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
    for graph, op in _forward(step):
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
    """The spatial dims of the samples that a convolution reads, by their place from the last one."""
    if not each.weights:
        return
    numbers = each.op.params["dimension_numbers"]
    dims = [int(d) for d in numbers["lhs_spec"][2:]]
    for name, dim in zip(SPATIAL, reversed(dims), strict=False):
        yield name, classes.of(each.graph, each.op.operands[0], dim)
