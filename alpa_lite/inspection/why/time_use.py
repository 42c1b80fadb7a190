"""The time of a step by cause: source line, collective and wait, each with a suggestion from the plan's own numbers.

Seconds are per step of an average device: a stage counts by its share of the devices. Compute and collectives of a
device may overlap, so the rows can add up to more than the step; the second line of the text has the exposed
communication.

compute      kernels of a source line, from the walk that also prices the plan                 (`_compute`)
collective   of one kind over one axis on one source line                                      (`_collectives`)
transfer     between stages                                                                    (`_waiting_items`)
waiting      the step minus the time a device works: bubble, other stages' updates, hosts      (`_waiting_items`)

Without the step (`Plan.request`) compute is available by stage and phase only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum

from alpa_lite.inspection.text.groups import CollectiveGroup, arguments_of, crosses_hosts, group_collectives
from alpa_lite.inspection.text.tables import Table, render
from alpa_lite.inspection.why.repricing import Repricing
from alpa_lite.inspection.why.stage_problem import OPAQUE, PASSES, Entry, entries_of
from alpa_lite.plan.plan import Plan
from alpa_lite.program.phases import StepGraph
from alpa_lite.schedule import passes_of, simulate
from alpa_lite.text import show_bytes, show_milliseconds, show_numbers, show_percent, show_seconds

_LOW = 0.4
"""The share of the peak FLOP rate below which a matrix product is called small."""

_MUCH_FASTER = 1.5
"""The ratio of peak FLOP rates from which on another dtype is recommended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """The cost of the kernels of one source line per step, on an average device."""

    seconds: float
    flops: float
    bytes: float
    dtype: str
    phases: tuple[str, ...]
    primitives: tuple[str, ...]


def advice_on_compute(plan: Plan, step: StepGraph, what: str, spent: Spent) -> str:
    """Suggest how to reduce the kernels of one source line."""
    if what == OPAQUE:
        listed = ", ".join(spent.primitives)
        return f"every device runs {listed} whole; a rule of yours splits it (al.register_rule)"
    return _on_passes(plan, step, spent) if what == PASSES else _on_products(plan, spent)


def _on_products(plan: Plan, spent: Spent) -> str:
    device = plan.cluster.device
    peak = device.peak(spent.dtype)
    # The peak and not an expected rate: the reader can compare it with the data sheet.
    reached = spent.flops / (spent.seconds * peak) if spent.seconds > 0 else 0.0
    # Of the peak rates, as nobody knows what the same product would reach in another type.
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
    # Kernels that stream long arrays reach most of the bandwidth; far below that, their start takes most of the time.
    if rate < _LOW / 2:
        return f"{moved}, in many short kernels: {_fewer(plan)}a larger batch or fewer devices make them longer"
    return f"{moved}: narrower types, or fewer arrays written between kernels"


_COPIES = 1.1
"""The ratio of the bytes on all devices to the bytes of the state above which the state counts as replicated."""


def _on_state(plan: Plan, step: StepGraph) -> str:
    """Suggest splitting the state that the step updates if the devices of the stages store copies; "" on one device."""
    updated = {step.graph.values[v].name for v in step.aliases.values()}
    whole = held = 0
    for argument in arguments_of(plan).all:
        devices = plan.stages[argument.stage].submesh.num_devices
        # On one device nothing can be split.
        if argument.name in updated and devices > 1 and argument.shape is not None and argument.block is not None:
            whole += argument.shape.bytes
            held += devices * argument.block.bytes
    if not whole:
        return ""
    if held > _COPIES * whole:
        return "devices update copies of the same state, which al.planners.Zero or FSDP splits over them; "
    return "its state lies split over all devices already; "


def advice_on_collective(plan: Plan, group: CollectiveGroup) -> str:
    """Suggest how to reduce collectives of one kind over one axis."""
    each = show_bytes(group.bytes / group.count)
    per_host = plan.cluster.devices_per_host
    far = any(crosses_hosts(plan.stages[number], group.axis, per_host) for number in group.stages)
    hosts = "; its devices span hosts" if far else ""
    # Once per step and not per micro-batch, which calls for other advice.
    if group.phase == "update":
        return f"{each} each{hosts}; {_ON_UPDATE.get(group.kind, _ELSE)}"
    # Without the function's name: `explain` looks for lines by a part of their text.
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
    """Suggest how to reduce transfers between stages."""
    if plan.schedule.overlaps_transfers:
        return "they overlap with the compute of their stages; cutting where less data flows shortens them"
    return "al.schedule.EagerOneFOneB overlaps them with compute; cutting where less data flows shortens them"


