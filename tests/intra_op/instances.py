"""Problems for the tests: small random ones, and a synthetic training step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from alpa_lite.intra_op.problem import Edge, FloatArray, Problem, Usage, evaluate
from alpa_lite.intra_op.solvers.portfolio import Portfolio


def random_problem(
    seed: int,
    *,
    num_nodes: int = 5,
    max_strategies: int = 4,
    num_edges: int = 7,
    num_usages: int = 6,
    tightness: float | None = None,
    forbidden: float = 0.2,
    scale: float = 1.0,
) -> Problem:
    """Costs from a few whole numbers (many ties) or the reals, entries forbidden at random, parallel edges likely.

    ``tightness`` sets the limit between 0 (less than the least peak) and 1 (anything fits); None means no limit.
    """
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, max_strategies + 1, num_nodes)
    whole = rng.random() < 0.5

    def costs(*shape: int) -> FloatArray:
        values = rng.integers(0, 4, shape).astype(float) if whole else rng.random(shape)
        values = np.where(rng.random(shape) < 0.15, -values, values)
        if len(shape) == 2 and rng.random() < 0.2:
            values = values[:, :1] + values[:1, :]
        if len(shape) == 2 and rng.random() < 0.2:
            return np.where(np.arange(shape[1]) == rng.integers(0, shape[1], shape[0])[:, None], values, np.inf) * scale
        return np.where(rng.random(shape) < forbidden * rng.random(), np.inf, values * scale)

    edges: list[Edge] = []
    for _ in range(num_edges if num_nodes > 1 else 0):
        source, target = (int(node) for node in rng.choice(num_nodes, 2, replace=False))
        edges.append(Edge(source=source, target=target, costs=costs(int(sizes[source]), int(sizes[target]))))
    usages: list[Usage] = []
    for _ in range(num_usages):
        node, start = int(rng.integers(num_nodes)), int(rng.integers(0, 6))
        used = rng.integers(0, 8, int(sizes[node])).astype(float)
        usages.append(Usage(node=node, bytes=used, start=start, end=start + int(rng.integers(1, 5))))
    limit = None if tightness is None else float(int(tightness * sum(float(usage.bytes.max()) for usage in usages)))
    return Problem.of(
        node_costs=tuple(costs(int(size)) for size in sizes),
        edges=tuple(edges),
        usages=tuple(usages),
        limit_bytes=limit,
    )


def frustrated(num_nodes: int, num_strategies: int) -> Problem:
    """Random costs on many cycles: far more than HiGHS can do at once."""
    rng = np.random.default_rng(0)
    pairs = [tuple(int(node) for node in rng.choice(num_nodes, 2, replace=False)) for _ in range(3 * num_nodes)]
    return Problem.of(
        node_costs=tuple(rng.random(num_strategies) for _ in range(num_nodes)),
        edges=tuple(Edge(source=u, target=v, costs=rng.random((num_strategies,) * 2)) for u, v in pairs),
    )


def training_step(
    *,
    num_layers: int,
    ops_per_layer: int = 6,
    num_strategies: int = 12,
    seed: int = 0,
    limit_fraction: float | None = None,
) -> Problem:
    """A chain of layers with residual links, its mirrored backward, and parameters with their updates.

    Strategies are splits over mesh axes; edge costs are those of resharding, so most are sums of a few collectives.
    ``limit_fraction`` places the memory limit between the least peak, at any cost (0), and that of the cheapest choices
    without a limit (1).
    """
    rng = np.random.default_rng(seed)
    length = num_layers * ops_per_layer
    sizes: list[int] = []
    node_costs: list[FloatArray] = []
    edges: list[Edge] = []
    usages: list[Usage] = []
    layout: list[FloatArray] = []

    def node(size: int, start: int, end: int, weight: float) -> int:
        shards = 2.0 ** rng.integers(0, 4, size)
        sizes.append(size)
        node_costs.append(np.where(rng.random(size) < 0.4, 0.0, rng.random(size) * 1e-4) + 1e-4 / shards)
        layout.append(rng.integers(0, 6, size))
        usages.append(Usage(node=len(sizes) - 1, bytes=np.floor(weight * 2**20 / shards), start=start, end=end))
        return len(sizes) - 1

    def link(source: int, target: int, weight: float) -> None:
        table = np.random.default_rng(7).random((6, 6)) * 1e-4
        np.fill_diagonal(table, 0.0)
        costs = weight * table[layout[source]][:, layout[target]]
        costs = np.where(rng.random(costs.shape) < 0.05, np.inf, costs)
        costs[0, :] = weight * 1e-4
        costs[:, 0] = weight * 1e-4
        edges.append(Edge(source=source, target=target, costs=costs))

    def strategies() -> int:
        return int(rng.integers(3, num_strategies + 1))

    forward = [node(strategies(), time, 2 * length - time, 4.0) for time in range(length)]
    backward = [node(strategies(), 2 * length - 1 - time, 2 * length + 1 - time, 4.0) for time in range(length)]
    for index in range(length - 1):
        link(forward[index], forward[index + 1], 1.0)
        link(backward[index + 1], backward[index], 1.0)
    for index in range(length):
        link(forward[index], backward[index], 1.0)
    for index in range(0, length - ops_per_layer // 2, ops_per_layer // 2):
        link(forward[index], forward[index + ops_per_layer // 2], 0.5)
        link(backward[index + ops_per_layer // 2], backward[index], 0.5)
    for index in range(0, length, 2):
        parameter = node(strategies(), 0, 2 * length + 1, 16.0)
        update = node(strategies(), 2 * length - 1 - index, 2 * length + 1, 16.0)
        link(parameter, forward[index], 1.0)
        link(parameter, backward[index], 1.0)
        link(backward[index], update, 1.0)
        link(parameter, update, 2.0)
    problem = Problem.of(node_costs=tuple(node_costs), edges=tuple(edges), usages=tuple(usages))
    if limit_fraction is None:
        return problem
    least = evaluate(problem, [int(usage.bytes.argmin()) for usage in leanest(problem)]).peak_bytes
    free = Portfolio().solve(problem).peak_bytes
    return replace(problem, limit_bytes=float(int(least + limit_fraction * (free - least))))


def leanest(problem: Problem) -> list[Usage]:
    """The first usage of every node."""
    first: dict[int, Usage] = {}
    for usage in problem.usages:
        first.setdefault(usage.node, usage)
    return [first[node] for node in sorted(first)]
