"""The base class of planners: a request goes in, a `Plan` comes out."""

from __future__ import annotations

from abc import ABC, abstractmethod

from alpa_lite.inter_op.plan_request import PlanRequest
from alpa_lite.plan.plan import Plan


class Planner(ABC):
    """Finds a plan for a request. Implementations are frozen dataclasses: their fields are the user's options."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Short name for tables."""

    def slowdown(self, num_microbatches: int) -> float:
        """How many times as long as its work divided over all devices the loop over so many micro-batches takes at
        least, if all devices are alike."""
        del num_microbatches
        return 1.0

    @abstractmethod
    def plan(self, request: PlanRequest) -> Plan:
        """Raises `PlanError` (or a subclass) when there is no plan."""
