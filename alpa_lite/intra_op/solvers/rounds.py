"""Search for problems that are too large for an exact method: rounds of bounding and searching in parallel.

    round       messages and prices (dual.py) on one thread, until they gain no more, and
                neighbourhood search (neighbourhood.py) on the others                        ``_round``
    starts      decodings of the messages until the bound gains little; then cycles, from
                the best choices or from a decoding                                 ``_settle``, ``_start_of``
    heat        falls within a cycle of rounds, and rises again with the next                ``_heat``
    exactly     some blocks are solved to optimality (improvements.py), while rounds
                save little                                                    ``_solving_blocks``
    stuck       a cycle in which search saved little is followed by a hotter one without prices,
                and exact blocks take its result further instead of the best    ``_leave_basin``
    between     the best choices take over improvements of others (improvements.py)          ``_offer``
    fixing      strategies that the bound excludes are removed; the rest is passed to HiGHS
                as soon as it is small, and reduced when it has become much smaller          ``_fix``
    ends        when the gap is closed, the rounds or the time are up, or the caller stops   ``solve``

The work of a round is counted in passes and blocks, not in seconds, so that equal seeds and numbers of rounds give
equal answers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np

from alpa_lite.intra_op.problem import IntArray, Problem, Ragged, Solution, Status, evaluate
from alpa_lite.intra_op.simplify import Simplified, simplify
from alpa_lite.intra_op.solvers.dual import Dual
from alpa_lite.intra_op.solvers.flat_problem import Flat, cost_of, flat_problem, with_finite_costs, with_rows
from alpa_lite.intra_op.solvers.highs import Highs
from alpa_lite.intra_op.solvers.improvements import ExactBlocks, recombine
from alpa_lite.intra_op.solvers.neighbourhood import Neighbourhood
from alpa_lite.intra_op.solvers.solver import (
    Attempt,
    Clock,
    closes,
    cost_span,
    largest_cost,
    no_halt,
    no_solution,
    run_attended,
    smallest_cost,
    solution_of,
)

_NAME = "Portfolio"
_ENTRIES_PER_ROUND = 60_000_000
_ENTRIES_PER_LINK = 25
"""The number of entries of a link's table that take as long as the fixed work of a pass for the link."""
_SHORT_ROUNDS = 4
"""The number of first rounds that are shorter than the others, since easy problems end there."""
_BLOCKS_PER_ROUND = 4000
_CYCLE, _SHORT_CYCLE, _NODES_PER_ROUND = 24, 6, 100
"""Most and least rounds of a cycle, and nodes per round: of few nodes, each round searches more blocks around each."""
_HOT = (1e-5, 1e-6, 1e-4)
"""The first heat of successive cycles, as a fraction of the cost."""
_COOLING = 1e-4
"""The last heat of a cycle, as a fraction of its first."""
_HOTTER = (1.0, 10.0, 100.0, 1000.0)
"""Factors on the heat of successive cycles while search is stuck: the hottest begin at a tenth of the cost.

Their number has no factor in common with the periods of `_HOT` and of the starts, so that all of them meet."""
_FIX_EVERY = 8
_BOUND_SHARE = 0.25
"""The fraction of the time after which search no longer waits for the bound."""
_LOOK_BACK = 8
_SLOW = 2e-4
"""The bound gains little when `_LOOK_BACK` rounds raise it by less than this fraction of it."""
_LIKELY_GAP = 0.5
_LEAST_GAP = 0.04
"""The fraction of the likely gap below which steps are not shortened until they fail: short steps gain too little."""
_IDLE_ROUNDS, _LITTLE = 12, 1e-6
"""Blocks are solved exactly once so many rounds of search saved less than this part of the cost; fixing is first."""
_EXACT_BLOCKS = 4
_LEAST_PAUSE, _MOST_PAUSE = 2, 6
"""Least and most rounds between two that solve blocks exactly; the pause doubles while that saves nothing."""
_ROUNDING = 1e-6
_MUCH_SMALLER = 0.3
_PROGRAM_SHARE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """Options: ``max_rounds`` ends the search before the time limit does; ``num_threads`` run side by side."""

    seed: int = 0
    max_rounds: int | None = None
    num_threads: int = 2
    recombine: bool = True
    heat: bool = True
    exact: bool = True
    fix: bool = True


def _share_of(number: int) -> float:
    """Return the fraction of the work of a whole round that the round with this number does."""
    return min(1.0, (number + 1) / _SHORT_ROUNDS)


