"""Strategies over the SOAP dims of operators, and their simulation as task graphs, whole or only what changes.

An operator has dims of its result: samples, attributes (positions, height, width) and parameters, which its weights
have too. Its configuration gives each dim a degree, and each part, in row-major order, a device. Tasks of a step:

    forward, backward    of each part on its device                          seconds of the operator at these degrees
    send                 what a part reads of a part on another device, and its gradient back: on the link between both
    sync                 gradients of weights that several devices hold, after the backward pass of all of them
    update               of each part on its device

    ready = max end of the tasks that it waits for;   start = max(ready, end of the task before on its device or link)

Each device and link takes tasks first in, first out: by (ready, task).                                `simulate`

Delta simulation: with the tasks that a move adds, removes or changes, of which none can be ready before t, all that was
taken before t stays as it was. It is the same function of the state at t, so that both give equal times
(`StrategySimulation.moved`). What does not fit costs 1e-6 ms per byte (`SoapProblem.cost`).

Jia et al., Beyond Data and Model Parallelism for Deep Neural Networks (MLSys 2019), sections 4 and 5.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from itertools import product
from math import inf, prod
from typing import NamedTuple

PENALTY_SECONDS_PER_BYTE = 1e-9
"""The cost of each byte beyond the memory of a device."""


class SoapKind(StrEnum):
    """The kinds of dims along which an operator can be split."""

    SAMPLE = "sample"
    ATTRIBUTE = "attribute"
    PARAMETER = "parameter"


class SoapDim(NamedTuple):
    """A dim of an operator's result. Dims with equal keys are split alike to send nothing."""

    kind: SoapKind
    size: int
    key: int


class OpSeconds(NamedTuple):
    """Seconds of one part of an operator."""

    forward: float
    backward: float = 0.0
    update: float = 0.0


@dataclass(frozen=True, kw_only=True, eq=False)
class SoapOp:
    """An operator.

    Attributes:
        name: name for messages.
        dims: the dims that can be split.
        seconds: `seconds(degrees)` of each part.
        weights: bytes of each array of weights with the keys of its dims.
        state_bytes: bytes of weights and optimizer state for each byte of weights.
        activation_bytes: bytes that all parts together hold for the backward pass.
    """

    name: str
    dims: tuple[SoapDim, ...]
    seconds: Callable[[tuple[int, ...]], OpSeconds]
    weights: tuple[tuple[float, tuple[int, ...]], ...] = ()
    state_bytes: float = 1.0
    activation_bytes: float = 0.0

    def shard_bytes(self, degrees: Sequence[int]) -> float:
        """Return the bytes of weights of one part."""
        ways = {dim.key: n for dim, n in zip(self.dims, degrees, strict=True)}
        return sum(size / prod(ways.get(key, 1) for key in keys) for size, keys in self.weights)

    @cached_property
    def weight_keys(self) -> frozenset[int]:
        """The keys of the dims of all weights."""
        return frozenset(key for _, keys in self.weights for key in keys)


class SoapEdge(NamedTuple):
    """An array that one operator makes and another reads: its bytes, and (key, size) of its dims."""

    source: int
    target: int
    bytes: float
    dims: tuple[tuple[int, int], ...]


class OpConfig(NamedTuple):
    """The degree of each dim of an operator, and the device of each part."""

    degrees: tuple[int, ...]
    devices: tuple[int, ...]


Strategy = tuple[OpConfig, ...]
"""The configuration of each operator."""

