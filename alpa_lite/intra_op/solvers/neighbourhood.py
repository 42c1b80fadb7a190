"""Large-neighbourhood search for problems too wide to eliminate: good choices fast, nothing proven, memory not seen.

    start     x_v = argmin c_v, then each node in turn is best given the others                ``_settle``
    block     B grows from a random node through random neighbours while elimination on it
              stays cheap                                                                      ``_grow``
    improve   x_B = argmin sum_(v in B) (c_v + sum_(u not in B) C_vu(., x_u)) + edges in B      ``_conditioned``

A block's optimum includes what it held before, so the cost never grows. Infinite costs count as more than all finite
ones together, so the search removes them first.
"""

from __future__ import annotations

import time

import numpy as np

from alpa_lite.intra_op.problem import Edge, FloatArray, Problem
from alpa_lite.intra_op.solvers.elimination import Elimination, cheapest_choices, elimination_plan

_BLOCK_NODES = 60
_PATIENCE = 4
"""Stop after this many times as many blocks without gain as would cover the problem once."""

Links = dict[int, dict[int, FloatArray]]


def _finite(problem: Problem) -> tuple[list[FloatArray], Links]:
    """Costs and links in both directions, infinities replaced by more than everything finite."""
    arrays = [*problem.node_costs, *(edge.costs for edge in problem.edges)]
    too_much = 1.0 + sum(float(np.abs(array[np.isfinite(array)]).max(initial=0.0)) for array in arrays) * 2.0
    costs = [np.where(np.isfinite(array), array, too_much) for array in problem.node_costs]
    links: Links = {node: {} for node in range(len(costs))}
    for edge in problem.edges:
        matrix = np.where(np.isfinite(edge.costs), edge.costs, too_much)
        links[edge.source][edge.target] = links[edge.source].get(edge.target, 0.0) + matrix
        links[edge.target][edge.source] = links[edge.source][edge.target].T
    return costs, links


def _settle(costs: list[FloatArray], links: Links, choices: list[int]) -> None:
    """Each node in turn takes its best strategy given the others, a few times over."""
    for _ in range(10):
        changed = False
        for node, own in enumerate(costs):
            total = sum((matrix[:, choices[other]] for other, matrix in links[node].items()), own)
            best = int(total.argmin())
            if total[best] < total[choices[node]]:
                choices[node], changed = best, True
        if not changed:
            return


def _conditioned(costs: list[FloatArray], links: Links, block: list[int], choices: list[int]) -> Problem:
    """The problem on ``block`` with every other node held at its choice."""
    number = {node: index for index, node in enumerate(block)}
    node_costs = [
        sum((matrix[:, choices[other]] for other, matrix in links[node].items() if other not in number), costs[node])
        for node in block
    ]
    edges = [
        Edge(source=number[node], target=number[other], costs=matrix)
        for node in block
        for other, matrix in links[node].items()
        if other in number and node < other
    ]
    return Problem(node_costs=tuple(node_costs), edges=tuple(edges))


def _grow(links: Links, size: int, rng: np.random.Generator) -> list[int]:
    """A connected block of at most ``size`` nodes, reached in random order."""
    block: list[int] = []
    front = [int(rng.integers(len(links)))]
    seen = set(front)
    while front and len(block) < size:
        node = front.pop(int(rng.integers(len(front))))
        block.append(node)
        fresh = [other for other in links[node] if other not in seen]
        front += fresh
        seen.update(fresh)
    return block


def neighbourhood_search(problem: Problem, *, deadline: float, seed: int = 0) -> tuple[int, ...]:
    """Good choices by ``time.perf_counter() == deadline`` or earlier, when blocks stop gaining; limits are not seen."""
    rng = np.random.default_rng(seed)
    cheap = Elimination(max_table_entries=100_000, max_total_entries=1_000_000)
    costs, links = _finite(problem)
    choices = [int(own.argmin()) for own in costs]
    _settle(costs, links, choices)
    size, idle, covered = min(_BLOCK_NODES, len(costs)), 0, _PATIENCE * len(costs)
    while size > 1 and idle < covered and time.perf_counter() < deadline:
        block = _grow(links, size, rng)
        part = _conditioned(costs, links, block, choices)
        plan = elimination_plan(part)
        while not cheap.fits(plan):
            block = block[: len(block) * 3 // 4]
            part = _conditioned(costs, links, block, choices)
            plan = elimination_plan(part)
        best = cheapest_choices(part, plan)
        gained = _part_cost(part, best) < _part_cost(part, [choices[node] for node in block])
        idle = 0 if gained else idle + len(block)
        for node, choice in zip(block, best, strict=True):
            choices[node] = choice
    return tuple(choices)


def _part_cost(part: Problem, choices: tuple[int, ...] | list[int]) -> float:
    cost = sum(float(own[choice]) for own, choice in zip(part.node_costs, choices, strict=True))
    return cost + sum(float(edge.costs[choices[edge.source], choices[edge.target]]) for edge in part.edges)
