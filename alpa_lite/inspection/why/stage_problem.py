"""The problem of one stage: solved under restrictions, and analysed under the plan's choices.

solution    some nodes of the problem may take some strategies only                          `StageProblem.solve`
choices     the strategies that correspond to the plan                                       `StageProblem.choices`
usages      the values alive at each time under the choices                                  `StageProblem.usages`
entries     the cost of each op as planned, from the estimator that also prices the tasks    `entries_of`

The problem is the search's on the stage's logical mesh; restrictions of a manual plan do not apply here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import numpy as np

from alpa_lite.inter_op.stage_costs import free_restriction
from alpa_lite.intra_op.formulate import Builder
from alpa_lite.intra_op.interning import SharedArrays
from alpa_lite.intra_op.problem import Problem, Ragged, Solution, Status
from alpa_lite.intra_op.solve import in_two_parts, price_choice, stage_tasks
from alpa_lite.intra_op.solvers.portfolio import Portfolio
from alpa_lite.intra_op.stage import Key, Offer, Placed, PlacedBodies, PlacedSum, StageSolution, StageView
from alpa_lite.intra_op.strategies import Restriction
from alpa_lite.intra_op.strategy_catalogue import Catalogue, SumOptions
from alpa_lite.intra_op.usages import StageLayout, UsageOf, usages_of
from alpa_lite.plan.estimator import Estimator
from alpa_lite.plan.parts import Choice
from alpa_lite.plan.plan import OpPlacement, StagePlan
from alpa_lite.plan.pricing import Pricer
from alpa_lite.plan.task_prices import estimate
from alpa_lite.plan.walk import Application, Walk
from alpa_lite.program.ir import Graph, Op, Value, Wiring
from alpa_lite.sharding.meshes import LogicalMesh, Submesh
from alpa_lite.sharding.specs import Move, Spec
from alpa_lite.text import short_source
from cost_models.work import Work

SOLVE_SECONDS = 10.0
"""The time limit for solving the rest of a stage again, in seconds."""

REPRICING_GAP = 5e-4
"""The relative gap of these solutions: smaller than for plans, since differences of solutions are reported."""

Given = Mapping[int, frozenset[int]]
"""The strategies that nodes may take, by node; nodes that are not in the mapping are free."""

Option = TypeVar("Option", Spec, OpPlacement)


@dataclass(frozen=True, kw_only=True, eq=False)
class StageProblem:
    """The problem of some layers on a logical mesh.

    in_flight      the number of micro-batches in flight
    limit_bytes    the memory limit per device
    placed         the plan's decisions for these layers on this mesh; None if it has none
    restriction    what each axis may be used for; None: as the search uses axes of these names, unless the plan uses
                   them otherwise
    """

    view: StageView
    submesh: Submesh
    mesh: LogicalMesh
    pricer: Pricer
    in_flight: int
    limit_bytes: float
    in_two: bool
    placed: StagePlan | None = None
    restriction: Restriction | None = None

    @cached_property
    def builder(self) -> Builder:
        """The builder of the problem: nodes, edges and usages, and their meaning."""
        usual = self.restriction or free_restriction(self.mesh)
        found = Builder(self.view, Catalogue(self.pricer, usual))
        # A manual plan may use an axis otherwise than the search would: then every use of it is allowed.
        if self.restriction is not None or self.placed is None or _expresses(found, self.placed):
            return found
        return Builder(self.view, Catalogue(self.pricer, replace(usual, roles={})))

    def problem(self, given: Given | None = None, *, limited: bool = True) -> Problem:
        """Return the problem with the restrictions; `limited` keeps the limit."""
        # None drops the rows of memory from the integer program altogether.
        limit = self.limit_bytes if limited else None
        problem = self.builder.problem(limit_bytes=limit, in_flight=self.in_flight)
        if not given:
            return problem
        costs, starts = problem.node_costs.values.copy(), problem.node_costs.starts
        for node, allowed in given.items():
            mine = costs[starts[node] : starts[node + 1]]
            # At an infinite cost, so that nodes and strategies keep their numbers.
            mine[[i for i in range(mine.size) if i not in allowed]] = np.inf
        return replace(problem, node_costs=Ragged(values=costs, starts=starts))

    def solve(
        self, given: Given | None = None, *, limited: bool = True, seconds: float = SOLVE_SECONDS
    ) -> StageSolution:
        """Return the best choices under the restrictions, priced as they run; the solver takes at most `seconds`."""
        # No search for the smallest peak where nothing fits: `shortage_of` explains what is missing.
        solver = Portfolio(relative_gap=REPRICING_GAP, peak_seconds=0.0)
        found = solver.solve(self.problem(given, limited=limited), time_limit_seconds=seconds)
        if found.choices is None:
            return StageSolution(
                choice=None,
                status=found.status,
                objective=float("inf"),
                bound=found.bound,
                peak_bytes=found.peak_bytes,
            )
        return self._priced(self.builder.choice(found.choices), found)

    @cached_property
    def as_planned(self) -> StageSolution:
        """The plan's decisions, priced as they run. The stage must have been `placed`."""
        stage = self.placed
        assert stage is not None
        # As the plan predicts it, so that a row of the chosen value has the plan's own memory.
        peak = stage.cost.bytes_in_flight(self.in_flight)
        priced = self._priced(
            stage.choice,
            Solution(
                choices=None,
                # Seconds are computed anew by `price_choice`; of this solution only the peak matters.
                cost=0.0,
                status=Status.FEASIBLE,
                bound=0.0,
                seconds=0.0,
                solver="",
                peak_bytes=peak,
            ),
        )
        return replace(priced, cost=replace(priced.cost, work=stage.cost.work))

    def _priced(self, choice: Choice, found: Solution) -> StageSolution:
        priced = price_choice(self.builder, choice, found, self.in_flight)
        return in_two_parts(priced, self.view, self.pricer) if self.in_two else priced

    def strategies_of_input(self, value: int) -> dict[Spec, Given]:
        """Return, for each spec that an input can have, the restriction that gives it; empty if the spec is fixed."""
        # Scope 0 is the stage itself; loops inside of it have scopes of their own.
        offer = self.builder.offers[(0, value)]
        return _grouped(offer.node, offer.specs)

    @property
    def rows(self) -> list[tuple[int, int]]:
        """Return number and graph input of each stacked argument of which the stage stores a row block."""
        step = self.view.step
        inputs = zip(step.input_parts, step.graph.inputs, strict=True)
        return [(part.leaf, v) for part, v in inputs if part.rows is not None and self.view.lives_here(v)]

    def with_forms(self, given: Given, forms: Mapping[int, Spec]) -> Given:
        """Add the specs of stacked arguments, by number, to a restriction, except for inputs that it covers already."""
        found = dict(given)
        for leaf, v in self.rows:
            if leaf in forms:
                for node, allowed in self.strategies_of_input(v).get(forms[leaf], {}).items():
                    # A value that is restricted already stays so where a stacked argument lies on the same node.
                    found.setdefault(node, allowed)
        return found

    def strategies_of_op(self, key: Key) -> dict[OpPlacement, Given]:
        """Return the restriction for each placement of an op; none for a loop or an addition of scalars."""
        placed = self.builder.placed.get(key)
        return _grouped(placed.node, placed.options) if isinstance(placed, Placed) else {}

    def op(self, key: Key) -> tuple[Graph, Op]:
        """Return an op of the stage and the graph that holds it."""
        graph = self.builder.scopes[key[0]].graph
        return graph, graph.ops[key[1]]

    @cached_property
    def choices(self) -> tuple[int, ...]:
        """The strategy of each node that agrees with the plan's decisions about the most bytes."""
        builder, stage = self.builder, self.placed
        assert stage is not None
        # Several decisions of a plan may lie on one node, whose strategies need not express all of them at once.
        votes = [np.zeros(costs.size) for costs in builder.costs]
        for v, spec in stage.inputs.items():
            if (0, v) in builder.offers:
                offer = builder.offers[(0, v)]
                _vote(votes, offer.node, offer.specs, spec, self._bytes(0, v))
        for v, (node, options) in builder.crossings.items():
            _vote(votes, node, options.accumulators, stage.accumulators.get(v), self._bytes(0, v))
        self._vote_ops(votes, 0, stage.ops)
        return tuple(int(each.argmax()) for each in votes)

    def _vote_ops(self, votes: Sequence[np.ndarray], scope: int, ops: Mapping[int, OpPlacement]) -> None:
        for number, placement in ops.items():
            placed = self.builder.placed.get((scope, number))
            results = self.builder.scopes[scope].graph.ops[number].results
            if isinstance(placed, Placed):
                _vote(votes, placed.node, placed.options, placement, self._bytes(scope, *results))
            # A loop has no node: what it reads and returns are nodes, and the ops in it are decided in its scope.
            elif isinstance(placed, PlacedBodies):
                operands = self.builder.scopes[scope].graph.ops[number].operands
                offers = (
                    *zip(operands, placed.operands, placement.body_operands, strict=True),
                    *zip(results, placed.results, placement.results, strict=True),
                )
                for v, offer, spec in offers:
                    _vote(votes, offer.node, offer.specs, spec, self._bytes(scope, v))
                for inner, body in zip(placed.scopes, placement.bodies, strict=True):
                    self._vote_ops(votes, inner, body)

    def _bytes(self, scope: int, *values: int) -> float:
        """Return the weight of a decision about values: even those without bytes count."""
        return 1.0 + sum(self.builder.scopes[scope].graph.values[v].bytes for v in values)

    @cached_property
    def usages(self) -> tuple[UsageOf, ...]:
        """The usages under the plan's choices, copies included wherever the plan makes them."""
        builder, choices = self.builder, self.choices

        def chosen(offer: Offer) -> Offer:
            # Cut down to the chosen strategy, usages follow by the code that also formulates the problem.
            return Offer(node=offer.node, specs=(offer.specs[choices[offer.node]],))

        placed = dict[Key, Placed | PlacedSum | PlacedBodies]()
        for key, op in builder.placed.items():
            if isinstance(op, Placed):
                placed[key] = Placed(node=op.node, options=(op.options[choices[op.node]],))
            elif isinstance(op, PlacedBodies):
                operands, results = tuple(map(chosen, op.operands)), tuple(map(chosen, op.results))
                placed[key] = PlacedBodies(scopes=op.scopes, operands=operands, results=results)
            else:
                placed[key] = op
        demanded = {
            key: options.only([choices[op.node]])
            for key, options in builder.demanded.items()
            if isinstance(op := builder.placed[key], Placed)
        }
        crossings = {v: (node, _only_sum(sums, choices[node])) for v, (node, sums) in builder.crossings.items()}
        layout = StageLayout(
            view=self.view,
            catalogue=builder.catalogue,
            scopes=builder.scopes,
            offers={key: chosen(offer) for key, offer in builder.offers.items()},
            placed=placed,
            demanded=demanded,
            crossings=crossings,
        )
        return usages_of(layout, SharedArrays(), in_flight=self.in_flight)

    def single_change_seconds(self, node: int) -> np.ndarray:
        """Return the cost of each strategy of a node, in seconds, with all other nodes as planned."""
        # Costs alone: what a memory limit forbids is found out when the change is solved.
        problem = self.problem(limited=False)
        costs = problem.node_costs[node].copy()
        for edge in problem.edges:
            # A row or a column of the edge's matrix, at the neighbour's choice.
            if edge.source == node:
                costs += edge.costs[:, self.choices[edge.target]]
            elif edge.target == node:
                costs += edge.costs[self.choices[edge.source], :]
        return costs


