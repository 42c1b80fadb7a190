"""Partition crossover: combine two solutions into one that is at least as good as both.

D          the nodes in which x and y differ; the parts P of D are its connected components
gain(P)    cost(x) - cost(x with y on P): the gains of different parts add up        ``_gains``
taken      the parts of positive gain, largest first, as long as memory allows       ``recombine``
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from alpa_lite.intra_op.problem import FloatArray, IntArray, Problem
from alpa_lite.intra_op.solvers.components import connected_parts
from alpa_lite.intra_op.solvers.flat_problem import Flat, add_usage, overrun_of


def _costs(problem: Problem, choices: IntArray) -> tuple[FloatArray, FloatArray]:
    """What each node and each edge costs."""
    sources, targets = problem.edge_nodes.T
    pairs = choices[sources] * problem.node_costs.sizes[targets] + choices[targets]
    own = problem.node_costs.values[problem.node_costs.starts[:-1] + choices]
    return own, problem.edge_costs.values[problem.edge_costs.starts[:-1] + pairs]


def _gains(problem: Problem, first: IntArray, second: IntArray, parts: list[IntArray]) -> FloatArray:
    """What each part saves when it changes from ``first`` to ``second``."""
    part_of = np.full(problem.num_nodes, -1, dtype=np.intp)
    for number, nodes in enumerate(parts):
        part_of[nodes] = number
    own, pairs = (before - after for before, after in zip(_costs(problem, first), _costs(problem, second), strict=True))
    gains = np.zeros(len(parts) + 1)  # what lies in no part, number -1, saves nothing
    np.add.at(gains, part_of, own)
    np.add.at(gains, part_of[problem.edge_nodes].max(axis=1), pairs)
    return gains[:-1]


def recombine(problem: Problem, flat: Flat, first: IntArray, second: IntArray) -> IntArray:
    """``first``, with the parts of ``second`` that make it cheaper and leave it within the limit.

    Both have finite cost, and ``first`` fits.
    """
    parts = _parts(problem, first != second)
    gains = _gains(problem, first, second, parts)
    result, overrun = first.copy(), overrun_of(flat, first)
    for part in sorted(range(len(parts)), key=lambda part: -gains[part]):
        if gains[part] <= 0.0:
            break
        changed = overrun.copy()
        for node in parts[part].tolist():
            add_usage(flat, node, int(first[node]), -1.0, changed)
            add_usage(flat, node, int(second[node]), 1.0, changed)
        if (changed <= 0.0).all():
            overrun = changed
            result[parts[part]] = second[parts[part]]
    return result


def _parts(problem: Problem, differs: NDArray[np.bool_]) -> list[IntArray]:
    nodes = np.flatnonzero(differs)
    place = np.full(differs.size, -1, dtype=np.intp)
    place[nodes] = np.arange(nodes.size)
    ends = place[problem.edge_nodes]
    return [nodes[part] for part in connected_parts(nodes.size, ends[(ends >= 0).all(axis=1)])]
