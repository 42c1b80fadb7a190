"""Mesh-TensorFlow: a global map from names of dims to mesh axes. A dim in it is split wherever it appears.

    MeshTensorFlow(layout="batch:rows;heads:cols;d_ff:cols;vocab:cols", mesh={"rows": 2, "cols": 4})
    MeshTensorFlow(layout="auto", mesh={"rows": 2, "cols": 4})          the legal one that holds the least memory

The names are found from the graph (`rules.dim_names`), or given for a dim of an argument. A layout is legal if no
value has two dims on one axis and all sizes divide; where a split dim is summed over, there is an all_reduce. Nothing
is left to choose but which op resolves a sum. Shazeer et al., Mesh-TensorFlow (NeurIPS 2018), sections 2 and 3.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from alpa_lite.errors import PlanError
from alpa_lite.inter_op.plan_request import PlanRequest
from alpa_lite.intra_op.stage import GivenLayout, Wanted
from alpa_lite.intra_op.strategies import FREE_CHOICE
from alpa_lite.plan.plan import Plan
from alpa_lite.planners.auto_layout import NamedDims, least_memory
from alpa_lite.planners.on_mesh import plan_on_mesh
from alpa_lite.planners.planner import Planner
from alpa_lite.program.ir import Graph
from alpa_lite.program.phases import StepGraph
from alpa_lite.rules.dim_names import dim_names
from alpa_lite.rules.dims import DimClasses

AUTO = "auto"
"""The layout that is to be found."""


@dataclass(frozen=True, kw_only=True)
class MeshTensorFlow(Planner):
    """`layout` splits named dims over the axes of `mesh`, whose last one lies over neighbouring devices.

    Attributes:
        layout: "name:axis" pairs between semicolons, or a mapping; "auto" for the one of all legal layouts whose plan
            holds the least memory at its peak (`planners.auto_layout`).
        mesh: devices per axis.
        dims: names of one's own: for each the path of an argument and the number of its dim. They go before those that
            are found, and name all that is the same dim.
    """

    layout: str | Mapping[str, str] = field(hash=False)
    mesh: Mapping[str, int] = field(hash=False)
    dims: Mapping[str, tuple[str, int]] = field(default_factory=dict[str, tuple[str, int]], hash=False)

    @property
    def name(self) -> str:
        """The layout."""
        if self.layout == AUTO:
            return "layout of the least memory"
        return "layout " + ";".join(f"{name}:{axis}" for name, axis in self._pairs().items())

    def plan(self, request: PlanRequest) -> Plan:
        """Raises `PlanError` for unknown names and axes, and for illegal layouts, with the op and its line."""
        step = request.best_step((1,), loop_parts=0)
        axes = {name: size for name, size in self.mesh.items() if size > 1}
        if self.layout == AUTO:
            classes = DimClasses(step)
            dims = NamedDims.of(step, classes, self._names(step, classes))
            within = replace(request, advise=False)
            return least_memory(dims, axes, request.cost_model, lambda each: replace(self, layout=each).plan(within))
        layout = full_layout(step, self._split(step), axes)
        return plan_on_mesh(self.name, request, self.mesh, restriction=FREE_CHOICE, layout=layout)

    def _pairs(self) -> dict[str, str]:
        if not isinstance(self.layout, str):
            return dict(self.layout)
        pairs = [pair.partition(":") for pair in self.layout.split(";") if pair.strip()]
        if bad := [f"{name}{colon}{axis}" for name, colon, axis in pairs if not (name.strip() and axis.strip())]:
            raise PlanError(f"The layout has {bad[0]!r}, which is no pair. Write name:axis;name:axis.")
        return {name.strip(): axis.strip() for name, _, axis in pairs}

    def _split(self, step: StepGraph) -> DimSplit:
        classes = DimClasses(step)
        names = self._names(step, classes)
        found: dict[str, dict[int, str]] = {axis: {} for axis in self.mesh}
        for name, axis in self._pairs().items():
            if axis not in found:
                raise PlanError(f"The layout puts {name} on the axis {axis!r}, but the mesh has {list(self.mesh)}.")
            if name not in names:
                raise PlanError(
                    f"The step has no dim {name!r}; it has {', '.join(names)}. Use one of these, or give the name to a "
                    f'dim of an argument: dims={{{name!r}: ("path/of/argument", 0)}}.'
                )
            found[axis] |= dict.fromkeys(names[name], name)
        return DimSplit(classes=classes, names=found)

    def _names(self, step: StepGraph, classes: DimClasses) -> Mapping[str, Collection[int]]:
        """The classes of each name, those of one's own first."""
        own = {name: self._class_of(step, classes, *place) for name, place in self.dims.items()}
        names = {name: nodes - set(own.values()) for name, nodes in dim_names(step, classes).items()}
        names |= {name: frozenset([node]) for name, node in own.items()}
        return {name: nodes for name, nodes in names.items() if nodes}

    def _class_of(self, step: StepGraph, classes: DimClasses, path: str, dim: int) -> int:
        graph = step.graph
        found = [v for v in graph.inputs if graph.values[v].name == path]
        found = found or [v for v in graph.inputs if graph.values[v].name.endswith(f"/{path}")]
        if len(found) != 1 or not 0 <= dim < graph.values[found[0]].rank:
            shapes = ", ".join(f"{graph.values[v].name} {list(graph.values[v].shape)}" for v in found[:3]) or "none"
            raise PlanError(f"dims names dim {dim} of {path!r}, but fitting arguments are: {shapes}. Give one of one.")
        return classes.of(graph, found[0], dim)


