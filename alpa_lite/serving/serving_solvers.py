"""Solvers of serving problems: JellyBean's, the optimum, and the baselines that they are compared with.

Each is a frozen value whose `plan` returns a `ServingPlan`, or raises `InfeasibleError` with the best that can be had.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from alpa_lite.errors import InfeasibleError, PlanError
from alpa_lite.serving.every_assignment import cheapest_of_all
from alpa_lite.serving.exact_assignment import cheapest_assignment, largest_rate
from alpa_lite.serving.model_selection import select_models
from alpa_lite.serving.serving_plan import Loads, ServingPlan
from alpa_lite.serving.worker_assignment import Allocation, AssignmentSearch, Strategy, assign_workers
from alpa_lite.serving.workflow import ServingProblem, within_tiers
from alpa_lite.text import View, show_number, show_percent, view

_EQUAL = 1e-5
"""Relative difference up to which costs count as equal; of these the more accurate plan wins."""

_NEARLY_ALL = 1 - 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingSolver(ABC):
    """A way to choose models and workers."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The name under which tables and the command line have it."""

    @abstractmethod
    def solutions(self, problem: ServingProblem, min_accuracy: float) -> Iterator[tuple[Mapping[str, str], Loads]]:
        """Yield models and loads that it considers, all of which serve the workflow."""

    def plan(self, problem: ServingProblem, min_accuracy: float | None = None) -> ServingPlan:
        """Return the cheapest plan that is found; of equally cheap ones the most accurate.

        Args:
            problem: what to serve.
            min_accuracy: accuracy that is asked for. Default: that of the problem, else any.

        Raises:
            InfeasibleError: no plan is found. The message tells the best that can be had.
        """
        wanted = min_accuracy if min_accuracy is not None else problem.min_accuracy
        wanted = -math.inf if wanted is None else wanted
        best: ServingPlan | None = None
        for variants, loads in self.solutions(problem, wanted):
            plan = ServingPlan(problem=problem, solver=self.name, min_accuracy=wanted, variants=variants, loads=loads)
            if best is None or _is_better(plan, best):
                best = plan
        if best is None:
            raise InfeasibleError(_why_infeasible(problem, wanted, self))
        return best


def _is_better(plan: ServingPlan, best: ServingPlan) -> bool:
    cost, least = plan.dollars_per_hour, best.dollars_per_hour
    return cost < least or (math.isclose(cost, least, rel_tol=_EQUAL) and plan.accuracy > best.accuracy)


@dataclass(frozen=True, slots=True, kw_only=True)
class JellyBean(ServingSolver):
    """Beam search for models, then JellyBean's assignment of workers to each choice.

    Attributes:
        strategy: the tiers that an operator is tried on.
        allocation: how workers are chosen on them.
        beam: choices of models that are kept.
        orders: the greatest number of topological orders.
        states: partial assignments that are kept.
    """

    strategy: Strategy = Strategy.MULTIPLE_TIERS
    allocation: Allocation = Allocation.GREEDY
    beam: int = 10
    orders: int = 10
    states: int = 10

    @property
    def name(self) -> str:
        """`jellybean`, with the options that are not its default."""
        given = (self.strategy, self.allocation)
        if given == (Strategy.MULTIPLE_TIERS, Allocation.GREEDY):
            return "jellybean"
        return f"jellybean ({self.strategy.value}, {self.allocation.value})"

    def solutions(self, problem: ServingProblem, min_accuracy: float) -> Iterator[tuple[Mapping[str, str], Loads]]:
        """Yield every assignment of every choice of the beam."""
        search = AssignmentSearch(
            strategy=self.strategy, allocation=self.allocation, orders=self.orders, states=self.states
        )
        for choice in select_models(problem, min_accuracy, beam=self.beam):
            yield from ((choice.variants, loads) for loads in assign_workers(problem, choice.variants, search))


@dataclass(frozen=True, slots=True, kw_only=True)
class Exact(ServingSolver):
    """The optimum: the integer program for every choice of models that is accurate enough."""

    @property
    def name(self) -> str:
        """`exact`."""
        return "exact"

    def solutions(self, problem: ServingProblem, min_accuracy: float) -> Iterator[tuple[Mapping[str, str], Loads]]:
        """Yield the cheapest assignment of a choice of models, where it is cheaper than all before."""
        yield from _exact(problem, _accurate(problem, min_accuracy))


