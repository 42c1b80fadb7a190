"""The program of an exported pipeline: what the module itself traces, with the numbers that its tables are about."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from alpa_lite import _jax
from alpa_lite.errors import PlanError
from alpa_lite.export.module_text import filled_template
from alpa_lite.plan.plan import Plan
from alpa_lite.trace.trace import Traced

PIPELINE_TEMPLATE = "pipeline_jax.py.txt"

_TABLES = ("SUMMARY", "NOT_SAID", "MESHES", "RESULTS", "TASKS", "ORDER", "CONSTRAINTS", "INSIDE", "RECEIVED", "SUMS")
_EMPTY = {
    **dict.fromkeys(_TABLES, ""),
    **dict.fromkeys(("COMBINED", "RETURNED", "ONCE", "OWN_COLUMNS"), "{}"),
    **{"IMPORT": "", "DEFAULT": "", "DONATED": "()", "AHEAD": "", "FINGERPRINT": ""},
}


def module_of(values: Mapping[str, str]) -> dict[str, Any]:
    """Return the names of a pipeline's module with these values of its template, and empty tables for the rest."""
    names = dict[str, Any](__name__="exported")
    exec(compile(filled_template(PIPELINE_TEMPLATE, {**values, **_EMPTY}), PIPELINE_TEMPLATE, "exec"), names)
    return names


def traced_by_module(names: Mapping[str, Any], plan: Plan, traced: Traced) -> Any:
    """Return the program that a module traces. Raises `PlanError` where the user's code fails at that size."""
    positional, _ = jax.tree.unflatten(traced.inputs.tree, traced.inputs.leaves)
    args = tuple(positional[n] for n in sorted(positional))
    with _jax.no_mesh():
        try:
            return names["trace"](traced.fun, args)
        # The user's code may raise anything at a size that it was not written for.
        except Exception as error:
            raise PlanError(
                f"{plan.name} cannot be exported as plain JAX: the module traces {traced.name} at the size of a "
                f"micro-batch, which fails ({str(error).rstrip('.')}). Plan with num_microbatches=1, or export to "
                '"stablehlo".'
            ) from error
