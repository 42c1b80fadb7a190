"""One plan for all processes of a job: process 0 plans, the others take its plan.

    before    all processes must have traced the same step, with the same options and versions     `_facts`
    during    plans that process 0 wants to measure are run by all processes                       `_leading`,
              `_following`
    after     the others have the plan of process 0, or raise the error that it raised

Planning on each process would be simpler, but a search with a time limit depends on the clock, so two processes could
get different plans.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import replace
from importlib import metadata
from typing import Any

import jax

from alpa_lite import errors
from alpa_lite.api.plan_cache import Answer, Cache, content_digest, own_digest, planned
from alpa_lite.errors import AlpaLiteError, PlanError
from alpa_lite.inter_op.plan_request import PlanRequest
from alpa_lite.lower.instructions import Program
from alpa_lite.plan.plan import Plan, fingerprint
from alpa_lite.planners.planner import Planner
from alpa_lite.runtime.job.consensus import agreed_data, same_everywhere

_PACKAGES = ("alpa_lite", "jax", "jaxlib")


def planned_together(planner: Planner, request: PlanRequest, kept: Cache) -> Answer:
    """Run `plan_cache.planned` on process 0, and return its answer on all processes.

    Raises:
        MismatchError: the processes want plans for different steps; raised on all of them.
        AlpaLiteError: the error that process 0 raised; raised on all of them.
    """
    if jax.process_count() == 1:
        return planned(planner, request, kept)
    same_everywhere(_facts(planner, request))
    return _leading(planner, request, kept) if jax.process_index() == 0 else _following(request)


def check_same_program(plan: Plan, program: Program, donated: object) -> None:
    """Raise `MismatchError` on all processes unless they are about to run the same program of the same plan."""
    if jax.process_count() > 1:
        facts = {"plan": _digest(json.dumps(plan.to_json())), "program": _digest(str(program))}
        same_everywhere({**_versions(), **facts, "donated arguments": str(donated)})


def _versions() -> dict[str, str]:
    versions = {name: metadata.version(name) for name in _PACKAGES}
    return {"Python": platform.python_version(), **versions, "source of alpa_lite and its solvers": own_digest()[:12]}


def _facts(planner: Planner, request: PlanRequest) -> Mapping[str, str]:
    asked = (request.num_microbatches, request.on_non_additive)
    return {
        **_versions(),
        f"step {request.function!r}, traced as": fingerprint(request.step_at(1, 0))[:12],
        "planner": f"{planner.name} {content_digest(planner)}".rstrip(),
        "cluster": f"{request.cluster.name} {content_digest(request.cluster)}",
        "options": str(asked),
    }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _leading(planner: Planner, request: PlanRequest, kept: Cache) -> Answer:
    measure = request.measure

    def measured(plan: Plan) -> float:
        # Every process must run the plan, since its collectives span all of them.
        agreed_data({"measure": plan.to_json()})
        return measure(plan) if measure is not None else 0.0

    try:
        answer = planned(planner, replace(request, measure=measured if measure is not None else None), kept)
    except Exception as error:
        kind = type(error).__name__ if isinstance(error, AlpaLiteError) else PlanError.__name__
        text = str(error) if isinstance(error, AlpaLiteError) else f"Process 0 could not plan: {error!r}."
        agreed_data({"error": kind, "text": text})
        raise
    agreed_data({"plan": answer.plan.to_json(), "cached": answer.cached})
    return answer


def _following(request: PlanRequest) -> Answer:
    request.progress("waiting for the plan of process 0")
    while True:
        said: dict[str, Any] = agreed_data(None)
        if "error" in said:
            raise getattr(errors, said["error"], PlanError)(said["text"])
        if "plan" in said:
            return Answer(plan=Plan.from_json(said["plan"]), cached=said["cached"])
        if request.measure is not None:
            request.measure(Plan.from_json(said["measure"]))