@dataclass(frozen=True, slots=True, kw_only=True)
class EveryAssignment(ServingSolver):
    """The optimum by trying all models and all sets of workers: small problems, with any prices of links."""

    @property
    def name(self) -> str:
        """`every-assignment`."""
        return "every-assignment"

    def solutions(self, problem: ServingProblem, min_accuracy: float) -> Iterator[tuple[Mapping[str, str], Loads]]:
        """Yield the cheapest assignment of each choice of models."""
        for variants in _accurate(problem, min_accuracy):
            found = cheapest_of_all(problem, variants)
            if found is not None:
                yield variants, found.loads


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudOnly(ServingSolver):
    """A baseline: the optimum with workers of the highest tier alone."""

    @property
    def name(self) -> str:
        """`cloud-only`."""
        return "cloud-only"

    def solutions(self, problem: ServingProblem, min_accuracy: float) -> Iterator[tuple[Mapping[str, str], Loads]]:
        """Yield as `Exact` does, in the highest tier."""
        highest = problem.num_tiers - 1
        yield from _exact(within_tiers(problem, {highest}), _accurate(problem, min_accuracy))


@dataclass(frozen=True, slots=True, kw_only=True)
class BestAccuracy(ServingSolver):
    """A baseline: the most accurate models, with the optimal workers for them."""

    @property
    def name(self) -> str:
        """`best-accuracy`."""
        return "best-accuracy"

    def solutions(self, problem: ServingProblem, min_accuracy: float) -> Iterator[tuple[Mapping[str, str], Loads]]:
        """Yield the optimal workers of the most accurate models."""
        accurate = _accurate(problem, min_accuracy)
        most = max(map(problem.accuracy, accurate), default=math.inf)
        yield from _exact(problem, [variants for variants in accurate if problem.accuracy(variants) == most])


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeFirst(ServingSolver):
    """A baseline: each operator on the lowest tier that is fast enough, not looking at the price of traffic."""

    @property
    def name(self) -> str:
        """`edge-first`."""
        return "edge-first"

    def solutions(self, problem: ServingProblem, min_accuracy: float) -> Iterator[tuple[Mapping[str, str], Loads]]:
        """Yield as `JellyBean` does with `Strategy.SAME_TIER`."""
        yield from JellyBean(strategy=Strategy.SAME_TIER).solutions(problem, min_accuracy)


SERVING_SOLVERS: Mapping[str, ServingSolver] = {
    solver.name: solver
    for solver in (JellyBean(), Exact(), EdgeFirst(), CloudOnly(), BestAccuracy(), EveryAssignment())
}
"""The solvers by name, as the command line takes them."""


def _accurate(problem: ServingProblem, min_accuracy: float) -> list[dict[str, str]]:
    """Return the choices of models that reach an accuracy."""
    return [variants for variants in problem.all_variants() if problem.accuracy(variants) >= min_accuracy]


def _exact(problem: ServingProblem, choices: Sequence[Mapping[str, str]]) -> Iterator[tuple[Mapping[str, str], Loads]]:
    least = math.inf
    for variants in choices:
        # With room for equal costs, of which the more accurate choice is wanted.
        found = cheapest_assignment(problem, variants, below=least * (1 + _EQUAL))
        if found is not None:
            least = min(least, found.dollars_per_hour)
            yield variants, found.loads


# --- what can be had instead ----------------------------------------------------------------------------------------