Moves = Mapping[int, OpConfig]
"""New configurations of some operators."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SoapProblem:
    """Operators in the order of the forward pass, and devices.

    Attributes:
        ops: the operators.
        edges: the arrays between them.
        num_devices: number of devices.
        transfer_seconds: `transfer_seconds(bytes, source, target)` between two devices.
        sync_seconds: `sync_seconds(bytes, devices)` of summing gradients over devices.
        usable_bytes: memory of a device.
    """

    ops: tuple[SoapOp, ...]
    edges: tuple[SoapEdge, ...]
    num_devices: int
    transfer_seconds: Callable[[float, int, int], float]
    sync_seconds: Callable[[float, tuple[int, ...]], float]
    usable_bytes: float = inf

    def configs(self, op: int, *, all_devices: bool = False) -> tuple[OpConfig, ...]:
        """Return the configurations of an operator: degrees that divide its dims, on consecutive devices.

        `all_devices`: only those with a part on each device.
        """
        return self._configs[op, all_devices]

    @cached_property
    def _configs(self) -> dict[tuple[int, bool], tuple[OpConfig, ...]]:
        total, found = self.num_devices, dict[tuple[int, bool], tuple[OpConfig, ...]]()
        for number, op in enumerate(self.ops):
            ways = [[n for n in range(1, total + 1) if dim.size % n == 0] for dim in op.dims]
            degrees = [each for each in product(*ways) if prod(each) <= total]
            every = [
                OpConfig(each, tuple(range(first, first + prod(each))))
                for each in degrees
                for first in range(total - prod(each) + 1)
            ]
            found[number, False] = tuple(every)
            found[number, True] = tuple(config for config in every if len(config.devices) == total)
        return found

    def data_parallel(self) -> Strategy:
        """Return the strategy in which every operator splits its samples over as many devices as divide them."""

        def config(op: SoapOp) -> OpConfig:
            size = next((dim.size for dim in op.dims if dim.kind is SoapKind.SAMPLE), 1)
            ways = max(n for n in range(1, self.num_devices + 1) if size % n == 0)
            degrees = tuple(ways if dim.kind is SoapKind.SAMPLE else 1 for dim in op.dims)
            return OpConfig(degrees, tuple(range(prod(degrees))))

        return tuple(map(config, self.ops))

    def cost(self, seconds: float, strategy: Strategy) -> float:
        """Return the cost of a strategy that takes so many seconds: more where it does not fit."""
        return seconds + PENALTY_SECONDS_PER_BYTE * self.bytes_over(strategy)

    def bytes_over(self, strategy: Strategy) -> float:
        """Return the bytes by which devices are too full, all together."""
        held = [0.0] * self.num_devices
        for op, config in zip(self.ops, strategy, strict=True):
            size = op.state_bytes * op.shard_bytes(config.degrees) + op.activation_bytes / len(config.devices)
            for device in config.devices:
                held[device] += size
        return sum(max(0.0, each - self.usable_bytes) for each in held)

    def reads(self, edge: int, degrees: tuple[int, ...], others: tuple[int, ...]) -> list[_Read]:
        """Return what the parts of an edge's target read of those of its source, at the degrees of both."""
        key = (edge, degrees, others)
        if key not in self._reads:
            each = self.edges[edge]
            self._reads[key] = _reads(each, self.ops[each.source], self.ops[each.target], (degrees, others))
        return self._reads[key]

    @cached_property
    def _reads(self) -> dict[tuple[int, tuple[int, ...], tuple[int, ...]], list[_Read]]:
        return {}

    @cached_property
    def around(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
        """For each operator the edges that lead to it, and those that lead away."""
        into, out = [list[int]() for _ in self.ops], [list[int]() for _ in self.ops]
        for number, edge in enumerate(self.edges):
            into[edge.target].append(number)
            out[edge.source].append(number)
        return tuple((tuple(a), tuple(b)) for a, b in zip(into, out, strict=True))


class _Pair(NamedTuple):
    """A part that makes something, one that reads it, and how many bytes; the devices of both."""

    source: int
    target: int
    bytes: float
    ends: tuple[int, int]


def _coordinates(degrees: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the block of each part along each dim."""
    return product(*map(range, degrees))


Pairs = dict[int, tuple[_Pair, ...]]
"""For each edge the parts at its ends of which one reads the other."""


def _pairs(problem: SoapProblem, strategy: Strategy, number: int) -> Iterator[_Pair]:
    edge = problem.edges[number]
    config, other = strategy[edge.source], strategy[edge.target]
    for target, parts, size in problem.reads(number, config.degrees, other.degrees):
        here = other.devices[target]
        # Of several copies the one on the same device, else they take turns.
        source = next((p for p in parts if config.devices[p] == here), parts[target % len(parts)])
        yield _Pair(source, target, size, (config.devices[source], here))


class _Read(NamedTuple):
    """A part that reads bytes which each of some parts has."""

    target: int
    sources: tuple[int, ...]
    bytes: float


def _reads(edge: SoapEdge, source: SoapOp, target: SoapOp, degrees: tuple[Sequence[int], Sequence[int]]) -> list[_Read]:
    def blocks(op: SoapOp, degrees: Sequence[int]) -> tuple[list[int], list[tuple[int, ...]]]:
        """Return the degree of each dim of the array, and the block of each part along these."""
        place = {dim.key: n for n, dim in enumerate(op.dims)}
        at = [place.get(key) for key, _ in edge.dims]
        ways = [1 if n is None else degrees[n] for n in at]
        return ways, [tuple(0 if n is None else c[n] for n in at) for c in _coordinates(degrees)]

    ways, made = blocks(source, degrees[0])
    other_ways, read = blocks(target, degrees[1])
    copies, found = dict[tuple[int, ...], list[int]](), list[_Read]()
    for part, block in enumerate(made):
        copies.setdefault(block, []).append(part)
    for number, wanted in enumerate(read):
        for block, parts in copies.items():
            share = 1.0
            for n, m, i, j in zip(ways, other_ways, block, wanted, strict=True):
                # In whole numbers, so that blocks that only touch share nothing.
                share *= max(0, min((i + 1) * m, (j + 1) * n) - max(i * m, j * n)) / (n * m)
            if share:
                found.append(_Read(number, tuple(parts), share * edge.bytes))
    return found


Key = tuple[int, ...]
"""A task: its kind, then its operator or edge, then its part or parts. Of tasks that are ready together, the least runs
first."""

_FORWARD, _BACKWARD, _UPDATE, _SEND, _RETURN, _SYNC = range(6)


class _Job(NamedTuple):
    """A task: the device, link or network that it takes, its seconds, and the tasks that it waits for."""

    resource: tuple[int, ...]
    seconds: float
    after: tuple[Key, ...]


class _Taken(NamedTuple):
    """A task that was taken: when it was ready, itself, its end, and the end of the one before on its resource."""

    ready: float
    key: Key
    end: float
    free: float


def _jobs_of_op(problem: SoapProblem, strategy: Strategy, pairs: Pairs, number: int) -> dict[Key, _Job]:
    """Return the tasks on the devices of an operator."""
    op, config = problem.ops[number], strategy[number]
    seconds, (into, out) = op.seconds(config.degrees), problem.around[number]
    parts = range(len(config.devices))
    before, behind = {p: list[Key]() for p in parts}, {p: list[Key]() for p in parts}
    for edge in into:
        source = problem.edges[edge].source
        for pair in pairs[edge]:
            sent = (_SEND, edge, pair.source, pair.target)
            before[pair.target].append(sent if _crosses(pair) else (_FORWARD, source, pair.source))
    for edge in out:
        target = problem.edges[edge].target
        for pair in pairs[edge]:
            sent = (_RETURN, edge, pair.source, pair.target)
            behind[pair.source].append(sent if _crosses(pair) else (_BACKWARD, target, pair.target))
    found, sharing = dict[Key, _Job](), dict[tuple[int, ...], list[int]]()
    for part, block in enumerate(_coordinates(config.degrees)):
        held = tuple(i for i, dim in zip(block, op.dims, strict=True) if dim.key in op.weight_keys)
        sharing.setdefault(held, []).append(part)
        device = (config.devices[part],)
        found[_FORWARD, number, part] = _Job(device, seconds.forward, tuple(before[part]))
        after = ((_FORWARD, number, part), *behind[part])
        found[_BACKWARD, number, part] = _Job(device, seconds.backward, after)
    size = op.shard_bytes(config.degrees)
    for replicas in sharing.values() if op.weights else ():
        devices = tuple(sorted({config.devices[part] for part in replicas}))
        backward = tuple((_BACKWARD, number, part) for part in replicas)
        for part in replicas:
            device, after = config.devices[part], backward
            if len(devices) > 1:
                found[_SYNC, number, part] = _Job((device, -1, -1), problem.sync_seconds(size, devices), backward)
                after = ((_SYNC, number, part),)
            found[_UPDATE, number, part] = _Job((device,), seconds.update, after)
    return found


def _jobs_of_edge(problem: SoapProblem, strategy: Strategy, pairs: Pairs, number: int) -> dict[Key, _Job]:
    """Return the tasks on links for an array and its gradient."""
    edge, found = problem.edges[number], dict[Key, _Job]()
    for pair in pairs[number]:
        if _crosses(pair):
            a, b = pair.ends
            seconds = problem.transfer_seconds(pair.bytes, a, b)
            made, back = (_FORWARD, edge.source, pair.source), (_BACKWARD, edge.target, pair.target)
            found[_SEND, number, pair.source, pair.target] = _Job((a, b), seconds, (made,))
            found[_RETURN, number, pair.source, pair.target] = _Job((b, a), seconds, (back,))
    return found


def _crosses(pair: _Pair) -> bool:
    return pair.ends[0] != pair.ends[1]


@dataclass(frozen=True, kw_only=True, eq=False)
class StrategySimulation:
    """A simulated step by a strategy.

    Attributes:
        problem: the operators.
        strategy: the strategy.
        seconds: seconds of a step.
        cost: seconds, and the penalty of what does not fit.
    """

    problem: SoapProblem
    strategy: Strategy
    seconds: float
    cost: float
    _pairs: Pairs = field(repr=False)
    _owned: dict[tuple[bool, int], dict[Key, _Job]] = field(repr=False)
    _jobs: dict[Key, _Job] = field(repr=False)
    _taken: list[_Taken] = field(repr=False)
    _ends: dict[Key, _Taken] = field(repr=False)
    _free: dict[tuple[int, ...], float] = field(repr=False)

    @property
    def ends(self) -> dict[Key, float]:
        """The end of each task."""
        return {key: taken.end for key, taken in self._ends.items()}

    def moved(self, moves: Moves) -> StrategySimulation:
        """Return the simulation with other configurations of some operators; only what changes is simulated anew."""
        problem = self.problem
        strategy = tuple(moves.get(number, config) for number, config in enumerate(self.strategy))
        edges = {edge for op in moves for side in problem.around[op] for edge in side}
        ops = {op for edge in edges for op in problem.edges[edge][:2]} | moves.keys()
        pairs = {**self._pairs, **{edge: tuple(_pairs(problem, strategy, edge)) for edge in edges}}
        owned, jobs, changed, gone = dict(self._owned), dict(self._jobs), dict[Key, _Job](), set[Key]()
        for is_op, numbers in ((True, ops), (False, edges)):
            for number in numbers:
                old = owned[is_op, number]
                new = (_jobs_of_op if is_op else _jobs_of_edge)(problem, strategy, pairs, number)
                owned[is_op, number] = new
                for key in old.keys() - new.keys():
                    gone.add(key)
                    del jobs[key]
                for key, job in new.items():
                    if old.get(key) != job:
                        changed[key] = jobs[key] = job
        first = self._first_change(changed, gone)
        begin = bisect_left(self._taken, (first,))
        ends, free, todo = dict(self._ends), dict(self._free), [key for key in changed if key not in self._jobs]
        for taken in reversed(self._taken[begin:]):
            free[self._jobs[taken.key].resource] = taken.free
            del ends[taken.key]
            if taken.key not in gone:
                todo.append(taken.key)
        graph = _TaskGraph(problem, strategy, pairs, owned, jobs)
        return _simulated(graph, _State(self._taken[:begin], ends, free, todo))

    def _first_change(self, changed: Mapping[Key, _Job], gone: set[Key]) -> float:
        """Return the earliest time at which a task that changes is ready, before or after."""
        known = dict[Key, float]()

        def ready(key: Key) -> float:
            """Return when a changed task can be ready at the earliest."""
            if key not in known:
                ends = (
                    ready(k) + changed[k].seconds if k in changed else self._ends[k].end for k in changed[key].after
                )
                known[key] = max(ends, default=0.0)
            return known[key]

        before = [self._ends[key].ready for key in (*gone, *changed) if key in self._ends]
        return min([*before, *map(ready, changed)], default=inf)


class _State(NamedTuple):
    """A simulation up to a time: what was taken, when resources are free, and the tasks that are left."""

    taken: list[_Taken]
    ends: dict[Key, _Taken]
    free: dict[tuple[int, ...], float]
    todo: Sequence[Key]


def simulate(problem: SoapProblem, strategy: Strategy) -> StrategySimulation:
    """Return the simulation of a step by a strategy."""
    pairs = {n: tuple(_pairs(problem, strategy, n)) for n in range(len(problem.edges))}
    owned = {(True, n): _jobs_of_op(problem, strategy, pairs, n) for n in range(len(problem.ops))}
    owned |= {(False, n): _jobs_of_edge(problem, strategy, pairs, n) for n in range(len(problem.edges))}
    jobs = {key: job for each in owned.values() for key, job in each.items()}
    return _simulated(_TaskGraph(problem, strategy, pairs, owned, jobs), _State([], {}, {}, [*jobs]))


class _TaskGraph(NamedTuple):
    """The tasks of a strategy, also by the operator (True) or edge (False) that they belong to."""

    problem: SoapProblem
    strategy: Strategy
    pairs: Pairs
    owned: dict[tuple[bool, int], dict[Key, _Job]]
    jobs: dict[Key, _Job]


def _simulated(graph: _TaskGraph, state: _State) -> StrategySimulation:
    """Return the simulation that goes on from a state."""
    problem, strategy, pairs, owned, jobs = graph
    taken, ends, free, todo = state
    readers, waits, ready = dict[Key, list[Key]](), dict[Key, int](), dict[Key, float]()
    heap = list[tuple[float, Key]]()
    for key in todo:
        count, latest = 0, 0.0
        for other in jobs[key].after:
            if other in ends:
                latest = max(latest, ends[other].end)
            else:
                count += 1
                readers.setdefault(other, []).append(key)
        waits[key], ready[key] = count, latest
        if not count:
            heap.append((latest, key))
    heapq.heapify(heap)
    while heap:
        at, key = heapq.heappop(heap)
        job = jobs[key]
        before = free.get(job.resource, 0.0)
        end = max(at, before) + job.seconds
        free[job.resource] = end
        ends[key] = done = _Taken(at, key, end, before)
        taken.append(done)
        for reader in readers.get(key, ()):
            waits[reader] -= 1
            ready[reader] = max(ready[reader], end)
            if not waits[reader]:
                heapq.heappush(heap, (ready[reader], reader))
    seconds = max(free.values(), default=0.0)
    return StrategySimulation(
        problem=problem,
        strategy=strategy,
        seconds=seconds,
        cost=problem.cost(seconds, strategy),
        _pairs=pairs,
        _owned=owned,
        _jobs=jobs,
        _taken=taken,
        _ends=ends,
        _free=free,
    )
