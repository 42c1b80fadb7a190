"""Strategies over SOAP dims: delta simulation against the whole one, the search against all strategies."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest

from alpa_lite.inter_op.mcmc import MarkovChain, random_strategy, search
from alpa_lite.inter_op.soap import (
    OpConfig,
    OpSeconds,
    SoapDim,
    SoapEdge,
    SoapKind,
    SoapOp,
    SoapProblem,
    Strategy,
    simulate,
)

SAMPLE, ATTRIBUTE, PARAMETER = SoapKind.SAMPLE, SoapKind.ATTRIBUTE, SoapKind.PARAMETER
RATE, LINK, LATENCY = 1e12, 1e9, 5e-6
KEY = 0


def _seconds(flops: float, weights: bool, degrees: tuple[int, ...]) -> OpSeconds:
    own = flops / math.prod(degrees) / RATE + LATENCY
    return OpSeconds(own, 2 * own, 1e-6 if weights else 0.0)


def _op(name: str, samples: int, width: int, *, flops: float, weight_bytes: float = 0.0, positions: int = 1) -> SoapOp:
    """An operator whose result has samples, perhaps positions, and features of a key of its own."""
    dims = [SoapDim(SAMPLE, samples, KEY)]
    dims += [SoapDim(ATTRIBUTE, positions, 1)] if positions > 1 else []
    key = 100 + sum(map(ord, name))
    dims += [SoapDim(PARAMETER, width, key)] if weight_bytes else []
    weights = ((weight_bytes, (key,)),) if weight_bytes else ()
    return SoapOp(
        name=name, dims=tuple(dims), seconds=partial(_seconds, flops, bool(weights)), weights=weights, state_bytes=3.0
    )


def _edge(ops: list[SoapOp], source: int, target: int, size: float) -> SoapEdge:
    return SoapEdge(source, target, size, tuple((dim.key, dim.size) for dim in ops[source].dims))


def _transfer(size: float, a: int, b: int) -> float:
    return LATENCY + size / LINK * (1 if a // 4 == b // 4 else 4)


def _sync(size: float, devices: tuple[int, ...]) -> float:
    return LATENCY + 2 * (len(devices) - 1) / len(devices) * size / LINK


def _problem(ops: list[SoapOp], edges: list[SoapEdge], num_devices: int) -> SoapProblem:
    return SoapProblem(
        ops=tuple(ops), edges=tuple(edges), num_devices=num_devices, transfer_seconds=_transfer, sync_seconds=_sync
    )


def _alexnet(num_devices: int = 4) -> SoapProblem:
    """Convolutions with much work and few weights, then dense layers with little work and many weights."""
    ops = [_op(f"conv{i}", 128, 64, flops=5e10, weight_bytes=4e6, positions=16) for i in range(3)]
    ops += [_op(f"dense{i}", 128, 4096, flops=4e9, weight_bytes=60e6) for i in range(2)]
    edges = [_edge(ops, i, i + 1, 2e6 if i == 2 else 8e6) for i in range(3)]
    return _problem(ops, [*edges, _edge(ops, 3, 4, 2e6)], num_devices)


def _branches(num_devices: int) -> SoapProblem:
    ops = [_op(name, 16, 8, flops=f, weight_bytes=w) for name, f, w in (("a", 1e9, 1e5), ("b", 2e9, 2e6))]
    ops += [_op("c", 16, 8, flops=4e9, weight_bytes=1e4), _op("d", 16, 8, flops=1e8)]
    return _problem(ops, [_edge(ops, a, b, 1e6) for a, b in ((0, 1), (0, 2), (1, 3), (2, 3))], num_devices)


def _moves(problem: SoapProblem, strategy: Strategy, drawn: random.Random) -> dict[int, OpConfig]:
    ops = drawn.sample(range(len(problem.ops)), drawn.choice([1, 1, 1, 2]))
    return {op: drawn.choice(problem.configs(op)) for op in ops}


@pytest.mark.parametrize("problem", [_alexnet(8), _branches(4)], ids=["chain", "branches"])
def test_delta_simulation_is_the_whole_one_over_1000_moves(problem: SoapProblem) -> None:
    drawn, now = random.Random(0), simulate(problem, problem.data_parallel())
    for number in range(1000 if len(problem.ops) == 4 else 300):
        moves = _moves(problem, now.strategy, drawn)
        found = now.moved(moves)
        if len(problem.ops) == 4 or number % 3 == 0:
            whole = simulate(problem, found.strategy)
            assert (found.seconds, found.cost, found.ends) == (whole.seconds, whole.cost, whole.ends)
        # Half of the moves are rejected, after which the simulation before goes on.
        now = found if drawn.random() < 0.5 else now


def test_tasks_of_a_strategy_by_hand() -> None:
    ops = [_op("a", 4, 1, flops=RATE), _op("b", 4, 2, flops=RATE, weight_bytes=1e9)]
    problem = _problem(ops, [_edge(ops, 0, 1, 1e9)], 2)
    # All on one device: nothing is sent or summed.
    alone = simulate(problem, (OpConfig((1,), (0,)), OpConfig((1, 1), (0,))))
    assert alone.seconds == pytest.approx(6 * (1 + LATENCY) - 0 + 1e-6)
    # By samples: half of the work each; gradients of the weights are summed during the other backward pass.
    split = simulate(problem, (OpConfig((2,), (0, 1)), OpConfig((2, 1), (0, 1))))
    assert split.seconds == pytest.approx(3 + 6 * LATENCY + 1e-6, abs=1e-9)
    # On different devices: the array there, and its gradient back, while the weights are updated.
    apart = simulate(problem, (OpConfig((1,), (0,)), OpConfig((1, 1), (1,))))
    assert apart.seconds == pytest.approx(6 * (1 + LATENCY) + 2 * (1 + LATENCY))
    # By parameters: the other half of the samples goes to each device, and half of a gradient back; nothing is summed.
    wide = simulate(problem, (OpConfig((2,), (0, 1)), OpConfig((1, 2), (0, 1))))
    assert wide.seconds == pytest.approx(3 + 6 * LATENCY + 2 * (0.5 + LATENCY), abs=1e-5)


@pytest.mark.parametrize("num_devices", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_search_finds_the_best_of_all_strategies(num_devices: int) -> None:
    problem = _branches(num_devices)
    spaces = [problem.configs(op) for op in range(4)]
    if num_devices == 4:  # the first device is as good as the others
        spaces[0] = tuple(config for config in spaces[0] if config.devices[0] == 0)
        spaces = [
            space if n < 2 else tuple(c for c in space if c.devices[0] in (0, 2)) for n, space in enumerate(spaces)
        ]
    best = min(simulate(problem, strategy).cost for strategy in itertools.product(*spaces))
    found = search(problem, problem.data_parallel(), MarkovChain(budget=3000, seed=1)).best
    assert found.cost <= best * (1 + 1e-12) and (num_devices > 2 or found.cost == pytest.approx(best))


@pytest.mark.parametrize("resets", [True, False])
def test_never_worse_than_the_start_and_one_seed_gives_one_answer(resets: bool) -> None:
    problem = _alexnet()
    chain = MarkovChain(budget=60, resets=resets, seed=3)
    for start in (problem.data_parallel(), random_strategy(problem, chain)):
        found, again = search(problem, start, chain), search(problem, start, replace(chain, delta=False))
        assert found.best.cost <= simulate(problem, start).cost
        # Delta simulation changes nothing but the time.
        assert (found.best.strategy, found.num_accepted) == (again.best.strategy, again.num_accepted)
    assert found.best.strategy != search(problem, start, replace(chain, seed=4)).best.strategy


def test_convolutions_by_samples_and_dense_layers_by_parameters() -> None:
    problem = _alexnet()
    found = search(problem, problem.data_parallel(), MarkovChain(budget=1500)).best
    for op, config in zip(problem.ops, found.strategy, strict=True):
        ways = {dim.kind: n for dim, n in zip(op.dims, config.degrees, strict=True)}
        # Large weights are split, and much work is for all devices.
        assert ways[PARAMETER] > 1 if op.name.startswith("dense") else len(config.devices) == 4
    trick = tuple(OpConfig((4, 1, 1) if op.name.startswith("conv") else (1, 4), (0, 1, 2, 3)) for op in problem.ops)
    assert found.seconds <= simulate(problem, trick).seconds
    assert found.seconds < 0.7 * simulate(problem, problem.data_parallel()).seconds


def test_a_large_table_ends_on_one_device_or_on_its_own_dim() -> None:
    ops = [_op("table", 64, 512, flops=1e8, weight_bytes=1e8)]
    ops += [_op(f"cell{i}", 64, 512, flops=2e10, weight_bytes=4e6) for i in range(2)]
    problem = _problem(ops, [_edge(ops, i, i + 1, 1e5) for i in range(2)], 4)
    found = search(problem, problem.data_parallel(), MarkovChain(budget=400)).best
    assert found.strategy[0].degrees[0] == 1


def test_memory_is_a_soft_penalty() -> None:
    problem = replace(_alexnet(), usable_bytes=100e6)
    start = problem.data_parallel()
    # Weights, and twice as much of optimizer state, on each device.
    over = 4 * (3 * (3 * 4e6 + 2 * 60e6) - 100e6)
    assert problem.bytes_over(start) == pytest.approx(over)
    assert simulate(problem, start).cost == pytest.approx(simulate(problem, start).seconds + 1e-9 * over)
    found = search(problem, start, MarkovChain(budget=200)).best
    assert problem.bytes_over(found.strategy) < 0.4 * over


def test_acceptance_and_moves() -> None:
    problem, chain = _alexnet(), MarkovChain(budget=1, seed=0)
    from alpa_lite.inter_op.mcmc import _Walk

    walk = _Walk(problem=problem, chain=chain)
    assert walk.accepts(0.0) and walk.accepts(-3.0) and not any(walk.accepts(1e3) for _ in range(100))
    shares = Counter(walk.accepts(0.5) for _ in range(4000))
    assert shares[True] / 4000 == pytest.approx(math.exp(-1.2 * 0.5), abs=0.03)
    # A propagated configuration has the devices of the operator from which it comes.
    walk = _Walk(problem=problem, chain=replace(chain, propagate=1.0))
    strategy = random_strategy(problem, chain)
    held = {config.devices for config in strategy}
    moved = [walk.moves(strategy) for _ in range(300)]
    assert sum(all(config.devices in held for config in moves.values()) for moves in moved) > 30
    for moves in moved:
        for op, config in moves.items():
            assert config in problem.configs(op)


def test_the_paper_ends_when_nothing_improves() -> None:
    problem = _branches(2)
    best = search(problem, problem.data_parallel(), MarkovChain(budget=2000)).best.strategy
    found = search(problem, best, MarkovChain(budget=100, resets=False))
    assert found.num_moves == 51 and found.best.strategy == best