@dataclass(slots=True, kw_only=True, eq=False)
class _ExactTurns:
    """The exact blocks: their last choices, the next round in which some are solved, and the pause after it.

    ``saved``: the last blocks made the choices cheaper.
    """

    blocks: ExactBlocks
    at: IntArray | None = None
    next_round: int = 0
    pause: int = _LEAST_PAUSE
    saved: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class _Heating:
    """The cycles of heat: rounds per cycle, and the round in which the bound settled, when the first cycle began.

    ``saved_by_search`` (seconds) is counted over a cycle, and ``stuck_cycles`` are those in a row in which it was
    little.
    """

    num_rounds: int
    settled: int | None = None
    saved_by_search: float = 0.0
    stuck_cycles: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class _Core:
    """The problem that is searched (the given one, or the rest after fixing), with the tools that work on it.

    ``at`` and ``offered`` hold for each search its last choices, and the best ones that were offered as an answer.
    """

    problem: Problem
    flat: Flat
    dual: Dual
    searches: list[Neighbourhood]
    at: list[IntArray | None]
    offered: list[IntArray | None]
    exact: _ExactTurns
    heating: _Heating
    span: float
    bounds: list[float] = field(default_factory=list[float])
    seconds_per_pass: float = 0.0
    seconds_per_block: float = 0.0


@dataclass(slots=True, kw_only=True, eq=False)
class _Answer:
    """The best choices so far for the problem that was given, their cost, and the best bound of it (both seconds)."""

    choices: tuple[int, ...] | None = None
    cost: float = math.inf
    bound: float = -math.inf


