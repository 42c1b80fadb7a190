"""Submeshes of a cluster, logical meshes over them, and the tiling of the cluster by submeshes.

A cluster has N hosts of M devices, numbered host by host (device = host * M + index on the host). A submesh is part of
one host or a number of whole hosts, so that its devices are consecutive. A logical mesh arranges them in a row-major
grid with named axes. Hosts may belong to several groups of different hardware, and are numbered group by group.

    kinds   = {(1,p): p in parts} ∪ {(h,M): h in hosts}                      `submesh_kinds`   (Alpa, section 5.2)
    parts   = the divisors of M, which tile hosts in any combination         `_parts_of_hosts`
    hosts   = {1, ..., N}, or powers of two and N/k for large N              `_numbers_of_hosts`
    with groups of hosts: the kinds of each group, and the whole cluster     `cluster_kinds`
    shapes  = {(n,)} ∪ {(a,b): a*b = n; a, b > 1}                            `logical_shapes`
    tiling  : whole hosts first, then parts of hosts by decreasing size      `place`           (Alpa, appendix)
    groups  : devices that differ only in their coordinates on given axes    `axis_group`

Every combination of kinds that adds up to the devices of a cluster (with groups: of each group) tiles it. This is
trivial for one host, and submeshes of whole hosts can always be placed first. It remains to show that parts that add up
to h hosts can be packed into h hosts:

- If each part size divides the next larger one and the largest divides M (M a power of two, for instance), placing
  parts by decreasing size fills the hosts: the offset of a part of size p is a multiple of p, so that no part crosses
  the border of a host.
- If the parts are arbitrary divisors of M, the statement holds for M up to 128 with at most two prime factors. (It does
  not hold for M = 30: 15 + 10 + 10 + 6 + 6 + 6 + 6 + 1 cannot be packed into two hosts.) A smallest counterexample has
  no subset of parts that fills one host, hence fewer than M/p parts of each size p; the tests enumerate all of these.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from alpa_lite.errors import PlanError

#: The largest number of hosts for which a stage may have any number of hosts.
ANY_NUMBER_OF_HOSTS = 16
#: The smallest fraction of all devices that a stage may have: pipelines have fewer than 512 stages.
SMALLEST_PART = 1 / 512
#: On many hosts: the largest number of stages for which nearly equal, and exactly equal, numbers of hosts are offered.
_UNEVEN_STAGES, _EVEN_STAGES = 8, 64
#: The largest number of devices per host for which the tests verify that all divisors tile; see the module docstring.
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
        """The ids of the devices in the order of the cluster."""
        return tuple(range(self.first_device, self.first_device + self.num_devices))

    def __str__(self) -> str:
        return f"devices {self.first_device}..{self.first_device + self.num_devices - 1}"


def sharing(submeshes: Sequence[Submesh]) -> tuple[tuple[int, ...], ...]:
    """Return the positions of equal submeshes as groups, ordered by the first position in each group."""
    groups: dict[Submesh, list[int]] = {}
    for number, submesh in enumerate(submeshes):
        groups.setdefault(submesh, []).append(number)
    return tuple(map(tuple, groups.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class LogicalMesh:
    """A grid of named mesh axes over the devices of a submesh, the last axis varying fastest."""

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
        """The number of devices along each axis, by axis name."""
        return dict(zip(self.axis_names, self.shape, strict=True))

    def size(self, axis: str) -> int:
        """Return the number of devices along `axis`. Raises PlanError if the mesh does not have this axis."""
        return self.shape[self._position(axis)]

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """Return the device groups along `axes` together, as indices in the row-major order of the mesh.

        Raises PlanError if the mesh does not have one of the axes.
        """
        places = np.arange(self.num_devices).reshape(self.shape)
        last = [self._position(axis) for axis in axes]
        # With the axes of the group last, each row of the reshaped grid is one group.
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
    """The placement on hosts of the device groups that communicate along one or more mesh axes.

    Attributes:
        num_devices: number of devices in one group.
        devices_per_host: largest number of members on one host, in the group that spans the most hosts.
        num_concurrent: largest number of groups with members on one host; these communicate at the same time and share
            the link that leaves the host.
        devices_per_domain: largest number of members in one domain of hosts, in the same group; None if the cluster has
            no domains.
        stride: smallest distance between the device ids of two members on one host; 1 if no host has two.
    """

    num_devices: int
    devices_per_host: int
    num_concurrent: int
    devices_per_domain: int | None = None
    stride: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmeshKind:
    """The size of a submesh and the group of its hosts; a group of None means all hosts of all groups."""

    num_hosts: int
    devices_per_host: int
    group: int | None = 0

    @property
    def num_devices(self) -> int:
        return self.num_hosts * self.devices_per_host


def cluster_kinds(hosts_of_groups: Sequence[int], devices_per_host: int) -> tuple[SubmeshKind, ...]:
    """Return the kinds of submesh that a stage may have in each group of hosts.

    If there are several groups, the whole cluster is one more kind. Every combination of kinds that adds up to the
    devices of each group can be placed (`place_in_groups`).
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
    """Return the submesh of a kind on the first devices of its group."""
    first_host = sum(hosts_of_groups[: kind.group or 0])
    return Submesh(
        first_device=first_host * devices_per_host, num_hosts=kind.num_hosts, devices_per_host=kind.devices_per_host
    )


