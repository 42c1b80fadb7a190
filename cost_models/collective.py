"""Describe collectives: what a group of devices communicates, independent of any network.

Byte convention: the size of the whole buffer on one device,

    all_reduce        the buffer, the same size before and after
    all_gather        the gathered result
    reduce_scatter    the un-reduced input
    all_to_all        the local buffer
    broadcast         the buffer
    permute, send     what one device sends

so that the ring sends (n-1)/n of `bytes` per device in all_gather, reduce_scatter and all_to_all alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from cost_models.checks import require_amount, require_choice, require_count
from cost_models.errors import CostModelError

CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute", "send", "broadcast"]
COLLECTIVE_KINDS: tuple[CollectiveKind, ...] = get_args(CollectiveKind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The devices that take part in one collective.

    Attributes:
        num_devices: number of members of the group.
        devices_per_host: number of members on one host (on the host with most members, where hosts differ).
        num_concurrent: number of sibling groups per host that communicate at once and share the host's link.
        devices_per_domain: number of members in one domain of hosts (`Cluster.hosts_per_domain`); None if the hosts
            of the group are neighbours, so that as many as fit share a domain.
        stride: distance between consecutive members on a host, in devices; 1 for neighbours
            (`Link.efficiency_by_members`).

    Raises:
        CostModelError: a count below 1, more members on a host than in a domain, or in a domain than members.
    """

    num_devices: int
    devices_per_host: int
    num_concurrent: int = 1
    devices_per_domain: int | None = None
    stride: int = 1

    def __post_init__(self) -> None:
        require_count("Group.num_devices", self.num_devices, advice="count the members of the group")
        require_count("Group.devices_per_host", self.devices_per_host, advice="count the members on one host")
        require_count("Group.num_concurrent", self.num_concurrent, advice="count this group and its siblings")
        require_count("Group.stride", self.stride, advice="1 where the members on a host are neighbours")
        if self.devices_per_host > self.num_devices:
            raise CostModelError(
                f"Group.devices_per_host is {self.devices_per_host}, but the group has only {self.num_devices} "
                "members: count the members of the group that sit on one host, not the devices of the host."
            )
        domain = self.devices_per_domain
        if domain is None:
            return
        require_count("Group.devices_per_domain", domain, advice="count the members in one domain, or leave it out")
        if not self.devices_per_host <= domain <= self.num_devices:
            raise CostModelError(
                f"Group.devices_per_domain is {domain}, but the group has {self.devices_per_host} members on a host "
                f"and {self.num_devices} in all: count the members in one domain, or leave it out."
            )

    @property
    def num_hosts(self) -> int:
        """Number of hosts that the group spans, ceil(num_devices / devices_per_host)."""
        return -(-self.num_devices // self.devices_per_host)


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective of `bytes` over `group`; the module docstring defines which bytes count.

    Raises:
        CostModelError: a negative or infinite size, or an unknown kind.
    """

    kind: CollectiveKind
    bytes: float
    group: Group

    def __post_init__(self) -> None:
        require_choice("Collective.kind", self.kind, COLLECTIVE_KINDS)
        require_amount("Collective.bytes", self.bytes, advice="give the size of the whole buffer on one device")
