"""The integer program of Alpa (Zheng et al., OSDI 2022, section 4.2) for the intra-op problem, in PuLP, solved by
HiGHS or by any other solver that PuLP finds.

    s[v,i] in {0, 1}             node v takes strategy i                                   ``_add_nodes``
    e[uv,i,j] in [0, 1]          u takes i and v takes j: the product s[u,i] s[v,j]        ``_add_edge``
    minimise  sum_v,i c_v(i) s[v,i] + sum_uv,i,j C_uv(i,j) e[uv,i,j]                       ``_build``
    subject to
        sum_i s[v,i] = 1                                  for every node v                 ``_one_hot``
        sum_j e[uv,i,j] = s[u,i]                          for every edge uv and i          ``_row_sums``
        sum_i e[uv,i,j] = s[v,j]                          for every edge uv and j          ``_column_sums``
        sum_v,i b_vt(i) s[v,i] <= limit                   for every row t that can bind    ``_memory_row``
    smallest peak: minimise P with  sum_v,i b_vt(i) s[v,i] <= P                            ``leanest_choices``

The e need not be integer: s is one-hot, so a row sum of zero empties every row but one and a column sum of zero every
column but one (e >= 0), and the one entry left must be s[u,i] s[v,j] = 1. Infinite entries get no variable at all,
which fixes them at zero without a big-M constant. Costs are shifted to begin at zero and scaled to a largest value of
``_LARGEST_COST``, because HiGHS has absolute tolerances; the limit is scaled to one. Rounding within those tolerances
can still overrun the limit by a few bytes; a cut excludes such an answer and the program is solved again
(``_cover_cut``).
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from alpa_lite.intra_op.problem import Edge, FloatArray, Problem, Solution, Status, evaluate
from alpa_lite.intra_op.reductions import MemoryRow, binding_times, maximal_rows, memory_rows
from alpa_lite.intra_op.solvers.solver import Attempt, Control, ProgramTooLargeError, Solver, no_solution, solution_of

if TYPE_CHECKING:
    # PuLP and HiGHS take 0.1 s to import, and few runs need this solver: the functions below import them.
    import pulp

_LARGEST_COST = 1e4
_TOLERANCE = 1e-9
_HIGHS = "HiGHS"

Terms = dict["pulp.LpVariable", float]


@dataclass(slots=True, kw_only=True, eq=False)
class _Model:
    """The program under construction; ``nodes[v]`` maps the allowed strategies of node v to their variables."""

    program: pulp.LpProblem
    scale: float
    offset: float = 0.0
    objective: Terms = field(default_factory=lambda: {})
    nodes: list[dict[int, pulp.LpVariable]] = field(default_factory=lambda: [])

    def add_row(self, terms: Terms, sense: int, right: float) -> None:
        """Add the constraint terms (sense) right, with sense one of PuLP's LpConstraintEQ and LpConstraintLE."""
        import pulp

        self.program.addConstraint(pulp.LpConstraint(pulp.LpAffineExpression(terms), sense, None, right))

    def variable(self, name: str, *, integer: bool) -> pulp.LpVariable:
        """Return a new variable in [0, 1]."""
        import pulp

        return self.program.add_variable(name, 0, 1, pulp.LpInteger if integer else pulp.LpContinuous)

    def shifted(self, costs: FloatArray) -> FloatArray:
        """Return (costs - min costs) / scale, and add the minimum to the offset."""
        # Each node and each edge contributes exactly one entry, so that a shift changes all objectives alike.
        least = float(costs.min())
        self.offset += least
        return (costs - least) / self.scale


def _one_hot(model: _Model, variables: Mapping[int, pulp.LpVariable]) -> None:
    """Add the row sum_i s[v,i] = 1."""
    import pulp

    model.add_row(dict.fromkeys(variables.values(), 1.0), pulp.LpConstraintEQ, 1.0)


