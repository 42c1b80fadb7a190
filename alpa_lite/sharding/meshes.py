"""Submeshes of a cluster, logical meshes over them, and how submeshes tile the cluster.

A cluster has N hosts of M devices, numbered host by host (device = host * M + place on the host). A submesh is part of
one host or a number of whole hosts, so its devices are consecutive. A logical mesh names axes over it, row-major.
Hosts may be of several groups, which differ; they are numbered group by group.

    kinds   = {(1,p): p a part of a host} ∪ {(h,M): h a number of hosts}     `submesh_kinds`   (Alpa, section 5.2)
    parts   = the divisors of M, which tile hosts whatever their mix         `_parts_of_hosts`
    hosts   = {1, ..., N}, or powers of two and N/k, if there are many       `_numbers_of_hosts`
    of groups: the kinds of each group, and the whole cluster                `cluster_kinds`
    shapes  = {(n,)} ∪ {(a,b): a*b = n} ∪ {(a,b,c) whose hosts are whole}    `logical_shapes`
    tiling  : whole hosts first, then parts of hosts by falling size         `place`           (Alpa, appendix)
    groups  : devices that differ in the coordinates of some axes alone      `axis_group`

Every choice of kinds that adds up to the devices of a cluster (with groups: of each group) tiles it. For one host that
needs no proof, and whole hosts never stand in the way. Parts of several hosts add up to h hosts. If each part divides
the next larger one up to M (M a power of two, say), laying them down by falling size fills the hosts: before a part of
size p lies a multiple of p, so that it never reaches into the next host. If the parts are all divisors of M this holds
for M up to 128 with at most two prime factors (not for 30: 15 + 10 + 10 + 6 + 6 + 6 + 6 + 1 are no two hosts): where
parts add up to h hosts and none of them fill one host, there are fewer than M/p parts of each size p, and the tests go
through all of these.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from alpa_lite.errors import PlanError

#: Up to so many hosts, a stage may have any number of them.
ANY_NUMBER_OF_HOSTS = 16
#: A stage has at least this part of the devices: there are no pipelines of so many stages.
SMALLEST_PART = 1 / 512
#: Pipelines of up to so many stages get nearly equal numbers of hosts, those of up to so many exactly equal ones.
_UNEVEN_STAGES, _EVEN_STAGES = 8, 64
#: Hosts of at most so many devices were gone through; see the module.
_TESTED_DEVICES = 128


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
        stride: members on one host are every so-many-th device.
    """

    num_devices: int
    devices_per_host: int
    num_concurrent: int
    devices_per_domain: int | None = None
    stride: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmeshKind:
    """What a submesh can be: so many devices of each of so many hosts of a group; None for all hosts of all groups."""

    num_hosts: int
    devices_per_host: int
    group: int | None = 0

    @property
    def num_devices(self) -> int:
        return self.num_hosts * self.devices_per_host


def cluster_kinds(hosts_of_groups: Sequence[int], devices_per_host: int) -> tuple[SubmeshKind, ...]:
    """The kinds of submesh that a stage may get in each group of hosts and, of several groups, in all of them at once.

    Stages on kinds that add up to the devices of each group can be placed (`place_in_groups`).
    """
    kinds = [
        SubmeshKind(num_hosts=hosts, devices_per_host=devices, group=group)
        for group, num_hosts in enumerate(hosts_of_groups)
        for hosts, devices in submesh_kinds(num_hosts, devices_per_host)
    ]
    if len(hosts_of_groups) > 1:
        kinds.append(SubmeshKind(num_hosts=sum(hosts_of_groups), devices_per_host=devices_per_host, group=None))
    return tuple(kinds)


def first_submesh(kind: SubmeshKind, hosts_of_groups: Sequence[int], devices_per_host: int) -> Submesh:
    """The submesh of a kind that has the first devices of its group."""
    first_host = sum(hosts_of_groups[: kind.group or 0])
    return Submesh(
        first_device=first_host * devices_per_host, num_hosts=kind.num_hosts, devices_per_host=kind.devices_per_host
    )


def submesh_kinds(num_hosts: int, devices_per_host: int) -> tuple[tuple[int, int], ...]:
    """The (hosts, devices per host) that a stage may get on equal hosts, by rising number of devices.

    Stages that add up to all devices can be placed (`place`), and the kinds are few: about 20 on hundreds of hosts.
    """
    _check_cluster(num_hosts, devices_per_host)
    parts = [(1, part) for part in _parts_of_hosts(num_hosts, devices_per_host)]
    kinds = [*parts, *((hosts, devices_per_host) for hosts in _numbers_of_hosts(num_hosts))]
    smallest = num_hosts * devices_per_host * SMALLEST_PART
    return tuple((hosts, devices) for hosts, devices in kinds if hosts * devices >= smallest)


