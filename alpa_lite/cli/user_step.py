"""`load_example`: import the user's step by the name of a function that returns it with its arguments."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from alpa_lite.errors import PlanError


def load_example(name: str, *, decorated: bool = False) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Call the function that `module:function` or `file.py:function` names.

    Returns the train step, its arguments and its keyword arguments. A step that `parallelize` decorated is returned as
    the plain function, unless `decorated` keeps its options.

    Raises:
        PlanError: there is no such function, or it returns something else.
    """
    place, colon, function_name = name.rpartition(":")
    if not colon or not place or not function_name:
        raise PlanError(f"{name!r} does not name a function: write MODULE:FUNCTION, for example my_model:example.")
    module = _from_file(Path(place)) if place.endswith(".py") else _imported(place)
    function = getattr(module, function_name, None)
    if not callable(function):
        raise PlanError(f"The module {place!r} has no function {function_name!r}.")
    if missing := _needed(function):
        raise PlanError(
            f"{name} takes arguments ({', '.join(missing)}), but is called without any: name a function that returns "
            "(train_step, args), for example `def example(): return train_step, (state, batch)`."
        )
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
    return found[0] if decorated else getattr(found[0], "fun", found[0]), tuple(found[1]), dict(kwargs)


def _needed(function: Callable[..., Any]) -> list[str]:
    """Return the names of the arguments without which a function cannot be called."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some callables have none
        return []
    return [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def _imported(name: str) -> ModuleType:
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
