"""Large-neighbourhood search on blocks that form trees: good choices fast, within the memory limit, without proof.

    block      B grows from a few random nodes through random neighbours, each of them
               joined to B by one edge: B induces a forest                            ``_grow``
    given      h_v(i) = c_v(i) + sum_(u not in B) C_uv(x_u, i) + sum_t p_t b_vt(i);
               inf where the bytes alone exceed what the nodes outside B leave free   ``_condition``
    best       x_B = argmin sum_(v in B) h_v + edges in B, from the leaves to the
               roots and back                                                         ``_climb``, ``_descend``
    heat       noise  T log(uniform)  on h_v samples a near-optimal x_B instead       ``_condition``
    accepted   if the rows are overrun no more than before, and, by the Metropolis
               rule, for the growth of cost + sum_t p_t U_t                           ``_search``

Prices steer blocks away from full rows; the acceptance test enforces the limit itself. A row is tracked only once some
choices exceeded it (``Neighbourhood``), which is true for few.
"""

# Kernels are typed for readers. Pyright cannot infer the types of functions that numba compiles, nor of array elements.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUntypedFunctionDecorator=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportReturnType=false
# pyright: reportArgumentType=false

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from alpa_lite.intra_op.problem import FloatArray, IntArray
from alpa_lite.intra_op.solvers.flat_problem import Flat, add_usage, cost_of, overrun_of, usage_of, with_rows
from alpa_lite.intra_op.solvers.solver import no_halt
from alpa_lite.program.kernel import kernel

_MAX_BLOCK = 100
_MAX_TREES = 3
_LIKELY = 0.98
"""Rows that the first choices fill to this fraction of the limit are tracked from the start."""


_FIRST_PRESSURE = 1e-3
"""The fraction of the cost that prices an overrun when memory has no price yet."""


class Scratch(NamedTuple):
    """The working arrays of one search.

    A block holds ``nodes[:count]``, parents before children; ``link[p]`` is the link of the parent ``nodes[parent[p]]``
    to node p. ``entered`` and ``seen`` hold the number of the last block that a node was in, or next to; ``near``
    counts its neighbours in that block.
    """

    nodes: IntArray
    parent: IntArray
    link: IntArray
    drawn: IntArray
    place: IntArray
    entered: IntArray
    seen: IntArray
    near: IntArray
    front: IntArray
    front_link: IntArray
    h: FloatArray
    message: FloatArray
    random: IntArray


def _scratch(flat: Flat, seed: int) -> Scratch:
    num_nodes = flat.cost_start.size - 1
    largest = int(np.diff(flat.cost_start).max())

    def zeros(size: int) -> IntArray:
        return np.zeros(size, dtype=np.int64)

    return Scratch(
        nodes=zeros(_MAX_BLOCK),
        parent=zeros(_MAX_BLOCK),
        link=zeros(_MAX_BLOCK),
        drawn=zeros(_MAX_BLOCK),
        place=zeros(num_nodes),
        entered=zeros(num_nodes),
        seen=zeros(num_nodes),
        near=zeros(num_nodes),
        front=zeros(flat.link_node.size + 1),
        front_link=zeros(flat.link_node.size + 1),
        h=np.empty(flat.costs.size),
        message=np.empty(largest),
        # Not 0, which a xorshift generator would never leave.
        random=np.random.default_rng(seed).integers(1, 2**63, 1),
    )


@kernel
def _uniform(random: IntArray) -> float:
    """Return a number in (0, 1), by Marsaglia's xorshift generator (Journal of Statistical Software 8(14), 2003)."""
    state = np.uint64(random[0])
    state ^= state << np.uint64(13)
    state ^= state >> np.uint64(7)
    state ^= state << np.uint64(17)
    random[0] = np.int64(state)
    # 52 bits and a half over 2^52: never 0, whose logarithm is infinite, and never 1.
    return (float(state >> np.uint64(12)) + 0.5) / 4503599627370496.0


@kernel
def _enter(flat: Flat, scratch: Scratch, node: int, link: int, count: int, number: int, num_front: int) -> int:
    """Append ``node`` to the block and add its new neighbours to the front; return the size of the front."""
    scratch.nodes[count] = node
    scratch.link[count] = link
    scratch.parent[count] = -1
    scratch.place[node] = count
    scratch.entered[node] = number
    for own in range(flat.link_start[node], flat.link_start[node + 1]):
        other = flat.link_node[own]
        if scratch.entered[other] == number:
            # At most one neighbour is in the block: `_grow` takes nodes that one edge joins to it.
            scratch.parent[count] = scratch.place[other]
            continue
        if scratch.seen[other] != number:
            scratch.seen[other] = number
            scratch.near[other] = 0
        scratch.near[other] += 1
        if scratch.near[other] == 1:
            scratch.front[num_front] = other
            scratch.front_link[num_front] = own
            num_front += 1
    return num_front