def _parts_of_hosts(num_hosts: int, devices_per_host: int) -> list[int]:
    """Sizes below a host that tile hosts whatever their mix; of one host also powers of two and halves, rounded."""
    divisors = [size for size in range(1, devices_per_host) if devices_per_host % size == 0]
    if num_hosts == 1:
        halves = {devices_per_host // 2, devices_per_host - devices_per_host // 2}
        return sorted({*divisors, *_powers_of_two(devices_per_host), *halves} - {0, devices_per_host})
    # Each divides the next larger one.
    chain = [devices_per_host]
    while chain[-1] > 1:
        chain.append(max(divisor for divisor in divisors if divisor < chain[-1] and chain[-1] % divisor == 0))
    num_primes = len({larger // smaller for larger, smaller in pairwise(chain)})
    return divisors if devices_per_host <= _TESTED_DEVICES and num_primes <= 2 else chain[:0:-1]


def _numbers_of_hosts(num_hosts: int) -> list[int]:
    """All numbers, or of many: powers of two for uneven pipelines, N/k for those of k equal stages."""
    if num_hosts <= ANY_NUMBER_OF_HOSTS:
        return list(range(1, num_hosts + 1))
    nearly_equal = {-(-num_hosts // k) for k in range(1, _UNEVEN_STAGES + 1)}
    nearly_equal |= {num_hosts // k for k in range(1, _UNEVEN_STAGES + 1)}
    equal = {num_hosts // k for k in range(1, _EVEN_STAGES + 1) if num_hosts % k == 0}
    return sorted(nearly_equal | equal | set(_powers_of_two(num_hosts)))


def _powers_of_two(limit: int) -> list[int]:
    return [2**exponent for exponent in range(limit.bit_length())]


def logical_shapes(num_hosts: int, devices_per_host: int) -> tuple[tuple[int, ...], ...]:
    """The shapes of logical mesh over a submesh: one axis, or two of at least two devices each."""
    _check_cluster(num_hosts, devices_per_host)
    num_devices = num_hosts * devices_per_host
    return ((num_devices,), *_pairs(num_devices))


def _pairs(number: int) -> list[tuple[int, int]]:
    """The (a, b) with a*b = number and both above 1, by rising a."""
    return [(a, number // a) for a in range(2, number) if number % a == 0]


def place_in_groups(
    kinds: Sequence[SubmeshKind], hosts_of_groups: Sequence[int], devices_per_host: int
) -> tuple[Submesh, ...]:
    """Concrete submeshes of the given kinds, in the given order, each within its group, that cover every device once.

    Raises PlanError if they cannot tile the groups.
    """
    if [kind.group for kind in kinds] == [None]:
        return place([(kinds[0].num_hosts, kinds[0].devices_per_host)], sum(hosts_of_groups), devices_per_host)
    stray = [kind for kind in kinds if kind.group is None or not 0 <= kind.group < len(hosts_of_groups)]
    if stray:
        raise PlanError(
            f"{stray[0]!r} was given among {len(kinds)} kinds of submesh for {len(hosts_of_groups)} groups of hosts,"
            " but each needs a group of its own, or must be the only one and the whole cluster."
        )
    placed: dict[int, Submesh] = {}
    for group, num_hosts in enumerate(hosts_of_groups):
        members = [index for index, kind in enumerate(kinds) if kind.group == group]
        sizes = [(kinds[index].num_hosts, kinds[index].devices_per_host) for index in members]
        try:
            found = place(sizes, num_hosts, devices_per_host)
        except PlanError as error:
            raise PlanError(f"In group {group} of {len(hosts_of_groups)} groups of hosts: {error}") from error
        first = sum(hosts_of_groups[:group]) * devices_per_host
        for index, submesh in zip(members, found, strict=True):
            placed[index] = replace(submesh, first_device=first + submesh.first_device)
    return tuple(placed[index] for index in range(len(kinds)))


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
    groups = logical_mesh.groups(*axes)
    members = [Counter(at // submesh.devices_per_host for at in group) for group in groups]
    groups_on_host = Counter(host for hosts in members for host in hosts)
    widest = max(members, key=lambda hosts: (len(hosts), -max(hosts.values())))
    return AxisGroup(
        num_devices=math.prod(map(logical_mesh.size, axes)),
        devices_per_host=max(widest.values()),
        num_concurrent=max(groups_on_host.values()),
        devices_per_domain=_fullest_domain(submesh, widest, hosts_per_domain) if hosts_per_domain > 1 else None,
        stride=_stride(groups[0], submesh.devices_per_host),
    )


def _stride(group: Sequence[int], devices_per_host: int) -> int:
    """How far apart members on one host are, the nearest of them; 1 where no host has two."""
    apart = (b - a for a, b in pairwise(sorted(group)) if a // devices_per_host == b // devices_per_host)
    return min(apart, default=1)


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
    return _packed(sizes, (devices_per_host,) * num_hosts, set())


def _packed(sizes: Sequence[int], room: tuple[int, ...], failed: set[tuple[int, tuple[int, ...]]]) -> list[int] | None:
    """The same into hosts with this much room; `failed`: in what room so many sizes cannot be packed."""
    if not sizes:
        return []
    state = (len(sizes), tuple(sorted(room)))
    if state in failed:
        return None
    for host, left in enumerate(room):
        if left < sizes[0] or left in room[:host]:
            continue
        rest = _packed(sizes[1:], (*room[:host], left - sizes[0], *room[host + 1 :]), failed)
        if rest is not None:
            return [host, *rest]
    failed.add(state)
    return None
