"""The traffic of a plan's collectives over each mesh axis, and the links they use: inside hosts or between them."""

from __future__ import annotations

from dataclasses import dataclass

from alpa_lite.plan.plan import CollectiveUse, Plan, StagePlan
from alpa_lite.text import show_numbers


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
