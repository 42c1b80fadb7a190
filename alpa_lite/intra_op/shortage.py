"""Describe why a stage exceeds device memory: when, by how much, and which of the user's values are alive then.

The numbers come from ``limits.explain_infeasible``; here they get the names of arguments and lines of source code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from alpa_lite.intra_op.formulate import Builder
from alpa_lite.intra_op.limits import Infeasibility, explain_infeasible
from alpa_lite.intra_op.liveness import Lives
from alpa_lite.intra_op.one_trip_loops import body_at
from alpa_lite.intra_op.problem import Problem
from alpa_lite.intra_op.stage import Key, StageView
from alpa_lite.intra_op.usages import UsageOf, stage_lives
from alpa_lite.program.ir import Graph, Op
from alpa_lite.text import show_seconds

_NUM_NAMES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueBytes:
    """The bytes per device of all copies of a value, and its name: the argument, or the op that made it and where."""

    name: str
    bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """An explanation with names: ``when`` the memory usage peaks, and the values alive then, largest first."""

    explained: Infeasibility
    when: str
    values: tuple[ValueBytes, ...]

    def sentence(self, *, show_bytes: Callable[[float], str] = "{:,.0f} bytes".format) -> str:
        """Describe the overrun, the values alive at the peak, and the time with enough memory; may be empty."""
        why = self.explained
        # Nothing to tell: no choices were reached in time, or the limit suffices after all.
        if why.choices is None or why.over_bytes == 0.0:
            return ""
        rest = self.values[_NUM_NAMES:]
        named = [f"{show_bytes(each.bytes)} of {each.name}" for each in self.values[:_NUM_NAMES]]
        if rest:
            named.append(f"{show_bytes(sum(each.bytes for each in rest))} of {len(rest)} more")
        at_best = "At best" if why.proven else "At the best found"
        return (
            f"{at_best} it is {show_bytes(why.over_bytes)} too much, {self.when}: {', '.join(named)}. "
            f"With {show_bytes(why.smallest_limit_bytes)} its work would take {show_seconds(why.cost)} per step."
        )


def explain_shortage(builder: Builder, *, limit_bytes: float, in_flight: int = 1) -> Shortage:
    """Explain the least memory that a stage needs; see ``solve_stage`` for the arguments."""
    return shortage_of(builder, builder.problem(limit_bytes=limit_bytes, in_flight=in_flight), in_flight=in_flight)


def shortage_of(builder: Builder, problem: Problem, *, in_flight: int) -> Shortage:
    """Explain the least memory that a problem of the stage needs.

    The problem may be the stage's own, or one in which nodes may take only some of their strategies.
    """
    explained = explain_infeasible(problem, time_limit_seconds=5.0)
    # Without usages there is no peak either.
    if explained.choices is None or explained.time is None:
        return Shortage(explained=explained, when="", values=())
    # From the usages of the builder, which know the value that each one stands for; the problem knows only nodes.
    held = held_bytes(builder.usages(in_flight), explained.choices, explained.time)
    graphs = [scope.graph for scope in builder.scopes]
    values = [ValueBytes(name=value_name(graphs[s], v), bytes=size) for (s, v), size in held.items() if size > 0.0]
    return Shortage(
        explained=explained,
        when=moment_name(builder.view, stage_lives(builder.view, builder.catalogue), explained.time),
        values=tuple(sorted(values, key=lambda each: -each.bytes)),
    )


def held_bytes(usages: Iterable[UsageOf], choices: Sequence[int], time: int) -> dict[Key, float]:
    """Return the bytes per device of the values alive at `time` under the given choices."""
    held: dict[Key, float] = {}
    for usage in usages:
        if usage.start <= time < usage.end:
            # Rounded up as in `Problem`, so that the values add up to its usage.
            size = math.ceil(float(usage.sizes[choices[usage.node]]))
            # Copies of a value for several readers count with it.
            held[usage.value] = held.get(usage.value, 0.0) + size
    return held


def moment_name(view: StageView, lives: Lives, time: int) -> str:
    """Describe a time by the innermost op that starts then."""
    running = lives.running_at(time)
    if running is None:
        return "at the end"
    path, op_id = running
    graph = body_at(view.graph, path)
    return f"when {_op_name(graph.ops[op_id])} runs"


def _op_name(op: Op) -> str:
    return f"{op.primitive} at {op.source}" if op.source else op.primitive


def value_name(graph: Graph, v: int) -> str:
    """Return an argument's name, or the op that made the value and its source line; with dtype and shape."""
    value, producer = graph.values[v], graph.producer[v]
    made = value.name if producer is None else f"the result of {_op_name(graph.ops[producer])}"
    return f"{made or 'an argument'} {value.dtype}[{','.join(map(str, value.shape))}]"
