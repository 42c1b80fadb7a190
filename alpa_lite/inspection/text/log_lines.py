"""What is logged about a new plan: one line, and warnings about what its user may want to change.

idle         devices that the plan does not use
replicated   arrays that every device of a stage holds whole, where together they take much of its memory
tight        memory that is used to more than `TIGHT`, where a small error of the prediction means that it runs out
setting      memory that the backend gives to a program only with a setting
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from alpa_lite.inspection.text.groups import arguments_of
from alpa_lite.inspection.text.tables import needed_setting, used_devices
from alpa_lite.plan.plan import Plan
from alpa_lite.text import show_bytes, show_count, show_first, show_percent, show_seconds

TIGHT = 0.95
"""The fraction of a device's memory above which a plan is warned about."""

LARGE = 0.1
"""The fraction of a device's memory above which arrays that are held whole are warned about."""

_NAMED = 3


def plan_line(plan: Plan) -> str:
    """Return a plan in one line: stages, micro-batches, predicted time, memory and gap."""
    fullest = plan.fullest_stage
    return (
        f"{plan.name}: {show_count(len(plan.stages), 'stage')} on {used_devices(plan)}, "
        f"{show_count(plan.num_microbatches, 'micro-batch')}, "
        f"{f'{plan.semantics}, ' if plan.num_updates > 1 else ''}"
        f"predicted step {show_seconds(plan.prediction.step_seconds)}, "
        f"memory {show_bytes(plan.prediction.peak_bytes[fullest])} of {show_bytes(plan.capacity_bytes(fullest))}, "
        f"gap {show_percent(plan.solver.gap)}"
    )


def plan_warnings(plan: Plan) -> str:
    """Return a line for each thing about a plan that its user may want to change; "" if there is none."""
    return "\n".join(_warnings(plan))


def _warnings(plan: Plan) -> Iterator[str]:
    """Yield a sentence for each thing about a plan that its user may want to change."""
    if plan.idle_devices:
        yield (
            f"{plan.idle_devices} of {plan.cluster.num_devices + plan.idle_devices} devices stay idle, since the step "
            "is predicted to take no longer without them. Auto(idle_devices=False) uses all."
        )
    for found in _replicated(plan):
        arrays = show_count(len(found.names), "array")
        yield (
            f"Each of the {found.num_devices} devices of stage {found.stage} holds {arrays} whole, "
            f"{show_bytes(found.num_bytes)} in all: {show_first(found.names, _NAMED)}. Auto and FSDP split what the "
            "devices divide; plan.explain(name) says why an array is held as it is."
        )
    fullest = plan.fullest_stage
    # A plan within a reserve is safe however full that is: the allocator has what is kept for it.
    peak, capacity = plan.prediction.peak_bytes[fullest], plan.capacity_bytes(fullest) + plan.reserved_bytes(fullest)
    if peak > TIGHT * capacity:
        yield (
            f"Stage {fullest} is predicted to use {show_percent(peak / capacity)} of its devices' memory "
            f"({show_bytes(peak)} of {show_bytes(capacity)}), and may run out of it. "
            "Auto(max_memory_bytes=…) plans for less."
        )
    yield from (f"{sentence[0].upper()}{sentence[1:]}" for sentence in needed_setting(plan))


@dataclass(frozen=True, kw_only=True)
class Whole:
    """The arrays that every device of a stage holds whole, largest first."""

    stage: int
    num_devices: int
    names: tuple[str, ...]
    num_bytes: float


def _replicated(plan: Plan) -> Iterator[Whole]:
    """Yield the arrays of each stage of several devices that are held whole, if they take much memory."""
    arguments = arguments_of(plan).all
    for number, stage in enumerate(plan.stages):
        count = stage.submesh.num_devices
        whole = [a for a in arguments if a.stage == number and a.num_shards == 1 and a.shape is not None]
        largest_first = sorted(whole, key=lambda a: -a.shape.bytes if a.shape is not None else 0)
        total = float(sum(a.shape.bytes for a in whole if a.shape is not None))
        if count > 1 and total > LARGE * plan.capacity_bytes(number):
            yield Whole(stage=number, num_devices=count, names=tuple(a.name for a in largest_first), num_bytes=total)
