"""What exported modules of Python have in common: their summary, the import of the step, literals, and checks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from itertools import groupby

from alpa_lite.errors import PlanError
from alpa_lite.plan.plan import Plan
from alpa_lite.sharding.specs import Spec
from alpa_lite.trace.trace import Traced


def filled_template(name: str, values: Mapping[str, str]) -> str:
    """Return the text of a template of this folder, with `@NAME@` replaced by the value of that name."""
    text = files("alpa_lite.export").joinpath(name).read_text(encoding="utf-8")
    for key, value in values.items():
        text = text.replace(f"@{key}@", value)
    return text


def check_arguments(traced: Traced) -> None:
    """Raise `PlanError` unless all arguments and results are arrays, and all arguments positional."""
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
    devices = len({device for stage in plan.stages for device in stage.submesh.devices})
    return f"{plan.function} by {plan.name} on {devices} devices of {plan.cluster.name}"


def not_said(plan: Plan, *, recomputes: bool = False) -> str:
    """Return a paragraph on what the plan decides and the module does not say, if there is anything.

    recomputes: whether the module computes values again itself, as the plan wants it.
    """
    missing = list[str]()
    if plan.recomputed and not recomputes:
        missing.append(f"recomputation in the backward pass ({plan.recomputed}): use jax.checkpoint in the model")
    if plan.buckets:
        missing.append(f"reducing gradients in {len(plan.buckets)} buckets: XLA combines collectives by its own flags")
    return "".join(f"\nNot said here: {text}.\n" for text in missing)


def step_place(traced: Traced, given: str | None) -> tuple[str, str] | None:
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


def import_line(traced: Traced, given: str | None) -> str:
    """Return the line that imports the step, between empty lines; "" if no other program can import it."""
    place = step_place(traced, given)
    return "" if place is None else f"\nfrom {place[0]} import {place[1]} as _step\n"


def partition(spec: Spec) -> str:
    """Return a spec as the `PartitionSpec` that jax prints, without the dims at the end that are whole."""
    dims = [_dim(axes) for axes in spec.dims]
    while dims and dims[-1] == "None":
        dims.pop()
    return f"P({', '.join(dims)})"


def _dim(axes: Sequence[str]) -> str:
    if not axes:
        return "None"
    return repr(axes[0]) if len(axes) == 1 else repr(tuple(axes))


def tuple_text(items: Iterable[str]) -> str:
    """Return the literal of a tuple, of the texts of its items."""
    listed = list(items)
    return f"({', '.join(listed)}{',' if len(listed) == 1 else ''})"


def lines(items: Iterable[str]) -> str:
    """Return the entries of a literal that stands on several lines."""
    return "".join(f"\n    {item}" for item in items) + "\n"


def ranges(numbers: Iterable[int]) -> str:
    """Return numbers in a list such as "0-3 7"."""
    runs = groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])
    ends = [[n for _, n in run] for _, run in runs]
    return " ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in ends)
