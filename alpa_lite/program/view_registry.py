"""Views: how programs, plans and instruction lists show themselves.

The room that draws them, `alpa_lite.inspection`, comes after the rooms that define them, and registers its functions
here when the package is imported. A value asks for its view by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum, auto
from typing import Any


class View(Enum):
    """What can be asked of a value."""

    GRAPH_HTML = auto()
    GRAPH_TEXT = auto()
    GRAPH_SUMMARY = auto()
    INSTRUCTIONS_HTML = auto()
    INSTRUCTIONS_TEXT = auto()
    INSTRUCTIONS_SUMMARY = auto()
    PLAN_TEXT = auto()
    PLAN_PAGE = auto()
    PLAN_FRAGMENT = auto()
    PLAN_EXPLANATION = auto()
    PLAN_TIME = auto()
    PLAN_MEMORY = auto()
    PLAN_DIFF = auto()


_views: dict[View, Callable[..., str]] = {}


def register_views(views: Mapping[View, Callable[..., str]]) -> None:
    """Make functions known by which values are shown; each takes the value first and returns text."""
    _views.update(views)


def view(kind: View, *arguments: Any, **options: Any) -> str:
    """Return the view of ``arguments[0]`` of this kind."""
    return _views[kind](*arguments, **options)
