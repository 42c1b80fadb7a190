"""Mesh-TensorFlow: a global map from names of dims to mesh axes. A dim in it is split wherever it appears.

    MeshTensorFlow(layout="batch:rows;heads:cols;d_ff:cols;vocab:cols", mesh={"rows": 2, "cols": 4})
    MeshTensorFlow(layout="auto", mesh={"rows": 2, "cols": 4})          the legal one that holds the least memory

The names follow from the graph (`rules.dims.dim_names`), or are given for a dim of an argument. A layout is legal if no
value has two dims on one axis and all sizes divide; where a split dim is summed over, there is an all_reduce. Nothing
is left to choose but which op resolves a sum. Shazeer et al., Mesh-TensorFlow (NeurIPS 2018), sections 2 and 3.

Of all layouts that are legal on a mesh, "auto" takes the one whose plan holds the least memory at its peak:

    least(l) = max_t Σ b_v / Π |a|      over the values v that live at time t and the axes a that l splits them over
    least(l) <= peak of its plan        which also holds copies, and results before they are scattered    (`_Memory`)

Layouts are planned in the order of `least`, of equals those first that split more dims, until none that is left can
beat the best: as good as planning them all. That is the layout optimiser of Mesh TensorFlow (auto_mtf), which minimises
the peak of a list schedule by an integer program, with the peaks that plans have here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from alpa_lite.errors import AlpaLiteError, PlanError
from alpa_lite.inter_op.plan_request import PlanRequest
from alpa_lite.intra_op.liveness import Lives, lives_of
from alpa_lite.intra_op.one_trip_loops import body_at
from alpa_lite.intra_op.stage import GivenLayout, StageView, Wanted
from alpa_lite.intra_op.stored_values import KernelModel
from alpa_lite.intra_op.strategies import FREE_CHOICE
from alpa_lite.plan.plan import Plan
from alpa_lite.planners.on_mesh import MeshConstraints, plan_on_mesh
from alpa_lite.planners.planner import Planner
from alpa_lite.program.ir import Graph
from alpa_lite.program.phases import StepGraph
from alpa_lite.rules.dims import DimClasses, dim_classes, dim_names
from alpa_lite.step.clustering import make_layers
from cost_models.composed import CostModel

AUTO = "auto"
"""The value of `layout` that asks for the one of the least memory."""


MOST_LAYOUTS = 100_000
"""Largest number of layouts among which the one of the least memory is sought."""

Layout = Mapping[str, str]
"""The axis of each name of a dim that is split."""


@dataclass(frozen=True, kw_only=True)
class MeshTensorFlow(Planner):
    """A plan in which named dims are split over axes of a mesh.

    Attributes:
        layout: "name:axis" pairs between semicolons, or a mapping; "auto" for the one of all legal layouts whose plan
            holds the least memory at its peak.
        mesh: devices per axis; the last axis lies over neighbouring devices.
        dims: the user's own names, each with the path of an argument and the number of its dim. They take precedence
            over derived names, and hold for all dims of the same class.
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
        """Return the plan. Raises `PlanError` for unknown names and axes, and for illegal layouts."""
        step = request.best_step((1,), loop_parts=0)
        # Axes of one device split nothing, and would multiply the layouts.
        axes = {name: size for name, size in self.mesh.items() if size > 1}
        if self.layout == AUTO:
            classes = dim_classes(step)
            dims = NamedDims.of(step, classes, self._names(step, classes))
            # Most layouts need too much memory, and advice for each of them would take long.
            within = replace(request, advise=False)
            return least_memory(dims, axes, request.cost_model, lambda each: replace(self, layout=each).plan(within))
        layout = full_layout(step, self._split(step), axes)
        constraints = MeshConstraints(restriction=FREE_CHOICE, layout=layout)
        return plan_on_mesh(self.name, request, self.mesh, constraints)

    def _pairs(self) -> dict[str, str]:
        if not isinstance(self.layout, str):
            return dict(self.layout)
        pairs = [pair.partition(":") for pair in self.layout.split(";") if pair.strip()]
        if bad := [f"{name}{colon}{axis}" for name, colon, axis in pairs if not (name.strip() and axis.strip())]:
            raise PlanError(f"The layout has {bad[0]!r}, which is no pair. Write name:axis;name:axis.")
        return {name.strip(): axis.strip() for name, _, axis in pairs}

    def _split(self, step: StepGraph) -> DimSplit:
        classes = dim_classes(step)
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
        """Return the classes of each name, the user's names first."""
        own = {name: self._class_of(step, classes, *place) for name, place in self.dims.items()}
        names = {name: nodes - set(own.values()) for name, nodes in dim_names(step, classes).items()}
        # A class has one name: that of the user replaces the derived one.
        names |= {name: frozenset([node]) for name, node in own.items()}
        return {name: nodes for name, nodes in names.items() if nodes}

    def _class_of(self, step: StepGraph, classes: DimClasses, path: str, dim: int) -> int:
        graph = step.graph
        found = [v for v in graph.inputs if graph.values[v].name == path]
        # A path may be given by its end, if that is unique.
        found = found or [v for v in graph.inputs if graph.values[v].name.endswith(f"/{path}")]
        if len(found) != 1 or not 0 <= dim < graph.values[found[0]].rank:
            shapes = ", ".join(f"{graph.values[v].name} {list(graph.values[v].shape)}" for v in found[:3]) or "none"
            raise PlanError(f"dims names dim {dim} of {path!r}, but fitting arguments are: {shapes}. Give one of one.")
        return classes.of(graph, found[0], dim)


