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
from alpa_lite.mesh import LogicalMesh, Submesh

FloatArray = NDArray[np.float64]

MEMORY_SLACK = 1.1
"""By how much more than a device has a stage may seem to need before it is left out."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Profile:
    """[layers] each, on one device: seconds of both passes and of the update, bytes of state and sums; and per sample
    the bytes saved by the forward pass, and those worked with beside them."""

    loop_seconds: FloatArray
    update_seconds: FloatArray
    fixed_bytes: FloatArray
    saved_bytes: FloatArray
    working_bytes: FloatArray

    @staticmethod
    def of(costs: StageCosts) -> Profile:
        """Each layer solved on one device with all the memory that it needs."""
        size = float(microbatch_size(costs) or 1)
        alone = Submesh(first_device=0, num_hosts=1, devices_per_host=1)
        mesh = LogicalMesh(axis_names=("x",), shape=(1,))
        free = costs.with_pins({})
        layers = [
            free.solution(layer, layer, alone, mesh, limit_bytes=math.inf) for layer in range(costs.layers.num_layers)
        ]
        return Profile(
            loop_seconds=np.array([found.forward_seconds + found.backward_seconds for found in layers]),
            update_seconds=np.array([found.update_seconds for found in layers]),
            fixed_bytes=np.array([found.state_bytes + found.accumulator_bytes for found in layers]),
            saved_bytes=np.array([found.activation_bytes for found in layers]) / size,
            working_bytes=np.array([found.temporary_bytes for found in layers]) / size,
        )

    @property
    def num_layers(self) -> int:
        """How many layers."""
        return self.loop_seconds.size

    @property
    def shares(self) -> FloatArray:
        """[layers]: the part of both passes that each layer takes."""
        return self.loop_seconds / max(float(self.loop_seconds.sum()), 1e-30)

    def holds(self, space: Space, size: float, in_flight: Sequence[int]) -> NDArray[np.int64]:
        """[layers, layers, kinds]: how many of the numbers `in_flight` (which rise) stages have memory for, as far as
        is known, with micro-batches of `size` samples."""
        ends = [np.concatenate([[0.0], np.cumsum(part)]) for part in (self.fixed_bytes, self.saved_bytes * size)]
        fixed, saved = (part[None, 1:] - part[:-1, None] for part in ends)
        peak = np.zeros_like(saved)
        for first in range(self.num_layers):
            up_to = saved[first, first:] + self.working_bytes[first:] * size
            peak[first, first:] = np.maximum.accumulate(up_to)
        room = MEMORY_SLACK * space.room_bytes * np.array(space.devices, dtype=float)
        needs = fixed + peak + (np.array(in_flight)[:, None, None] - 1) * saved
        return (needs[..., None] <= room).sum(axis=0)


def microbatch_size(costs: StageCosts) -> int | None:
    """Samples per micro-batch; None without a batch."""
    step = costs.step
    return None if step.batch_size is None else step.batch_size // step.num_microbatches
