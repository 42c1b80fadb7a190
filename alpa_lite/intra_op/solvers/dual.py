"""Lower bound by Lagrangian duality: messages between nodes and prices on memory, for problems of any width.

    prices     L(p) = min_x cost(x) + sum_t p_t (U_t(x) - limit),  p >= 0, is a lower bound of the optimum
    messages   m_ev(i) moves cost from the edge e to its node v under strategy i:
                   theta_v(i)    = c_v(i) + sum_t p_t b_vt(i) + sum_e m_ev(i)             ``_priced``, ``_pass``
                   theta_e(i, j) = C_e(i, j) - m_eu(i) - m_ev(j)
               cost(x) is the same for all messages, so that
                   L(p) >= sum_v min theta_v + sum_e min theta_e - sum_t p_t limit        ``_pass``
    one pass   at each node in order, m_ev(i) = min_j C_e(i, j) - m_eu(j) for the edges to
               nodes before it, then theta_v is distributed in equal shares over the edges
               to nodes after it; the bound never falls. Passes alternate in direction     ``_collect``, ``_pass``
    decoding   x_v = argmin theta_v(i) + C_uv(x_u, i) - m_ev(i) over nodes u before v     ``_pass``
    p          follows U(x) - limit, averaged over the decodings; after some passes
               without gain it returns to the best prices, and the step shrinks           ``_price``
    fixing     a strategy whose bound in any solution exceeds the best known cost is
               removed                                                                    ``strategies_left``

The messages are sequential reweighted message passing (Kolmogorov, "A new look at reweighted message passing", IEEE
TPAMI 37(5), 2015), which solves the linear relaxation of the program in ``integer_program.py`` up to fixed points; the
prices are a subgradient method with Polyak's step (Polyak, "Minimization of unsmooth functionals", 1969).
"""

# Kernels are typed for readers. Pyright cannot infer the types of functions that numba compiles, nor of array elements.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUntypedFunctionDecorator=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportReturnType=false
# pyright: reportArgumentType=false

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from alpa_lite.intra_op.problem import FloatArray, IntArray
from alpa_lite.intra_op.solvers.flat_problem import Flat, usage_of
from alpa_lite.intra_op.solvers.solver import no_halt
from alpa_lite.program.kernel import kernel

_FIRST_STEP = 0.1
_SHRINK = 0.7
_PATIENCE = 10
"""The number of price changes without gain after which the step shrinks."""
_ENOUGH_GAIN = 1e-4
"""A gain of less than this fraction of the gap counts as none."""
_KEPT = 0.9
"""The weight of the previous average when a new decoding is averaged into the usage."""
_SMALLEST_STEP = 1e-7
_ROUNDING = 1e-12
_WARM_UP = 30
"""The number of passes before memory gets prices: the first decodings are poor estimates of the usage."""


@kernel
def _priced(flat: Flat, node: int, prices: FloatArray, theta: FloatArray) -> None:
    """Write theta(i) = c_v(i) + sum_t p_t b_vt(i); ``prices`` are prefix sums over the rows."""
    start = flat.cost_start[node]
    size = flat.cost_start[node + 1] - start
    theta[:size] = flat.costs[start : start + size]
    for run in range(flat.run_start[node], flat.run_start[node + 1]):
        price = prices[flat.run_last[run]] - prices[flat.run_first[run]]
        if price != 0.0:
            first = flat.run_bytes[run]
            for i in range(size):
                theta[i] += price * flat.bytes[first + i]


@kernel
def _collect(flat: Flat, link: int, size: int, message_start: IntArray, messages: FloatArray, into: FloatArray) -> None:
    """Write into(i) = min_j C(i, j) - m(j), where m is the message of the edge to the node at its other end."""
    other = flat.link_node[link]
    there = message_start[flat.link_reverse[link]]
    table = flat.link_table[link]
    into[:size] = np.inf
    for j in range(flat.cost_start[other + 1] - flat.cost_start[other]):
        sent = messages[there + j]
        for i in range(size):
            into[i] = min(into[i], flat.tables[table + j * size + i] - sent)


