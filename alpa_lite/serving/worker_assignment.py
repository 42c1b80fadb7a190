"""Assign workers to the operators of a workflow whose models are chosen, as JellyBean's published optimizer does.

Operators are placed in a topological order, each on workers of tiers that are not below its inputs' (`_Placement`).
A `Strategy` says which tiers are tried and how many partial assignments are kept, an `Allocation` which workers of the
tiers that are tried are taken. Under `Strategy.MULTIPLE_TIERS` with `Allocation.GREEDY`, its default:

    1.  candidates are the free workers of the tiers; of those in the lowest tier, the ones that handle the whole rate
        alone if there are any, by price + traffic; else all, by (price + traffic at full throughput) / throughput
    2.  the first takes what it can; while q messages per second remain, the candidates of the then lowest tier that
        handle q alone become the only ones, if there are any, by price + traffic
    3.  an operator's cost is the price of its workers and of the traffic of the actual split; the `states` cheapest
        partial assignments are kept after each operator, and over at most `orders` orders              `assign_workers`

In step 2 traffic from sources counts at the rate q, that from operators at the full rate: an oddity of the published
code that changes the order alone, and is kept to find what it finds. Its strategy `cross-tier` finds nothing, since it
never stores the tier that it chose; here it does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from graphlib import TopologicalSorter
from itertools import chain, combinations, islice

import networkx as nx
import numpy as np

from alpa_lite.serving.workflow import ServingProblem, gib_per_hour

_UNITS_PER_MESSAGE = 100
"""The knapsack counts throughput in hundredths of a message per second."""


class Strategy(Enum):
    """The tiers that an operator is tried on."""

    SAME_TIER = "same-tier"
    """The lowest tier not below its inputs' that is fast enough."""
    CROSS_TIER = "cross-tier"
    """The tier where it is cheapest, traffic included."""
    ALL_TIERS = "all-tiers"
    """Every tier alone, in several orders; the cheapest partial assignments are kept."""
    MULTIPLE_TIERS = "multiple-tiers"
    """The tiers up to each one together, in several orders; the cheapest partial assignments are kept."""

    @property
    def is_search(self) -> bool:
        """Whether several orders are tried and several partial assignments kept."""
        return self in (Strategy.ALL_TIERS, Strategy.MULTIPLE_TIERS)


class Allocation(Enum):
    """How the workers of some tiers are chosen for one operator."""

    GREEDY = "greedy"
    """One after the other, the cheapest per message first."""
    GREEDY_BACKTRACE = "greedy-backtrace"
    """As greedy; then the smallest are dropped while the others handle the rate."""
    KNAPSACK = "dp"
    """As few workers of one tier as possible: as published, the knapsack does not look at their prices."""
    MEET_IN_THE_MIDDLE = "meet-in-the-middle"
    """The cheapest workers of one tier, from all subsets of each half."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignmentSearch:
    """The options of the search.

    Attributes:
        strategy: the tiers that an operator is tried on.
        allocation: how workers are chosen on them; `KNAPSACK` and `MEET_IN_THE_MIDDLE` are for single tiers.
        orders: the greatest number of topological orders.
        states: partial assignments that are kept, and the greatest number of results.
    """

    strategy: Strategy = Strategy.MULTIPLE_TIERS
    allocation: Allocation = Allocation.GREEDY
    orders: int = 10
    states: int = 10


Load = tuple[tuple[str, float], ...]
"""Workers of one operator, each with its messages per second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """Operators placed so far: their loads and highest tiers, and the dollars per hour of workers and traffic."""

    cost: float = 0.0
    loads: Mapping[str, Load]
    tiers: Mapping[str, int]

    def is_free(self, worker: str) -> bool:
        """Return whether no operator has this worker."""
        return all(worker != taken for load in self.loads.values() for taken, _ in load)


def assign_workers(
    problem: ServingProblem, variants: Mapping[str, str], search: AssignmentSearch
) -> tuple[dict[str, dict[str, float]], ...]:
    """Return assignments as messages per second by operator and worker, the cheapest first; none if none is found."""
    many = search.strategy.is_search
    found: list[_State] = []
    orders = islice(nx.all_topological_sorts(problem.graph), search.orders) if many else [_one_order(problem)]
    for order in orders:
        states = [_State(loads={}, tiers={})]
        for name in order:
            if problem.is_source(name):
                continue
            children = [child for state in states for child in _extended(problem, variants, search, state, name)]
            # Stable: of equal ones the first stays first, as in the published search.
            states = sorted(children, key=lambda state: state.cost)[: search.states if many else 1]
        found = sorted([*found, *states], key=lambda state: state.cost)[: search.states]
    return tuple({name: dict(load) for name, load in state.loads.items()} for state in found)


