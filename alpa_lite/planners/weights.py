"""Layouts of weights by the meaning of their dims: the mesh axis that splits rows of a table, experts, or channels.

    kind of a weight      the classes of its dims, in order; gradients and optimizer state are of the same kind
    layout                the constraints on all values without samples that are of a kind       (layout_of_kinds)
    projections           Megatron's layout: those of attention by heads, those of feed-forward blocks by hidden units

The last dims count in arrays that stack the weights of several layers. Activations are left to the integer program.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from alpa_lite.errors import PlanError
from alpa_lite.intra_op.stage import NO_LAYOUT, GivenLayout, Wanted
from alpa_lite.program.ir import Graph
from alpa_lite.program.memo import memoized
from alpa_lite.program.phases import StepGraph
from alpa_lite.rules.dims import DimClasses, batch_dims_of, contractions, dim_classes, dim_names, major_factor
from alpa_lite.rules.op_info import rule_of_op
from alpa_lite.text import short_source


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Projections:
    """The splits of projections over the axis "model", and a clause about each projection that has none."""

    splits: tuple[WeightSplit, ...]
    unsplit: tuple[str, ...]


@memoized
def projections(step: StepGraph, count: int) -> Projections:
    """Return how Megatron splits the projections of a step over `count` devices.

    Those that read the residual stream are split along what they make, heads or hidden units, and those that write to
    it along what they sum over, so that nothing is sent between the two (Shoeybi et al. 2019, figure 3).
    """
    classes, splits, unsplit = dim_classes(step), dict[WeightSplit, None](), dict[str, None]()
    inner = {node: name for name, nodes in dim_names(step, classes).items() if name in _INNER for node in nodes}
    least = least_sizes(classes)
    for each in contractions(step):
        if rule_of_op(each.graph, each.op.id).work_kind == "convolution":
            continue
        for i in each.weights:
            value = each.graph.values[each.op.operands[i]]
            nodes = classes.of_value(each.graph, value.id)
            dims = [dim for dim, node in enumerate(nodes) if node in inner]
            if len(dims) == 1 and least[nodes[dims[0]]] % count == 0:
                splits[WeightSplit(classes=nodes, axis="model", dim=dims[0])] = None
            elif problem := _unsplit(value.shape, nodes, inner, least):
                unsplit[f"those of shape {list(value.shape)} at {short_source(each.op.source)} {problem}"] = None
    return Projections(splits=tuple(splits), unsplit=tuple(unsplit))


_INNER: Mapping[str, str] = {"heads": "heads", "d_ff": "hidden units"}
"""The names of the dims between two projections, and what they are."""


def _unsplit(shape: tuple[int, ...], nodes: tuple[int, ...], inner: Mapping[int, str], least: Mapping[int, int]) -> str:
    """Return why Megatron cannot split a weight; empty if it is no projection of a block."""
    dims = [dim for dim, node in enumerate(nodes) if node in inner]
    if len(dims) == 1:
        return f"have {least[nodes[dims[0]]]} {_INNER[inner[nodes[dims[0]]]]}, which the devices do not divide"
    if dims:
        return "have hidden units on both sides, as there is no residual stream between them"
    for size, node in zip(shape, nodes, strict=True):
        if 1 < least[node] < size:
            parts = f"{least[node]} × {size // least[node]}"
            return f"have {size} columns or rows that are read as {parts}, with no heads first"
    return ""


def least_sizes(classes: DimClasses) -> dict[int, int]:
    """Return the least size of a dim of each class: of a dim with several parts, the size of the outermost one."""
    found = dict[int, int]()
    for graph in classes.graphs:
        for value in graph.values:
            for size, node in zip(value.shape, classes.of_value(graph, value.id), strict=True):
                known = found.get(node, size)
                # A dim of one element, or of none, has no parts.
                found[node] = min(size, known) if min(size, known) > 1 else max(size, known)
    return found


def positions_layout(step: StepGraph, count: int) -> GivenLayout:
    """Return the layout in which the axis "context" splits the positions of all arguments with samples.

    Positions are the dims of tokens beside the samples; without tokens, the first dim of each argument that is neither
    its samples nor what weights have. Raises `PlanError` if there are none, or `count` devices do not divide them.
    """
    classes, graph = dim_classes(step), step.graph
    features = {
        node
        for each in contractions(step)
        for i in each.weights
        for node in classes.of_value(each.graph, each.op.operands[i])
    }
    tokens = dim_names(step, classes).get("sequence", frozenset())
    values: list[Wanted] = [() for _ in graph.values]
    for v in graph.inputs:
        nodes, value = classes.of_value(graph, v), graph.values[v]
        others = [d for d, n in enumerate(value.shape) if n > 1 and d != step.batch_dims[v] is not None]
        found = [d for d in others if (nodes[d] in tokens if tokens else nodes[d] not in features)]
        if found and value.shape[found[0]] % count:
            raise PlanError(
                f"context = {count} devices are to split the {value.shape[found[0]]} positions of {value.name}, which "
                "they do not divide. Choose a number that does."
            )
        values[v] = tuple(("context", dim) for dim in found[:1])
    if not any(values):
        raise PlanError(
            f"context = {count} devices are to split the positions of each sequence, but no argument has positions "
            "beside its samples. Leave it out, or use data or tensor devices instead."
        )
    return GivenLayout(values={graph: values})


def weights_layout(
    step: StepGraph, split: Mapping[str, str], sizes: Mapping[str, int], *, more: Iterable[WeightSplit] = ()
) -> GivenLayout:
    """Return the layout of weights with dims of some names; ``split`` is the axis that splits the dim of each name.

    `more`: further splits of weights. Raises `PlanError` if there is no such dim, or the axis does not divide it.
    """
    kinds = list[WeightSplit](more)
    if not (split or kinds):
        return NO_LAYOUT
    classes = dim_classes(step)
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


def unsplittable_ops(
    graph: Graph, classes: DimClasses, split: Mapping[str, frozenset[int]], sizes: Mapping[str, int]
) -> frozenset[int]:
    """Return the ops with a dim of the classes that `split` gives to an axis which that axis cannot split.

    Windows that do not step over all of a dim, sorts along it, and sizes that the devices do not divide are such.
    """
    found = set[int]()
    for op in graph.ops:
        if op.bodies:
            continue
        # Ops with bodies have no rule; the ops of their bodies are examined with the graphs of these.
        rule = rule_of_op(graph, op.id)
        for v, dims in zip((*op.operands, *op.results), (*rule.operands, *rule.results), strict=True):
            for node, factors in zip(classes.of_value(graph, v), dims, strict=True):
                factor = major_factor(rule, factors)
                axes = [axis for axis in sizes if node in split[axis]]
                if factor is not None and any(not rule.splits_into(factor, sizes[axis]) for axis in axes):
                    found.add(op.id)
    return frozenset(found)
