"""The intra-op problem: one strategy for every node, at least total cost, within a memory limit.

Nodes v have strategies i with costs c_v(i); edges (u, v) have costs C_uv(i, j) for pairs of strategies; a usage says
how many bytes b_v(i) a node keeps alive during a half-open interval of time. Costs are in seconds; ``inf`` forbids a
strategy or a pair.

    choices    x_v in {0, ..., S_v - 1} for every node v                      ``Problem``
    cost       sum_v c_v(x_v) + sum_(u,v) C_uv(x_u, x_v)                      ``_cost``
    usage      U(t) = sum of b_v(x_v) over the usages with start <= t < end   ``usage_over_time``
    peak       max_t U(t)                                                     ``evaluate``
    feasible   cost < inf and peak <= limit                                   ``evaluate``
    gap        (cost - bound) / |cost|                                        ``Solution.gap``

``evaluate`` shares no code with any solver, so that it can verify all of them. All data is held in a few flat arrays,
since a problem may have 10^5 nodes and 10^7 pairs of strategies.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.intp]

_MAX_TOTAL_BYTES = 2.0**62
"""The largest total of bytes: sums of bytes are computed in 64-bit integers."""


_Scalar = TypeVar("_Scalar", bound=np.generic)


def _frozen(array: NDArray[_Scalar]) -> NDArray[_Scalar]:
    """Return a read-only view; the caller's own array stays writable."""
    view = array.view()
    view.setflags(write=False)
    return view


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ragged:
    """Vectors of different lengths in one flat array: vector k is ``values[starts[k] : starts[k + 1]]``."""

    values: FloatArray
    starts: IntArray

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", _frozen(np.asarray(self.values, dtype=np.float64)))
        object.__setattr__(self, "starts", _frozen(np.asarray(self.starts, dtype=np.intp)))

    @staticmethod
    def of(vectors: Iterable[object]) -> Ragged:
        """Concatenate vectors; matrices are flattened row by row."""
        flat = [np.asarray(vector, dtype=np.float64).reshape(-1) for vector in vectors]
        sizes = np.array([vector.size for vector in flat], dtype=np.intp)
        values = np.concatenate(flat) if flat else np.zeros(0)
        return Ragged(values=values, starts=np.concatenate([np.zeros(1, dtype=np.intp), np.cumsum(sizes)]))

    def __len__(self) -> int:
        return self.starts.size - 1

    def __getitem__(self, index: int) -> FloatArray:
        # A negative index would silently give a slice of other vectors.
        if not 0 <= index < len(self):
            raise IndexError(f"There is no vector {index} among {len(self)}.")
        return self.values[self.starts[index] : self.starts[index + 1]]

    def __iter__(self) -> Iterator[FloatArray]:
        # Slicing by Python integers is faster than by NumPy's.
        starts = self.starts.tolist()
        for first, last in itertools.pairwise(starts):
            yield self.values[first:last]

    @property
    def sizes(self) -> IntArray:
        """The length of every vector."""
        return np.diff(self.starts)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Edge:
    """The cost in seconds of each pair of strategies of two nodes: ``costs[i, j]``, i of `source`, j of `target`."""

    source: int
    target: int
    costs: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Usage:
    """The memory that ``node`` keeps alive in the times ``start <= t < end``: ``bytes[i]`` under strategy i."""

    node: int
    bytes: FloatArray
    start: int
    end: int


