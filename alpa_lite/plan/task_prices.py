"""Price tasks by running them on estimators.

seconds of a part         its ops and collectives, as they are emitted, and the additions to sums over
                          micro-batches                                                          `estimate`
seconds of a stage        those of its parts, less what runs during other parts where the backend
                          reduces gradients during the backward pass, and gathers new state during the forward
                          pass of the next step                                                  `part_seconds`
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

from alpa_lite.plan.estimator import Estimator
from alpa_lite.plan.parts import OpPlacement
from alpa_lite.plan.pricing import Pricer
from alpa_lite.plan.task_specs import TaskSpec, run_task
from alpa_lite.plan.walk import Machine, Walk
from alpa_lite.program.ir import Graph
from alpa_lite.program.phases import Phase, StepGraph
from alpa_lite.rules.dims import batch_dims_of
from alpa_lite.sharding.specs import Spec
from cost_models.overlap import exposed_seconds, without_first, without_last
from cost_models.work import Work


class PricingMachine(Machine[int], Protocol):
    """A machine that prices a part of a task: the estimator, or one that wraps it and records what it prices."""

    def add_to_sum(self, graph: Graph, value: int, stored: Spec, made: int) -> Work:
        """Price the addition of a micro-batch's part of a value, made by a stream task, to its sum; return its work."""
        ...


def estimate(
    task: TaskSpec,
    step: StepGraph,
    placements: Mapping[int, OpPlacement],
    pricer: Pricer,
    machine_of: Callable[[Estimator], PricingMachine] = lambda estimator: estimator,
) -> list[Estimator]:
    """Return an estimator for each part of a task, which has run it once.

    `machine_of`: the machine that runs a part, given its estimator.
    """
    parts: list[Estimator] = []
    machines: list[PricingMachine] = []

    def begin(phase: Phase) -> None:
        # What an earlier part made is an input here; its work is priced in that part.
        for by_spec in walk.arrays.values():
            by_spec.update(dict.fromkeys(by_spec, Estimator.NOTHING))
        runs = step.num_microbatches if phase.in_loop else step.num_updates
        batch_dims = partial(batch_dims_of, step)
        parts.append(Estimator(pricer, stage=task.stage, phase=phase.value, runs=runs, batch_dims=batch_dims))
        walk.machine = machine_of(parts[-1])
        machines.append(walk.machine)

    walk = Walk(step.graph, placements, pricer.sizes, Estimator(pricer, stage=task.stage, phase="", runs=1))
    # Inputs are in memory when a task starts: their work was priced where they were made.
    results = run_task(walk, task, [Estimator.NOTHING] * len(task.inputs), begin)
    if step.accumulates and machines:
        for port, made in zip(task.sums, results[len(task.outputs) :], strict=True):
            machines[-1].add_to_sum(step.graph, port.value, port.spec, made)
    return parts


def part_seconds(pricer: Pricer, parts: Sequence[Estimator]) -> list[float]:
    """Return the seconds of one run of each part, given all parts of a stage in order.

    Where the backend overlaps them, the reduction of gradients runs during the backward pass and the gathering of state
    during the forward pass of the next step; only the exposed rest counts.
    """
    seconds, model = [part.seconds for part in parts], pricer.cost_model
    # Devices that share a processor have no idle time in which a collective could hide.
    if not model.backend.overlap_gradients or model.cluster.shared_processor:
        return seconds
    numbers = {phase: [i for i, part in enumerate(parts) if part.phase == phase.value] for phase in Phase}
    tasks, moved = [part.tasks for part in parts], [0.0] * len(parts)
    postponed: list[tuple[int, Phase, float]] = []
    for phases, without, during in (
        (numbers[Phase.BACKWARD][-1:], without_last, Phase.BACKWARD),
        (numbers[Phase.UPDATE][:1], without_first, Phase.BACKWARD),
        (numbers[Phase.UPDATE][-1:], without_last, Phase.FORWARD),
    ):
        for i in phases:
            rest = without(tasks[i])
            tasks[i] = list(rest.tasks)
            postponed.append((i, during, rest.seconds))
            # Devices wait for the host where it issues kernels more slowly than they run.
            seconds[i] = max(parts[i].simulated(tasks[i]), parts[i].host_seconds)
    alone = {phase: sum(seconds[i] for i in numbers[phase]) for phase in Phase}
    for i, during, collectives in postponed:
        moved[i] += exposed_seconds(collectives, alone[during], contention=model.cluster.device.contention)
    return [a + b for a, b in zip(seconds, moved, strict=True)]