@dataclass(frozen=True, kw_only=True, eq=False)
class DimSplit:
    """For each axis the classes of dims that it splits, with their names."""

    classes: DimClasses
    names: Mapping[str, Mapping[int, str]]


def full_layout(step: StepGraph, split: DimSplit, sizes: Mapping[str, int]) -> GivenLayout:
    """What is wanted of every value: each axis splits the dims of its classes, and no others.

    Raises `PlanError` where an axis would split two dims of a value, or one that it does not divide.
    """
    graphs = split.classes.graphs
    return GivenLayout(values={g: [_wanted(g, v.id, split, sizes) for v in g.values] for g in graphs})


def _wanted(graph: Graph, v: int, split: DimSplit, sizes: Mapping[str, int]) -> Wanted:
    value, found = graph.values[v], list[tuple[str, int | None]]()
    nodes = split.classes.of_value(graph, v)
    parts = [1] * value.rank
    for axis, size in sizes.items():
        dims = [d for d, node in enumerate(nodes) if node in split.names[axis]]
        if len(dims) > 1:
            named = " and ".join(f"{d} ({split.names[axis][nodes[d]]})" for d in dims)
            raise PlanError(
                f"{_origin(graph, v)} has the shape {list(value.shape)}, whose dims {named} would both be split over "
                f"{axis}. Put one of them on another axis, or leave it out of the layout."
            )
        for dim in dims:
            parts[dim] *= size
            if value.shape[dim] % parts[dim]:
                raise PlanError(
                    f"{_origin(graph, v)} has the shape {list(value.shape)}, but dim {dim} "
                    f"({split.names[axis][nodes[dim]]}) is to be split in {parts[dim]}, which does not divide it."
                )
        found.append((axis, dims[0] if dims else None))
    return tuple(found) if value.rank and not value.dtype.startswith("key<") else ()


def _origin(graph: Graph, v: int) -> str:
    producer: int | None = graph.producer[v]
    if producer is None:
        return f"The argument {graph.values[v].name}" if graph.values[v].name else "What a loop hands to its body"
    op = graph.ops[producer]
    return f"{op.source or 'An op'}: the result of {op.primitive}"
