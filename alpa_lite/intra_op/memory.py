"""The times at which memory can bind: one row of the memory constraint for each.

    S_t = {usages with start <= t < end}                                   ``_alive``
    row t matters  iff  no S_t' strictly contains S_t, and the sum over
                   nodes v of max_i b_vt(i) exceeds the limit              ``maximal_times``, ``memory_rows``
    row t:  sum_v b_vt(x_v) <= limit                                       ``MemoryRow``

S_t grows where a usage starts and shrinks where one ends, so it is maximal only at the last start before an end. A row
that even the greediest choices keep under the limit never binds and is left out.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from alpa_lite.intra_op.problem import FloatArray, Problem, Usage


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryRow:
    """At ``time``, the nodes' bytes together stay within the limit; ``bytes[v]`` is a vector over v's strategies."""

    time: int
    bytes: dict[int, FloatArray]

    def total(self, choices: tuple[int, ...]) -> float:
        """The bytes alive at this time."""
        return sum(float(used[choices[node]]) for node, used in self.bytes.items())


def maximal_times(usages: tuple[Usage, ...]) -> tuple[int, ...]:
    """The times whose set of living usages is not contained in that of another, ascending."""
    starts = sorted({usage.start for usage in usages})
    ends = sorted({usage.end for usage in usages})
    times: list[int] = []
    for index, start in enumerate(starts):
        next_end = ends[bisect.bisect_right(ends, start)]
        if index + 1 == len(starts) or next_end <= starts[index + 1]:
            times.append(start)
    return tuple(times)


def _alive(usages: tuple[Usage, ...], time: int) -> dict[int, FloatArray]:
    alive: dict[int, FloatArray] = {}
    for usage in usages:
        if usage.start <= time < usage.end:
            alive[usage.node] = alive[usage.node] + usage.bytes if usage.node in alive else usage.bytes
    return alive


def maximal_rows(problem: Problem) -> tuple[MemoryRow, ...]:
    """The rows that decide the peak, in order of time."""
    return tuple(MemoryRow(time=time, bytes=_alive(problem.usages, time)) for time in maximal_times(problem.usages))


def memory_rows(problem: Problem) -> tuple[MemoryRow, ...]:
    """The rows that can bind, in order of time; none when the problem has no limit."""
    limit = problem.limit_bytes
    if limit is None:
        return ()
    return tuple(row for row in maximal_rows(problem) if sum(float(b.max()) for b in row.bytes.values()) > limit)
