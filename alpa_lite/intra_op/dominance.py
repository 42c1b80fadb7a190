"""Goldstein's dominance rule: remove strategies that another one beats for all choices of the neighbours.

It is one of the reductions of `simplify`.
"""

# Pyright cannot infer the types of functions that numba compiles.
# pyright: reportMissingTypeStubs=false, reportUntypedFunctionDecorator=false

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from alpa_lite.intra_op.problem import FloatArray, IntArray
from alpa_lite.intra_op.reductions import Workspace
from alpa_lite.program.kernel import kernel

_ROUNDING = 1e-13


def drop_dominated(work: Workspace, node: int) -> None:
    """Remove the strategies of a node that another strategy beats whatever the neighbours choose.

    Strategy i is dominated by j if c(i) - c(j) + sum over neighbours n of min_k (C_n(i, k) - C_n(j, k)) >= 0 and j uses
    no more bytes than i in any memory row.

    A pair (i, j) is discarded early when an upper bound of this sum is negative: the sum with min_k C(i, k) - min_k
    C(j, k) for each neighbour, or with C(i, k) - C(j, k) at the k of the least C(i, k) (``_difference_bound``).
    """
    costs = work.costs[node]
    matrices = list(work.edges[node].values())
    least = [matrix.min(axis=1) for matrix in matrices]
    total = sum(least, costs)
    if costs.size == 1 or not np.isfinite(total).all():
        return
    slack = _ROUNDING * sum(float(np.abs(part).max()) for part in (costs, *least))
    possible = total[:, None] - total[None, :] >= -slack
    np.fill_diagonal(possible, val=False)
    alive = work.alive_of(node)
    if alive is not None:
        for used in alive.bytes:
            possible &= used[None, :] <= used[:, None]
    bound = costs[:, None] - costs[None, :]
    for matrix, low in zip(matrices, least, strict=True):
        bound += _difference_bound(matrix, low)
    possible &= bound >= -slack
    worse, better = np.nonzero(possible)
    # The exact sum takes O(strategies) per pair and neighbour. `upper` starts as the cheap bound and is replaced
    # neighbour by neighbour with the exact term, so that most pairs are discarded after a few neighbours.
    upper = total[worse] - total[better]
    exact = costs[worse] - costs[better]
    for matrix, low in zip(matrices, least, strict=True):
        if worse.size == 0:
            return
        upper -= low[worse] - low[better]
        change = np.empty(worse.size)
        _least_differences(np.ascontiguousarray(matrix), worse, better, -slack - upper, change)
        upper += change
        exact = exact + change
        open_pairs = upper >= -slack
        worse, better, upper, exact = worse[open_pairs], better[open_pairs], upper[open_pairs], exact[open_pairs]
    work.keep(node, _undominated(costs.size, worse=worse[exact >= 0], better=better[exact >= 0]))


def _difference_bound(matrix: FloatArray, least: FloatArray) -> FloatArray:
    """Return for each (i, j) an upper bound of min_k matrix[i, k] - matrix[j, k].

    It is the difference at the k of the least matrix[i, k].
    """
    return least[:, None] - matrix[:, matrix.argmin(axis=1)].T


@kernel
def _least_differences(
    matrix: FloatArray, worse: IntArray, better: IntArray, enough: FloatArray, found: FloatArray
) -> None:
    """Write min_k matrix[worse, k] - matrix[better, k] of each pair to `found`.

    The scan of a pair ends early at the first difference below `enough`, which already rules the pair out. Entries
    where both are inf do not count.
    """
    for pair in range(worse.size):
        first, second, least = matrix[worse[pair]], matrix[better[pair]], np.inf
        for k in range(first.size):
            difference = first[k] - second[k]
            if difference < least:
                least = difference
                if least < enough[pair]:
                    break
        found[pair] = least


def _undominated(count: int, *, worse: IntArray, better: IntArray) -> NDArray[np.bool_]:
    """Return the mask of the strategies that remain when each strategy with a remaining better one is removed.

    Of several equal strategies, the last remains.
    """
    kept = np.ones(count, dtype=np.bool_)
    for first, second in zip(worse.tolist(), better.tolist(), strict=True):
        if kept[second]:
            kept[first] = False
    return kept
