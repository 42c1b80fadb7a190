"""Pins: arguments whose sharding the user gives; the search finds the rest.

    pins = {"state/params/head": PartitionSpec(None, "model")}

A pin names an argument by its path, or by the end of it (whole components) if that is unique; for each dim None, an
axis or several axes, as in `jax.sharding.PartitionSpec`. The axes are those of the search: "x" where there is one;
"replica" and "data" (which split the batch) and "model" where there are several. Only meshes with all pinned axes are
searched. On a mesh of the user's own (`OnMesh`, `Custom`) they are the user's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from alpa_lite.errors import PlanError
from alpa_lite.graph.phases import StepGraph
from alpa_lite.sharding import Spec, divides

AXES = ("x", "replica", "data", "model")

Pins = Mapping[str, Sequence[Any]]


def pinned_axes(pins: Pins) -> frozenset[str]:
    """All axes that pins name. Raises `PlanError` for axes that no mesh of the search has."""
    axes = frozenset(axis for name, dims in pins.items() for dim in _dims(name, dims) for axis in dim)
    unknown = sorted(axes - {*AXES})
    if unknown:
        raise PlanError(f"pins name the mesh axes {unknown}, but those of the search are {', '.join(AXES)}. Use these.")
    if "x" in axes and len(axes) > 1:
        raise PlanError(
            f"pins name the mesh axes {sorted(axes)}, but a mesh has either the axis x alone or some of replica, data"
            " and model. Use axes of one of the two."
        )
    return axes


def pinned_specs(step: StepGraph, pins: Pins) -> dict[int, Spec]:
    """The spec of each input of a step's graph that is pinned, rows of stacked arguments included."""
    names = {v: step.graph.values[v].name.split("[")[0] for v in step.graph.inputs}
    found: dict[int, Spec] = {}
    for pin, dims in pins.items():
        name = _named(pin, names.values())
        for v in (v for v, other in names.items() if other == name):
            value, wanted = step.graph.values[v], _dims(pin, dims)
            if len(wanted) > value.rank:
                raise PlanError(
                    f"The pin of {pin!r} has {len(wanted)} dims, but {name} has shape {list(value.shape)}. Give one "
                    "entry per dim at most."
                )
            found[v] = Spec((*wanted, *((),) * (value.rank - len(wanted))))
    return found


def pins_on_mesh(step: StepGraph, pins: Pins, axes: Mapping[str, int]) -> dict[int, Spec]:
    """`pinned_specs` on a mesh with these axes; those of one device split nothing.

    Raises `PlanError` for other axes, one that a spec names twice, and dims that their devices do not divide.
    """
    found: dict[int, Spec] = {}
    for v, spec in pinned_specs(step, pins).items():
        value, named = step.graph.values[v], [axis for dim in spec.dims for axis in dim]
        if unknown := [axis for axis in named if axis not in axes]:
            raise PlanError(f"The pin of {value.name} names the axes {unknown}, but the mesh has {list(axes)}.")
        if len(set(named)) < len(named):
            raise PlanError(f"The pin {spec} of {value.name} names an axis twice. Each splits one dim at most.")
        if not divides(spec, value.shape, axes):
            raise PlanError(
                f"The pin {spec} of {value.name} needs dims that its axes divide ({dict(axes)}), but the shape is "
                f"{list(value.shape)}. Pin other dims, or pad the array."
            )
        wide = Spec(tuple(tuple(axis for axis in dim if axes[axis] > 1) for dim in spec.dims))
        if wide.axes and value.dtype.startswith("key<"):
            raise PlanError(f"The pin {spec} splits the random keys {value.name}, which every device holds whole.")
        found[v] = wide
    return found


def _named(pin: str, names: Iterable[str]) -> str:
    known = dict.fromkeys(filter(None, names))
    matches = [name for name in known if name == pin] or [name for name in known if name.endswith("/" + pin)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise PlanError(f"The pin {pin!r} fits {', '.join(matches[:4])}. Give more of the path.")
    near = get_close_matches(pin, known, n=3, cutoff=0.3) or [*known][:3]
    raise PlanError(f"There is no argument {pin!r} to pin. Did you mean {', '.join(near)}?")


def _dims(name: str, dims: Sequence[Any]) -> tuple[tuple[str, ...], ...]:
    if isinstance(dims, str):
        raise PlanError(f"The pin of {name!r} is {dims!r}; give a PartitionSpec, or one entry per dim in a tuple.")
    return tuple(() if dim is None else (dim,) if isinstance(dim, str) else tuple(dim) for dim in dims)
