"""Describe a cluster: hosts with devices, one link inside a host and one between hosts.

    num_devices = num_hosts * devices_per_host        (Cluster.num_devices)

Three features are optional. Hosts may have memory that devices reach over a link of their own (`host_memory`), where
plans may store what a device does not need for a while. Hosts may form domains that a faster network joins (an NVLink
domain of many trays, a TPU slice). Hosts may differ: `groups` then describes them, the fields of the cluster hold the
slowest values of all groups, and `Cluster.at` returns the cluster that a range of its devices sees.

`load_cluster` reads the descriptions that ship in `clusters/*.json` (each value with its source) or a file of the same
form. `with_memory`, `with_bandwidth` and `with_times_the_hosts` derive hypothetical clusters from one; where hosts
differ, the change applies to all host groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from html import escape
from pathlib import Path
from typing import cast

from cost_models.catalogue import (
    check_keys,
    device_from_json,
    device_sources,
    host_memory_from_json,
    link_from_json,
    link_sources,
    read_file,
    read_shipped,
    require_object,
    without_comments,
)
from cost_models.catalogue import known_clusters as known_clusters
from cost_models.checks import ClusterError, JsonObject, require_count
from cost_models.hardware import Device, HostMemory, Link

#: Algorithms that a collective library may implement (see `schemes`).
ALGORITHMS = ("ring", "tree", "double_tree", "halving_doubling", "hierarchical")
MOST_DEVICES = 2**17
"""Largest number of devices of a cluster; larger numbers are almost certainly mistakes in the description."""

_LINKS = ("intra_host", "intra_domain", "inter_host")
_LEFT_OUT_AT_DEFAULT = ("hosts_per_domain", "intra_domain", "algorithms", "groups", "host_memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostGroup:
    """Equal hosts of a cluster whose hosts differ.

    Attributes:
        num_hosts: number of hosts in the group.
        device: description of each of their devices.
        intra_host: link between devices of one host.
        inter_host: link between hosts of the group; None for the link of the cluster.
    """

    num_hosts: int
    device: Device
    intra_host: Link
    inter_host: Link | None = None

    def __post_init__(self) -> None:
        advice = "describe at least one host"
        require_count("HostGroup.num_hosts", self.num_hosts, advice=advice, error=ClusterError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A cluster of hosts, each with the same number of devices.

    Attributes:
        name: display name.
        device: description of each device (where devices differ, the slowest rates and the least memory).
        num_hosts, devices_per_host: counts of at least 1.
        intra_host: link between devices of a host; its bandwidth is per device and direction.
        inter_host: link between hosts; its bandwidth is per host and direction, shared by the devices of the host that
            communicate at once.
        shared_processor: whether the devices of a host are virtual and run on one processor (CPU virtual devices). The
            rates of `device` and `intra_host` then describe the whole processor, and the work and the traffic of
            different devices add up in time instead of overlapping.
        device_share: fraction of a shared processor that one device alone can use, above 0 and at most 1: the program
            of one device may run on fewer cores than the processor has.
        hosts_per_domain: number of hosts that a faster network than `inter_host` joins: the trays of an NVLink domain,
            the hosts of a TPU slice.
        intra_domain: link between hosts of one domain, with bandwidth per host as for `inter_host`; None if
            `intra_host` spans the whole domain.
        algorithms: algorithms that the collective library implements, of "ring", "tree", "double_tree",
            "halving_doubling" and "hierarchical" (level by level).
        groups: groups of equal hosts in device order, where hosts differ; () where all are equal.
        host_memory: the memory of each host that its devices can use; None if none is known, so that plans use none.

    Raises:
        ClusterError: a count below 1, a share outside its range, an unknown algorithm, groups of another number of
            hosts (the device and the links check themselves).
    """

    name: str
    device: Device
    num_hosts: int
    devices_per_host: int
    intra_host: Link
    inter_host: Link
    shared_processor: bool = False
    device_share: float = 1.0
    hosts_per_domain: int = 1
    intra_domain: Link | None = None
    algorithms: tuple[str, ...] = ALGORITHMS
    groups: tuple[HostGroup, ...] = ()
    host_memory: HostMemory | None = None

    def __post_init__(self) -> None:
        for what in ("num_hosts", "devices_per_host", "hosts_per_domain"):
            advice = "describe at least one host with one device"
            require_count(f"Cluster.{what}", getattr(self, what), advice=advice, error=ClusterError)
        if self.num_devices > MOST_DEVICES:
            raise ClusterError(
                f"The cluster has {self.num_devices} devices, of at most {MOST_DEVICES}: describe a part of it."
            )
        # JSON may hold anything here, and most strings would count as true.
        if self.shared_processor not in (True, False):
            raise ClusterError(f"Cluster.shared_processor is {self.shared_processor!r}, but true or false is needed.")
        if not 0 < self.device_share <= 1:
            raise ClusterError(
                f"Cluster.device_share is {self.device_share!r}, but a part above 0, up to 1, is needed."
            )
        # JSON gives a list, with which a cluster could not be hashed.
        object.__setattr__(self, "algorithms", tuple(self.algorithms))
        unknown = sorted(set(self.algorithms) - set(ALGORITHMS))
        if unknown or not self.algorithms:
            raise ClusterError(
                f"Cluster.algorithms is {self.algorithms!r}, but some of {', '.join(ALGORITHMS)} are needed: name what "
                "the library of this cluster has, or leave it out for all of them."
            )
        of_groups = sum(group.num_hosts for group in self.groups)
        if self.groups and of_groups != self.num_hosts:
            raise ClusterError(
                f"The cluster {self.name!r} has {self.num_hosts} hosts, but its groups have {of_groups}: change "
                "num_hosts of the groups."
            )

    def __repr__(self) -> str:
        """Return one line; `to_json` has all values."""
        device, other = self.device.name, f", {len(self.groups)} kinds of hosts" if self.groups else ""
        size = f"{self.num_hosts} × {self.devices_per_host}"
        return f"<Cluster {self.name!r}: {size} {device}{other}>"

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the devices, and their links."""
        rows = "".join(f"<tr><td>{escape(name)}</td><td>{escape(text)}</td></tr>" for name, text in self.hardware())
        title = f"{self.name}: {self.num_hosts} × {self.devices_per_host} devices"
        return f"<table><caption>{escape(title)}</caption><tbody>{rows}</tbody></table>"

    def hardware(self) -> tuple[tuple[str, str], ...]:
        """Return the devices and the links in words, each with its name and its key numbers."""
        listed: list[tuple[str, str]] = []
        first = 0
        for group in self.groups:
            hosts = f"hosts {first}–{first + group.num_hosts - 1}" if group.num_hosts > 1 else f"host {first}"
            listed.append((hosts, f"{group.device.words}; inside a host {group.intra_host.words}"))
            first += group.num_hosts
        if not self.groups:
            listed += [("device", self.device.words), ("inside a host", self.intra_host.words)]
        if self.host_memory is not None:
            listed.append(("memory of a host", self.host_memory.words))
        if self.intra_domain is not None:
            listed.append(("in a domain", f"{self.intra_domain.words}, {self.hosts_per_domain} hosts"))
        if self.num_hosts > 1:
            listed.append(("between hosts", f"{self.inter_host.words}, of a whole host"))
        return tuple(listed)

    @property
    def num_devices(self) -> int:
        """Number of devices of all hosts."""
        return self.num_hosts * self.devices_per_host

    @property
    def reduces_in_place(self) -> bool:
        """Whether an all_reduce overwrites its operand, and does not need memory for its result.

        On GPUs XLA lets the two share a buffer, as NCCL reduces in place. Its CPU backend, which runs virtual devices,
        allocates results of their own (`python -m benchmarks.memory`). TPUs are taken to be like GPUs.
        """
        return not self.shared_processor

    @property
    def fuses_siblings(self) -> bool:
        """Whether one kernel writes several results, so that kernels that read the same arrays become one.

        XLA's CPU backend, which runs virtual devices, has kernels of one result. A costly value that two of them read
        is written for both.
        """
        return not self.shared_processor

    @property
    def instructions_per_byte(self) -> float:
        """The instructions that a kernel rather repeats for an element than that another one stores it, per byte.

        XLA:GPU takes what takes less time (priority fusion): a unit for float32 runs an instruction in the time of two
        operations, and what is stored is also read. Its other backends store what two kernels need and what takes many
        instructions, such as an exponential.
        """
        return self.device.peaks["float32"] / self.device.memory_bandwidth if self.runs_siblings_at_once else 0.0

    @property
    def runs_siblings_at_once(self) -> bool:
        """Whether kernels that read the same array are one that runs when all of them can, and overwrites nothing.

        XLA's compiler for GPUs does so. Whether the one for TPUs does has not been read in its programs.
        """
        return not (self.shared_processor or self.device.fuses_into_products)

    @property
    def breadth_first(self) -> bool:
        """Whether kernels run in the order in which their operands become available, whatever waits for them.

        XLA's CPU backend, which runs virtual devices, orders programs so that what can run at the same time follows
        each other. On GPUs and TPUs the order of a program is one in which it needs little memory.
        """
        return self.shared_processor

    @property
    def reads_any_layout(self) -> bool:
        """Whether products and reductions read arrays whose dims lie in another order in memory.

        The libraries of XLA's CPU backend, which runs virtual devices, read arrays whose last dim is the innermost.
        What an all_gather joins along another dim than the first is copied into that order.
        """
        return not self.shared_processor

    @property
    def finds_maxima_in_kernels(self) -> bool:
        """Whether the gradient of max pooling takes one kernel that finds each maximum again.

        TPUs have that kernel, whose compiler is the one that `Device.fuses_into_products`. Elsewhere XLA searches the
        windows for the largest element together with its indices along each dim, which are arrays, and scatters.
        """
        return self.device.fuses_into_products

    @property
    def skew_seconds(self) -> float:
        """Seconds that a step waits for the last host: the skew of `inter_host` per doubling of the number of hosts.

        Each host reads samples, launches programs and is interrupted at its own times, and every step synchronises
        all hosts. The maximum of N equally distributed delays exceeds their mean by an amount that grows with log N.
        """
        return self.inter_host.skew_seconds * math.log2(self.num_hosts)

    def at(self, first_device: int, num_devices: int) -> Cluster:
        """Return the cluster that `num_devices` devices from `first_device` on see, with their hosts taken as equal.

        The result has the slowest rates, the longest latencies and the least memory of the host groups that the range
        spans, since a stage that spans them runs at the pace of the slowest. A cluster of equal hosts is returned as
        it is.

        Raises:
            ClusterError: the range is not within the cluster.
        """
        if not (first_device >= 0 and num_devices >= 1 and first_device + num_devices <= self.num_devices):
            raise ClusterError(
                f"{num_devices} devices from {first_device} on were asked for, but the cluster {self.name!r} has "
                f"{self.num_devices}: give a range within them."
            )
        if not self.groups:
            return self
        # Groups are consecutive hosts in device order, so that a range of devices meets a range of groups.
        first_host = first_device // self.devices_per_host
        last_host = (first_device + num_devices - 1) // self.devices_per_host
        found, start = list[HostGroup](), 0
        for group in self.groups:
            if start <= last_host and first_host < start + group.num_hosts:
                found.append(group)
            start += group.num_hosts
        # Between groups only the link of the cluster exists.
        inter_host = found[0].inter_host if len(found) == 1 else None
        return replace(
            self,
            device=slowest_device([group.device for group in found]),
            intra_host=slowest_link([group.intra_host for group in found]),
            inter_host=inter_host or self.inter_host,
            # Within the range, all hosts are taken as equal.
            groups=(),
        )

    def part(self, first_device: int, num_devices: int) -> Cluster:
        """Return these devices as a cluster of their own: whole hosts, or devices of one host.

        Raises:
            ClusterError: the range is not within the cluster, or not of that form.
        """
        seen, per_host = self.at(first_device, num_devices), min(num_devices, self.devices_per_host)
        within = first_device % self.devices_per_host + per_host <= self.devices_per_host
        if num_devices % per_host or not within:
            raise ClusterError(
                f"{num_devices} devices from {first_device} on are no part of the cluster {self.name!r}: give whole "
                f"hosts of {self.devices_per_host} devices, or devices of one host."
            )
        return replace(seen, num_hosts=num_devices // per_host, devices_per_host=per_host)

    def to_json(self) -> JsonObject:
        """Return a dict of JSON values from which `from_json` restores the cluster."""
        data: JsonObject = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in _LEFT_OUT_AT_DEFAULT and value == field.default:
                continue
            data[field.name] = _to_json(value)
        if self.groups:
            # These values follow from the groups, and reading refuses them next to groups.
            for key in ("device", "num_hosts", "intra_host"):
                del data[key]
        return data

    @classmethod
    def from_json(cls, data: JsonObject) -> Cluster:
        """Build a cluster from the form of `to_json` or of a file in `clusters/`; "sources" and "notes" are ignored.

        Raises:
            ClusterError: a key is missing or unknown, a name is unknown, or a value is invalid.
        """
        try:
            return cls._from_values(without_comments(require_object("The cluster", data)))
        # A ClusterError is a ValueError too, but its message is more precise than the one below.
        except ClusterError:
            raise
        # Files are not trusted: a value of a wrong type can fail anywhere in the checks of devices and links.
        except (TypeError, ValueError, AttributeError, KeyError, OverflowError) as error:
            raise ClusterError(
                f"The cluster holds a value of another kind than it should ({error}): see Cluster.to_json()."
            ) from error

    @classmethod
    def _from_values(cls, values: JsonObject) -> Cluster:
        mixed = bool(values.get("groups"))
        check_keys("The cluster", values, cls, optional=("device", "num_hosts", "intra_host") if mixed else ())
        for key in _LINKS:
            if values.get(key) is not None:
                values[key] = link_from_json(values[key], f"{key!r} of the cluster {values['name']!r}")
        if values.get("host_memory") is not None:
            where = f"'host_memory' of the cluster {values['name']!r}"
            values["host_memory"] = host_memory_from_json(values["host_memory"], where)
        if mixed:
            return cls(**{**values, **_mixed(values)})
        values["device"] = device_from_json(values["device"], f"'device' of the cluster {values['name']!r}")
        values["groups"] = ()
        return cls(**values)


def slowest_device(devices: Sequence[Device]) -> Device:
    """Return a device with the slowest rates, the longest times and the least memory of `devices`.

    Units, tiles and lanes are taken from the device with the lowest 16-bit rate.
    """
    base = min(devices, key=lambda device: device.peak("bfloat16"))
    if all(device == base for device in devices):
        return base
    tightest = min(devices, key=lambda device: device.usable_bytes)
    return replace(
        base,
        name=" | ".join(sorted({device.name for device in devices})),
        memory_bytes=tightest.memory_bytes,
        memory_reserve=tightest.memory_reserve,
        default_memory_fraction=tightest.default_memory_fraction,
        fuses_into_products=all(device.fuses_into_products for device in devices),
        memory_bandwidth=min(device.memory_bandwidth for device in devices),
        # The entry "float32" is the rate of the vector units; as a matrix format float32 would be read as TF32.
        peak_flops={
            dtype: min(device.peak(dtype, matrix=dtype != "float32") for device in devices) for dtype in base.peaks
        },
        launch_seconds=max(device.launch_seconds for device in devices),
        dispatch_seconds=max(device.dispatch_seconds for device in devices),
        matrix_efficiency={
            dtype: min(device.efficiencies[device.format(dtype, matrix=dtype != "float32")] for device in devices)
            for dtype in base.peaks
        },
        convolution_efficiency=min(device.convolution_efficiency for device in devices),
        attention_efficiency=min(device.attention_efficiency for device in devices),
        # None means equal to `attention_efficiency`, which `with_ported_attention` resolves.
        ported_attention_efficiency=min(device.with_ported_attention.attention_efficiency for device in devices),
        memory_efficiency=min(device.memory_efficiency for device in devices),
        contention=max(device.contention for device in devices),
    )


def slowest_link(links: Sequence[Link]) -> Link:
    """Return the link with the lowest rate, given the longest latency, ramp and skew of all links."""
    # The slowest link sets the pace: a ring waits for its slowest edge.
    base = min(links, key=lambda link: link.bytes_per_second)
    return replace(
        base,
        latency_seconds=max(link.latency_seconds for link in links),
        ramp_seconds=max(link.ramp_seconds for link in links),
        skew_seconds=max(link.skew_seconds for link in links),
        in_network_reduction=all(link.in_network_reduction for link in links),
    )


def load_cluster(name_or_path: str, *, num_hosts: int | None = None) -> Cluster:
    """Load a cluster by name ("p3.16xlarge", case-insensitive) or from a JSON file of the same form.

    Args:
        name_or_path: one of `known_clusters()`, or a path that ends in ".json"; ":N" after it is the number of hosts.
        num_hosts: number of hosts; None for the number in the description (1 in all that ship).

    Raises:
        ClusterError: an unknown name (the message lists the valid ones), an unreadable file, an impossible value, two
            numbers of hosts.
    """
    name, colon, hosts = name_or_path.rpartition(":")
    # A colon may also be a part of the path.
    if not colon or hosts.lower().endswith(".json"):
        name = name_or_path
    # `int` would also accept signs, blanks and underscores.
    elif not hosts.isdecimal():
        raise ClusterError(f"{name_or_path!r} is no cluster: write NAME or NAME:HOSTS, for example p3.16xlarge:8.")
    elif num_hosts not in (None, int(hosts)):
        raise ClusterError(
            f"{name_or_path!r} says how many hosts there are, and {num_hosts} were asked for: say it once."
        )
    else:
        num_hosts = int(hosts)
    cluster = Cluster.from_json(_read(name))
    return cluster if num_hosts is None else replace(cluster, num_hosts=num_hosts)


def cluster_sources(name: str) -> dict[str, str]:
    """Return the source of each value of a shipped description, by dotted key; assumptions start with "assumption".

    Values of a device or link that the description refers to by name have the sources of that device or link.
    """
    data = _read(name)
    found = dict[str, str]()
    if isinstance(data.get("device"), str):
        found |= {f"device.{key}": source for key, source in device_sources(data["device"]).items()}
    for part in _LINKS:
        link = data.get(part)
        named = link if isinstance(link, str) else dict(link or {}).get("link")
        if isinstance(named, str):
            found |= {f"{part}.{key}": source for key, source in link_sources(named).items()}
    own = data.get("sources", {})
    return {**found, **(cast("Mapping[str, str]", own) if isinstance(own, Mapping) else {})}


def _read(name_or_path: str) -> JsonObject:
    # All else is taken as a name, whose error message lists the valid ones.
    if name_or_path.lower() not in known_clusters() and name_or_path.lower().endswith(".json"):
        return read_file(Path(name_or_path))
    return read_shipped("clusters", name_or_path)


def _to_json(value: object) -> object:
    if isinstance(value, Link):
        return value.to_json()
    if isinstance(value, HostMemory):
        return {"memory_bytes": value.memory_bytes, "link": value.link.to_json()}
    if isinstance(value, Device):
        data = asdict(value)
        data["peak_flops"] = value.peaks
        data["tiles"] = [list(tile) for tile in value.tiles]
        if not isinstance(value.matrix_efficiency, (int, float)):
            data["matrix_efficiency"] = dict(value.matrix_efficiency)
        return data
    if isinstance(value, HostGroup):
        parts = {field.name: getattr(value, field.name) for field in fields(value)}
        return {key: _to_json(part) for key, part in parts.items() if part is not None}
    if isinstance(value, tuple):
        return [_to_json(each) for each in cast("tuple[object, ...]", value)]
    return value


def _mixed(values: JsonObject) -> JsonObject:
    """Parse the groups of a cluster whose hosts differ, and derive the fields that hold for all groups."""
    name = values["name"]
    given = values["groups"]
    if not isinstance(given, (list, tuple)):
        raise ClusterError(f"'groups' of the cluster {name!r} is {given!r}, but a list of JSON objects is needed.")
    stray = sorted({"device", "num_hosts", "intra_host"} & set(values))
    if stray:
        raise ClusterError(
            f"The cluster {name!r} has groups and {', '.join(stray)} beside them: move these into the groups, which "
            "say what each host is."
        )
    groups = list[HostGroup]()
    for number, each in enumerate(cast("Sequence[object]", given)):
        where = f"groups[{number}] of the cluster {name!r}"
        parts = without_comments(require_object(where, each))
        check_keys(where, parts, HostGroup)
        for key in ("intra_host", "inter_host"):
            if parts.get(key) is not None:
                parts[key] = link_from_json(parts[key], f"{key!r} of {where}")
        parts["device"] = device_from_json(parts["device"], f"'device' of {where}")
        groups.append(HostGroup(**parts))
    return {
        "groups": tuple(groups),
        "num_hosts": sum(group.num_hosts for group in groups),
        "device": slowest_device([group.device for group in groups]),
        "intra_host": slowest_link([group.intra_host for group in groups]),
    }


def with_memory(cluster: Cluster, memory_bytes: float) -> Cluster:
    """Return the cluster with so many bytes of usable memory per device, of which none are kept for the allocator.

    Raises `ClusterError` unless `memory_bytes` is above 0.
    """
    return _with_devices(cluster, lambda device: _with_usable(device, memory_bytes))


def with_memory_limit(cluster: Cluster, memory_bytes: float) -> Cluster:
    """Return the cluster whose plans use at most `memory_bytes` of each device, and no more than is usable without it.

    Raises `ClusterError` unless `memory_bytes` is above 0.
    """

    def limited(device: Device) -> Device:
        return device if device.usable_bytes <= memory_bytes else _with_usable(device, memory_bytes)

    return _with_devices(cluster, limited)


def with_times_the_hosts(cluster: Cluster, times: int) -> Cluster:
    """Return the cluster with `times` as many hosts, in each host group."""
    groups = tuple(replace(group, num_hosts=times * group.num_hosts) for group in cluster.groups)
    return replace(cluster, num_hosts=times * cluster.num_hosts, groups=groups)


def with_bandwidth(cluster: Cluster, scale: float) -> Cluster:
    """Return the cluster with the bandwidth of all links multiplied by `scale`; latencies are unchanged.

    Raises:
        ClusterError: a scale that is not above 0.
    """
    # Not `scale <= 0`, which would let NaN pass.
    if not scale > 0:
        raise ClusterError(f"A bandwidth scale of {scale!r} was given; it must be above 0: 0.5 for half as fast links.")

    def changed(link: Link) -> Link:
        return replace(link, bandwidth_bytes_per_second=scale * link.bandwidth_bytes_per_second)

    groups = tuple(
        replace(
            group,
            intra_host=changed(group.intra_host),
            inter_host=None if group.inter_host is None else changed(group.inter_host),
        )
        for group in cluster.groups
    )
    return replace(
        cluster,
        intra_host=changed(cluster.intra_host),
        inter_host=changed(cluster.inter_host),
        intra_domain=None if cluster.intra_domain is None else changed(cluster.intra_domain),
        groups=groups,
        host_memory=cluster.host_memory and replace(cluster.host_memory, link=changed(cluster.host_memory.link)),
    )


def _with_usable(device: Device, usable_bytes: float) -> Device:
    return replace(device, memory_bytes=float(usable_bytes), memory_reserve=0.0, default_memory_fraction=1.0)


def _with_devices(cluster: Cluster, changed: Callable[[Device], Device]) -> Cluster:
    # The device of the cluster stands for the slowest of its groups, so it changes with them.
    groups = tuple(replace(group, device=changed(group.device)) for group in cluster.groups)
    return replace(cluster, device=changed(cluster.device), groups=groups)
