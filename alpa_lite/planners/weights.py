"""Layouts of weights by the meaning of their dims: the mesh axis that splits rows of a table, experts, or channels.

    kind of a weight      the classes of its dims, in order; gradients and optimizer state are of the same kind
    layout                the constraints on all values without samples that are of a kind       (layout_of_kinds)

The last dims count in arrays that stack the weights of several layers. Activations are left to the integer program.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from alpa_lite.errors import PlanError
from alpa_lite.intra_op.stage import NO_LAYOUT, GivenLayout, Wanted
from alpa_lite.program.ir import Graph
from alpa_lite.program.phases import StepGraph
from alpa_lite.rules.dims import DimClasses, batch_dims_of, contractions, dim_names, major_factor
from alpa_lite.rules.op_info import rule_of_op


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSplit:
    """A constraint: weights whose dims are of these classes are split over `axis` along `dim`."""

    classes: tuple[int, ...]
    axis: str
    dim: int


def named_kinds(step: StepGraph, classes: DimClasses, name: str) -> Iterator[tuple[Graph, int, int, str]]:
    """Yield the weights that have a dim of this name: graph, value, dim, and the source of a reader.

    "experts" stands for weights that are multiplied expert by expert, without the weights that score experts; "channel"
    and "filter" for kernels of convolutions, along the channels that they sum over and that they make.
    """
    if name in ("channel", "filter"):
        yield from _kernels(step, name)
        return
    nodes = dim_names(step, classes).get(name, frozenset())
    if name == "experts":
        yield from _experts(step, classes, nodes)
        return
    for v in step.graph.inputs:
        if step.batch_dims[v] is None:
            for dim, node in enumerate(classes.of_value(step.graph, v)):
                if node in nodes:
                    yield step.graph, v, dim, f"argument {step.graph.values[v].name}"


def _experts(step: StepGraph, classes: DimClasses, nodes: frozenset[int]) -> Iterator[tuple[Graph, int, int, str]]:
    for each in contractions(step):
        # A factor that both operands and the result have repeats the product: here once for each expert.
        shared = {f for f in each.factors[-1] if all(f in factors for factors in each.factors)}
        rule = rule_of_op(each.graph, each.op.id)
        for i in each.weights:
            v = each.op.operands[i]
            for dim, factors in enumerate(rule.operands[i]):
                if major_factor(rule, factors) in shared and classes.of(each.graph, v, dim) in nodes:
                    yield each.graph, v, dim, each.op.source


def _kernels(step: StepGraph, name: str) -> Iterator[tuple[Graph, int, int, str]]:
    for each in contractions(step):
        if rule_of_op(each.graph, each.op.id).work_kind == "convolution" and each.weights == (1,):
            # The roles of a kernel: (made, summed, spatial…) in the order of `rhs_spec`.
            made, summed = (int(d) for d in each.op.params["dimension_numbers"]["rhs_spec"][:2])
            yield each.graph, each.op.operands[1], made if name == "filter" else summed, each.op.source


def weights_layout(step: StepGraph, split: Mapping[str, str], sizes: Mapping[str, int]) -> GivenLayout:
    """Return the layout of weights with dims of some names; ``split`` is the axis that splits the dim of each name.

    Raises `PlanError` if there is no such dim, or the axis does not divide it.
    """
    if not split:
        return NO_LAYOUT
    classes, kinds = DimClasses(step), list[WeightSplit]()
    for name, axis in split.items():
        found = list(named_kinds(step, classes, name))
        if not found:
            raise PlanError(f"Weights are to be split by {name}, but the step has none with such a dim. Leave it out.")
        for graph, v, dim, source in found:
            value = graph.values[v]
            # The user asked for this split, so that an axis that does not divide the dim is an error, not a whole dim.
            if value.shape[dim] % sizes.get(axis, 1):
                raise PlanError(
                    f"{source}: weights of the shape {list(value.shape)} are to be split over {sizes[axis]} devices "
                    f"along dim {dim} ({name}), which they do not divide. Choose a number that divides "
                    f"{value.shape[dim]}."
                )
            kinds.append(WeightSplit(classes=classes.of_value(graph, v), axis=axis, dim=dim))
    # Axes of one device are not part of the mesh.
    wide = [kind for kind in dict.fromkeys(kinds) if kind.axis in sizes]
    return GivenLayout(values=layout_of_kinds(step, classes, wide))


def layout_of_kinds(step: StepGraph, classes: DimClasses, kinds: Iterable[WeightSplit]) -> dict[Graph, list[Wanted]]:
    """Return the constraints on each value without samples that is of one of the kinds."""
    by_size: dict[int, dict[tuple[int, ...], dict[str, int]]] = {}
    for kind in kinds:
        by_size.setdefault(len(kind.classes), {}).setdefault(kind.classes, {})[kind.axis] = kind.dim

    def wanted(nodes: tuple[int, ...]) -> Wanted:
        # The longest kind that matches decides: a stacked weight is of its own kind, not only of that of its last dims.
        for size, known in sorted(by_size.items(), reverse=True):
            ahead = len(nodes) - size
            if ahead >= 0 and nodes[ahead:] in known:
                found = known[nodes[ahead:]].items()
                return tuple((axis, dim + ahead) for axis, dim in found)
        return ()

    return {
        graph: [
            () if batch is not None else wanted(classes.of_value(graph, v.id))
            for v, batch in zip(graph.values, batch_dims_of(step, graph), strict=True)
        ]
        for graph in classes.graphs
    }
