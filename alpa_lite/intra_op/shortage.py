"""Why a stage does not fit into the memory of a device: when, by how much, and the user's values that are alive then.

The numbers are those of ``limits.explain_infeasible``; here they get the names of arguments and lines of code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from alpa_lite.intra_op.formulate import Builder
from alpa_lite.intra_op.limits import Infeasibility, explain_infeasible
from alpa_lite.intra_op.liveness import Lives
from alpa_lite.intra_op.placements import Key
from alpa_lite.intra_op.problem import Problem
from alpa_lite.intra_op.solvers.solver import Solver
from alpa_lite.intra_op.stage import StageView
from alpa_lite.intra_op.usages import UsageOf, stage_lives
from alpa_lite.program.ir import Graph, Op

_NUM_NAMES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueBytes:
    """What a value takes per device, all of its copies, in words: an argument's name, or what made it and where."""

    name: str
    bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """An explanation with names: ``when`` the most is used, and the values alive then, largest first."""

    explained: Infeasibility
    when: str
    values: tuple[ValueBytes, ...]

    def sentence(self, *, show_bytes: Callable[[float], str] = "{:,.0f} bytes".format) -> str:
        """By how much it is too much, what is alive then, and what the stage would take with enough; maybe empty."""
        why = self.explained
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


def show_seconds(seconds: float) -> str:
    """`1.23 ms`, `45.6 s`, `3446 s`: three digits, or all of a whole number."""
    if seconds < 1.0:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 100.0 else f"{seconds:.0f} s"


def explain_shortage(
    builder: Builder,
    *,
    limit_bytes: float,
    in_flight: int = 1,
    solver: Solver | None = None,
    time_limit_seconds: float = 5.0,
) -> Shortage:
    """What a stage needs at least; see ``solve_stage`` for the arguments."""
    problem = builder.problem(limit_bytes=limit_bytes, in_flight=in_flight)
    return shortage_of(builder, problem, in_flight=in_flight, solver=solver, time_limit_seconds=time_limit_seconds)


def shortage_of(
    builder: Builder,
    problem: Problem,
    *,
    in_flight: int = 1,
    solver: Solver | None = None,
    time_limit_seconds: float = 5.0,
) -> Shortage:
    """What a problem of the stage needs at least: its own, or one in which nodes may not take all of its strategies."""
    explained = explain_infeasible(problem, solver=solver, time_limit_seconds=time_limit_seconds)
    if explained.choices is None or explained.time is None:
        return Shortage(explained=explained, when="", values=())
    held = held_bytes(builder.usages(in_flight), explained.choices, explained.time)
    graphs = [scope.graph for scope in builder.scopes]
    values = [ValueBytes(name=value_name(graphs[s], v), bytes=size) for (s, v), size in held.items() if size > 0.0]
    return Shortage(
        explained=explained,
        when=moment_name(builder.view, stage_lives(builder.view, builder.catalogue), explained.time),
        values=tuple(sorted(values, key=lambda each: -each.bytes)),
    )


def held_bytes(usages: Iterable[UsageOf], choices: Sequence[int], time: int) -> dict[Key, float]:
    """Bytes per device of the values that are alive at a time when the nodes of the problem choose so."""
    held: dict[Key, float] = {}
    for usage in usages:
        if usage.start <= time < usage.end:
            size = math.ceil(float(usage.sizes[choices[usage.node]]))
            held[usage.value] = held.get(usage.value, 0.0) + size
    return held


def moment_name(view: StageView, lives: Lives, time: int) -> str:
    """When it is: the innermost op that starts at a time."""
    if time not in lives.running:
        return "at the end"
    path, op_id = lives.running[time]
    graph = view.graph
    for outer, body in path:
        graph = graph.ops[outer].bodies[body]
    return f"when {_op_name(graph.ops[op_id])} runs"


def _op_name(op: Op) -> str:
    return f"{op.primitive} at {op.source}" if op.source else op.primitive


def value_name(graph: Graph, v: int) -> str:
    """An argument's name, or what made the value and where; with its type."""
    value, producer = graph.values[v], graph.producer[v]
    made = value.name if producer is None else f"the result of {_op_name(graph.ops[producer])}"
    return f"{made or 'an argument'} {value.dtype}[{','.join(map(str, value.shape))}]"