def submesh_kinds(num_hosts: int, devices_per_host: int) -> tuple[tuple[int, int], ...]:
    """Return the (hosts, devices per host) that a stage may have on equal hosts, by increasing number of devices.

    Every combination that adds up to all devices can be placed (`place`). The stage dynamic program runs over all
    kinds, so there are few of them: about 20 on hundreds of hosts.
    """
    _check_cluster(num_hosts, devices_per_host)
    parts = [(1, part) for part in _parts_of_hosts(num_hosts, devices_per_host)]
    kinds = [*parts, *((hosts, devices_per_host) for hosts in _numbers_of_hosts(num_hosts))]
    smallest = num_hosts * devices_per_host * SMALLEST_PART
    return tuple((hosts, devices) for hosts, devices in kinds if hosts * devices >= smallest)


def _parts_of_hosts(num_hosts: int, devices_per_host: int) -> list[int]:
    """Return the part sizes below a whole host that tile hosts in any combination; see the module docstring.

    On a single host every combination tiles, so powers of two and halves (rounded up and down) are added.
    """
    divisors = [size for size in range(1, devices_per_host) if devices_per_host % size == 0]
    if num_hosts == 1:
        halves = {devices_per_host // 2, devices_per_host - devices_per_host // 2}
        return sorted({*divisors, *_powers_of_two(devices_per_host), *halves} - {0, devices_per_host})
    # The fallback for an unverified number of devices: a chain of sizes in which each divides the next larger one.
    chain = [devices_per_host]
    while chain[-1] > 1:
        chain.append(max(divisor for divisor in divisors if divisor < chain[-1] and chain[-1] % divisor == 0))
    # Each ratio is the smallest prime factor of the larger number, so the ratios are the primes of the chain's first
    # number.
    num_primes = len({larger // smaller for larger, smaller in pairwise(chain)})
    return divisors if devices_per_host <= _TESTED_DEVICES and num_primes <= 2 else chain[:0:-1]


def _numbers_of_hosts(num_hosts: int) -> list[int]:
    """Return the numbers of whole hosts that a stage may have, in increasing order.

    On many hosts these are powers of two, for pipelines of unequal stages, and N/k for pipelines of k equal stages.
    """
    if num_hosts <= ANY_NUMBER_OF_HOSTS:
        return list(range(1, num_hosts + 1))
    nearly_equal = {-(-num_hosts // k) for k in range(1, _UNEVEN_STAGES + 1)}
    nearly_equal |= {num_hosts // k for k in range(1, _UNEVEN_STAGES + 1)}
    equal = {num_hosts // k for k in range(1, _EVEN_STAGES + 1) if num_hosts % k == 0}
    return sorted(nearly_equal | equal | set(_powers_of_two(num_hosts)))


def _powers_of_two(limit: int) -> list[int]:
    return [2**exponent for exponent in range(limit.bit_length())]


def logical_shapes(num_hosts: int, devices_per_host: int) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the logical meshes over a submesh: one axis, or two axes of at least two devices each."""
    _check_cluster(num_hosts, devices_per_host)
    num_devices = num_hosts * devices_per_host
    return ((num_devices,), *_pairs(num_devices))


def _pairs(number: int) -> list[tuple[int, int]]:
    """Return the (a, b) with a*b = number and a, b > 1, by increasing a."""
    return [(a, number // a) for a in range(2, number) if number % a == 0]


def place_in_groups(
    kinds: Sequence[SubmeshKind], hosts_of_groups: Sequence[int], devices_per_host: int
) -> tuple[Submesh, ...]:
    """Return submeshes of the given kinds, in the given order, each in its group, that cover every device once.

    Raises PlanError if they cannot tile the groups.
    """
    # A stage on the whole cluster spans all groups, so it must be the only stage.
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
    """Return submeshes of the given (hosts, devices per host), in the given order, that cover every device once.

    Submeshes of equal size are placed in the given order. Raises PlanError if they cannot tile the cluster.
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
    # Any arrangement of the parts will do: a part lies within one host wherever it is.
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
    """Return the placement of the device groups along `axes` on hosts, and on domains of `hosts_per_domain` hosts.

    Raises PlanError if the numbers of devices of the mesh and the submesh differ, or the mesh lacks one of the axes.
    """
    if logical_mesh.num_devices != submesh.num_devices:
        raise PlanError(
            f"The logical mesh ({logical_mesh}) has {logical_mesh.num_devices} devices, but its submesh has"
            f" {submesh.num_devices}: the sizes of its axes must multiply to that number."
        )
    groups = logical_mesh.groups(*axes)
    members = [Counter(at // submesh.devices_per_host for at in group) for group in groups]
    groups_on_host = Counter(host for hosts in members for host in hosts)
    # The group that spans most hosts is the slowest, and of several the one with the fewest members on a host.
    widest = max(members, key=lambda hosts: (len(hosts), -max(hosts.values())))
    return AxisGroup(
        num_devices=math.prod(map(logical_mesh.size, axes)),
        devices_per_host=max(widest.values()),
        num_concurrent=max(groups_on_host.values()),
        devices_per_domain=_fullest_domain(submesh, widest, hosts_per_domain) if hosts_per_domain > 1 else None,
        # Groups along the same axes are translations of one another, so the first stands for all.
        stride=_stride(groups[0], submesh.devices_per_host),
    )


def _stride(group: Sequence[int], devices_per_host: int) -> int:
    """Return the smallest distance between two members of a group on one host, or 1 if no host has two."""
    apart = (b - a for a, b in pairwise(sorted(group)) if a // devices_per_host == b // devices_per_host)
    return min(apart, default=1)


def _fullest_domain(submesh: Submesh, members: Counter[int], hosts_per_domain: int) -> int:
    """Return the largest number of members in one domain, given the number of members by host of the submesh."""
    # Only submeshes of whole hosts have `devices_per_host` devices on each host; any other one is on a single host, and
    # so in a single domain, whatever its number.
    first_host = submesh.first_device // submesh.devices_per_host if submesh.num_hosts > 1 else 0
    domains = Counter[int]()
    for host, count in members.items():
        domains[(first_host + host) // hosts_per_domain] += count
    return max(domains.values())


def _check_cluster(num_hosts: int, devices_per_host: int) -> None:
    if num_hosts < 1 or devices_per_host < 1:
        raise PlanError(f"{num_hosts}×{devices_per_host} devices were given, but at least 1×1 are needed.")


def _pack(sizes: Sequence[int], num_hosts: int, devices_per_host: int) -> list[int] | None:
    """Return the host of each part so that every host is full, or None if no packing exists; `sizes` are decreasing.

    A depth-first search that tries the first host first: it needs no backtracking if each size divides the next larger.
    """
    return _packed(sizes, (devices_per_host,) * num_hosts, set())


def _packed(sizes: Sequence[int], room: tuple[int, ...], failed: set[tuple[int, tuple[int, ...]]]) -> list[int] | None:
    """Pack into hosts with `room` free devices; `failed` holds the (number of sizes left, sorted room) without packing.

    A host with as much room as an earlier one is skipped, because the two are interchangeable.
    """
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
