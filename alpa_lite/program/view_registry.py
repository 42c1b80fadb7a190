"""The registry of views: the functions that render programs, plans and instruction lists as text or HTML.

`alpa_lite.inspection` renders values of packages that must not import it. It registers its functions here when
`alpa_lite` is imported, and values look up their view by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum, auto
from typing import Any


class View(Enum):
    """The names of the views that a value can be rendered as."""

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
    PLAN_SHARDING_COSTS = auto()


# Filled by `alpa_lite.inspection`; a plain dict suffices, because registering happens once, during the import.
_views: dict[View, Callable[..., str]] = {}


def register_views(views: Mapping[View, Callable[..., str]]) -> None:
    """Register the functions that render values; each takes the value as its first argument and returns text."""
    _views.update(views)


def view(kind: View, *arguments: Any, **options: Any) -> str:
    """Return the value ``arguments[0]`` rendered as this kind of view."""
    return _views[kind](*arguments, **options)
