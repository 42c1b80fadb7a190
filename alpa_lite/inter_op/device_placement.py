"""The seconds of a step whose groups of ops lie on given devices, one device each.

The instructions of a program in which every group is a stage are replayed for any placement (`DevicePlacements`):

    run     start = max(end of the run before on its device, arrival of its inputs, launched by its host)
    send    nothing on the same device; else start = max(end of what makes it, end of the send before between the two)
    peak    of a device: Σ of its groups (state + sums + activations) + the largest temporaries

These are the rules of `plan.simulation`, without what is only told afterwards, so that a search can price many
thousands of placements. Groups on other devices run at the same time where none reads the other; there are no
micro-batches to be pipelined, and the activations of all groups are held until their backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from alpa_lite.inter_op.plan_request import PlanRequest
from alpa_lite.plan.instructions import InstructionKind, Program
from alpa_lite.plan.parts import StageCost
from alpa_lite.plan.plan import Plan
from alpa_lite.plan.pricing import Pricer, dispatch_seconds
from alpa_lite.plan.program_builder import build_program
from alpa_lite.plan.simulation import pricer_of, prices_of_plan
from alpa_lite.program.phases import StepGraph

Placement = tuple[int, ...]
"""The number of the device of each group."""


class EventKind(Enum):
    """The kinds of events of a step."""

    RUN = auto()
    SEND = auto()
    PLACE = auto()
    JOIN = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedEvent:
    """An event of a step, in the order in which the host issues it.

    Attributes:
        kind: RUN computes on the device of `group`, SEND brings an array from `source` to `group`, PLACE puts an
            argument on a device during the run before, and JOIN takes no time.
        group: the group on whose device it happens.
        source: the group that sends.
        seconds: of a RUN on each kind of device; of a SEND within a host and across hosts.
        reads: numbers of the arrays that it needs.
        writes: numbers of the arrays that it makes.
    """

    kind: EventKind
    group: int
    source: int = -1
    seconds: tuple[float, ...] = ()
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceableDevice:
    """A device on which groups can be placed.

    Attributes:
        kind: number of its kind, by which seconds and bytes of groups differ.
        host: number of its host.
        usable_bytes: bytes of memory for groups.
    """

    kind: int = 0
    host: int = 0
    usable_bytes: float = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupBytes:
    """Bytes of a group on a device: those that stay for the whole step, and its largest temporaries."""

    held: float = 0.0
    temporary: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePlacements:
    """A step in groups, each to be placed on a device.

    Attributes:
        num_groups: number of groups.
        num_arrays: number of arrays that events read and write.
        events: the events of a step.
        devices: the devices.
        bytes_of: for each kind of device, the bytes of each group; () if nothing is limited.
        launch_seconds: seconds that a host takes to launch a run.
        dispatch_seconds: seconds that each run and send takes in addition.
        extra_seconds: seconds per step that do not depend on the placement.
        one_processor: whether all devices share one processor, and so run in turn.
    """

    num_groups: int
    num_arrays: int
    events: tuple[PlacedEvent, ...]
    devices: tuple[PlaceableDevice, ...]
    bytes_of: tuple[tuple[GroupBytes, ...], ...] = ()
    launch_seconds: float = 0.0
    dispatch_seconds: float = 0.0
    extra_seconds: float = 0.0
    one_processor: bool = False

    def fits(self, placement: Placement) -> bool:
        """Return whether the groups of each device fit into its memory."""
        held, most = [0.0] * len(self.devices), [0.0] * len(self.devices)
        for group, device in enumerate(placement if self.bytes_of else ()):
            size = self.bytes_of[self.devices[device].kind][group]
            held[device] += size.held
            most[device] = max(most[device], size.temporary)
        return all(a + b <= d.usable_bytes for a, b, d in zip(held, most, self.devices, strict=True))

    def seconds(self, placement: Placement) -> float:
        """Return the seconds of a step, whether it fits or not."""
        count = len(self.devices)
        ready, free, issued = [0.0] * self.num_arrays, [0.0] * count, [0.0] * count
        taken = dict[tuple[int, int], float]()
        for event in self.events:
            here, start = placement[event.group], 0.0
            for array in event.reads:
                start = max(start, ready[array])
            end = start
            if event.kind is EventKind.RUN:
                device = self.devices[here]
                start = max(start, max(free) if self.one_processor else free[here], issued[device.host])
                issued[device.host] += self.launch_seconds
                free[here] = end = start + event.seconds[device.kind] + self.dispatch_seconds
            elif event.kind is EventKind.PLACE:
                end = free[here]
            elif event.kind is EventKind.SEND and placement[event.source] != here:
                link = (placement[event.source], here)
                across = self.devices[link[0]].host != self.devices[here].host
                start = max(start, taken.get(link, 0.0))
                taken[link] = end = start + event.seconds[across] + self.dispatch_seconds
            for array in event.writes:
                ready[array] = end
        return max(max(ready, default=0.0), *free, *issued) + self.extra_seconds


def device_placements(request: PlanRequest, plans: Sequence[Plan], step: StepGraph) -> DevicePlacements:
    """Return the groups of a step to be placed.

    Args:
        request: the request, for the cluster and the cost model.
        plans: for each kind of device a plan in which every group is a stage on one device of this kind.
        step: the step of these plans.
    """
    cluster, model = request.cluster, request.cost_model
    program, dispatch = build_program(plans[0], step), dispatch_seconds(request.cluster)
    of_tasks = [prices_of_plan(program.tasks, step, plan, _pricers(plan, request)) for plan in plans]
    prices = [[price.seconds for price in each] for each in of_tasks]
    firsts = [plan.stages[0].submesh.first_device for plan in plans]
    capacities = [plan.capacity_bytes(0) for plan in plans]
    kinds = [max(k for k, first in enumerate(firsts) if first <= d) for d in range(cluster.num_devices)]
    # Every array that is made gets a number.
    numbers = {buffer: n for n, buffer in enumerate(dict.fromkeys(b for i in program.instructions for b in i.writes))}

    def event(number: int) -> PlacedEvent:
        each = program.instructions[number]
        kind, seconds = _KINDS.get(each.kind, EventKind.JOIN), tuple[float, ...]()
        if kind is EventKind.RUN:
            seconds = tuple(of_kind[each.task] for of_kind in prices)
        if kind is EventKind.SEND:
            size = float(step.graph.values[each.reads[0].value].bytes)
            seconds = tuple(model.transfer_seconds(size, crosses_hosts=across) for across in (False, True))
        return PlacedEvent(
            kind=kind,
            group=each.stage,
            source=each.source_stage,
            seconds=seconds,
            reads=tuple(numbers[b] for b in each.reads),
            writes=tuple(numbers[b] for b in each.writes),
        )

    return DevicePlacements(
        num_groups=len(plans[0].stages),
        num_arrays=len(numbers),
        events=tuple(map(event, _timed(program))),
        devices=tuple(
            PlaceableDevice(kind=kind, host=d // cluster.devices_per_host, usable_bytes=capacities[kind])
            for d, kind in enumerate(kinds)
        ),
        bytes_of=tuple(tuple(_bytes(stage.cost) for stage in plan.stages) for plan in plans),
        # A cluster with a dispatch time pays it within each task.
        launch_seconds=0.0 if dispatch else model.launch_seconds(),
        dispatch_seconds=dispatch,
        extra_seconds=cluster.skew_seconds,
        one_processor=cluster.shared_processor,
    )


_KINDS = {
    InstructionKind.RUN: EventKind.RUN,
    InstructionKind.SEND: EventKind.SEND,
    InstructionKind.PLACE: EventKind.PLACE,
}


def _timed(program: Program) -> list[int]:
    return [n for n, each in enumerate(program.instructions) if each.kind is not InstructionKind.FREE]


def _pricers(plan: Plan, request: PlanRequest) -> list[Pricer]:
    return [pricer_of(plan, stage, request.cost_model_for) for stage in range(len(plan.stages))]


def _bytes(cost: StageCost) -> GroupBytes:
    return GroupBytes(held=cost.resident_bytes + cost.activation_bytes, temporary=cost.temporary_bytes)
