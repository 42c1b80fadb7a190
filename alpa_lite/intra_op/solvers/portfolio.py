"""The default solver: reduce, then eliminate, run HiGHS on small problems, or bound and search on large ones.

    reduce       simplify; without memory rows each connected component is a problem of
                 its own, and equal components are solved once                          ``_solve_parts``
    narrow       elimination yields the best choices without the limit: the optimum if
                 they fit, else a bound, since dropping a constraint only lowers it     ``_eliminate``
    binding      narrow problems that exceed the limit: prices on memory yield good
                 choices and a bound in a few eliminations (memory_search.py)           ``_priced``
    small        HiGHS on arrays, exact                                                 ``_solve_part``
    else         rounds of messages, search, recombination and fixing (rounds.py), with
                 HiGHS as soon as the rest is small                                     ``RoundSearch``
    in haste     any choices within the limit, by search: after the first reductions if
                 all of them take a good part of the time; else last, if there are no
                 choices yet                                                            ``choices_in_haste``

The search in haste is a neighbourhood search that proves nothing:

    starts     the cheapest strategy of each node; that of least bytes times lifetime; random ones   ``_starts``
    search     blocks with and without heat in turn; overrun rows get ever higher prices             ``Neighbourhood``
    ends       at the first choices of finite cost that fit, or when the time is up

``evaluate`` re-prices every answer on the original problem, and no answer overruns the limit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from alpa_lite.intra_op.problem import Edge, FloatArray, IntArray, Problem, Solution, Status, evaluate
from alpa_lite.intra_op.simplify import Simplified, simplify
from alpa_lite.intra_op.solvers.elimination import Elimination, EliminationPlan, cheapest_choices
from alpa_lite.intra_op.solvers.flat_problem import flat_problem, with_finite_costs
from alpa_lite.intra_op.solvers.highs import Highs
from alpa_lite.intra_op.solvers.improvements import connected_parts
from alpa_lite.intra_op.solvers.memory_search import PricedSearch, smallest_peak
from alpa_lite.intra_op.solvers.neighbourhood import Neighbourhood
from alpa_lite.intra_op.solvers.rounds import Rounds, RoundSearch
from alpa_lite.intra_op.solvers.solver import (
    Attempt,
    Clock,
    Control,
    Solver,
    cost_span,
    no_halt,
    no_solution,
    run_attended,
    solution_of,
)
from alpa_lite.program.memo import memoized

_BLOCKS = 500
_COOLING = 1e-3
"""The last heat of a call as a fraction of its first; every other start has heat, first that of a forbidden cost."""
_CALLS_PER_START = 20
_LEAST_CALLS = 3
"""The number of calls after which a start is abandoned once a call changes nothing."""


def choices_in_haste(problem: Problem, *, seconds: float, control: Control) -> tuple[int, ...] | None:
    """Return choices of finite cost within the limit, or None if a search of ``seconds`` reaches none."""
    halt = no_halt()
    # More than any finite costs can differ, so that no saving outweighs a forbidden choice.
    forbidden = 2.0 * cost_span(problem)
    flat = with_finite_costs(flat_problem(problem), forbidden)
    clock = Clock(seconds=seconds, control=control)
    with ThreadPoolExecutor(1) as pool:
        for attempt, start in enumerate(_starts(problem)):
            search = Neighbourhood(flat=flat, seed=attempt, halt=halt)
            # Heat as high as a forbidden cost lets a search leave choices that are forbidden on all sides.
            heat = forbidden if attempt % 2 else 0.0
            for call in range(_CALLS_PER_START):
                before, found = start, list[IntArray]()

                run = partial(
                    search.run, start, np.zeros(flat.room.size), num_blocks=_BLOCKS, first_heat=heat,
                    last_heat=_COOLING * heat,
                )  # fmt: skip
                run_attended(pool, [lambda run=run, found=found: found.append(run())], over=clock.over, halt=halt)
                if search.best is not None and evaluate(problem, search.best.tolist()).feasible:
                    return tuple(search.best.tolist())
                if clock.over():
                    return None
                start = found[0]
                if call >= _LEAST_CALLS and np.array_equal(start, before):
                    break
    return None


def _starts(problem: Problem) -> Iterator[IntArray]:
    """Yield choices from which to start a search, without end."""
    yield _lowest(problem, problem.node_costs.values)
    # Where the cheapest strategies overrun the limit, the leanest ones may be closer to feasible choices.
    yield _lowest(problem, _bytes_times_lifetime(problem))
    random = np.random.default_rng(0)
    while True:
        yield _lowest(problem, random.random(problem.node_costs.values.size))


def _lowest(problem: Problem, values: FloatArray) -> IntArray:
    """Return the strategy of each node with the least value; forbidden strategies come last.

    ``values`` has one entry per strategy, laid out as the node costs.
    """
    values = np.where(np.isfinite(problem.node_costs.values), values, np.inf)
    starts = problem.node_costs.starts.tolist()
    return np.array([int(values[first:last].argmin()) for first, last in itertools.pairwise(starts)])


def _bytes_times_lifetime(problem: Problem) -> FloatArray:
    """Return the sum of bytes times lifetime of each strategy, laid out as the node costs."""
    lifetimes = (problem.usage_times[:, 1] - problem.usage_times[:, 0]).astype(np.float64)
    sizes = problem.usage_bytes.sizes
    within = np.arange(problem.usage_bytes.values.size) - np.repeat(problem.usage_bytes.starts[:-1], sizes)
    total = np.zeros(problem.node_costs.values.size)
    owners = np.repeat(problem.node_costs.starts[problem.usage_nodes], sizes) + within
    np.add.at(total, owners, problem.usage_bytes.values * np.repeat(lifetimes, sizes))
    return total


_PROGRAM_SHARE = 0.4
"""The fraction of the time that HiGHS may take before search begins."""
_HASTE_SHARE = 0.05
"""The fraction of the time that a first answer may take, if reductions may take more than that."""
_LEAST_SECONDS = 1.0
"""The least seconds of a search in haste, even if the time is up."""
_SECONDS_PER_NODE, _SECONDS_PER_PAIR = 1e-4, 1e-6
"""Upper bounds of the seconds of the reductions, on contest instances."""
_SMALL_PROGRAM = 0.3
"""The fraction of the largest program that still precedes search when a gap may remain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Portfolio(Solver):
    """Solver that is exact if the time suffices, and otherwise returns good choices with a proven bound.

    ``relative_gap``: choices proven to be this close to the best are good enough (1e-3 saves most of the time when
    memory binds). ``rounds``: the search of large problems, with its seed; a number of rounds in place of the time
    limit makes it reproducible. ``max_program_entries``: HiGHS gets programs of up to this many pairs of strategies.
    ``peak_seconds``: seconds of the search for the smallest peak when nothing fits; 0 omits it.
    """

    elimination: Elimination = field(default_factory=Elimination)
    rounds: Rounds = field(default_factory=Rounds)
    relative_gap: float = 0.0
    max_program_entries: int = 60_000
    peak_seconds: float = 5.0

    def solve(self, problem: Problem, *, time_limit_seconds: float = 60.0, control: Control | None = None) -> Solution:
        """Return the best choices within the limit; if INFEASIBLE, with the smallest peak that any choices reach."""
        clock = Clock(seconds=time_limit_seconds, control=control or Control())
        solution = self._solve(problem, clock)
        if solution.status is Status.INFEASIBLE and problem.limit_bytes is not None and self.peak_seconds > 0.0:
            peak_bytes = smallest_peak(
                problem,
                # Not `solve`, which would look for the smallest peak of every part that is infeasible.
                solve=lambda part, seconds: self._solve(part, Clock(seconds=seconds, control=clock.control)),
                time_limit_seconds=min(max(clock.left, 0.1), self.peak_seconds),
            )
            solution = replace(solution, peak_bytes=peak_bytes)
        return replace(solution, seconds=clock.spent)

    def _solve(self, problem: Problem, clock: Clock) -> Solution:
        # A problem that was reduced before, for another gap, is not reduced again.
        takes = 0.0 if _known_reductions(problem) else _reduction_seconds(problem)
        # Reductions would exceed the time even further, and a search needs none.
        if clock.over() and takes > _LEAST_SECONDS:
            return self._in_haste(problem, clock)
        hasty: list[Solution] = []

        def early(reduced: Simplified) -> None:
            hasty.append(self._restored(problem, reduced, self._in_haste(reduced.problem, clock)))
            clock.report("searched in haste", cost=hasty[0].cost)

        reduced = _simplified(problem, clock, early if takes > _HASTE_SHARE * clock.left else None)
        clock.report(f"reduced from {problem.num_nodes} to {reduced.problem.num_nodes} nodes")
        if math.isinf(reduced.offset):
            return no_solution(Attempt(solver=self.name, started=clock.started), status=Status.INFEASIBLE)
        if clock.over() and (hasty or takes > _LEAST_SECONDS):
            return hasty[0] if hasty else self._in_haste(problem, clock)
        found = self._restored(problem, reduced, self._solve_parts(reduced.problem, clock.inside(reduced.offset)))
        if found.choices is None and found.status is Status.TIME_LIMIT and not hasty:
            hasty.append(self._restored(problem, reduced, self._in_haste(reduced.problem, clock)))
        if not hasty or found.status in (Status.OPTIMAL, Status.INFEASIBLE):
            return found
        best = _cheaper(found, hasty[0])
        return replace(best, bound=min(found.bound, best.cost))

    def _in_haste(self, problem: Problem, clock: Clock) -> Solution:
        """Return choices within the limit without a bound, or no choices."""
        nothing = no_solution(Attempt(solver=self.name, started=clock.started), status=Status.TIME_LIMIT)
        if clock.control.stop():
            return nothing
        seconds = max(_HASTE_SHARE * clock.left, _LEAST_SECONDS)
        choices = choices_in_haste(problem, seconds=seconds, control=clock.control) if problem.num_nodes else None
        if choices is None:
            return nothing
        return self._answer(problem, choices, bound=-math.inf, proven=False)

    def _solve_parts(self, problem: Problem, clock: Clock) -> Solution:
        """Solve each connected component by itself if no memory row joins them, and equal components once."""
        if problem.usage_nodes.size or problem.num_nodes == 0:
            return self._solve_part(problem, clock)
        known: dict[bytes, Solution] = {}
        choices = np.zeros(problem.num_nodes, dtype=np.intp)
        bound, proven = 0.0, True
        parts = [*_parts(problem)]
        clock = clock.of_one(len(parts))
        for nodes, part in parts:
            # Repeated layers give equal components, byte for byte.
            key = b"".join(
                array.tobytes()
                for array in (part.node_costs.starts, part.node_costs.values, part.edge_nodes, part.edge_costs.values)
            )
            if key not in known:
                known[key] = self._solve_part(part, clock)
            solution = known[key]
            if solution.choices is None:
                # Without choices for one component there are none for the whole; the bounds of the others alone say
                # nothing of its cost.
                return replace(solution, bound=-math.inf if solution.status is Status.TIME_LIMIT else math.inf)
            choices[nodes] = solution.choices
            bound, proven = bound + solution.bound, proven and solution.status is Status.OPTIMAL
        return self._answer(problem, choices.tolist(), bound=bound, proven=proven)

    def _solve_part(self, problem: Problem, clock: Clock) -> Solution:
        """Solve one component by the first method that suits its size."""
        plan = _plan_of(problem, self.elimination)
        free = self._eliminate(problem, plan, clock)
        if free.status in (Status.OPTIMAL, Status.INFEASIBLE):
            return free
        first = free = self._priced(problem, plan, free, clock)
        if self.relative_gap > 0.0 and clock.is_near(first.cost, first.bound, self.relative_gap):
            return first
        # Where a gap may stay open, search closes it sooner than a program of some size is even relaxed.
        share = 1 if self.relative_gap == 0.0 else _SMALL_PROGRAM
        if problem.edge_costs.values.size <= self.max_program_entries * share:
            clock.report("integer program", bound=free.bound)
            first = Highs(relative_gap=self.relative_gap).search(
                problem, time_limit_seconds=_PROGRAM_SHARE * clock.left, control=clock.control, offset=clock.offset
            )
            # Both bounds are proven, so that the higher one holds for either answer.
            first = replace(_cheaper(first, free), bound=max(first.bound, min(free.bound, first.cost)))
            ended = first.status in (Status.OPTIMAL, Status.INFEASIBLE)
            if ended or clock.is_near(first.cost, first.bound, self.relative_gap):
                return first
        return RoundSearch(
            problem=problem, options=self.rounds, clock=clock, relative_gap=self.relative_gap,
            max_program_entries=self.max_program_entries,
        ).solve(first)  # fmt: skip

    def _eliminate(self, problem: Problem, plan: EliminationPlan, clock: Clock) -> Solution:
        """Eliminate without the limit, if the tables are small: the result is the answer if it fits, else a bound."""
        attempt = Attempt(solver=self.name)
        if not self.elimination.fits(plan):
            return no_solution(attempt, status=Status.TIME_LIMIT)
        choices = _cheapest_of(problem, plan, clock)
        if choices is None:
            return no_solution(attempt, status=Status.TIME_LIMIT)
        found = evaluate(problem, choices)
        if math.isinf(found.cost):
            return no_solution(attempt, status=Status.INFEASIBLE)
        # Dropping the limit can only lower the optimum, so that choices which fit anyway are optimal.
        if found.feasible:
            return self._answer(problem, choices, bound=found.cost, proven=True)
        # The status of a solution with a bound and without choices.
        return no_solution(attempt, status=Status.TIME_LIMIT, bound=found.cost)

    def _priced(self, problem: Problem, plan: EliminationPlan, free: Solution, clock: Clock) -> Solution:
        """Search by prices on memory; return ``free`` if the tables are large."""
        if problem.limit_bytes is None or not self.elimination.fits(plan):
            return free
        search = _search_of(problem, plan)
        search.run(relative_gap=self.relative_gap, clock=clock)
        bound = max(search.bound, free.bound)
        if search.choices is None:
            return replace(free, bound=bound)
        return self._answer(problem, search.choices, bound=min(bound, search.cost), proven=False)

    def _answer(self, problem: Problem, choices: Sequence[int], *, bound: float, proven: bool) -> Solution:
        return solution_of(problem, choices, Attempt(solver=self.name), bound=bound, proven=proven)

    def _restored(self, problem: Problem, reduced: Simplified, inner: Solution) -> Solution:
        """Return the solution of the reduced problem as a solution of ``problem``."""
        bound = inner.bound + reduced.offset
        if inner.choices is None:
            return replace(inner, bound=bound, solver=self.name)
        proven = inner.status is Status.OPTIMAL
        return self._answer(problem, reduced.restore(inner.choices), bound=bound, proven=proven)


