"""Rebuild the step that a plan was made for: as traced, or with the rematerialisation that the plan chose
(`as_planned`), together with the JAX equation of each op (`equations_again`).
"""

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
    """Return the step as it was planned: recomputed values stay in their layer, and layers rematerialise as the plan
    says.

    Raises `MismatchError` if rematerialising the step gives other ops than the plan lists, which happens when another
    version of alpa_lite wrote the plan.
    """
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
    """Return the equation of each op of the rematerialised step `again`.

    Copied ops take the equation of the op in `graph` that they were copied from; inserted ops are optimisation
    barriers.
    """
    known: dict[Graph, Sequence[Equation]] = {}
    _register(known, graph, equations)
    made = dict[Graph, tuple[Equation, ...]]()

    # Loop bodies are shared between ops: each one is rewritten once, so that equal bodies remain one object.
    def of_graph(written: Graph) -> tuple[Equation, ...]:
        if written not in again.origins:
            return tuple(known[written])
        if written not in made:
            found: list[Equation] = []
            for op, origin in zip(written.ops, again.origins[written], strict=True):
                # Only the barriers that rematerialisation inserted have no origin.
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
    """Add the equations of `graph` and of all bodies nested in it to `known`."""
    if graph in known:
        return
    known[graph] = equations
    for op, equation in zip(graph.ops, equations, strict=True):
        for body, inner in zip(op.bodies, equation.bodies, strict=True):
            _register(known, body, inner)
