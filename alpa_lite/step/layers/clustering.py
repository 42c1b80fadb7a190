"""Communication-aware clustering of a sequence of ops into layers (Alpa, OSDI'22, section 5.2) on plain arrays.

Ops 0..K-1 are cut into L runs. A value that leaves its layer is paid once in each layer that reads it.

    C(i,k)  = bytes of the values of ops before i that any of ops i..k reads                      `_inflow_bytes`
    limit   = (1 + imbalance) * total FLOPs / L, relaxed in steps until L runs can keep it         `_flops_limit`
    G(k,r)  = min over i of  max(G(i-1,r-1), C(i,k)),  least <= FLOPs of i..k <= limit            `_least_bottleneck`
    among the cuts with max C = G(K-1,L): the least sum of C, then the least sum of FLOPs**2
    (their mean is fixed, so this is the least variance)                                          `_cut`

The least FLOPs of a layer are a quarter of the average where some cut keeps that: a cut before the work begins is often
free, and would make a layer of nothing. The tie-break is a second program, restricted to C(i,k) <= G(K-1,L): cutting
prefixes of least maximum first would miss cuts with a smaller sum. For every k the admissible i are consecutive, since
FLOPs only add up; both programs run over these pairs alone, some 1.5 * K**2 / L of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from alpa_lite.errors import PlanError

RELAXATION = 0.25
"""By how much the allowed imbalance grows while no cut keeps it."""

LEAST_SHARE = 0.25
"""The least FLOPs of a layer, in averages, if that is possible."""

Flow = tuple[int, int, float]
"""Producing op, reading op, bytes of the value."""

_ROUNDING = 1 + 1e-9


def cluster_contiguous(
    flops: NDArray[np.float64], flows: Sequence[Flow], num_layers: int, *, imbalance: float = 0.5
) -> tuple[int, ...]:
    """The layer of each op: non-decreasing from 0 to num_layers - 1, no layer empty.

    Args:
        flops: [K], of each op, in program order.
        flows: (producer, reader, bytes) per value that an op reads from an earlier one. Flows of one producer with the
            same bytes are the same value.
        num_layers: how many layers to make.
        imbalance: by which fraction the FLOPs of a layer may exceed the average, if that is possible.

    Raises:
        PlanError: if there are fewer ops than layers, or the numbers make no sense.
    """
    num_ops = len(flops)
    if not 1 <= num_layers <= num_ops:
        raise PlanError(f"{num_ops} ops cannot be cut into {num_layers} layers: ask for 1 to {num_ops} layers.")
    if imbalance < 0 or not bool(np.all((flops >= 0) & np.isfinite(flops))):
        raise PlanError(f"FLOPs and imbalance must not be negative: imbalance {imbalance}, least FLOPs {flops.min()}.")
    for producer, reader, size in flows:
        if not 0 <= producer < reader < num_ops or not 0 <= size < np.inf:
            raise PlanError(
                f"A value of {size} bytes cannot flow from op {producer} to op {reader} of {num_ops} ops: values flow"
                " from an earlier to a later op."
            )
    if num_layers == 1:
        return (0,) * num_ops
    ends = np.concatenate([[0.0], np.cumsum(flops, dtype=float)])
    limit = _flops_limit(ends, num_layers, imbalance)
    runs = _Runs.of(_inflow_bytes(num_ops, flows), ends, limit)
    even = runs.of_at_least(LEAST_SHARE * float(ends[-1]) / num_layers)
    bottleneck = _least_bottleneck(even, num_layers)
    if np.isinf(bottleneck):
        even, bottleneck = runs, _least_bottleneck(runs, num_layers)
    firsts = _cut(even, num_layers, bottleneck)
    return tuple(int(layer) for layer in np.searchsorted(firsts, np.arange(num_ops), side="right") - 1)


def _inflow_bytes(num_ops: int, flows: Sequence[Flow]) -> NDArray[np.float64]:
    """C[i,k] for i <= k, by summing up its differences in both directions.

    A value is paid by the runs that begin after its producer and end at or after the first reader that they hold. So
    reader c, with the reader (or producer) b before it, adds the bytes to all C[i,k] with b < i <= c <= k.
    """
    readers: dict[tuple[int, float], set[int]] = {}
    for producer, reader, size in flows:
        readers.setdefault((producer, size), set()).add(reader)
    inflow = np.zeros((num_ops + 1, num_ops))
    for (producer, size), reading in readers.items():
        before = producer
        for reader in sorted(reading):
            inflow[before + 1, reader] += size
            inflow[reader + 1, reader] -= size
            before = reader
    np.cumsum(inflow, axis=0, out=inflow)
    np.cumsum(inflow, axis=1, out=inflow)
    return inflow[:num_ops]


def _flops_limit(ends: NDArray[np.float64], num_layers: int, imbalance: float) -> float:
    """The most FLOPs of a layer: the first of (1 + imbalance + n * RELAXATION) averages that some cut keeps."""
    while True:
        limit = (1 + imbalance) * float(ends[-1]) / num_layers * _ROUNDING
        op = 0
        for _ in range(num_layers):
            # Filling layers up needs the fewest; more of them never hurt, as there are enough ops.
            op = int(np.searchsorted(ends, float(ends[op]) + limit, side="right")) - 1
        if op == len(ends) - 1:
            return limit
        imbalance += RELAXATION


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Runs:
    """All runs of ops that keep the limit, grouped by their last op: one row of each array per run.

    `begin[k]` is the row of the first run that ends with op k; there is at least the one of op k alone.
    """

    first: NDArray[np.int64]
    last: NDArray[np.int64]
    begin: NDArray[np.int64]
    bytes: NDArray[np.float64]
    flops: NDArray[np.float64]

    @staticmethod
    def of(inflow: NDArray[np.float64], ends: NDArray[np.float64], limit: float) -> "_Runs":
        num_ops = len(ends) - 1
        lasts = np.arange(num_ops)
        # The margin keeps every run that `_flops_limit` counted on, which rounds differently.
        lowest = np.minimum(np.searchsorted(ends, ends[1:] - limit * _ROUNDING, side="left"), lasts)
        counts = lasts + 1 - lowest
        begin = np.cumsum(counts) - counts
        last = np.repeat(lasts, counts)
        first = np.arange(last.size) - begin[last] + lowest[last]
        return _Runs(first=first, last=last, begin=begin, bytes=inflow[first, last], flops=ends[last + 1] - ends[first])

    def of_at_least(self, flops: float) -> "_Runs":
        """The same with no other runs than those of so many FLOPs to be chosen."""
        return replace(self, bytes=np.where(self.flops * _ROUNDING >= flops, self.bytes, np.inf))


def _least_bottleneck(runs: _Runs, num_layers: int) -> float:
    """G(K-1, L). Position k+1 of `best` stands for the ops up to k, position 0 for none."""
    best = np.full(runs.begin.size + 1, np.inf)
    best[0] = 0.0
    for _ in range(num_layers):
        best[1:] = np.minimum.reduceat(np.maximum(best[runs.first], runs.bytes), runs.begin)
        best[0] = np.inf
    return float(best[-1])


def _cut(runs: _Runs, num_layers: int, bottleneck: float) -> list[int]:
    """The first op of each layer of the best cut whose layers read at most `bottleneck` bytes each."""
    price = np.where(runs.bytes <= bottleneck * _ROUNDING, runs.bytes, np.inf)
    square = (runs.flops / max(float(runs.flops.max()), 1.0)) ** 2
    sums = np.full(runs.begin.size + 1, np.inf)
    squares = sums.copy()
    sums[0] = squares[0] = 0.0
    chosen: list[NDArray[np.int64]] = []
    for _ in range(num_layers):
        total = sums[runs.first] + price
        least = np.minimum.reduceat(total, runs.begin)
        tied = np.where(total <= least[runs.last] * _ROUNDING, squares[runs.first] + square, np.inf)
        evenest = np.minimum.reduceat(tied, runs.begin)
        hits = np.flatnonzero(tied == evenest[runs.last])
        chosen.append(runs.first[hits[np.searchsorted(hits, runs.begin)]])
        sums[0] = squares[0] = np.inf
        sums[1:], squares[1:] = least, evenest
    firsts = [runs.begin.size]
    for choice in reversed(chosen):
        firsts.append(int(choice[firsts[-1] - 1]))
    return firsts[:0:-1]
