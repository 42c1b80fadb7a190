"""Convert frozen dataclasses to plain JSON data and back, driven by their type annotations.

Fields that equal their default are omitted, so that files stay small and old files stay readable. Mappings with integer
keys are written with string keys, as JSON requires. Classes with their own `to_json` and `from_json` use those. The
fields of a dataclass in a field marked `INLINE` stand among those of the object that contains it: such groups have
been introduced without a change of the format.

Files may be damaged or hostile: reading constructs only the annotated classes, never converts a value to another type,
and raises only `PlanError`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import types
import typing
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from alpa_lite.errors import PlanError
from alpa_lite.program.memo import memoized
from cost_models.checks import parse_json

CHECKSUM = "checksum"
"""The key of the file entry that holds the digest of all other entries."""

MAX_BYTES, MAX_VALUES = 16 * 2**20, 1_500_000
"""Limits of a file that is read, in bytes and JSON values; a plan has about 100 bytes and 7 values per op."""

INLINE: Mapping[str, bool] = types.MappingProxyType({"inline": True})
"""Metadata of a field without a default that holds a dataclass: its fields are written without a level of their own."""

# Larger integers do not fit the 64 bits of NumPy and JAX.
_MAX_WHOLE = 2**63
# JSON has no numbers for these.
_NOT_FINITE = ("inf", "-inf", "nan")


def to_text(data: Mapping[str, object]) -> bytes:
    """Return plain data with a checksum as a file's text. Raises `PlanError` for what `from_text` would reject."""
    text = json.dumps({**data, CHECKSUM: _digest(data)}, allow_nan=False).encode()
    try:
        # Read back at once: a plan that can be written but not read would be lost.
        parse_json(text, max_bytes=MAX_BYTES, max_values=MAX_VALUES)
    except ValueError as error:
        raise PlanError(f"This plan cannot be saved: {error}.") from error
    return text


def from_text(text: bytes, path: str | Path) -> Any:
    """Return the plain data of a file's text. Raises `PlanError` for no JSON within the limits, or a wrong checksum.

    A text without a checksum is accepted.
    """
    try:
        data = parse_json(text, max_bytes=MAX_BYTES, max_values=MAX_VALUES)
    except ValueError as error:
        raise PlanError(f"{path} cannot be read as a plan: {error}. Give a file that plan.save wrote.") from error
    if not isinstance(data, dict) or CHECKSUM not in data:
        return data
    given = data.pop(CHECKSUM)
    if given != _digest(data):
        raise PlanError(
            f"{path} was damaged or changed after it was saved: its checksum is not that of its content. Give a file "
            f'as plan.save wrote it. If you changed it on purpose, remove its entry "{CHECKSUM}".'
        )
    return data


def read_file(path: str | Path) -> Any:
    """Return the plain data of a file. Raises `PlanError` if it cannot be opened, or `from_text` rejects the text."""
    try:
        with Path(path).open("rb") as file:
            text = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise PlanError(f"{path} cannot be read as a plan: {error}. Give a file that plan.save wrote.") from error
    return from_text(text, path)


