"""Plans that leave devices idle, where a step on fewer of them takes no longer, or fits into memory on fewer alone.

    parts     of a mixed cluster its groups of equal hosts; else a power of two of the hosts, or of one host's devices
    tried     the parts on which a step may be as short as the best so far, by its lower bound      `on_fewer_devices`

Each part is planned as a cluster of its own, which the devices beside it do not slow down: fewer hosts wait less for
each other, and fewer devices send less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from alpa_lite.errors import InfeasibleError
from alpa_lite.inter_op.plan_request import PlanRequest
from alpa_lite.plan.plan import Plan
from alpa_lite.text import show_count, show_range, show_seconds
from cost_models.cluster import Cluster

AS_FAST = 0.005
"""The relative excess up to which a plan counts as fast as another: prices are not better than that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPart:
    """Devices of a cluster that are planned as a cluster of their own; `first_device` is numbered in the whole."""

    first_device: int
    cluster: Cluster


def next_smaller(whole: ClusterPart) -> Iterator[ClusterPart]:
    """Yield the next smaller parts of a cluster, none of which contains another."""
    cluster, first = whole.cluster, 0
    if len(cluster.groups) > 1:
        for group in cluster.groups:
            count = group.num_hosts * cluster.devices_per_host
            yield ClusterPart(first_device=whole.first_device + first, cluster=cluster.part(first, count))
            first += count
    elif cluster.num_devices > 1:
        per_host, hosts = cluster.devices_per_host, cluster.num_hosts
        count = _power_of_two_below(hosts) * per_host if hosts > 1 else _power_of_two_below(per_host)
        yield ClusterPart(first_device=whole.first_device, cluster=cluster.part(0, count))


def _power_of_two_below(number: int) -> int:
    return 1 << (number - 1).bit_length() - 1


def on_fewer_devices(
    whole: Plan | InfeasibleError, request: PlanRequest, plan_on: Callable[[PlanRequest, float], Plan | None]
) -> Plan:
    """Return the plan on the fewest devices that is as fast as `whole`, by halving them as long as that is possible.

    Args:
        whole: the plan on all devices of the request, or the error if none fits into memory: where their number divides
            little, fewer may hold more. It is raised if none fits on fewer devices either.
        request: what is planned.
        plan_on: returns a plan on all devices of a request that takes at most so many seconds; None if there is none.
    """
    best, fastest, least = None, math.inf, math.inf
    if isinstance(whole, Plan):
        best, fastest, least = whole, whole.prediction.step_seconds, whole.solver.bound
    part = ClusterPart(first_device=0, cluster=request.cluster)
    waiting = [part]
    while waiting:
        for smaller in next_smaller(waiting.pop(0)):
            asked = replace(request, cluster=smaller.cluster)
            bound = asked.floor_seconds
            at_most = (1 + AS_FAST) * fastest
            # A part of it has a larger bound.
            if bound > at_most:
                continue
            with request.progress.during("stages", f"planning for {show_count(smaller.cluster.num_devices, 'device')}"):
                found = plan_on(asked, at_most)
            # Where nothing fits into memory so far, parts of a part have less. Else, parts of a part that takes longer
            # may still take less: it may be of a size that divides little.
            if found is not None or best is not None:
                waiting.append(smaller)
            if found is not None and found.prediction.step_seconds <= at_most:
                best, part, least = found, smaller, min(least, bound)
                fastest = min(fastest, found.prediction.step_seconds)
    if best is None:
        assert isinstance(whole, InfeasibleError)
        raise whole
    return best if best is whole else _left_idle(request.cluster, whole, best, part, least)


def _left_idle(cluster: Cluster, whole: Plan | InfeasibleError, found: Plan, part: ClusterPart, bound: float) -> Plan:
    """Return a plan on a part of a cluster with what it says of the rest; `whole` is that on all devices, if any."""
    total, count = cluster.num_devices, part.cluster.num_devices
    seconds = found.prediction.step_seconds
    numbers = show_range(part.first_device, part.first_device + count - 1)
    if isinstance(whole, Plan):
        longer = whole.prediction.step_seconds
        on_all = f"with all of them a step would take {show_seconds(longer)}, and not {show_seconds(seconds)}"
        others, refusals = ((f"{whole.name} on all {total} devices", longer), *whole.alternatives), whole.refusals
    else:
        on_all, name = "no plan for all of them was found to fit into memory", f"{found.name} on all {total} devices"
        others, refusals = ((name, math.inf),), ((name, str(whole)),)
    note = f"uses {count} of {show_count(total, 'device')} ({numbers}): {on_all}"
    return replace(
        found,
        first_device=part.first_device,
        idle_devices=total - count,
        notes=(*found.notes, note),
        alternatives=others,
        refusals=refusals,
        solver=replace(found.solver, bound=bound, gap=max(0.0, 1 - bound / seconds) if seconds > 0 else 0.0),
    )
