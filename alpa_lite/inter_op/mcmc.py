"""Markov chain Monte Carlo over strategies: FlexFlow's search, as in the paper and as it was shipped.

    move       one random operator gets a random configuration; or, with probability 0.25, the configuration of an
               operator goes on to its neighbours                                                          `_Walk.moves`
    accept     with probability min(1, exp(-beta (cost of the move - cost)))                               costs in ms
    shipped    beta = 1.2; every hundredth of the budget, at most every 1000 moves, the chain goes back to the best
    paper      the chain never goes back; it ends when nothing has improved for half of the budget

Jia et al., Beyond Data and Model Parallelism for Deep Neural Networks (MLSys 2019), section 6; flexflow/FlexFlow,
`mcmc_optimize`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from alpa_lite.inter_op.soap import Moves, OpConfig, SoapProblem, Strategy, StrategySimulation, simulate

MOST_BEFORE_RESET = 1000
"""The largest number of moves before the chain goes back to the best strategy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkovChain:
    """Options of a chain.

    Attributes:
        budget: number of moves.
        beta: the slope of acceptance, per millisecond.
        propagate: probability of a move that propagates a configuration.
        resets: whether the chain goes back to the best strategy, as shipped, or ends early, as in the paper.
        all_devices: whether every operator has a part on each device.
        delta: whether moves are simulated by what they change.
        seed: seed of all randomness.
    """

    budget: int = 1000
    beta: float = 1.2
    propagate: float = 0.25
    resets: bool = True
    all_devices: bool = False
    delta: bool = True
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainResult:
    """What a chain has found.

    Attributes:
        best: the simulation of the best strategy.
        num_moves: number of moves tried.
        num_accepted: number of moves accepted.
    """

    best: StrategySimulation = field(repr=False)
    num_moves: int
    num_accepted: int


def random_strategy(problem: SoapProblem, chain: MarkovChain) -> Strategy:
    """Return a strategy with random configurations."""
    drawn = random.Random(chain.seed)
    return tuple(drawn.choice(_space(problem, op, chain)) for op in range(len(problem.ops)))


def _space(problem: SoapProblem, op: int, chain: MarkovChain) -> tuple[OpConfig, ...]:
    """Return the configurations of an operator; where none has a part on each device, the whole on the first one."""
    found = problem.configs(op, all_devices=chain.all_devices)
    return found or tuple(config for config in problem.configs(op) if config.devices == (0,))


def search(
    problem: SoapProblem,
    start: Strategy,
    chain: MarkovChain,
    told: Callable[[int, float], None] = lambda move, best: None,
) -> ChainResult:
    """Return the best strategy of a chain that begins at `start`; `told` hears of each move and the best seconds."""
    walk = _Walk(problem=problem, chain=chain)
    now = best = simulate(problem, start)
    improved = accepted = move = 0
    every = max(1, min(chain.budget // 100, MOST_BEFORE_RESET))
    for move in range(1, chain.budget + 1):
        if chain.resets and move % every == 0:
            now = best
        moves = walk.moves(now.strategy)
        if chain.delta:
            found = now.moved(moves)
        else:
            found = simulate(problem, tuple(moves.get(n, config) for n, config in enumerate(now.strategy)))
        # Milliseconds, in which beta is given.
        if walk.accepts(1e3 * (found.cost - now.cost)):
            now, accepted = found, accepted + 1
        if now.cost < best.cost:
            best, improved = now, move
        told(move, best.seconds)
        if not chain.resets and move - improved > chain.budget / 2:
            break
    return ChainResult(best=best, num_moves=move, num_accepted=accepted)


@dataclass(slots=True, kw_only=True)
class _Walk:
    """The random choices of a chain."""

    problem: SoapProblem
    chain: MarkovChain
    drawn: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.drawn = random.Random(self.chain.seed)

    def accepts(self, longer: float) -> bool:
        """Return whether a move is accepted that costs so many milliseconds more."""
        return longer <= 0 or self.drawn.random() < math.exp(-self.chain.beta * longer)

    def moves(self, strategy: Strategy) -> Moves:
        """Return the new configurations of one move."""
        op = self.drawn.randrange(len(self.problem.ops))
        if self.problem.edges and self.drawn.random() < self.chain.propagate:
            found = self._propagated(op, strategy)
            if found:
                return found
        return {op: self.drawn.choice(_space(self.problem, op, self.chain))}

    def _propagated(self, op: int, strategy: Strategy) -> dict[int, OpConfig]:
        """Return the configuration of an operator for others that a random walk from it meets and that can have it."""
        problem, found, config = self.problem, dict[int, OpConfig](), strategy[op]
        ways = {dim.key: n for dim, n in zip(problem.ops[op].dims, config.degrees, strict=True)}
        while True:
            into, out = problem.around[op]
            near = [problem.edges[e].source for e in into] + [problem.edges[e].target for e in out]
            if not near:
                return found
            op = self.drawn.choice(near)
            handed_on = OpConfig(tuple(ways.get(dim.key, 1) for dim in problem.ops[op].dims), config.devices)
            # Other dims or sizes: it cannot have these degrees, or they are too few for these devices.
            if handed_on not in _space(problem, op, self.chain):
                return found
            if strategy[op] != handed_on:
                found[op] = handed_on
            if self.drawn.random() < 0.5:
                return found
