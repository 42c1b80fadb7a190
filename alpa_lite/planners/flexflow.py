"""FlexFlow: degrees and devices of every operator over samples, attributes and parameters, by Markov chain Monte Carlo.

    operators    groups of ops around one product, convolution or loop (`colocated_groups`); their dims are those of its
                 result: samples; parameters, which its weights have too; attributes              `soap_problem`
    cost         a simulated task graph                                                            `inter_op/soap.py`
    chains       from data parallelism and from random strategies, over all configurations and over those with a part
                 on each device                                                                    `inter_op/mcmc.py`
    plan         the fastest strategy with a part on each device: as layout of the operators' results and weights on a
                 mesh, on which the integer program chooses all else                               `strategy_mesh`

A strategy that puts some operators on some of the devices is priced, and named in a note, but has no plan: programs of
a stage run on all of its devices. Halos of convolutions that are split in space are not part of the search's price.

Jia et al., Beyond Data and Model Parallelism for Deep Neural Networks (MLSys 2019).
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from alpa_lite.errors import AlpaLiteError, PlanError
from alpa_lite.inter_op.mcmc import ChainResult, MarkovChain, random_strategy, search
from alpa_lite.inter_op.plan_request import PlanRequest
from alpa_lite.inter_op.soap import OpConfig, SoapProblem, Strategy, simulate
from alpa_lite.inter_op.soap_ops import SoapStep, soap_step
from alpa_lite.intra_op.stage import GivenLayout, Wanted
from alpa_lite.intra_op.strategies import Restriction
from alpa_lite.plan.plan import Plan
from alpa_lite.planners.on_mesh import MeshConstraints, plan_on_mesh
from alpa_lite.planners.planner import Planner
from alpa_lite.text import show_count, show_seconds

MOST_AXES = 4
"""The most axes of a mesh on which a strategy is planned."""


@dataclass(frozen=True, kw_only=True)
class FlexFlow(Planner):
    """A degree per dim of every operator, found by Markov chain Monte Carlo on simulated task graphs.

    Attributes:
        budget: number of moves of all chains together.
        beta: slope of the acceptance exp(-beta · milliseconds) of slower strategies (shipped: 1.2).
        variant: "shipped", which goes back to the best strategy every hundredth of a chain, or "paper", which ends when
            nothing has improved for half of one.
        starts: the strategies at which chains begin: "data_parallel", "random", or "both".
        groups: the largest number of operators.
        seed: seed of all randomness; the same seed gives the same plan.
    """

    budget: int = 1000
    beta: float = 1.2
    variant: Literal["shipped", "paper"] = "shipped"
    starts: Literal["data_parallel", "random", "both"] = "both"
    groups: int = 16
    seed: int = 0

    @property
    def name(self) -> str:
        """Name for tables."""
        return "FlexFlow"

    def plan(self, request: PlanRequest) -> Plan:
        """Return the plan of the best strategy that can run. Raises the error of the first if none has a plan."""
        started = time.perf_counter()
        if self.budget < 1:
            raise PlanError(f"budget = {self.budget} was asked for. Ask for at least 1 move.")
        step = soap_step(request, self.groups)
        with request.progress.during("strategies", f"{self.name}: {show_count(len(step.problem.ops), 'operator')}"):
            found = self._searched(request, step.problem)
        plans, error = list[tuple[Plan, ChainResult]](), None
        for result in found.everywhere:
            try:
                plans.append((self._planned(request, step, result.best.strategy), result))
            except AlpaLiteError as problem:
                error = error or problem
        if not plans:
            assert error is not None
            raise error
        best, result = min(plans, key=lambda each: each[0].prediction.step_seconds)
        notes, others = self._about(step, found, result)
        return replace(
            best,
            notes=(*best.notes, *notes),
            alternatives=(*best.alternatives, *others),
            solver=replace(best.solver, seconds=time.perf_counter() - started),
        )

    def _searched(self, request: PlanRequest, problem: SoapProblem) -> _Found:
        """Run the chains: from each start, over all configurations, and over those with a part on each device."""
        starts = ("data_parallel", "random") if self.starts == "both" else (self.starts,)
        chains = [(start, everywhere) for everywhere in (True, False) for start in starts]
        found: dict[bool, list[ChainResult]] = {True: [], False: []}
        for number, (start, everywhere) in enumerate(chains):
            chain = MarkovChain(
                budget=max(1, self.budget // len(chains)),
                beta=self.beta,
                resets=self.variant == "shipped",
                all_devices=everywhere,
                seed=self.seed * len(chains) + number,
            )
            strategy = problem.data_parallel() if start == "data_parallel" else random_strategy(problem, chain)
            # Where devices do not divide the samples, data parallelism leaves some without a part.
            if everywhere and strategy_mesh(problem, strategy) is None:
                strategy = random_strategy(problem, chain)

            def told(move: int, best: float, budget: int = chain.budget) -> None:
                if move % 50 == 0:
                    request.progress(f"{self.name}: move {move} of {budget}, best {show_seconds(best)} simulated")

            found[everywhere].append(search(problem, strategy, chain, told))
        # The plan of data parallelism too: what the search's prices leave out may make it the fastest.
        start = problem.data_parallel()
        if strategy_mesh(problem, start) is not None:
            found[True].append(ChainResult(best=simulate(problem, start), num_moves=0, num_accepted=0))
        return _Found(everywhere=found[True], anywhere=found[False])

    def _planned(self, request: PlanRequest, step: SoapStep, strategy: Strategy) -> Plan:
        axes = strategy_mesh(step.problem, strategy)
        if axes is None:
            raise PlanError(
                f"{self.name}: the degrees of the operators belong to no mesh of at most {MOST_AXES} axes on "
                f"{show_count(step.problem.num_devices, 'device')}. Use other numbers of devices or of samples."
            )
        constraints = MeshConstraints(restriction=Restriction(), layout=_layout(step, strategy, axes))
        return plan_on_mesh(self.name, request, axes, constraints)

    def _about(self, step: SoapStep, found: _Found, result: ChainResult) -> tuple[list[str], list[tuple[str, float]]]:
        """Return what to say of the search, and the alternatives that are priced alone."""
        moves = sum(each.num_moves for each in (*found.everywhere, *found.anywhere))
        kinds = Counter(_shown(step.problem, n, config) for n, config in enumerate(result.best.strategy))
        told = "; ".join(f"{count} × {kind}" for kind, count in kinds.most_common())
        notes = [
            f"{moves} moves of {show_count(len(step.problem.ops), 'operator')} were tried; split by {told}; "
            f"{show_seconds(result.best.seconds)} as the search simulates it"
        ]
        other = min(found.anywhere, key=lambda each: each.best.cost).best
        if other.cost >= min(each.best.cost for each in found.everywhere):
            return notes, []
        notes.append(
            f"a strategy with some operators on some of the devices takes {show_seconds(other.seconds)} as the search "
            "simulates it; it is priced only, since programs run on all devices of a stage"
        )
        return notes, [(f"{self.name}, operators on some devices (simulated, cannot run)", other.seconds)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """The results of chains: of strategies with parts on each device, and of all."""

    everywhere: Sequence[ChainResult]
    anywhere: Sequence[ChainResult]


def _shown(problem: SoapProblem, op: int, config: OpConfig) -> str:
    parts = [f"{dim.kind} {n}" for dim, n in zip(problem.ops[op].dims, config.degrees, strict=True) if n > 1]
    return " and ".join(parts) or "nothing"


def strategy_mesh(problem: SoapProblem, strategy: Strategy) -> dict[str, int] | None:
    """Return the axes of a mesh on which a strategy can be laid out, major first; None if there is none.

    Parts of an operator are numbered in row-major order, so that after each dim the product of the degrees so far must
    be that of some first axes: the products of all operators have to divide each other.
    """
    total, ends = problem.num_devices, {1, problem.num_devices}
    for config in strategy:
        parts = len(config.devices)
        if parts == 1 and total > 1:
            continue  # too small to be split: whole on each device
        if config.devices != tuple(range(total)):
            return None
        ends |= {math.prod(config.degrees[:n]) for n in range(len(config.degrees) + 1)}
    chain = sorted(ends)
    if any(b % a for a, b in pairwise(chain)) or len(chain) > MOST_AXES + 1:
        return None
    sizes = [b // a for a, b in pairwise(chain)] or [1]
    return {f"x{n}": size for n, size in enumerate(sizes)}


def _layout(step: SoapStep, strategy: Strategy, axes: Mapping[str, int]) -> GivenLayout:
    """Return the layout of the results and weights of operators."""
    graph, classes = step.step.graph, step.classes
    values: list[Wanted] = [() for _ in graph.values]
    for op, config, soap in zip(step.leads, strategy, step.problem.ops, strict=True):
        if op is None or len(config.devices) < step.problem.num_devices:
            continue
        split = _axes_of(config.degrees, axes)
        by_key = {dim.key: names for dim, names in zip(soap.dims, split, strict=True)}
        for v in (op.results[0], *step.weights[op.id]):
            place = {key: d for d, key in enumerate(classes.of_value(graph, v))}
            used = {axis: place[key] for key, names in by_key.items() if key in place for axis in names}
            values[v] = tuple((axis, used.get(axis)) for axis, size in axes.items() if size > 1)
    return GivenLayout(
        values={graph: values},
        reads_otherwise=True,
        advice="Give another seed, or use al.planners.OnMesh, which chooses all splits by price.",
    )


def _axes_of(degrees: Sequence[int], axes: Mapping[str, int]) -> list[tuple[str, ...]]:
    """Return the axes that split each dim: the next ones of the mesh, as many as its degree takes."""
    found, rest = list[tuple[str, ...]](), list(axes.items())
    for degree in degrees:
        names, ways = list[str](), 1
        while ways < degree:
            name, size = rest.pop(0)
            names.append(name)
            ways *= size
        found.append(tuple(names))
    return found
