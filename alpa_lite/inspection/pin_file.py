"""Pins from a YAML file: the sharding of some arguments, as `planners.pins` reads it.

# an axis, a list of axes, or null for each dim
state/params/head: [null, model]
layers/0/w: [[replica, data], null]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml

from alpa_lite.errors import PlanError
from alpa_lite.graph.phases import StepGraph
from alpa_lite.planners.pins import pinned_axes, pinned_specs

_FORM = "write PATH: [AXIS, ...], with an axis, a list of axes or null for each dim, as `params/w: [null, model]`"


@dataclass(frozen=True, kw_only=True)
class PinFile:
    """Pins, and the line of the file that each stands on."""

    path: Path
    pins: Mapping[str, tuple[Any, ...]]
    lines: Mapping[str, int]

    def check(self, step: StepGraph, *, axes_of_search: bool) -> None:
        """Raise `PlanError`, with the line, for a pin that fits no argument of a step, or an axis that is not known.

        `axes_of_search`: whether the axes are those of the search, not of a mesh of the user's.
        """
        for name, dims in self.pins.items():
            try:
                pinned_specs(step, {name: dims})
                if axes_of_search:
                    pinned_axes({name: dims})
            except PlanError as error:
                raise PlanError(f"{self.path}, line {self.lines[name]}: {error}") from error


def read_pins(path: str | Path) -> PinFile:
    """The pins of a file. Raises `PlanError`, with the line, for what is no YAML or holds no pins."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{path} cannot be read: {error}. Give a YAML file with pins: {_FORM}.") from error
    except RecursionError as error:
        raise PlanError(f"{path}: this nests too deeply. For each pin {_FORM}.") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or error
        raise PlanError(f"{path}{where}: this is no YAML ({problem}). For each pin {_FORM}.") from error
    if not isinstance(root, yaml.MappingNode) or not data:
        raise PlanError(f"{path}, line 1: a file of pins holds a mapping, but this is {_kind(data)}. {_FORM}.")
    pins: dict[str, tuple[Any, ...]] = {}
    lines: dict[str, int] = {}
    for key, value in root.value:
        line, name = key.start_mark.line + 1, str(key.value)
        if name in pins:
            raise PlanError(f"{path}, line {line}: {name!r} is pinned on line {lines[name]} already. Keep one of them.")
        pins[name], lines[name] = _dims(data[key.value] if key.value in data else None, path, line, name), line
        if value.tag != "tag:yaml.org,2002:seq":
            raise PlanError(f"{path}, line {line}: the pin of {name!r} is no list; {_FORM}.")
    return PinFile(path=path, pins=pins, lines=lines)


def _dims(value: Any, path: Path, line: int, name: str) -> tuple[Any, ...]:
    """An entry per dim: None, an axis or several."""
    found: list[Any] = []
    entries = cast("Sequence[Any]", value) if isinstance(value, list) else [value]
    for entry in entries:
        axes = tuple(cast("Sequence[Any]", entry)) if isinstance(entry, list) else entry
        named = axes if isinstance(axes, tuple) else (axes,)
        if not (axes is None or all(isinstance(axis, str) for axis in named)):
            raise PlanError(f"{path}, line {line}: the pin of {name!r} has the entry {entry!r}; {_FORM}.")
        found.append(axes)
    return tuple(found)


def _kind(data: Any) -> str:
    return "empty" if data is None else f"a {type(data).__name__}"
