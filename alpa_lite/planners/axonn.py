"""AxoNN: every weight split over two axes of a grid of devices and stored in parts over a third; the batch over two.

Devices form a grid data × z × y × x, the last over neighbours. A layer multiplies m samples (rows) by a k × n weight:

    weight        k split over x, n over y, and each part stored in 1/G_z of its elements over z
    activations   m over data and z, k over x, and n over y: the next layer exchanges x and y, so that it reads what
                  this one makes as it lies

With K = k/G_x, N = n/G_y and M = m/(G_data G_z), each with x and y exchanged in every other layer, a device sends

    forward       all_gather of the weight over z       (G_z - 1)/G_z · K N
                  all_reduce of the result over x       2 (G_x - 1)/G_x · M N
    backward      all_reduce of the input's gradient    2 (G_y - 1)/G_y · M K                 over y
                  reduce_scatter of the weight's        (G_z - 1)/G_z · K N                   over z
    update        all_reduce of the weight's gradient   2 (G_data - 1)/G_data · K N / G_z     over data

elements. G_x = G_y = G_data = 1 is FSDP, G_x = G_z = 1 Megatron-LM's tensor parallelism, G_x = G_y = G_z = 1 data
parallelism. Exchanging x and y in every other layer is a colouring of the dims with two colours (`_colours`): the dim
that a weight sums over has one colour, and the dim that it makes the other. The residual stream of a transformer is
split over x, heads and hidden units over y.

Degrees that are left open are searched. The factorisations are ordered by the sum of these collectives on the cluster
and of three local products per layer (`modelled_seconds`); the paper leaves the products out, since they are the same
wherever all degrees divide all sizes. The first that fit are planned, and the fastest of these is returned: the model
knows nothing of what lies between the layers.

Singh, Bhatele, AxoNN (IPDPS 2022); Singh et al., A 4D Hybrid Algorithm to Scale Parallel Training to Thousands of GPUs
(2023) and Democratizing AI (SC 2024): sections on the algorithm and the performance model. The grid of each product is
that of Agarwal et al., A three-dimensional approach to parallel matrix multiplication (IBM J. R&D 39(5), 1995).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import NamedTuple

from alpa_lite.errors import AlpaLiteError, InfeasibleError, PlanError
from alpa_lite.inter_op.microbatch_counts import divisors
from alpa_lite.inter_op.plan_request import PlanRequest
from alpa_lite.intra_op.stage import GivenLayout, Wanted
from alpa_lite.intra_op.strategies import AxisRole, BatchSplit, Restriction
from alpa_lite.plan.plan import Plan
from alpa_lite.plan.pricing import Pricer
from alpa_lite.planners.hybrid import check_batch
from alpa_lite.planners.on_mesh import MeshConstraints, plan_on_mesh
from alpa_lite.planners.planner import Planner
from alpa_lite.planners.weights import least_sizes, unsplittable_ops
from alpa_lite.program.ir import Graph, wiring_of
from alpa_lite.program.phases import StepGraph
from alpa_lite.rules.dims import (
    SPATIAL,
    Contraction,
    DimClasses,
    batch_dims_of,
    contractions,
    dim_classes,
    dim_names,
    major_factor,
)
from alpa_lite.rules.op_info import rule_of_op
from alpa_lite.sharding.meshes import LogicalMesh, Submesh
from alpa_lite.text import short_source
from cost_models.work import Product, Work

_EXCHANGED = {"x": "y", "y": "x"}


class Grid(NamedTuple):
    """Devices per axis, the last over neighbouring devices."""

    data: int
    z: int
    y: int
    x: int

    def __str__(self) -> str:
        return f"x{self.x} × y{self.y} × z{self.z} × data{self.data}"


@dataclass(frozen=True, kw_only=True)
class AxoNN(Planner):
    """Three-dimensional tensor parallelism: weights over x and y, in parts over z; samples over z and data.

    A note of the plan says which weights cannot be split so, and why. Look-ups split their tables along the dims that
    other weights have too.

    Attributes:
        gx: devices that split the residual stream: the dims that every other layer sums over. None: searched.
        gy: devices that split the dims in between, such as heads and hidden units. None: searched.
        gz: devices that split the samples and store each weight in parts. None: searched.
        gdata: devices that split the samples and hold copies of the weights. None: searched.
        reshard_after_forward: whether weights that were gathered over z are freed after the forward pass, and gathered
            again for the backward pass.
        most_plans: number of factorisations that are planned, if degrees are searched.
    """

    gx: int | None = None
    gy: int | None = None
    gz: int | None = None
    gdata: int | None = None
    reshard_after_forward: bool = False
    most_plans: int = 5

    @property
    def name(self) -> str:
        """Name for tables."""
        degrees = {"x": self.gx, "y": self.gy, "z": self.gz, "data": self.gdata}
        shown = " × ".join(f"{axis}{degree}" for axis, degree in degrees.items() if degree is not None)
        return "AxoNN" + (f" ({shown})" if shown else "")

    def plan(self, request: PlanRequest) -> Plan:
        """Return the plan. Raises `PlanError` if the degrees do not make up the cluster or do not divide the batch."""
        grids = self._grids(request.cluster.num_devices)
        step = request.best_step((1,), loop_parts=0)
        layers = MatrixLayers.of(step)
        if not layers.found:
            raise PlanError(
                "AxoNN splits the weights of matrix products and convolutions, but the step has none. Use "
                "al.planners.DataParallel."
            )
        if len(grids) == 1:
            return self._plan(request, layers, grids[0])
        return self._fastest(request, layers, grids)

    def _grids(self, total: int) -> list[Grid]:
        """Return all grids with the given degrees. Raises `PlanError` if there are none."""
        given = (self.gdata, self.gz, self.gy, self.gx)
        choices = [divisors(total) if degree is None else (degree,) for degree in given]
        found = [Grid(*degrees) for degrees in product(*choices) if prod(degrees) == total]
        if not found:
            listed = " × ".join(str(degree) for degree in given if degree is not None)
            raise PlanError(
                f"The degrees {listed} of {self.name} do not make up {total} devices. Choose gx, gy, gz and gdata with "
                f"the product {total}, or leave some of them out."
            )
        return found

    def _plan(self, request: PlanRequest, layers: MatrixLayers, grid: Grid) -> Plan:
        step, name = layers.step, f"AxoNN ({grid})"
        check_batch(name, step, grid.data * grid.z)
        roles = {"data": AxisRole.REPLICA, "z": AxisRole.BATCH, "y": AxisRole.MODEL, "x": AxisRole.MODEL}
        axes, state = grid._asdict(), BatchSplit.MUST if grid.z > 1 else BatchSplit.NEVER
        constraints = MeshConstraints(
            restriction=Restriction(
                roles={axis: role for axis, role in roles.items() if axes[axis] > 1},
                optimizer=state,
                parameters=state,
                state_minor=True,
            ),
            layout=layers.layout(grid),
            keeps_gathered=not self.reshard_after_forward,
        )
        plan = plan_on_mesh(name, request, axes, constraints)
        unsplit = layers.unsplit(grid)
        note = f"weights that are not split as AxoNN does: {'; '.join(unsplit)}"
        return replace(plan, notes=(*plan.notes, note)) if unsplit else plan

    def _fastest(self, request: PlanRequest, layers: MatrixLayers, grids: Sequence[Grid]) -> Plan:
        """Return the fastest plan of the grids that the model prices lowest. Raises the first error if none fits."""
        started = time.perf_counter()
        # Advice for every grid would take many more plans.
        quiet, found, failed = replace(request, advise=False), list[Plan](), dict[str, AlpaLiteError]()
        for grid in sorted(grids, key=lambda grid: modelled_seconds(self, request, layers, grid)):
            if len(found) == self.most_plans:
                break
            try:
                found.append(self._plan(quiet, layers, grid))
            except AlpaLiteError as error:
                failed[f"AxoNN ({grid})"] = error
        if not found:
            problems = [*failed.values()]
            telling = next((error for error in problems if isinstance(error, InfeasibleError)), problems[0])
            kind = InfeasibleError if isinstance(telling, InfeasibleError) else PlanError
            raise kind(f"Of {len(failed)} grids none works. {telling}")
        best, *others = sorted(found, key=lambda plan: plan.prediction.step_seconds)
        return replace(
            best,
            alternatives=tuple((plan.name, plan.prediction.step_seconds) for plan in others),
            refusals=tuple((name, str(error)) for name, error in failed.items()),
            solver=replace(best.solver, seconds=time.perf_counter() - started),
        )


class MatrixLayer(NamedTuple):
    """A product of samples and a weight.

    `weight` is the number of the operand; `summed` and `made` are the classes of the dims of the weight that are split,
    None where it has no such dim; `runs` is how often the product runs per micro-batch, in loops.
    """

    contraction: Contraction
    weight: int
    summed: int | None
    made: int | None
    runs: int

    def sizes(self) -> tuple[int, int, int]:
        """Return the bytes of the weight, of the other operand and of the result."""
        graph, op = self.contraction.graph, self.contraction.op
        operands = op.operands[self.weight], op.operands[1 - self.weight]
        weight, other, result = (graph.values[v].bytes for v in (*operands, op.results[0]))
        return weight, other, result

    def description(self) -> str:
        """Return the shape of the weight and the line of the product."""
        graph, op = self.contraction.graph, self.contraction.op
        return f"those of shape {list(graph.values[op.operands[self.weight]].shape)} at {short_source(op.source)}"


@dataclass(frozen=True, kw_only=True, eq=False)
class MatrixLayers:
    """The layers of a step, with the axis that splits each class of dims if it divides them.

    Attributes:
        step: the step.
        classes: classes of its dims.
        found: its layers, in order.
        axis_of: axis of each class.
        least: least size of a dim of each class.
    """

    step: StepGraph
    classes: DimClasses
    found: tuple[MatrixLayer, ...]
    axis_of: Mapping[int, str]
    least: Mapping[int, int]

    @staticmethod
    def of(step: StepGraph) -> MatrixLayers:
        """Find the layers of a step."""
        classes = dim_classes(step)
        found = tuple(_layers(step, classes))
        return MatrixLayers(
            step=step, classes=classes, found=found, axis_of=_colours(found), least=least_sizes(classes)
        )

    def axis(self, node: int | None, grid: Grid) -> str | None:
        """Return the axis that splits the dims of a class; None if its devices do not divide them."""
        if node is None or node not in self.axis_of:
            return None
        axis = self.axis_of[node]
        return axis if self.least[node] % grid._asdict()[axis] == 0 else None

    def axes(self, layer: MatrixLayer, grid: Grid) -> tuple[str | None, str | None]:
        """Return the axes of the dims that a layer sums over and makes; none where both would have the same axis."""
        summed, made = self.axis(layer.summed, grid), self.axis(layer.made, grid)
        return (None, None) if summed == made else (summed, made)

    def unsplit(self, grid: Grid) -> list[str]:
        """Return a clause about each weight that is not split over both x and y."""
        wide = {axis for axis in _EXCHANGED if grid._asdict()[axis] > 1}
        found = dict[str, None]()
        for layer in self.found:
            if lacking := sorted(wide.difference(self.axes(layer, grid))):
                axis = self.axis(layer.summed, grid)
                if axis is not None and axis == self.axis(layer.made, grid):
                    why = f"have two dims on {axis}, as no exchange of x and y reaches all layers"
                else:
                    why = f"have no dim for {' and '.join(lacking)} that the devices divide"
                found[f"{layer.description()} {why}"] = None
        return [*found]

    def layout(self, grid: Grid) -> GivenLayout:
        """Return the layout in which x and y split the dims of their classes, and no others."""
        sizes = {axis: size for axis, size in grid._asdict().items() if axis in _EXCHANGED and size > 1}
        names = {axis: frozenset(node for node in self.axis_of if self.axis(node, grid) == axis) for axis in sizes}
        exempt = {graph: unsplittable_ops(graph, self.classes, names, sizes) for graph in self.classes.graphs}
        values = dict[Graph, list[Wanted]]()
        for graph in self.classes.graphs:
            # What an op makes that cannot be split is left to the integer program.
            free = {r for o in exempt[graph] for r in graph.ops[o].results}
            values[graph] = [()] * len(graph.values)
            for v, batch in zip(graph.values, batch_dims_of(self.step, graph), strict=True):
                wanted = _wanted(self.classes.of_value(graph, v.id), names)
                parts = [prod(sizes[axis] for axis, dim in wanted if dim == d) for d in range(v.rank)]
                # State is split over z in any case: where a part of a small bias cannot be, x and y are left open.
                both = batch is not None or any(n % (k * grid.z) == 0 for n, k in zip(v.shape, parts, strict=True))
                if both and v.id not in free and not v.dtype.startswith("key<"):
                    values[graph][v.id] = wanted
        return GivenLayout(
            values=values,
            exempt=exempt,
            reads_otherwise=True,
            advice="Choose gx = 1 or gy = 1, or al.planners.OnMesh, which chooses the splits by price.",
        )


def _wanted(nodes: Sequence[int], names: Mapping[str, frozenset[int]]) -> Wanted:
    """Return the dim that each axis must split; an axis that would split two dims may split any."""
    found = ((axis, [d for d, node in enumerate(nodes) if node in classes]) for axis, classes in names.items())
    return tuple((axis, dims[0] if dims else None) for axis, dims in found if nodes and len(dims) < 2)


def _layers(step: StepGraph, classes: DimClasses) -> Iterator[MatrixLayer]:
    names, runs = dim_names(step, classes), _runs_of_bodies(step.graph, 1)
    # Dims of samples and of images are no features, and heads are split instead of their width.
    left_out = frozenset[int]().union(*(names.get(n, ()) for n in ("batch", "sequence", "head_dim", *SPATIAL)))
    heads = names.get("heads", frozenset())
    for each in contractions(step):
        for i in each.weights:
            nodes = classes.of_value(each.graph, each.op.operands[i])
            # Of several dims the heads, or else the outermost.
            summed, made = (
                min((nodes[d] for d in dims if nodes[d] not in left_out), key=lambda n: n not in heads, default=None)
                for dims in _roles(each, i)
            )
            yield MatrixLayer(each, i, summed, made, runs[each.graph])


def _roles(each: Contraction, weight: int) -> tuple[list[int], list[int]]:
    """Return the dims of a weight that a product sums over, and those that it makes."""
    rule = rule_of_op(each.graph, each.op.id)
    if rule.work_kind == "convolution" and weight == 1:
        # The roles of a kernel: (made, summed, spatial…) in the order of `rhs_spec`.
        made, summed = (int(d) for d in each.op.params["dimension_numbers"]["rhs_spec"][:2])
        return [summed], [made]
    majors = [major_factor(rule, factors) for factors in rule.operands[weight]]
    result, other = each.factors[-1], each.factors[1 - weight]
    return (
        [d for d, f in enumerate(majors) if f in other and f not in result],
        [d for d, f in enumerate(majors) if f in result and f not in other],
    )


def _runs_of_bodies(graph: Graph, runs: int) -> dict[Graph, int]:
    """Return how often a graph and the bodies in it run, where the graph runs `runs` times."""
    found = {graph: runs}
    for op in graph.ops:
        wiring = wiring_of(op)
        if wiring is not None:
            for body in op.bodies:
                found |= _runs_of_bodies(body, runs * int(wiring.trips))
    return found


def _colours(layers: Sequence[MatrixLayer]) -> dict[int, str]:
    """Return the axis of each class of dims: layer by layer x and y are exchanged, beginning with x.

    This is a colouring of the graph whose edges are the layers; along a cycle of odd length it does not exist, and some
    layer has both dims on one axis.
    """
    next_to = dict[int, list[int]]()
    for layer in layers:
        if layer.summed is not None and layer.made is not None:
            next_to.setdefault(layer.summed, []).append(layer.made)
            next_to.setdefault(layer.made, []).append(layer.summed)
    found = dict[int, str]()
    for layer in layers:
        for node, axis in ((layer.summed, "x"), (layer.made, "y")):
            if node is None or node in found:
                continue
            found[node], waiting = axis, [node]
            # First come, first served: layers near the first one keep the exchange.
            for at in waiting:
                new = [n for n in dict.fromkeys(next_to.get(at, ())) if n not in found]
                found |= dict.fromkeys(new, _EXCHANGED[found[at]])
                waiting += new
    return found


class GridCollective(NamedTuple):
    """A collective of a layer: its kind, its axis, the bytes of its buffer per device, and its number per step."""

    kind: str
    axis: str
    bytes: float
    times: int


def exchanges(planner: AxoNN, layers: MatrixLayers, grid: Grid) -> list[GridCollective]:
    """Return the collectives of a step on a grid by the formulas of the module docstring."""
    found, micro = list[GridCollective](), layers.step.num_microbatches
    for layer in layers.found:
        summed, made = layers.axes(layer, grid)
        # A dim without an axis is whole on all devices.
        k, n = (grid._asdict()[axis] if axis else 1 for axis in (summed, made))
        weight, read, result = layer.sizes()
        samples, times = grid.data * grid.z, micro * layer.runs
        part = weight / (k * n)
        found += [
            GridCollective("all_gather", "z", part, times * (1 + planner.reshard_after_forward)),
            GridCollective("reduce_scatter", "z", part, times),
            GridCollective("all_reduce", "data", part / grid.z, layer.runs),
            *([GridCollective("all_reduce", summed, result / samples / n, times)] if summed else []),
            *([GridCollective("all_reduce", made, read / samples / k, times)] if made else []),
        ]
    return [each for each in found if grid._asdict()[each.axis] > 1]


def modelled_seconds(planner: AxoNN, request: PlanRequest, layers: MatrixLayers, grid: Grid) -> float:
    """Return the seconds of a step on a grid by the analytic model: all collectives, and three products per layer."""
    cluster = request.cluster
    mesh = LogicalMesh(axis_names=grid._fields, shape=tuple(grid))
    submesh = Submesh(first_device=0, num_hosts=cluster.num_hosts, devices_per_host=cluster.devices_per_host)
    pricer = Pricer(cost_model=request.cost_model, submesh=submesh, mesh=mesh)
    sent = sum(
        each.times * pricer.collective_seconds(each.kind, each.bytes, (each.axis,))
        for each in exchanges(planner, layers, grid)
    )
    return sent + sum(_product_seconds(request, layers, layer, grid) for layer in layers.found)


def _product_seconds(request: PlanRequest, layers: MatrixLayers, layer: MatrixLayer, grid: Grid) -> float:
    """Return the seconds of the local product of a layer and of its two transposes, all runs of a step."""
    graph, op = layer.contraction.graph, layer.contraction.op
    three = op.operands[layer.weight], op.operands[1 - layer.weight], op.results[0]
    # At least 1: arrays may have no elements.
    weight, read, result = (max(1, graph.values[v].num_elements) for v in three)
    k, n = (
        grid._asdict()[axis] if axis else 1 for axis in (layers.axis(layer.summed, grid), layers.axis(layer.made, grid))
    )
    # Of [M, K] × [K, N], from the sizes of the three arrays.
    rows = max(1.0, (read * result / weight) ** 0.5 / (grid.data * grid.z))
    depth, columns = max(1.0, (read * weight / result) ** 0.5 / k), max(1.0, (result * weight / read) ** 0.5 / n)
    shape = Product(rows=rows, columns=columns, depth=depth)
    value = graph.values[op.operands[layer.weight]]
    item = value.bytes / weight
    work = Work(
        flops=shape.flops,
        bytes=item * (rows * depth + depth * columns + rows * columns),
        kind="matmul",
        dtype=value.dtype,
        product=shape,
    )
    seconds = request.cost_model.compute_seconds(work, num_active_devices=request.cluster.num_devices)
    return 3 * layers.step.num_microbatches * layer.runs * seconds