# Without slots, since `memoized` stores what solvers know of a problem in its `__dict__`.
@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """An intra-op problem in flat arrays; ``Problem.of`` makes one from its parts.

    ``node_costs``: vector v holds c_v, in seconds. ``edge_nodes`` (E, 2): source and target; ``edge_costs``: vector e
    holds the matrix of edge e row by row, in seconds. ``usage_nodes`` (U,); ``usage_times`` (U, 2): start and end,
    half-open; ``usage_bytes``: vector k holds one number for each strategy of the node. Fractions of a byte are rounded
    up: sums of whole numbers are exact, so whether choices fit never depends on the order of summation. ``limit_bytes``
    is None when memory is unlimited.

    Raises ValueError when the parts do not fit together.
    """

    node_costs: Ragged
    edge_nodes: IntArray = field(default_factory=lambda: np.zeros((0, 2), dtype=np.intp))
    edge_costs: Ragged = field(default_factory=lambda: Ragged.of(()))
    usage_nodes: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.intp))
    usage_times: IntArray = field(default_factory=lambda: np.zeros((0, 2), dtype=np.intp))
    usage_bytes: Ragged = field(default_factory=lambda: Ragged.of(()))
    limit_bytes: float | None = None

    def __post_init__(self) -> None:
        for name in ("edge_nodes", "usage_nodes", "usage_times"):
            object.__setattr__(self, name, _frozen(np.asarray(getattr(self, name), dtype=np.intp)))
        whole = Ragged(values=np.ceil(self.usage_bytes.values), starts=self.usage_bytes.starts)
        object.__setattr__(self, "usage_bytes", whole)
        self._check_nodes()
        self._check_edges()
        self._check_usages()
        if self.limit_bytes is not None and not (math.isfinite(self.limit_bytes) and self.limit_bytes >= 0):
            raise ValueError(
                f"The memory limit is {self.limit_bytes} bytes; give a finite non-negative number, or None for none."
            )

    @staticmethod
    def of(
        *,
        node_costs: Iterable[object],
        edges: Iterable[Edge] = (),
        usages: Iterable[Usage] = (),
        limit_bytes: float | None = None,
    ) -> Problem:
        """Make a problem from one vector of costs per node, and edges and usages one by one.

        Raises ValueError when the parts do not fit together.
        """
        vectors = [np.asarray(costs, dtype=np.float64) for costs in node_costs]
        edges, usages = tuple(edges), tuple(usages)
        for node, costs in enumerate(vectors):
            if costs.ndim != 1:
                raise ValueError(_bad_node(node, costs.shape))
        for edge in edges:
            _check_shape(edge, vectors)
        return Problem(
            node_costs=Ragged.of(vectors),
            # Reshaped, since NumPy gives an empty list the shape (0,).
            edge_nodes=np.array([(e.source, e.target) for e in edges], dtype=np.intp).reshape(-1, 2),
            edge_costs=Ragged.of(edge.costs for edge in edges),
            usage_nodes=np.array([usage.node for usage in usages], dtype=np.intp),
            usage_times=np.array([(u.start, u.end) for u in usages], dtype=np.intp).reshape(-1, 2),
            usage_bytes=Ragged.of(usage.bytes for usage in usages),
            limit_bytes=limit_bytes,
        )

    @property
    def num_nodes(self) -> int:
        """The number of nodes."""
        return len(self.node_costs)

    @property
    def num_strategies(self) -> tuple[int, ...]:
        """The number of strategies of every node."""
        return tuple(self.node_costs.sizes.tolist())

    @property
    def edges(self) -> Iterator[Edge]:
        """Iterate over the edges; their matrices are views."""
        sizes = self.num_strategies
        sources: list[int] = self.edge_nodes[:, 0].tolist()
        targets: list[int] = self.edge_nodes[:, 1].tolist()
        for source, target, costs in zip(sources, targets, self.edge_costs, strict=True):
            yield Edge(source=source, target=target, costs=costs.reshape(sizes[source], sizes[target]))

    @property
    def usages(self) -> Iterator[Usage]:
        """Iterate over the usages; their bytes are views."""
        for node, (start, end), used in zip(
            self.usage_nodes.tolist(), self.usage_times.tolist(), self.usage_bytes, strict=True
        ):
            yield Usage(node=node, bytes=used, start=start, end=end)

    def _check_nodes(self) -> None:
        empty = np.flatnonzero(self.node_costs.sizes == 0)
        if empty.size:
            raise ValueError(_bad_node(int(empty[0]), (0,)))
        # Minus infinity would outweigh a forbidden choice, or give NaN together with it.
        bad = _first_bad(self.node_costs, np.isnan(self.node_costs.values) | np.isneginf(self.node_costs.values))
        if bad is not None:
            raise ValueError(_bad_cost(f"Node {bad}"))

    def _check_edges(self) -> None:
        outside = np.flatnonzero(((self.edge_nodes < 0) | (self.edge_nodes >= self.num_nodes)).any(axis=1))
        for index in outside:
            self._refuse_node(self.edge_nodes[index], owner=_edge_name(self.edge_nodes[index]))
        loops = np.flatnonzero(self.edge_nodes[:, 0] == self.edge_nodes[:, 1])
        for index in loops:
            raise ValueError(
                f"{_edge_name(self.edge_nodes[index])} joins a node to itself; add such a cost to the node's own costs "
                "instead."
            )
        sizes = self.node_costs.sizes[self.edge_nodes]
        # The body raises, so that each of these loops reports its first defect only.
        for index in np.flatnonzero(self.edge_costs.sizes != sizes.prod(axis=1)):
            raise ValueError(_bad_edge(self.edge_nodes[index], (int(self.edge_costs.sizes[index]),), sizes[index]))
        bad = _first_bad(self.edge_costs, np.isnan(self.edge_costs.values) | np.isneginf(self.edge_costs.values))
        if bad is not None:
            raise ValueError(_bad_cost(_edge_name(self.edge_nodes[bad])))

    def _check_usages(self) -> None:
        for index in np.flatnonzero((self.usage_nodes < 0) | (self.usage_nodes >= self.num_nodes)):
            self._refuse_node(self.usage_nodes[[index]], owner="A usage")
        needed = self.node_costs.sizes[self.usage_nodes]
        for index in np.flatnonzero(self.usage_bytes.sizes != needed):
            raise ValueError(
                f"A usage of node {self.usage_nodes[index]} has bytes of shape ({self.usage_bytes.sizes[index]},), but "
                f"the node has {needed[index]} strategies; give one number of bytes for each."
            )
        for index in np.flatnonzero(self.usage_times[:, 1] <= self.usage_times[:, 0]):
            start, end = self.usage_times[index]
            raise ValueError(
                f"A usage of node {self.usage_nodes[index]} lives from {start} to {end}, which is empty; give an end "
                "after the start, or leave the usage out."
            )
        bad = _first_bad(self.usage_bytes, ~np.isfinite(self.usage_bytes.values) | (self.usage_bytes.values < 0))
        if bad is not None:
            raise ValueError(
                f"A usage of node {self.usage_nodes[bad]} holds a negative or non-finite number of bytes; memory is "
                "finite and non-negative. To forbid a strategy, give it an infinite node cost."
            )
        if self.usage_bytes.values.sum() > _MAX_TOTAL_BYTES:
            raise ValueError("The usages hold more than 2**62 bytes together; give them in a larger unit.")

    def _refuse_node(self, nodes: IntArray, *, owner: str) -> None:
        outside = next(node for node in nodes.tolist() if not 0 <= node < self.num_nodes)
        raise ValueError(f"{owner} names node {outside}, but the problem has nodes 0 to {self.num_nodes - 1}.")