def _why_infeasible(problem: ServingProblem, wanted: float, solver: ServingSolver) -> str:
    """Return a sentence that tells why there is no plan, and the best that can be had."""
    choices = sorted(problem.all_variants(), key=problem.accuracy, reverse=True)
    best = problem.accuracy(choices[0])
    if best < wanted:
        return (
            f"No models of {problem.name} reach an accuracy of {show_number(wanted)}: the best is {show_number(best)}, "
            f"by {_models(problem, choices[0])}. Ask for less, or give more accurate models."
        )
    for variants in choices:
        if problem.accuracy(variants) > -math.inf and _served(solver, problem, variants):
            return (
                f"{solver.name} finds no workers that serve {problem.name} with an accuracy of {show_number(wanted)}: "
                f"the best it finds at these rates is {show_number(problem.accuracy(variants))}, by "
                f"{_models(problem, variants)}. Ask for less, or add workers."
            )
    multiple, variants = max(((largest_rate(problem, each), each) for each in choices), key=lambda pair: pair[0])
    if multiple >= _NEARLY_ALL:
        return (
            f"{solver.name} finds no workers that serve {problem.name}, but there are some: at most "
            f"{show_percent(multiple)} of its messages, by {_models(problem, variants)}. Use the solver exact."
        )
    return (
        f"The workers cannot serve {problem.name} with any models: at most {show_percent(multiple)} of its messages, "
        f"by {_models(problem, variants)}. Add workers, or lower the rates of the sources."
    )


def _served(solver: ServingSolver, problem: ServingProblem, variants: Mapping[str, str]) -> bool:
    """Return whether a solver finds workers where these are the only models."""
    return any(True for _ in solver.solutions(problem.with_variants(variants), -math.inf))


def _models(problem: ServingProblem, variants: Mapping[str, str]) -> str:
    named = [f"{name} {variants[name]}" for name in problem.order if len(problem.operator(name).variants) > 1]
    return ", ".join(named) or "its models"


# --- side by side ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingComparison:
    """The plan of one solver beside those of others.

    Attributes:
        plan: the plan.
        others: plans of the other solvers that have one.
        refusals: why the others have none, by solver.
    """

    plan: ServingPlan
    others: tuple[ServingPlan, ...]
    refusals: Mapping[str, str]

    def saving(self, other: ServingPlan) -> float:
        """Return the share of another plan's cost that this plan saves; negative where the other is cheaper."""
        # A plan may cost nothing, where workers and links are free.
        return 1.0 - self.plan.dollars_per_hour / other.dollars_per_hour if other.dollars_per_hour else 0.0

    def to_json(self) -> dict[str, object]:
        """Return the plan as JSON data, with the costs of the others."""
        return {
            "problem": self.plan.problem.name,
            **self.plan.to_json(),
            "others": [
                {
                    "solver": other.solver,
                    "dollars_per_hour": other.dollars_per_hour,
                    "worker_dollars_per_hour": other.worker_dollars_per_hour,
                    "link_dollars_per_hour": other.link_dollars_per_hour,
                    "accuracy": other.accuracy,
                    "saving_fraction": self.saving(other),
                }
                for other in self.others
            ],
            "refusals": [{"solver": solver, "reason": reason} for solver, reason in self.refusals.items()],
        }

    def to_html(self, path: str | Path) -> None:
        """Write the plan, its drawing and the comparison as a page."""
        Path(path).write_text(view(View.SERVING_PAGE, self), encoding="utf-8")

    def __str__(self) -> str:
        """Return the plan and the costs of the others as tables."""
        return view(View.SERVING_COMPARISON, self)

    def __repr__(self) -> str:
        """Return the plan in one line."""
        return f"<ServingComparison {self.plan!r} and {len(self.others)} others>"


def compare_solvers(
    problem: ServingProblem, min_accuracy: float | None = None, *, solver: ServingSolver | None = None
) -> ServingComparison:
    """Return the plan of a solver beside those of all others but `EveryAssignment`.

    Args:
        problem: what to serve.
        min_accuracy: accuracy that is asked for. Default: that of the problem, else any.
        solver: the solver of the plan. Default: `JellyBean()`.

    Raises:
        InfeasibleError: the solver finds no plan. The message tells the best that can be had.
    """
    solver = solver or JellyBean()
    plan = solver.plan(problem, min_accuracy)
    others: list[ServingPlan] = []
    refusals: dict[str, str] = {}
    for name, other in SERVING_SOLVERS.items():
        # The twin finds what the integer program finds, in a time that no comparison should take.
        if name in (solver.name, EveryAssignment().name):
            continue
        try:
            others.append(other.plan(problem, min_accuracy))
        # Prices of links that the integer program cannot take are a reason too.
        except PlanError as error:
            refusals[name] = str(error)
    return ServingComparison(plan=plan, others=tuple(others), refusals=refusals)
