"""The step of a plan: as it was traced, or with what its layers compute again (`as_planned`), and its equations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from alpa_lite import _jax
from alpa_lite.errors import MismatchError
from alpa_lite.plan.plan import Plan
from alpa_lite.program.equations import Equation
from alpa_lite.program.ir import Graph
from alpa_lite.step.recomputation import read_originals_across
from alpa_lite.step.rematerialisation import Rematerialised, rematerialise
from alpa_lite.step.split import TracedStep
from alpa_lite.trace import inserted


def as_planned(step: TracedStep, plan: Plan) -> TracedStep:
    """The step as it was planned: recomputed values stay in their layer, and layers compute again what they should."""
    layers = plan.traced_layers if plan.remat else plan.op_layers
    own = read_originals_across(step.step, layers)
    again = rematerialise(own, layers, plan.remat) if plan.remat else None
    if again is None:
        return replace(step, step=own)
    if again.of_op != plan.op_layers:
        raise MismatchError(
            f"This plan of {plan.function!r} computes values again, but not those that it would with this version of "
            "alpa_lite: its layers hold other operations. Make a new plan with al.plan."
        )
    return replace(step, step=again.step, equations=equations_again(again, own.graph, step.equations))


def equations_again(again: Rematerialised, graph: Graph, equations: Sequence[Equation]) -> tuple[Equation, ...]:
    """The equation of each op of `again`, from those of the graph that it was made of."""
    known: dict[Graph, Sequence[Equation]] = {}
    _register(known, graph, equations)
    made = dict[Graph, tuple[Equation, ...]]()

    def of_graph(written: Graph) -> tuple[Equation, ...]:
        if written not in again.origins:
            return tuple(known[written])
        if written not in made:
            found: list[Equation] = []
            for op, origin in zip(written.ops, again.origins[written], strict=True):
                if origin is None:
                    value = written.values[op.operands[0]]
                    eqn = inserted.barrier_equation(_jax.struct(value.shape, value.dtype))
                    found.append(Equation(primitive=eqn.primitive, params=eqn.params))
                    continue
                equation = known[origin.graph][origin.op]
                found.append(replace(equation, bodies=tuple(map(of_graph, op.bodies))) if op.bodies else equation)
            made[written] = tuple(found)
        return made[written]

    return of_graph(again.step.graph)


def _register(known: dict[Graph, Sequence[Equation]], graph: Graph, equations: Sequence[Equation]) -> None:
    if graph in known:
        return
    known[graph] = equations
    for op, equation in zip(graph.ops, equations, strict=True):
        for body, inner in zip(op.bodies, equation.bodies, strict=True):
            _register(known, body, inner)