def _digest(data: Mapping[str, object]) -> str:
    """Return the digest of plain data, independent of key order and white space."""
    # Key order and white space are those of this call, not of the file, which an editor may have formatted.
    return "sha256:" + hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def encode(value: object) -> object:
    """Return plain data for a dataclass, a container of dataclasses, or a plain value."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and not hasattr(value, "to_json"):
        return _encode_dataclass(value)
    to_json = getattr(value, "to_json", None)
    if to_json is not None:
        return to_json()
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [encode(item) for item in value]
    # A member of a `StrEnum` is a str, but of another type than the one that reading expects.
    if isinstance(value, Enum):
        return value.value
    return _number(value) if isinstance(value, float) else value


def _encode_dataclass(value: Any) -> dict[str, object]:
    # Not `dataclasses.asdict`: it copies deeply, and does not know `to_json`.
    data: dict[str, object] = {}
    for field in dataclasses.fields(value):
        item = getattr(value, field.name)
        if field.metadata == INLINE:
            data |= _encode_dataclass(item)
        elif not _is_default(value, field):
            data[field.name] = encode(item)
    return data


def _number(value: float) -> int | float | str:
    """Return a number as JSON writes it shortest: an int where exact, and a string for infinity and NaN."""
    if not math.isfinite(value):
        return str(value)
    # Above 2**53 an int would claim digits that the float does not have.
    return int(value) if value == int(value) and abs(value) < 2**53 else value


def _is_default(value: Any, field: dataclasses.Field[Any]) -> bool:
    if field.default is not dataclasses.MISSING:
        return getattr(value, field.name) == field.default
    if field.default_factory is not dataclasses.MISSING:
        return getattr(value, field.name) == field.default_factory()
    return False


def decode(wanted: Any, data: object) -> Any:
    """Return the value of type `wanted` that `encode` wrote as `data`. Raises `PlanError` if the data do not fit it."""
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    # Unions in plans are always of one type and None.
    if origin in (typing.Union, types.UnionType):
        return None if data is None else decode(next(a for a in arguments if a is not type(None)), data)
    if origin is tuple:
        return _decode_tuple(arguments, data)
    if origin is not None and issubclass(origin, Mapping):
        return _decode_mapping(arguments, data)
    if hasattr(wanted, "from_json") or dataclasses.is_dataclass(wanted):
        return _decode_object(wanted, data)
    return _decode_plain(wanted, data)


def _decode_plain(wanted: Any, data: Any) -> Any:
    """Return a scalar or enum; types are compared exactly, since `True` must not pass as an int."""
    is_whole = type(data) is int and abs(data) < _MAX_WHOLE
    if wanted is float and (is_whole or (type(data) is str and data in _NOT_FINITE)):
        return float(data)
    if type(data) is wanted and (is_whole or wanted is not int):
        return data
    if issubclass(wanted, Enum) and data in [member.value for member in wanted]:
        return wanted(data)
    raise PlanError(f"{_shown(data)} stands where the file needs a {wanted.__name__}.")


def _decode_tuple(arguments: tuple[Any, ...], data: object) -> tuple[Any, ...]:
    """Return a tuple: `tuple[X, ...]` from a list of any length, `tuple[X, Y]` from a list of its length."""
    if not isinstance(data, list):
        raise PlanError(f"{_shown(data)} stands where the file needs a list.")
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return tuple([decode(arguments[0], item) for item in data])
    if len(arguments) != len(data):
        raise PlanError(f"A list of {len(data)} stands where the file needs one of {len(arguments)}.")
    return tuple([decode(a, item) for a, item in zip(arguments, data, strict=True)])


def _decode_mapping(arguments: tuple[Any, ...], data: object) -> dict[Any, Any]:
    key_type, item_type = arguments
    return {_key(key_type, key): decode(item_type, item) for key, item in _object(data).items()}


def _key(wanted: Any, text: str) -> Any:
    """Return a mapping key; only the canonical decimal form of an int is accepted, so that keys stay unique."""
    if wanted is str:
        return text
    # `int` also reads signs, underscores and digits of other scripts.
    # Fewer than 19 digits stay below `_MAX_WHOLE`, and take no time to convert.
    if not (text.isascii() and text.isdecimal() and len(text) < 19 and text == str(int(text))):
        raise PlanError(f"{_shown(text)} stands where the file needs a number.")
    return int(text)


def _decode_object(wanted: Any, data: object) -> Any:
    """Return an object, with every error of its constructor turned into a `PlanError`."""
    given = _object(data)
    from_json = getattr(wanted, "from_json", None)
    try:
        return from_json(given) if from_json is not None else _decode_dataclass(wanted, given)
    # The message about an inner value says more than one about the whole object.
    except PlanError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        raise PlanError(f"The file does not hold a complete {wanted.__name__}: {error}.") from error


@memoized(entries=1_000)
def hints_of(cls: Any) -> dict[str, object]:
    """Return the resolved type annotations of a dataclass, memoized."""
    return typing.get_type_hints(cls)


def _decode_dataclass(cls: Any, data: Mapping[str, object]) -> Any:
    """Return a dataclass from the fields in the file; unknown fields are refused, absent ones have their default."""
    hints, values = dict(hints_of(cls)), dict[str, object]()
    for name in _inline_fields(cls):
        inner = hints.pop(name)
        own = hints_of(inner).keys() & data.keys()
        values[name] = _decode_dataclass(inner, {key: data[key] for key in own})
        data = {key: item for key, item in data.items() if key not in own}
    unknown = set(data) - set(hints)
    if unknown:
        raise PlanError(
            f"The file names {sorted(unknown)}, which a {cls.__name__} of this version does not know. It was written "
            "by another version of alpa_lite, or it is no plan."
        )
    return cls(**values, **{name: decode(hints[name], item) for name, item in data.items()})


@memoized(entries=1_000)
def _inline_fields(cls: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(cls) if field.metadata == INLINE)


def _object(data: object) -> Mapping[str, object]:
    if not isinstance(data, Mapping):
        raise PlanError(f"{_shown(data)} stands where the file needs an object.")
    return data


def _shown(data: object) -> str:
    """Return a value of the file for a message, truncated."""
    text = repr(data) if not isinstance(data, (dict, list)) else type(data).__name__
    return text if len(text) <= 40 else f"{text[:40]}…"