def _row_sums(model: _Model, edge: Edge, entries: Mapping[tuple[int, int], pulp.LpVariable]) -> None:
    """Add the rows sum_j e[uv,i,j] = s[u,i] for every i."""
    import pulp

    # A strategy without any allowed pair has a row as well, which fixes it at 0.
    rows: dict[int, Terms] = {i: {variable: -1.0} for i, variable in model.nodes[edge.source].items()}
    for (i, _), variable in entries.items():
        rows[i][variable] = 1.0
    for terms in rows.values():
        model.add_row(terms, pulp.LpConstraintEQ, 0.0)


def _column_sums(model: _Model, edge: Edge, entries: Mapping[tuple[int, int], pulp.LpVariable]) -> None:
    """Add the rows sum_i e[uv,i,j] = s[v,j] for every j."""
    import pulp

    columns: dict[int, Terms] = {j: {variable: -1.0} for j, variable in model.nodes[edge.target].items()}
    for (_, j), variable in entries.items():
        columns[j][variable] = 1.0
    for terms in columns.values():
        model.add_row(terms, pulp.LpConstraintEQ, 0.0)


def _memory_terms(model: _Model, row: MemoryRow, unit: float) -> Terms:
    """Return the terms of sum_v,i b_vt(i) s[v,i], in units of ``unit`` bytes."""
    return {
        variable: float(used[i]) / unit
        for node, used in row.bytes.items()
        for i, variable in model.nodes[node].items()
        if used[i] > 0
    }


def _memory_row(model: _Model, row: MemoryRow, limit_bytes: float) -> None:
    """Add the row sum_v,i b_vt(i) s[v,i] <= limit."""
    import pulp

    # In units of the limit, so that the coefficients of all rows are of similar size.
    unit = max(limit_bytes, 1.0)
    model.add_row(_memory_terms(model, row, unit), pulp.LpConstraintLE, limit_bytes / unit)


def _cover_cut(model: _Model, row: MemoryRow, choices: tuple[int, ...]) -> None:
    """Add a cover cut: the strategies of ``choices`` that are alive in ``row`` must not all be chosen again."""
    import pulp

    # No feasible choices are lost: together these strategies overrun the row, whatever the other nodes do.
    variables = [model.nodes[node][choices[node]] for node, used in row.bytes.items() if used[choices[node]] > 0]
    model.add_row(dict.fromkeys(variables, 1.0), pulp.LpConstraintLE, len(variables) - 1.0)


def _add_nodes(model: _Model, problem: Problem) -> bool:
    """Add the variables and one-hot rows of all nodes; return False when a node has no strategy of finite cost."""
    for node, costs in enumerate(problem.node_costs):
        allowed = np.flatnonzero(np.isfinite(costs))
        if allowed.size == 0:
            return False
        scaled = model.shifted(costs[allowed])
        variables = {int(i): model.variable(f"s_{node}_{i}", integer=True) for i in allowed}
        model.objective.update(zip(variables.values(), scaled.tolist(), strict=True))
        model.nodes.append(variables)
        _one_hot(model, variables)
    return True


def _add_edge(model: _Model, edge: Edge, index: int) -> bool:
    """Add the variables and sums of one edge; return False when it has no pair of finite cost."""
    source, target = model.nodes[edge.source], model.nodes[edge.target]
    pairs = [(i, j) for i in source for j in target if math.isfinite(edge.costs[i, j])]
    if not pairs:
        return False
    scaled = model.shifted(np.array([edge.costs[pair] for pair in pairs]))
    entries = {pair: model.variable(f"e_{index}_{pair[0]}_{pair[1]}", integer=False) for pair in pairs}
    model.objective.update(zip(entries.values(), scaled.tolist(), strict=True))
    _row_sums(model, edge, entries)
    _column_sums(model, edge, entries)
    return True


def _cost_scale(problem: Problem) -> float:
    """Return the number of seconds in one unit of the objective."""
    arrays = [*problem.node_costs, *(edge.costs for edge in problem.edges)]
    spans = [float(np.ptp(array[np.isfinite(array)])) for array in arrays if np.isfinite(array).any()]
    # If all costs are equal, any scale will do.
    return max(spans, default=0.0) / _LARGEST_COST or 1.0


