"""The choices of the search: kinds of submesh, logical meshes over them, and which layers may go on which.

A logical mesh has one axis that does anything; or an axis that splits the batch (and may split state) and one inside a
host that splits everything else; or, of several hosts, one that splits the batch between them and leaves state whole on
each, next to these two inside a host. What crosses hosts in every layer is too slow to be worth its time in the search.

The devices of a mixed cluster count by the rate of their matrix units when layers are shared out.

Where stages are to be alike, `ways` enumerates the sets of stages that a plan may consist of.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from itertools import product
from math import prod
from types import EllipsisType
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from alpa_lite.sharding.meshes import LogicalMesh, Submesh, SubmeshKind, cluster_kinds, first_submesh, logical_shapes
from alpa_lite.step.recomputation import Remat
from cost_models.cluster import Cluster

BATCH_AXES = ("replica", "data")
"""The axes of the search's logical meshes that split the batch."""

IMBALANCE = 4.0
"""A stage may have at most this many times its devices' share of the work, and at least the inverse of its square."""


Scalar = TypeVar("Scalar", bound=np.generic)

StageEquality = Literal["layers", "devices"]
"""The quantity that all stages have equally much of."""


@dataclass(frozen=True, kw_only=True)
class Space:
    """Submeshes and logical meshes for the stages of a cluster.

    kinds    kinds of submesh
    meshes   the logical meshes over each kind
    fair     whether a stage must have about the share of the devices that its layers have of the work
    """

    cluster: Cluster
    kinds: tuple[SubmeshKind, ...]
    meshes: tuple[tuple[LogicalMesh, ...], ...]
    fair: bool = True

    @staticmethod
    def of(cluster: Cluster) -> Space:
        """Return all submeshes and logical meshes that make sense on a cluster."""
        kinds = cluster_kinds(hosts_of_groups(cluster), cluster.devices_per_host)
        return Space(cluster=cluster, kinds=kinds, meshes=tuple(_meshes(kind, cluster) for kind in kinds))

    def only(self, num_devices: int) -> Space:
        """Return the part of the space with submeshes of so many devices."""
        return self.where([devices == num_devices for devices in self.devices])

    @property
    def equal_stages(self) -> list[int]:
        """The numbers of equal submeshes into which the cluster can be cut, ascending."""
        return sorted({self.cluster.num_devices // n for n in self.devices if self.cluster.num_devices % n == 0})

    def where(self, kept: Iterable[bool]) -> Space:
        """Return the part of the space with the kinds for which `kept` is true."""
        numbers = [i for i, keep in enumerate(kept) if keep]
        kinds, meshes = (tuple(part[i] for i in numbers) for part in (self.kinds, self.meshes))
        return replace(self, kinds=kinds, meshes=meshes)

    def with_axes(self, names: Collection[str]) -> Space:
        """Return the part of the space with logical meshes that have all these axes; kinds without any are left out."""
        meshes = tuple(tuple(m for m in of_kind if set(names) <= {*m.axis_names}) for of_kind in self.meshes)
        return replace(self, meshes=meshes).where(map(bool, meshes))

    @cached_property
    def devices(self) -> tuple[int, ...]:
        """The number of devices of each kind."""
        return tuple(kind.num_devices for kind in self.kinds)

    @property
    def groups(self) -> tuple[int | None, ...]:
        """The group of devices of each kind."""
        return tuple(kind.group for kind in self.kinds)

    @property
    def devices_of_groups(self) -> tuple[int, ...]:
        """The number of devices of each group."""
        return tuple(hosts * self.cluster.devices_per_host for hosts in hosts_of_groups(self.cluster))

    @cached_property
    def most_shapes(self) -> int:
        """The largest number of logical meshes of a kind."""
        return max(map(len, self.meshes))

    @cached_property
    def room_bytes(self) -> NDArray[np.float64]:
        """[kinds]: bytes that a plan may use of a device of each kind."""
        return np.array([self._seen_from(kind).device.usable_bytes for kind in range(len(self.kinds))])

    @cached_property
    def shares(self) -> NDArray[np.float64]:
        """[kinds]: each kind's share of the cluster's rate of matrix products."""
        rates = np.array([n * self._rate(k) for k, n in enumerate(self.devices)])
        whole = 0.0
        for group, devices in enumerate(self.devices_of_groups):
            one = first_submesh(
                SubmeshKind(num_hosts=1, devices_per_host=1, group=group),
                hosts_of_groups(self.cluster),
                self.cluster.devices_per_host,
            )
            whole += devices * _matrix_rate(self.cluster.at(one.first_device, 1))
        # Kinds that span groups run at the pace of the slowest device, but all devices are always the whole share.
        return np.where(np.array(self.devices) == self.cluster.num_devices, 1.0, rates / whole)

    def _rate(self, kind: int) -> float:
        return _matrix_rate(self._seen_from(kind))

    def _seen_from(self, kind: int) -> Cluster:
        submesh = self.submesh(kind)
        return self.cluster.at(submesh.first_device, submesh.num_devices)

    def submesh(self, kind: int) -> Submesh:
        """Return a submesh of this kind."""
        return first_submesh(self.kinds[kind], hosts_of_groups(self.cluster), self.cluster.devices_per_host)

    def mesh(self, kind: int, shape: int) -> LogicalMesh:
        """Return a logical mesh over this kind."""
        return self.meshes[kind][shape]

    @cached_property
    def stand_ins(self) -> NDArray[np.intp]:
        """[kinds, shapes]: for each logical mesh the number of the one whose survey is valid for both.

        It is the mesh itself, or for one that leaves state whole on each host the one that may split it between hosts.
        """
        # Without a limit of memory, splitting state between hosts or not takes about the same time.
        found = np.tile(np.arange(self.most_shapes), (len(self.kinds), 1))
        for k, meshes in enumerate(self.meshes):
            shapes = {mesh.shape: c for c, mesh in enumerate(meshes) if "replica" not in mesh.axis_names}
            for c, mesh in enumerate(meshes):
                if "replica" in mesh.axis_names:
                    replicas, data, *model = mesh.shape
                    found[k, c] = shapes.get((replicas * data, *model), c)
        return found

    def divides(self, microbatch_size: int | None) -> NDArray[np.bool_]:
        """Return [kinds, shapes]: whether the batch axes of a mesh divide a micro-batch; False without a mesh."""
        possible = np.zeros((len(self.kinds), self.most_shapes), dtype=np.bool_)
        for k, meshes in enumerate(self.meshes):
            for c, mesh in enumerate(meshes):
                # A mesh of one axis may leave the batch whole, and so fits every micro-batch.
                ways = prod(mesh.axis_sizes.get(axis, 1) for axis in BATCH_AXES)
                possible[k, c] = ways == 1 or (microbatch_size is not None and microbatch_size % ways == 0)
        return possible

    def in_order(self, num_layers: int) -> NDArray[np.bool_]:
        """Return [layers, layers, kinds]: where the last layer of a stage is not before the first."""
        found = np.triu(np.ones((num_layers, num_layers), dtype=np.bool_))
        return np.repeat(found[..., None], len(self.kinds), axis=2)

    def worthwhile(self, shares: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Return [layers, layers, kinds]: whether a stage of these layers makes sense, by the shares of the work.

        All devices go with all layers. Other stages must have about their share of the devices, if the space is `fair`.
        """
        count, ends = shares.size, np.concatenate([[0.0], np.cumsum(shares)])
        of_range = ends[None, 1:] - ends[:-1, None]
        in_order = self.in_order(count)[..., 0]
        found = np.zeros((count, count, len(self.kinds)), dtype=np.bool_)
        for k, devices in enumerate(self.devices):
            share = self.shares[k]
            # Virtual devices take turns on one processor, so that shares of devices mean nothing.
            # Too much work makes all other stages wait, too little leaves only the stage itself idle.
            fair = (share / IMBALANCE**2 <= of_range) & (of_range <= share * IMBALANCE)
            found[:, :, k] = in_order & (fair | self.cluster.shared_processor | (not self.fair))
            # A stage with all layers uses all devices, and the other way round.
            found[0, count - 1, k] = False
            if devices == self.cluster.num_devices:
                found[:, :, k] = False
                found[0, count - 1, k] = True
        return found


def hosts_of_groups(cluster: Cluster) -> tuple[int, ...]:
    """Return the number of hosts of each group of equal hosts."""
    return tuple(group.num_hosts for group in cluster.groups) or (cluster.num_hosts,)


def _matrix_rate(cluster: Cluster) -> float:
    device = cluster.device
    # Only ratios between devices matter, so that one dtype stands for all.
    return device.peak("bfloat16") * device.efficiencies[device.format("bfloat16")]


def meshes_of(submesh: Submesh, cluster: Cluster) -> tuple[LogicalMesh, ...]:
    """Return the logical meshes over a submesh that the search considers."""
    shape = SubmeshKind(num_hosts=submesh.num_hosts, devices_per_host=submesh.devices_per_host)
    return _meshes(shape, cluster)


def _meshes(kind: SubmeshKind, cluster: Cluster) -> tuple[LogicalMesh, ...]:
    """Return the logical meshes over a kind of submesh; the last of several axes stays inside a host."""
    hosts, per_host = kind.num_hosts, kind.devices_per_host
    one, *two = logical_shapes(hosts, per_host)
    found = [LogicalMesh(axis_names=("x",), shape=one)]
    # The last axis splits inside layers, whose collectives are too slow between hosts.
    inside = [shape for shape in two if shape[-1] <= cluster.devices_per_host]
    found += [LogicalMesh(axis_names=("data", "model"), shape=shape) for shape in inside]
    if hosts > 1:
        # With model = per_host there would be no axis left to split state inside a host.
        found += [_over_hosts(hosts, per_host, model) for model in range(1, per_host) if per_host % model == 0]
    return tuple(found)


def _over_hosts(hosts: int, per_host: int, model: int) -> LogicalMesh:
    """Return the logical mesh with whole copies of state on each host, split inside it."""
    sizes = {"replica": hosts, "data": per_host // model, "model": model}
    axes = {name: size for name, size in sizes.items() if size > 1}
    return LogicalMesh(axis_names=tuple(axes), shape=tuple(axes.values()))


def ways(
    space: Space, num_layers: int, equal: Collection[StageEquality], *, one_mesh: bool, repeats: int
) -> Iterator[NDArray[np.bool_]]:
    """Yield one mask per way in which stages can be alike: the stages that a plan may consist of then.

    Masks broadcast to [layers, layers, kinds, configurations]. `equal`: the quantities that stages have equally much
    of. `one_mesh`: whether all have one logical mesh. `repeats`: how many times configurations repeat the logical
    meshes of a kind.
    """
    found: list[list[NDArray[np.bool_]]] = []
    if one_mesh:
        # Shapes change fastest in the numbers of configurations (`Configurations`).
        found.append([np.tile(mask, repeats) for mask in _in_one_mesh(space)])
    if "devices" in equal:
        devices = np.array(space.devices)
        found.append([(devices == n)[:, None] for n in dict.fromkeys(space.devices)])
    if "layers" in equal:
        number = np.arange(num_layers)
        length = (number[None, :] - number[:, None] + 1)[..., None, None]
        found.append([length == n for n in range(1, num_layers + 1) if num_layers % n == 0])
    # Without any condition this yields one mask, under which everything is allowed.
    for masks in product(*found):
        yield reduce(np.logical_and, masks, np.ones(1, dtype=np.bool_))


def equal_parts(space: Space, num_layers: int, num_stages: int | None = None) -> NDArray[np.bool_]:
    """Return [layers, layers, kinds]: which stages can be one of several equal stages of a plan, or of `num_stages`."""
    found = np.zeros((num_layers, num_layers, len(space.kinds)), dtype=np.bool_)
    for kind, devices in enumerate(space.devices):
        count, left = divmod(space.cluster.num_devices, devices)
        if left == 0 and num_layers % count == 0 and num_stages in (None, count):
            first = np.arange(0, num_layers, num_layers // count)
            found[first, first + num_layers // count - 1, kind] = True
    return found


def _in_one_mesh(space: Space) -> Iterator[NDArray[np.bool_]]:
    """Yield for each logical mesh a mask [kinds, shapes] of its places."""
    for mesh in dict.fromkeys(mesh for of_kind in space.meshes for mesh in of_kind):
        found = np.zeros((len(space.kinds), space.most_shapes), dtype=np.bool_)
        for kind, of_kind in enumerate(space.meshes):
            found[kind, : len(of_kind)] = [each == mesh for each in of_kind]
        yield found


@dataclass(frozen=True, slots=True)
class StageConfiguration:
    """The logical mesh, policy and micro-batches in flight with which a stage runs.

    Attributes:
        shape: number of its logical mesh, counted among the meshes over its kind of submesh.
        policy: policy of rematerialisation.
        in_flight: number of micro-batches in flight for which its sharding leaves memory.
    """

    shape: int
    policy: Remat
    in_flight: int


@dataclass(frozen=True, slots=True)
class Configurations:
    """The configurations of a stage, as the last axis of the search's arrays numbers them.

    Shapes change fastest, then policies, then the micro-batches in flight. Each number of micro-batches in flight has a
    `block` of the axis.
    """

    num_shapes: int
    policies: tuple[Remat, ...]
    in_flight: tuple[int, ...]

    def __len__(self) -> int:
        return self.width * len(self.in_flight)

    @property
    def width(self) -> int:
        """The number of shapes and policies, which is the size of a block."""
        return self.num_shapes * len(self.policies)

    def __getitem__(self, number: int) -> StageConfiguration:
        """Return the configuration with a number."""
        block, rest = divmod(number, self.width)
        policy, shape = divmod(rest, self.num_shapes)
        return StageConfiguration(shape, self.policies[policy], self.in_flight[block])

    def block(self, number: int) -> tuple[EllipsisType, slice]:
        """Return the index of a block in an array whose last axis numbers configurations."""
        return (..., slice(number * self.width, (number + 1) * self.width))

    def alike(self, number: int) -> slice:
        """Return the index, along the last axis, of a configuration and its like with more micro-batches in flight."""
        return slice(number, None, self.width)

    def repeated(self, of_shapes_and_policies: NDArray[Scalar]) -> NDArray[Scalar]:
        """Return an array whose last axis numbers shapes and policies, repeated for all configurations."""
        return np.tile(of_shapes_and_policies, len(self.in_flight))
