"""A plan as a module of plain JAX: `jax.jit` of the user's step, with the shardings of the plan.

    arguments, results    `in_shardings` and `out_shardings`, leaf by leaf
    constraints           `with_sharding_constraint` on the results of the equations that the plan has decisions about

The module traces the step, and numbers the equations of each primitive with results of the same shapes as they come in
the jaxpr; inner jaxprs come before the equation that has them (`_counted`). By these numbers the ops of a plan are
found again (`_constraints`). Passes of alpa_lite may merge or add equations: where the numbers of ops and equations of
a kind differ, there is a constraint only if all such ops have the same specs. Without one, XLA's partitioner chooses.
Constraints change where a value lies and never what it is.

Only plans of one stage and one micro-batch have this form.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.resources import files

from alpa_lite import _jax
from alpa_lite.errors import PlanError
from alpa_lite.export.degrees import programs_of
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
    """Return a module of plain JAX that runs the step as a plan of one stage says.

    Args:
        plan: the plan, as `al.plan` returned it.
        step: where the step is imported from, as `module:function`; by default from where it was defined.

    Raises:
        PlanError: the plan has several stages or micro-batches, or comes from a file and was not replayed; or the step
            takes static or keyword arguments.
    """
    programs = programs_of(plan)
    traced = programs.traced
    _check(plan, traced)
    made = as_planned(programs.with_equations(1, plan.loop_parts), plan)
    stage = plan.stages[0]
    arguments = [
        f"({name!r}, {tuple(leaf.shape)}, {_partition(stage.specs.get(name, replicated(len(leaf.shape))))}),"
        for name, leaf in zip(traced.inputs.names, traced.inputs.leaves, strict=True)
    ]
    results = [
        f"{_partition(spec)},  # {name}" if name else f"{_partition(spec)},"
        for name, spec in zip(traced.outputs.names, _result_specs(plan, made, traced), strict=True)
    ]
    given = _constraints(_counted(_jax.open_jaxpr(traced.jaxpr)), _placed(made.graph, stage.ops))
    template = files("alpa_lite.export").joinpath("plain_jax.py.txt").read_text()
    filled = {
        "SUMMARY": summary(plan),
        "NOT_SAID": not_said(plan),
        "IMPORT": _import(traced, step),
        "DEFAULT": "" if _place(traced, step) is None else " = _step",
        "AXES": repr(dict(stage.mesh_shape.axis_sizes)),
        "FIRST_DEVICE": repr(plan.first_device),
        "ARGUMENTS": lines(arguments),
        "RESULTS": lines(results),
        "DONATED": repr(_donated(traced)),
        "CONSTRAINTS": lines(given),
    }
    for name, text in filled.items():
        template = template.replace(f"@{name}@", text)
    return template


def _check(plan: Plan, traced: Traced) -> None:
    """Raise `PlanError` unless the plan and the step have the form of one call of `jax.jit`."""
    if len(plan.stages) > 1 or plan.num_microbatches > 1:
        raise PlanError(
            f"{plan.name} has {len(plan.stages)} stages and {plan.num_microbatches} micro-batches, but a module of "
            "plain JAX is one call of jax.jit: it takes plans of one stage and one micro-batch. Plan with "
            "Auto(intra_op_only=True) or a planner without pipeline, and num_microbatches=1."
        )
    if traced.call.static or not traced.outputs.results.is_plain:
        raise PlanError(
            f"{traced.name} was planned with arguments or results that are no arrays (static arguments, functions in "
            "Equinox modules, Flax NNX modules), of which jax.jit takes no shardings. Pass arrays alone: bind "
            "constants with functools.partial, split modules by equinox.partition or nnx.split; then "
            "export the plan of that step."
        )
    named = [name for name in traced.inputs.names if name.split("/")[0] not in traced.inputs.positional]
    if named:
        raise PlanError(
            f"{traced.name} was planned with keyword arguments ({named[0]}), which jax.jit takes no shardings for. "
            "Pass them by position, plan again, and export that plan."
        )


def summary(plan: Plan) -> str:
    """Return what a plan is for, in a clause."""
    devices = plan.stages[0].submesh.num_devices
    return f"{plan.function} by {plan.name} on {devices} devices of {plan.cluster.name}"


def not_said(plan: Plan) -> str:
    """Return a paragraph on what the plan decides and the module does not say, if there is anything."""
    missing = list[str]()
    if plan.recomputed:
        missing.append(f"recomputation in the backward pass ({plan.recomputed}): use jax.checkpoint in the model")
    if plan.buckets:
        missing.append(f"reducing gradients in {len(plan.buckets)} buckets: XLA combines collectives by its own flags")
    return "".join(f"\nNot said here: {text}.\n" for text in missing)


def _place(traced: Traced, given: str | None) -> tuple[str, str] | None:
    """Return the module and the name of the step; None if no other program can import it."""
    if given is not None:
        module, _, name = given.partition(":")
        if not _is_path(module) or not name.isidentifier():
            raise PlanError(f"step = {given!r} was given; it must be MODULE:FUNCTION, such as 'train:train_step'.")
        return module, name
    # A file that a command has run is in no module that another program could import.
    module, name = str(getattr(traced.fun, "__module__", "")), str(getattr(traced.fun, "__qualname__", ""))
    return (module, name) if _is_path(module) and module != "__main__" and name.isidentifier() else None


def _is_path(module: str) -> bool:
    return all(part.isidentifier() for part in module.split("."))


def _import(traced: Traced, given: str | None) -> str:
    place = _place(traced, given)
    return "" if place is None else f"\nfrom {place[0]} import {place[1]} as _step\n"


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
        written = [_tuple(_partition(spec) if spec is not None else "None" for spec in each) for each in specs]
        listed = f"EVERY({written[0]})" if alike else f"[{', '.join(written)}]"
        yield f"({primitive!r}, {shapes!r}): {listed},"


def _partition(spec: Spec) -> str:
    """Return a spec as the `PartitionSpec` that jax prints, without the dims at the end that are whole."""
    dims = [_dim(axes) for axes in spec.dims]
    while dims and dims[-1] == "None":
        dims.pop()
    return f"P({', '.join(dims)})"


def _dim(axes: Sequence[str]) -> str:
    if not axes:
        return "None"
    return repr(axes[0]) if len(axes) == 1 else repr(tuple(axes))


def _tuple(items: Iterable[str]) -> str:
    listed = list(items)
    return f"({', '.join(listed)}{',' if len(listed) == 1 else ''})"


def lines(items: Iterable[str]) -> str:
    """Return the entries of a literal that stands on several lines."""
    return "".join(f"\n    {item}" for item in items) + "\n"
