"""Parallel convolutional networks: LBANN's convolutions split by samples, space and channels, and one weird trick.

`ConvolutionParallel` splits convolutions over devices for each of these dims. The communication of each way:

    sample           the sums of gradients
    height, width    floor(K/2) rows to either neighbour, of the input in the forward pass and of the gradient in the
                     backward pass, 2 · floor(K/2) · W · C · N elements; the gradients of kernels are summed
    channel          the dim that a convolution sums over: one sum of its result
    filter           the dim that a convolution makes: its input is gathered, or the gradient of the input summed

Spatial dims are split wherever the devices divide them and windows step over all of them; a convolution that cannot
be split so is split in another way, and its operands and results are moved. Kernels are split over `channel` and
`filter` where these divide them.

Dryden et al., Improving strong-scaling of CNN training (IPDPS 2019), and Channel and filter parallelism for large-scale
CNN training (SC 2019).

`OneWeirdTrick` runs data parallel convolutions and tensor parallel dense layers on the same devices:

    dense layer of C_in × C_out, batch B      split if that sends less than summing its gradient: about when
                                              B · (C_in or C_out) < C_in · C_out
    elements sent                             2 |W_conv| + the arrays between layers split differently     (per device)

All weights of convolutions are whole, and their gradients are summed. Each dense layer is split by the weights' own
dims or by samples, whichever is cheaper: a network with one small dense layer (ResNet) becomes data parallel.
Krizhevsky, One weird trick for parallelizing convolutional neural networks (2014)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from alpa_lite.errors import InfeasibleError, PlanError
from alpa_lite.inter_op.plan_request import PlanRequest
from alpa_lite.inter_op.what_would_fit import show_bytes
from alpa_lite.intra_op.stage import GivenLayout, Wanted
from alpa_lite.intra_op.strategies import AxisRole, Restriction
from alpa_lite.plan.plan import Plan
from alpa_lite.planners.hybrid import check_batch
from alpa_lite.planners.on_mesh import MeshConstraints, plan_on_mesh
from alpa_lite.planners.planner import Planner
from alpa_lite.planners.weights import WeightSplit, layout_of_kinds, named_kinds, unsplittable_ops
from alpa_lite.program.ir import Graph
from alpa_lite.program.phases import StepGraph
from alpa_lite.rules.dims import Contraction, batch_dims_of, contractions, dim_classes, dim_names
from alpa_lite.rules.op_info import rule_of_op
from alpa_lite.text import show_usable

_SPACE = ("height", "width")
_KERNELS = ("channel", "filter")


@dataclass(frozen=True, kw_only=True)
class ConvolutionParallel(Planner):
    """Convolutions split by samples, space and channels, each over devices of its own.

    Attributes:
        sample: devices that split the batch; None: as many as the others leave devices for.
        height: devices that split the first spatial dim, and send rows to their neighbours.
        width: the same for the second spatial dim.
        channel: devices that split the channels over which a convolution sums.
        filter: devices that split the channels that a convolution makes.
    """

    sample: int | None = None
    height: int = 1
    width: int = 1
    channel: int = 1
    filter: int = 1

    @property
    def name(self) -> str:
        """Name for tables."""
        degrees = {name: getattr(self, name) for name in ("sample", *_SPACE, *_KERNELS)}
        shown = [f"{name} {size}" for name, size in degrees.items() if (size or 1) > 1]
        return "convolutions by " + (" × ".join(shown) or "sample")

    def plan(self, request: PlanRequest) -> Plan:
        """Return the plan. Raises `PlanError` if no convolution has such dims, or none is divided by a degree."""
        others = {name: getattr(self, name) for name in (*_SPACE, *_KERNELS)}
        total = request.cluster.num_devices
        # At least 1: `plan_on_mesh` reports degrees that do not make up the cluster.
        axes = {"sample": self.sample or max(1, total // prod(others.values())), **others}
        step = request.best_step((1,), loop_parts=0)
        check_batch(self.name, step, axes["sample"])
        wide = {axis: size for axis, size in axes.items() if size > 1}
        layout = _layout(step, wide)
        roles = {
            "sample": AxisRole.BATCH,
            # Height and width are like positions of a sequence: dims of values with a batch, not of parameters.
            **dict.fromkeys(_SPACE, AxisRole.CONTEXT),
            **dict.fromkeys(_KERNELS, AxisRole.MODEL),
        }
        restriction = Restriction(roles={axis: roles[axis] for axis in wide})
        return plan_on_mesh(self.name, request, axes, MeshConstraints(restriction=restriction, layout=layout))


def _layout(step: StepGraph, sizes: Mapping[str, int]) -> GivenLayout:
    """Return the layout of kernels, and of all values with samples that have a height or width."""
    classes, names = dim_classes(step), dict[str, frozenset[int]]()
    kinds = list[WeightSplit]()
    for axis in sizes:
        if axis in _SPACE:
            names[axis] = dim_names(step, classes).get(axis, frozenset())
            if not names[axis]:
                raise PlanError(f"Images are to be split by {axis}, but no convolution of the step has one.")
        elif axis in _KERNELS:
            found = list(named_kinds(step, classes, axis))
            # The first kernel often has three channels, which no axis divides: it stays whole.
            fits = [(g, v, d) for g, v, d, _ in found if g.values[v].shape[d] % sizes[axis] == 0]
            if not fits:
                raise PlanError(_no_kernels(axis, sizes[axis], found))
            kinds += [WeightSplit(classes=classes.of_value(g, v), axis=axis, dim=d) for g, v, d in fits]
    values = layout_of_kinds(step, classes, kinds)
    # Values with samples are split in space; ops that cannot be split so, and their results, are left to the solver.
    space = {axis: size for axis, size in sizes.items() if axis in names}
    exempt = {graph: unsplittable_ops(graph, classes, names, space) for graph in classes.graphs}
    for graph in classes.graphs:
        whole = {r for o in exempt[graph] for r in graph.ops[o].results}
        for v, batch in zip(graph.values, batch_dims_of(step, graph), strict=True):
            if batch is not None and v.id not in whole:
                values[graph][v.id] += _spatial(classes.of_value(graph, v.id), v.shape, names, space)
    return GivenLayout(values=values, exempt=exempt)


def _no_kernels(axis: str, number: int, found: Sequence[tuple[Graph, int, int, str]]) -> str:
    """Return a sentence that says why no kernel can be split over so many devices."""
    if not found:
        return f"Kernels are to be split by {axis}, but the step has no convolutions. Use al.planners.Megatron."
    graph, v, dim, source = max(found, key=lambda each: each[0].values[each[1]].num_elements)
    return (
        f"{source}: kernels are to be split by {axis} over {number} devices, which do not divide dim {dim} of this "
        f"one, of the shape {list(graph.values[v].shape)}, nor that of any other. Choose a number that divides some."
    )


def _spatial(
    nodes: tuple[int, ...], shape: tuple[int, ...], names: Mapping[str, frozenset[int]], sizes: Mapping[str, int]
) -> Wanted:
    """Return the axes that split exactly one dim of a value and divide it, each with this dim."""
    found = ((axis, [d for d, node in enumerate(nodes) if node in names[axis]]) for axis in sizes)
    # An axis cannot split two dims of one value.
    return tuple((axis, dims[0]) for axis, dims in found if len(dims) == 1 and shape[dims[0]] % sizes[axis] == 0)


_AXIS = "x"

LEAST_SHARE = 0.05
"""Least share of dense layers in all weights, if the plan must pay: it can save at most this share of the traffic of
data parallelism."""


@dataclass(frozen=True, kw_only=True)
class OneWeirdTrick(Planner):
    """All devices on one axis, which splits samples in convolutions and weights in dense layers.

    Attributes:
        where_it_pays: refuse, before anything is solved, if dense layers with more weights than input or output
            elements hold less than `LEAST_SHARE` of all weights: the plan would be nearly data parallel.
    """

    where_it_pays: bool = False

    @property
    def name(self) -> str:
        """Name for tables."""
        return "one weird trick"

    def plan(self, request: PlanRequest) -> Plan:
        """Return the plan. Raises `PlanError` if there are no convolutions, or the devices do not divide the batch."""
        step, devices = request.best_step((1,), loop_parts=0), request.cluster.num_devices
        found = [*contractions(step)]
        if not any(map(_is_convolution, found)):
            raise PlanError(
                "One weird trick splits convolutions in one way and dense layers in another, but the step has no "
                "convolutions. Use al.planners.Megatron or al.planners.DataParallel."
            )
        if self.where_it_pays and (devices == 1 or _share_that_pays(found, step.num_microbatches) < LEAST_SHARE):
            raise PlanError(
                "One weird trick splits weights of dense layers that are larger than the arrays between them, but the "
                f"step has few or none, or {devices} devices do not do. Use al.planners.DataParallel."
            )
        if step.batch.size is None:
            raise PlanError(f"{self.name} splits the batch over {devices} devices. {step.batch.problem}")
        if step.batch.size // step.num_microbatches % devices:
            raise PlanError(
                f"{self.name} splits the samples of convolutions over {devices} devices, but the batch is "
                f"{step.batch.size} in {step.num_microbatches} micro-batches. Use a multiple of {devices} samples."
            )
        layout = _whole_but_dense(step, found)
        graph, device = step.graph, request.cluster.device
        whole = sum(graph.values[v].bytes for v in graph.inputs if layout.of(graph, v))
        # Checked before anything is solved: `Auto` asks for this plan at every number of micro-batches.
        if whole > device.usable_bytes:
            raise InfeasibleError(
                f"{self.name} does not fit: state of convolutions alone, which every device holds whole, needs "
                f"{show_bytes(whole)} per device, but {device.name} has "
                f"{show_usable(device.usable_bytes, device.reserved_bytes)}. Use al.planners.FSDP or al.planners.Auto."
            )
        axes, restriction = {_AXIS: devices}, Restriction(roles={_AXIS: AxisRole.DENSE})
        return plan_on_mesh(self.name, request, axes, MeshConstraints(restriction=restriction, layout=layout))


def _is_convolution(each: Contraction) -> bool:
    return rule_of_op(each.graph, each.op.id).work_kind == "convolution"


def _share_that_pays(found: Sequence[Contraction], num_microbatches: int) -> float:
    """Return the share of all weights in dense layers with more weights than input or output elements per step."""
    weights, paying = dict[tuple[Graph, int], int](), set[tuple[Graph, int]]()
    for each in found:
        graph, op = each.graph, each.op
        sizes = [graph.values[v].num_elements for v in (*op.operands, *op.results)]
        for i in each.weights:
            weights[graph, op.operands[i]] = sizes[i]
            # Either the operand or the result has to be moved, and the solver takes the smaller one.
            moved = min(size for n, size in enumerate(sizes) if n != i)
            # A product of two weights has no operand with samples to be moved instead.
            if len(each.weights) == 1 and not _is_convolution(each) and moved * num_microbatches < sizes[i]:
                paying.add((graph, op.operands[i]))
    return sum(weights[each] for each in paying) / max(1, sum(weights.values()))


def _whole_but_dense(step: StepGraph, found: Sequence[Contraction]) -> GivenLayout:
    """Return the layout in which weights of dense layers, and biases of these, are the only parameters to be split."""
    classes, dense, kernels = dim_classes(step), set[tuple[int, ...]](), set[tuple[int, ...]]()
    for each in found:
        for i in each.weights:
            kind = classes.of_value(each.graph, each.op.operands[i])
            (kernels if _is_convolution(each) else dense).add(kind)
    # Gradients may be transposed: the order of dims is ignored.
    transposed = {tuple(sorted(kind)) for kind in dense}
    # Biases have the last dim of their weights; a dim that kernels have too stays whole.
    made = {kind[-1] for kind in dense} - {node for kind in kernels for node in kind}

    def wanted(nodes: tuple[int, ...]) -> Wanted:
        # Optimizer state and gradients have the dims of their weights, and are as free as these.
        free = tuple(sorted(nodes)) in transposed or (bool(nodes) and set(nodes) <= made)
        # With None for the dim, the axis must split no dim of the value.
        return () if free or not nodes else ((_AXIS, None),)

    return GivenLayout(
        values={
            graph: [
                wanted(classes.of_value(graph, v.id)) if batch is None else ()
                for v, batch in zip(graph.values, batch_dims_of(step, graph), strict=True)
            ]
            for graph in classes.graphs
        }
    )
