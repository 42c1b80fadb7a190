"""Solve one stage on one logical mesh: build the problem, solve it, and price the answer as the program that it
emits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from alpa_lite.intra_op.formulate import Builder
from alpa_lite.intra_op.liveness import lives_of
from alpa_lite.intra_op.problem import Solution, Status
from alpa_lite.intra_op.solvers.portfolio import Portfolio
from alpa_lite.intra_op.solvers.solver import Solver
from alpa_lite.intra_op.stage import Choice, StageView
from alpa_lite.plan.parts import NO_COST, CollectiveUse, StageCost
from alpa_lite.plan.pricing import Estimator, Pricer, local_bytes
from alpa_lite.plan.walk import Machine, Walk
from alpa_lite.program.phases import Phase, parameters, weight_gradient_ops
from alpa_lite.sharding.specs import Spec, replicated
from cost_models.overlap import exposed_seconds, without_first, without_last

RELATIVE_GAP = 5e-3
"""The relative gap that suffices for a stage: the cost model is less precise, and closing the rest takes longest."""


@dataclass(frozen=True, kw_only=True)
class StageSolution:
    """The decisions for one stage and their cost.

    `choice` is None when nothing fits; `peak_bytes` then is the least peak that the solver reached. `compute_seconds`
    and `flops` are those of a whole step on one device; `collectives` are all of a step.
    """

    choice: Choice | None
    status: Status
    objective: float
    bound: float
    peak_bytes: float
    cost: StageCost = NO_COST
    compute_seconds: float = 0.0
    flops: float = 0.0
    collectives: tuple[CollectiveUse, ...] = ()

    @property
    def gap(self) -> float:
        """The relative gap (objective - bound) / objective, in [0, 1]; 1 where no bound is proven."""
        if self.choice is None or self.objective <= 0.0:
            return 0.0
        return min(1.0, max(0.0, (self.objective - self.bound) / self.objective))


def solve_stage(
    builder: Builder,
    *,
    limit_bytes: float | None,
    in_flight: int = 1,
    solver: Solver | None = None,
    time_limit_seconds: float = 60.0,
) -> StageSolution:
    """Choose the sharding of every op of a builder's stage.

    `limit_bytes` is the memory per device (None for no limit), `in_flight` the number of micro-batches held at the
    peak, and `solver` the portfolio if None.
    """
    problem = builder.problem(limit_bytes=limit_bytes, in_flight=in_flight)
    solution = (solver or Portfolio(relative_gap=RELATIVE_GAP)).solve(problem, time_limit_seconds=time_limit_seconds)
    if solution.choices is None:
        return StageSolution(
            choice=None,
            status=solution.status,
            objective=float("inf"),
            bound=solution.bound,
            peak_bytes=solution.peak_bytes,
        )
    choice = builder.choice(solution.choices)
    view, pricer = builder.view, builder.catalogue.pricer
    return price_choice(view, pricer, choice, solution, in_flight)


def price_choice(view: StageView, pricer: Pricer, choice: Choice, solution: Solution, in_flight: int) -> StageSolution:
    """Price decisions by emitting the tasks of each phase to an `Estimator`.

    `solution` is the solution of the integer program that `choice` stands for, and `in_flight` the number of
    micro-batches held at the peak.
    """
    state, sums, activations = _memory(view, pricer, choice)
    parts = {phase: _walk(view, pricer, choice, phase) for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE)}
    seconds = _phase_seconds(pricer, parts)
    runs = view.step.num_microbatches
    # All that the integer program counts at its peak besides state, accumulators and saved values.
    temporary = max(0.0, solution.peak_bytes - state - sums - in_flight * activations)
    return StageSolution(
        choice=choice,
        status=solution.status,
        objective=solution.cost,
        bound=solution.bound,
        peak_bytes=solution.peak_bytes,
        cost=StageCost(
            forward_seconds=seconds[Phase.FORWARD],
            backward_seconds=seconds[Phase.BACKWARD],
            update_seconds=seconds[Phase.UPDATE],
            state_bytes=state,
            accumulator_bytes=sums,
            activation_bytes=activations,
            temporary_bytes=temporary,
        ),
        # An estimator prices one run of its task; forward and backward run once per micro-batch.
        compute_seconds=sum(p.compute_seconds * (1 if ph is Phase.UPDATE else runs) for ph, p in parts.items()),
        flops=sum(p.flops * (1 if ph is Phase.UPDATE else runs) for ph, p in parts.items()),
        collectives=tuple(use for p in parts.values() for use in p.collectives),
    )


def _phase_seconds(pricer: Pricer, parts: Mapping[Phase, Estimator]) -> dict[Phase, float]:
    """Return the seconds of each phase.

    Where the backend overlaps them, the reduction of gradients runs during the backward pass and the gathering of state
    during the forward pass of the next step; only the exposed rest counts.
    """
    seconds = {phase: part.seconds for phase, part in parts.items()}
    model = pricer.cost_model
    # Devices that share a processor have no idle time in which a collective could hide.
    if not model.backend.overlap_gradients or model.cluster.shared_processor:
        return seconds
    backward, update = parts[Phase.BACKWARD], parts[Phase.UPDATE]
    reduced = without_last(backward.tasks)
    resolved = without_first(update.tasks)
    gathered = without_last(resolved.tasks)
    contention = model.cluster.device.contention
    forward_alone = seconds[Phase.FORWARD]
    # Devices wait for the host where it issues kernels more slowly than they run.
    backward_alone = max(backward.simulated(reduced.tasks), backward.host_seconds)
    return {
        Phase.FORWARD: forward_alone,
        Phase.BACKWARD: backward_alone + exposed_seconds(reduced.seconds, backward_alone, contention=contention),
        Phase.UPDATE: max(update.simulated(gathered.tasks), update.host_seconds)
        + exposed_seconds(resolved.seconds, backward_alone, contention=contention)
        + exposed_seconds(gathered.seconds, forward_alone, contention=contention),
    }


def in_two_parts(view: StageView, pricer: Pricer, solution: StageSolution) -> StageSolution:
    """Return the solution with the cost of a backward pass whose weight gradients are a second task.

    The second task reads values that the first part made, and values that the forward pass saved.
    """
    choice = solution.choice
    if choice is None:
        return solution
    # The first part must compute what the previous stage waits for; all else can follow later, in the bubbles.
    second = weight_gradient_ops(view.step, view.ops)
    backend = pricer.cost_model.backend
    lives = lives_of(view, fusion=backend.fusion, fused_attention=backend.fused_attention)
    handed = _read_by(view, second, frozenset(life.value for life in lives.lives if not life.path))
    graph = view.graph
    cost = replace(
        solution.cost,
        # Priced alone, the second part fetches its operands anew, and could exceed the whole pass.
        weight_seconds=min(solution.cost.backward_seconds, _walk(view, pricer, choice, Phase.BACKWARD, second).seconds),
        handed_bytes=sum(local_bytes(graph.values[v], _spec_of(view, choice, v), pricer.sizes) for v in handed),
    )
    return replace(solution, cost=cost)


def _read_by(view: StageView, second: frozenset[int], in_memory: frozenset[int]) -> frozenset[int]:
    """Return the values that the second part of a backward pass reads from memory, directly or to recompute others."""
    graph, found, seen = view.graph, set[int](), set[int]()
    queue = [v for o in second for v in graph.ops[o].operands]
    while queue:
        v = queue.pop()
        producer = graph.producer[v]
        if v in seen or v in view.free or (producer is not None and producer in second):
            continue
        seen.add(v)
        if v in in_memory:
            found.add(v)
        # It is recomputed in the second part, which therefore reads the operands of its producer.
        elif producer is not None and view.step.phases[producer].in_loop:
            queue += graph.ops[producer].operands
    return frozenset(found)


def _walk(
    view: StageView, pricer: Pricer, choice: Choice, phase: Phase, part: frozenset[int] | None = None
) -> Estimator:
    """Price the ops of one phase, or a part of them, as a task of its own."""
    runs = view.step.num_microbatches if phase.in_loop else 1
    estimator = Estimator(pricer, stage=0, phase=phase.value, runs=runs)
    drive(ChosenStage(view=view, pricer=pricer, choice=choice), phase, estimator, part)
    return estimator


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenStage:
    """A stage with the choice that was made for it and the pricer of its mesh."""

    view: StageView
    pricer: Pricer
    choice: Choice


def drive(stage: ChosenStage, phase: Phase, machine: Machine[int], part: frozenset[int] | None = None) -> None:
    """Run the ops of one phase, or a part of them, as one task on a machine such as `Estimator`."""
    view, choice, phases = stage.view, stage.choice, stage.view.step.phases
    walk = Walk(view.graph, choice.ops, stage.pricer.sizes, machine)
    mine = [o for o in view.ops if phases[o] is phase and (part is None or o in part)]
    # Every task recomputes what depends on no micro-batch, instead of receiving it from another task.
    repeated = _invariant_needs(view, mine)
    run = repeated.union(mine)
    _enter(walk, view, choice, phase, run)
    if view.keeps_gathered and phase is Phase.BACKWARD:
        _keep_gathered(walk, view, stage.pricer, choice)
    walk.run(o for o in view.ops if o in run)
    _leave(walk, view, choice, phase, run)


def _keep_gathered(walk: Walk[int], view: StageView, pricer: Pricer, choice: Choice) -> None:
    """Add the specs in which the forward pass has gathered parameters to the arrays of a backward task."""
    # Only the specs are of interest here: the estimator of this walk is discarded.
    forward = Walk(view.graph, choice.ops, pricer.sizes, Estimator(pricer, stage=0, phase="forward", runs=1))
    run = _invariant_needs(view, mine := [o for o in view.ops if view.step.phases[o] is Phase.FORWARD]).union(mine)
    _enter(forward, view, choice, Phase.FORWARD, run)
    forward.run(o for o in view.ops if o in run)
    for v in forward.arrays.keys() & parameters(view.step):
        for spec in forward.arrays[v]:
            walk.put(v, spec, Estimator.NOTHING)


def _enter(walk: Walk[int], view: StageView, choice: Choice, phase: Phase, run: frozenset[int]) -> None:
    """Add the arrays that come into a task: inputs, and values of other tasks in the specs in which these left them."""
    graph, phases, free = view.graph, view.step.phases, view.free
    for v, spec in choice.inputs.items():
        walk.put(v, spec, Estimator.NOTHING)
    for op_id in view.ops:
        if phases[op_id] is Phase.INVARIANT or op_id in run:
            continue
        placement = choice.ops.get(op_id)
        for i, r in enumerate(graph.ops[op_id].results):
            if r not in free:
                walk.put(r, placement.results[i] if placement else replicated(graph.values[r].rank), Estimator.NOTHING)
    if phase is Phase.UPDATE:
        for v, accumulator in choice.accumulators.items():
            # The accumulator is the only copy of the sum when the update begins.
            walk.arrays[v] = {accumulator.stored: Estimator.NOTHING}
            _resolve(walk, v, accumulator.resolved)


def _leave(walk: Walk[int], view: StageView, choice: Choice, phase: Phase, run: frozenset[int]) -> None:
    """Reshard the values that leave a task: accumulated sums to their stored specs, state to the specs of its
    inputs.
    """
    graph = view.graph
    for v, spec in view.outputs.items():
        made = graph.producer[v] in run
        # A sum is returned by the update, any other value by the task that makes it.
        if (phase is Phase.UPDATE) if v in choice.accumulators else made:
            walk.get(v, spec)
    if phase.in_loop:
        for v, accumulator in choice.accumulators.items():
            producer = graph.producer[v]
            if producer in run:
                walk.get(v, accumulator.stored)
        return
    # New state gets the spec of the state that it replaces, with which the next step begins.
    for out, target in view.step.aliases.items():
        if out in walk.arrays and target in choice.inputs and out not in view.outputs:
            walk.get(out, choice.inputs[target])


def _resolve(walk: Walk[int], v: int, spec: Spec) -> None:
    """Reshard a sum to the spec in which the update reads it, and drop its other copies."""
    walk.arrays[v] = {spec: walk.get(v, spec)}


def _invariant_needs(view: StageView, ops: Iterable[int]) -> frozenset[int]:
    """Return the invariant ops that a task with these ops must repeat."""
    graph, phases, free, needed = view.graph, view.step.phases, view.free, set[int]()
    for op_id in ops:
        needed.update(graph.ops[op_id].operands)
    found: set[int] = set()
    # Backwards, since repeated ops may read the results of other repeated ops.
    for op_id in reversed(view.ops):
        op = graph.ops[op_id]
        if needed.isdisjoint(op.results):
            continue
        if phases[op_id] is Phase.INVARIANT:
            found.add(op_id)
            needed.update(op.operands)
        # The walk makes free values by itself, from operands that the task must have.
        elif not free.isdisjoint(op.results):
            needed.update(op.operands)
    return frozenset(found)


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
    if step.num_microbatches > 1:
        sums = sum(local_bytes(graph.values[v], a.stored, sizes) for v, a in choice.accumulators.items())
    backend = pricer.cost_model.backend
    lives = lives_of(view, fusion=backend.fusion, fused_attention=backend.fused_attention)
    saved = [life.value for life in lives.lives if life.saved and life.value not in choice.accumulators]
    activations = sum(local_bytes(graph.values[v], _spec_of(view, choice, v), sizes) for v in saved)
    return state, sums, activations


def _spec_of(view: StageView, choice: Choice, v: int) -> Spec:
    """Return the spec of a value that a stage makes or reads."""
    if v in choice.inputs:
        return choice.inputs[v]
    producer = view.graph.producer[v]
    placement = choice.ops.get(producer) if producer is not None else None
    if producer is None or placement is None:
        return replicated(view.graph.values[v].rank)
    return placement.results[view.graph.ops[producer].results.index(v)]
