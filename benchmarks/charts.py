"""Charts of numbers as SVG, in the style and the colours of the pages of plans, for the documentation.

bars_svg      groups of bars side by side, one bar per series
shares_svg    rows that are divided into parts, which add up to one
lines_svg     a line per series over a logarithmic axis
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from alpa_lite.inspection.page.drawings import kind_class
from alpa_lite.inspection.page.elements import STAGES
from alpa_lite.text import show_seconds

_WIDTH, _HEIGHT = 720.0, 190.0
_LEFT, _TOP, _BOTTOM = 52.0, 34.0, 34.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Values with a name; None where there is none."""

    name: str
    values: tuple[float | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedTask:
    """A task or a transfer of a stage, with its times since the beginning of the step in seconds."""

    stage: int
    kind: str
    start: float
    end: float


def spans_svg(tasks: Sequence[TimedTask], longest: float) -> str:
    """Return a row for each stage, its tasks above and its transfers below, up to `longest` seconds."""
    row, scale = 34.0, (_WIDTH - _LEFT) / longest
    stages = 1 + max(task.stage for task in tasks)
    parts = [_text(0, row * stage + 18, f"stage {stage}") for stage in range(stages)]
    for task in tasks:
        kind = kind_class(task.kind)
        below, height = (26, 6) if kind == "receive" else (4, 20)
        width = max((task.end - task.start) * scale - 0.4, 0.4)
        parts.append(
            f'<rect class="{kind}" x="{_LEFT + task.start * scale:.1f}" y="{row * task.stage + below:.0f}" '
            f'width="{width:.1f}" height="{height}"/>'
        )
    height = row * stages + 16
    parts.append(_text(_LEFT, height - 4, "0") + _text(_WIDTH, height - 4, show_seconds(longest), anchor="end"))
    return _drawn(parts, height)


def bars_svg(groups: Sequence[str], series: Sequence[Series], *, unit: str, digits: int = 0) -> str:
    """Return bars, a group for each name with a bar for each series; `unit` is what the vertical axis counts."""
    top = _round_up(max(value for each in series for value in each.values if value is not None))
    scale = (_HEIGHT - _TOP - _BOTTOM) / top
    across = (_WIDTH - _LEFT) / len(groups)
    width = min(30.0, 0.8 * across / len(series))
    parts = [_legend([each.name for each in series]), *_grid(top, scale, unit)]
    for number, name in enumerate(groups):
        middle = _LEFT + (number + 0.5) * across
        parts.append(_text(middle, _HEIGHT - 16, name, anchor="middle"))
        for place, each in enumerate(series):
            value, left = each.values[number], middle + (place - len(series) / 2) * width
            if value is None:
                parts.append(_text(left + width / 2, _HEIGHT - _BOTTOM - 3, "–", anchor="middle", small=True))
                continue
            height = value * scale
            parts.append(_box(left, _HEIGHT - _BOTTOM - height, width - 2, height, place))
            shown = f"{value:.{digits}f}"
            parts.append(
                _text(left + width / 2 - 1, _HEIGHT - _BOTTOM - height - 3, shown, anchor="middle", small=True)
            )
    return _drawn(parts, _HEIGHT)


def shares_svg(rows: Sequence[tuple[str, Sequence[float]]], parts: Sequence[str]) -> str:
    """Return rows of parts, which are shares of one, each with its percentage where there is room."""
    left, room = 170.0, _WIDTH - 170.0
    drawn = [_legend(parts)]
    for number, (name, values) in enumerate(rows):
        top, x = _TOP + 26 * number, left
        drawn.append(_text(0, top + 14, name))
        for place, share in enumerate(values):
            drawn.append(_box(x, top, max(share * room - 1, 0.0), 20, place))
            if share > 0.06:
                drawn.append(
                    f'<text class="on" x="{x + share * room / 2:.1f}" y="{top + 13:.1f}">{100 * share:.0f} %</text>'
                )
            x += share * room
    return _drawn(drawn, _TOP + 26 * len(rows))


def lines_svg(places: Sequence[float], series: Sequence[Series], *, axis: str, unit: str) -> str:
    """Return lines over places on a logarithmic axis, with a mark at each value."""
    top = _round_up(max(value for each in series for value in each.values if value is not None))
    scale = (_HEIGHT - _TOP - _BOTTOM) / top
    low, high = math.log(places[0]), math.log(places[-1])
    xs = [_LEFT + 30 + (math.log(place) - low) / (high - low) * (_WIDTH - _LEFT - 70) for place in places]
    parts = [_legend([each.name for each in series]), *_grid(top, scale, unit)]
    parts += [_text(x, _HEIGHT - 18, f"{place:,.0f}", anchor="middle") for x, place in zip(xs, places, strict=True)]
    parts.append(_text(_WIDTH, _HEIGHT - 4, axis, anchor="end", small=True))
    for number, each in enumerate(series):
        points = [(x, _HEIGHT - _BOTTOM - v * scale) for x, v in zip(xs, each.values, strict=True) if v is not None]
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(
            f'<g class="{_class(number)}">'
            f'<polyline points="{joined}" style="fill:none;stroke:var(--c);stroke-width:2"/>'
        )
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" style="fill:var(--c)"/>' for x, y in points]
        parts.append("</g>")
    return _drawn(parts, _HEIGHT)


def _class(number: int) -> str:
    return f"stage-{number % len(STAGES)}"


def _box(x: float, y: float, width: float, height: float, number: int) -> str:
    return (
        f'<rect class="{_class(number)}" style="fill:var(--c)" x="{x:.1f}" y="{y:.1f}" '
        f'width="{width:.1f}" height="{height:.1f}"/>'
    )


def _text(x: float, y: float, words: str, *, anchor: str = "start", small: bool = False) -> str:
    kind = ' class="small"' if small else ""
    return f'<text{kind} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _legend(names: Sequence[str]) -> str:
    parts, x = list[str](), 0.0
    for number, name in enumerate(names):
        parts.append(_box(x, 4, 10, 10, number) + _text(x + 15, 13, name))
        x += 35 + 6.2 * len(name)
    return "".join(parts)


def _grid(top: float, scale: float, unit: str) -> list[str]:
    """Return four lines of equal distance with their values, and the unit above them."""
    parts = [_text(_LEFT - 6, _TOP - 8, unit, anchor="end", small=True)]
    for quarter in range(5):
        value = top * quarter / 4
        y = _HEIGHT - _BOTTOM - value * scale
        parts.append(f'<path class="host" d="M{_LEFT:.0f} {y:.1f}H{_WIDTH:.0f}"/>')
        parts.append(_text(_LEFT - 6, y + 4, f"{value:g}", anchor="end"))
    return parts


def _round_up(value: float) -> float:
    """Return the next larger number whose quarters are short to write."""
    size = 10.0 ** math.floor(math.log10(value))
    return next(size * step for step in (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10, 12) if size * step >= value)


def _drawn(parts: Sequence[str], height: float) -> str:
    return f'<svg viewBox="0 0 {_WIDTH:.0f} {height:.0f}">\n' + "\n".join(parts) + "\n</svg>\n"
