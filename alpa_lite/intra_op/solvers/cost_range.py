"""Bounds on the cost of choices of finite cost, node by node and edge by edge."""

from __future__ import annotations

import math

import numpy as np

from alpa_lite.intra_op.problem import Problem, Ragged


def largest_cost(problem: Problem) -> float:
    """Return sum_v max finite c_v + sum_uv max finite C_uv (seconds), an upper bound of every finite cost."""
    return sum(_extremes(vectors, np.maximum, -np.inf) for vectors in (problem.node_costs, problem.edge_costs))


def smallest_cost(problem: Problem) -> float:
    """Return sum_v min c_v + sum_uv min C_uv (seconds), a lower bound of every cost."""
    return sum(_extremes(vectors, np.minimum, np.inf) for vectors in (problem.node_costs, problem.edge_costs))


def cost_span(problem: Problem) -> float:
    """Return the largest possible difference in cost between choices of finite cost (seconds), or 1.0 if it is zero."""
    return largest_cost(problem) - smallest_cost(problem) or 1.0


def _extremes(vectors: Ragged, operation: np.ufunc, neutral: float) -> float:
    if not len(vectors):
        return 0.0
    values = np.where(np.isfinite(vectors.values), vectors.values, neutral)
    return math.fsum(operation.reduceat(values, vectors.starts[:-1]).tolist())
