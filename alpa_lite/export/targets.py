"""The targets of `Plan.export`: each is a function of a plan that returns the text of a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature

from alpa_lite.errors import PlanError
from alpa_lite.export.flax_rules import flax_rules
from alpa_lite.export.maxtext import maxtext
from alpa_lite.export.mpmd import mpmd_module
from alpa_lite.export.plain_jax import plain_jax
from alpa_lite.export.stage_programs import stablehlo
from alpa_lite.export.trainers import deepspeed, megatron, nemo, torchtitan
from alpa_lite.plan.plan import Plan
from alpa_lite.text import did_you_mean

TARGETS: Mapping[str, Callable[..., str]] = {
    "jax": plain_jax,
    "flax": flax_rules,
    "megatron": megatron,
    "nemo": nemo,
    "torchtitan": torchtitan,
    "deepspeed": deepspeed,
    "maxtext": maxtext,
    "stablehlo": stablehlo,
    "mpmd": mpmd_module,
}
"""The function of each target; its keyword arguments are the options of the target."""


def target_of_name(target: str) -> Callable[..., str]:
    """Return the function of a target. Raises `PlanError`, with a close name, if there is none."""
    if target not in TARGETS:
        raise PlanError(
            f"There is no target {target!r} to export a plan to.{did_you_mean(target, TARGETS)} "
            f"Choose one of {', '.join(TARGETS)}."
        )
    return TARGETS[target]


def exported(plan: Plan, target: str, **options: object) -> str:
    """Return a plan in the form of another program.

    Raises:
        PlanError: an unknown target or option, or a plan that cannot be said in this form; the sentence says why.
    """
    write = target_of_name(target)
    known = list(signature(write).parameters)[1:]
    if unknown := [name for name in options if name not in known]:
        listed = f"its options are {', '.join(known)}" if known else "it has none"
        raise PlanError(f"The target {target!r} has no option {unknown[0]!r}; {listed}.")
    return write(plan, **options)
