"""Check that a plan fits the step that it was made for, with the recomputation that it chose (`as_planned`).

Lowering trusts placements. In a plan that was edited or written by hand, each op must still be split along factors of
its rule, over devices that divide them, and each spec must have the dims of its value (`check_fits`). A plan that
passes computes the same step, only placed differently, since every collective follows from the placements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain

from alpa_lite.errors import MismatchError
from alpa_lite.plan.plan import OpPlacement, Plan
from alpa_lite.plan.walk import can_split
from alpa_lite.program.ir import Graph, Op, Value, wiring_of
from alpa_lite.program.passes import PassDriver
from alpa_lite.program.phases import StepGraph
from alpa_lite.rules import Rule
from alpa_lite.rules.op_info import rule_of_op
from alpa_lite.sharding.specs import Spec, divides
from alpa_lite.step.planned_step import planned_step
from alpa_lite.step.split import TracedStep


def as_planned(step: TracedStep, plan: Plan, driver: PassDriver | None = None) -> TracedStep:
    """Return the step as it was planned; see `planned_step`.

    Raises `MismatchError` if that gives other ops than the plan lists, which happens when another version of alpa_lite
    wrote the plan.
    """
    planned = planned_step(step.step, plan.layers_as_traced, plan.remat, driver, host_optimizer=plan.host_optimizer)
    # The layers of all ops are a fingerprint of the rewriting: other recomputations give other ops or another order.
    if planned.of_op != plan.op_layers:
        raise MismatchError(
            f"This plan of {plan.function!r} computes values again, but not those that it would with this version of "
            "alpa_lite: its layers hold other operations. Make a new plan with al.plan."
        )
    return replace(step, step=planned.step, equations=planned.equations(step.step.graph, step.equations))


Sizes = Mapping[str, int]


def check_fits(plan: Plan, step: StepGraph) -> None:
    """Raise `MismatchError` for placements that the ops of the step as planned cannot have."""
    # The first problem is enough: the generators stop where it is raised.
    for problem in chain(_counts(plan, step), _stages(plan, step.graph)):
        raise MismatchError(
            f"This plan does not fit the step {plan.function!r}, although it says that it was made for it: {problem}. "
            "It was edited or damaged; make a new plan with al.plan."
        )


def _counts(plan: Plan, step: StepGraph) -> Iterator[str]:
    """Yield a phrase for each mismatch in the numbers of ops, inputs and bucketed values."""
    graph = step.graph
    if len(plan.op_layers) != len(graph.ops) or len(plan.input_layers) != len(graph.inputs):
        yield (
            f"it is for {len(plan.op_layers)} ops and {len(plan.input_layers)} inputs, of {len(graph.ops)} and "
            f"{len(graph.inputs)}"
        )
    named = [value for bucket in plan.buckets for value in bucket]
    if len(set(named)) != len(named) or not all(0 <= value < len(graph.values) for value in named):
        yield "its buckets hold values that do not exist, or one value twice"


def _stages(plan: Plan, graph: Graph) -> Iterator[str]:
    """Yield a phrase for each spec or placement of a stage that is impossible in `graph`."""
    for number, stage in enumerate(plan.stages):
        sizes = stage.mesh_shape.axis_sizes
        specs = [*stage.inputs.items(), *stage.outputs.items()]
        for value, accumulator in stage.accumulators.items():
            specs += [(value, accumulator.stored), (value, accumulator.resolved)]
        for value, spec in specs:
            if value not in range(len(graph.values)):  # a negative id would count from the end
                yield f"stage {number} names value {value}, of {len(graph.values)}"
            elif not _is_spec_of(spec, graph.values[value], sizes):
                yield f"stage {number} has value {value}, {graph.values[value].shape}, in {spec} on {stage.mesh_shape}"
        yield from (f"stage {number}: {problem}" for problem in _ops(graph, stage.ops, sizes))


def _ops(graph: Graph, placements: Mapping[int, OpPlacement], sizes: Sizes) -> Iterator[str]:
    """Yield a phrase for each impossible placement of an op of `graph` on a mesh of the given axis sizes."""
    for number, placement in placements.items():
        if number not in range(len(graph.ops)):
            yield f"op {number} of {len(graph.ops)} is placed"
            continue
        op = graph.ops[number]
        if not _are_specs_of(placement.results, graph.results(op), sizes):
            yield f"op {number}, {op.primitive}, cannot have results in {[*map(str, placement.results)]}"
        # Ops with bodies have no factors of their own to split.
        elif not (_is_placement(rule_of_op(graph, number), placement, sizes) if not op.bodies else True):
            yield f"op {number}, {op.primitive}, cannot be split as {placement.factors}"
        elif op.bodies:
            yield from _control_flow(graph, op, placement, sizes)


def _control_flow(graph: Graph, op: Op, placement: OpPlacement, sizes: Sizes) -> Iterator[str]:
    """Yield a phrase for each impossible operand spec or placement in the bodies of a loop or branch."""
    wiring = wiring_of(op)
    scanned = wiring.scanned if wiring is not None else ()
    # A body reads one slice of a scanned operand: its leading dim is dropped.
    shapes = [value.shape[i in scanned :] for i, value in enumerate(graph.operands(op))]
    specs = placement.body_operands
    if len(placement.bodies) != len(op.bodies) or len(specs) != len(shapes):
        yield f"op {op.id}, {op.primitive}, is placed with {len(placement.bodies)} bodies and {len(specs)} operands"
        return
    for spec, shape in zip(specs, shapes, strict=True):
        if len(spec.dims) != len(shape) or not divides(spec, shape, sizes):
            yield f"op {op.id}, {op.primitive}, cannot read an array {list(shape)} in {spec}"
    for body, inner in zip(op.bodies, placement.bodies, strict=True):
        yield from _ops(body, inner, sizes)


def _is_placement(rule: Rule, placement: OpPlacement, sizes: Sizes) -> bool:
    """Return True if a rule allows a placement's split factors, and partial sums only where it is linear."""
    split = [(factor, axes) for factor, axes in enumerate(placement.factors) if axes]
    return (
        len(placement.factors) == len(rule.sizes)
        and all(can_split(rule, factor, axes, sizes) for factor, axes in split)
        and (bool(rule.linear) or not placement.partial)
    )


def _are_specs_of(specs: tuple[Spec, ...], values: tuple[Value, ...], sizes: Sizes) -> bool:
    return len(specs) == len(values) and all(_is_spec_of(s, v, sizes) for s, v in zip(specs, values, strict=True))


def _is_spec_of(spec: Spec, value: Value, sizes: Sizes) -> bool:
    return len(spec.dims) == value.rank and divides(spec, value.shape, sizes)