def _num_entries(problem: Problem) -> int:
    """Return the number of terms of the program: of strategies, of pairs and of memory rows."""
    times = binding_times(problem)
    first, last = np.searchsorted(times, problem.usage_times).T
    return int(
        problem.node_costs.values.size
        + problem.edge_costs.values.size
        + ((last - first) * problem.usage_bytes.sizes).sum()
    )


def _build(problem: Problem) -> _Model | None:
    """Build the program without its memory rows, or return None when some node or edge has no finite cost."""
    import pulp

    model = _Model(program=pulp.LpProblem("intra_op", pulp.LpMinimize), scale=_cost_scale(problem))
    if not _add_nodes(model, problem):
        return None
    if not all(_add_edge(model, edge, index) for index, edge in enumerate(problem.edges)):
        return None
    return model


@dataclass(frozen=True, slots=True, kw_only=True)
class _PulpRun:
    """The result of a HiGHS run; ``bound`` is in units of the program's objective."""

    choices: tuple[int, ...] | None
    infeasible: bool
    optimal: bool
    bound: float


def _highs(seconds: float, relative_gap: float) -> pulp.HiGHS:
    """Return a configured HiGHS solver.

    It has no ``threads`` option: HiGHS shares one thread pool per process and refuses to change its size.
    """
    import pulp

    return pulp.HiGHS(
        msg=False,
        timeLimit=max(seconds, 0.01),
        gapRel=relative_gap,
        # By default HiGHS also stops at an absolute gap of 1e-6, which is not small for every problem.
        gapAbs=0.0,
        mip_feasibility_tolerance=_TOLERANCE,
        primal_feasibility_tolerance=_TOLERANCE,
        dual_feasibility_tolerance=_TOLERANCE,
    )


def _run(model: _Model, solver: pulp.HiGHS) -> _PulpRun:
    """Solve with HiGHS in the same steps as PuLP does, to read its status and bound, which PuLP hides."""
    import highspy
    import pulp

    program = model.program
    program.setObjective(pulp.LpAffineExpression(model.objective))
    solver.createAndConfigureSolver(program)
    solver.buildSolverModel(program)
    highs: Any = program.solverModel
    solver.callSolver(program)
    status, info = highs.getModelStatus(), highs.getInfo()
    ended = highspy.HighsModelStatus
    found = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    if found:
        solver.findSolutionValues(program)
    return _PulpRun(
        choices=_read_choices(model) if found else None,
        # All variables are bounded, so that the second status also means infeasible.
        infeasible=status in (ended.kInfeasible, ended.kUnboundedOrInfeasible),
        optimal=status == ended.kOptimal,
        bound=float(info.mip_dual_bound),
    )


def _run_by(model: _Model, backend: str, seconds: float) -> _PulpRun:
    """Solve with one of PuLP's solvers, of which PuLP tells whether the answer is optimal, but no bound."""
    import pulp

    program = model.program
    objective = pulp.LpAffineExpression(model.objective)
    program.setObjective(objective)
    with warnings.catch_warnings():
        # PuLP calls the CBC that it ships with deprecated, but has no other before its next major release.
        warnings.simplefilter("ignore", DeprecationWarning)
        program.solve(pulp.getSolver(backend, msg=False, timeLimit=max(seconds, 0.01)))
    optimal = program.sol_status == pulp.LpSolutionOptimal
    found = optimal or program.sol_status == pulp.LpSolutionIntegerFeasible
    return _PulpRun(
        choices=_read_choices(model) if found else None,
        infeasible=program.status == pulp.LpStatusInfeasible,
        optimal=optimal,
        bound=float(objective.value() or 0.0) if optimal else -math.inf,
    )


def available_backends() -> list[str]:
    """Return PuLP's names of the solvers of integer programs that it finds on this machine."""
    import pulp

    return pulp.listSolvers(onlyAvailable=True)


