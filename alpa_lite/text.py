"""Text for people: bytes in KiB, MiB, GiB; seconds in s, ms, µs; shares, counts, and shortened source locations.

Errors, tables and pages all use these functions, so that one quantity has one form everywhere.

Whole programs, plans and instruction lists are rendered by `alpa_lite.inspection`, which their packages must not
import. It registers its functions here as views (`register_views`) when `alpa_lite` is imported, and values look up
their view by name (`view`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from enum import Enum, auto

_BYTES = re.compile(r"^(?P<number>\d+(?:\.\d*)?|\.\d+)\s*(?P<prefix>[kMGT]?)(?P<binary>i?)B?$", re.IGNORECASE)
_PLACE = re.compile(r"(?:[^\s()]*/)?([^\s/():]+/[^\s/():\[\]]+\.\w+:\d+)(?::\d+)?(?: \([^)]*\))?")
_LOCATION = re.compile(r"^(?P<path>.*?):(?P<line>\d+)(?::\d+)?(?P<rest>.*)$")


def show_bytes(num_bytes: float, *, decimals: int | None = None) -> str:
    """Return a number of bytes with a binary unit: `1536` → `1.50 KiB`.

    decimals     digits after the point, for sentences that compare two sizes; None gives three significant digits
    """
    size, digits = float(num_bytes), _decimals if decimals is None else lambda _: decimals
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024.0:
            return f"{size:.0f} B" if unit == "B" else f"{size:.{digits(size)}f} {unit}"
        size /= 1024.0
    return f"{size:.{digits(size)}f} TiB"


def show_usable(usable_bytes: float, reserved_bytes: float, *, decimals: int | None = None) -> str:
    """Return the memory of a device as `12.0 GiB usable, 4.00 GiB kept for the allocator`.

    Without a reserve it is the number alone; `decimals` as for `show_bytes`.
    """
    usable = show_bytes(usable_bytes, decimals=decimals)
    if not reserved_bytes:
        return usable
    return f"{usable} usable, {show_bytes(reserved_bytes, decimals=decimals)} kept for the allocator"


def read_bytes(text: str) -> float:
    """Return the bytes that a text stands for: `40GB` → 4e10, `40GiB` → 40 × 2³⁰, `1e9` → 1e9.

    Raises `ValueError` for text that is neither a size nor a number.
    """
    match = _BYTES.match(text.strip())
    if match is None:
        return float(text)
    # "k" and "K" alike; an "i" makes the prefix binary, as disks and networks count in thousands.
    power = "kmgt".find(match["prefix"].lower()) + 1 if match["prefix"] else 0
    return float(match["number"]) * (1024.0 if match["binary"] else 1000.0) ** power


def show_seconds(seconds: float) -> str:
    """Return a time with a unit: `0.0123` → `12.3 ms`."""
    scale, unit = _unit_of(seconds)
    if seconds == 0:
        return "0 s"
    size = seconds / scale
    return f"{size:.{_decimals(size) if abs(seconds) >= 0.9995 * scale else 2}f} {unit}"


def _unit_of(seconds: float) -> tuple[float, str]:
    """Return the seconds of the unit in which a time is shown, and its name."""
    # 0.9995 and not 1: from there on three digits round up to the next unit, and 999.6 ms would read `1000 ms`.
    units = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
    return next((unit for unit in units if abs(seconds) >= 0.9995 * unit[0]), units[-1])


def show_likely(seconds: float, low: float, high: float) -> str:
    """Return a time with the range that it may lie in, in its unit: `72.0 s (64.5–81.2)`."""
    scale, _ = _unit_of(seconds)
    ends = (f"{end / scale:.{_decimals(end / scale)}f}" for end in (low, high))
    return f"{show_seconds(seconds)} ({'–'.join(ends)})" if seconds else show_seconds(seconds)


def show_about(seconds: float) -> str:
    """Return an estimated time, rounded coarsely as the estimate deserves: `43.2` → `45 s`."""
    # From 57.5 s on, multiples of five would round to 60 s, which is a minute.
    if seconds < 57.5:
        return f"{max(1.0, seconds if seconds < 9.5 else 5 * round(seconds / 5)):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds >= 90 else "1 min"


def show_milliseconds(seconds: float) -> str:
    """Return a time in milliseconds without the unit, for a column whose header names it."""
    size = seconds * 1e3
    return "0" if size == 0 else f"{size:.{_decimals(size)}f}"


def show_percent(fraction: float) -> str:
    """Return a fraction as a percentage: `0.123` → `12.3 %`."""
    return f"{100 * fraction:.{_decimals(100 * fraction)}f} %"


def show_ratio(ratio: float) -> str:
    """Return a ratio as a factor: `1.5` → `1.50×`."""
    return f"{ratio:.2f}×"


def show_range(first: int, last: int) -> str:
    """Return a range with both ends included: `2–5`, or `2` if the ends are equal."""
    return str(first) if first == last else f"{first}–{last}"


def show_layers(first: int, last: int) -> str:
    """Return a layer range with both ends included: `layers 2–5`, or `layer 2` if the ends are equal."""
    return f"layer {first}" if first == last else f"layers {first}–{last}"


def show_numbers(numbers: Iterable[int]) -> str:
    """Return a set of whole numbers as ranges: `0–3, 6`."""
    runs: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return ", ".join(show_range(first, last) for first, last in runs)


def show_number(number: float) -> str:
    """Return a number without trailing zeros: `12`, or `0.5` for a task that runs every other step."""
    return f"{number:.10g}"


def show_count(number: float, noun: str) -> str:
    """Return a number with its noun in the singular or plural: `1 stage`, `2 stages`."""
    return f"{show_number(number)} {noun}" + ("" if number == 1 else "es" if noun.endswith(("sh", "ch")) else "s")


def show_first(items: Sequence[str], most: int) -> str:
    """Return the first items as a list, with the number of the others: `a, b and 3 more`."""
    return ", ".join(items[:most]) + (f" and {len(items) - most} more" if len(items) > most else "")


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return " Did you mean 'auto'?" with the name that is closest to an unknown one; "" if none is close."""
    close = get_close_matches(name, list(names), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def one_line(kind: object, text: str, most: int = 200) -> str:
    """Return the `repr` of a value: its class and some words on it in one line, cut off where they are too long."""
    words = " ".join(text.split())
    return f"<{type(kind).__name__} {words if len(words) <= most else words[: most - 1] + '…'}>"


def short_source(source: str) -> str:
    """Return a source location with a short path: `/home/me/models/gpt.py:12:3 (mlp)` → `models/gpt.py:12 (mlp)`."""
    match = _LOCATION.match(source)
    if match is None:
        return source
    path = "/".join(match["path"].replace("\\", "/").split("/")[-2:])
    return f"{path}:{match['line']}{match['rest']}"


def short_sources(text: str) -> str:
    """Return a text in which every source location has a short path and no function name."""
    return _PLACE.sub(r"\1", text)


def _decimals(size: float) -> int:
    # Three significant digits, so that columns of one unit have about one width; a plain zero needs none.
    return 2 if 0 < abs(size) < 10 else 1 if abs(size) < 100 else 0


class View(Enum):
    """The names of the views that a value can be rendered as."""

    GRAPH_HTML = auto()
    GRAPH_TEXT = auto()
    GRAPH_SUMMARY = auto()
    INSTRUCTIONS_HTML = auto()
    INSTRUCTIONS_TEXT = auto()
    INSTRUCTIONS_SUMMARY = auto()
    CHECK_HTML = auto()
    PLAN_TEXT = auto()
    PLAN_LINE = auto()
    PLAN_WARNINGS = auto()
    PLAN_PAGE = auto()
    PLAN_FRAGMENT = auto()
    PLAN_EXPLANATION = auto()
    PLAN_TIME = auto()
    PLAN_MEMORY = auto()
    PLAN_PROFILE = auto()
    PLAN_DIFF = auto()
    PAIR_PAGE = auto()
    PAIR_FRAGMENT = auto()
    PLAN_SHARDING_COSTS = auto()
    PLAN_EXPORT = auto()
    SERVING_TEXT = auto()
    SERVING_HTML = auto()
    SERVING_PAGE = auto()
    SERVING_COMPARISON = auto()


# Filled by `alpa_lite.inspection`; a plain dict suffices, because registering happens once, during the import.
_views: dict[View, Callable[..., str]] = {}


def register_views(views: Mapping[View, Callable[..., str]]) -> None:
    """Register the functions that render values; each takes the value as its first argument and returns text."""
    _views.update(views)


def view(kind: View, *arguments: object, **options: object) -> str:
    """Return the value ``arguments[0]`` rendered as this kind of view."""
    return _views[kind](*arguments, **options)