@kernel
def _pass(
    flat: Flat,
    message_start: IntArray,
    messages: FloatArray,
    prices: FloatArray,
    forth: bool,
    choices: IntArray,
    theta: FloatArray,
    decoded: FloatArray,
) -> float:
    """Run one pass over the nodes and return the bound that it reaches, before subtraction of sum_t p_t limit."""
    num_nodes = choices.size
    bound = 0.0
    for step in range(num_nodes):
        node = step if forth else num_nodes - 1 - step
        size = flat.cost_start[node + 1] - flat.cost_start[node]
        _priced(flat, node, prices, theta)
        decoded[:size] = theta[:size]
        num_after = 0
        for link in range(flat.link_start[node], flat.link_start[node + 1]):
            other, own = flat.link_node[link], message_start[link]
            if (other > node) == forth:
                num_after += 1
                for i in range(size):
                    decoded[i] += messages[own + i]
            else:
                _collect(flat, link, size, message_start, messages, messages[own : own + size])
                # Nodes that the pass has visited are decoded already; to the others only their message is known.
                first = flat.link_table[link] + choices[other] * size
                for i in range(size):
                    decoded[i] += flat.tables[first + i]
            for i in range(size):
                theta[i] += messages[own + i]
        choices[node] = decoded[:size].argmin()
        num_links = flat.link_start[node + 1] - flat.link_start[node]
        # The larger of the two counts makes the shares equal in both directions, so that the bound never falls.
        share = 1.0 / max(num_after, num_links - num_after, 1)
        for link in range(flat.link_start[node], flat.link_start[node + 1]):
            if (flat.link_node[link] > node) == forth:
                own = message_start[link]
                for i in range(size):
                    messages[own + i] -= share * theta[i]
        # The share that is not sent on remains at the node and counts towards the bound.
        bound += theta[:size].min() * (1.0 - num_after * share)
    return bound


@kernel
def _price(row_prices: FloatArray, averaged: FloatArray, room: FloatArray, length: float) -> None:
    """Update p = max(0, p + length (U - limit) / |U - limit|^2) in place."""
    norm = 0.0
    for row in range(room.size):
        over = averaged[row] - room[row]
        # Rows with room and without a price do not move, and do not count in the length of the step.
        if over > 0.0 or row_prices[row] > 0.0:
            norm += over * over
    if norm > 0.0:
        for row in range(room.size):
            row_prices[row] = max(0.0, row_prices[row] + length / norm * (averaged[row] - room[row]))


@kernel
def _prefix_sums(row_prices: FloatArray, room: FloatArray, prices: FloatArray) -> float:
    """Write the prefix sums of the prices over the rows, and return sum_t p_t limit."""
    paid = 0.0
    for row in range(room.size):
        prices[row + 1] = prices[row] + row_prices[row]
        paid += row_prices[row] * room[row]
    return paid


@kernel
def _bounds_by_strategy(
    flat: Flat, message_start: IntArray, messages: FloatArray, prices: FloatArray, bounds: FloatArray
) -> None:
    """Write for every strategy a lower bound of all choices that use it, before subtraction of sum_t p_t limit."""
    largest = 0
    for node in range(flat.cost_start.size - 1):
        largest = max(largest, flat.cost_start[node + 1] - flat.cost_start[node])
    theta, least = np.empty(largest), np.empty(largest)
    total = 0.0
    for node in range(flat.cost_start.size - 1):
        start = flat.cost_start[node]
        size = flat.cost_start[node + 1] - start
        _priced(flat, node, prices, theta)
        for link in range(flat.link_start[node], flat.link_start[node + 1]):
            theta[:size] += messages[message_start[link] : message_start[link] + size]
        lowest = theta[:size].min()
        total += lowest
        bounds[start : start + size] = theta[:size] - lowest
        for link in range(flat.link_start[node], flat.link_start[node + 1]):
            _collect(flat, link, size, message_start, messages, least)
            least[:size] -= messages[message_start[link] : message_start[link] + size]
            lowest = least[:size].min()
            bounds[start : start + size] += least[:size] - lowest
            if flat.link_node[link] > node:
                total += lowest
    # So far they hold what a strategy costs beyond the best at its node and its edges.
    bounds += total


@dataclass(slots=True, kw_only=True, eq=False)
class _MemoryPrices:
    """The prices of the memory rows (seconds per byte), which a subgradient method changes.

    Attributes:
        now: the prices of the next pass.
        best: the prices of the best bound.
        usage: bytes per row, averaged over the decodings; their excess over the limit is the subgradient.
        step: the fraction of the gap that the next change is to close.
        idle: number of changes in a row without gain.
    """

    now: FloatArray
    best: FloatArray
    usage: FloatArray
    step: float = _FIRST_STEP
    idle: int = 0

    @staticmethod
    def zero(num_rows: int) -> _MemoryPrices:
        return _MemoryPrices(now=np.zeros(num_rows), best=np.zeros(num_rows), usage=np.zeros(num_rows))

    def average(self, used: FloatArray, *, first: bool) -> None:
        """Include the usage of a decoding in the average, or begin it anew."""
        self.usage = used.copy() if first else _KEPT * self.usage + (1.0 - _KEPT) * used

    def return_to_best(self) -> None:
        """Continue from the best prices, with shorter steps."""
        self.step, self.idle = self.step * _SHRINK, 0
        self.now[:] = self.best


