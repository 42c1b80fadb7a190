"""A plan as a module of plain JAX: `jax.jit` of the user's step, with the shardings of the plan.

    arguments, results    `in_shardings` and `out_shardings`, leaf by leaf
    constraints           `with_sharding_constraint` on the results of the equations that the plan has decisions about

The module traces the step, and numbers the equations of each primitive with results of the same shapes as they come in
the jaxpr; inner jaxprs come before the equation that has them (`_counted`). By these numbers the ops of a plan are
found again (`_constraints`). Passes of alpa_lite may merge or add equations: where the numbers of ops and equations of
a kind differ, there is a constraint only if all such ops have the same specs. Without one, XLA's partitioner chooses.
Constraints change where a value lies and never what it is.

Plans of several stages or micro-batches have another form: `pipeline_jax`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from alpa_lite import _jax
from alpa_lite.export.degrees import programs_of
from alpa_lite.export.module_text import (
    check_arguments,
    filled_template,
    import_line,
    lines,
    not_said,
    partition,
    step_place,
    summary,
    tuple_text,
)
from alpa_lite.export.pipeline_jax import pipeline_jax
from alpa_lite.lower.plan_fits import as_planned
from alpa_lite.plan.plan import OpPlacement, Plan
from alpa_lite.plan.program_builder import build_program
from alpa_lite.program.ir import Graph
from alpa_lite.program.user_shardings import USER_SHARDING
from alpa_lite.sharding.specs import Spec, replicated
from alpa_lite.step.split import TracedStep
from alpa_lite.trace.trace import Traced

_Shapes = tuple[tuple[int, ...], ...]
_Kind = tuple[str, _Shapes]
"""A primitive and the shapes of its results."""

_Specs = tuple[Spec | None, ...]


def plain_jax(plan: Plan, *, step: str | None = None) -> str:
    """Return a module of plain JAX that runs the step as a plan says.

    Args:
        plan: the plan, as `al.plan` returned it.
        step: where the step is imported from, as `module:function`; by default from where it was defined.

    Raises:
        PlanError: the plan comes from a file and was not replayed, or the step takes static or keyword arguments; or
            the plan is a pipeline of another form than a loop of stage functions, such as one with several updates.
    """
    if max(len(plan.stages), plan.num_microbatches) > 1:
        return pipeline_jax(plan, step=step)
    programs = programs_of(plan)
    traced = programs.traced
    check_arguments(traced)
    made = as_planned(programs.with_equations(1, plan.loop_parts), plan)
    stage = plan.stages[0]
    arguments = [
        f"({name!r}, {tuple(leaf.shape)}, {partition(stage.specs.get(name, replicated(len(leaf.shape))))}),"
        for name, leaf in zip(traced.inputs.names, traced.inputs.leaves, strict=True)
    ]
    results = [
        f"{partition(spec)},  # {name}" if name else f"{partition(spec)},"
        for name, spec in zip(traced.outputs.names, _result_specs(plan, made, traced), strict=True)
    ]
    given = _constraints(_counted(_jax.open_jaxpr(traced.jaxpr)), _placed(made.graph, stage.ops))
    values = {
        "SUMMARY": summary(plan),
        "NOT_SAID": not_said(plan),
        "IMPORT": import_line(traced, step),
        "DEFAULT": "" if step_place(traced, step) is None else " = _step",
        "AXES": repr(dict(stage.mesh_shape.axis_sizes)),
        "FIRST_DEVICE": repr(plan.first_device),
        "ARGUMENTS": lines(arguments),
        "RESULTS": lines(results),
        "DONATED": repr(_donated(traced)),
        "CONSTRAINTS": lines(given),
    }
    return filled_template("plain_jax.py.txt", values)


def _result_specs(plan: Plan, made: TracedStep, traced: Traced) -> list[Spec]:
    """Return the spec of each result leaf."""
    program, parts = build_program(plan, made.step), made.step.output_parts
    by_leaf = {part.leaf: spec for part, spec in zip(parts, program.output_specs, strict=True)}
    specs = [by_leaf.get(number, replicated(len(leaf.shape))) for number, leaf in enumerate(traced.outputs.leaves)]
    for result, argument in traced.aliases.items():
        # State returns as it came, also where the program holds it in parts.
        specs[result] = plan.stages[0].specs.get(traced.inputs.names[argument], specs[result])
    return specs


def _donated(traced: Traced) -> tuple[int, ...]:
    """Return the positions of the arguments that are donated; `jax.jit` donates whole arguments."""
    owners = [name.split("/")[0] for name in traced.inputs.names]
    kept = {owner for owner, is_donated in zip(owners, traced.inputs.donated, strict=True) if not is_donated}
    return tuple(n for n, name in enumerate(traced.inputs.positional) if name in owners and name not in kept)


def _counted(jaxpr: _jax.Jaxpr) -> dict[_Kind, int]:
    """Return the number of equations of each kind, at any depth."""
    counts: dict[_Kind, int] = defaultdict(int)
    for eqn in jaxpr.eqns:
        for inner in _jax.inner_jaxprs(eqn):
            for kind, number in _counted(_jax.open_jaxpr(inner)).items():
                counts[kind] += number
        counts[eqn.primitive.name, tuple(tuple(getattr(v.aval, "shape", ())) for v in eqn.outvars)] += 1
    return counts


def _placed(graph: Graph, placements: Mapping[int, OpPlacement]) -> dict[_Kind, list[_Specs]]:
    """Return the specs of the results of the ops of each kind, in the order of the equations."""
    found: dict[_Kind, list[_Specs]] = defaultdict(list)
    for op in graph.ops:
        # The step that is exported does not have these: they say what it is to become.
        if op.primitive == USER_SHARDING:
            continue
        placement = placements.get(op.id)
        bodies = placement.bodies if placement is not None and placement.bodies else ({},) * len(op.bodies)
        for body, inside in zip(op.bodies, bodies, strict=True):
            for kind, specs in _placed(body, inside).items():
                found[kind] += specs
        shapes = tuple(value.shape for value in graph.results(op))
        specs = placement.results if placement is not None else (None,) * len(shapes)
        # A partial sum has no name outside of a manual program.
        found[op.primitive, shapes].append(tuple(None if spec is None or spec.partial else spec for spec in specs))
    return found


def _constraints(counts: Mapping[_Kind, int], placed: Mapping[_Kind, list[_Specs]]) -> Iterator[str]:
    """Yield the entries of the table of constraints."""
    for (primitive, shapes), specs in placed.items():
        alike = len(set(specs)) == 1
        if not (alike or counts.get((primitive, shapes)) == len(specs)) or not any(map(any, specs)):
            continue
        written = [tuple_text(partition(spec) if spec is not None else "None" for spec in each) for each in specs]
        listed = f"EVERY({written[0]})" if alike else f"[{', '.join(written)}]"
        yield f"({primitive!r}, {shapes!r}): {listed},"
