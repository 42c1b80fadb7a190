"""Solve one stage on one logical mesh: build its problem, solve it, and price the answer as its program runs."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from alpa_lite.intra_op.formulate import UNWEIGHTED, Builder, CollectiveWeights
from alpa_lite.intra_op.liveness import Life, lives_of
from alpa_lite.intra_op.problem import Solution, Status
from alpa_lite.intra_op.solvers.portfolio import Portfolio
from alpa_lite.intra_op.solvers.solver import Solver
from alpa_lite.intra_op.stage import StageSolution, StageView
from alpa_lite.intra_op.stage_ops import StageOps
from alpa_lite.intra_op.stored_values import KernelModel
from alpa_lite.intra_op.usages import stage_lives, work_bytes
from alpa_lite.plan.op_places import TaskLayout
from alpa_lite.plan.parts import NO_COST, Choice, TaskRole
from alpa_lite.plan.pricing import Pricer, local_bytes
from alpa_lite.plan.slices import SlicedStages, Slicer, home_spec, slicer_of
from alpa_lite.plan.task_prices import estimate, part_seconds
from alpa_lite.plan.task_specs import TaskSpec
from alpa_lite.program.memo import memoized
from alpa_lite.program.phases import Phase, parameters

RELATIVE_GAP = 5e-3
"""The relative gap that suffices for a stage: the cost model is less precise, and closing the rest takes longest."""


def solve_stage(
    builder: Builder,
    *,
    limit_bytes: float | None,
    in_flight: int = 1,
    solver: Solver | None = None,
    time_limit_seconds: float = 60.0,
    weights: CollectiveWeights = UNWEIGHTED,
) -> StageSolution:
    """Choose the sharding of every op of a builder's stage.

    `limit_bytes` is the memory per device (None for no limit), `in_flight` the number of micro-batches held at the
    peak, `solver` the portfolio if None, and `weights` are those of collectives between ops.
    """
    problem = builder.problem(limit_bytes=limit_bytes, in_flight=in_flight, weights=weights)
    solver = solver or Portfolio(relative_gap=RELATIVE_GAP)
    solution = solver.solve(problem, time_limit_seconds=time_limit_seconds)
    if solution.choices is None:
        return replace(does_not_fit(solution.peak_bytes), status=solution.status, bound=solution.bound)
    return price_choice(builder, builder.choice(solution.choices), solution, in_flight)


def does_not_fit(peak_bytes: float) -> StageSolution:
    """Return the answer for a stage that takes too much memory under all choices, at least `peak_bytes` per device."""
    return StageSolution(
        choice=None,
        status=Status.INFEASIBLE,
        objective=float("inf"),
        bound=float("inf"),
        peak_bytes=peak_bytes,
    )


def price_choice(builder: Builder, choice: Choice, solution: Solution, in_flight: int) -> StageSolution:
    """Price decisions by running the tasks of the stage of a builder on estimators.

    `solution` is the solution of the integer program that `choice` stands for, and `in_flight` the number of
    micro-batches held at the peak.
    """
    view, pricer = builder.view, builder.catalogue.pricer
    state, sums, activations = _memory(view, pricer, choice)
    # All that the integer program counts at its peak besides state, accumulators and saved values.
    temporary = max(0.0, solution.peak_bytes - state - sums - in_flight * activations)
    memory = replace(
        NO_COST,
        state_bytes=state,
        accumulator_bytes=sums,
        activation_bytes=activations,
        temporary_bytes=temporary,
    )
    if solution.choices is not None:
        usages = builder.usages(in_flight)
        work = work_bytes(view, stage_lives(view, builder.catalogue), usages, solution.choices)
        memory = replace(memory, work=work)
    priced = StageSolution(
        choice=choice,
        status=solution.status,
        objective=solution.cost,
        bound=solution.bound,
        peak_bytes=solution.peak_bytes,
        cost=memory,
    )
    return _with_seconds(view, pricer, priced, in_two=False)


def _with_seconds(view: StageView, pricer: Pricer, solution: StageSolution, *, in_two: bool) -> StageSolution:
    """Return the solution with the seconds, FLOPs and collectives of its tasks."""
    choice = solution.choice
    assert choice is not None
    tasks = stage_tasks(view, choice, in_two=in_two)
    run = [(task, part) for task in tasks for part in estimate(task, view.step, choice.ops, pricer)]
    seconds = part_seconds(pricer, [part for _, part in run])
    by_phase = dict.fromkeys(Phase, 0.0)
    for (_, part), each in zip(run, seconds, strict=True):
        by_phase[Phase(part.phase)] += each
    second = [
        (task, each) for (task, _), each in zip(run, seconds, strict=True) if task.kind is TaskRole.WEIGHT_GRADIENT
    ]
    values, always = view.graph.values, parameters(view.step)
    handed = [port for task, _ in second for port in task.inputs if port.value not in always]
    return replace(
        solution,
        cost=replace(
            solution.cost,
            forward_seconds=by_phase[Phase.FORWARD],
            backward_seconds=by_phase[Phase.BACKWARD],
            update_seconds=by_phase[Phase.UPDATE],
            weight_seconds=sum(each for _, each in second),
            handed_bytes=sum(local_bytes(values[port.value], port.spec, pricer.sizes) for port in handed),
        ),
        # An estimator prices one run of its part; forward and backward run once per micro-batch.
        compute_seconds=sum(part.compute_seconds * part.runs for _, part in run),
        flops=sum(part.flops * part.runs for _, part in run),
        collectives=tuple(use for _, part in run for use in part.collectives),
    )


def in_two_parts(solution: StageSolution, view: StageView, pricer: Pricer, *, in_two: bool = True) -> StageSolution:
    """Return the solution with the cost of a backward pass whose weight gradients are a task of their own, or not.

    That task follows in the bubbles; the first one computes what the previous stage waits for.
    """
    return _with_seconds(view, pricer, solution, in_two=in_two)


def stage_tasks(view: StageView, choice: Choice, *, in_two: bool = False) -> list[TaskSpec]:
    """Return the tasks of a stage; `in_two` says whether its backward pass is two tasks."""
    slicer, own = _slicer(view.part, in_two=in_two), view.part.own
    sliced = SlicedStages(slicer=slicer, stages={own: choice})
    return [sliced.task(outline) for outline in slicer.outlines(own)]


@memoized
def _slicer(part: StageOps, *, in_two: bool) -> Slicer:
    """Return the slicer of a stage between a stage of all layers before and one of all layers after it."""
    layout = TaskLayout(
        stage_of_op=part.stage_of_op,
        stage_of_input=dict(zip(part.graph.inputs, part.stage_of_input, strict=True)),
        whole=part.is_whole and part.step.num_microbatches == 1,
        # Nearly all schedules run the backward pass of the last stage directly after its forward pass.
        fused=frozenset([part.own] if part.is_last else []),
        in_two=frozenset([part.own] if in_two else []),
    )
    return slicer_of(part.step, layout) if part.is_whole else Slicer(layout, part.step, part.ops)


def _memory(view: StageView, pricer: Pricer, choice: Choice) -> tuple[float, float, float]:
    """Return the bytes per device of state, accumulators, and the saved values of one micro-batch."""
    graph, step, sizes = view.graph, view.step, pricer.sizes
    state = sum(
        local_bytes(graph.values[v], s, sizes)
        for v, s in choice.inputs.items()
        if graph.producer[v] is None and step.batch_dims[v] is None
    )
    sums = 0.0
    # With one micro-batch nothing is accumulated: gradients are temporaries.
    if step.accumulates:
        sums = sum(local_bytes(graph.values[v], a.stored, sizes) for v, a in choice.accumulators.items())
    lives = lives_of(view, KernelModel.of(pricer.cost_model, prod(pricer.sizes.values())))
    saved = [life for life in lives.lives if life.saved and (life.path or life.value not in choice.accumulators)]
    activations = sum(_local_bytes(view, pricer, choice, life) for life in saved)
    return state, sums, activations


def _local_bytes(view: StageView, pricer: Pricer, choice: Choice, life: Life) -> float:
    """Return the bytes per device of a value as it leaves its op."""
    graph, placements = view.graph, choice.ops
    for op_id, number in life.path:
        graph, placements = graph.ops[op_id].bodies[number], placements[op_id].bodies[number]
    given = None if life.path else choice.inputs.get(life.value)
    return local_bytes(graph.values[life.value], given or home_spec(graph, placements, life.value), pricer.sizes)
