"""Exact reductions of the intra-op problem, applied to a fixpoint. None changes the optimum, and each can be undone.

    parallel edges    C, C' on one pair                  -> C + C'                              ``Workspace.load``
    forbidden         i has c_v(i) = inf, no finite partner at a neighbour, or more bytes
                      than the others' least leave free  -> remove i     ``_drop_forbidden``, ``_drop_lonely``
    separable edge    C(i, j) = f(i) + g(j)              -> c_u + f, c_v + g, no edge            ``_fold_separable``
    functional edge   each i of u allows one j = m(i)    -> v joins u: x_v = m(x_u)              ``_merge``
    degree 0, 1, 2    T(N) = min_i c_v(i) + sum_n C_vn(i, x_n) -> offset, node costs, edge       ``eliminate``
    dominated (Goldstein)
                      c(i) - c(j) + sum_n min_k (C_vn(i, k) - C_vn(j, k)) >= 0 and
                      b_j <= b_i in every row            -> remove i                           ``drop_dominated``
    memory rows       all bytes alive in one row are alive in another -> remove the row        ``_rows_that_bind``

A node with one strategy needs no rule of its own: each of its edges is separable, and then its degree is 0. A node is
eliminated only if all its strategies use the same bytes, since the minimum over i must not depend on memory. Equal
sub-problems, which repeated layers cause, are minimised once (``_MinPlus``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from alpa_lite.intra_op.problem import Edge, FloatArray, IntArray, Problem, Usage
from alpa_lite.intra_op.reductions import (
    Kept,
    NodeUsage,
    RangeMaximum,
    UndoStep,
    Workspace,
    drop_dominated,
    sum_over_rows,
)

_ROUNDING = 1e-13
_CHUNK_ENTRIES = 4_000_000
"""The most entries of one temporary array of a min-plus product (8 bytes each)."""
_MAX_JOINT_ENTRIES = 50_000_000
"""A node is not eliminated if that would enumerate more combinations of its and its neighbours' strategies."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Simplified:
    """A reduced problem with its inverse: optimum of the original = ``offset`` + optimum of ``problem`` (seconds).

    ``offset`` is inf when the reductions proved that no choices are feasible (``problem`` is then empty). ``nodes`` are
    the original numbers of the remaining nodes. Times of the reduced problem number the memory rows that can bind.
    """

    problem: Problem
    offset: float
    nodes: tuple[int, ...]
    steps: tuple[UndoStep, ...]

    def restore(self, choices: Sequence[int]) -> tuple[int, ...]:
        """Return choices of the original problem from choices of the reduced one; they cost ``offset`` more."""
        if math.isinf(self.offset):
            raise ValueError(
                "The problem has no feasible choices, so there is nothing to restore; look at offset first."
            )
        restored = {node: int(choice) for node, choice in zip(self.nodes, choices, strict=True)}
        for step in reversed(self.steps):
            step.restore(restored)
        return tuple(restored[node] for node in sorted(restored))

    def project(self, choices: Sequence[int]) -> tuple[int, ...]:
        """Return choices of the reduced problem near ``choices`` of the original: equal where the strategies remain."""
        left = dict(enumerate(choices))
        for step in self.steps:
            step.project(left)
        return tuple(left[node] for node in self.nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The size of a problem; ``pairs`` counts the entries of its matrices."""

    nodes: int
    strategies: int
    edges: int
    pairs: int


Tick = Callable[[], None]
"""Callback between two reductions; it raises `_Stopped` once time is up."""

Observer = Callable[[str, Size], None]
"""Callback after each kind of reduction, with the name of the kind and the size of the remaining problem."""


def simplify(
    problem: Problem,
    *,
    observe: Observer | None = None,
    early: Callable[[Simplified], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Simplified:
    """Apply every reduction until none applies. Without a limit, usages have no effect and are left out.

    ``observe`` is called after each kind of reduction, for tables of what each kind removes. ``early`` gets the problem
    after the edge reductions, which come first, take a small part of the time, and leave no long chains of nodes that
    follow each other. Once ``stop`` returns True, the problem is returned unreduced: writing down a partly reduced
    problem would itself take a good part of the time.
    """
    work = Workspace.load(problem)
    try:
        _to_a_fixpoint(work, observe, early, _tick(stop))
    except _Stopped:
        return Simplified(problem=problem, offset=0.0, nodes=tuple(range(problem.num_nodes)), steps=())
    return _finish(work)


class _Stopped(Exception):
    """Raised to leave the reductions when time is up."""


def _tick(stop: Callable[[], bool]) -> Tick:
    def tick() -> None:
        if stop():
            raise _Stopped

    return tick


def _to_a_fixpoint(
    work: Workspace, observe: Observer | None, early: Callable[[Simplified], None] | None, tick: Tick
) -> None:
    tables, kept = _MinPlus(), Kept()

    def done(name: str) -> None:
        if observe is not None:
            observe(name, _size_of(work))

    done("given")
    base = np.full(work.base_change.size - 1, -np.inf)
    while (work.changed_edges or work.changed or work.stale) and not work.infeasible:
        _reduce_edges(work, tick)
        done("edges")
        if early is not None and not work.infeasible:
            # Settled node by node, so that the clock is checked meanwhile, which `_finish` does not do.
            for node in work.costs:
                tick()
                work.alive_of(node)
            early(_finish(work))
            early = None
        base = _drop_what_cannot_fit(work, base, tick)
        done("memory")
        _eliminate_changed(work, tables, tick, max_degree=1)
        done("degree 1")
        # Cheap reductions go first: dominance and degree 2 are tried only when none of them applies any more.
        if work.changed_edges or work.changed:
            continue
        for node in sorted(work.stale):
            if node in work.costs and not work.infeasible:
                tick()
                drop_dominated(work, node, kept)
        work.stale.clear()
        done("dominated")
        if not (work.changed_edges or work.changed):
            work.changed = dict.fromkeys(work.costs)
            _eliminate_changed(work, tables, tick, max_degree=2)
            done("degree 2")


def _size_of(work: Workspace) -> Size:
    return Size(
        nodes=len(work.costs),
        strategies=sum(costs.size for costs in work.costs.values()),
        edges=sum(map(len, work.edges.values())) // 2,
        pairs=sum(costs.size for by_other in work.edges.values() for costs in by_other.values()) // 2,
    )


# ---------------------------------------------------------------------------------------------------------------- edges


def _reduce_edges(work: Workspace, tick: Tick) -> None:
    for node in list(work.changed):
        tick()
        _drop_forbidden(work, node)
    while work.changed_edges and not work.infeasible:
        changed, work.changed_edges = work.changed_edges, {}
        for source, target in changed:
            tick()
            if target in work.edges.get(source, ()) and not work.infeasible:
                _reduce_edge(work, source, target)


def _drop_forbidden(work: Workspace, node: int) -> None:
    if node in work.costs and not work.infeasible:
        work.keep(node, np.isfinite(work.costs[node]))


def _reduce_edge(work: Workspace, source: int, target: int) -> None:
    finite = np.isfinite(work.edges[source][target])
    if finite.all():
        _fold_separable(work, source, target)
        return
    by_source, by_target = finite.sum(axis=1), finite.sum(axis=0)
    if not (by_source.all() and by_target.all()):
        _drop_lonely(work, (source, by_source > 0), (target, by_target > 0))
        return
    follows = [
        (node, into, axis)
        for node, into, axis, counts in ((target, source, 1, by_source), (source, target, 0, by_target))
        if (counts == 1).all()
    ]
    if follows:
        # Merging the node with fewer edges moves fewer matrices.
        node, into, axis = min(follows, key=lambda follow: len(work.edges[follow[0]]))
        _merge(work, node=node, into=into, follows=finite.argmax(axis=axis))


def _drop_lonely(work: Workspace, *kept: tuple[int, NDArray[np.bool_]]) -> None:
    """Remove the strategies without a finite partner across an edge."""
    for node, mask in kept:
        if not work.infeasible:
            work.keep(node, mask)


def _fold_separable(work: Workspace, source: int, target: int) -> None:
    """Fold an edge with C(i, j) = f(i) + g(j), up to rounding, into node costs."""
    costs = work.edges[source][target]
    row_part = costs[:, 0]
    column_part = costs[0, :] - costs[0, 0]
    # The candidate f is the first column and g the first row: if the costs are separable at all, these add up to them.
    residual = np.abs(costs - row_part[:, None] - column_part[None, :]).max()
    if residual <= _ROUNDING * np.abs(costs).max():
        work.costs[source] = work.costs[source] + row_part
        work.costs[target] = work.costs[target] + column_part
        work.remove_edge(source, target)
        work.touch((source, target))


def _merge(work: Workspace, *, node: int, into: int, follows: IntArray) -> None:
    """Merge ``node`` into ``into``: it takes strategy follows[x] when ``into`` takes x."""
    columns = np.arange(follows.size)
    work.costs[into] = work.costs[into] + work.costs[node][follows] + work.edges[node][into][follows, columns]
    for other, costs in list(work.edges[node].items()):
        if other != into:
            work.add_edge(into, other, costs[follows])
    for alive in work.take_alive(node):
        work.add_alive(into, NodeUsage(rows=alive.rows, bytes=alive.bytes[:, follows]))
    work.touch((into,))
    work.remove_node(node, best=follows, neighbours=(into,))


# --------------------------------------------------------------------------------------------------------------- memory


def _drop_what_cannot_fit(work: Workspace, seen: FloatArray, tick: Tick) -> FloatArray:
    """Remove strategies that exceed the limit even with the least bytes of all other nodes; return the current base.

    If the base grew anywhere since it was ``seen``, every node is examined again, else only the changed ones.
    """
    if seen.size == 0 or work.infeasible:
        return seen
    for node in list(work.changed):
        tick()
        if node in work.costs:
            work.alive_of(node)
    base = work.base_bytes
    if (base > work.limit_bytes).any():
        work.offset = math.inf
        return base
    # The base is the same for all nodes: one table answers the many intervals of their usages.
    highest = RangeMaximum(base)
    for node in list(work.costs) if (base > seen).any() else list(work.changed):
        tick()
        alive = work.alive_of(node) if node in work.costs else None
        if alive is not None and not work.infeasible:
            room = work.limit_bytes - highest.of(alive.rows)
            work.keep(node, np.less_equal(alive.bytes, room[:, None]).min(axis=0))
    return base


# ---------------------------------------------------------------------------------------------------------- elimination


@dataclass(frozen=True, slots=True, kw_only=True)
class _MinPlus:
    """Cached min-plus product T[a, b] = min_i left[i, a] + right[i, b] with its minimiser, for equal layers."""

    known: dict[tuple[bytes, bytes, int], tuple[FloatArray, IntArray]] = field(
        default_factory=dict[tuple[bytes, bytes, int], tuple[FloatArray, IntArray]]
    )

    def __call__(self, left: FloatArray, right: FloatArray) -> tuple[FloatArray, IntArray]:
        # With the number of rows, which both have, the bytes determine the shapes.
        key = (left.tobytes(), right.tobytes(), left.shape[0])
        if key not in self.known:
            self.known[key] = _min_plus(left, right)
        return self.known[key]


def _min_plus(left: FloatArray, right: FloatArray) -> tuple[FloatArray, IntArray]:
    """Compute the min-plus product a few columns at a time, to bound the temporary array."""
    size = max(1, _CHUNK_ENTRIES // max(1, right.size))
    tables: list[FloatArray] = []
    bests: list[IntArray] = []
    for begin in range(0, left.shape[1], size):
        joint = left[:, begin : begin + size, None] + right[:, None, :]
        best = joint.argmin(axis=0)
        bests.append(best)
        tables.append(np.take_along_axis(joint, best[None], axis=0)[0])
    return np.concatenate(tables), np.concatenate(bests)


def _eliminate_changed(work: Workspace, tables: _MinPlus, tick: Tick, *, max_degree: int) -> None:
    """Eliminate changed nodes of low degree without memory usage, and those whose degree falls as a result."""
    while work.changed and not work.infeasible:
        changed, work.changed = work.changed, {}
        for node in changed:
            tick()
            if node in work.costs and len(work.edges[node]) <= max_degree:
                # With memory the choice would depend on the rows, on which all other nodes have a say.
                if work.alive_of(node) is None and _is_small(work, node):
                    eliminate(work, node, tables)


def _is_small(work: Workspace, node: int) -> bool:
    around = math.prod(work.costs[other].size for other in work.edges[node])
    return around * work.costs[node].size <= _MAX_JOINT_ENTRIES


def eliminate(work: Workspace, node: int, tables: Callable[..., tuple[FloatArray, IntArray]] = _min_plus) -> None:
    """Minimise over ``node``, which has at most two neighbours, for each combination of the neighbours' choices."""
    costs = work.costs[node]
    neighbours = tuple(sorted(work.edges[node]))
    if not neighbours:
        # Nothing else depends on the choice of this node.
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
        # The node's own costs go to one of its two edges, so that the sum over both counts them once.
        left = work.edges[node][first] + costs[:, None]
        table, best = tables(left, work.edges[node][second])
        work.remove_node(node, best=best, neighbours=neighbours)
        work.add_edge(first, second, table)


# --------------------------------------------------------------------------------------------------------------- result


def _rows_that_bind(base: FloatArray, alive: Sequence[NodeUsage], limit_bytes: float) -> IntArray:
    """Return the rows that can exceed the limit, without those whose bytes are all alive in an adjacent row."""
    if not alive:
        return np.zeros(0, dtype=np.intp)
    intervals = np.concatenate([each.rows for each in alive])
    most = np.concatenate([each.bytes.max(axis=1) for each in alive])
    rows = np.flatnonzero(base + sum_over_rows(base.size, intervals, most) > limit_bytes)
    while rows.size > 1:
        first, last = np.searchsorted(rows, intervals).T
        some = first < last
        begins = np.bincount(first[some], minlength=rows.size + 1)[: rows.size] > 0
        ends = np.bincount(last[some], minlength=rows.size + 1)[: rows.size] > 0
        here = base[rows]
        in_previous = np.append(False, ~begins[1:] & (here[1:] <= here[:-1]))
        in_next = np.append(~ends[1:] & (here[:-1] <= here[1:]), False)
        in_next[:-1] &= ~in_previous[1:]  # of two equal rows, one must remain
        if not (in_previous | in_next).any():
            break
        rows = rows[~(in_previous | in_next)]
    return rows


def _finish(work: Workspace) -> Simplified:
    nodes = tuple(sorted(work.costs))
    number = {node: index for index, node in enumerate(nodes)}
    alive = {number[node]: alive for node in nodes if (alive := work.alive_of(node)) is not None}
    base = work.base_bytes
    # The last reductions may have raised the base after the last memory check, or time was up before that check.
    if work.infeasible or (base > work.limit_bytes).any():
        return Simplified(problem=Problem.of(node_costs=()), offset=math.inf, nodes=(), steps=())
    rows = _rows_that_bind(base, tuple(alive.values()), work.limit_bytes)
    usages = [
        Usage(node=node, bytes=used, start=first, end=last)
        for node, each in alive.items()
        for used, (first, last) in zip(each.bytes, np.searchsorted(rows, each.rows).tolist(), strict=True)
        if first < last
    ]
    if usages:
        # `Problem` has no base: node 0 stands for it, with usages that are equal for all of its strategies.
        everyone = np.ones(work.costs[nodes[0]].size)
        usages += [
            Usage(node=0, bytes=used * everyone, start=index, end=index + 1)
            for index, used in enumerate(base[rows].tolist())
            if used > 0.0
        ]
    return Simplified(
        problem=Problem.of(
            node_costs=(work.costs[node] for node in nodes),
            edges=(
                Edge(source=number[source], target=number[target], costs=costs)
                for source in nodes
                for target, costs in sorted(work.edges[source].items())
                if source < target
            ),
            usages=usages,
            limit_bytes=work.limit_bytes if usages else None,
        ),
        offset=work.offset,
        nodes=nodes,
        steps=tuple(work.steps),
    )
