"""Views of a plan; nothing here changes one.

Input: a plan, and for some views a lowered program. Output: tables and timelines (`text/`), the reasons behind a
decision (`why/`), and pages and figures (`page/`).
Read `text/tables` first.

Programs, plans and instruction lists show themselves by the functions that `register` enters into
`alpa_lite.text`. Each function is imported when it is first called: drawing pages and repricing plans
need modules that planning and running do without.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from alpa_lite.text import View, register_views

_FUNCTIONS = {
    View.GRAPH_HTML: ("page.notebook", "graph_html"),
    View.GRAPH_TEXT: ("page.notebook", "graph_text"),
    View.GRAPH_SUMMARY: ("page.notebook", "graph_summary"),
    View.INSTRUCTIONS_HTML: ("page.notebook", "program_html"),
    View.INSTRUCTIONS_TEXT: ("page.notebook", "program_text"),
    View.INSTRUCTIONS_SUMMARY: ("page.notebook", "program_summary"),
    View.CHECK_HTML: ("page.notebook", "check_html"),
    View.PLAN_TEXT: ("text.tables", "plan_text"),
    View.PLAN_LINE: ("text.log_lines", "plan_line"),
    View.PLAN_WARNINGS: ("text.log_lines", "plan_warnings"),
    View.PLAN_PAGE: ("page.html", "plan_html"),
    View.PLAN_FRAGMENT: ("page.html", "plan_fragment"),
    View.PLAN_EXPLANATION: ("why.explain", "explain"),
    View.PLAN_TIME: ("why.time_use", "time_use"),
    View.PLAN_MEMORY: ("why.memory_use", "memory_use"),
    View.PLAN_PROFILE: ("why.profile_differences", "profile_differences"),
    View.PLAN_DIFF: ("text.diff", "diff"),
    View.PAIR_PAGE: ("page.pair", "pair_html"),
    View.PAIR_FRAGMENT: ("page.pair", "pair_fragment"),
    View.PLAN_SHARDING_COSTS: ("why.sharding_costs", "sharding_costs"),
    View.SERVING_TEXT: ("text.serving_tables", "serving_text"),
    View.SERVING_COMPARISON: ("text.serving_tables", "comparison_of_serving"),
    View.SERVING_HTML: ("page.serving_drawing", "serving_fragment"),
    View.SERVING_PAGE: ("page.serving_drawing", "serving_page"),
}


def register() -> None:
    """Register all views; called once, when the package is imported."""
    register_views({kind: _later(*place) for kind, place in _FUNCTIONS.items()})


def _later(module: str, name: str) -> Callable[..., str]:
    """Return a function that imports another one when it is called, and converts its result into text."""

    def show(*arguments: object, **options: object) -> str:
        return str(getattr(import_module(f"alpa_lite.inspection.{module}"), name)(*arguments, **options))

    return show
