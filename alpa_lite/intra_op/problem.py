"""The intra-op problem: one strategy for every node, at least total cost, within a memory limit.

Nodes v have strategies i with costs c_v(i); edges (u, v) have costs C_uv(i, j) for pairs of strategies; a usage says
how many bytes b_v(i) a node keeps alive during a half-open interval of time. Costs are seconds; ``inf`` forbids.

    choices    x_v in {0, ..., S_v - 1} for every node v                      ``Problem``
    cost       sum_v c_v(x_v) + sum_(u,v) C_uv(x_u, x_v)                      ``_cost``
    peak       max_t sum of b_v(x_v) over the usages with start <= t < end    ``_peak_bytes``
    feasible   cost < inf and peak <= limit                                   ``evaluate``
    gap        (cost - bound) / |cost|                                        ``Solution.gap``

``evaluate`` shares no code with any solver: it is the judge of all of them.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


def _frozen_array(values: object) -> FloatArray:
    """A read-only float64 view of ``values``; the caller's own array stays writable."""
    array = np.asarray(values, dtype=np.float64).view()
    array.setflags(write=False)
    return array


def _check_costs(costs: FloatArray, *, owner: str) -> None:
    if np.isnan(costs).any() or np.isneginf(costs).any():
        raise ValueError(
            f"{owner} has a cost that is NaN or minus infinity; a cost is a number of seconds, or inf to forbid the "
            "choice. Check the cost model that priced it."
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Edge:
    """The cost in seconds between two nodes' strategies: ``costs[i, j]`` for ``source`` at i and ``target`` at j."""

    source: int
    target: int
    costs: FloatArray

    def __post_init__(self) -> None:
        object.__setattr__(self, "costs", _frozen_array(self.costs))
        _check_costs(self.costs, owner=f"The edge ({self.source}, {self.target})")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Usage:
    """``bytes[i]`` that ``node`` keeps alive in the times ``start <= t < end`` when it takes strategy i.

    Fractions of a byte are rounded up: sums of whole numbers are exact, so "fits" never depends on their order.
    """

    node: int
    bytes: FloatArray
    start: int
    end: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "bytes", _frozen_array(np.ceil(self.bytes)))
        if not np.isfinite(self.bytes).all() or (self.bytes < 0).any():
            raise ValueError(
                f"A usage of node {self.node} holds a negative or non-finite number of bytes; memory is finite and "
                "non-negative. To forbid a strategy, give it an infinite node cost."
            )
        if self.end <= self.start:
            raise ValueError(
                f"A usage of node {self.node} lives from {self.start} to {self.end}, which is empty; give an end "
                "after the start, or leave the usage out."
            )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Problem:
    """One intra-op problem; ``node_costs[v][i]`` in seconds; ``limit_bytes`` is None when memory does not matter.

    Raises ValueError, in a sentence, when the parts do not fit together.
    """

    node_costs: tuple[FloatArray, ...]
    edges: tuple[Edge, ...] = ()
    usages: tuple[Usage, ...] = ()
    limit_bytes: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "node_costs", tuple(_frozen_array(costs) for costs in self.node_costs))
        object.__setattr__(self, "edges", tuple(self.edges))
        object.__setattr__(self, "usages", tuple(self.usages))
        for node, costs in enumerate(self.node_costs):
            if costs.ndim != 1 or costs.size == 0:
                raise ValueError(
                    f"Node {node} has costs of shape {costs.shape}; a node needs a vector with one cost for each of "
                    "its strategies, and at least one strategy (replication is always one)."
                )
            _check_costs(costs, owner=f"Node {node}")
        for edge in self.edges:
            self._check_edge(edge)
        for usage in self.usages:
            self._check_usage(usage)
        if self.limit_bytes is not None and not (math.isfinite(self.limit_bytes) and self.limit_bytes >= 0):
            raise ValueError(
                f"The memory limit is {self.limit_bytes} bytes; give a finite non-negative number, or None for none."
            )

    def _check_node(self, node: int, *, owner: str) -> None:
        if not 0 <= node < len(self.node_costs):
            raise ValueError(f"{owner} names node {node}, but the problem has nodes 0 to {len(self.node_costs) - 1}.")

    def _check_edge(self, edge: Edge) -> None:
        owner = f"The edge ({edge.source}, {edge.target})"
        self._check_node(edge.source, owner=owner)
        self._check_node(edge.target, owner=owner)
        if edge.source == edge.target:
            raise ValueError(f"{owner} joins a node to itself; add such a cost to the node's own costs instead.")
        needed = (self.node_costs[edge.source].size, self.node_costs[edge.target].size)
        if edge.costs.shape != needed:
            raise ValueError(
                f"{owner} has costs of shape {edge.costs.shape}, but its nodes have {needed[0]} and {needed[1]} "
                "strategies; give one row per strategy of the source and one column per strategy of the target."
            )

    def _check_usage(self, usage: Usage) -> None:
        self._check_node(usage.node, owner="A usage")
        needed = self.node_costs[usage.node].size
        if usage.bytes.shape != (needed,):
            raise ValueError(
                f"A usage of node {usage.node} has bytes of shape {usage.bytes.shape}, but the node has {needed} "
                "strategies; give one number of bytes for each."
            )

    @property
    def num_strategies(self) -> tuple[int, ...]:
        """The number of strategies of every node."""
        return tuple(costs.size for costs in self.node_costs)


