"""What each layer takes and holds on one device: the measure of layers against each other, and of what can fit at all.

On n devices a stage of layers i..j that has h micro-batches of b samples in flight at its peak needs at least about

    state + sums + (h - 1) sum of saved + max over l of (saved of layers up to l + working(l)), over n  `Profile.holds`

where what a layer saves per micro-batch and works with grows with b.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from alpa_lite.inter_op.space import Space
from alpa_lite.inter_op.stage_costs import StageCosts
from alpa_lite.intra_op.solve import StageSolution
from alpa_lite.sharding.meshes import LogicalMesh, Submesh

FloatArray = NDArray[np.float64]

MEMORY_SLACK = 1.1
"""By how much more than a device has a stage may seem to need before it is left out."""

SAVES = 1.3
"""A policy of rematerialisation that keeps this many times as much as a faster one is not worth it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Profile:
    """[layers] each, on one device: seconds of both passes and of the update, bytes of state, and of the sums of
    gradients of several micro-batches; per sample the bytes saved by the forward pass; and those worked with beside
    them, with so many `samples` in a micro-batch."""

    loop_seconds: FloatArray
    update_seconds: FloatArray
    state_bytes: FloatArray
    sums_bytes: FloatArray
    saved_bytes: FloatArray
    working_bytes: FloatArray
    samples: float

    @staticmethod
    def of(costs: StageCosts) -> Profile:
        """Each layer solved on one device with all the memory that it needs."""
        size = float(microbatch_size(costs) or 1)
        free = costs.with_pins({})
        layers = [alone_on_a_device(free, layer) for layer in range(costs.layers.num_layers)]
        return Profile(
            loop_seconds=np.array([found.forward_seconds + found.backward_seconds for found in layers]),
            update_seconds=np.array([found.update_seconds for found in layers]),
            state_bytes=np.array([found.state_bytes for found in layers]),
            sums_bytes=np.array([found.accumulator_bytes for found in layers]),
            saved_bytes=np.array([found.activation_bytes for found in layers]) / size,
            working_bytes=np.array([found.temporary_bytes for found in layers]),
            samples=size,
        )

    def beats(self, other: Profile) -> bool:
        """Whether layers under one policy of rematerialisation are faster than under another, and keep hardly more,
        most of them."""
        more = np.median(self.saved_bytes / np.maximum(other.saved_bytes, 1.0))
        return bool(self.loop_seconds.sum() < other.loop_seconds.sum() and more < SAVES)

    def working_with(self, size: float) -> FloatArray:
        """[layers]: the least bytes worked with beside what is saved. What the update works with does not grow."""
        return self.working_bytes * min(1.0, size / self.samples)

    @property
    def num_layers(self) -> int:
        """How many layers."""
        return self.loop_seconds.size

    @property
    def shares(self) -> FloatArray:
        """[layers]: the part of both passes that each layer takes."""
        return self.loop_seconds / max(float(self.loop_seconds.sum()), 1e-30)

    def holds(self, space: Space, size: float, number: int, in_flight: Sequence[int]) -> NDArray[np.int64]:
        """[layers, layers, kinds]: how many of the numbers `in_flight` (which rise) stages have memory for, as far as
        is known, with so large a `number` of micro-batches of `size` samples."""
        room = MEMORY_SLACK * space.room_bytes * np.array(space.devices, dtype=float)
        fixed = self.state_bytes + (self.sums_bytes if number > 1 else 0.0)
        saved, working = self.saved_bytes * size, self.working_with(size)
        return in_flight_within(room, fixed[:, None], saved[:, None], working[:, None], in_flight)


def alone_on_a_device(costs: StageCosts, layer: int) -> StageSolution:
    """A layer solved on one device with all the memory that it needs; pins are of logical meshes with other axes."""
    device = Submesh(first_device=0, num_hosts=1, devices_per_host=1)
    mesh = LogicalMesh(axis_names=("x",), shape=(1,))
    return costs.with_pins({}).solution(layer, layer, device, mesh, limit_bytes=math.inf)


def in_flight_within(
    room: FloatArray, fixed: FloatArray, saved: FloatArray, working: FloatArray, in_flight: Sequence[int]
) -> NDArray[np.int64]:
    """[layers, layers, …]: of how many of the numbers `in_flight` (which rise) of micro-batches stages have room for.

    `fixed`, `saved` and `working` bytes of each layer are [layers, …]; see the module. There is no room for what is not
    known of some layer, which is infinite.
    """
    fixed_of, saved_of = (_of_ranges(part) for part in (fixed, saved))
    peak = np.zeros_like(saved_of)
    for first in range(fixed.shape[0]):
        peak[first, first:] = np.maximum.accumulate(saved_of[first, first:] + working[first:])
    least = fixed_of + peak
    found = np.zeros(np.broadcast_shapes(least.shape, room.shape), dtype=np.int64)
    with np.errstate(invalid="ignore"):
        for number in in_flight:
            found += least + (number - 1) * saved_of <= room
    return found


def _of_ranges(part: FloatArray) -> FloatArray:
    """[layers, layers, …]: the sums from one layer to another of what is [layers, …]."""
    ends = np.concatenate([np.zeros((1, *part.shape[1:])), np.cumsum(part, axis=0)])
    with np.errstate(invalid="ignore"):
        return np.nan_to_num(ends[None, 1:] - ends[:-1, None], nan=np.inf, posinf=np.inf, neginf=np.inf)


def microbatch_size(costs: StageCosts) -> int | None:
    """Samples per micro-batch; None without a batch."""
    step = costs.step
    return None if step.batch_size is None else step.batch_size // step.num_microbatches


def summed(alone: NDArray[np.float64], possible: NDArray[np.bool_]) -> NDArray[np.float64]:
    """[layers, layers, kinds, shapes]: the sums of what layers take alone, [layers, kinds, shapes], where that is known
    of all and `possible`."""
    finite = np.isfinite(alone)
    sums, missing = (
        np.concatenate([np.zeros((1, *alone.shape[1:])), np.cumsum(part, axis=0)])
        for part in (np.where(finite, alone, 0.0), ~finite)
    )
    complete = missing[None, 1:] == missing[:-1, None]
    return np.where(complete & possible[..., None], sums[None, 1:] - sums[:-1, None], np.inf)
