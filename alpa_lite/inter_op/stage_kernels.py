"""The stage dynamic program on arrays, compiled: sums for one bottleneck, and the stages that attain them.

A kind of submesh takes devices of its group. The devices left in all groups are one number x, the digits of which are
the devices left by group, so that a kind takes `shift` from x; that is possible where x mod `block` >= shift. What
feeds a stage matters by sender class a: kinds from which receiving takes equally long everywhere.

    f[s,i,a,x] = min over b of  w + min over k of  g[r,i,k,b] + f[s-1,k+1,a(b),x-shift(b)],              `_fill_row`
                 w = inflow[i,b,a], where h[r,i,k,b] + scale * w <= tau
    f[0,L,a,0] = 0
    r          = s-1, and the last s stands for "or more" where g does not depend on r any further       `_levels`

A kind b is listed once for each choice between fewer seconds g and a lower bottleneck h (`choices_of`).

For one (i,b) the sender classes are gone through by falling w: what is allowed for one is allowed for the next, so
that each k is looked at once, whatever the number of classes (`_through_kind`). Only those x are computed that some
stages for the layers before i can leave (`_reach`) and some stages can use up (`low` and `high`).
"""

# Kernels are typed for readers; what numba makes of them, and elements of arrays, pyright cannot know.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUntypedFunctionDecorator=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportReturnType=false
# pyright: reportArgumentType=false

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from alpa_lite.program.kernel import kernel

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


class StageArrays(NamedTuple):
    """Input of the kernels: costs, and the states that kinds of submesh lead to.

    Attributes:
        cheapest: [R, L, L, S], g[r,i,k,b]; infinite for k < i.
        bottleneck: [R, L, L, S], h[r,i,k,b] without inflow; infinite where g is.
        scale: the factor of the inflow in a bottleneck.
        inflow: [L, S, A], seconds that a stage from layer i on, on kind b, takes to receive from sender class a.
        order: [L, S, A], the sender classes by falling inflow.
        sender: [S], the sender class of each kind.
        shift, block: [S], see the module.
        num_states: 1 + the x of all devices.
        open_ended: 1 if the last level stands for "or more" stages, else 0.
    """

    cheapest: FloatArray
    bottleneck: FloatArray
    scale: float
    inflow: FloatArray
    order: IntArray
    sender: IntArray
    shift: IntArray
    block: IntArray
    num_states: int
    open_ended: int


class BottleneckSums(NamedTuple):
    """The table f and the ranges in which it may be finite; memory that is reused for every bottleneck.

    Attributes:
        values: [R + 1, L + 1, A, states], valid from `low` to `high` and infinite elsewhere.
        low, high: [R + 1, L + 1, A]; high < low where all is infinite.
        arrives: [L + 1, A], the sender classes that can feed layer i.
        best: [states], f[s,i,a,:] for one kind of the first stage while it is computed, without the inflow.
    """

    values: FloatArray
    low: IntArray
    high: IntArray
    arrives: NDArray[np.bool_]
    best: FloatArray


class SumsRow(NamedTuple):
    """The part f[level,i,:,x] of the table with x from `first` to `last`."""

    # Numbers alone: an array in a tuple that is made in a loop would have its references counted there.
    level: int
    i: int
    first: int
    last: int


def empty_sums(arrays: StageArrays) -> BottleneckSums:
    """Allocate a table for f."""
    num_levels, num_layers = arrays.cheapest.shape[:2]
    shape = (num_levels + 1, num_layers + 1, arrays.inflow.shape[2])
    values = np.empty((*shape, arrays.num_states))
    return BottleneckSums(
        values=values,
        low=np.ones(shape, dtype=np.int64),
        high=np.zeros(shape, dtype=np.int64),
        arrives=np.zeros(shape[1:], dtype=np.bool_),
        best=np.empty(arrays.num_states),
    )


@kernel
def choices_of(
    seconds: FloatArray, bottleneck: FloatArray, following: IntArray, num_levels: int, num_choices: int
) -> tuple[FloatArray, FloatArray, int]:
    """Return g[r,i,k,b,n] and h[r,i,k,b,n] of the n-th choice, n < num_choices, and the most choices that there are.

    The first choice takes the least seconds of all configurations that at least r stages may follow; each further one
    takes the least of those with a lower bottleneck than the one before it.
    """
    num_layers, _, num_kinds, _ = seconds.shape
    shape = (num_levels, num_layers, num_layers, num_kinds, num_choices)
    least, lowest, most = np.full(shape, np.inf), np.full(shape, np.inf), 0
    for i in range(num_layers):
        for k in range(i, num_layers):
            for b in range(num_kinds):
                for r in range(num_levels):
                    count, below = 0, np.inf
                    while True:
                        best = _choice(seconds[i, k, b], bottleneck[i, k, b], following[i, k, b], r, below)
                        if best < 0:
                            break
                        below = bottleneck[i, k, b, best]
                        if count < num_choices:
                            least[r, i, k, b, count], lowest[r, i, k, b, count] = seconds[i, k, b, best], below
                        count += 1
                    most = max(most, count)
    return least, lowest, most


