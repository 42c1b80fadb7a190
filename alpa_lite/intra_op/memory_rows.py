"""The times at which memory can bind: one row of the memory constraint for each.

    S_t = {usages with start <= t < end}
    row t matters  iff  no S_t' strictly contains S_t, and the sum over
                   usages in S_t of max_i b(i) exceeds the limit           ``maximal_times``, ``binding_times``
    row t:  sum_v b_vt(x_v) <= limit                                       ``MemoryRow``

S_t grows where a usage starts and shrinks where one ends, so it is maximal only at the last start before an end. A row
that even the greediest choices keep under the limit never binds and is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from alpa_lite.intra_op.problem import FloatArray, IntArray, Problem


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryRow:
    """At ``time``, the nodes' bytes together stay within the limit; ``bytes[v]`` is a vector over v's strategies."""

    time: int
    bytes: dict[int, FloatArray]

    def total(self, choices: Sequence[int]) -> float:
        """The bytes alive at this time."""
        return sum(float(used[choices[node]]) for node, used in self.bytes.items())


def maximal_times(usage_times: IntArray) -> IntArray:
    """The times whose set of living usages is not contained in that of another, ascending; (U, 2) in."""
    starts, ends = np.unique(usage_times[:, 0]), np.unique(usage_times[:, 1])
    if starts.size == 0:
        return starts
    next_end = ends[np.searchsorted(ends, starts, side="right")]
    next_start = np.append(starts[1:], next_end[-1])
    return starts[next_end <= next_start]


def sum_over_rows(num_rows: int, intervals: IntArray, amounts: FloatArray) -> FloatArray:
    """sum of the amounts whose interval [first, last) of rows holds r, for every row r; intervals are (U, 2)."""
    change = np.zeros(num_rows + 1)
    np.add.at(change, intervals[:, 0], amounts)
    np.add.at(change, intervals[:, 1], -amounts)
    return np.cumsum(change[:-1])


class RangeMaximum:
    """The maximum over any interval, from the maxima over all intervals of 2^k."""

    def __init__(self, values: FloatArray) -> None:
        self._levels = [values]
        width = 1
        while 2 * width <= values.size:
            below = self._levels[-1]
            self._levels.append(np.maximum(below[:-width], below[width:]))
            width *= 2

    def of(self, intervals: IntArray) -> FloatArray:
        """The maximum over each interval [first, last); intervals are (k, 2) and not empty."""
        first, last = intervals.T
        level = np.log2(last - first).astype(int)
        highest = np.empty(len(intervals))
        for number in range(len(self._levels)):
            here = level == number
            values = self._levels[number]
            highest[here] = np.maximum(values[first[here]], values[last[here] - (1 << number)])
        return highest


def binding_times(problem: Problem) -> IntArray:
    """The maximal times at which the greediest choices would overrun the limit; none when there is no limit."""
    if problem.limit_bytes is None or problem.usage_nodes.size == 0:
        return np.zeros(0, dtype=np.intp)
    times = maximal_times(problem.usage_times)
    greediest = np.maximum.reduceat(problem.usage_bytes.values, problem.usage_bytes.starts[:-1])
    totals = sum_over_rows(times.size, np.searchsorted(times, problem.usage_times), greediest)
    return times[totals > problem.limit_bytes]


def _row(problem: Problem, time: int) -> MemoryRow:
    alive: dict[int, FloatArray] = {}
    living = (problem.usage_times[:, 0] <= time) & (time < problem.usage_times[:, 1])
    for index in np.flatnonzero(living).tolist():
        node, used = int(problem.usage_nodes[index]), problem.usage_bytes[index]
        alive[node] = alive[node] + used if node in alive else used
    return MemoryRow(time=time, bytes=alive)


def maximal_rows(problem: Problem) -> tuple[MemoryRow, ...]:
    """The rows that decide the peak, in order of time."""
    return tuple(_row(problem, time) for time in maximal_times(problem.usage_times).tolist())


def memory_rows(problem: Problem) -> tuple[MemoryRow, ...]:
    """The rows that can bind, in order of time; none when the problem has no limit."""
    return tuple(_row(problem, time) for time in binding_times(problem).tolist())
