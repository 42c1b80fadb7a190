"""A survey: what stages would take at any number of micro-batches, from a few layers solved at a few numbers of them.

With b samples in a micro-batch, layer l on a logical mesh takes per micro-batch about

    t(l,b) = t(r,b) * FLOPs(l) / FLOPs(r) + u(r) * state(l) / state(r) / m                              `Survey.guess`

where r is a layer that stands for l (`space.representatives`), t(r,b) lies on straight lines through the sizes that
were solved (latency and the gathering of weights do not shrink with b, the rest does) and u is its update.
On n devices a stage of layers i..j that holds h micro-batches at its peak needs at least

    state + sums + (h - 1) sum of saved + max over l of (saved of layers up to l + working(l)),  over n  `Survey.holds`

with what each layer saves per micro-batch and works with, as found on one device; both grow with b.

These are guesses: they say where to look first, and the search puts costs in the place of those that its answer
depends on (`stage_search`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from alpa_lite.errors import PlanError
from alpa_lite.inter_op.space import Space, flops_shares, representatives
from alpa_lite.inter_op.stage_costs import StageCosts, state_bytes
from alpa_lite.mesh import LogicalMesh, Submesh

FloatArray = NDArray[np.float64]

MEMORY_SLACK = 1.1
"""By how much more than a device has a stage may seem to need before it is left out."""


class Survey:
    """Seconds of a few layers on every logical mesh, at some numbers of micro-batches."""

    def __init__(self, space: Space) -> None:
        """Nothing is known yet."""
        self.space = space
        self._loops: dict[float, dict[int, FloatArray]] = {}
        self._updates: dict[int, FloatArray] = {}
        self._of_layer = np.zeros(0, dtype=np.int64)
        self._shares, self._state = np.zeros(0), np.zeros(0)
        self._memory: _Memory | None = None

    def add(self, costs: StageCosts) -> None:
        """Solve the layers that stand for others at the micro-batches of a step."""
        shares, state = flops_shares(costs.step, costs.layers), state_bytes(costs.step, costs.layers)
        if not self._loops:
            self._of_layer = representatives(costs.structures(), shares)
            self._shares, self._state = shares, state
            self._memory = _memory(costs)
        possible = self.space.divides(microbatch_size(costs))
        loops: dict[int, FloatArray] = {}
        for layer in dict.fromkeys(self._of_layer.tolist()):
            loop, update = np.full(possible.shape, np.inf), np.full(possible.shape, np.inf)
            for k, c in np.argwhere(possible).tolist():
                submesh, mesh = self.space.submesh(k), self.space.mesh(k, c)
                found = costs.solution(layer, layer, submesh, mesh, limit_bytes=math.inf)
                if found.choice is not None:
                    loop[k, c] = found.forward_seconds + found.backward_seconds
                    update[k, c] = found.update_seconds
            loops[layer] = loop
            self._updates[layer] = np.minimum(update, self._updates.get(layer, update))
        self._loops[float(microbatch_size(costs) or 1)] = loops

    @property
    def is_empty(self) -> bool:
        """True before anything was added."""
        return not self._loops

    @property
    def num_layers(self) -> int:
        """Layers of the steps that were added."""
        return self._of_layer.size

    def guess(self, size: float, num_microbatches: int) -> FloatArray:
        """[layers, kinds, shapes]: seconds of each layer by itself for micro-batches of `size` samples, and its part
        of the update."""
        sizes = sorted(self._loops)
        found: list[FloatArray] = []
        for layer, stands in enumerate(self._of_layer.tolist()):
            points = np.stack([self._loops[size][stands] for size in sizes])
            loop = _on_lines(np.array(sizes), points, size)
            work = self._shares[layer] / max(self._shares[stands], 1e-12)
            held = self._state[layer] / max(self._state[stands], 1e-12) if self._state[stands] else 1.0
            found.append(loop * work + self._updates[stands] * held / num_microbatches)
        return np.where(self.space.divides(int(size)), np.stack(found), np.inf)

    def holds(self, size: float, in_flight: Sequence[int]) -> NDArray[np.int64]:
        """[layers, layers, kinds]: how many of the numbers `in_flight` (which rise) stages have memory for, as far as
        is known, with micro-batches of `size` samples."""
        if self._memory is None:
            raise PlanError("A survey without layers cannot tell what fits. Add the costs of some layers first.")
        fixed, saved, peak = self._memory.of_stages(size)
        room = MEMORY_SLACK * float(self.space.cluster.device.memory_bytes) * np.array(self.space.devices, dtype=float)
        needs = fixed + peak + (np.array(in_flight)[:, None, None] - 1) * saved
        return (needs[..., None] <= room).sum(axis=0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Memory:
    """What each layer holds on one device, in bytes: state and sums, saved per sample, and worked with per sample."""

    fixed: FloatArray
    saved: FloatArray
    working: FloatArray

    def of_stages(self, size: float) -> tuple[FloatArray, FloatArray, FloatArray]:
        """[layers, layers]: state and sums; saved per micro-batch; the peak beside the first with one in flight."""
        ends = [np.concatenate([[0.0], np.cumsum(part)]) for part in (self.fixed, self.saved * size)]
        fixed, saved = (part[None, 1:] - part[:-1, None] for part in ends)
        peak = np.zeros_like(saved)
        for first in range(self.saved.size):
            up_to = saved[first, first:] + self.working[first:] * size
            peak[first, first:] = np.maximum.accumulate(up_to)
        return fixed, saved, peak


def _memory(costs: StageCosts) -> _Memory:
    size = float(microbatch_size(costs) or 1)
    alone = Submesh(first_device=0, num_hosts=1, devices_per_host=1)
    mesh = LogicalMesh(axis_names=("x",), shape=(1,))
    layers = [
        costs.solution(layer, layer, alone, mesh, limit_bytes=math.inf) for layer in range(costs.layers.num_layers)
    ]
    return _Memory(
        fixed=np.array([found.state_bytes + found.accumulator_bytes for found in layers]),
        saved=np.array([found.activation_bytes for found in layers]) / size,
        working=np.array([found.temporary_bytes for found in layers]) / size,
    )


def microbatch_size(costs: StageCosts) -> int | None:
    """Samples per micro-batch; None without a batch."""
    step = costs.step
    return None if step.batch_size is None else step.batch_size // step.num_microbatches


def _on_lines(sizes: FloatArray, points: FloatArray, size: float) -> FloatArray:
    """Values at `size` on lines through neighbouring `points` [sizes, ...]; in proportion where there is but one."""
    result = np.full(points.shape[1:], np.inf)
    for at in np.ndindex(result.shape):
        known = np.isfinite(points[(slice(None), *at)])
        if known.any():
            result[at] = _on_line(sizes[known], points[(slice(None), *at)][known], size)
    return result


def _on_line(sizes: FloatArray, values: FloatArray, size: float) -> float:
    if sizes.size == 1:
        return float(values[0] * size / sizes[0])
    right = int(np.clip(np.searchsorted(sizes, size), 1, sizes.size - 1))
    slope = (values[right] - values[right - 1]) / (sizes[right] - sizes[right - 1])
    # What does not shrink with the size takes no less than nothing.
    fixed = max(0.0, float(values[right] - slope * sizes[right]))
    return fixed + (float(values[right]) - fixed) * size / float(sizes[right])
