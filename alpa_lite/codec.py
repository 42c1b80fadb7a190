"""Frozen dataclasses to plain JSON data and back, driven by their type annotations.

Fields that equal their default are left out, so that files stay small and old files stay readable. Mappings with
integer keys are written with string keys, as JSON demands. Classes with `to_json`/`from_json` of their own use those.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any

from alpa_lite.errors import PlanError


def encode(value: Any) -> Any:
    """Plain data for a dataclass, a container of such, or a plain value."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and not hasattr(value, "to_json"):
        return {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value) if not _is_default(value, f)}
    to_json = getattr(value, "to_json", None)
    if to_json is not None:
        return to_json()
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [encode(item) for item in value]
    return _number(value) if isinstance(value, float) else value


def _number(value: float) -> int | float | str:
    """Whole numbers without a point; words for what is no number in JSON, which `float` reads."""
    if not math.isfinite(value):
        return str(value)
    return int(value) if value == int(value) and abs(value) < 2**53 else value


def _is_default(value: Any, field: dataclasses.Field[Any]) -> bool:
    if field.default is not dataclasses.MISSING:
        return getattr(value, field.name) == field.default
    if field.default_factory is not dataclasses.MISSING:
        return getattr(value, field.name) == field.default_factory()
    return False


def decode(wanted: Any, data: Any) -> Any:
    """The value of type `wanted` that `encode` wrote as `data`. Raises `PlanError` when the data do not fit."""
    if wanted is Any:
        return data
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if origin in (typing.Union, types.UnionType):
        return None if data is None else decode(next(a for a in arguments if a is not type(None)), data)
    if origin is tuple:
        return _decode_tuple(arguments, data)
    if origin is not None and issubclass(origin, Mapping):
        return {decode(arguments[0], key): decode(arguments[1], item) for key, item in data.items()}
    from_json = getattr(wanted, "from_json", None)
    if from_json is not None:
        return from_json(data)
    return _decode_dataclass(wanted, data) if dataclasses.is_dataclass(wanted) else wanted(data)


def _decode_tuple(arguments: tuple[Any, ...], data: Any) -> tuple[Any, ...]:
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return tuple(decode(arguments[0], item) for item in data)
    return tuple(decode(a, item) for a, item in zip(arguments, data, strict=True))


@cache
def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _decode_dataclass(cls: Any, data: Any) -> Any:
    hints = _hints(cls)
    if not isinstance(data, Mapping):
        raise PlanError(f"A {cls.__name__} is written as an object, but the file has {type(data).__name__}.")
    unknown = set(data) - set(hints)
    if unknown:
        raise PlanError(
            f"The file names {sorted(unknown)}, which a {cls.__name__} of this version does not know. It was written "
            "by another version of alpa_lite, or it is no plan."
        )
    try:
        return cls(**{name: decode(hints[name], item) for name, item in data.items()})
    except (TypeError, ValueError, KeyError) as error:
        raise PlanError(f"The file does not hold a complete {cls.__name__}: {error}.") from error
