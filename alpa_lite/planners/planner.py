"""The base class of planners, which turn a request into a `Plan`, and the planner that replays a saved plan."""

from __future__ import annotations

import functools
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from alpa_lite.errors import MismatchError, PlanError
from alpa_lite.inter_op.plan_request import PlanRequest
from alpa_lite.plan.plan import Plan
from alpa_lite.program.user_shardings import UserShardings
from alpa_lite.schedule import Schedule

PlannerClass = TypeVar("PlannerClass", bound=type)


def renamed_options(**names: str) -> Callable[[PlannerClass], PlannerClass]:
    """Let the options of a planner be given under old names (`names`: old → new) too, with a `DeprecationWarning`."""

    def decorate(planner: PlannerClass) -> PlannerClass:
        # Applied to the finished dataclass: its constructor is wrapped, and the class itself stays the one that was
        # declared.
        made = planner.__init__

        @functools.wraps(made)
        def init(self: Any, *args: Any, **options: Any) -> None:
            for old in names.keys() & options.keys():
                message = f"{planner.__name__}({old}=…) is now {planner.__name__}({names[old]}=…)."
                if names[old] in options:
                    # Python raises the same error for an argument that is given twice.
                    raise TypeError(f"{message} Both were given.")
                # Level 2 is the line of the user that makes the planner.
                warnings.warn(message, DeprecationWarning, stacklevel=2)
                options[names[old]] = options.pop(old)
            made(self, *args, **options)

        planner.__init__ = init
        planner.old_options = names
        return planner

    return decorate


def marked(name: str, schedule: Schedule) -> str:
    """Return the name of a planner for tables, in which asynchronous pipelines must not look like the others."""
    return f"{name}, asynchronous" if schedule.is_asynchronous else name


class Planner(ABC):
    """A method that makes a plan. Implementations are frozen dataclasses whose fields are the user's options."""

    old_options: ClassVar[Mapping[str, str]] = {}
    """Options under the names that they had in the release before → the names that they have now."""

    obeys_user_shardings: ClassVar[bool] = False
    """Whether plans have the shardings of the user with `user_shardings="pin"`; other planners refuse that."""

    def demands(self, request: PlanRequest) -> UserShardings | None:
        """Return the shardings that are demands on the step of the plan, beside those that it names; None: as it is.

        The step is traced anew with these before it is planned. Raises `PlanError` if they cannot be determined.
        """
        del request
        return None

    @property
    @abstractmethod
    def name(self) -> str:
        """Short name for tables."""

    @property
    def is_asynchronous(self) -> bool:
        """Whether plans update weights several times per step, so that micro-batches need not add up to the batch."""
        schedule = getattr(self, "schedule", None)
        return isinstance(schedule, Schedule) and schedule.is_asynchronous

    def slowdown(self, num_microbatches: int) -> float:
        """Return a lower bound on the time of the loop over micro-batches, relative to its work over all devices.

        The bound need only hold if all devices are equal.
        """
        del num_microbatches
        return 1.0

    @abstractmethod
    def plan(self, request: PlanRequest) -> Plan:
        """Return the plan for a request. Raises `PlanError` (or a subclass) if there is none."""


def check_synchronous(name: str, *planners: Planner) -> None:
    """Raise `PlanError` for asynchronous planners, on behalf of one that compares plans of the same results."""
    for planner in planners:
        if planner.is_asynchronous:
            raise PlanError(
                f"{name} compares plans that give the same results, but an asynchronous schedule trains with old "
                "weights, which is another optimiser. Ask for it by itself, as in "
                "al.planners.Pipeline(pipeline=4, schedule=al.schedule.PipeDream())."
            )


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

    @property
    def is_asynchronous(self) -> bool:
        """Whether the saved plan is asynchronous."""
        return self.saved.num_updates > 1

    def demands(self, request: PlanRequest) -> UserShardings | None:
        """Return the shardings that the saved plan was made to obey."""
        del request
        return None if self.saved.demands is None else self.saved.demands.as_user_shardings()

    def plan(self, request: PlanRequest) -> Plan:
        """Return the plan. Raises `MismatchError` for another function, other shapes or another number of devices."""
        wanted, count = request.num_microbatches, self.saved.num_microbatches
        if wanted not in ("auto", count):
            raise MismatchError(
                f"This plan is for {count} micro-batches, but num_microbatches={wanted} was given. "
                "Leave it out, or make a new plan for that number."
            )
        step = request.step_of(self.saved)
        self.saved.verify(step, request.cluster)
        return self.saved
