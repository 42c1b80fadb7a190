"""Explain why a memory limit is too low and what would suffice, and compute the trade-off between memory and time.

leanest      P = min peak(x) over the choices of finite cost; P is proven the smallest
             peak once nothing fits P - 1, since bytes are whole numbers                  ``explain_infeasible``
at P         x = argmin cost(x)  with  peak(x) <= P: its peak is P, and its usage
             shows which nodes hold how much memory, and when                             ``explain_infeasible``
time         t = argmax U(t);  over = U(t) - limit;  U(t) = sum of the nodes' bytes at t  ``_worst``
impossible   a node or an edge without a finite entry after the removal of all
             strategies without a finite partner at a neighbour                           ``_conflict``
front        c(L) = min cost(x)  with  peak(x) <= L, a step function that falls with L    ``pareto_front``
one answer   x at L with peak p settles c for all limits from p to L                      ``_Gap``
next limit   the middle of the gap of largest bytes times seconds; its highest limit
             if the last answer was no cheaper than the gap's lower end                   ``_Gap.limit``
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from alpa_lite.intra_op.problem import Problem, Solution, Status, evaluate, usage_over_time
from alpa_lite.intra_op.solvers.memory_search import Leanest, Solve, leanest, prove_leanest
from alpa_lite.intra_op.solvers.portfolio import Portfolio
from alpa_lite.intra_op.solvers.solver import PROOF_TOLERANCE, Solver

_LEAST_SECONDS = 1.0
"""The least time in seconds that one solve gets while time is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeBytes:
    """The bytes that one node keeps alive at a time."""

    node: int
    bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Infeasibility:
    """Explanation why no choices fit into ``limit_bytes``, with the smallest limit that would suffice.

    ``impossible``: it is proven that no choices have finite cost, whatever the limit; ``conflict`` then names a node,
    or the two nodes of an edge, without a finite entry (empty if no single one is to blame).

    ``smallest_limit_bytes``: the smallest peak of choices of finite cost if ``proven``, else the smallest peak that a
    search reached (inf if it reached none). It is proven that no limit below ``bound_bytes`` suffices. ``choices`` are
    the cheapest ones reached under that limit: they cost ``cost`` seconds, and ``bound`` (seconds) is a proven lower
    bound. Their memory usage peaks at ``time``, ``over_bytes`` above the given limit (0 if that suffices); ``nodes``
    are alive then, largest first, and their bytes sum up to the usage.
    """

    limit_bytes: float | None
    impossible: bool
    conflict: tuple[int, ...] = ()
    smallest_limit_bytes: float = math.inf
    bound_bytes: float = math.inf
    choices: tuple[int, ...] | None = None
    cost: float = math.inf
    bound: float = math.inf
    time: int | None = None
    over_bytes: float = 0.0
    nodes: tuple[NodeBytes, ...] = ()

    @property
    def proven(self) -> bool:
        """Return True if it is proven that no limit below ``smallest_limit_bytes`` suffices."""
        return self.bound_bytes >= self.smallest_limit_bytes

    def sentence(
        self,
        *,
        name_of: Callable[[int], str] = "node {}".format,
        show_bytes: Callable[[float], str] = "{:,.0f} bytes".format,
        num_names: int = 3,
    ) -> str:
        """Describe the limit, the memory needed, its ``num_names`` largest holders, and a remedy."""
        if self.impossible:
            return f"No choices have finite cost, with however much memory{self._why(name_of)}."
        if self.choices is None:
            return "No choices of finite cost were found in the time; allow more time to learn what would fit."
        if self.limit_bytes is None or self.over_bytes == 0.0:
            given = "There is no limit" if self.limit_bytes is None else f"{show_bytes(self.limit_bytes)} suffice"
            return f"{given}: there are choices that use at most {show_bytes(self.smallest_limit_bytes)}."
        named = [f"{show_bytes(each.bytes)} of {name_of(each.node)}" for each in self.nodes[:num_names]]
        rest = self.nodes[num_names:]
        if rest:
            named.append(f"{show_bytes(sum(each.bytes for each in rest))} of {len(rest)} more")
        return (
            f"The limit is {show_bytes(self.limit_bytes)}, but {self._needed(show_bytes)}. The cheapest choices that "
            f"need no more overrun the limit by {show_bytes(self.over_bytes)} at time {self.time}, when "
            f"{_listed(named)} {'is' if len(named) == 1 else 'are'} alive. Raise the limit to "
            f"{show_bytes(self.smallest_limit_bytes)}, where the best choices found cost {self.cost:.4g} s, or make "
            "these smaller."
        )

    def _needed(self, show_bytes: Callable[[float], str]) -> str:
        needed = show_bytes(self.smallest_limit_bytes)
        if self.proven:
            return f"all choices of finite cost need at least {needed}"
        least = f", and none can need less than {show_bytes(self.bound_bytes)}" if self.bound_bytes > 0.0 else ""
        return f"the leanest choices found need {needed}{least}"

    def _why(self, name_of: Callable[[int], str]) -> str:
        if not self.conflict:
            return ": each strategy can be had, but no combination of them; allow more pairs of strategies"
        names = [name_of(node) for node in self.conflict]
        if len(names) == 1:
            return f": {names[0]} has no strategy of finite cost; give it one"
        return f": {_listed(names)} have no pair of strategies left that they and their neighbours allow; allow one"


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One point of the Pareto front: the best choices within ``limit_bytes``.

    They use ``peak_bytes`` per device and cost ``cost`` seconds; ``bound`` and ``status`` are as in ``Solution``.
    """

    limit_bytes: float
    peak_bytes: float
    cost: float
    bound: float
    status: Status
    choices: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Budget:
    """A solver and the deadline (``time.perf_counter()`` seconds) of all of its calls together."""

    solver: Solver
    deadline: float

    @property
    def left(self) -> float:
        return self.deadline - time.perf_counter()

    @property
    def solve(self) -> Solve:
        # Even without time left, a solver needs some to answer at all.
        return lambda problem, seconds: self.solver.solve(problem, time_limit_seconds=max(seconds, 0.05))

    def best(self, problem: Problem, limit_bytes: float | None, *, share: float) -> Solution:
        """Solve under another limit in a `share` of the remaining time, but no less than a solver needs to start."""
        seconds = max(share * self.left, min(_LEAST_SECONDS, self.left))
        return self.solve(replace(problem, limit_bytes=limit_bytes), seconds)


def _budget(solver: Solver | None, seconds: float) -> _Budget:
    # The smallest feasible peak is computed once, in `_leanest`; the portfolio need not repeat it for each low limit.
    return _Budget(solver=solver or Portfolio(peak_seconds=0.0), deadline=time.perf_counter() + seconds)


def _leanest(problem: Problem, budget: _Budget) -> Leanest:
    found = leanest(problem, solve=budget.solve, time_limit_seconds=budget.left / 2)
    return prove_leanest(problem, found, solve=budget.solve, time_limit_seconds=budget.left / 2)


# ------------------------------------------------------------------------------------------------------ too low a limit


def explain_infeasible(
    problem: Problem, *, solver: Solver | None = None, time_limit_seconds: float = 30.0
) -> Infeasibility:
    """Compute the smallest sufficient limit, its cost and the holders of memory; ``solver`` None: the portfolio."""
    budget = _budget(solver, time_limit_seconds)
    lean = _leanest(problem, budget)
    if lean.choices is None:
        # A proven bound of infinity means that not even unlimited memory helps.
        impossible = math.isinf(lean.bound_bytes)
        return Infeasibility(
            limit_bytes=problem.limit_bytes,
            impossible=impossible,
            conflict=_conflict(problem) if impossible else (),
            bound_bytes=lean.bound_bytes,
        )
    # The last solve gets all of the time that is left.
    best = budget.best(problem, lean.peak_bytes, share=1.0)
    # The leanest choices do fit, if no cheaper ones were reached in time.
    choices = lean.choices if best.choices is None else best.choices
    moment, nodes = _worst(problem, choices)
    used = sum(each.bytes for each in nodes)
    return Infeasibility(
        limit_bytes=problem.limit_bytes,
        impossible=False,
        smallest_limit_bytes=lean.peak_bytes,
        bound_bytes=lean.bound_bytes,
        choices=choices,
        cost=evaluate(problem, choices).cost,
        bound=best.bound,
        time=moment,
        over_bytes=0.0 if problem.limit_bytes is None else max(used - problem.limit_bytes, 0.0),
        nodes=nodes,
    )


def _worst(problem: Problem, choices: Sequence[int]) -> tuple[int | None, tuple[NodeBytes, ...]]:
    """Return the first time of the largest usage, and the bytes that each node keeps alive then, largest first."""
    times, alive = usage_over_time(problem, choices)
    if times.size == 0:
        return None, ()
    moment = int(times[alive.argmax()])
    starts, ends = problem.usage_times.T
    # Half-open intervals: what ends at this moment is free already.
    here = np.flatnonzero((starts <= moment) & (moment < ends))
    nodes = problem.usage_nodes[here]
    chosen = np.asarray(choices, dtype=np.intp)[nodes]
    held = np.zeros(problem.num_nodes)
    np.add.at(held, nodes, problem.usage_bytes.values[problem.usage_bytes.starts[here] + chosen])
    largest = sorted(np.flatnonzero(held).tolist(), key=lambda node: (-held[node], node))
    return moment, tuple(NodeBytes(node=node, bytes=float(held[node])) for node in largest)


def _conflict(problem: Problem) -> tuple[int, ...]:
    """Return a node, or the nodes of an edge, without a finite entry once arc consistency has removed strategies.

    Arc consistency removes each strategy without a finite partner at some neighbour, until nothing changes. The result
    is empty if every node and edge retains a finite entry, which does not prove that finite choices exist.
    """
    possible: list[NDArray[np.bool_]] = [np.isfinite(costs) for costs in problem.node_costs]
    for node, left in enumerate(possible):
        if not left.any():
            return (node,)
    edges = [(edge.source, edge.target, np.isfinite(edge.costs)) for edge in problem.edges]
    changed = True
    while changed:
        changed = False
        for source, target, finite in edges:
            pairs = finite & possible[source][:, None] & possible[target][None, :]
            if not pairs.any():
                return (source, target)
            # A strategy of the source needs a pair in its row, one of the target a pair in its column.
            for node, axis in ((source, 1), (target, 0)):
                left = np.logical_or.reduce(pairs, axis=axis)
                changed |= bool((left != possible[node]).any())
                possible[node] = left
    return ()


# --------------------------------------------------------------------------------------------------------- memory, time


def pareto_front(
    problem: Problem, *, num_points: int = 8, solver: Solver | None = None, time_limit_seconds: float = 60.0
) -> tuple[Point, ...]:
    """Return up to ``num_points`` limits with their best choices, by growing peak and strictly falling cost.

    The first point has the smallest feasible limit; beyond the last, more memory saves no time. The front is complete
    if the solver is exact, the front has no more points and the time suffices; otherwise it has both ends, and points
    between them that leave no large gap. The problem's own limit is ignored. The front is empty when no choices of
    finite cost are reached. ``solver`` is the portfolio if None.

    Raises ValueError when ``num_points`` is less than two.
    """
    if num_points < 2:
        raise ValueError(f"A front of {num_points} points was asked for; its two ends are the least.")
    budget = _budget(solver, time_limit_seconds)
    # Two fifths of the time go to the leanest choices; the two ends of the front and its gaps share the rest.
    lean = _leanest(problem, replace(budget, deadline=budget.deadline - 0.6 * budget.left))
    if lean.choices is None:
        return ()
    first = _point(problem, budget, lean.peak_bytes, share=0.3) or _unsolved(problem, lean)
    last = _point(problem, budget, None, share=0.3)
    points = [first, *filter(None, [last])]
    # Bytes are whole numbers, so that the next larger limit is one byte more.
    gaps = _open([_Gap(below=first, above=each, first_bytes=first.limit_bytes + 1.0) for each in points[1:]])
    while gaps and budget.left > 0.0 and (missing := num_points - len(_front(points))) > 0:
        # The largest rectangle can hide the most, so that it is explored first.
        gap = max(gaps, key=lambda each: each.area)
        gaps.remove(gap)
        # The time is divided evenly among the missing points, with one share in reserve.
        found = _point(problem, budget, gap.limit, share=1.0 / (missing + 1))
        points += filter(None, [found])
        gaps += _open(gap.split(found))
    return _front(points)


def _point(problem: Problem, budget: _Budget, limit_bytes: float | None, *, share: float) -> Point | None:
    solution = budget.best(problem, limit_bytes, share=share)
    if solution.choices is None:
        return None
    return Point(
        # Without a limit, the peak of the answer is the least limit under which it can be had.
        limit_bytes=solution.peak_bytes if limit_bytes is None else limit_bytes,
        peak_bytes=solution.peak_bytes,
        cost=solution.cost,
        bound=solution.bound,
        status=solution.status,
        choices=solution.choices,
    )


def _unsolved(problem: Problem, lean: Leanest) -> Point:
    """Return the point of the leanest choices, for when no cheaper ones were reached under their peak in time."""
    choices = lean.choices or ()
    return Point(
        limit_bytes=lean.peak_bytes,
        peak_bytes=lean.peak_bytes,
        cost=evaluate(problem, choices).cost,
        bound=-math.inf,
        status=Status.FEASIBLE,
        choices=choices,
    )


def _cheaper(first: Point, second: Point) -> bool:
    """Return True if the first point costs less than the second by more than rounding."""
    return first.cost < second.cost - PROOF_TOLERANCE * max(abs(first.cost), abs(second.cost))


def _front(points: Iterable[Point]) -> tuple[Point, ...]:
    """Return the points that no other one matches in both peak and cost, by growing peak."""
    kept: list[Point] = []
    # By growing peak, so that a point must be cheaper than all leaner ones, of which the last kept is cheapest.
    for point in sorted(points, key=lambda each: (each.peak_bytes, each.cost)):
        if not kept or _cheaper(point, kept[-1]):
            kept.append(point)
    return tuple(kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gap:
    """The unexplored limits from ``first_bytes`` to just below the peak of ``above``.

    ``fruitless``: the last answer between the two points was no cheaper than ``below``.
    """

    below: Point
    above: Point
    first_bytes: float
    fruitless: bool = False

    @property
    def last_bytes(self) -> float:
        return self.above.peak_bytes - 1.0

    @property
    def area(self) -> float:
        """The bytes times seconds of the gap: an upper bound of the part of the front that may be hidden in it."""
        return (self.above.peak_bytes - self.first_bytes) * (self.below.cost - self.above.cost)

    @property
    def limit(self) -> float:
        """The limit in bytes to solve for next."""
        # Halving finds steps in the middle; after a fruitless answer the next step, if any, is sought from above.
        return self.last_bytes if self.fruitless else float(math.floor((self.first_bytes + self.last_bytes) / 2))

    def split(self, found: Point | None) -> Iterable[_Gap]:
        """Return the gaps that remain after an answer at ``limit``."""
        rest = replace(self, first_bytes=self.limit + 1.0)
        if found is None or not _cheaper(found, self.below):
            return (replace(rest, fruitless=True),)
        return (replace(self, above=found, fruitless=False), replace(rest, below=found, fruitless=False))


def _open(gaps: Iterable[_Gap]) -> list[_Gap]:
    """Return the gaps that can still hide a point of the front."""
    return [gap for gap in gaps if gap.first_bytes <= gap.last_bytes and _cheaper(gap.above, gap.below)]