def _expresses(builder: Builder, stage: StagePlan) -> bool:
    """Return True if the problem can express all decisions of a plan on ops and inputs, except inside loops."""
    for number, placement in stage.ops.items():
        placed = builder.placed.get((0, number))
        if isinstance(placed, Placed) and placement not in placed.options:
            return False
    offers = ((builder.offers.get((0, v)), spec) for v, spec in stage.inputs.items())
    return all(offer is None or spec in offer.specs for offer, spec in offers)


def _only_sum(options: SumOptions, i: int) -> SumOptions:
    return SumOptions(
        accumulators=options.accumulators[i : i + 1],
        seconds=options.seconds[i : i + 1],
        stored=options.stored[i : i + 1],
        resolved=options.resolved[i : i + 1],
    )


def _grouped(node: int, options: Sequence[Option]) -> dict[Option, Given]:
    """Return the restriction for each option of a node; several strategies may share an option."""
    found: dict[Option, set[int]] = {}
    for number, option in enumerate(options):
        found.setdefault(option, set()).add(number)
    return {option: {node: frozenset(numbers)} for option, numbers in found.items()}


def _vote(votes: Sequence[np.ndarray], node: int, options: Sequence[object], wanted: object, weight: float) -> None:
    for number, option in enumerate(options):
        if option == wanted:
            votes[node][number] += weight