@dataclass(slots=True, kw_only=True, eq=False)
class RoundSearch:
    """One search for the best choices of ``problem``."""

    problem: Problem
    options: Rounds
    clock: Clock
    relative_gap: float
    max_program_entries: int
    answer: _Answer = field(default_factory=_Answer)
    _reduced: list[Simplified] = field(default_factory=list[Simplified])
    _core: _Core = field(init=False)
    _fixed_at: float = math.inf
    _idle: int = 0
    _infeasible_above: float = field(init=False)
    _halt: IntArray = field(default_factory=no_halt)

    def __post_init__(self) -> None:
        # No choices of finite cost exceed the largest cost; the second term covers rounding.
        self._infeasible_above = largest_cost(self.problem) + _ROUNDING * cost_span(self.problem)

    def solve(self, first: Solution | None) -> Solution:
        """Return the best choices within the limit and the best bound; ``first`` is the best solution so far."""
        if first is not None:
            self.answer.bound = first.bound
        self._core = self._prepare(self.problem)
        if first is not None and first.choices is not None:
            self._offer(np.array(first.choices))
        # Threads suffice: the kernels release the interpreter lock.
        with ThreadPoolExecutor(max(1, self.options.num_threads)) as pool:
            number = 0
            while not self._ends(number):
                self._round(number, pool)
                self.clock.report(f"round {number}", cost=self.answer.cost, bound=self.answer.bound)
                number += 1
                if self.options.fix and number % _FIX_EVERY == 0 and self.answer.cost < self._fixed_at:
                    self._fix()
        return self._solution()

    def _ends(self, number: int) -> bool:
        rounds, answer = self.options.max_rounds, self.answer
        if self._is_infeasible() or (rounds is not None and number >= rounds):
            return True
        near = self.clock.is_near(answer.cost, answer.bound, self.relative_gap)
        return near or closes(answer.bound, answer.cost) or self._over()

    def _is_infeasible(self) -> bool:
        """Return whether the bound exceeds the cost of all choices of finite cost."""
        return self.answer.bound > self._infeasible_above

    def _over(self) -> bool:
        """Return whether the search should end; the clock is ignored if rounds are counted."""
        return self.clock.over() if self.options.max_rounds is None else self.clock.control.stop()

    def _seconds_left(self) -> float:
        return self.clock.left if self.options.max_rounds is None else math.inf

    def _solution(self) -> Solution:
        attempt, answer = Attempt(solver=_NAME, started=self.clock.started), self.answer
        if answer.choices is not None:
            return solution_of(self.problem, answer.choices, attempt, bound=answer.bound)
        status = Status.INFEASIBLE if self._is_infeasible() else Status.TIME_LIMIT
        return no_solution(attempt, status=status, bound=answer.bound)

    # ------------------------------------------------------------------------------------------------ the core

    def _prepare(self, problem: Problem) -> _Core:
        flat = flat_problem(problem)
        # For search, a forbidden strategy must cost more than anything else. For the bound any substitute is valid, and
        # messages converge sooner if it is close to the costs that matter.
        searched = with_finite_costs(flat, 2.0 * cost_span(problem))
        searches = [
            Neighbourhood(flat=searched, seed=self.options.seed + number, halt=self._halt)
            for number in range(self.options.num_threads)
        ]
        span = min(self._descent(searched) - smallest_cost(problem), cost_span(problem)) or 1.0
        dual = Dual(flat=with_finite_costs(flat, 2.0 * span), halt=self._halt)
        nothing: list[IntArray | None] = [None] * len(searches)
        exact = ExactBlocks(flat=searched, seed=self.options.seed, stop=self._over, seconds_left=self._seconds_left)
        cycle = min(max(problem.num_nodes // _NODES_PER_ROUND, _SHORT_CYCLE), _CYCLE)
        return _Core(
            problem=problem, flat=searched, dual=dual, searches=searches, at=nothing, offered=nothing.copy(),
            exact=_ExactTurns(blocks=exact), heating=_Heating(num_rounds=cycle), span=span,
        )  # fmt: skip

    def _descent(self, flat: Flat) -> float:
        """Return the cost of some choices that are not forbidden, regardless of memory, if a short search finds any."""
        free = with_rows(flat, np.zeros(0, dtype=np.int64))
        search = Neighbourhood(flat=free, seed=self.options.seed)
        start = np.array([int(np.argmin(costs)) for costs in np.split(flat.costs, flat.cost_start[1:-1])])
        search.run(start, np.zeros(0), num_blocks=min(2000, 10 * start.size), first_heat=0.0, last_heat=0.0)
        return search.best_cost

    @property
    def _offset(self) -> float:
        return math.fsum(reduced.offset for reduced in self._reduced)

    def _lift(self, choices: IntArray) -> tuple[int, ...]:
        """Return choices of the core as choices of the problem."""
        lifted = tuple(choices.tolist())
        # Each fixing reduced the problem that the one before it left.
        for reduced in reversed(self._reduced):
            lifted = reduced.restore(lifted)
        return lifted

    def _project(self, choices: tuple[int, ...]) -> IntArray:
        for reduced in self._reduced:
            choices = reduced.project(choices)
        return np.array(choices, dtype=np.int64)

    # ------------------------------------------------------------------------------------------------ one round

    def _round(self, number: int, pool: ThreadPoolExecutor) -> None:
        core, answer = self._core, self.answer
        self._settle(number)
        self._leave_basin(number)
        jobs: list[Callable[[], None]] = []
        if not core.dual.converged:
            jobs.append(self._bounding(number))
        before, improved = answer.cost, list[IntArray]()
        # The first round only bounds: searches start from the decoding and the prices of the dual.
        if math.isfinite(core.dual.bound):
            free = max(1, self.options.num_threads - len(jobs))
            if self.options.exact and self._idle >= _IDLE_ROUNDS and number >= core.exact.next_round:
                jobs.append(self._solving_blocks(improved))
                free = max(0, free - 1)
            jobs += [self._searching(index, number) for index in range(len(core.searches))][:free]
        run_attended(pool, jobs, over=self._over, halt=self._halt)
        # Rounding may lift the sum of the messages above the cost of the best choices.
        answer.bound = max(answer.bound, min(core.dual.bound + self._offset, answer.cost))
        self._offer(core.dual.choices)
        for index, search in enumerate(core.searches):
            if search.best is not None and search.best is not core.offered[index]:
                core.offered[index] = search.best
                self._offer(search.best)
        # Savings by exact blocks say nothing about search: they count neither here nor in ``_leave_basin``.
        core.heating.saved_by_search += before - answer.cost if math.isfinite(before) else 0.0
        self._idle = 0 if answer.cost < before - _LITTLE * abs(before) or math.isinf(answer.cost) else self._idle + 1
        for choices in improved:
            self._offer(choices)
            # Exact blocks are costly: while they save nothing, they are tried less and less often.
            core.exact.pause = _LEAST_PAUSE if core.exact.saved else min(2 * core.exact.pause, _MOST_PAUSE)
            core.exact.next_round = number + core.exact.pause

    def _settle(self, number: int) -> None:
        """Begin the cycles of heat once the bound gains little, or has had its share of the time."""
        core = self._core
        if core.heating.settled is not None:
            return
        core.bounds.append(core.dual.bound)
        rounds = self.options.max_rounds
        # With a number of rounds the clock is ignored, so that answers are reproducible.
        spent = self.clock.spent / max(self.clock.seconds, 1e-9) if rounds is None else number / rounds
        slow = False
        if len(core.bounds) > _LOOK_BACK and math.isfinite(self.answer.cost):
            gained = core.bounds[-1] - core.bounds[-1 - _LOOK_BACK]
            slow = gained < _SLOW * abs(core.bounds[-1])
        if core.dual.converged or slow or spent > _BOUND_SHARE:
            core.heating.settled = number

    def _leave_basin(self, number: int) -> None:
        """Count the cycles in a row in which search saved little; restart exact blocks from the annealed choices.

        Exact blocks give up their choices only once they stall, for their descent takes longer than one cycle. A
        later cycle that anneals from the best, at little heat, usually brings them back near it.
        """
        core, place = self._core, self._place(number)
        if not self.options.heat or place == 0 or place % core.heating.num_rounds > 0:
            return
        core.heating.stuck_cycles = (
            core.heating.stuck_cycles + 1 if core.heating.saved_by_search <= _LITTLE * abs(self.answer.cost) else 0
        )
        core.heating.saved_by_search = 0.0
        if core.heating.stuck_cycles > 1 and core.exact.pause == _MOST_PAUSE:
            core.exact.at = core.at[0]
            core.exact.pause, core.exact.next_round = _LEAST_PAUSE, number

    def _bounding(self, number: int) -> Callable[[], None]:
        core = self._core
        each = core.flat.tables.size + _ENTRIES_PER_LINK * core.flat.link_node.size + 1
        passes = int(_ENTRIES_PER_ROUND * _share_of(number) / each)
        num_passes = self._within(max(2, min(500, passes)), core.seconds_per_pass)
        # Steps are as long as the likely gap: poor first answers say nothing about the true one.
        reach = _LIKELY_GAP * max(abs(core.dual.bound), 1e-3 * core.span)
        least = core.dual.bound + _LEAST_GAP * reach
        upper = max(min(self.answer.cost - self._offset, core.dual.bound + reach), least)
        upper = upper if math.isfinite(core.dual.bound) else core.span

        def job() -> None:
            begun = time.perf_counter()
            core.dual.run(num_passes, upper=upper)
            core.seconds_per_pass = (time.perf_counter() - begun) / num_passes

        return job

    def _searching(self, index: int, number: int) -> Callable[[], None]:
        core = self._core
        start = self._start_of(index, number)
        first_heat, last_heat = self._heat(index, number)
        prices = core.dual.best_prices.copy()  # a copy, since the bounding thread changes them meanwhile
        if self._hotter > 1.0:
            # If the bound is far from the best cost, prices draw every search to the same few choices.
            prices[:] = 0.0
        num_blocks = self._within(int(_BLOCKS_PER_ROUND * _share_of(number)), core.seconds_per_block)

        def job() -> None:
            begun = time.perf_counter()
            core.at[index] = core.searches[index].run(
                start, prices, num_blocks=num_blocks, first_heat=first_heat, last_heat=last_heat
            )
            core.seconds_per_block = (time.perf_counter() - begun) / num_blocks

        return job

    def _solving_blocks(self, improved: list[IntArray]) -> Callable[[], None]:
        """Return a job that solves blocks exactly, from its own last choices if these cost no more than the best.

        Other choices of equal cost are retained too, so that the next blocks begin elsewhere. While search is stuck,
        blocks may also continue from choices that cost more than the best.
        """
        core = self._core
        start = core.exact.at
        if start is None or not self._fits(start) or not (core.heating.stuck_cycles or self._costs_as_much(start)):
            start = self._project(self.answer.choices or ())

        def job() -> None:
            if self._fits(start):
                core.exact.at = core.exact.blocks.improve(start, _EXACT_BLOCKS)
                core.exact.saved = cost_of(core.flat, core.exact.at) < cost_of(core.flat, start)
                improved.append(core.exact.at)

        return job

    def _costs_as_much(self, choices: IntArray) -> bool:
        """Return whether choices of the core cost no more than the best ones."""
        return evaluate(self._core.problem, choices.tolist()).cost + self._offset <= self.answer.cost

    def _within(self, number: int, seconds_each: float) -> int:
        """Return as many passes or blocks as the time allows; all of them if rounds are counted instead."""
        if self.options.max_rounds is not None or seconds_each == 0.0:
            return number
        return max(1, min(number, int(self.clock.left / seconds_each)))

    def _start_of(self, index: int, number: int) -> IntArray:
        """Return the choices from which a search continues.

        Until the bound has settled, and at the start of some cycles, these are a new decoding; at the start of other
        cycles the best choices; and within a cycle the search's own last choices.
        """
        core = self._core
        at, place = core.at[index], self._place(number)
        if core.heating.settled is None or at is None:
            return core.dual.choices.copy()
        if place % core.heating.num_rounds > 0:
            return at
        if self.answer.choices is None or (place // core.heating.num_rounds + index) % 3 == 1:
            return core.dual.choices.copy()
        return self._project(self.answer.choices)

    def _place(self, number: int) -> int:
        """Return the number of rounds since the bound settled."""
        return 0 if self._core.heating.settled is None else number - self._core.heating.settled

    def _heat(self, index: int, number: int) -> tuple[float, float]:
        """Return the heat in seconds at the start and the end of a round; 0 before there is an answer."""
        core, answer, place = self._core, self.answer, self._place(number)
        if answer.choices is None or core.heating.settled is None or not self.options.heat:
            return 0.0, 0.0
        hot = self._hotter * _HOT[(place // core.heating.num_rounds + index) % len(_HOT)]
        hot *= max(abs(answer.cost - self._offset), answer.cost - answer.bound)
        cycle, place = core.heating.num_rounds, place % core.heating.num_rounds
        return hot * _COOLING ** (place / cycle), hot * _COOLING ** ((place + 1) / cycle)

    @property
    def _hotter(self) -> float:
        """The factor on the heat of a cycle: 1 unless search is stuck."""
        return _HOTTER[self._core.heating.stuck_cycles % len(_HOTTER)]

    # ------------------------------------------------------------------------------------------------ answers

    def _offer(self, choices: IntArray) -> None:
        """Record choices of the core if they, or their recombination with the best, are better than the best."""
        core = self._core
        if not self._fits(choices):
            return
        candidates = [choices]
        if self.options.recombine and self.answer.choices is not None:
            best = self._project(self.answer.choices)
            if self._fits(best):
                # In both orders, because memory may admit another subset of the parts from the other end.
                candidates += [recombine(core.problem, core.flat, *pair) for pair in ((choices, best), (best, choices))]
        for candidate in candidates:
            lifted = self._lift(candidate)
            priced = evaluate(self.problem, lifted)
            if priced.feasible and priced.cost < self.answer.cost:
                self.answer.choices, self.answer.cost = lifted, priced.cost

    def _fits(self, choices: IntArray) -> bool:
        return evaluate(self._core.problem, choices.tolist()).feasible

    # ------------------------------------------------------------------------------------------------ fixing

    def _fix(self) -> None:
        """Remove strategies that no better choices use; then finish with HiGHS or continue, if the rest is small."""
        core = self._core
        self._fixed_at = self.answer.cost
        # A strategy whose bound exceeds the best cost is in no better solution.
        left = core.dual.strategies_left(self.answer.cost - self._offset)
        counts = np.add.reduceat(left.astype(np.int64), core.problem.node_costs.starts[:-1])
        entries = int(counts[core.problem.edge_nodes].prod(axis=1).sum())
        if entries > max(self.max_program_entries, _MUCH_SMALLER * core.problem.edge_costs.values.size):
            return
        costs = np.where(left, core.problem.node_costs.values, np.inf)
        smaller = replace(core.problem, node_costs=Ragged(values=costs, starts=core.problem.node_costs.starts))
        reduced = simplify(smaller, stop=self._over)
        if self._over():
            return
        if math.isinf(reduced.offset):
            # Without the removed strategies nothing is left, so that the best choices are optimal.
            self.answer.bound = self.answer.cost
            return
        if reduced.problem.edge_costs.values.size <= self.max_program_entries:
            self._finish(reduced)
            return
        self._reduced.append(reduced)
        self._core = self._prepare(reduced.problem)

    def _finish(self, reduced: Simplified) -> None:
        """Solve the integer program of the rest: the better of its optimum and the best choices is the optimum."""
        self.clock.report("integer program", cost=self.answer.cost, bound=self.answer.bound)
        seconds = _PROGRAM_SHARE * max(self.clock.left, 0.1)
        offset = self._offset
        solution = Highs(relative_gap=self.relative_gap).search(
            reduced.problem,
            time_limit_seconds=seconds,
            control=self.clock.control,
            offset=self.clock.offset + offset + reduced.offset,
        )
        if solution.choices is not None:
            self._offer(np.array(reduced.restore(solution.choices), dtype=np.int64))
        self.answer.bound = max(self.answer.bound, min(solution.bound + reduced.offset + offset, self.answer.cost))