@dataclass(frozen=True, kw_only=True, eq=False)
class DimSplit:
    """The classes of dims that each axis splits, with their names."""

    classes: DimClasses
    names: Mapping[str, Mapping[int, str]]


def full_layout(step: StepGraph, split: DimSplit, sizes: Mapping[str, int]) -> GivenLayout:
    """Return the layout in which each axis splits the dims of its classes, and no others.

    Raises `PlanError` if an axis would split two dims of a value, or one that it does not divide.
    """
    graphs = split.classes.graphs
    return GivenLayout(values={g: [_wanted(g, v.id, split, sizes) for v in g.values] for g in graphs})


def _wanted(graph: Graph, v: int, split: DimSplit, sizes: Mapping[str, int]) -> Wanted:
    value, found = graph.values[v], list[tuple[str, int | None]]()
    nodes = split.classes.of_value(graph, v)
    # A dim may be split over several axes, which all must divide it together.
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
    # Scalars have no dims, and arrays of random keys are left to the solver.
    return tuple(found) if value.rank and not value.dtype.startswith("key<") else ()


def _origin(graph: Graph, v: int) -> str:
    producer: int | None = graph.producer[v]
    if producer is None:
        return f"The argument {graph.values[v].name}" if graph.values[v].name else "What a loop hands to its body"
    op = graph.ops[producer]
    return f"{op.source or 'An op'}: the result of {op.primitive}"


@dataclass(frozen=True, kw_only=True, eq=False)
class NamedDims:
    """The names of the dims of each value of each graph of a step; "" for dims without a name."""

    step: StepGraph
    of_value: Mapping[Graph, Sequence[tuple[str, ...]]]

    @staticmethod
    def of(step: StepGraph, classes: DimClasses, names: Mapping[str, Iterable[int]]) -> NamedDims:
        """Return the named dims, given the classes of each name."""
        of_class = {node: name for name, nodes in names.items() for node in nodes}
        found = {
            graph: [
                tuple(of_class.get(node, "") for node in classes.of_value(graph, v.id))
                if not v.dtype.startswith("key<")
                else ()
                for v in graph.values
            ]
            for graph in classes.graphs
        }
        return NamedDims(step=step, of_value=found)

    def layouts(self, axes: Mapping[str, int]) -> Iterator[Layout]:
        """Yield all layouts in which no value has two dims on one axis, and all axes divide their dims."""
        sizes: dict[str, set[int]] = {}
        # Pairs of names in one value; a single name for a value that has it twice, which no axis can split.
        apart = set[frozenset[str]]()
        for graph, named in self.of_value.items():
            for value, dims in zip(graph.values, named, strict=True):
                for name, size in zip(dims, value.shape, strict=False):
                    sizes.setdefault(name, set()).add(size)
                apart |= {frozenset(pair) for pair in combinations(filter(None, dims), 2)}
        fitting = {
            name: [
                axis for axis, n in axes.items() if frozenset([name]) not in apart and all(s % n == 0 for s in found)
            ]
            for name, found in sizes.items()
            if name
        }
        yield from _assigned(sorted(fitting), fitting, apart, {})


