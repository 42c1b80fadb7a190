"""The targets of `Plan.export`: each is a function of a plan that returns the text of a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from alpa_lite.errors import PlanError
from alpa_lite.export.plain_jax import plain_jax
from alpa_lite.plan.plan import Plan
from alpa_lite.text import did_you_mean

TARGETS: Mapping[str, Callable[..., str]] = {"jax": plain_jax}
"""The function of each target; its keyword arguments are the options of the target."""


def exported(plan: Plan, target: str, **options: object) -> str:
    """Return a plan in the form of another program.

    Raises:
        PlanError: an unknown target or option, or a plan that cannot be said in this form; the sentence says why.
    """
    write = TARGETS.get(target)
    if write is None:
        raise PlanError(
            f"There is no target {target!r} to export a plan to.{did_you_mean(target, TARGETS)} "
            f"Choose one of {', '.join(TARGETS)}."
        )
    return write(plan, **options)
