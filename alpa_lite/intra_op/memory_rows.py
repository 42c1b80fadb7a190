"""Memory rows: the times at which the memory limit can bind, one constraint of the integer program for each.

    S_t = {usages with start <= t < end}
    row t matters  iff  no S_t' strictly contains S_t, and the sum over
                   usages in S_t of max_i b(i) exceeds the limit           ``maximal_times``, ``binding_times``
    row t:  sum_v b_vt(x_v) <= limit                                       ``MemoryRow``

S_t grows where a usage starts and shrinks where one ends, so it is maximal only at the last start before an end. A row
that stays under the limit even if every node takes its largest strategy never binds, and is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from alpa_lite.intra_op.problem import FloatArray, IntArray, Problem


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryRow:
    """The memory constraint at ``time``; ``bytes[v]`` is a vector over the strategies of node v."""

    time: int
    bytes: dict[int, FloatArray]

    def total(self, choices: Sequence[int]) -> float:
        """Return the bytes alive at this time under the given choices."""
        return sum(float(used[choices[node]]) for node, used in self.bytes.items())


def maximal_times(usage_times: IntArray) -> IntArray:
    """Return the times whose set of live usages is contained in no other, ascending.

    ``usage_times`` is (U, 2): start and end of every usage.
    """
    starts, ends = np.unique(usage_times[:, 0]), np.unique(usage_times[:, 1])
    if starts.size == 0:
        return starts
    # Sets of live usages grow at starts and shrink at ends: one is maximal where an end precedes the next start.
    next_end = ends[np.searchsorted(ends, starts, side="right")]
    next_start = np.append(starts[1:], next_end[-1])
    return starts[next_end <= next_start]


def sum_over_rows(num_rows: int, intervals: IntArray, amounts: FloatArray) -> FloatArray:
    """Return for every row r the sum of the amounts whose interval [first, last) contains r; ``intervals`` is (U,
    2).
    """
    # Differences at the ends of the intervals and a cumulative sum: linear time, however long the intervals are.
    change = np.zeros(num_rows + 1)
    np.add.at(change, intervals[:, 0], amounts)
    np.add.at(change, intervals[:, 1], -amounts)
    return np.cumsum(change[:-1])


class RangeMaximum:
    """Sparse table: the maximum of any interval in O(1), from the maxima of all intervals of length 2^k."""

    def __init__(self, values: FloatArray) -> None:
        self._levels = [values]
        width = 1
        while 2 * width <= values.size:
            below = self._levels[-1]
            self._levels.append(np.maximum(below[:-width], below[width:]))
            width *= 2

    def of(self, intervals: IntArray) -> FloatArray:
        """Return the maximum over each interval [first, last); ``intervals`` is (k, 2), none of them empty."""
        first, last = intervals.T
        level = np.log2(last - first).astype(int)
        highest = np.empty(len(intervals))
        for number in range(len(self._levels)):
            here = level == number
            values = self._levels[number]
            # Two intervals of length 2^k, which may overlap, cover [first, last).
            highest[here] = np.maximum(values[first[here]], values[last[here] - (1 << number)])
        return highest


def binding_times(problem: Problem) -> IntArray:
    """Return the maximal times at which the largest strategies overrun the limit; empty when there is no limit."""
    if problem.limit_bytes is None or problem.usage_nodes.size == 0:
        return np.zeros(0, dtype=np.intp)
    times = maximal_times(problem.usage_times)
    # Each usage at its largest strategy is an upper bound of all choices.
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
    """Return the rows that determine the peak, in order of time."""
    return tuple(_row(problem, time) for time in maximal_times(problem.usage_times).tolist())


def memory_rows(problem: Problem) -> tuple[MemoryRow, ...]:
    """Return the rows that can bind, in order of time; empty when the problem has no limit."""
    return tuple(_row(problem, time) for time in binding_times(problem).tolist())