# A problem may be solved again to another gap: the functions below store intermediate results on it.


@memoized
def _known_reductions(problem: Problem) -> list[Simplified]:
    """Return the list that holds the reduced problem once it is known."""
    return []


def _reduction_seconds(problem: Problem) -> float:
    """Return an estimate of the seconds of the reductions, which a few large nodes may exceed."""
    return _SECONDS_PER_NODE * problem.num_nodes + _SECONDS_PER_PAIR * problem.edge_costs.values.size


def _simplified(problem: Problem, clock: Clock, early: Callable[[Simplified], None] | None) -> Simplified:
    """Return the reduced problem; it is not stored if time was up before the reductions ended."""
    known = _known_reductions(problem)
    if known:
        return known[0]
    reduced = simplify(problem, early=early, stop=clock.over)
    if not clock.over():
        known.append(reduced)
    return reduced


@memoized
def _plan_of(problem: Problem, elimination: Elimination) -> EliminationPlan:
    return elimination.plan(problem)


@memoized
def _known_cheapest(problem: Problem) -> list[tuple[int, ...]]:
    """Return the list that holds the result of `_cheapest_of` once it is known."""
    del problem
    return []


def _cheapest_of(problem: Problem, plan: EliminationPlan, clock: Clock) -> tuple[int, ...] | None:
    """Return the best choices without the limit; None, which is not stored, if time was up before."""
    known = _known_cheapest(problem)
    if not known:
        found = cheapest_choices(plan, problem.node_costs.values, problem.edge_costs.values, over=clock.over)
        if found is None:
            return None
        known.append(found.choices)
    return known[0]


@memoized
def _search_of(problem: Problem, plan: EliminationPlan) -> PricedSearch:
    return PricedSearch(problem=problem, plan=plan)


def _cheaper(a: Solution, b: Solution) -> Solution:
    """Return the solution with the cheaper choices, if either has any."""
    return b if b.choices is not None and (a.choices is None or b.cost < a.cost) else a


def _parts(problem: Problem) -> Iterator[tuple[IntArray, Problem]]:
    """Yield the nodes of each connected component and the problem on them, without memory."""
    parts = connected_parts(problem.num_nodes, problem.edge_nodes)
    number, place = np.empty(problem.num_nodes, dtype=np.intp), np.empty(problem.num_nodes, dtype=np.intp)
    for index, nodes in enumerate(parts):
        number[nodes], place[nodes] = index, np.arange(nodes.size)
    inside: list[list[Edge]] = [[] for _ in parts]
    for edge in problem.edges:
        source, target = int(place[edge.source]), int(place[edge.target])
        inside[int(number[edge.source])].append(Edge(source=source, target=target, costs=edge.costs))
    for nodes, edges in zip(parts, inside, strict=True):
        yield nodes, Problem.of(node_costs=(problem.node_costs[node] for node in nodes.tolist()), edges=edges)
