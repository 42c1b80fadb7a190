"""What every possible stage costs, and what stages cost together: the objective of the stage search, by its formula.

T = sum of t + (B-1) * max of t,  or B * sum of t where the stages share a processor                   `evaluate`
t = seconds[i,j,m,c] + inflow[i,n,m],  the stage before being on submesh n                             `evaluate`
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alpa_lite.errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageTable:
    """The cost of every possible stage.

    Attributes:
        seconds: [L, L, S, C], per micro-batch, of the stage of layers i..j on submesh kind s with configuration c;
            infinite where that is impossible. Entries with j < i are ignored.
        max_following_stages: [L, L, S, C], how many stages may follow it given its memory; -1 if it never fits.
        submesh_devices: the number of devices of each submesh kind.
        submesh_groups: the group of devices that each kind belongs to, None for one that is the whole cluster; ()
            where there is one group.
        inflow_seconds: [L, S, S], per micro-batch, that a stage from layer i on takes on top if the stage before is on
            the first kind and it is on the second; None for nothing. Entries with i = 0 are ignored.
    """

    seconds: NDArray[np.float64]
    max_following_stages: NDArray[Any]
    submesh_devices: tuple[int, ...]
    submesh_groups: tuple[int | None, ...] = ()
    inflow_seconds: NDArray[np.float64] | None = None

    def __post_init__(self) -> None:
        shape, kinds = self.seconds.shape, len(self.submesh_devices)
        if len(shape) != 4 or shape[0] != shape[1] or shape[2] != kinds or shape != self.max_following_stages.shape:
            raise PlanError(
                f"A stage table for {kinds} submesh kinds needs two arrays [layers, layers, {kinds}, configurations],"
                f" but their shapes are {shape} and {self.max_following_stages.shape}."
            )
        if 0 in shape or min(self.submesh_devices) < 1 or not bool(np.all(self.seconds >= 0)):
            raise PlanError("A stage table needs layers, submeshes of at least one device, and seconds of at least 0.")
        if self.submesh_groups and (
            len(self.submesh_groups) != kinds or any((g or 0) < 0 for g in self.submesh_groups)
        ):
            raise PlanError(
                f"A stage table for {kinds} submesh kinds needs the group of each, counted from 0 (None for the whole"
                f" cluster), but {self.submesh_groups} was given."
            )
        self._check_inflow((shape[0], kinds, kinds))

    def _check_inflow(self, shape: tuple[int, int, int]) -> None:
        inflow = self.inflow_seconds
        if inflow is not None and (inflow.shape != shape or not bool(np.all((inflow >= 0) & (inflow < np.inf)))):
            raise PlanError(
                f"inflow_seconds needs the shape {shape}, by first layer, kind before and kind, and finite seconds of"
                f" at least 0, but an array of shape {inflow.shape} was given."
            )

    @property
    def num_layers(self) -> int:
        return self.seconds.shape[0]

    @property
    def groups(self) -> tuple[int | None, ...]:
        """The group of each kind, written out."""
        return self.submesh_groups or (0,) * len(self.submesh_devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageAssignment:
    """Layers `first_layer` to `last_layer` (inclusive) on one submesh kind, in one of its configurations."""

    first_layer: int
    last_layer: int
    submesh: int
    configuration: int


def devices_by_group(num_devices: int | Sequence[int]) -> tuple[int, ...]:
    """The devices of each group; a single number is one group."""
    return (num_devices,) if isinstance(num_devices, int) else tuple(num_devices)


def evaluate(
    table: StageTable,
    stages: Sequence[StageAssignment],
    *,
    num_devices: int | Sequence[int],
    num_microbatches: int,
    serialized: bool,
) -> float:
    """Seconds of a step with these stages, by the formula; infinite where they do not fit together or into memory."""
    next_layer, devices = 0, devices_by_group(num_devices)
    used = Counter[int]()
    times: list[float] = []
    for index, stage in enumerate(stages):
        entry = (stage.first_layer, stage.last_layer, stage.submesh, stage.configuration)
        in_order = stage.first_layer == next_layer <= stage.last_layer
        if not in_order or table.max_following_stages[entry] < len(stages) - 1 - index:
            return np.inf
        next_layer = stage.last_layer + 1
        used.update(_taken(table, stage.submesh, devices))
        times.append(float(table.seconds[entry]))
        if table.inflow_seconds is not None and index > 0:
            times[-1] += float(table.inflow_seconds[stage.first_layer, stages[index - 1].submesh, stage.submesh])
    if next_layer != table.num_layers or used != Counter(dict(enumerate(devices))):
        return np.inf
    return num_microbatches * sum(times) if serialized else sum(times) + (num_microbatches - 1) * max(times)


def _taken(table: StageTable, submesh: int, devices: tuple[int, ...]) -> dict[int, int]:
    """The devices that a kind of submesh takes, by group; more than there are for a kind that is no whole cluster."""
    size, group = table.submesh_devices[submesh], table.groups[submesh]
    if group is not None:
        return {group: size}
    return dict(enumerate(devices)) if size == sum(devices) else {0: size + devices[0]}
