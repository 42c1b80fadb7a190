"""Read pins from a YAML file: the sharding of some arguments, in the form that `inter_op.pins` takes.

# an axis, a list of axes, or null for each dim
state/params/head: [null, model]
layers/0/w: [[replica, data], null]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alpa_lite.errors import PlanError
from alpa_lite.inter_op.pins import pinned_axes, pinned_specs
from alpa_lite.program.phases import StepGraph

if TYPE_CHECKING:
    import yaml

_MAX_BYTES = 256 * 2**10  # thousands of pins, which take a second to read
_TAG = "tag:yaml.org,2002:"

_FORM = "write PATH: [AXIS, ...], with an axis, a list of axes or null for each dim, as `params/w: [null, model]`"


@dataclass(frozen=True, kw_only=True)
class PinFile:
    """The pins of a file.

    path     the file
    pins     for each argument's path, one entry per dim: an axis, a tuple of axes, or None
    lines    the line of the file on which each pin stands, from 1
    """

    path: Path
    pins: Mapping[str, tuple[Any, ...]]
    lines: Mapping[str, int]

    def check(self, step: StepGraph, *, axes_of_search: bool) -> None:
        """Raise `PlanError`, with the line, for a pin that fits no argument of a step or has an unknown axis.

        axes_of_search: whether the axes are those of the search, not of a mesh that the user gave.
        """
        for name, dims in self.pins.items():
            try:
                pinned_specs(step, {name: dims})
                if axes_of_search:
                    pinned_axes({name: dims})
            except PlanError as error:
                raise PlanError(f"{self.path}, line {self.lines[name]}: {error}") from error


def read_pins(path: str | Path) -> PinFile:
    """Read the pins of a file. Raises `PlanError`, with the line, if it is not YAML or holds no pins."""
    import yaml

    path = Path(path)
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_BYTES + 1)
        if len(text) > _MAX_BYTES:
            raise ValueError(f"it has more than {_MAX_BYTES >> 10} KiB")
        root = yaml.compose(text.decode("utf-8"), Loader=yaml.SafeLoader)
    except RecursionError as error:
        raise PlanError(f"{path}: this nests too deeply. For each pin {_FORM}.") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or error
        raise PlanError(f"{path}{where}: this is not YAML ({problem}). For each pin {_FORM}.") from error
    except (OSError, ValueError) as error:
        raise PlanError(f"{path} cannot be read: {error}. Give a YAML file with pins: {_FORM}.") from error
    if not isinstance(root, yaml.MappingNode) or not root.value:
        raise PlanError(f"{path}, line 1: a file of pins holds a mapping, but this is {_kind(root)}. {_FORM}.")
    pins: dict[str, tuple[Any, ...]] = {}
    lines: dict[str, int] = {}
    for key, value in root.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise PlanError(f"{path}, line {line}: this is {_kind(key)} where a path is needed; {_FORM}.")
        name = str(key.value)
        if name in pins:
            raise PlanError(f"{path}, line {line}: {name!r} is pinned on line {lines[name]} already. Keep one of them.")
        if not _is_list(value):
            raise PlanError(f"{path}, line {line}: the pin of {name!r} is not a list; {_FORM}.")
        pins[name], lines[name] = tuple(_entry(each, f"{path}, line {line}", name) for each in value.value), line
    return PinFile(path=path, pins=pins, lines=lines)


def _entry(node: yaml.Node, where: str, name: str) -> str | tuple[str, ...] | None:
    """Return the axes that split one dim: None, an axis or several."""

    if node.tag == _TAG + "null":
        return None
    nodes: Sequence[yaml.Node] = node.value if _is_list(node) else [node]
    odd = [each for each in nodes if each.tag != _TAG + "str"]
    if odd:
        raise PlanError(f"{where}: the pin of {name!r} has the entry {_kind(odd[0])}; {_FORM}.")
    axes = tuple(str(each.value) for each in nodes)
    return axes if _is_list(node) else axes[0]


def _is_list(node: yaml.Node) -> bool:
    import yaml

    return isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq"


def _kind(node: yaml.Node | None) -> str:
    """Describe a node in words; a scalar is quoted as written."""
    import yaml

    if node is None or not node.value:
        return "empty"
    if isinstance(node, yaml.ScalarNode):
        return str(node.value)[:40]
    return "a mapping" if isinstance(node, yaml.MappingNode) else "a list"