def _one_order(problem: ServingProblem) -> list[str]:
    """Return sources and operators in the order in which the published code places them where it tries one order."""
    inputs: dict[str, list[str]] = {}
    for edge in problem.edges:
        inputs.setdefault(edge.receiver, []).append(edge.sender)
        inputs.setdefault(edge.sender, [])
    return list(TopologicalSorter(inputs).static_order())


def _extended(
    problem: ServingProblem, variants: Mapping[str, str], search: AssignmentSearch, state: _State, name: str
) -> Iterator[_State]:
    """Yield a state with one more operator, for each way that the strategy tries."""
    lowest = max((state.tiers[each] for each in problem.input_operators(name)), default=0)
    together = search.strategy is Strategy.MULTIPLE_TIERS
    for tier in range(lowest, problem.num_tiers):
        tiers = range(lowest, tier + 1) if together else range(tier, tier + 1)
        place = _Placement.of(problem, variants, state, name, tiers)
        load = _ALLOCATIONS[search.allocation](place, together)
        if load is None:
            continue
        price = sum(problem.worker(worker).dollars_per_hour for worker, _ in load)
        yield _State(
            cost=state.cost + price + sum(place.traffic_cost(worker, amount, amount) for worker, amount in load),
            loads={**state.loads, name: load},
            tiers={**state.tiers, name: max(problem.worker(worker).tier for worker, _ in load)},
        )
        if search.strategy is Strategy.SAME_TIER:
            return


@dataclass(frozen=True, slots=True, kw_only=True)
class _Placement:
    """One operator that is to be placed.

    Attributes:
        rate: messages per second that it has to handle.
        throughput: messages per second of each free worker of the tiers, in the order of the problem.
        price: dollars per hour of each.
        tier: tier of each.
        source_cost: dollars per hour of each per message per second from sources.
        operator_cost: the same of messages from operators.
    """

    rate: float
    throughput: Mapping[str, float]
    price: Mapping[str, float]
    tier: Mapping[str, int]
    source_cost: Mapping[str, float]
    operator_cost: Mapping[str, float]

    @classmethod
    def of(
        cls, problem: ServingProblem, variants: Mapping[str, str], state: _State, name: str, tiers: range
    ) -> _Placement:
        """Return the placement of an operator on the free workers of some tiers."""
        variant = problem.operator(name).variant(variants[name])
        workers = [
            each
            for each in problem.workers
            if each.tier in tiers and each.name in variant.latency_ms and state.is_free(each.name)
        ]
        from_sources, from_operators = dict.fromkeys((w.name for w in workers), 0.0), {w.name: 0.0 for w in workers}
        for edge in problem.inputs(name):
            traffic = gib_per_hour(1.0, edge.message_kib(variants.get(edge.sender, ""), variant.name))
            rate = problem.rate(edge.sender)
            for worker in workers:
                if problem.is_source(edge.sender):
                    from_sources[worker.name] += problem.link_price(edge.sender, worker.name) * traffic
                    continue
                from_operators[worker.name] += sum(
                    problem.link_price(sender, worker.name) * traffic * sent / rate
                    for sender, sent in state.loads[edge.sender]
                )
        return cls(
            rate=problem.rate(name),
            throughput={each.name: variant.throughput(each.name) for each in workers},
            price={each.name: each.dollars_per_hour for each in workers},
            tier={each.name: each.tier for each in workers},
            source_cost=from_sources,
            operator_cost=from_operators,
        )

    def traffic_cost(self, worker: str, from_sources: float, from_operators: float) -> float:
        """Return the dollars per hour of messages per second to a worker."""
        return self.source_cost[worker] * from_sources + self.operator_cost[worker] * from_operators

    def lowest(self, workers: Iterable[str], at_least: Callable[[float], bool]) -> list[str]:
        """Return those workers of the lowest tier whose throughput is enough."""
        lowest = min((self.tier[worker] for worker in workers), default=0)
        return [each for each in workers if self.tier[each] == lowest and at_least(self.throughput[each])]


# --- allocations ----------------------------------------------------------------------------------------------------


def _greedy(place: _Placement, together: bool) -> Load | None:
    """Return workers one after the other; the last one takes what is left."""
    # Only over several tiers the published code looks at traffic, and at throughput where costs are equal.
    taken = _taken(place, counts_traffic=together, slowest_first=together)
    return _filled(place, taken)


def _greedy_backtrace(place: _Placement, together: bool) -> Load | None:
    """Return workers one after the other, without the smallest that are not needed; the largest takes what is left."""
    taken = sorted(_taken(place, counts_traffic=together, slowest_first=False), key=place.throughput.__getitem__)
    surplus, dropped = sum(map(place.throughput.__getitem__, taken)) - place.rate, 0.0
    while taken and dropped + place.throughput[taken[0]] <= surplus:
        dropped += place.throughput[taken.pop(0)]
    return _filled(place, taken)


