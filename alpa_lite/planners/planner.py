"""The base class of planners: a request goes in, a `Plan` comes out."""

from __future__ import annotations

import functools
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

from alpa_lite.inter_op.plan_request import PlanRequest
from alpa_lite.plan.plan import Plan

PlannerClass = TypeVar("PlannerClass", bound=type)


def renamed_options(**names: str) -> Callable[[PlannerClass], PlannerClass]:
    """Let the options of a planner be given under their old names too, with a `DeprecationWarning`.

    names: old name → name.
    """

    def decorate(planner: PlannerClass) -> PlannerClass:
        made = planner.__init__

        @functools.wraps(made)
        def init(self: Any, *args: Any, **options: Any) -> None:
            for old in names.keys() & options.keys():
                message = f"{planner.__name__}({old}=…) is now {planner.__name__}({names[old]}=…)."
                if names[old] in options:
                    raise TypeError(f"{message} Both were given.")
                warnings.warn(message, DeprecationWarning, stacklevel=2)
                options[names[old]] = options.pop(old)
            made(self, *args, **options)

        planner.__init__ = init
        planner.old_options = names
        return planner

    return decorate


class Planner(ABC):
    """A method that makes a plan. Implementations are frozen dataclasses whose fields are the user's options."""

    old_options: ClassVar[Mapping[str, str]] = {}
    """Options under the names that they had in the release before → the names that they have now."""

    obeys_user_shardings: ClassVar[bool] = False
    """Whether plans have the shardings of the user with `user_shardings="pin"`; other planners refuse that."""

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
