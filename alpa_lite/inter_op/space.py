"""What the search chooses from: kinds of submesh, logical shapes over them, and which layers may go on which.

Most shapes have one axis that does anything, or an axis that splits the batch and one inside a host that splits
everything else: what crosses hosts in every layer is too slow to be worth its time in the search.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from alpa_lite.graph.phases import StepGraph
from alpa_lite.inter_op.stage_costs import AXIS_NAMES
from alpa_lite.layers import Layers, op_flops
from alpa_lite.mesh import LogicalMesh, Submesh, logical_shapes, submesh_kinds
from cost_models.cluster import Cluster

IMBALANCE = 2.0
"""A stage may have at most this many times its devices' share of the FLOPs, and at least the inverse of its square."""


@dataclass(frozen=True, kw_only=True)
class Space:
    """Submeshes and logical shapes for the stages of a cluster.

    kinds    hosts and devices per host of each kind of submesh
    shapes   of each kind, the logical shapes over it
    """

    cluster: Cluster
    kinds: tuple[tuple[int, int], ...]
    shapes: tuple[tuple[tuple[int, ...], ...], ...]

    @staticmethod
    def of(cluster: Cluster) -> Space:
        """All that makes sense on a cluster."""
        kinds = submesh_kinds(cluster.num_hosts, cluster.devices_per_host)
        shapes = tuple(_shapes(hosts, per_host, cluster.devices_per_host) for hosts, per_host in kinds)
        return Space(cluster=cluster, kinds=kinds, shapes=shapes)

    def only(self, *, whole: bool = False, single: bool = False) -> Space:
        """The same with one kind of submesh: the whole cluster, or one device."""
        wanted = self.cluster.num_devices if whole else 1
        kept = [i for i, devices in enumerate(self.devices) if not (whole or single) or devices == wanted]
        return Space(
            cluster=self.cluster,
            kinds=tuple(self.kinds[i] for i in kept),
            shapes=tuple(self.shapes[i] for i in kept),
        )

    @cached_property
    def devices(self) -> tuple[int, ...]:
        """The number of devices of each kind."""
        return tuple(hosts * per_host for hosts, per_host in self.kinds)

    @cached_property
    def most_shapes(self) -> int:
        """The largest number of shapes of a kind."""
        return max(map(len, self.shapes))

    def submesh(self, kind: int) -> Submesh:
        """A submesh of this kind."""
        return Submesh(first_device=0, num_hosts=self.kinds[kind][0], devices_per_host=self.kinds[kind][1])

    def mesh(self, kind: int, shape: int) -> LogicalMesh:
        """A logical mesh over this kind."""
        sizes = self.shapes[kind][shape]
        return LogicalMesh(axis_names=AXIS_NAMES[len(sizes)], shape=sizes)

    def divides(self, microbatch_size: int | None) -> NDArray[np.bool_]:
        """[kinds, shapes]: whether the batch axis of a shape divides a micro-batch; False where there is no shape."""
        possible = np.zeros((len(self.kinds), self.most_shapes), dtype=np.bool_)
        for k, shapes in enumerate(self.shapes):
            for c, shape in enumerate(shapes):
                batch_axis = shape[0] if len(shape) > 1 else 1
                possible[k, c] = batch_axis == 1 or (microbatch_size is not None and microbatch_size % batch_axis == 0)
        return possible

    def worthwhile(self, shares: NDArray[np.float64]) -> NDArray[np.bool_]:
        """[layers, layers, kinds]: whether a stage of these layers makes sense there, by each layer's share of FLOPs.

        All devices go with all layers; a part of the layers gets about its share of the devices.
        """
        count, ends = shares.size, np.concatenate([[0.0], np.cumsum(shares)])
        of_range = ends[None, 1:] - ends[:-1, None]
        in_order = np.triu(np.ones((count, count), dtype=np.bool_))
        found = np.zeros((count, count, len(self.kinds)), dtype=np.bool_)
        for k, devices in enumerate(self.devices):
            share = devices / self.cluster.num_devices
            fair = (share / IMBALANCE**2 <= of_range) & (of_range <= share * IMBALANCE)
            found[:, :, k] = in_order & (fair | self.cluster.shared_processor)
            found[0, count - 1, k] = False
            if devices == self.cluster.num_devices:
                found[:, :, k] = False
                found[0, count - 1, k] = True
        return found


def _shapes(num_hosts: int, devices_per_host: int, largest_model_axis: int) -> tuple[tuple[int, ...], ...]:
    """The logical shapes over a submesh whose second axis stays inside a host."""
    found = logical_shapes(num_hosts, devices_per_host)
    return tuple(shape for shape in found if len(shape) == 1 or shape[-1] <= largest_model_axis)


def flops_shares(step: StepGraph, layers: Layers) -> NDArray[np.float64]:
    """Each layer's part of the FLOPs of the loop."""
    totals = np.zeros(layers.num_layers)
    for flops, layer, phase in zip(op_flops(step), layers.of_op, step.phases, strict=True):
        if layer is not None and phase.in_loop:
            totals[layer] += flops
    return totals / max(1.0, totals.sum())


def representatives(structures: Sequence[object], shares: NDArray[np.float64]) -> NDArray[np.int64]:
    """For each layer one that stands for it: an equal one where it is one of the few that hold most FLOPs, else near.

    `structures`: equal for layers that are alike.
    """
    weight: dict[object, float] = {}
    for structure, share in zip(structures, shares, strict=True):
        weight[structure] = weight.get(structure, 0.0) + float(share)
    chosen: list[object] = []
    for structure in sorted(weight, key=lambda s: -weight[s])[:MAX_REPRESENTATIVES]:
        if sum(weight[s] for s in chosen) < ENOUGH_FLOPS:
            chosen.append(structure)
    first = {s: structures.index(s) for s in chosen}
    standing = np.array([i for i, s in enumerate(structures) if s in first])
    nearest = [int(standing[np.abs(standing - i).argmin()]) for i in range(len(structures))]
    return np.array([first[structures[n]] for n in nearest])


MAX_REPRESENTATIVES = 4
ENOUGH_FLOPS = 0.6
"""Layers are surveyed until they stand for so much of the FLOPs, at most so many of them."""
