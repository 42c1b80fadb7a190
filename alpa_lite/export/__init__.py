"""A plan in the form of other programs: `Plan.export`.

Input: a plan, and for a module of JAX the step that it was made for. Output: text, such as a module of plain JAX
(`plain_jax`). Nothing that is written imports alpa_lite. Read `targets` first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from alpa_lite.text import View, register_views

if TYPE_CHECKING:
    from alpa_lite.plan.plan import Plan


def register() -> None:
    """Register the view of a plan as another program; called once, when the package is imported."""
    register_views({View.PLAN_EXPORT: _exported})


def _exported(plan: Plan, target: str, **options: object) -> str:
    # Imported when it is first called: planning and running do without.
    from alpa_lite.export.targets import exported

    return exported(plan, target, **options)