def advice_on_waiting(plan: Plan) -> str:
    """Suggest how to reduce the waiting of devices."""
    if len(plan.stages) == 1:
        fewer = f"fewer micro-batches (now {plan.num_microbatches}) need fewer" if plan.num_microbatches > 1 else ""
        return fewer or "a larger batch makes it weigh less"
    count = plan.num_microbatches
    busy = [stage.cost.step_seconds(count) for stage in plan.stages]
    mean, longest = sum(busy) / len(busy), max(range(len(busy)), key=busy.__getitem__)
    # Twice as many micro-batches, if each could be half as long.
    now, then = bubble_at(plan, count), bubble_at(plan, 2 * count)
    # Whichever costs more is named: unequal stages, or a bubble that more micro-batches would make smaller.
    if busy[longest] - mean > (now - then) * plan.prediction.step_seconds:
        more = show_percent(busy[longest] / mean - 1.0)
        return f"stage {longest} takes {more} longer than the mean: move layers away from it, or give it more devices"
    size = None if plan.request is None else plan.request.batch_size
    # Twice as many micro-batches do not divide this batch.
    if size is not None and size % (2 * count):
        return f"a bubble of {show_percent(now)}; a larger batch, in more micro-batches, makes it smaller"
    return (
        f"a bubble of {show_percent(now)}; with {2 * count} micro-batches of half the size it would be "
        f"{show_percent(then)}, if they are as efficient"
    )


def bubble_at(plan: Plan, num_microbatches: int) -> float:
    """Return the bubble fraction of the plan's schedule with the same work in `num_microbatches` micro-batches."""
    # The same work in total: each micro-batch is smaller as there are more of them.
    part = plan.num_microbatches / num_microbatches
    timeline = simulate(
        plan.schedule.tasks(len(plan.stages), num_microbatches),
        [part * stage.cost.forward_seconds for stage in plan.stages],
        [part * stage.cost.backward_seconds for stage in plan.stages],
        weight_seconds=[part * stage.cost.weight_seconds for stage in plan.stages],
        replicas=plan.schedule.replicas(len(plan.stages)),
    )
    return timeline.bubble_fraction


MAX_ITEMS = 10
"""The number of rows of the text; the data have all."""


class TimeCause(StrEnum):
    """The kinds of causes of time; tasks are causes only where the ops of the step are not available."""

    COMPUTE = "compute"
    TASK = "task"
    COLLECTIVE = "collective"
    TRANSFER = "transfer"
    WAITING = "waiting"


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeItem:
    """One cause of time.

    kind          the kind of cause
    what          the cause in words
    source        the user's source line; "" if it belongs to none
    stages        the stages concerned
    phases        the phases concerned
    seconds       seconds per step of an average device
    suggestion    how to reduce it; may be ""
    """

    kind: TimeCause
    what: str
    source: str
    stages: tuple[int, ...]
    phases: tuple[str, ...]
    seconds: float
    suggestion: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeUse:
    """The time of a step by cause; all seconds are per step of an average device.

    exposed_seconds    communication that no compute overlaps
    by_line            whether compute is split by source line
    items              the causes, the longest first
    """

    plan: str
    step_seconds: float
    compute_seconds: float
    collective_seconds: float
    exposed_seconds: float
    waiting_seconds: float
    by_line: bool
    items: tuple[TimeItem, ...]

    def __str__(self) -> str:
        step = self.step_seconds

        def part(seconds: float) -> str:
            return f"{show_seconds(seconds)} ({show_percent(seconds / step if step > 0 else 0.0)})"

        lines = [
            f"{self.plan}: a step takes {show_seconds(step)} (predicted). An average device computes for"
            f" {part(self.compute_seconds)}, communicates for {part(self.collective_seconds)}, of which nothing hides"
            f" {part(self.exposed_seconds)}, and waits for {part(self.waiting_seconds)}.",
        ]
        # A plan from a file has no step, and without it no ops.
        if not self.by_line:
            lines.append("The time by source line is available with the step: al.plan(step, *args, planner=plan).")
        shown, rest = self.items[:MAX_ITEMS], self.items[MAX_ITEMS:]
        columns = ("", "ms", "of the step", "what, and what to do", "where")
        rows = tuple(
            (
                str(number),
                show_milliseconds(item.seconds),
                show_percent(item.seconds / step if step > 0 else 0.0),
                f"{item.what}: {item.suggestion}",
                item.source.split(" ")[0] if ":" in item.source else f"stage {show_numbers(item.stages)}",
            )
            for number, item in enumerate(shown, 1)
        )
        note = f"… and {len(rest)} more, {show_seconds(sum(item.seconds for item in rest))} in all" if rest else ""
        table = Table(
            title="Where the time goes", columns=columns, rows=rows, numeric=frozenset(columns[:3]), note=note
        )
        return render([*lines, ""], [table])

    def to_json(self) -> dict[str, object]:
        """Return plain data for JSON."""
        return {"kind": "time", **asdict(self)}


