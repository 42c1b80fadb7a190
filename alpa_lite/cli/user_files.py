"""What a user names on the command line: the function that returns the step, and the file of pins.

- `load_example` imports a module or file and calls a function of it, which returns the step with its arguments;
- `read_pins` reads a YAML file with the sharding of some arguments, in the form of `inter_op.plan_request`:

      # an axis, a list of axes, or null for each dim
      state/params/head: [null, model]
      layers/0/w: [[replica, data], null]
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import alpa_lite as al
from alpa_lite._jax import Tree
from alpa_lite.errors import PlanError
from alpa_lite.inter_op.plan_request import pinned_axes, pinned_specs
from alpa_lite.planners.by_name import planner_by_name
from alpa_lite.program.phases import StepGraph
from alpa_lite.text import did_you_mean

if TYPE_CHECKING:
    import yaml


class UserStep(NamedTuple):
    """A train step with the arguments to plan it for."""

    step: Callable[..., Tree]
    args: tuple[Tree, ...]
    kwargs: dict[str, Tree]


def load_example(name: str, *, decorated: bool = False) -> UserStep:
    """Call the function that `module:function` or `file.py:function` names, and return the step that it returns.

    A step that `parallelize` decorated is returned as the plain function, unless `decorated` keeps its options.

    Raises:
        PlanError: there is no such function, or it returns something else.
    """
    # From the right: paths of Windows have a colon as well.
    place, colon, function_name = name.rpartition(":")
    if not colon or not place or not function_name:
        raise PlanError(f"{name!r} does not name a function: write MODULE:FUNCTION, for example my_model:example.")
    with _without_exit(f"{place} is imported"):
        module = _module(place)
    function = getattr(module, function_name, None)
    if not callable(function):
        functions = [each for each, value in vars(module).items() if callable(value)]
        raise PlanError(
            f"The module {place!r} has no function {function_name!r}.{did_you_mean(function_name, functions)}"
        )
    if missing := _needed(function):
        raise PlanError(
            f"{name} takes arguments ({', '.join(missing)}), but is called without any: name a function that returns "
            "(train_step, args), for example `def example(): return train_step, (state, batch)`."
        )
    with _without_exit(f"{name} is called"):
        found = function()
    if not isinstance(found, tuple) or len(found) not in (2, 3) or not callable(found[0]):
        raise PlanError(
            f"{name} returned {type(found).__name__}, but (train_step, args) or (train_step, args, kwargs) is needed: "
            "the function to plan and the arguments to plan it for (jax.ShapeDtypeStructs will do)."
        )
    kwargs = found[2] if len(found) == 3 else {}
    if not isinstance(found[1], (tuple, list)) or not isinstance(kwargs, Mapping):
        kinds = " and ".join(type(part).__name__ for part in found[1:])
        raise PlanError(
            f"Beside the step {name} returned {kinds}; what is needed is a tuple of its arguments, of a single one "
            "(state,), and if there are keyword arguments a dict of them."
        )
    # `parallelize` gives an object whose `fun` is the plain function.
    step = found[0] if decorated else getattr(found[0], "fun", found[0])
    return UserStep(step=step, args=tuple(found[1]), kwargs=dict(kwargs))


def _needed(function: Callable[..., object]) -> list[str]:
    """Return the names of the arguments without which a function cannot be called."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some callables have none
        return []
    return [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


@contextmanager
def _without_exit(when: str) -> Iterator[None]:
    """Raise `PlanError` for a program of the user that ends itself."""
    try:
        yield
    except SystemExit as error:
        code = "" if error.code is None else repr(error.code)
        raise PlanError(
            f"The program ends itself, by sys.exit({code}), while {when}. Put what it does as a script below "
            "`if __name__ == '__main__':`, so that it can be imported."
        ) from error


def _module(place: str) -> ModuleType:
    """Import a module by its name or by its file, whose ending may be left out."""
    if place.endswith(".py"):
        return _from_file(Path(place))
    # A path, as the shell completes it up to the dot.
    if os.sep in place or place.startswith("."):
        return _from_file(Path(f"{place}.py"))
    return _imported(place)


def _imported(name: str) -> ModuleType:
    # As `python -m` does; the installed script does not have the current folder on its path.
    with _in_front(os.getcwd()):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            # If the user's module itself lacks a module, that is another problem, shown with the lines that led to it.
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
            raise PlanError(f"There is no module {name!r} here or among the installed packages.") from error


def _from_file(path: Path) -> ModuleType:
    """Import the module of a file, which can import its neighbours as with `python FILE`."""
    if not path.is_file():
        raise PlanError(f"There is no file {str(path)!r}.")
    # Under its own name it would stand in for a package that it imports: `jax.py` here, or a second `train.py`.
    spec = importlib.util.spec_from_file_location(f"{path.stem} of {path.resolve().parent}", path)
    if spec is None or spec.loader is None:
        raise PlanError(f"{str(path)!r} cannot be imported as a module.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    with _in_front(str(path.resolve().parent)):
        spec.loader.exec_module(module)
    return module


@contextmanager
def _in_front(folder: str) -> Iterator[None]:
    """Put a folder first on the import path."""
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


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
    pins: Mapping[str, tuple[str | tuple[str, ...] | None, ...]]
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
            # One byte more than allowed shows that there is more, without reading all of it.
            text = file.read(_MAX_BYTES + 1)
        if len(text) > _MAX_BYTES:
            raise ValueError(f"it has more than {_MAX_BYTES >> 10} KiB")
        # Nodes instead of values: they know their lines, and a repeated key is seen.
        root = yaml.compose(text.decode("utf-8-sig"), Loader=yaml.SafeLoader)
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
    pins: dict[str, tuple[str | tuple[str, ...] | None, ...]] = {}
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
    # Unquoted, a number, a date or "yes" is no string in YAML, and so no name of an axis.
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


def make_planner(name: str, options: Sequence[str]) -> al.planners.Planner | al.Plan:
    """Return the planner of that name with `name=value` options, or the plan of a `.json` file, which is replayed.

    Raises `PlanError` for an unknown name or option.
    """
    if name.endswith(".json") and ":" not in name:
        return al.Plan.load(name)
    return planner_by_name(name, options)
