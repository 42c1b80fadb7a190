"""Describe what is priced, independent of any device or network: the work of one device, and collectives of a group.

    w * n = n kernels of the size of w, so flops and bytes grow n times      (Work.__mul__)

The number of kernels is stored next to the totals: a loop of 1000 small matmuls must not be priced as one large matmul.
A product keeps its shape, [count, rows, depth] x [count, depth, columns], because small and oddly shaped ones waste
part of a device; flops = 2 * count * rows * columns * depth of each kernel.

The bytes of a collective are the size of the whole buffer on one device,

    all_reduce        the buffer, the same size before and after
    all_gather        the gathered result
    reduce_scatter    the un-reduced input
    all_to_all        the local buffer
    broadcast         the buffer
    permute, send     what one device sends

so that the ring sends (n-1)/n of `bytes` per device in all_gather, reduce_scatter and all_to_all alike.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from cost_models.checks import CostModelError, require_amount, require_choice, require_count

WorkKind = Literal["matmul", "convolution", "attention", "elementwise"]
# From the type, so that the type checker and the check at run time agree.
WORK_KINDS: tuple[WorkKind, ...] = get_args(WorkKind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """The shape of one matrix product, or of the one that a convolution amounts to, on one device.

    Attributes:
        rows, columns, depth: sizes of the operands, [rows, depth] x [depth, columns].
        count: number of products of this shape in one kernel (batched products).

    Raises:
        CostModelError: a size that is not above 0.
    """

    rows: float
    columns: float
    depth: float
    count: float = 1

    def __post_init__(self) -> None:
        # Checked here because a size of 0 would divide by zero in the tiling of a product, far from its cause.
        for what in ("rows", "columns", "depth", "count"):
            value = getattr(self, what)
            require_amount(f"Product.{what}", value, advice="give the sizes of the local blocks", positive=True)

    @property
    def flops(self) -> float:
        """Floating-point operations; a multiply-add counts 2."""
        return 2 * self.count * self.rows * self.columns * self.depth


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Floating-point operations and memory traffic of equal kernels on one device.

    Attributes:
        flops: floating-point operations, all kernels together; a multiply-add counts 2.
        bytes: bytes read from and written to device memory, all kernels together.
        kind: "matmul" and "convolution" run on matrix units as kernels of their own, "attention" as products inside a
            fused kernel; "elementwise" is everything else (reductions and copies too), which compilers fuse with its
            neighbours.
        dtype: name of the operand type, as numpy and JAX spell it ("float32", "bfloat16", ...).
        num_kernels: number of equal kernels that `flops` and `bytes` total; element-wise work that is fused into
            the kernel of its neighbours has none of its own.
        product: the shape of each kernel, for "matmul" and "convolution"; None where it is unknown.

    Raises:
        CostModelError: a negative or infinite amount, or an unknown kind.
    """

    flops: float = 0
    bytes: float = 0
    kind: WorkKind = "elementwise"
    dtype: str = "float32"
    # A float, since trip counts are: a branch counts as a fraction of a run.
    num_kernels: float = 1
    product: Product | None = None

    def __post_init__(self) -> None:
        require_amount("Work.flops", self.flops, advice="count the floating-point operations")
        require_amount("Work.bytes", self.bytes, advice="count the bytes read and written")
        require_amount("Work.num_kernels", self.num_kernels, advice="count the kernels, or leave it at 1")
        require_choice("Work.kind", self.kind, WORK_KINDS)

    def __mul__(self, count: float) -> Work:
        """Return the work of `count` repetitions (a trip count; 0 for no work)."""
        require_amount("The count that multiplies a Work", count, advice="give the trip count of the loop")
        return replace(self, flops=self.flops * count, bytes=self.bytes * count, num_kernels=self.num_kernels * count)

    __rmul__ = __mul__


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
        # None leaves the domain to `schemes`, which fills domains with neighbouring hosts.
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
        # Rounded up, since a host with fewer members still takes part between hosts.
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
