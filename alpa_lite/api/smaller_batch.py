"""Run a step on fewer samples by the plan that it has for a full batch, as for the last batch of an epoch.

    the step    traced at its own number of samples n, and cut into m micro-batches of n/m samples, which `step.split`
                proves to give the results of n samples
    the plan    that of the full batch, whose micro-batches have b samples: m is the least divisor of n for which
                n/m <= b and every placement of the plan is possible (`lower.plan_fits.check_fits`)

A plan says where ops run and not what they compute, so that any plan which fits gives the results of the step. The last
batch is thus never padded: a padded sample contributes zero to sums alone, and a mean would count it. No activations
need more memory than those of the full batch, and the state stays on its devices, those of all stages of a pipeline.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

from alpa_lite.errors import AlpaLiteError, MismatchError
from alpa_lite.inspection.why.repricing import Repricing
from alpa_lite.inter_op.assembly import StagedStep, assemble
from alpa_lite.inter_op.plan_request import PlanRequest
from alpa_lite.lower.plan_fits import as_planned, check_fits
from alpa_lite.plan.plan import Plan
from alpa_lite.program.phases import StepGraph, check_same_structure
from alpa_lite.step.layers import Layers
from alpa_lite.step.split import TracedStep


def smaller_microbatches(batch_size: int, largest_microbatch: float) -> Iterator[int]:
    """Yield the numbers of micro-batches that divide a batch into parts of no more than so many samples, ascending."""
    return (m for m in range(1, batch_size + 1) if batch_size % m == 0 and batch_size / m <= largest_microbatch)


def plan_for_smaller_batch(plan: Plan, request: PlanRequest, step_at: Callable[[int], TracedStep]) -> Plan | None:
    """Return the plan of a full batch for the same step on fewer samples; None if it fits no number of micro-batches.

    `step_at` gives the step on fewer samples in a number of micro-batches.
    """
    if request.batch_size is None or plan.batch is None:
        return None
    for count in smaller_microbatches(request.batch_size, plan.batch.size / plan.num_microbatches):
        # Too few samples for some axis, or no proof for so many micro-batches: more of them may do.
        with suppress(AlpaLiteError):
            return _with_microbatches(plan, request, step_at(count))
    return None


def _with_microbatches(full: Plan, request: PlanRequest, traced: TracedStep) -> Plan:
    """Return the plan of a full batch for the same step on fewer samples, in micro-batches.

    Raises `MismatchError` or `TraceError` if it is another step, or one to which the plan cannot be applied.
    """
    started, plan = time.perf_counter(), replace(full, num_microbatches=traced.step.num_microbatches)
    request = request.under(plan.schedule, len(plan.stages))
    planned_for: StepGraph = full.request.step_of(full)
    # The plan names ops by number, but some steps look at their batch.
    check_same_structure(planned_for.graph, traced.step.graph)
    if traced.step.phases != planned_for.phases:
        raise MismatchError(f"{plan.function!r} has other phases on fewer samples. Make a new plan for it.")
    step = as_planned(traced, plan).step
    check_fits(plan, step)
    layers = Layers(num_layers=plan.num_layers, of_op=plan.op_layers, of_input=plan.input_layers)
    placed = Repricing(plan=plan, request=request, step=step, layers=layers).placed
    staged = StagedStep(step=step, layers=layers, stages=placed, schedule=plan.schedule)
    made = assemble(plan.name, request, staged, started)
    return replace(
        made,
        remat=plan.remat,
        traced_layers=plan.traced_layers,
        host_optimizer=plan.host_optimizer,
        buckets=plan.buckets,
        first_device=plan.first_device,
        idle_devices=plan.idle_devices,
    )
