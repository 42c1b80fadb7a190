"""Solve the integer program of ``integer_program.py`` with HiGHS from arrays: relaxation first, memory rows lazily.

    columns    s[v,i] for every strategy, e[uv,i,j] for every pair of finite cost           ``_program``
    rows       sum_i s[v,i] = 1;  sum_j e[uv,i,j] = s[u,i];  sum_i e[uv,i,j] = s[v,j]        ``_program``
    memory     sum_v,i b_vt(i) s[v,i] <= limit is added for the rows t that an answer
               overruns most, until none is overrun                                         ``_add_overrun``
    relaxed    without integrality; an answer that is integral anyway is the optimum        ``Highs.solve``
    then       with integrality, from the rows and the basis of the relaxation              ``Highs.solve``

Leaving rows out can only lower the optimum, so every bound on the way is a bound of the whole program. Costs are
shifted to begin at zero and scaled to a largest value of ``_LARGEST_COST``, because HiGHS has absolute tolerances.
Rounding within them can still overrun the limit by a few bytes; a row of its own cuts off such an answer
(``_cut_off``).
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from alpa_lite.intra_op.problem import FloatArray, IntArray, Problem, Solution, Status, evaluate
from alpa_lite.intra_op.reductions import binding_times, sum_over_rows
from alpa_lite.intra_op.solvers.integer_program import leanest_choices
from alpa_lite.intra_op.solvers.solver import Attempt, Control, Solver, no_solution, solution_of

if TYPE_CHECKING:
    import highspy

_LARGEST_COST = 1e4
_TOLERANCE = 1e-9
_ROWS_AT_ONCE = 20
_OVERRUN = 1e-7
"""The fraction of the limit by which the relaxation may exceed it."""
_POLL_SECONDS = 0.05


def _least(values: FloatArray, starts: IntArray) -> FloatArray:
    """Return the least entry of every vector of a flat array."""
    return np.minimum.reduceat(values, starts[:-1]) if starts.size > 1 else np.zeros(0)


@dataclass(slots=True, kw_only=True, eq=False)
class _HighsModel:
    """The program inside HiGHS; its objective times ``scale`` plus ``offset`` is in seconds."""

    problem: Problem
    highs: highspy.Highs
    scale: float
    offset: float
    times: IntArray
    rows: IntArray
    column: IntArray
    added: set[int] = field(default_factory=set[int])

    def seconds(self, objective: float) -> float:
        """Convert a cost or bound of HiGHS to seconds."""
        return objective * self.scale + self.offset

    def usage(self, values: FloatArray) -> FloatArray:
        """Return the bytes alive at every binding time, for values of s that may be fractions."""
        used = self.problem.usage_bytes
        if used.values.size == 0:
            return np.zeros(self.times.size)
        alive = np.add.reduceat(used.values * values[self.column], used.starts[:-1])
        return sum_over_rows(self.times.size, self.rows, alive)


def _program(problem: Problem) -> _HighsModel | None:
    """Build the program without its memory rows, or return None when a node or an edge has no finite cost."""
    own, pair = problem.node_costs.values, problem.edge_costs.values
    least_own = _least(own, problem.node_costs.starts)
    least_pair = _least(pair, problem.edge_costs.starts)
    if not (np.isfinite(least_own).all() and np.isfinite(least_pair).all()):
        return None
    finite = np.flatnonzero(np.isfinite(pair))
    edge = np.searchsorted(problem.edge_costs.starts, finite, side="right") - 1
    costs = np.concatenate([own - np.repeat(least_own, problem.node_costs.sizes), pair[finite] - least_pair[edge]])
    allowed = np.isfinite(costs)
    # Never zero, even if all costs are equal.
    scale = max(float(costs[allowed].max(initial=0.0)) / _LARGEST_COST, np.finfo(float).tiny * 1e9)
    matrix = _matrix(problem, edge, finite - problem.edge_costs.starts[edge])
    right = np.where(np.arange(matrix.num_rows) < problem.num_nodes, 1.0, 0.0)
    times = binding_times(problem)
    # Added to a position in `usage_bytes`, it gives the column of the strategy.
    first = problem.node_costs.starts[problem.usage_nodes] - problem.usage_bytes.starts[:-1]
    return _HighsModel(
        problem=problem,
        # Forbidden strategies have an upper bound of 0, so that any finite cost will do.
        highs=_pass(matrix, np.where(allowed, costs, 0.0) / scale, allowed.astype(float), right),
        scale=scale,
        offset=math.fsum(least_own.tolist()) + math.fsum(least_pair.tolist()),
        times=times,
        rows=np.searchsorted(times, problem.usage_times),
        column=np.repeat(first, problem.usage_bytes.sizes) + np.arange(problem.usage_bytes.values.size),
    )


class _Columns(NamedTuple):
    """A sparse matrix by columns: the entries of column c are those from ``starts[c]`` to ``starts[c + 1]``."""

    num_rows: int
    num_columns: int
    starts: IntArray
    rows: IntArray
    values: FloatArray


def _matrix(problem: Problem, edge: IntArray, entry: IntArray) -> _Columns:
    """Return the constraint matrix: one-hot rows, then per edge one row per strategy of its source and of its target.

    Pair k of finite cost is the ``entry[k]``-th of ``edge[k]``; its column follows those of the strategies.
    """
    from scipy import sparse

    sizes, starts = problem.node_costs.sizes, problem.node_costs.starts
    sources, targets = problem.edge_nodes.T
    ends = sizes[sources] + sizes[targets]
    source_rows = problem.num_nodes + np.cumsum(ends) - ends
    target_rows = source_rows + sizes[sources]
    width = sizes[targets][edge]
    pairs = starts[-1] + np.arange(edge.size)
    rows = [np.repeat(np.arange(sizes.size), sizes), source_rows[edge] + entry // width]
    rows.append(target_rows[edge] + entry % width)
    columns = [np.arange(starts[-1]), pairs, pairs]
    values = [np.ones(starts[-1] + 2 * edge.size)]
    for nodes, first in ((sources, source_rows), (targets, target_rows)):
        owner = np.repeat(np.arange(nodes.size), sizes[nodes])
        strategy = np.arange(owner.size) - np.repeat(np.cumsum(sizes[nodes]) - sizes[nodes], sizes[nodes])
        rows.append(first[owner] + strategy)
        columns.append(starts[nodes][owner] + strategy)
        values.append(np.full(owner.size, -1.0))
    shape = (problem.num_nodes + int(ends.sum()), int(starts[-1]) + edge.size)
    matrix: Any = sparse.csc_matrix(
        (np.concatenate(values), (np.concatenate(rows), np.concatenate(columns))), shape=shape
    )
    return _Columns(*shape, starts=matrix.indptr, rows=matrix.indices, values=matrix.data)


def _pass(matrix: _Columns, costs: FloatArray, upper: FloatArray, right: FloatArray) -> highspy.Highs:
    """Return a HiGHS object with the linear program."""
    import highspy

    highs = highspy.Highs()
    highs.setOptionValue("output_flag", False)
    # With the default of 1e-6 of the limit, 80 GB could be overrun by 80 kB.
    for name in ("mip_feasibility_tolerance", "primal_feasibility_tolerance", "dual_feasibility_tolerance"):
        highs.setOptionValue(name, _TOLERANCE)
    program = highspy.HighsLp()
    program.num_row_, program.num_col_ = matrix.num_rows, matrix.num_columns
    program.col_cost_, program.col_upper_ = costs, upper
    program.col_lower_ = np.zeros(costs.size)
    # All rows are equations so far: memory rows, which are none, are added later.
    program.row_lower_ = program.row_upper_ = right
    program.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    program.a_matrix_.start_, program.a_matrix_.index_ = matrix.starts, matrix.rows
    program.a_matrix_.value_ = matrix.values
    highs.passModel(program)
    return highs


def _add_overrun(program: _HighsModel, values: FloatArray, tolerance: float) -> None:
    """Add the most exceeded memory rows that are not in the program yet, but no two neighbouring ones at once."""
    import highspy

    limit = program.problem.limit_bytes
    if limit is None or program.times.size == 0:
        return
    # In units of the limit, so that the coefficients of all rows are of similar size.
    unit = max(limit, 1.0)
    over = (program.usage(values) - limit) / unit
    open_rows = np.flatnonzero(over > tolerance)
    open_rows = open_rows[~np.isin(open_rows, list(program.added))]
    for _ in range(_ROWS_AT_ONCE):
        if open_rows.size == 0:
            break
        row = int(open_rows[over[open_rows].argmax()])
        # Rows close in time have almost the same live nodes, and one of them often settles the others.
        open_rows = open_rows[np.abs(open_rows - row) > max(1, program.times.size // 200)]
        program.added.add(row)
        columns, used = _row_terms(program, row)
        program.highs.addRow(-highspy.kHighsInf, limit / unit, columns.size, columns.astype(np.int32), used / unit)


def _row_terms(program: _HighsModel, row: int) -> tuple[IntArray, FloatArray]:
    """Return the columns and coefficients of sum_v,i b_vt(i) s[v,i]."""
    alive = (program.rows[:, 0] <= row) & (row < program.rows[:, 1])
    here = np.repeat(alive, program.problem.usage_bytes.sizes)
    columns, index = np.unique(program.column[here], return_inverse=True)
    used = np.zeros(columns.size)
    np.add.at(used, index, program.problem.usage_bytes.values[here])
    some = used > 0.0
    return columns[some], used[some]


def _cut_off(program: _HighsModel, choices: Sequence[int]) -> None:
    """Add cover cuts: the strategies of ``choices`` that are alive at an overrun time must not all be chosen again."""
    import highspy

    problem, limit = program.problem, program.problem.limit_bytes or 0.0
    values = np.zeros(problem.node_costs.values.size)
    values[problem.node_costs.starts[:-1] + np.asarray(choices)] = 1.0
    for row in np.flatnonzero(program.usage(values) > limit).tolist():
        columns, _ = _row_terms(program, row)
        chosen = columns[values[columns] > 0.0].astype(np.int32)
        program.highs.addRow(-highspy.kHighsInf, chosen.size - 1.0, chosen.size, chosen, np.ones(chosen.size))


def _run_stoppable(highs: highspy.Highs, control: Control) -> None:
    """Run HiGHS on a thread of its own, so that this one receives signals, and cancel it when the control says stop."""
    # Otherwise `cancelSolve` has no effect.
    highs.HandleUserInterrupt = True
    # A daemon, so that a run that does not react to its cancellation cannot keep the process alive.
    worker = threading.Thread(target=highs.run, daemon=True)
    worker.start()
    while worker.is_alive():
        worker.join(_POLL_SECONDS)
        if control.stop():
            highs.cancelSolve()


@dataclass(frozen=True, slots=True, kw_only=True)
class Highs(Solver):
    """Exact solver for problems of up to a few 10^5 pairs of strategies; simplify first (``Portfolio`` does).

    ``relative_gap``: choices proven to be this close to the optimum are good enough. ``max_branches``: the search ends
    after so many nodes of HiGHS's branch-and-bound tree.
    """

    relative_gap: float = 0.0
    max_branches: int | None = None

    def solve(
        self,
        problem: Problem,
        *,
        time_limit_seconds: float = 60.0,
        control: Control | None = None,
        start: Sequence[int] | None = None,
    ) -> Solution:
        """Return the optimum (within ``relative_gap``) unless stopped, HiGHS's bound; ``start``: initial choices."""
        solution = self.search(problem, time_limit_seconds=time_limit_seconds, control=control, start=start)
        if solution.status is not Status.INFEASIBLE or problem.limit_bytes is None:
            return solution
        leanest = leanest_choices(problem, time_limit_seconds=max(time_limit_seconds - solution.seconds, 0.1))
        peak_bytes = math.inf if leanest is None else evaluate(problem, leanest).peak_bytes
        return replace(solution, peak_bytes=peak_bytes)

    def search(
        self,
        problem: Problem,
        *,
        time_limit_seconds: float,
        control: Control | None = None,
        start: Sequence[int] | None = None,
        offset: float = 0.0,
    ) -> Solution:
        """Solve as ``solve`` does, but without the smallest peak when nothing fits.

        ``offset``: a cost (seconds) outside of the problem, to which the relative gap refers too.
        """
        attempt = Attempt(solver=self.name)
        control = control or Control()
        if problem.num_nodes == 0:
            return solution_of(problem, (), attempt, bound=0.0)
        program = _program(problem)
        # A node or an edge without a finite entry needs no solver to be infeasible.
        if program is None:
            return no_solution(attempt, status=Status.INFEASIBLE)
        if attempt.seconds > time_limit_seconds or control.stop():
            return no_solution(attempt, status=Status.TIME_LIMIT)
        return _HighsRun(
            solver=self,
            program=program,
            control=control,
            attempt=attempt,
            deadline=attempt.started + time_limit_seconds,
            start=start,
            outside=offset,
        ).solve()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Ended:
    """The result of a HiGHS run: its status, the values of s (empty without a solution), cost and bound (seconds)."""

    status: highspy.HighsModelStatus
    values: FloatArray
    objective: float
    dual_bound: float


