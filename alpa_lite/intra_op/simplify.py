"""Exact reductions of the intra-op problem, to a fixpoint. None of them changes the optimum; each can be undone.

    parallel edges    C, C' on one pair                  -> C + C'                              ``Workspace.load``
    forbidden         i has c_v(i) = inf, no finite partner at a neighbour, or more bytes
                      than the others' least leave free  -> i goes                              ``drop_impossible``
    separable edge    C(i, j) = f(i) + g(j)              -> c_u + f, c_v + g, no edge            ``fold_separable``
    functional edge   each i of u allows one j = m(i)    -> v joins u: x_v = m(x_u)              ``merge_functional``
    degree 0, 1, 2    T(N) = min_i c_v(i) + sum_n C_vn(i, x_n) -> offset, node costs, edge       ``eliminate``
    dominated (Goldstein)
                      c(i) - c(j) + sum_n min_k (C_vn(i, k) - C_vn(j, k)) >= 0 and
                      b_j <= b_i in every interval       -> i goes                              ``drop_dominated``

A node with one strategy needs no rule of its own: each of its edges is separable, and then its degree is 0. A node is
eliminated only if all its strategies use the same bytes, for the minimum over i must not depend on memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from alpa_lite.intra_op.problem import Edge, FloatArray, Problem, Usage
from alpa_lite.intra_op.reductions import IntArray, Step, Workspace

_ROUNDING = 1e-13
_CHUNK_ENTRIES = 4_000_000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Simplified:
    """A reduced problem and the way back: optimum of the original = ``offset`` + optimum of ``problem``.

    ``offset`` is inf when the reductions proved that no choices are feasible (``problem`` is then empty). ``nodes``
    are the original numbers of the nodes left. The reduced problem's time runs over the memory rows that can bind.
    """

    problem: Problem
    offset: float
    nodes: tuple[int, ...]
    steps: tuple[Step, ...]

    def restore(self, choices: Sequence[int]) -> tuple[int, ...]:
        """Choices of the original problem from choices of the reduced one; they cost ``offset`` more."""
        if math.isinf(self.offset):
            raise ValueError(
                "The problem has no feasible choices, so there is nothing to restore; look at offset first."
            )
        restored = dict(zip(self.nodes, choices, strict=True))
        for step in reversed(self.steps):
            step.restore(restored)
        return tuple(restored[node] for node in sorted(restored))


def simplify(problem: Problem) -> Simplified:
    """Apply every reduction until none applies. Without a limit, usages play no part and are left out."""
    work = Workspace.load(problem)
    while (work.dirty or work.stale) and not work.infeasible:
        base_bytes = work.base_bytes.copy()
        _reduce_dirty(work, max_degree=1)
        for node in sorted(work.stale):
            if node in work.costs and not work.infeasible:
                drop_dominated(work, node)
        work.stale.clear()
        if not work.dirty:
            work.dirty = dict.fromkeys(work.costs)
            _reduce_dirty(work, max_degree=2)
        if (work.base_bytes > base_bytes).any():
            work.dirty.update((node, None) for node in work.costs if work.bytes[node])
    return _finish(work)


def _reduce_dirty(work: Workspace, *, max_degree: int) -> None:
    while work.dirty and not work.infeasible:
        node = next(iter(work.dirty))
        del work.dirty[node]
        drop_impossible(work, node)
        if work.infeasible:
            return
        fold_separable(work, node)
        if not merge_functional(work, node) and len(work.edges[node]) <= max_degree and not work.bytes[node]:
            eliminate(work, node)


def drop_impossible(work: Workspace, node: int) -> None:
    """Arc consistency on infinite costs, and strategies that cannot fit even beside the leanest of the others."""
    possible = np.isfinite(work.costs[node])
    for other, costs in work.edges[node].items():
        possible &= np.isfinite(costs[:, np.isfinite(work.costs[other])]).any(axis=1)
    for (first, last), used in work.bytes[node].items():
        possible &= work.base_bytes[first:last].max() + used <= work.limit_bytes
    work.keep(node, possible)


def fold_separable(work: Workspace, node: int) -> None:
    """Edges with C(i, j) = f(i) + g(j), up to rounding, become node costs."""
    for other, costs in list(work.edges[node].items()):
        if not np.isfinite(costs).all():
            continue
        row_part = costs[:, 0]
        column_part = costs[0, :] - costs[0, 0]
        residual = np.abs(costs - row_part[:, None] - column_part[None, :]).max()
        if residual <= _ROUNDING * np.abs(costs).max():
            work.costs[node] = work.costs[node] + row_part
            work.costs[other] = work.costs[other] + column_part
            work.remove_edge(node, other)
            work.touch((node, other))


def merge_functional(work: Workspace, node: int) -> bool:
    """Merge ``node`` into a neighbour each of whose strategies allows just one of its own; whether that happened."""
    for other, costs in work.edges[node].items():
        allowed = np.isfinite(costs)
        if len(work.costs[node]) > 1 and (allowed.sum(axis=0) == 1).all():
            _merge(work, node=node, into=other, follows=allowed.argmax(axis=0))
            return True
    return False


def _merge(work: Workspace, *, node: int, into: int, follows: IntArray) -> None:
    columns = np.arange(follows.size)
    work.costs[into] = work.costs[into] + work.costs[node][follows] + work.edges[node][into][follows, columns]
    for other, costs in list(work.edges[node].items()):
        if other != into:
            work.add_edge(into, other, costs[follows])
    for interval, used in work.bytes[node].items():
        work.add_bytes(into, interval, used[follows])
    work.settle_bytes(into)
    work.touch((into,))
    work.remove_node(node, best=follows, neighbours=(into,))


def eliminate(work: Workspace, node: int) -> None:
    """Minimise over ``node``, which has at most two neighbours, for each choice of theirs."""
    costs = work.costs[node]
    neighbours = tuple(sorted(work.edges[node]))
    if not neighbours:
        best = costs.argmin()
        work.offset += float(costs[best])
        work.remove_node(node, best=np.array(best), neighbours=())
    elif len(neighbours) == 1:
        (other,) = neighbours
        joint = costs[:, None] + work.edges[node][other]
        work.costs[other] = work.costs[other] + joint.min(axis=0)
        work.remove_node(node, best=joint.argmin(axis=0), neighbours=neighbours)
    else:
        first, second = neighbours
        left = work.edges[node][first] + costs[:, None]
        table, best = _min_plus(left, work.edges[node][second])
        work.remove_node(node, best=best, neighbours=neighbours)
        work.add_edge(first, second, table)


def _min_plus(left: FloatArray, right: FloatArray) -> tuple[FloatArray, IntArray]:
    """T[a, b] = min_i left[i, a] + right[i, b] and the minimiser, a few columns a at a time."""
    size = max(1, _CHUNK_ENTRIES // max(1, right.size))
    tables: list[FloatArray] = []
    bests: list[IntArray] = []
    for begin in range(0, left.shape[1], size):
        joint = left[:, begin : begin + size, None] + right[:, None, :]
        best = joint.argmin(axis=0)
        bests.append(best)
        tables.append(np.take_along_axis(joint, best[None], axis=0)[0])
    return np.concatenate(tables), np.concatenate(bests)


def drop_dominated(work: Workspace, node: int) -> None:
    """Take away strategies that another beats whatever the neighbours choose.

    A pair (i, j) is dropped early when c(i) - c(j) + sum_n (min_k C(i, k) - min_k C(j, k)), which is an upper bound of
    Goldstein's sum, is negative.
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
    for used in work.bytes[node].values():
        possible &= used[None, :] <= used[:, None]
    worse, better = np.nonzero(possible)
    upper = total[worse] - total[better]
    exact = costs[worse] - costs[better]
    for matrix, low in zip(matrices, least, strict=True):
        if worse.size == 0:
            return
        with np.errstate(invalid="ignore"):
            change = np.fmin.reduce(matrix[worse] - matrix[better], axis=1)
        upper = upper + (change - (low[worse] - low[better]))
        exact = exact + change
        open_pairs = upper >= -slack
        worse, better, upper, exact = worse[open_pairs], better[open_pairs], upper[open_pairs], exact[open_pairs]
    work.keep(node, _undominated(costs.size, worse=worse[exact >= 0], better=better[exact >= 0]))