def _assigned(
    names: Sequence[str], fitting: Mapping[str, Sequence[str]], apart: set[frozenset[str]], taken: dict[str, str]
) -> Iterator[Layout]:
    """Yield every assignment of axes to some of the names in which names `apart` have different axes."""
    if not names:
        yield dict(taken)
        return
    name, *rest = names
    # A name may also have no axis.
    yield from _assigned(rest, fitting, apart, taken)
    for axis in fitting[name]:
        if not any(other == axis and frozenset((name, known)) in apart for known, other in taken.items()):
            yield from _assigned(rest, fitting, apart, {**taken, name: axis})


class _Memory:
    """Bytes alive over time, grouped by the names of the dims of the values; `least` of the module docstring."""

    def __init__(self, dims: NamedDims, model: CostModel) -> None:
        step = dims.step
        view = StageView(step=step, layers=make_layers(step, 1), first=0, last=0)
        lives = lives_of(view, KernelModel.of(model, model.cluster.num_devices))
        # Values with the same names shrink alike under every layout, so that few rows stand for all values.
        self.rows: dict[frozenset[str], NDArray[np.float64]] = {}
        self.dims, self.end = dims, lives.end
        sums = frozenset(view.crossing)
        # Arguments without a batch live throughout the step.
        for v in view.external:
            if step.graph.producer[v] is None and step.batch_dims[v] is None:
                self._add(step.graph, v, 0, lives.end)
        for life in lives.lives:
            graph = body_at(step.graph, life.path)
            summed = not life.path and life.value in sums
            # The update may scatter a sum when it first reads it; a life cut short keeps the bound a lower one.
            end = min(_first_read(view, lives, life.value, life.end) + 1, life.end) if summed else life.end
            self._add(graph, life.value, life.start, end)

    def _add(self, graph: Graph, v: int, start: int, end: int) -> None:
        names = frozenset(filter(None, self.dims.of_value[graph][v]))
        row = self.rows.setdefault(names, np.zeros(self.end + 1))
        row[start:end] += graph.values[v].bytes

    def least(self, layout: Layout, axes: Mapping[str, int]) -> float:
        """Return a lower bound on the peak bytes per device of plans with a layout."""
        parts = [np.prod([axes[layout[name]] for name in names if name in layout]) for names in self.rows]
        total = sum((row / part for row, part in zip(self.rows.values(), parts, strict=True)), np.zeros(self.end + 1))
        return float(total.max())


def _first_read(view: StageView, lives: Lives, v: int, end: int) -> int:
    """Return the time at which the update begins to read a sum."""
    readers = (c for c in view.graph.consumers[v] if c in view.op_set and not view.step.phases[c].in_loop)
    return min((lives.spans[(), c].start for c in readers), default=end)


def least_memory(dims: NamedDims, axes: Mapping[str, int], model: CostModel, planned: Callable[[Layout], Plan]) -> Plan:
    """Return the plan of the layout with the least peak memory; `planned(layout)` makes a plan.

    Raises `PlanError` if there are too many layouts, or the last error of `planned` if none works.
    """
    memory, found = _Memory(dims, model), list[tuple[float, int, Layout]]()
    for layout in dims.layouts(axes):
        found.append((memory.least(layout, axes), -len(layout), layout))
        # Checked while they are made: their number grows exponentially with the number of names.
        if len(found) > MOST_LAYOUTS:
            raise PlanError(
                f"The mesh {dict(axes)} has more than {MOST_LAYOUTS} layouts of the dims of the step. Use fewer axes, "
                "or give the layout."
            )
    best: Plan | None = None
    tried, problem = list[tuple[str, float]](), None
    for least, _, layout in sorted(found, key=lambda each: each[:2]):
        # All that follow need at least as much.
        if best is not None and least >= max(best.prediction.peak_bytes):
            break
        try:
            plan = planned(layout)
        except AlpaLiteError as error:
            problem = error
            continue
        tried.append((plan.name, plan.prediction.step_seconds))
        if best is None or max(plan.prediction.peak_bytes) < max(best.prediction.peak_bytes):
            best = plan
    if best is None:
        raise problem or PlanError("No layout of the step can be planned.")
    others = sorted((each for each in tried if each[0] != best.name), key=lambda each: each[1])
    return replace(best, alternatives=tuple(others))