@dataclass(slots=True, kw_only=True, eq=False)
class _HighsRun:
    """One solve: the relaxation, then the program with integrality."""

    solver: Highs
    program: _HighsModel
    control: Control
    attempt: Attempt
    deadline: float
    start: Sequence[int] | None
    outside: float
    bound: float = -math.inf

    def solve(self) -> Solution:
        """Solve the relaxation, then the integer program; see ``Highs.solve``."""
        import highspy

        ended = highspy.HighsModelStatus
        relaxed = self._until_nothing_is_overrun(_OVERRUN)
        if relaxed.status != ended.kOptimal:
            return self._without_choices(relaxed.status)
        self.bound = relaxed.objective
        choices, values = self._read(relaxed.values), relaxed.values
        if np.abs(values - values.round()).max() <= 1e-6 and evaluate(self.program.problem, choices).feasible:
            return self._answer(choices, proven=True)
        # Only the s become integers: they determine the e (`integer_program`).
        count = self.program.problem.node_costs.values.size
        self.program.highs.changeColsIntegrality(
            # 1 is HiGHS's code of an integer variable.
            count,
            np.arange(count, dtype=np.int32),
            np.full(count, 1, dtype=np.uint8),
        )
        # HiGHS knows shifted and scaled costs alone: its relative gap, and its default for the absolute one, refer to
        # these. What is allowed of the bound is allowed of every cost, as none is less.
        allowed = self.solver.relative_gap * max(0.0, self.bound + self.outside)
        self.program.highs.setOptionValue("mip_rel_gap", 0.0)
        self.program.highs.setOptionValue("mip_abs_gap", allowed / self.program.scale)
        if self.solver.max_branches is not None:
            self.program.highs.setOptionValue("mip_max_nodes", self.solver.max_branches)
        return self._integral()

    def _integral(self) -> Solution:
        import highspy

        ended = highspy.HighsModelStatus
        while True:
            # For each run again: HiGHS discards it when rows are added.
            if self.start is not None:
                chosen = self.program.problem.node_costs.starts[:-1] + np.asarray(self.start)
                self.program.highs.setSolution(chosen.size, chosen.astype(np.int32), np.ones(chosen.size))
            found = self._until_nothing_is_overrun(0.0)
            self.bound = max(self.bound, found.dual_bound)
            if found.values.size == 0:
                return self._without_choices(found.status)
            choices = self._read(found.values)
            if evaluate(self.program.problem, choices).feasible:
                # With a gap, HiGHS calls an answer optimal that lies within it.
                return self._answer(choices, proven=found.status == ended.kOptimal and self.solver.relative_gap == 0.0)
            if self._left() <= 0.0 or self.control.stop():
                return self._without_choices(found.status)
            _cut_off(self.program, choices)

    def _until_nothing_is_overrun(self, tolerance: float) -> _Ended:
        """Solve and add exceeded memory rows until no row outside the program is exceeded by more than `tolerance`."""
        import highspy

        highs, count = self.program.highs, self.program.problem.node_costs.values.size
        while True:
            # HiGHS counts the time of all runs of one object together.
            highs.setOptionValue("time_limit", highs.getRunTime() + max(self._left(), 0.01))
            _run_stoppable(highs, self.control)
            status, info = highs.getModelStatus(), highs.getInfo()
            found = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
            # Read the answer before rows are added: HiGHS discards it when the program changes.
            ended = _Ended(
                status=status,
                values=np.array(highs.getSolution().col_value[:count]) if found else np.zeros(0),
                objective=self.program.seconds(info.objective_function_value),
                dual_bound=self.program.seconds(float(info.mip_dual_bound)),
            )
            known = len(self.program.added)
            if found:
                _add_overrun(self.program, ended.values, tolerance)
            if len(self.program.added) == known or self._left() <= 0.0 or self.control.stop():
                return ended

    def _left(self) -> float:
        return self.deadline - time.perf_counter()

    def _read(self, values: FloatArray) -> list[int]:
        starts = self.program.problem.node_costs.starts.tolist()
        return [int(values[first:last].argmax()) for first, last in itertools.pairwise(starts)]

    def _answer(self, choices: Sequence[int], *, proven: bool) -> Solution:
        return solution_of(
            self.program.problem,
            choices,
            self.attempt,
            bound=self.bound,
            proven=proven,
        )  # fmt: skip

    def _without_choices(self, status: highspy.HighsModelStatus) -> Solution:
        import highspy

        ended = highspy.HighsModelStatus
        # All variables are bounded, so that the second status also means infeasible.
        infeasible = status in (ended.kInfeasible, ended.kUnboundedOrInfeasible)
        if not infeasible and self.start is not None and evaluate(self.program.problem, self.start).feasible:
            return self._answer(self.start, proven=False)
        return no_solution(
            self.attempt,
            status=Status.INFEASIBLE if infeasible else Status.TIME_LIMIT,
            bound=self.bound,
        )