@kernel
def _choice(seconds: FloatArray, bottleneck: FloatArray, following: IntArray, r: int, below: float) -> int:
    """Return the configuration of least seconds, then of the lowest bottleneck, among those with a bottleneck lower
    than `below` that at least r stages may follow; -1 if there is none.
    """
    best = -1
    for c in range(seconds.size):
        # -1 stands for a stage that never fits. An infinite bottleneck is that of an impossible stage.
        if following[c] < r or bottleneck[c] >= below:
            continue
        if best < 0 or (seconds[c], bottleneck[c]) < (seconds[best], bottleneck[best]):
            best = c
    return best


@kernel
def fill(arrays: StageArrays, tau: float, sums: BottleneckSums) -> FloatArray:
    """Fill in f for one bottleneck, and return the sums of all layers on all devices, by level."""
    num_levels, num_layers = arrays.cheapest.shape[:2]
    last = arrays.num_states - 1
    # Only the ranges are reset: values outside them are never read, so that those of the last bottleneck may stay.
    sums.low[:], sums.high[:] = 1, 0
    # After the last layer nothing is left but the state without devices, at a sum of 0.
    sums.low[0, num_layers] = 0
    sums.values[0, num_layers, :, 0] = 0.0
    least, most = _reach(arrays, tau, sums.arrives)
    for level in range(1, num_levels + 1):
        for i in range(num_layers - 1, -1, -1):
            if most[i] >= 0:
                _fill_row(arrays, tau, sums, SumsRow(level, i, last - most[i], last - least[i]))
    totals = np.full(num_levels + 1, np.inf)
    for level in range(1, num_levels + 1):
        if sums.low[level, 0, 0] <= sums.high[level, 0, 0]:
            totals[level] = sums.values[level, 0, 0, last]
    return totals


@kernel
def _reach(arrays: StageArrays, tau: float, arrives: NDArray[np.bool_]) -> tuple[IntArray, IntArray]:
    """Return the least and the most of x that layers 0..i-1 can take (-1: they cannot).

    `arrives` is filled with the sender classes that can feed each layer.
    """
    num_layers, num_kinds = arrays.inflow.shape[:2]
    last = arrays.num_states - 1
    least, most = np.full(num_layers + 1, last), np.full(num_layers + 1, -1)
    arrives[:] = False
    least[0] = most[0] = 0
    # Nobody feeds the first stage; its inflow is 0 for every class.
    arrives[0, 0] = True
    for i in range(1, num_layers + 1):
        for j in range(i):
            for b in range(num_kinds):
                if most[j] >= 0 and arrays.bottleneck[0, j, i - 1, b] <= tau and least[j] + arrays.shift[b] <= last:
                    least[i] = min(least[i], least[j] + arrays.shift[b])
                    # These are outer limits only: the sum may run over from one group's digit into another's.
                    most[i] = min(last, max(most[i], most[j] + arrays.shift[b]))
                    arrives[i, arrays.sender[b]] = True
    return least, most


@kernel
def _levels(arrays: StageArrays, level: int) -> tuple[int, int]:
    """Return the first and the last level of the stages that may follow the first stage of `level`."""
    if arrays.open_ended == 1 and level == arrays.cheapest.shape[0]:
        return level - 1, level
    return level - 1, level - 1


@kernel
def _fill_row(arrays: StageArrays, tau: float, sums: BottleneckSums, row: SumsRow) -> None:
    """Compute a row of f for all sender classes that can feed it."""
    level, i, first, last = row
    arrives = sums.arrives[i]
    for a in range(arrives.size):
        if arrives[a]:
            sums.values[level, i, a, first : last + 1] = np.inf
    for b in range(arrays.shift.size):
        _through_kind(arrays, tau, sums, row, b)
    for a in range(arrives.size):
        if not arrives[a]:
            continue
        # Tight ranges spare the rows of earlier layers all states that nothing leads to.
        values = sums.values[level, i, a]
        low, high = first, last
        while low <= high and values[low] == np.inf:
            low += 1
        while low <= high and values[high] == np.inf:
            high -= 1
        sums.low[level, i, a], sums.high[level, i, a] = low, high


