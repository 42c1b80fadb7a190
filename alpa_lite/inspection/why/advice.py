"""What may be done about what takes time, by its kind: sentences, from the plan's own numbers."""

from __future__ import annotations

from dataclasses import dataclass

from alpa_lite.inspection.text.axis_traffic import crosses_hosts
from alpa_lite.inspection.text.parameter_groups import arguments_of
from alpa_lite.inspection.text.tables import CollectiveGroup
from alpa_lite.inspection.why.op_costs import OPAQUE, PASSES
from alpa_lite.plan.plan import Plan
from alpa_lite.program.phases import StepGraph
from alpa_lite.schedule import simulate
from alpa_lite.text import show_bytes, show_percent

_LOW = 0.4
"""Below this part of the peak rate a product is said to be small."""

_MUCH_FASTER = 1.5
"""A type is recommended from this ratio of peak rates on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What the kernels of a line take per step, on an average device."""

    seconds: float
    flops: float
    bytes: float
    dtype: str
    phases: tuple[str, ...]
    primitives: tuple[str, ...]


def advice_on_compute(plan: Plan, step: StepGraph, what: str, spent: Spent) -> str:
    """For kernels of one line of a step."""
    if what == OPAQUE:
        listed = ", ".join(spent.primitives)
        return f"every device runs {listed} whole; a rule of yours splits it (al.register_rule)"
    return _on_passes(plan, step, spent) if what == PASSES else _on_products(plan, spent)


def _on_products(plan: Plan, spent: Spent) -> str:
    device = plan.cluster.device
    peak = device.peak(spent.dtype)
    reached = spent.flops / (spent.seconds * peak) if spent.seconds > 0 else 0.0
    gain = device.peak("bfloat16") / peak
    if spent.dtype == "float32" and gain >= _MUCH_FASTER:
        return f"in float32; {device.name} multiplies 16-bit floats up to {gain:.0f} times as fast (bfloat16, float16)"
    if reached < _LOW:
        return (
            f"at {show_percent(reached)} of the peak rate, since each device's part is small: {_fewer(plan)}"
            "a larger batch, or fewer devices"
        )
    return f"at {show_percent(reached)} of the peak rate: only fewer FLOPs or more devices make it shorter"


def _fewer(plan: Plan) -> str:
    return f"fewer micro-batches (now {plan.num_microbatches}), " if plan.num_microbatches > 1 else ""


def _on_passes(plan: Plan, step: StepGraph, spent: Spent) -> str:
    rate = spent.bytes / (spent.seconds * plan.cluster.device.memory_bandwidth) if spent.seconds > 0 else 0.0
    moved = f"{show_bytes(spent.bytes)} through memory at {show_percent(min(1.0, rate))} of its bandwidth"
    if spent.phases == ("update",):
        return f"{moved}: {_on_state(plan, step)}narrower types make it shorter"
    if rate < _LOW / 2:
        return f"{moved}, in many short kernels: {_fewer(plan)}a larger batch or fewer devices make them longer"
    return f"{moved}: narrower types, or fewer arrays written between kernels"


_COPIES = 1.1
"""Devices that hold this many times the bytes of the state between them are said to hold copies of it."""


def _on_state(plan: Plan, step: StepGraph) -> str:
    """Whether the devices of the stages hold copies of what the step updates; nothing where there is one device."""
    updated = {step.graph.values[v].name for v in step.aliases.values()}
    whole = held = 0
    for argument in arguments_of(plan).all:
        devices = plan.stages[argument.stage].submesh.num_devices
        if argument.name in updated and devices > 1 and argument.shape is not None and argument.block is not None:
            whole += argument.shape.bytes
            held += devices * argument.block.bytes
    if not whole:
        return ""
    if held > _COPIES * whole:
        return "devices update copies of the same state, which al.planners.Zero or FSDP splits over them; "
    return "its state lies split over all devices already; "


def advice_on_collective(plan: Plan, group: CollectiveGroup) -> str:
    """For collectives of one kind over one axis."""
    each = show_bytes(group.bytes / group.count)
    per_host = plan.cluster.devices_per_host
    far = any(crosses_hosts(plan.stages[number], group.axis, per_host) for number in group.stages)
    hosts = "; its devices span hosts" if far else ""
    if group.phase == "update":
        return f"{each} each{hosts}; {_ON_UPDATE.get(group.kind, _ELSE)}"
    where = group.source.split(" ")[0] or group.kind
    return f"{each} each{hosts}; {_IN_LOOP.get(group.kind, _ELSE)}; plan.explain({where!r}) shows what else it could be"


_ELSE = "fewer devices on this axis move less"
_ON_UPDATE = {
    "all_reduce": "gradients, once per step: a larger batch makes it weigh less, a narrower type halves it",
    "reduce_scatter": "gradients, once per step: a larger batch makes it weigh less, a narrower type halves it",
    "all_gather": "new state is brought together: it need not where each device updates all of it, if memory allows",
}
_IN_LOOP = {
    "all_reduce": "sums over devices that split a contraction: fewer of them leave larger parts",
    "all_gather": "an array that lies split is read whole: keep it whole, if memory allows",
    "reduce_scatter": "sums over devices that split a contraction, left split",
    "all_to_all": "an array changes the dim that is split: the ops on both sides want different dims",
    "permute": "blocks go to neighbours: windows that overlap, or a change of the order of devices",
}


def advice_on_transfers(plan: Plan) -> str:
    """For what stages send each other."""
    if plan.schedule.overlaps_transfers:
        return "they go on beside the work of their stages; cutting where less data flows shortens them"
    return "al.schedule.EagerOneFOneB sends them beside the work; cutting where less data flows shortens them"


def advice_on_waiting(plan: Plan) -> str:
    """For devices that wait."""
    if len(plan.stages) == 1:
        fewer = f"fewer micro-batches (now {plan.num_microbatches}) need fewer" if plan.num_microbatches > 1 else ""
        return fewer or "a larger batch makes it weigh less"
    count = plan.num_microbatches
    busy = [count * (s.forward_seconds + s.backward_seconds) + s.update_seconds for s in plan.stages]
    mean, longest = sum(busy) / len(busy), max(range(len(busy)), key=busy.__getitem__)
    now, then = bubble_at(plan, count), bubble_at(plan, 2 * count)
    if busy[longest] - mean > (now - then) * plan.prediction.step_seconds:
        more = show_percent(busy[longest] / mean - 1.0)
        return f"stage {longest} takes {more} longer than the mean: move layers away from it, or give it more devices"
    size = None if plan.request is None else plan.request.batch_size
    if size is not None and size % (2 * count):
        return f"a bubble of {show_percent(now)}; a larger batch, in more micro-batches, makes it smaller"
    return (
        f"a bubble of {show_percent(now)}; with {2 * count} micro-batches of half the size it would be "
        f"{show_percent(then)}, if they are as efficient"
    )


def bubble_at(plan: Plan, num_microbatches: int) -> float:
    """The bubble of the plan's schedule if the same work came in so many micro-batches."""
    part = plan.num_microbatches / num_microbatches
    timeline = simulate(
        plan.schedule.tasks(len(plan.stages), num_microbatches),
        [part * stage.forward_seconds for stage in plan.stages],
        [part * stage.backward_seconds for stage in plan.stages],
        weight_seconds=[part * stage.weight_seconds for stage in plan.stages],
    )
    return timeline.bubble_fraction