@kernel
def _grow(flat: Flat, scratch: Scratch, number: int) -> int:
    """Grow a random block and return the number of its nodes."""
    num_nodes = flat.cost_start.size - 1
    # The square favours small blocks, which take the least time.
    size = 1 + int(_MAX_BLOCK * _uniform(scratch.random) ** 2)
    num_trees = 1 + int(_MAX_TREES * _uniform(scratch.random) ** 2)
    count = 0
    for tree in range(1, num_trees + 1):
        seed = int(_uniform(scratch.random) * num_nodes)
        # Trees of a block must not be joined by an edge, which their minimisation would miss.
        if scratch.entered[seed] == number or (scratch.seen[seed] == number and scratch.near[seed] > 0):
            continue
        # The trees share the size of the block evenly, and each has a node at least.
        limit = min(_MAX_BLOCK, max(count + 1, size * tree // num_trees))
        if count >= limit:
            break
        num_front = _enter(flat, scratch, seed, -1, count, number, 0)
        count += 1
        while num_front > 0 and count < limit:
            pick = int(_uniform(scratch.random) * num_front)
            node, link = scratch.front[pick], scratch.front_link[pick]
            num_front -= 1
            scratch.front[pick] = scratch.front[num_front]
            scratch.front_link[pick] = scratch.front_link[num_front]
            # A second edge into the block would close a cycle, and trees alone can be minimised exactly in one pass.
            if scratch.near[node] == 1:
                num_front = _enter(flat, scratch, node, link, count, number, num_front)
                count += 1
    return count


@kernel
def _condition(
    flat: Flat,
    scratch: Scratch,
    node: int,
    number: int,
    choices: IntArray,
    used: FloatArray,
    prices: FloatArray,
    heat: float,
) -> None:
    """Write h of one node of the block.

    ``used`` holds the bytes of the nodes outside the block by row; ``prices`` are prefix sums over the rows.
    """
    start = flat.cost_start[node]
    size = flat.cost_start[node + 1] - start
    h = scratch.h[start : start + size]
    h[:] = flat.costs[start : start + size]
    for link in range(flat.link_start[node], flat.link_start[node + 1]):
        other = flat.link_node[link]
        if scratch.entered[other] != number:
            first = flat.link_table[link] + choices[other] * size
            h += flat.tables[first : first + size]
    for run in range(flat.run_start[node], flat.run_start[node + 1]):
        first = flat.run_bytes[run]
        free = np.inf
        for row in range(flat.run_first[run], flat.run_last[run]):
            free = min(free, flat.room[row] - used[row])
        # The current strategy is always allowed, even in a row that is overrun already, so that h is never all inf.
        free = max(free, flat.bytes[first + choices[node]])
        price = prices[flat.run_last[run]] - prices[flat.run_first[run]]
        for i in range(size):
            h[i] = h[i] + price * flat.bytes[first + i] if flat.bytes[first + i] <= free else np.inf
    if heat > 0.0:
        for i in range(size):
            h[i] += heat * math.log(_uniform(scratch.random))


@kernel
def _climb(flat: Flat, scratch: Scratch, count: int) -> None:
    """Pass messages from the leaves to the roots: h_u(i) += min_j h_v(j) + C_uv(i, j) for the children v of u."""
    # Parents precede children, so that a node has all messages of its children before it sends its own.
    for place in range(count - 1, -1, -1):
        above = scratch.parent[place]
        if above < 0:
            continue
        start, end = flat.cost_start[scratch.nodes[place]], flat.cost_start[scratch.nodes[place] + 1]
        to, to_end = flat.cost_start[scratch.nodes[above]], flat.cost_start[scratch.nodes[above] + 1]
        size = to_end - to
        table = flat.link_table[scratch.link[place]]
        message = scratch.message[:size]
        message[:] = np.inf
        for j in range(end - start):
            own = scratch.h[start + j]
            if own < np.inf:
                for i in range(size):
                    message[i] = min(message[i], own + flat.tables[table + j * size + i])
        scratch.h[to:to_end] += message


@kernel
def _descend(flat: Flat, scratch: Scratch, count: int) -> None:
    """Draw from the roots to the leaves each node's best strategy given its parent's."""
    for place in range(count):
        node, above = scratch.nodes[place], scratch.parent[place]
        start = flat.cost_start[node]
        lowest = np.inf
        best = 0
        size = 0 if above < 0 else flat.cost_start[scratch.nodes[above] + 1] - flat.cost_start[scratch.nodes[above]]
        table = 0 if above < 0 else flat.link_table[scratch.link[place]] + scratch.drawn[above]
        for i in range(flat.cost_start[node + 1] - start):
            value = scratch.h[start + i]
            if above >= 0:
                value += flat.tables[table + i * size]
            if value < lowest:
                lowest, best = value, i
        scratch.drawn[place] = best


@kernel
def _block_cost(flat: Flat, scratch: Scratch, count: int, number: int, choices: IntArray, new: bool) -> float:
    """Return the cost of the block and its edges, under the drawn strategies (``new``) or the current ones."""
    total = 0.0
    for place in range(count):
        node = scratch.nodes[place]
        size = flat.cost_start[node + 1] - flat.cost_start[node]
        choice = scratch.drawn[place] if new else choices[node]
        total += flat.costs[flat.cost_start[node] + choice]
        for link in range(flat.link_start[node], flat.link_start[node + 1]):
            other = flat.link_node[link]
            theirs = choices[other]
            if scratch.entered[other] == number:
                # An edge inside the block counts once, at the later of its ends.
                if scratch.place[other] > place:
                    continue
                theirs = scratch.drawn[scratch.place[other]] if new else theirs
            total += flat.tables[flat.link_table[link] + theirs * size + choice]
    return total


@kernel
def _block_paid(flat: Flat, scratch: Scratch, count: int, choices: IntArray, prices: FloatArray) -> float:
    """Return the growth of sum_t p_t U_t from the current strategies to the drawn ones."""
    total = 0.0
    for place in range(count):
        node = scratch.nodes[place]
        for run in range(flat.run_start[node], flat.run_start[node + 1]):
            first = flat.run_bytes[run]
            more = flat.bytes[first + scratch.drawn[place]] - flat.bytes[first + choices[node]]
            total += more * (prices[flat.run_last[run]] - prices[flat.run_first[run]])
    return total


@kernel
def _put(flat: Flat, scratch: Scratch, count: int, choices: IntArray, new: bool, sign: float, used: FloatArray) -> None:
    """Add ``sign`` times the block's usage to ``used``, under the drawn strategies (``new``) or the current ones."""
    for place in range(count):
        node = scratch.nodes[place]
        add_usage(flat, node, scratch.drawn[place] if new else choices[node], sign, used)


@kernel
def _overrun(used: FloatArray, room: FloatArray) -> float:
    total = 0.0
    for row in range(room.size):
        total += max(used[row] - room[row], 0.0)
    return total


@kernel
def _changes(scratch: Scratch, count: int, choices: IntArray) -> bool:
    for place in range(count):
        if scratch.drawn[place] != choices[scratch.nodes[place]]:
            return True
    return False


@kernel
def _accepts(growth: float, heat: float, random: IntArray) -> bool:
    """Apply the Metropolis rule: accept any growth <= 0, and others with probability exp(-growth / heat)."""
    return growth <= 0.0 or (heat > 0.0 and growth < -heat * math.log(_uniform(random)))


@kernel
def _search(
    flat: Flat,
    scratch: Scratch,
    choices: IntArray,
    best: IntArray,
    prices: FloatArray,
    num_blocks: int,
    first_heat: float,
    last_heat: float,
    first_number: int,
    halt: IntArray,
) -> float:
    """Optimise blocks one after the other until ``halt``, changing ``choices`` in place.

    Write the cheapest choices within the limit to ``best`` and return their cost in seconds, inf if none fit.
    """
    used = np.empty(flat.room.size)
    usage_of(flat, choices, used)
    cost, overrun, best_cost = cost_of(flat, choices), _overrun(used, flat.room), np.inf
    if overrun == 0.0:
        best_cost = cost
        best[:] = choices
    for block in range(num_blocks):
        if halt[0]:
            break
        number = first_number + block
        heat = first_heat * (last_heat / first_heat) ** (block / num_blocks) if first_heat > 0.0 else 0.0
        count = _grow(flat, scratch, number)
        # Without the block, `used` holds what the nodes outside it keep alive.
        _put(flat, scratch, count, choices, False, -1.0, used)
        for place in range(count):
            _condition(flat, scratch, scratch.nodes[place], number, choices, used, prices, heat)
        _climb(flat, scratch, count)
        _descend(flat, scratch, count)
        accepted = _changes(scratch, count, choices)
        growth, left = 0.0, overrun
        if accepted:
            growth = _block_cost(flat, scratch, count, number, choices, True)
            growth -= _block_cost(flat, scratch, count, number, choices, False)
            _put(flat, scratch, count, choices, True, 1.0, used)
            left = _overrun(used, flat.room)
            priced = growth + _block_paid(flat, scratch, count, choices, prices)
            # A smaller overrun is accepted at any cost, a larger one never.
            accepted = left < overrun or (left == overrun and _accepts(priced, heat, scratch.random))
            if not accepted:
                _put(flat, scratch, count, choices, True, -1.0, used)
        if not accepted:
            _put(flat, scratch, count, choices, False, 1.0, used)
            continue
        for place in range(count):
            choices[scratch.nodes[place]] = scratch.drawn[place]
        # The total is carried on instead of computed: a block touches a small part of the edges.
        cost, overrun = cost + growth, left
        if overrun == 0.0 and cost < best_cost:
            best_cost = cost
            best[:] = choices
    return best_cost


@dataclass(slots=True, kw_only=True, eq=False)
class Neighbourhood:
    """The search of one problem, continued from call to call; equal seeds and calls give equal answers.

    ``flat`` has finite costs; the substitutes of infinite costs are larger than the cost of any solution. ``best``
    satisfies the limit; it is None until some choices do. ``best_cost`` is in seconds. ``halt``: see ``run_attended``.
    """

    flat: Flat
    seed: int
    halt: IntArray = field(default_factory=no_halt)
    best: IntArray | None = None
    best_cost: float = np.inf
    _rows: set[int] = field(default_factory=set[int])
    _scratch: Scratch = field(init=False)
    _pressure: FloatArray = field(init=False)
    _number: int = 1

    def __post_init__(self) -> None:
        self._scratch = _scratch(self.flat, self.seed)
        self._pressure = np.zeros(self.flat.room.size)

    def run(
        self, start: IntArray, row_prices: FloatArray, *, num_blocks: int, first_heat: float, last_heat: float
    ) -> IntArray:
        """Search from ``start`` and return the last choices, which may be worse than ``best``. Heats are in seconds."""
        self._watch(overrun_of(self.flat, start), _LIKELY)
        rows = np.array(sorted(self._rows), dtype=np.int64)
        prices = np.concatenate([np.zeros(1), np.cumsum((row_prices + self._pressure)[rows])])
        choices, best = start.copy(), start.copy()
        cost = _search(
            # Few rows are ever full, and every tracked one takes time in each block.
            with_rows(self.flat, rows), self._scratch, choices, best, prices, num_blocks,
            first_heat, last_heat, self._number, self.halt,
        )  # fmt: skip
        # Numbers of blocks never repeat, so that the marks of earlier ones need not be cleared.
        self._number += num_blocks
        overrun = overrun_of(self.flat, choices)
        self._watch(overrun, 1.0)
        self._press(overrun, row_prices, cost_of(self.flat, choices))
        overrun = overrun_of(self.flat, best)
        self._watch(overrun, 1.0)
        # The search saw the tracked rows alone, so that its best choices may overrun another one.
        if cost < self.best_cost and (overrun <= 0.0).all():
            self.best, self.best_cost = best, cost
        return choices

    def _press(self, overrun: FloatArray, row_prices: FloatArray, cost: float) -> None:
        """Raise the prices of rows that remain overrun, and lower those of all others."""
        over = overrun > 0.0
        # Prices of the dual set the scale. Without one, the largest overrun costs a fraction of all costs.
        first = max(
            float(row_prices.max(initial=0.0)),
            _FIRST_PRESSURE * (abs(cost) or 1.0) / max(overrun.max(initial=0.0), 1.0),
        )
        self._pressure = np.where(over, np.maximum(4.0 * self._pressure, first), self._pressure / 2.0)
        # Prices that no longer matter end here instead of being halved for ever.
        self._pressure[self._pressure < first / 16.0] = 0.0

    def _watch(self, overrun: FloatArray, part: float) -> None:
        """Track the rows that overrun or nearly fill the limit (by ``part``): of neighbouring rows, the fullest."""
        near = np.flatnonzero(overrun > 0.0) if part == 1.0 else np.flatnonzero(overrun > (part - 1.0) * self.flat.room)
        while near.size:
            row = int(near[overrun[near].argmax()])
            self._rows.add(row)
            # Rows that are close in time have mostly the same live nodes: the fullest speaks for those around it.
            near = near[np.abs(near - row) > max(1, overrun.size // 1000)]