def _undominated(count: int, *, worse: IntArray, better: IntArray) -> NDArray[np.bool_]:
    """What stays when each strategy with a better one that is still there goes; of equals, the last stays."""
    kept = np.ones(count, dtype=np.bool_)
    for first, second in zip(worse.tolist(), better.tolist(), strict=True):
        if kept[second]:
            kept[first] = False
    return kept


def _finish(work: Workspace) -> Simplified:
    if work.infeasible:
        return Simplified(problem=Problem(node_costs=()), offset=math.inf, nodes=(), steps=())
    nodes = tuple(sorted(work.costs))
    number = {node: index for index, node in enumerate(nodes)}
    edges = tuple(
        Edge(source=number[source], target=number[target], costs=costs)
        for source in nodes
        for target, costs in sorted(work.edges[source].items())
        if source < target
    )
    usages = tuple(
        Usage(node=number[node], bytes=used, start=first, end=last)
        for node in nodes
        for (first, last), used in sorted(work.bytes[node].items())
    )
    if usages:
        everyone = np.ones(work.costs[nodes[0]].size)
        usages += tuple(
            Usage(node=0, bytes=used * everyone, start=index, end=index + 1)
            for index, used in enumerate(work.base_bytes.tolist())
        )
    return Simplified(
        problem=Problem(
            node_costs=tuple(work.costs[node] for node in nodes),
            edges=edges,
            usages=usages,
            limit_bytes=work.limit_bytes if usages else None,
        ),
        offset=work.offset,
        nodes=nodes,
        steps=tuple(work.steps),
    )
