"""Convolutions split by samples, space, and channels, each over devices of its own, as in LBANN.

The communication of each way to split:

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
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from alpa_lite.errors import PlanError
from alpa_lite.inter_op.plan_request import PlanRequest
from alpa_lite.intra_op.stage import GivenLayout, Wanted
from alpa_lite.intra_op.strategies import AxisRole, Restriction
from alpa_lite.plan.plan import Plan
from alpa_lite.planners.on_mesh import MeshConstraints, plan_on_mesh
from alpa_lite.planners.planner import Planner
from alpa_lite.planners.weights import WeightSplit, layout_of_kinds, named_kinds
from alpa_lite.program.ir import Graph
from alpa_lite.program.phases import StepGraph
from alpa_lite.rules.dims import DimClasses, batch_dims_of, dim_names, major_factor
from alpa_lite.rules.op_info import rule_of_op

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
        axes = {"sample": self.sample or max(1, total // prod(others.values())), **others}
        step = request.best_step((1,), loop_parts=0)
        if step.batch_size is None and axes["sample"] > 1:
            raise PlanError(f"{self.name} splits the batch over {axes['sample']} devices. {step.batch_problem}")
        size = (step.batch_size or 1) // step.num_microbatches
        if size % axes["sample"]:
            raise PlanError(
                f"{self.name} splits {size} samples over {axes['sample']} devices, which do not divide them. Choose "
                "another number."
            )
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
    classes, names = DimClasses(step), dict[str, frozenset[int]]()
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
    exempt = {graph: _exempt(graph, classes, names, space) for graph in classes.graphs}
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
    return tuple((axis, dims[0]) for axis, dims in found if len(dims) == 1 and shape[dims[0]] % sizes[axis] == 0)


def _exempt(
    graph: Graph, classes: DimClasses, names: Mapping[str, frozenset[int]], sizes: Mapping[str, int]
) -> frozenset[int]:
    """Return the ops with a spatial dim that cannot be split: windows that do not step over all of it, odd sizes."""
    found = set[int]()
    for op in graph.ops:
        if op.bodies:
            continue
        rule = rule_of_op(graph, op.id)
        for v, dims in zip((*op.operands, *op.results), (*rule.operands, *rule.results), strict=True):
            for node, factors in zip(classes.of_value(graph, v), dims, strict=True):
                factor = major_factor(rule, factors)
                axes = [axis for axis in sizes if node in names[axis]]
                if factor is not None and any(not rule.splits_into(factor, sizes[axis]) for axis in axes):
                    found.add(op.id)
    return frozenset(found)