def _read_choices(model: _Model) -> tuple[int, ...]:
    # The values are 0 and 1 up to the tolerances of HiGHS.
    return tuple(max(variables, key=lambda i, of=variables: of[i].varValue or 0.0) for variables in model.nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class IntegerProgram(Solver):
    """Exact solver; slow beyond about 10^5 pairs of strategies, so simplify first (``Portfolio`` does).

    ``relative_gap``: choices proven to be this close to the optimum are good enough; solvers other than HiGHS go on to
    the optimum. ``backend``: PuLP's name of the solver (see ``available_backends``). A program of more than
    ``max_entries`` terms is refused before any work: PuLP needs about a kilobyte and 10 microseconds for each, and
    cannot be stopped meanwhile.
    """

    relative_gap: float = 0.0
    max_entries: int = 1_000_000
    backend: str = _HIGHS

    def solve(self, problem: Problem, *, time_limit_seconds: float = 60.0, control: Control | None = None) -> Solution:
        """Return the optimum (within ``relative_gap``) unless time runs out first; the bound is HiGHS's dual bound.

        Raises ProgramTooLargeError for a larger program than ``max_entries`` allows.
        """
        attempt = Attempt(solver=self.name)
        if (entries := _num_entries(problem)) > self.max_entries:
            raise ProgramTooLargeError(
                f"The program has {entries:.3g} terms and IntegerProgram writes down at most {self.max_entries:.3g}; "
                "use Portfolio or Highs, or raise max_entries."
            )
        rows = memory_rows(problem)
        if not problem.node_costs:
            return solution_of(problem, (), attempt, bound=0.0)
        model = _build(problem)
        if model is None:
            return no_solution(attempt, status=Status.INFEASIBLE)
        for row in rows:
            _memory_row(model, row, problem.limit_bytes or 0.0)
        run = self._run_exactly(problem, model, rows, deadline=attempt.started + time_limit_seconds)
        bound = run.bound * model.scale + model.offset
        if run.choices is not None:
            # With a gap, HiGHS calls an answer optimal that lies within it.
            proven = run.optimal and (self.relative_gap == 0.0 or self.backend != _HIGHS)
            return solution_of(problem, run.choices, attempt, bound=bound, proven=proven)
        if not run.infeasible:
            return no_solution(attempt, status=Status.TIME_LIMIT, bound=bound)
        left = time_limit_seconds - attempt.seconds
        leanest = leanest_choices(problem, time_limit_seconds=left) if rows else None
        peak_bytes = math.inf if leanest is None else evaluate(problem, leanest).peak_bytes
        return no_solution(attempt, status=Status.INFEASIBLE, peak_bytes=peak_bytes)

    def _run_exactly(
        self,
        problem: Problem,
        model: _Model,
        rows: tuple[MemoryRow, ...],
        *,
        deadline: float,
    ) -> _PulpRun:
        """Run until the answer satisfies the limit to the byte; cut off answers that do so only within tolerance."""
        limit = math.inf if problem.limit_bytes is None else problem.limit_bytes
        while True:
            left = deadline - time.perf_counter()
            if self.backend == _HIGHS:
                run = _run(model, _highs(left, self.relative_gap))
            else:
                run = _run_by(model, self.backend, left)
            overrun = [row for row in rows if run.choices is not None and row.total(run.choices) > limit]
            if run.choices is None or not overrun:
                return run
            if left <= 0:
                return replace(run, choices=None)
            for row in overrun:
                # Every round excludes the strategies of one overrun for good, so that the loop ends.
                _cover_cut(model, row, run.choices)


def leanest_choices(problem: Problem, *, time_limit_seconds: float) -> tuple[int, ...] | None:
    """Return choices of finite cost with the smallest peak over the memory rows; None if there are none, or no time."""
    import pulp

    model = _build(problem)
    if model is None:
        return None
    # All rows that determine the peak: without a limit, none can be ruled out.
    rows = maximal_rows(problem)
    # In units of the largest total that can be alive, so that P lies in [0, 1] as all variables do.
    unit = max(1.0, *(sum(float(used.max()) for used in row.bytes.values()) for row in rows)) if rows else 1.0
    peak = model.variable("peak", integer=False)
    # The costs do not matter here, only which of them are finite.
    model.objective = {peak: 1.0}
    for row in rows:
        model.add_row({**_memory_terms(model, row, unit), peak: -1.0}, pulp.LpConstraintLE, 0.0)
    return _run(model, _highs(time_limit_seconds, 0.0)).choices
