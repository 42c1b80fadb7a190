"""The least and the most that choices of finite cost can cost, node by node and edge by edge."""

from __future__ import annotations

import math

import numpy as np

from alpa_lite.intra_op.problem import Problem, Ragged


def largest_cost(problem: Problem) -> float:
    """sum_v max finite c_v + sum_uv max finite C_uv: no choices of finite cost cost more (seconds)."""
    return sum(_extremes(vectors, np.maximum, -np.inf) for vectors in (problem.node_costs, problem.edge_costs))


def smallest_cost(problem: Problem) -> float:
    """sum_v min c_v + sum_uv min C_uv: no choices cost less (seconds)."""
    return sum(_extremes(vectors, np.minimum, np.inf) for vectors in (problem.node_costs, problem.edge_costs))


def cost_span(problem: Problem) -> float:
    """By how much choices of finite cost may differ in cost, at the most; 1 second if not at all."""
    return largest_cost(problem) - smallest_cost(problem) or 1.0


def _extremes(vectors: Ragged, operation: np.ufunc, neutral: float) -> float:
    if not len(vectors):
        return 0.0
    values = np.where(np.isfinite(vectors.values), vectors.values, neutral)
    return math.fsum(operation.reduceat(values, vectors.starts[:-1]).tolist())
