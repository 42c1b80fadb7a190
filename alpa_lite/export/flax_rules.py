"""A plan as logical axis rules of Flax: a name for each dim of each argument, and the mesh axes of each name.

Names are those of `rules.dims.dim_names` where the structure of the step gives one, else "dim". Flax takes a name to
the same axes wherever it appears, and an array may not have a name twice. Dims of one name that a plan splits
differently, or that one array has twice, therefore get names of their own, `d_model_2` (`_named`), so that the rules
give every array exactly the spec of the plan.

What a step does in between, and where its micro-batches begin, is the trainer's to say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files

from alpa_lite.errors import PlanError
from alpa_lite.export.degrees import programs_of
from alpa_lite.export.module_text import lines, not_said, summary
from alpa_lite.plan.plan import Plan
from alpa_lite.program.phases import StepGraph
from alpa_lite.rules.dims import dim_classes, dim_names
from alpa_lite.sharding.specs import Spec, replicated

_Axes = tuple[str, ...]


def flax_rules(plan: Plan) -> str:
    """Return a module with the logical axis rules of a plan of one stage.

    Raises `PlanError` for plans of several stages, which have no common mesh, and for plans from files.
    """
    programs, stage = programs_of(plan), plan.stages[0]
    if len(plan.stages) > 1:
        raise PlanError(
            f"{plan.name} has {len(plan.stages)} stages, each with its own devices, but logical axis rules are for one "
            "mesh. Plan with Auto(intra_op_only=True) or a planner without pipeline."
        )
    inputs = programs.traced.inputs
    specs = {
        name: stage.specs.get(name, replicated(len(leaf.shape)))
        for name, leaf in zip(inputs.names, inputs.leaves, strict=True)
    }
    rules, names = _named(specs, _names_of_dims(programs.with_equations(1, 0).step))
    said = not_said(plan)
    if plan.num_microbatches > 1:
        said += f"\nNot said here: {plan.num_microbatches} micro-batches, by a loop in the step.\n"
    filled = {
        "SUMMARY": summary(plan),
        "NOT_SAID": said,
        "AXES": repr(dict(stage.mesh_shape.axis_sizes)),
        "FIRST_DEVICE": repr(plan.first_device),
        "RULES": lines(f"({name!r}, {_axes(axes)})," for name, axes in rules.items()),
        "NAMES": lines(f"{path!r}: {dims!r}," for path, dims in names.items()),
    }
    template = files("alpa_lite.export").joinpath("flax_rules.py.txt").read_text()
    for name, text in filled.items():
        template = template.replace(f"@{name}@", text)
    return template


def _names_of_dims(step: StepGraph) -> dict[str, tuple[str, ...]]:
    """Return the name of each dim of the arguments that are inputs of the step as they are; "dim" for one without."""
    graph, classes = step.graph, dim_classes(step)
    name_of = {node: name for name, nodes in dim_names(step, classes).items() for node in nodes}
    return {
        graph.values[v].name: tuple(name_of.get(node, "dim") for node in classes.of_value(graph, v))
        for v in graph.inputs
    }


def _named(
    specs: Mapping[str, Spec], dims: Mapping[str, Sequence[str]]
) -> tuple[dict[str, _Axes], dict[str, tuple[str | None, ...]]]:
    """Return the mesh axes of each logical name, and the names of each argument's dims."""
    rules, names = dict[str, _Axes](), dict[str, tuple[str | None, ...]]()
    for path, spec in specs.items():
        known = dims.get(path, ())
        # The rows of a stack that a step reads in parts have other dims than the argument.
        known = known if len(known) == len(spec.dims) else ("dim",) * len(spec.dims)
        found = list[str | None]()
        for name, axes in zip(known, spec.dims, strict=True):
            if name == "dim" and not axes:
                # Flax leaves dims without a name whole.
                found.append(None)
                continue
            chosen = next(n for n in _numbered(name) if n not in found and rules.get(n, axes) == axes)
            rules[chosen] = tuple(axes)
            found.append(chosen)
        names[path] = tuple(found)
    return rules, names


def _numbered(name: str) -> Iterator[str]:
    yield name
    number = 2
    while True:
        yield f"{name}_{number}"
        number += 1


def _axes(axes: _Axes) -> str:
    return repr(axes[0] if len(axes) == 1 else axes or None)
