"""The layout of named dims whose plan holds the least memory at its peak, of all that are legal on a mesh.

    least(l) = max_t Σ b_v / Π |a|      over the values v that live at time t and the axes a that l splits them over
    least(l) <= peak of its plan        which also holds copies, and results before they are scattered    (`_Memory`)

Layouts are planned in the order of `least`, of equals those first that split more dims, until none that is left can
beat the best: as good as planning them all. That is the layout optimiser of Mesh TensorFlow (auto_mtf), which minimises
the peak of a list schedule by an integer program, with the peaks that plans have here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from alpa_lite.errors import AlpaLiteError, PlanError
from alpa_lite.intra_op.liveness import Lives, Path, lives_of
from alpa_lite.intra_op.stage import StageView
from alpa_lite.plan.plan import Plan
from alpa_lite.program.ir import Graph
from alpa_lite.program.phases import StepGraph
from alpa_lite.rules.dims import DimClasses
from alpa_lite.step.clustering import make_layers
from cost_models.composed import CostModel

MOST_LAYOUTS = 100_000
"""Of more layouts than so many the least memory is not looked for."""

Layout = Mapping[str, str]
"""The axis of each name of a dim that is split."""


@dataclass(frozen=True, kw_only=True, eq=False)
class NamedDims:
    """The dims of all values of a step, each with its name: for each value of each graph the names of its dims."""

    step: StepGraph
    of_value: Mapping[Graph, Sequence[tuple[str, ...]]]

    @staticmethod
    def of(step: StepGraph, classes: DimClasses, names: Mapping[str, Iterable[int]]) -> NamedDims:
        """By the classes of each name; dims without one have an empty one."""
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
        """All in which no value has two dims on one axis and all sizes divide."""
        sizes: dict[str, set[int]] = {}
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
    """Every way to give some of the names an axis that fits, which none has that they must be apart from."""
    if not names:
        yield dict(taken)
        return
    name, *rest = names
    yield from _assigned(rest, fitting, apart, taken)
    for axis in fitting[name]:
        if not any(other == axis and frozenset((name, known)) in apart for known, other in taken.items()):
            yield from _assigned(rest, fitting, apart, {**taken, name: axis})


class _Memory:
    """`least` of the module docstring: bytes over time, by the names of the dims of what holds them."""

    def __init__(self, dims: NamedDims, model: CostModel) -> None:
        step, backend = dims.step, model.backend
        view = StageView(step=step, layers=make_layers(step, 1), first=0, last=0)
        lives = lives_of(view, fusion=backend.fusion, fused_attention=backend.fused_attention)
        self.rows: dict[frozenset[str], NDArray[np.float64]] = {}
        self.dims, self.end = dims, lives.end
        sums = frozenset(view.crossing)
        for v in view.external:
            if step.graph.producer[v] is None and step.batch_dims[v] is None:
                self._add(step.graph, v, 0, lives.end)
        for life in lives.lives:
            graph = _graph_at(step.graph, life.path)
            summed = not life.path and life.value in sums
            end = min(_first_read(view, lives, life.value, life.end) + 1, life.end) if summed else life.end
            self._add(graph, life.value, life.start, end)

    def _add(self, graph: Graph, v: int, start: int, end: int) -> None:
        names = frozenset(filter(None, self.dims.of_value[graph][v]))
        row = self.rows.setdefault(names, np.zeros(self.end + 1))
        row[start:end] += graph.values[v].bytes

    def least(self, layout: Layout, axes: Mapping[str, int]) -> float:
        """Bytes per device that plans with a layout hold at their peak, or more."""
        parts = [np.prod([axes[layout[name]] for name in names if name in layout]) for names in self.rows]
        total = sum((row / part for row, part in zip(self.rows.values(), parts, strict=True)), np.zeros(self.end + 1))
        return float(total.max())


def _first_read(view: StageView, lives: Lives, v: int, end: int) -> int:
    """When the update begins to read a sum."""
    readers = (c for c in view.graph.consumers[v] if c in view.op_set and not view.step.phases[c].in_loop)
    return min((lives.spans[(), c].start for c in readers), default=end)


def _graph_at(graph: Graph, path: Path) -> Graph:
    """The body at the end of a path."""
    for op, number in path:
        graph = graph.ops[op].bodies[number]
    return graph


def least_memory(dims: NamedDims, axes: Mapping[str, int], model: CostModel, planned: Callable[[Layout], Plan]) -> Plan:
    """The plan of the layout with the least peak memory; `planned(layout)` plans one, or raises an `AlpaLiteError`.

    Raises `PlanError` where there are too many layouts, and what planning raises where none works.
    """
    memory, found = _Memory(dims, model), list[tuple[float, int, Layout]]()
    for layout in dims.layouts(axes):
        found.append((memory.least(layout, axes), -len(layout), layout))
        if len(found) > MOST_LAYOUTS:
            raise PlanError(
                f"The mesh {dict(axes)} has more than {MOST_LAYOUTS} layouts of the dims of the step. Use fewer axes, "
                "or give the layout."
            )
    best: Plan | None = None
    tried, problem = list[tuple[str, float]](), None
    for least, _, layout in sorted(found, key=lambda each: each[:2]):
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
