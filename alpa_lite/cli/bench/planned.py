"""The plans of all contenders with their prices; a planner without a plan has a row with the reason."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import alpa_lite as al
from alpa_lite.api.stages import LoweredFunction, PlannedFunction, TracedFunction
from alpa_lite.cli.bench.contenders import Contender
from alpa_lite.cli.bench.row import Row
from alpa_lite.cli.bench.targets import BenchTarget
from alpa_lite.errors import AlpaLiteError, InfeasibleError
from alpa_lite.inter_op.microbatch_counts import microbatch_numbers
from alpa_lite.planners.planner import Planner
from alpa_lite.runtime.simulate import SimulatedStep
from cost_models.cluster import Cluster

Say = Callable[[str], None]

Count = int | str
"""A number of micro-batches; "auto" means that a search chooses, and that a manual plan gets its best number."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedEntry:
    """A row and its lowered plan; None if there is no plan."""

    row: Row
    lowered: LoweredFunction | None = None

    @property
    def plan(self) -> al.Plan | None:
        """The plan; None if there is none."""
        return None if self.lowered is None else self.lowered.planned.last_plan


def traced_target(target: BenchTarget) -> TracedFunction:
    """Trace the step; its state arguments are donated."""
    found = al.parallelize(target.step, cache=False).trace(*target.arguments, **target.keywords)
    replaced = set(found.traced.aliases.values())
    donated = tuple(leaf in replaced for leaf in range(len(found.traced.leaves)))
    return replace(found, traced=replace(found.traced, donated=donated))


def planned_entries(
    target: BenchTarget,
    traced: TracedFunction,
    cluster: Cluster,
    contenders: Sequence[Contender],
    counts: Sequence[Count],
    say: Say,
) -> Iterator[PlannedEntry]:
    """Yield one entry per contender and number of micro-batches."""
    for contender in contenders:
        for count in counts:
            at = "" if count == "auto" else f", {count} micro-batch{'' if count == 1 else 'es'}"
            name = contender.name + at
            say(f"{target.name}: {name}")
            row = Row(
                model=target.name,
                cluster=cluster.name,
                num_devices=cluster.num_devices,
                planner=name,
                searched=contender.searches,
                auto=contender.is_auto,
                batch_size=traced.traced.batch_size,
                reason=contender.problem,
            )
            planner = contender.planner
            yield PlannedEntry(row=row) if planner is None else _planned(row, target, traced, cluster, planner, count)


def _planned(
    row: Row, target: BenchTarget, traced: TracedFunction, cluster: Cluster, planner: Planner, count: Count
) -> PlannedEntry:
    began = time.perf_counter()
    try:
        plan = _plan_of(row, traced, cluster, planner, count)
        row = priced(row, plan, time.perf_counter() - began, target)
        lowered = PlannedFunction(function=traced, last_plan=plan).lower()
    except AlpaLiteError as error:
        return PlannedEntry(row=replace(row, reason=str(error), planning_seconds=time.perf_counter() - began))
    return PlannedEntry(row=simulated(row, plan, lowered.simulate()), lowered=lowered)


def _plan_of(row: Row, traced: TracedFunction, cluster: Cluster, planner: Planner, count: Count) -> al.Plan:
    if row.searched:  # the public way, on which a search may also run plans (`Auto(measure_top=k)`)
        return traced.plan(cluster=cluster, planner=planner, num_microbatches=count, cache=False).last_plan
    return best_of_counts(traced, cluster, planner) if count == "auto" else plan_at(traced, cluster, planner, count)


def plan_at(traced: TracedFunction, cluster: Cluster, planner: Planner, count: Count) -> al.Plan:
    """Return the plan of a planner at a number of micro-batches. Raises `AlpaLiteError`."""
    return planner.plan(traced.request(cluster, count))


def best_of_counts(traced: TracedFunction, cluster: Cluster, planner: Planner) -> al.Plan:
    """Return a manual plan at its best number of micro-batches, which its author would choose.

    Numbers grow from the planner's own one while the plan does not fit or improves, and shrink while it improves.
    Raises the `AlpaLiteError` of the planner's own number if none works.
    """
    best, problem = None, None
    try:
        best = plan_at(traced, cluster, planner, "auto")
    except InfeasibleError as error:
        problem = error
    start = 1 if best is None else best.num_microbatches
    counts = microbatch_numbers(traced.traced.batch_size or 1)
    for some in ([c for c in counts if c > start], [c for c in reversed(counts) if c < start]):
        for count in some:
            try:
                other = plan_at(traced, cluster, planner, count)
            except InfeasibleError:
                if best is not None:
                    break
            except AlpaLiteError:  # the batch cannot be divided so, or the step is no sum over its samples
                break
            else:
                if best is not None and other.prediction.step_seconds >= best.prediction.step_seconds:
                    break
                best = other
    if best is None:
        raise problem or InfeasibleError(f"{planner.name} has no plan.")
    return best


def priced(row: Row, plan: al.Plan, planning_seconds: float, target: BenchTarget) -> Row:
    """Return the row with the figures of the plan."""
    seconds, tflops = plan.prediction.step_seconds, target.tflops_per_device
    return replace(
        row,
        plan=described(plan),
        num_microbatches=plan.num_microbatches,
        num_stages=len(plan.stages),
        planning_seconds=planning_seconds,
        solver_status=plan.solver.status,
        solver_gap=plan.solver.gap,
        predicted_step_seconds=seconds,
        predicted_peak_bytes=max(plan.prediction.peak_bytes),
        predicted_tflops_per_device=None if tflops is None else tflops(seconds),
    )


def simulated(row: Row, plan: al.Plan, step: SimulatedStep) -> Row:
    """Return the row with the use of devices in a simulated step of the program."""
    devices = [plan.stages[use.stages[0]].submesh.num_devices for use in step.submeshes]
    uses = list(zip(step.submeshes, devices, strict=True))
    return replace(
        row,
        simulated_step_seconds=step.step_seconds,
        communication_seconds=sum(use.exposed_seconds * n for use, n in uses) / sum(devices),
        idle_seconds=sum(use.bubble_seconds * n for use, n in uses) / sum(devices),
    )


def same_plan(one: al.Plan, other: al.Plan) -> bool:
    """Whether two plans run the same program; names, prices and solver data may differ."""
    apart = {"name": "", "alternatives": (), "solver": one.solver, "prediction": one.prediction}
    return replace(one, **apart) == replace(other, **apart)


def described(plan: al.Plan) -> str:
    """Describe the stages of a plan by logical mesh, such as "2 stages (2,1), 1 stage (4,1)"."""
    meshes = ["(" + ",".join(map(str, stage.mesh_shape.shape)) + ")" for stage in plan.stages]
    runs = [(mesh, len(list(members))) for mesh, members in groupby(meshes)]
    return ", ".join(f"{count} stage{'s' if count > 1 else ''} {mesh}" for mesh, count in runs)