def _taken(place: _Placement, *, counts_traffic: bool, slowest_first: bool) -> list[str]:
    """Return workers, the most suitable first, until they handle the rate or all are taken."""

    def cost(worker: str, from_sources: float, from_operators: float) -> float:
        traffic = place.traffic_cost(worker, from_sources, from_operators) if counts_traffic else 0.0
        return place.price[worker] + traffic

    def cheapest(workers: list[str], rest: float) -> list[str]:
        def key(worker: str) -> tuple[float, float]:
            return cost(worker, rest, place.rate), place.throughput[worker] if slowest_first else 0.0

        return sorted(workers, key=key)

    candidates = list(place.throughput)
    if alone := place.lowest(candidates, lambda throughput: throughput >= place.rate):
        candidates = cheapest(alone, place.rate)
    else:
        full = {each: cost(each, place.throughput[each], place.throughput[each]) for each in candidates}
        candidates.sort(key=lambda worker: (full[worker] / place.throughput[worker], full[worker]))
    taken: list[str] = []
    rest = place.rate
    while rest > 0 and candidates:
        taken.append(candidates.pop(0))
        rest -= place.throughput[taken[-1]]
        enough = place.lowest(candidates, lambda throughput, rest=rest: throughput > rest) if rest > 0 else []
        if enough:
            candidates = cheapest(enough, rest)
    return taken


def _filled(place: _Placement, workers: Sequence[str]) -> Load | None:
    """Return the workers with their loads, each as much as it can; None if they cannot handle the rate together."""
    load: list[tuple[str, float]] = []
    rest = place.rate
    for worker in workers:
        # A worker that gets nothing would be paid for nothing.
        if rest <= 0:
            break
        load.append((worker, min(place.throughput[worker], rest)))
        # Zero where it takes all of the rest: a difference of two sums would leave a rounding error to be served.
        rest = 0.0 if place.throughput[worker] >= rest else rest - place.throughput[worker]
    return tuple(load) if rest <= 0 else None


def _knapsack(place: _Placement, together: bool) -> Load | None:
    """Return as few workers as possible: those that are left out fill a knapsack of the surplus."""
    names = list(place.throughput)
    sizes = [math.floor(place.throughput[each] * _UNITS_PER_MESSAGE) for each in names]
    surplus = sum(sizes) - math.ceil(place.rate * _UNITS_PER_MESSAGE)
    if surplus < 0:
        return None
    best = np.zeros(surplus + 1)
    left_out: list[np.ndarray[tuple[int], np.dtype[np.bool_]]] = []
    for size in sizes:
        # Leaving a worker out is worth the same for all of them.
        with_it = np.full(surplus + 1, -np.inf)
        with_it[size:] = best[: surplus + 1 - size] + 1.0 if size <= surplus else -np.inf
        left_out.append(with_it > best)
        best = np.maximum(best, with_it)
    kept: list[str] = []
    for name, size, better in reversed(list(zip(names, sizes, left_out, strict=True))):
        if better[surplus]:
            surplus -= size
        else:
            kept.append(name)
    return _filled(place, kept)


def _meet_in_the_middle(place: _Placement, together: bool) -> Load | None:
    """Return the cheapest workers by price, from the subsets of each half of them."""
    names = list(place.throughput)
    halves = names[: len(names) // 2], names[len(names) // 2 :]
    first, second = ([_Subset.of(place, subset) for subset in _subsets(half)] for half in halves)
    # By throughput, each with the cheapest that is at least as fast.
    second.sort(key=lambda subset: subset.throughput)
    for number in range(len(second) - 2, -1, -1):
        if second[number + 1].price < second[number].price:
            second[number] = replace(second[number + 1], throughput=second[number].throughput)
    speeds = [subset.throughput for subset in second]
    pairs: list[tuple[float, tuple[str, ...]]] = []
    for subset in first:
        number = int(np.searchsorted(speeds, place.rate - subset.throughput))
        if number < len(second):
            pairs.append((subset.price + second[number].price, (*subset.workers, *second[number].workers)))
    return _filled(place, min(pairs)[1]) if pairs else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Subset:
    workers: tuple[str, ...]
    price: float
    throughput: float

    @classmethod
    def of(cls, place: _Placement, workers: tuple[str, ...]) -> _Subset:
        price, throughput = (sum(of[each] for each in workers) for of in (place.price, place.throughput))
        return cls(workers=workers, price=price, throughput=throughput)


def _subsets(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    return chain.from_iterable(combinations(names, size) for size in range(len(names) + 1))


_ALLOCATIONS: Mapping[Allocation, Callable[[_Placement, bool], Load | None]] = {
    Allocation.GREEDY: _greedy,
    Allocation.GREEDY_BACKTRACE: _greedy_backtrace,
    Allocation.KNAPSACK: _knapsack,
    Allocation.MEET_IN_THE_MIDDLE: _meet_in_the_middle,
}