@dataclass(slots=True, kw_only=True, eq=False)
class Dual:
    """The messages and prices of one problem, which ``run`` improves.

    ``flat`` has finite costs only: infinite costs may be replaced by any number, since a smaller one can only lower the
    bound. ``bound`` (seconds) is the best so far; ``choices`` is the last decoding, which may overrun the memory limit
    or use forbidden strategies. ``halt``: see ``run_attended``.
    """

    flat: Flat
    halt: IntArray = field(default_factory=no_halt)
    bound: float = -np.inf
    choices: IntArray = field(init=False)
    _message_start: IntArray = field(init=False)
    _messages: FloatArray = field(init=False)
    _prices: _MemoryPrices = field(init=False)
    _passes: int = 0
    _stalled: bool = False

    def __post_init__(self) -> None:
        flat = self.flat
        # A link has one message entry for each strategy of its own node.
        owner = np.repeat(np.arange(flat.cost_start.size - 1), np.diff(flat.link_start))
        ends = np.cumsum(np.diff(flat.cost_start)[owner])
        self._message_start = np.concatenate([np.zeros(1, dtype=np.int64), ends]).astype(np.int64)
        self._messages = np.zeros(int(self._message_start[-1]))
        self._prices = _MemoryPrices.zero(flat.room.size)
        self.choices = np.zeros(flat.cost_start.size - 1, dtype=np.int64)

    @property
    def best_prices(self) -> FloatArray:
        """The prices of the memory rows (seconds per byte) at the best bound; ``run`` changes this array."""
        return self._prices.best

    @property
    def converged(self) -> bool:
        """True if more passes are not worth their time."""
        # Without memory rows there are no prices to change, so that a stall is final.
        return self._prices.step < _SMALLEST_STEP or (self._stalled and self.flat.room.size == 0)

    def run(self, num_passes: int, *, upper: float) -> None:
        """Run passes in alternating directions.

        ``upper`` (seconds) is the best known cost, or an estimate of it; it determines the step length of the prices.
        """
        flat, before, memory = self.flat, self.bound, self._prices
        theta = np.empty(int(np.diff(flat.cost_start).max()))
        decoded, prices, used = np.empty_like(theta), np.zeros(flat.room.size + 1), np.empty(flat.room.size)
        for _ in range(num_passes):
            if self.halt[0]:
                return
            paid = _prefix_sums(memory.now, flat.room, prices)
            for forth in (True, False):
                bound = _pass(flat, self._message_start, self._messages, prices, forth, self.choices, theta, decoded)
                if forth and flat.room.size:
                    usage_of(flat, self.choices, used)
                    # There is no average to continue before the first decoding.
                    memory.average(used, first=not np.isfinite(self.bound))
            # The second pass gives the bound: no pass lowers what the first one has reached.
            self._note(bound - paid, upper)
            self._passes += 1
            if flat.room.size and self._passes > _WARM_UP:
                # Polyak's step needs the optimum; the best known cost takes its place.
                _price(memory.now, memory.usage, flat.room, memory.step * max(upper - self.bound, 0.0))
        enough = _ENOUGH_GAIN * max(upper - self.bound, 0.0) + _ROUNDING * abs(self.bound)
        self._stalled = self.bound - before <= enough

    def _note(self, bound: float, upper: float) -> None:
        """Record the prices of a better bound; return to the best prices after a while without gain."""
        memory = self._prices
        gained = bound > self.bound + _ENOUGH_GAIN * max(upper - self.bound, 0.0)
        memory.idle = 0 if gained else memory.idle + 1
        if bound > self.bound:
            self.bound = bound
            memory.best[:] = memory.now
        if memory.idle > _PATIENCE and self.flat.room.size:
            memory.return_to_best()

    def strategies_left(self, upper: float) -> NDArray[np.bool_]:
        """Return the mask of the strategies, concatenated, that choices of cost at most ``upper`` may use."""
        prices = np.zeros(self.flat.room.size + 1)
        paid = _prefix_sums(self.best_prices, self.flat.room, prices)
        bounds = np.empty(self.flat.costs.size)
        _bounds_by_strategy(self.flat, self._message_start, self._messages, prices, bounds)
        # The tolerance covers rounding, which must not remove a strategy of an optimal solution.
        return bounds - paid <= upper + 1e-9 * (abs(upper) + paid)