@kernel
def _range_of(arrays: StageArrays, tau: float, sums: BottleneckSums, row: SumsRow, b: int) -> tuple[int, int]:
    """Return the range of x, within a row, with which its first stage can be on kind b."""
    level, i = row.level, row.i
    first, last = arrays.num_states, -1
    a, (lowest, highest) = arrays.sender[b], _levels(arrays, level)
    for k in range(i, arrays.cheapest.shape[1]):
        if arrays.bottleneck[level - 1, i, k, b] <= tau:
            for rest in range(lowest, highest + 1):
                low, high = sums.low[rest, k + 1, a], sums.high[rest, k + 1, a]
                if low <= high:
                    first, last = min(first, low + arrays.shift[b]), max(last, high + arrays.shift[b])
    return max(first, row.first), min(last, row.last)


@kernel
def _through_kind(arrays: StageArrays, tau: float, sums: BottleneckSums, row: SumsRow, b: int) -> None:
    """Lower a row of f to the sums that are possible with a first stage on kind b."""
    level, i, best = row.level, row.i, sums.best
    first, last = _range_of(arrays, tau, sums, row, b)
    if first > last:
        return
    best[first : last + 1] = np.inf
    lowest, highest = _levels(arrays, level)
    used, before = False, np.inf
    for a in arrays.order[i, b]:
        if not sums.arrives[i, a]:
            continue
        inflow = arrays.inflow[i, b, a]
        for k in range(i, arrays.cheapest.shape[1]):
            seconds, bottleneck = arrays.cheapest[level - 1, i, k, b], arrays.bottleneck[level - 1, i, k, b]
            # What the sender class before this one allowed is in `best` already.
            if bottleneck + arrays.scale * inflow <= tau < bottleneck + before:
                used = True
                for rest in range(lowest, highest + 1):
                    _lower(arrays, sums, SumsRow(rest, k + 1, first, last), b, seconds)
        before = arrays.scale * inflow
        if used:
            values = sums.values[level, i, a]
            for x in range(first, last + 1):
                values[x] = min(values[x], best[x] + inflow)


@kernel
def _lower(arrays: StageArrays, sums: BottleneckSums, after: SumsRow, b: int, seconds: float) -> None:
    """Lower best[x] to seconds + f[level,i,a(b),x-shift(b)]; level, i and the range of x are those of `after`."""
    level, i, best = after.level, after.i, sums.best
    a, shift, block = arrays.sender[b], arrays.shift[b], arrays.block[b]
    rest = sums.values[level, i, a]
    first, last = max(after.first, sums.low[level, i, a] + shift), min(after.last, sums.high[level, i, a] + shift)
    # Kind b takes its devices from one digit of x, which must be at least `shift`: in blocks of x modulo `block`.
    for start in range(first - first % block, last + 1, block):
        for x in range(max(first, start + shift), min(last + 1, start + block)):
            best[x] = min(best[x], seconds + rest[x - shift])


@kernel
def trace(arrays: StageArrays, tau: float, sums: BottleneckSums, level: int) -> IntArray:
    """Return rows (last layer, kind) of stages that attain the sum of all layers on all devices at this level."""
    num_layers, num_kinds = arrays.inflow.shape[:2]
    found = np.empty((num_layers, 2), dtype=np.int64)
    count, i, a, x = 0, 0, 0, arrays.num_states - 1
    while i < num_layers:
        lowest, highest = _levels(arrays, level)
        # The initial values end the loop if rounding should leave nothing to find.
        least, best_k, best_b, best_level = np.inf, num_layers - 1, 0, lowest
        for b in range(num_kinds):
            if x % arrays.block[b] < arrays.shift[b]:
                continue
            for k in range(i, num_layers):
                seconds = arrays.cheapest[level - 1, i, k, b] + arrays.inflow[i, b, a]
                bottleneck = arrays.bottleneck[level - 1, i, k, b] + arrays.scale * arrays.inflow[i, b, a]
                for rest in range(lowest, highest + 1):
                    total = _sum_at(sums, rest, k + 1, arrays.sender[b], x - arrays.shift[b]) + seconds
                    if bottleneck <= tau and total < least:
                        least, best_k, best_b, best_level = total, k, b, rest
        found[count, 0], found[count, 1] = best_k, best_b
        count += 1
        i, a, level, x = best_k + 1, arrays.sender[best_b], best_level, x - arrays.shift[best_b]
    return found[:count].copy()


@kernel
def _sum_at(sums: BottleneckSums, level: int, i: int, a: int, x: int) -> float:
    """Return f[level,i,a,x]."""
    if sums.low[level, i, a] <= x <= sums.high[level, i, a]:
        return sums.values[level, i, a, x]
    return np.inf
