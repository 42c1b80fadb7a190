"""Replay: a saved plan, checked against the step and the cluster at hand."""

from __future__ import annotations

from dataclasses import dataclass

from alpa_lite.errors import MismatchError
from alpa_lite.inter_op.plan_request import PlanRequest
from alpa_lite.plan.plan import Plan
from alpa_lite.planners.planner import Planner


@dataclass(frozen=True, kw_only=True)
class Replay(Planner):
    """A saved plan as it is, if it belongs to the step and fits the cluster.

    Attributes:
        saved: the plan. Functions that take a planner also take a `Plan`, and replay it.
    """

    obeys_user_shardings = True

    saved: Plan

    @property
    def name(self) -> str:
        """Name for tables."""
        return f"replay of {self.saved.name}"

    def plan(self, request: PlanRequest) -> Plan:
        """Return the plan. Raises `MismatchError` for another function, other shapes or another number of devices."""
        wanted, count = request.num_microbatches, self.saved.num_microbatches
        if wanted not in ("auto", count):
            raise MismatchError(
                f"This plan is for {count} micro-batches, but num_microbatches={wanted} was given. "
                "Leave it out, or make a new plan for that number."
            )
        step = request.step_at(self.saved.num_microbatches, self.saved.loop_parts)
        self.saved.verify(step, request.cluster)
        return self.saved
