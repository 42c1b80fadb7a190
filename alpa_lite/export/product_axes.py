"""What the mesh axes of a plan split in the products of the forward pass with weights: samples, weights, or experts.

The products of a layer with experts have one weight for each, stacked along a dim that is recognised by its factor:

    batched products    all arrays have it: tokens by expert, weights by expert, results by expert
    ragged products     the weights alone have it: rows are sorted by expert, and the sizes say where each one begins

What counts is how a product is computed (`OpPlacement.factors`), not how its weights are stored: FSDP may store parts
of a stack along this dim, and gathers them before it multiplies. Products that are neither read or make the dim as any
other, such as one of all tokens with the weights of all experts; its class tells that it counts experts (`DimClasses`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from alpa_lite.plan.parts import OpPlacement, StagePlan
from alpa_lite.program.ir import Graph, Op
from alpa_lite.program.phases import StepGraph
from alpa_lite.rules.dims import DimClasses, batch_dims_of, dim_classes, forward_ops, major_factor
from alpa_lite.rules.op_info import rule_of_op
from alpa_lite.sharding.specs import Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductAxes:
    """The mesh axes that split products with weights.

    Attributes:
        experts: the axes that split dims of weights that count experts, and no others.
        weights: the axes that split other dims of weights.
        samples: the axes that split samples.
    """

    experts: frozenset[str]
    weights: frozenset[str]
    samples: frozenset[str]
    _expert_dims: frozenset[int]
    _classes: DimClasses

    @staticmethod
    def of(stages: Sequence[StagePlan], step: StepGraph) -> ProductAxes:
        """Find the axes in the placements of all products."""
        classes, dims = dim_classes(step), list(_weight_dims(step))
        expert_dims = {classes.of(each.graph, each.value, each.dim) for each in dims if each.counts_experts}
        # For each product its factors of weights, and whether they count experts.
        factors: dict[tuple[Graph, int], dict[int, bool]] = defaultdict(dict)
        for each in dims:
            counts = classes.of(each.graph, each.value, each.dim) in expert_dims
            factors[each.graph, each.op.id][each.factor] = counts
        experts, weights, samples = set[str](), set[str](), set[str]()
        for graph, number, placement in (found for stage in stages for found in _placements(step.graph, stage.ops)):
            if (graph, number) not in factors:
                continue
            for factor, counts in factors[graph, number].items():
                (experts if counts else weights).update(placement.factors[factor])
            dim = batch_dims_of(step, graph)[graph.ops[number].results[0]]
            if dim is not None:
                samples.update(placement.results[0].dims[dim])
        # An axis that splits other dims of weights too is a tensor axis, in layers with experts among others.
        return ProductAxes(
            experts=frozenset(experts - weights),
            weights=frozenset(weights),
            samples=frozenset(samples),
            _expert_dims=frozenset(expert_dims),
            _classes=classes,
        )

    def expert_axes(self, value: int, spec: Spec) -> frozenset[str]:
        """Return the axes that split a value of the step's graph expert by expert."""
        dims = zip(self._classes.of_value(self._classes.graph, value), spec.dims, strict=True)
        return self.experts & {axis for node, axes in dims if node in self._expert_dims for axis in axes}


@dataclass(frozen=True, slots=True, kw_only=True)
class _WeightDim:
    """A dim of a weight in a product, its factor, and whether the product multiplies by one weight for each of its
    indices."""

    graph: Graph
    op: Op
    value: int
    dim: int
    factor: int
    counts_experts: bool


def _weight_dims(step: StepGraph) -> Iterator[_WeightDim]:
    """Yield the dims of all weights in products of the forward pass."""
    for graph, op in forward_ops(step):
        rule, batch = rule_of_op(graph, op.id), batch_dims_of(step, graph)
        if op.bodies or rule.work_kind != "matmul":
            continue
        # The sizes of ragged groups are no arrays of the product.
        floats = [i for i, v in enumerate(op.operands) if graph.values[v].is_float]
        factors = {i: {major_factor(rule, dim) for dim in rule.operands[i]} for i in floats}
        made = {major_factor(rule, dim) for dim in rule.results[0]}
        has_samples = batch[op.results[0]] is not None
        for i in floats:
            if batch[op.operands[i]] is not None:
                continue
            others = [made, *(factors[j] for j in floats if j != i)]
            for dim, of_dim in enumerate(rule.operands[i]):
                factor = major_factor(rule, of_dim)
                shared = [factor in other for other in others]
                if factor is not None:
                    # Without samples a product that repeats along a dim has no weights, as scores of attention.
                    counts = not any(shared) or (all(shared) and has_samples)
                    yield _WeightDim(
                        graph=graph, op=op, value=op.operands[i], dim=dim, factor=factor, counts_experts=counts
                    )


def _placements(graph: Graph, placements: Mapping[int, OpPlacement]) -> Iterator[tuple[Graph, int, OpPlacement]]:
    """Yield the placements of a graph, with the number of the op, and those of all bodies in it."""
    for number, placement in placements.items():
        yield graph, number, placement
        for body, inside in zip(graph.ops[number].bodies, placement.bodies, strict=False):
            yield from _placements(body, inside)