def time_use(plan: Plan) -> TimeUse:
    """Return the time of a step by cause, the longest first."""
    # By its share of the devices, so that the rows of an average device add up over stages.
    of_devices = [stage.submesh.num_devices / plan.cluster.num_devices for stage in plan.stages]
    # Costs are those of all micro-batches, which equal stages take in turn.
    weights = [
        share / len(plan.schedule.replicas_of(number, len(plan.stages))) for number, share in enumerate(of_devices)
    ]
    busy = sum(
        weight * stage.cost.step_seconds(plan.num_microbatches, plan.num_updates)
        for weight, stage in zip(weights, plan.stages, strict=True)
    )
    collectives = _collectives(plan, of_devices)
    step, in_all = plan.prediction.step_seconds, sum(item.seconds for item in collectives)
    if plan.request is not None:
        compute = _compute(plan, weights)
        total = sum(item.seconds for item in compute)
    else:
        compute = _compute_of_phases(plan, weights)
        # Tasks contain their collectives, which have rows of their own.
        total = max(0.0, busy - in_all)
    # What is left of the step after all tasks; rounding may make it negative.
    waiting = max(0.0, step - busy)
    items = [*compute, *collectives, *_waiting_items(plan, waiting)]
    return TimeUse(
        plan=f"{plan.function} on {plan.cluster.name}, {plan.name}",
        step_seconds=step,
        compute_seconds=total,
        collective_seconds=in_all,
        # What a device works beyond its compute; rounding must not make it more than all communication.
        exposed_seconds=min(in_all, max(0.0, busy - total)),
        waiting_seconds=waiting,
        by_line=plan.request is not None,
        items=tuple(sorted((item for item in items if item.seconds > 0), key=lambda item: -item.seconds)),
    )


def _compute(plan: Plan, weights: Sequence[float]) -> list[TimeItem]:
    """Return the kernels of each source line, by kind of kernel."""
    repricing = Repricing.of(plan, plan.request)
    opaque = {use.primitive for use in plan.opaque}
    groups: dict[tuple[str, str], list[tuple[int, Entry]]] = {}
    for number, stage in enumerate(repricing.stages):
        for entry in entries_of(stage, opaque):
            # A line is one cause in every stage and layer that runs it.
            groups.setdefault((entry.source, entry.what), []).append((number, entry))
    found: list[TimeItem] = []
    for (source, what), members in groups.items():
        spent = Spent(
            seconds=sum(weights[n] * entry.seconds for n, entry in members),
            flops=sum(weights[n] * entry.flops for n, entry in members),
            bytes=sum(weights[n] * entry.bytes for n, entry in members),
            # The advice is on one dtype: the first op speaks for its line.
            dtype=members[0][1].dtype,
            phases=_unique(entry.phase for _, entry in members),
            primitives=_unique(entry.primitive for _, entry in members),
        )
        found.append(
            TimeItem(
                kind=TimeCause.COMPUTE,
                what=f"{what}, {', '.join(spent.phases)}",
                source=source,
                stages=tuple(sorted({n for n, _ in members})),
                phases=spent.phases,
                seconds=spent.seconds,
                suggestion=advice_on_compute(plan, repricing.step, what, spent),
            )
        )
    return found


def _compute_of_phases(plan: Plan, weights: Sequence[float]) -> list[TimeItem]:
    """Return the tasks of each stage, collectives included: all that a plan without its step has on compute."""
    found: list[TimeItem] = []
    for number, (stage, weight) in enumerate(zip(plan.stages, weights, strict=True)):
        runs = plan.num_microbatches
        parts = (
            ("forward", runs * stage.cost.forward_seconds),
            ("backward", runs * stage.cost.backward_seconds),
            ("update", plan.num_updates * stage.cost.update_seconds),
        )
        for phase, seconds in parts:
            found.append(
                TimeItem(
                    kind=TimeCause.TASK,
                    what=f"{phase} of stage {number}, collectives included",
                    source="",
                    stages=(number,),
                    phases=(phase,),
                    seconds=weight * seconds,
                    suggestion=f'plan.explain("stage {number}") takes it apart',
                )
            )
    return found


def _collectives(plan: Plan, weights: Sequence[float]) -> list[TimeItem]:
    # Weighted before they are grouped, as the stages of a group have different weights.
    uses = (replace(use, seconds=weights[use.stage] * use.seconds) for use in plan.prediction.collectives)
    return [
        TimeItem(
            kind=TimeCause.COLLECTIVE,
            what=f"{group.kind} over {group.axis}, {group.phase}",
            source=group.source,
            stages=group.stages,
            phases=(group.phase,),
            seconds=group.seconds,
            suggestion=advice_on_collective(plan, group),
        )
        for group in group_collectives(uses)
    ]


def _waiting_items(plan: Plan, waiting: float) -> list[TimeItem]:
    everywhere = tuple(range(len(plan.stages)))
    boundaries = len(plan.stages) - 1
    found: list[TimeItem] = []
    if boundaries and plan.prediction.transfer_seconds > 0:
        found.append(
            TimeItem(
                kind=TimeCause.TRANSFER,
                what="transfers between stages",
                source="",
                stages=everywhere,
                phases=passes_of(plan.schedule.tasks(len(plan.stages), plan.num_microbatches)[0]),
                # The sum over all boundaries, of which a stage has about one.
                seconds=plan.prediction.transfer_seconds / boundaries,
                suggestion=advice_on_transfers(plan),
            )
        )
    what = "waiting for other stages" if boundaries else "starting programs, and waiting for the slowest host"
    found.append(
        TimeItem(
            kind=TimeCause.WAITING,
            what=what,
            source="",
            stages=everywhere,
            phases=(),
            seconds=waiting,
            suggestion=advice_on_waiting(plan),
        )
    )
    return found


def _unique(words: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(words))