class Status(enum.Enum):
    """How a solve ended."""

    OPTIMAL = "optimal"  # choices found, proven best
    FEASIBLE = "feasible"  # choices found, not proven best
    INFEASIBLE = "infeasible"  # proven: no choices have finite cost within the limit
    TIME_LIMIT = "time limit"  # stopped with nothing found and nothing proven


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What a problem says of some choices."""

    cost: float
    peak_bytes: float
    feasible: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The answer of a solver.

    ``cost`` (seconds) is ``evaluate``'s, ``inf`` without choices. ``bound`` (seconds) is proven: no choices cost less.
    ``peak_bytes`` is that of the choices; when the status is INFEASIBLE, the smallest peak found among the choices of
    finite cost (``inf`` if there are none), so that a message can say how much memory would be needed.
    """

    choices: tuple[int, ...] | None
    cost: float
    status: Status
    bound: float
    seconds: float
    solver: str
    peak_bytes: float

    @property
    def gap(self) -> float:
        """(cost - bound) / |cost|, relative and never negative; 0 when they agree, ``inf`` when nothing is known."""
        if self.choices is None or math.isinf(self.bound):
            return math.inf
        difference = max(self.cost - self.bound, 0.0)
        return difference if difference == 0.0 else difference / max(abs(self.cost), math.ulp(0.0))


def _cost(problem: Problem, choices: Sequence[int]) -> float:
    """sum_v c_v(x_v) + sum_(u,v) C_uv(x_u, x_v), in seconds."""
    total = sum(float(costs[choice]) for costs, choice in zip(problem.node_costs, choices, strict=True))
    return total + sum(float(edge.costs[choices[edge.source], choices[edge.target]]) for edge in problem.edges)


def _peak_bytes(problem: Problem, choices: Sequence[int]) -> float:
    """max_t sum of b_v(x_v) over usages with start <= t < end; the maximum is reached where some usage starts."""
    used = np.array([usage.bytes[choices[usage.node]] for usage in problem.usages], dtype=np.float64)
    starts = np.array([usage.start for usage in problem.usages])
    ends = np.array([usage.end for usage in problem.usages])
    return max((float(used[(starts <= time) & (time < ends)].sum()) for time in set(starts.tolist())), default=0.0)


def evaluate(problem: Problem, choices: Sequence[int]) -> Evaluation:
    """The cost in seconds, the peak in bytes and the feasibility of one strategy per node.

    Raises ValueError when ``choices`` does not name one existing strategy for each node.
    """
    if len(choices) != len(problem.node_costs):
        raise ValueError(f"{len(choices)} choices were given for {len(problem.node_costs)} nodes; give one for each.")
    for node, (choice, size) in enumerate(zip(choices, problem.num_strategies, strict=True)):
        if not 0 <= choice < size:
            raise ValueError(f"Choice {choice} was given for node {node}, which has strategies 0 to {size - 1}.")
    cost = _cost(problem, choices)
    peak_bytes = _peak_bytes(problem, choices)
    fits = problem.limit_bytes is None or peak_bytes <= problem.limit_bytes
    return Evaluation(cost=cost, peak_bytes=peak_bytes, feasible=fits and math.isfinite(cost))
