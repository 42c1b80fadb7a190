"""One weird trick: data parallel convolutions and tensor parallel dense layers, on the same devices.

    dense layer of C_in × C_out, batch B      split if that sends less than summing its gradient: about when
                                              B · (C_in or C_out) < C_in · C_out
    elements sent                             2 |W_conv| + the arrays between layers split differently     (per device)

All weights of convolutions are whole, and their gradients are summed. Each dense layer is split by the weights' own
dims or by samples, whichever is cheaper: a network with one small dense layer (ResNet) becomes data parallel.
Krizhevsky, One weird trick for parallelizing convolutional neural networks (2014).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from alpa_lite.errors import InfeasibleError, PlanError
from alpa_lite.inter_op.joint.what_would_fit import show_bytes
from alpa_lite.inter_op.plan_request import PlanRequest
from alpa_lite.intra_op.stage import GivenLayout, Wanted
from alpa_lite.intra_op.strategies import AxisRole, Restriction
from alpa_lite.plan.plan import Plan
from alpa_lite.planners.on_mesh import MeshConstraints, plan_on_mesh
from alpa_lite.planners.planner import Planner
from alpa_lite.program.ir import Graph
from alpa_lite.program.phases import StepGraph
from alpa_lite.rules.dims import Contraction, DimClasses, batch_dims_of, contractions
from alpa_lite.rules.op_info import rule_of_op

AXIS = "x"

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
        if step.batch_size is None:
            raise PlanError(f"{self.name} splits the batch over {devices} devices. {step.batch_problem}")
        if step.batch_size // step.num_microbatches % devices:
            raise PlanError(
                f"{self.name} splits the samples of convolutions over {devices} devices, but the batch is "
                f"{step.batch_size} in {step.num_microbatches} micro-batches. Use a multiple of {devices} samples."
            )
        layout = _whole_but_dense(step, found)
        graph, device = step.graph, request.cluster.device
        whole = sum(graph.values[v].bytes for v in graph.inputs if layout.of(graph, v))
        if whole > device.memory_bytes:
            raise InfeasibleError(
                f"{self.name} does not fit: state of convolutions alone, which every device holds whole, needs "
                f"{show_bytes(whole)} per device, but {device.name} has {show_bytes(device.memory_bytes)}. Use "
                "al.planners.FSDP or al.planners.Auto."
            )
        axes, restriction = {AXIS: devices}, Restriction(roles={AXIS: AxisRole.DENSE})
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
            if len(each.weights) == 1 and not _is_convolution(each) and moved * num_microbatches < sizes[i]:
                paying.add((graph, op.operands[i]))
    return sum(weights[each] for each in paying) / max(1, sum(weights.values()))


def _whole_but_dense(step: StepGraph, found: Sequence[Contraction]) -> GivenLayout:
    """Return the layout in which weights of dense layers, and biases of these, are the only parameters to be split."""
    classes, dense, kernels = DimClasses(step), set[tuple[int, ...]](), set[tuple[int, ...]]()
    for each in found:
        for i in each.weights:
            kind = classes.of_value(each.graph, each.op.operands[i])
            (kernels if _is_convolution(each) else dense).add(kind)
    # Gradients may be transposed: the order of dims is ignored.
    transposed = {tuple(sorted(kind)) for kind in dense}
    made = {kind[-1] for kind in dense} - {node for kind in kernels for node in kind}

    def wanted(nodes: tuple[int, ...]) -> Wanted:
        # Optimizer state and gradients have the dims of their weights, and are as free as these.
        free = tuple(sorted(nodes)) in transposed or (bool(nodes) and set(nodes) <= made)
        return () if free or not nodes else ((AXIS, None),)

    return GivenLayout(
        values={
            graph: [
                wanted(classes.of_value(graph, v.id)) if batch is None else ()
                for v, batch in zip(graph.values, batch_dims_of(step, graph), strict=True)
            ]
            for graph in classes.graphs
        }
    )
