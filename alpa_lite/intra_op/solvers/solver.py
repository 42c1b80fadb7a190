"""The interface of solvers: a frozen object with its options, and ``solve(problem) -> Solution``; what solvers share.

A new solver is one module with one subclass and one entry in ``solvers.SOLVERS``; it inherits the shared tests.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, wait
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from alpa_lite.errors import VerificationError
from alpa_lite.intra_op.problem import Problem, Ragged, Solution, Status, evaluate

_POLL_SECONDS = 0.05

PROOF_TOLERANCE = 1e-9
"""Costs within this relative distance count as equal: it covers the rounding of sums of a few thousand terms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SolveProgress:
    """The progress of a solve: seconds since it began, the best cost and bound (seconds), and its activity."""

    seconds: float
    cost: float
    bound: float
    doing: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """Callbacks by which a caller follows a solve and ends it early; the best choices so far are then the answer."""

    stop: Callable[[], bool] = lambda: False
    report: Callable[[SolveProgress], None] = lambda _: None


@dataclass(slots=True, kw_only=True)
class Clock:
    """The time limit and the reports of one solve; ``offset`` (seconds) is the cost that reductions have removed."""

    seconds: float
    control: Control
    started: float = field(default_factory=time.perf_counter)
    offset: float = 0.0

    @property
    def spent(self) -> float:
        """The seconds since the solve began."""
        return time.perf_counter() - self.started

    @property
    def left(self) -> float:
        """The seconds until the time limit; negative afterwards."""
        return self.seconds - self.spent

    def over(self) -> bool:
        """Return True if the solve should end."""
        return self.left <= 0.0 or self.control.stop()

    def inside(self, offset: float) -> Clock:
        """Return the clock of a problem whose costs are smaller by ``offset``."""
        return replace(self, offset=self.offset + offset)

    def of_one(self, num_parts: int) -> Clock:
        """Return the clock of one of several parts: each has an equal share of what reductions have removed."""
        return replace(self, offset=self.offset / num_parts)

    def is_near(self, cost: float, bound: float, relative_gap: float) -> bool:
        """Return True if cost and bound of the current (reduced) problem are close enough.

        The gap is relative to the cost of the given problem, of which reductions may have removed nearly everything.
        """
        # Compared only with a finite cost: inf - inf would be no number.
        return math.isfinite(cost) and cost - bound <= relative_gap * abs(cost + self.offset)

    def report(self, doing: str, *, cost: float = math.inf, bound: float = -math.inf) -> None:
        """Report the progress to the caller; cost and bound refer to the current (reduced) problem."""
        # The caller knows the given problem only, whose costs include what the reductions have removed.
        offset = self.offset
        self.control.report(SolveProgress(seconds=self.spent, cost=cost + offset, bound=bound + offset, doing=doing))


def run_attended(
    pool: Executor, jobs: Sequence[Callable[[], None]], *, over: Callable[[], bool], halt: NDArray[np.int64]
) -> None:
    """Run jobs in parallel on other threads, so that this one receives signals meanwhile; re-raise their exceptions.

    ``halt[0]`` becomes 1 once ``over`` returns True: compiled loops poll it, and end with what they have.
    """
    running = [pool.submit(job) for job in jobs]
    # The main thread must wake up, since Python delivers signals (Ctrl-C) to it alone and between its own steps.
    while wait(running, timeout=_POLL_SECONDS).not_done:
        if over():
            halt[0] = 1
    # Only now, so that all jobs have ended before an exception leaves: they write to shared arrays.
    for done in running:
        done.result()


def no_halt() -> NDArray[np.int64]:
    """Return the flag for `run_attended` in its initial state."""
    return np.zeros(1, dtype=np.int64)


class ProgramTooLargeError(ValueError):
    """A problem is larger than a solver takes."""


class Solver(ABC):
    """Base class of solvers, which choose one strategy per node."""

    # Solvers are dataclasses with slots, which a base class without would make pointless.
    __slots__ = ()

    @property
    def name(self) -> str:
        """The name of this solver in solutions."""
        return type(self).__name__

    @abstractmethod
    def solve(self, problem: Problem, *, time_limit_seconds: float = 60.0, control: Control | None = None) -> Solution:
        """Return the best choices within the time limit; see ``Status`` for what is proven about them."""


def closes(bound: float, cost: float) -> bool:
    """Return True if ``bound`` proves ``cost`` optimal, up to rounding."""
    return math.isfinite(bound) and bound >= cost - PROOF_TOLERANCE * max(abs(cost), abs(bound))


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One call of a solver: its name, and the ``time.perf_counter()`` at which it began."""

    solver: str
    started: float = field(default_factory=time.perf_counter)

    @property
    def seconds(self) -> float:
        """The seconds since it began."""
        return time.perf_counter() - self.started


def solution_of(
    problem: Problem, choices: Sequence[int], attempt: Attempt, *, bound: float, proven: bool = False
) -> Solution:
    """Return a solution priced by ``evaluate``; OPTIMAL if ``proven`` or if the bound meets the cost.

    Raises VerificationError if the choices are infeasible.
    """
    # Code that no solver shares prices every answer, so that a defect of a solver cannot pass for a plan.
    priced = evaluate(problem, choices)
    if not priced.feasible:
        raise VerificationError(
            f"{attempt.solver} chose what is not feasible: {priced}. This is a defect, please report it."
        )
    optimal = proven or closes(bound, priced.cost)
    return Solution(
        choices=tuple(int(choice) for choice in choices),
        cost=priced.cost,
        status=Status.OPTIMAL if optimal else Status.FEASIBLE,
        # Rounding may lift a solver's bound above the cost of its own optimum.
        bound=min(bound, priced.cost),
        seconds=attempt.seconds,
        solver=attempt.solver,
        peak_bytes=priced.peak_bytes,
    )


def no_solution(
    attempt: Attempt, *, status: Status, bound: float = -math.inf, peak_bytes: float = math.inf
) -> Solution:
    """Return a solution without choices: INFEASIBLE (bound inf) or TIME_LIMIT."""
    return Solution(
        choices=None,
        cost=math.inf,
        status=status,
        # The minimum over no choices at all.
        bound=math.inf if status is Status.INFEASIBLE else bound,
        seconds=attempt.seconds,
        solver=attempt.solver,
        peak_bytes=peak_bytes,
    )


def better(first: Solution, second: Solution) -> Solution:
    """Return the cheaper of two solutions; the second if they cost the same."""
    return first if first.cost < second.cost else second


def largest_cost(problem: Problem) -> float:
    """Return sum_v max finite c_v + sum_uv max finite C_uv (seconds), an upper bound of every finite cost."""
    return sum(_extremes(vectors, np.maximum, -np.inf) for vectors in (problem.node_costs, problem.edge_costs))


def smallest_cost(problem: Problem) -> float:
    """Return sum_v min c_v + sum_uv min C_uv (seconds), a lower bound of every cost."""
    return sum(_extremes(vectors, np.minimum, np.inf) for vectors in (problem.node_costs, problem.edge_costs))


def cost_span(problem: Problem) -> float:
    """Return the largest possible difference in cost between choices of finite cost (seconds), or 1.0 if it is zero."""
    return largest_cost(problem) - smallest_cost(problem) or 1.0


def _extremes(vectors: Ragged, operation: np.ufunc, neutral: float) -> float:
    if not len(vectors):
        return 0.0
    # Forbidden entries are in no choices of finite cost.
    values = np.where(np.isfinite(vectors.values), vectors.values, neutral)
    return math.fsum(operation.reduceat(values, vectors.starts[:-1]).tolist())
