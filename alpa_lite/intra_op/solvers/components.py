"""Connected components of a graph."""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import itertools

import numpy as np

from alpa_lite.intra_op.problem import IntArray


def connected_parts(num_nodes: int, edges: IntArray) -> list[IntArray]:
    """Return the nodes of every connected component, ascending; ``edges`` is (E, 2): pairs of nodes."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    if num_nodes == 0:
        return []
    joined = coo_array((np.ones(len(edges)), (edges[:, 0], edges[:, 1])), shape=(num_nodes, num_nodes))
    number, part_of = connected_components(joined, directed=False)
    order = np.argsort(part_of, kind="stable").astype(np.intp)
    ends = np.cumsum(np.bincount(part_of, minlength=int(number))).tolist()
    return [order[first:last] for first, last in itertools.pairwise([0, *ends])]
