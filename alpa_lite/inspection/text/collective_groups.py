"""The collectives of a plan, grouped in two ways.

by source line    of one kind, axis and phase, the longest first                                (`group_collectives`)
by mesh axis      bytes and seconds, and the links: inside hosts or between them                (`axis_uses`)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from alpa_lite.plan.plan import CollectiveUse, Plan, StagePlan
from alpa_lite.text import short_source, show_numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveGroup:
    """Collectives of one kind, axis and phase that arise on one source line.

    stages     the stages that run them
    count      runs per step
    bytes      bytes of all runs in a step
    seconds    predicted seconds of all runs in a step
    """

    kind: str
    axis: str
    phase: str
    source: str
    stages: tuple[int, ...]
    count: float
    bytes: float
    seconds: float


def group_collectives(uses: Iterable[CollectiveUse]) -> tuple[CollectiveGroup, ...]:
    """Group collectives by kind, axis, phase and source line, the longest first."""
    groups: dict[tuple[str, ...], list[CollectiveUse]] = {}
    for use in uses:
        groups.setdefault((use.kind, use.axis, use.phase, source_of(use)), []).append(use)
    found = [
        CollectiveGroup(
            kind=kind,
            axis=axis,
            phase=phase,
            source=source,
            stages=tuple(sorted({use.stage for use in members})),
            count=sum(use.count for use in members),
            bytes=sum(use.bytes * use.count for use in members),
            seconds=sum(use.seconds * use.count for use in members),
        )
        for (kind, axis, phase, source), members in groups.items()
    ]
    return tuple(sorted(found, key=lambda group: -group.seconds))


def source_of(use: CollectiveUse) -> str:
    """Return the user's source line, shortened; for a collective that belongs to no line, its purpose."""
    if use.source:
        return short_source(use.source)
    if use.phase == "update":
        return "(gradients, summed)" if use.kind in ("all_reduce", "reduce_scatter") else "(new state)"
    return "(between lines)"


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisUse:
    """Collectives of one kind over one axis (or several, joined by `·`), summed over all stages and one step.

    axis      name of the mesh axis or axes
    kind      kind of the collective
    devices   number of devices that take part, `4`, or `2, 8` where stages differ
    links     `inside a host`, `between hosts`, or `both` where stages differ
    count     runs per step
    bytes     bytes of all runs
    seconds   predicted seconds of all runs
    """

    axis: str
    kind: str
    devices: str
    links: str
    count: float
    bytes: float
    seconds: float


def axis_uses(plan: Plan) -> tuple[AxisUse, ...]:
    """Return the traffic by axis and kind: the axis with most bytes first, and within it the kind with most bytes."""
    groups: dict[tuple[str, str], list[CollectiveUse]] = {}
    by_axis: dict[str, float] = {}
    for use in plan.prediction.collectives:
        groups.setdefault((use.axis, use.kind), []).append(use)
        by_axis[use.axis] = by_axis.get(use.axis, 0.0) + use.bytes * use.count
    found = [_use(plan, axis, kind, uses) for (axis, kind), uses in groups.items()]
    # All kinds of one axis stay together, whatever their own bytes.
    return tuple(sorted(found, key=lambda use: (-by_axis[use.axis], use.axis, -use.bytes)))


def _use(plan: Plan, axis: str, kind: str, uses: list[CollectiveUse]) -> AxisUse:
    links = {crosses_hosts(plan.stages[use.stage], axis, plan.cluster.devices_per_host) for use in uses}
    return AxisUse(
        axis=axis,
        kind=kind,
        devices=show_numbers(use.num_devices for use in uses),
        links="both" if len(links) > 1 else "between hosts" if True in links else "inside a host",
        count=sum(use.count for use in uses),
        bytes=sum(use.bytes * use.count for use in uses),
        seconds=sum(use.seconds * use.count for use in uses),
    )


def crosses_hosts(stage: StagePlan, axis: str, devices_per_host: int) -> bool:
    """Whether devices that differ along an axis are on different hosts; False if the stage's mesh lacks it."""
    names = [name for name in axis.split("·") if name in stage.mesh_shape.axis_names]
    # Devices are numbered host by host, so the host of a device is its number divided by the devices per host.
    first = stage.submesh.first_device
    return any(
        len({(first + place) // devices_per_host for place in group}) > 1 for group in stage.mesh_shape.groups(*names)
    )