PRODUCTS, PASSES, OPAQUE = "matrix products", "passes over arrays", "ops without a sharding rule"
"""The kinds of kernels between which the advice distinguishes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The cost of one op per step and device, without collectives: seconds, FLOPs, and bytes moved after fusion."""

    source: str
    primitive: str
    what: str
    phase: str
    dtype: str
    seconds: float
    flops: float
    bytes: float


class Ledger:
    """An interpreter of the walk that prices ops as `Estimator` does and records each."""

    def __init__(self, estimator: Estimator, opaque: Collection[str], entries: list[Entry]) -> None:
        """Wrap an estimator; `opaque` are the primitives without a sharding rule, and `entries` are appended to."""
        self.estimator = estimator
        self.opaque = opaque
        self.entries = entries

    def literal(self, value: Value) -> int:
        """Price a scalar, which is free."""
        return self.estimator.literal(value)

    def reshard(self, array: int, value: Value, steps: tuple[Move, ...], op: Op | None) -> int:
        """Price a reshard as free: its collectives are listed by the plan."""
        return self.estimator.reshard(array, value, steps, op)

    def apply(self, application: Application, operands: list[int]) -> list[int]:
        """Price one op and record its entry."""
        estimator, op = self.estimator, application.op
        # The estimator only adds up, so the cost of an op is a difference.
        seconds, flops = estimator.compute_seconds, estimator.flops
        made = estimator.apply(application, operands)
        # Trips of the loops around the op, and runs of the task in a step.
        times = estimator.trips * estimator.runs
        work = estimator.pricer.op_work(application.graph, op, application.placement)
        self.entries.append(
            Entry(
                source=short_source(op.source),
                primitive=op.primitive,
                what=OPAQUE if op.primitive in self.opaque else PASSES if work.kind == "elementwise" else PRODUCTS,
                phase=estimator.phase,
                dtype=work.dtype,
                seconds=(estimator.compute_seconds - seconds) * estimator.runs,
                flops=(estimator.flops - flops) * estimator.runs,
                bytes=work.bytes * times,
            )
        )
        return made

    def add_to_sum(self, graph: Graph, value: int, stored: Spec, made: int) -> Work:
        """Price an addition to a sum over micro-batches and record its entry, on the line that made the part."""
        estimator, producer = self.estimator, graph.producer[value]
        seconds = estimator.compute_seconds
        work = estimator.add_to_sum(graph, value, stored, made)
        if work.bytes and producer is not None:
            self.entries.append(
                Entry(
                    source=short_source(graph.ops[producer].source),
                    primitive="add",
                    what=PASSES,
                    phase=estimator.phase,
                    dtype=work.dtype,
                    seconds=(estimator.compute_seconds - seconds) * estimator.runs,
                    flops=work.flops * estimator.runs,
                    bytes=work.bytes * estimator.runs,
                )
            )
        return work

    def control_flow(self, application: Application, operands: list[int], wiring: Wiring, walk: Walk[int]) -> list[int]:
        """Price a loop or branch; the walk runs the ops of the bodies on this interpreter, so they are recorded too."""
        return self.estimator.control_flow(application, operands, wiring, walk)


def entries_of(stage: StageProblem, opaque: Collection[str]) -> list[Entry]:
    """Return the entries of a stage's ops as they are planned, phase by phase."""
    choice, found = stage.as_planned.choice, list[Entry]()
    assert choice is not None

    for task in stage_tasks(stage.view, choice, in_two=stage.in_two):
        estimate(task, stage.view.step, choice.ops, stage.pricer, lambda estimator: Ledger(estimator, opaque, found))
    return found
