"""Some choices within the memory limit, soon: neighbourhood search, nothing proven.

    starts     the cheapest strategy of each node; that of least bytes times lifetime; random ones   ``_starts``
    search     blocks without heat and with it in turn; rows that stay overrun at ever higher prices  ``Neighbourhood``
    ends       at the first choices of finite cost that fit, or when the time is up

It is for problems whose reductions take long, or that nothing else has an answer to when the time is up.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from alpa_lite.intra_op.problem import FloatArray, IntArray, Problem, evaluate
from alpa_lite.intra_op.solvers.cost_range import cost_span
from alpa_lite.intra_op.solvers.flat_problem import flat_problem, with_finite_costs
from alpa_lite.intra_op.solvers.neighbourhood import Neighbourhood
from alpa_lite.intra_op.solvers.solver import Clock, Control, no_halt, run_attended

_BLOCKS = 500
_COOLING = 1e-3
"""The last heat of a call as a part of its first, which is the cost of something forbidden, at every other start."""
_CALLS_PER_START = 20
_LEAST_CALLS = 3
"""A start is given up after so many calls, once one of them changed nothing."""


def choices_in_haste(problem: Problem, *, seconds: float, control: Control) -> tuple[int, ...] | None:
    """Choices of finite cost within the limit; None where none were found in ``seconds`` of search."""
    halt = no_halt()
    forbidden = 2.0 * cost_span(problem)
    flat = with_finite_costs(flat_problem(problem), forbidden)
    clock = Clock(seconds=seconds, control=control)
    with ThreadPoolExecutor(1) as pool:
        for attempt, start in enumerate(_starts(problem)):
            search = Neighbourhood(flat=flat, seed=attempt, halt=halt)
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
    """One after the other, without end."""
    yield _lowest(problem, problem.node_costs.values)
    yield _lowest(problem, _bytes_times_lifetime(problem))
    random = np.random.default_rng(0)
    while True:
        yield _lowest(problem, random.random(problem.node_costs.values.size))


def _lowest(problem: Problem, values: FloatArray) -> IntArray:
    """The strategy of each node at which some values of all strategies are least; forbidden ones come last."""
    values = np.where(np.isfinite(problem.node_costs.values), values, np.inf)
    starts = problem.node_costs.starts.tolist()
    return np.array([int(values[first:last].argmin()) for first, last in itertools.pairwise(starts)])


def _bytes_times_lifetime(problem: Problem) -> FloatArray:
    """Of all strategies of all nodes."""
    lifetimes = (problem.usage_times[:, 1] - problem.usage_times[:, 0]).astype(np.float64)
    sizes = problem.usage_bytes.sizes
    within = np.arange(problem.usage_bytes.values.size) - np.repeat(problem.usage_bytes.starts[:-1], sizes)
    total = np.zeros(problem.node_costs.values.size)
    owners = np.repeat(problem.node_costs.starts[problem.usage_nodes], sizes) + within
    np.add.at(total, owners, problem.usage_bytes.values * np.repeat(lifetimes, sizes))
    return total