def _first_bad(vectors: Ragged, bad: NDArray[np.bool_]) -> int | None:
    """Return the number of the first vector with a bad entry, or None."""
    position = int(bad.argmax()) if bad.any() else None
    # From the right, since an empty vector starts where the next one does and owns no position.
    return None if position is None else int(np.searchsorted(vectors.starts, position, side="right")) - 1


def _edge_name(nodes: IntArray) -> str:
    return f"The edge ({nodes[0]}, {nodes[1]})"


def _bad_node(node: int, shape: tuple[int, ...]) -> str:
    return (
        f"Node {node} has costs of shape {shape}; a node needs a vector with one cost for each of its strategies, and "
        "at least one strategy (replication is always one)."
    )


def _bad_cost(owner: str) -> str:
    return (
        f"{owner} has a cost that is NaN or minus infinity; a cost is a number of seconds, or inf to forbid the "
        "choice. Check the cost model that priced it."
    )


def _bad_edge(nodes: IntArray, shape: tuple[int, ...], needed: Sequence[int] | IntArray) -> str:
    return (
        f"{_edge_name(nodes)} has costs of shape {shape}, but its nodes have {needed[0]} and {needed[1]} strategies; "
        "give one row per strategy of the source and one column per strategy of the target."
    )


def _check_shape(edge: Edge, vectors: Sequence[FloatArray]) -> None:
    """Raise ValueError for a matrix with the right number of entries and the wrong shape, which ``Problem`` accepts."""
    nodes, shape = np.array([edge.source, edge.target], dtype=np.intp), np.shape(edge.costs)
    if all(0 <= node < len(vectors) for node in nodes.tolist()):
        needed = (vectors[edge.source].size, vectors[edge.target].size)
        # Loops have an error message of their own in `Problem`.
        if shape != needed and edge.source != edge.target:
            raise ValueError(_bad_edge(nodes, shape, needed))


