"""Submeshes of a cluster, logical meshes over them, and how submeshes tile the cluster.

A cluster has N hosts of M devices, numbered host by host (device = host * M + place on the host). A submesh is part of
one host or a number of whole hosts, so its devices are consecutive. A logical mesh names axes over it, row-major.

    kinds   = {(1,1), (1,2), (1,4), ..., (1,M)} ∪ {(2,M), ..., (N,M)}     `submesh_kinds`    (Alpa, section 5.2)
    shapes  = {(n,)} ∪ {(a, b): a*b = n, a,b > 1}                        `logical_shapes`
    tiling  : whole hosts first, then parts of hosts by falling size     `place`            (Alpa, appendix)
    groups  : devices that differ in the coordinates of some axes alone  `axis_group`

With M a power of two every choice of kinds that adds up to N*M devices tiles the cluster. With another M some do not.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from alpa_lite.errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class Submesh:
    """Consecutive devices of a cluster: a part of one host, or whole hosts."""

    first_device: int
    num_hosts: int
    devices_per_host: int

    def __post_init__(self) -> None:
        if self.first_device < 0 or self.num_hosts < 1 or self.devices_per_host < 1:
            raise PlanError(f"{self!r} is not a submesh: it needs a first device, and at least one host and device.")

    @property
    def num_devices(self) -> int:
        return self.num_hosts * self.devices_per_host

    @property
    def devices(self) -> tuple[int, ...]:
        """The device ids in the order of the cluster."""
        return tuple(range(self.first_device, self.first_device + self.num_devices))

    def __str__(self) -> str:
        return f"devices {self.first_device}..{self.first_device + self.num_devices - 1}"


def sharing(submeshes: Sequence[Submesh]) -> tuple[tuple[int, ...], ...]:
    """The positions of equal submeshes, together; in the order of the first of each."""
    groups: dict[Submesh, list[int]] = {}
    for number, submesh in enumerate(submeshes):
        groups.setdefault(submesh, []).append(number)
    return tuple(map(tuple, groups.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class LogicalMesh:
    """Named axes over the devices of a submesh, the last axis varying fastest."""

    axis_names: tuple[str, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.axis_names) != len(self.shape) or len(set(self.axis_names)) != len(self.axis_names):
            raise PlanError(
                f"A logical mesh needs one distinct name per axis, but {self.axis_names} was given for {self.shape}."
            )
        if any(size < 1 for size in self.shape):
            raise PlanError(f"Every axis of a logical mesh needs at least one device, but its shape is {self.shape}.")

    @property
    def num_devices(self) -> int:
        return math.prod(self.shape)

    @property
    def axis_sizes(self) -> dict[str, int]:
        """The number of devices along each axis, by name."""
        return dict(zip(self.axis_names, self.shape, strict=True))

    def size(self, axis: str) -> int:
        """The number of devices along `axis`. Raises PlanError if there is no such axis."""
        return self.shape[self._position(axis)]

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """The groups along `axes` together, as places in the row-major order of the mesh."""
        places = np.arange(self.num_devices).reshape(self.shape)
        last = [self._position(axis) for axis in axes]
        rows = np.moveaxis(places, last, range(-len(last), 0)).reshape(-1, math.prod(map(self.size, axes)))
        return tuple(tuple(int(place) for place in row) for row in rows)

    def _position(self, axis: str) -> int:
        if axis not in self.axis_names:
            raise PlanError(f"The logical mesh ({self}) has no axis {axis!r}.")
        return self.axis_names.index(axis)

    def __str__(self) -> str:
        return " × ".join(f"{name}={size}" for name, size in self.axis_sizes.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisGroup:
    """The devices that communicate along one mesh axis.

    Attributes:
        num_devices: members of one group.
        devices_per_host: members on one host, in the group that spans the most hosts (on its fullest host).
        num_concurrent: groups with members on one host: they communicate at once and share the link that leaves it.
        devices_per_domain: members in one domain of hosts, in that group (in its fullest domain); None where hosts
            form no domains.
    """

    num_devices: int
    devices_per_host: int
    num_concurrent: int
    devices_per_domain: int | None = None


def submesh_kinds(num_hosts: int, devices_per_host: int) -> tuple[tuple[int, int], ...]:
    """The (hosts, devices per host) that a stage may get, by rising number of devices."""
    _check_cluster(num_hosts, devices_per_host)
    parts = [(1, 2**exponent) for exponent in range(devices_per_host.bit_length()) if 2**exponent < devices_per_host]
    return (*parts, *((hosts, devices_per_host) for hosts in range(1, num_hosts + 1)))


def logical_shapes(num_hosts: int, devices_per_host: int) -> tuple[tuple[int, ...], ...]:
    """The shapes of logical mesh over a submesh: one axis, or two of at least two devices each."""
    _check_cluster(num_hosts, devices_per_host)
    num_devices = num_hosts * devices_per_host
    return ((num_devices,), *((a, num_devices // a) for a in range(2, num_devices) if num_devices % a == 0))


def place(kinds: Sequence[tuple[int, int]], num_hosts: int, devices_per_host: int) -> tuple[Submesh, ...]:
    """Concrete submeshes of the given kinds, in the given order, that cover each device of the cluster once.

    Submeshes of one size get their devices in the given order. Raises PlanError if they cannot tile the cluster.
    """
    _check_cluster(num_hosts, devices_per_host)
    chosen = ", ".join(f"{hosts}×{devices}" for hosts, devices in kinds) or "none"
    cluster = f"the {num_hosts}×{devices_per_host} cluster"
    for hosts, devices in kinds:
        if hosts < 1 or not 1 <= devices <= devices_per_host or (hosts > 1 and devices < devices_per_host):
            raise PlanError(f"A submesh of {hosts}×{devices} is neither part of one host nor whole hosts of {cluster}.")
    total = sum(hosts * devices for hosts, devices in kinds)
    if total != num_hosts * devices_per_host:
        raise PlanError(
            f"The submeshes ({chosen}) have {total} devices, but {cluster} has {num_hosts * devices_per_host}:"
            " choose submeshes that cover every device once."
        )
    order = sorted(range(len(kinds)), key=lambda index: -kinds[index][0] * kinds[index][1])
    whole = [index for index in order if kinds[index][1] == devices_per_host]
    parts = [index for index in order if kinds[index][1] < devices_per_host]
    first: dict[int, int] = {}
    next_host = 0
    for index in whole:
        first[index] = next_host * devices_per_host
        next_host += kinds[index][0]
    room = _pack([kinds[index][1] for index in parts], num_hosts - next_host, devices_per_host)
    if room is None:
        raise PlanError(
            f"The submeshes ({chosen}) have as many devices as {cluster}, but no arrangement keeps each part within"
            " one host: choose sizes that add up to whole hosts."
        )
    used = Counter[int]()
    for index, host in zip(parts, room, strict=True):
        first[index] = (next_host + host) * devices_per_host + used[host]
        used[host] += kinds[index][1]
    return tuple(
        Submesh(first_device=first[index], num_hosts=hosts, devices_per_host=devices)
        for index, (hosts, devices) in enumerate(kinds)
    )


def axis_group(submesh: Submesh, logical_mesh: LogicalMesh, *axes: str, hosts_per_domain: int = 1) -> AxisGroup:
    """How the groups along `axes` lie on the hosts, and on domains of so many hosts.

    Raises PlanError if the mesh does not cover the submesh.
    """
    if logical_mesh.num_devices != submesh.num_devices:
        raise PlanError(
            f"The logical mesh ({logical_mesh}) has {logical_mesh.num_devices} devices, but its submesh has"
            f" {submesh.num_devices}: the sizes of its axes must multiply to that number."
        )
    members = [Counter(at // submesh.devices_per_host for at in group) for group in logical_mesh.groups(*axes)]
    groups_on_host = Counter(host for hosts in members for host in hosts)
    widest = max(members, key=lambda hosts: (len(hosts), -max(hosts.values())))
    return AxisGroup(
        num_devices=math.prod(map(logical_mesh.size, axes)),
        devices_per_host=max(widest.values()),
        num_concurrent=max(groups_on_host.values()),
        devices_per_domain=_fullest_domain(submesh, widest, hosts_per_domain) if hosts_per_domain > 1 else None,
    )


def _fullest_domain(submesh: Submesh, members: Counter[int], hosts_per_domain: int) -> int:
    """Of members by host of the submesh, the most that share a domain; a submesh of several hosts has whole ones."""
    first_host = submesh.first_device // submesh.devices_per_host if submesh.num_hosts > 1 else 0
    domains = Counter[int]()
    for host, count in members.items():
        domains[(first_host + host) // hosts_per_domain] += count
    return max(domains.values())


def _check_cluster(num_hosts: int, devices_per_host: int) -> None:
    if num_hosts < 1 or devices_per_host < 1:
        raise PlanError(f"{num_hosts}×{devices_per_host} devices were given, but at least 1×1 are needed.")


def _pack(sizes: Sequence[int], num_hosts: int, devices_per_host: int) -> list[int] | None:
    """The host of each size (falling) such that every host is full; None if there is no such packing.

    Depth-first, first host first, which finds the packing at once whenever each size divides the next larger one.
    """
    failed: set[tuple[int, tuple[int, ...]]] = set()

    def search(index: int, room: tuple[int, ...]) -> list[int] | None:
        if index == len(sizes):
            return []
        state = (index, tuple(sorted(room)))
        if state in failed:
            return None
        for host, left in enumerate(room):
            if left < sizes[index] or left in room[:host]:
                continue
            rest = search(index + 1, (*room[:host], left - sizes[index], *room[host + 1 :]))
            if rest is not None:
                return [host, *rest]
        failed.add(state)
        return None

    return search(0, (devices_per_host,) * num_hosts)
