"""The base class of planners: a request goes in, a `Plan` comes out."""

from __future__ import annotations

from abc import ABC, abstractmethod

from alpa_lite.inter_op.plan_request import PlanRequest
from alpa_lite.plan.plan import Plan


class Planner(ABC):
    """A method that makes a plan. Implementations are frozen dataclasses whose fields are the user's options."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Short name for tables."""

    def slowdown(self, num_microbatches: int) -> float:
        """Return a lower bound on the time of the loop over micro-batches, relative to its work over all devices.

        The bound need only hold if all devices are equal.
        """
        del num_microbatches
        return 1.0

    @abstractmethod
    def plan(self, request: PlanRequest) -> Plan:
        """Return the plan for a request. Raises `PlanError` (or a subclass) if there is none."""
