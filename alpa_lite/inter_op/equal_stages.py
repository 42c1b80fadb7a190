"""Which stages a plan may consist of, where they are to be alike.

The best stages by the stage DP, where they may be alike in several ways.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import product
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from alpa_lite.inter_op.space import Space
from alpa_lite.inter_op.stage_dp import StageChoice, StageStatus, StageTable, solve
from cost_models.composed import CostModel

StageEquality = Literal["layers", "devices"]
"""What all stages may be asked to have equally many of."""


def ways(
    space: Space, num_layers: int, equal: Collection[StageEquality], *, one_mesh: bool, repeats: int
) -> Iterator[NDArray[np.bool_]]:
    """Which stages a plan may consist of, one way after the other: masks that broadcast to [layers, layers, kinds,
    configurations].

    `equal`: what its stages have equally many of. `one_mesh`: whether they have one logical mesh. `repeats`: how many
    times the configurations of a kind repeat its shapes.
    """
    found: list[list[NDArray[np.bool_]]] = []
    if one_mesh:
        found.append([np.tile(mask, repeats) for mask in _in_one_mesh(space)])
    if "devices" in equal:
        devices = np.array(space.devices)
        found.append([(devices == n)[:, None] for n in dict.fromkeys(space.devices)])
    if "layers" in equal:
        number = np.arange(num_layers)
        length = (number[None, :] - number[:, None] + 1)[..., None, None]
        found.append([length == n for n in range(1, num_layers + 1) if num_layers % n == 0])
    for masks in product(*found):
        yield reduce(np.logical_and, masks, np.ones((), dtype=np.bool_))


def equal_parts(space: Space, num_layers: int) -> NDArray[np.bool_]:
    """[layers, layers, kinds]: which stages are some of equal ones."""
    found = np.zeros((num_layers, num_layers, len(space.kinds)), dtype=np.bool_)
    for first, last, kind in np.argwhere(space.in_order(num_layers)).tolist():
        found[first, last, kind] = number_of_equal(space, num_layers, first, last, kind) is not None
    return found


def number_of_equal(space: Space, num_layers: int, first: int, last: int, kind: int) -> int | None:
    """Of how many stages, equal in layers and devices, some layers are one; None if they are not."""
    length, devices = last + 1 - first, space.devices[kind]
    count = num_layers // length
    aligned = num_layers % length == 0 and first % length == 0
    return count if aligned and count * devices == space.cluster.num_devices else None


def _in_one_mesh(space: Space) -> Iterator[NDArray[np.bool_]]:
    """[kinds, shapes]: where each logical mesh is."""
    for mesh in dict.fromkeys(mesh for of_kind in space.meshes for mesh in of_kind):
        found = np.zeros((len(space.kinds), space.most_shapes), dtype=np.bool_)
        for kind, of_kind in enumerate(space.meshes):
            found[kind, : len(of_kind)] = [each == mesh for each in of_kind]
        yield found


_NOTHING = StageChoice(stages=(), seconds=np.inf, status=StageStatus.INFEASIBLE, reason="No equal stages are possible.")

_ROUNDING = 1e-9
"""Sums that are the same may differ by so much."""


@dataclass(frozen=True, kw_only=True)
class BestStages:
    """Chooses stages of one step; its calls take [layers, layers, kinds, configurations], see `StageTable`.

    ways          which stages a plan may consist of, one way after the other; see `alike.ways`
    slower        [layers, kinds, kinds]: `StageTable.inflow_seconds`
    num_stages    how many stages to make; None for the best number
    """

    space: Space
    cost_model: CostModel
    num_microbatches: int
    ways: Sequence[NDArray[np.bool_]]
    slower: NDArray[np.float64]
    num_stages: int | None

    def __call__(self, seconds: NDArray[np.float64], following: NDArray[np.int64]) -> StageChoice:
        """The best of all ways; of equally good ones the first."""
        # The first stage runs for every micro-batch: no stages of a way take less than the fastest first one.
        masks = [np.broadcast_to(way, seconds.shape) for way in self.ways]
        least = (1 - _ROUNDING) * self.num_microbatches
        bounds = [least * float(np.where(mask[0], seconds[0], np.inf).min()) for mask in masks]
        best, number = _NOTHING, len(masks)
        for n in sorted(range(len(masks)), key=bounds.__getitem__):
            if bounds[n] > best.seconds or math.isinf(bounds[n]):
                break
            other = self._dispatched(self._chosen(np.where(masks[n], seconds, np.inf), following))
            if (other.seconds, n) < (best.seconds, number):
                best, number = other, n
        return best

    def why_impossible(self, seconds: NDArray[np.float64], following: NDArray[np.int64]) -> str:
        """Why there are no such stages, as a sentence; empty if there are."""
        found = [self._chosen(np.where(way, seconds, np.inf), following, explain=True) for way in self.ways]
        return "" if any(each.stages for each in found) else (found or [_NOTHING])[0].reason

    def _chosen(
        self, seconds: NDArray[np.float64], following: NDArray[np.int64], *, explain: bool = False
    ) -> StageChoice:
        return solve(
            StageTable(
                seconds=seconds,
                max_following_stages=following,
                submesh_devices=self.space.devices,
                submesh_groups=self.space.groups,
                inflow_seconds=self.slower,
            ),
            num_devices=self.space.devices_of_groups,
            num_microbatches=self.num_microbatches,
            min_stages=self.num_stages or 1,
            max_stages=self.num_stages,
            serialized=self.space.cluster.shared_processor,
            explain=explain,
        )

    def _dispatched(self, found: StageChoice) -> StageChoice:
        """Stages take no less than their host needs to dispatch all of their tasks; hosts wait for each other once."""
        cluster = self.space.cluster
        if not found.stages:
            return found
        beside = max(1, cluster.devices_per_host // self.space.devices[found.stages[0].submesh])
        tasks = 2 * self.num_microbatches * min(len(found.stages), beside)
        dispatched = max(found.seconds, self.cost_model.launch_seconds() * tasks)
        return replace(found, seconds=dispatched + cluster.skew_seconds)