class Status(enum.Enum):
    """The outcome of a solve."""

    OPTIMAL = "optimal"  # choices found, proven best
    FEASIBLE = "feasible"  # choices found, not proven best
    INFEASIBLE = "infeasible"  # proven: no choices have finite cost within the limit
    TIME_LIMIT = "time limit"  # stopped with nothing found and nothing proven


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The cost (seconds), peak memory (bytes) and feasibility of some choices."""

    cost: float
    peak_bytes: float
    feasible: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The answer of a solver.

    ``cost`` (seconds) is computed by ``evaluate``, and is ``inf`` without choices. ``bound`` (seconds) is a proven
    lower bound: no choices cost less. ``seconds`` is the duration of the solve. ``peak_bytes`` is the peak of the
    choices; when the status is INFEASIBLE, it is the smallest peak that the solver reached with choices of finite cost
    (``inf`` if there are none), so that a message can say how much memory would be needed.
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
        """The relative gap (cost - bound) / |cost|; 0 when both agree, ``inf`` without choices or a bound."""
        if self.choices is None or math.isinf(self.bound):
            return math.inf
        difference = max(self.cost - self.bound, 0.0)
        # The smallest float in place of a cost of zero makes the gap infinite instead of a division by zero.
        return difference if difference == 0.0 else difference / max(abs(self.cost), math.ulp(0.0))


def _cost(problem: Problem, choices: IntArray) -> float:
    """Return sum_v c_v(x_v) + sum_(u,v) C_uv(x_u, x_v) in seconds, correctly rounded: the order does not matter."""
    sources, targets = problem.edge_nodes.T
    pairs = choices[sources] * problem.node_costs.sizes[targets] + choices[targets]
    own = problem.node_costs.values[problem.node_costs.starts[:-1] + choices]
    # Solvers add in other orders; with correct rounding, equal choices have equal costs in all of them.
    return math.fsum([*own.tolist(), *problem.edge_costs.values[problem.edge_costs.starts[:-1] + pairs].tolist()])


def usage_over_time(problem: Problem, choices: Sequence[int]) -> tuple[IntArray, IntArray]:
    """Return the times at which usage may change, ascending, and the bytes alive from each of them until the next."""
    chosen = np.asarray(choices, dtype=np.intp)[problem.usage_nodes]
    used = problem.usage_bytes.values[problem.usage_bytes.starts[:-1] + chosen].astype(np.int64)
    times, index = np.unique(problem.usage_times, return_inverse=True)
    # Releases of NumPy disagree on the shape of the inverse.
    index = index.reshape(-1, 2)
    # In integers, so that the end of a usage takes away exactly what its start has added.
    change = np.zeros(times.size, dtype=np.int64)
    np.add.at(change, index[:, 0], used)
    np.add.at(change, index[:, 1], -used)
    return times, np.cumsum(change)


def evaluate(problem: Problem, choices: Sequence[int]) -> Evaluation:
    """Return the cost in seconds, the peak in bytes and the feasibility of one strategy per node.

    Raises ValueError when ``choices`` does not name one existing strategy for each node.
    """
    if len(choices) != problem.num_nodes:
        raise ValueError(f"{len(choices)} choices were given for {problem.num_nodes} nodes; give one for each.")
    chosen = np.asarray(choices, dtype=np.intp)
    for node in np.flatnonzero((chosen < 0) | (chosen >= problem.node_costs.sizes)):
        raise ValueError(
            f"Choice {chosen[node]} was given for node {node}, which has strategies 0 to "
            f"{problem.node_costs.sizes[node] - 1}."
        )
    cost = _cost(problem, chosen)
    _, alive = usage_over_time(problem, choices)
    peak_bytes = float(alive.max(initial=0))
    fits = problem.limit_bytes is None or peak_bytes <= problem.limit_bytes
    return Evaluation(cost=cost, peak_bytes=peak_bytes, feasible=fits and math.isfinite(cost))
