"""The stage dynamic program of Alpa (OSDI'22, section 5.2 and appendix) on plain arrays.

Cut layers 0..L-1 into stages, give each a submesh and a configuration, and use all D devices. With t[i,j,m,c] the
seconds of one micro-batch in the stage of layers i..j on submesh m with configuration c, and B micro-batches,

    T*       = min over cuts, submeshes and configurations of  sum of t + (B-1) * max of t            `evaluate`
             = min over tau of  F(tau) + (B-1) * tau, tau over the values that a stage can take      `_bottlenecks`
    F(tau)   = min over s of  f[s,0,D]                                                               `_StageDp.total`
    f[s,i,d] = min over k, m of  g[s-1,i,k,m] + f[s-1,k+1,d-devices(m)], where g <= tau              `_StageDp.sums`
    f[0,L,0] = 0
    g[r,i,k,m] = min over c of  t[i,k,m,c], where at least r stages may follow                       `_StageDp.of`

f[s,i,d] is the least sum over layers i.. in s stages on d devices. The number of stages is in the state because under
1F1B a stage that r stages follow holds r+1 micro-batches, so its memory bounds r. The best configuration does not
depend on tau, so tau runs over the values of g alone, thinned out where they differ by less than 1e-6 (relative).

The search over tau is lossless (`_search`): F falls as tau grows, so between tau_a and tau_b no value can matter if
F(tau_a) = F(tau_b), or if max(F(tau_b), tau) + (B-1)*tau already reaches the best total at the first tau after tau_a
(with tau for the maximum this is Alpa's early stop B*tau >= T*).

Stages that share one processor never overlap; then T* = B * min of the sum of t, which is F(infinity)      `solve`
"""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alpa_lite.errors import PlanError

BOTTLENECK_GAP = 1e-6
"""Relative distance below which two bottlenecks count as one; the result is optimal up to this factor."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageTable:
    """The cost of every possible stage.

    Attributes:
        seconds: [L, L, S, C], per micro-batch, of the stage of layers i..j on submesh kind s with configuration c;
            infinite where that is impossible. Entries with j < i are ignored.
        max_following_stages: [L, L, S, C], how many stages may follow it given its memory; -1 if it never fits.
        submesh_devices: the number of devices of each submesh kind.
    """

    seconds: NDArray[np.float64]
    max_following_stages: NDArray[Any]
    submesh_devices: tuple[int, ...]

    def __post_init__(self) -> None:
        shape, kinds = self.seconds.shape, len(self.submesh_devices)
        if len(shape) != 4 or shape[0] != shape[1] or shape[2] != kinds or shape != self.max_following_stages.shape:
            raise PlanError(
                f"A stage table for {kinds} submesh kinds needs two arrays [layers, layers, {kinds}, configurations],"
                f" but their shapes are {shape} and {self.max_following_stages.shape}."
            )
        if 0 in shape or min(self.submesh_devices) < 1 or not bool(np.all(self.seconds >= 0)):
            raise PlanError("A stage table needs layers, submeshes of at least one device, and seconds of at least 0.")

    @property
    def num_layers(self) -> int:
        return self.seconds.shape[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageAssignment:
    """Layers `first_layer` to `last_layer` (inclusive) on one submesh kind, in one of its configurations."""

    first_layer: int
    last_layer: int
    submesh: int
    configuration: int


class StageStatus(enum.Enum):
    """How a search ended."""

    OPTIMAL = "optimal"
    INFEASIBLE = "infeasible"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageChoice:
    """The best stages. If there are none, `seconds` is infinite and `reason` is a sentence that says why.

    `num_bottlenecks` is the number of bottlenecks that had to be considered, `num_evaluated` that of dynamic programs.
    """

    stages: tuple[StageAssignment, ...]
    seconds: float
    status: StageStatus
    reason: str = ""
    num_bottlenecks: int = 0
    num_evaluated: int = 0


def evaluate(
    table: StageTable, stages: Sequence[StageAssignment], *, num_devices: int, num_microbatches: int, serialized: bool
) -> float:
    """Seconds of a step with these stages, by the formula; infinite where they do not fit together or into memory."""
    next_layer, devices = 0, 0
    times: list[float] = []
    for index, stage in enumerate(stages):
        entry = (stage.first_layer, stage.last_layer, stage.submesh, stage.configuration)
        in_order = stage.first_layer == next_layer <= stage.last_layer
        if not in_order or table.max_following_stages[entry] < len(stages) - 1 - index:
            return np.inf
        next_layer = stage.last_layer + 1
        devices += table.submesh_devices[stage.submesh]
        times.append(float(table.seconds[entry]))
    if next_layer != table.num_layers or devices != num_devices:
        return np.inf
    return num_microbatches * sum(times) if serialized else sum(times) + (num_microbatches - 1) * max(times)


def solve(
    table: StageTable,
    *,
    num_devices: int,
    num_microbatches: int,
    min_stages: int = 1,
    max_stages: int | None = None,
    early_stop: bool = True,
    serialized: bool = False,
) -> StageChoice:
    """The stages of least total time that use all devices.

    Args:
        table: what each stage would cost.
        num_devices: devices of the cluster; the submeshes of the stages add up to them.
        num_microbatches: B in the formulas above.
        min_stages, max_stages: how many stages; None for as many as there are layers.
        early_stop: skip bottlenecks that cannot matter; without it each one is tried. The result is the same.
        serialized: all stages share one processor, so that their times add up.
    """
    if num_devices < 1 or num_microbatches < 1 or min_stages < 1:
        raise PlanError(
            f"The stage search needs at least one device, micro-batch and stage, but got {num_devices} devices,"
            f" {num_microbatches} micro-batches and at least {min_stages} stages."
        )
    most = min(table.num_layers, num_devices, table.num_layers if max_stages is None else max_stages)
    if most < min_stages:
        return _infeasible(
            f"At least {min_stages} stages were asked for, but {table.num_layers} layers on {num_devices} devices"
            f"{'' if max_stages is None else f' with at most {max_stages} stages'} allow {most}."
        )
    dp = _StageDp.of(table, num_devices=num_devices, min_stages=min_stages, max_stages=most)
    taus = _bottlenecks(dp.cheapest)
    totals: dict[int, float] = {}

    def sum_at(index: int) -> float:
        if index not in totals:
            totals[index] = dp.total(float(taus[index]))
        return totals[index]

    if taus.size == 0 or sum_at(taus.size - 1) == np.inf:
        return _infeasible(_why_infeasible(dp))
    best = taus.size - 1 if serialized else _search(sum_at, taus, num_microbatches, early_stop=early_stop)
    stages = dp.stages(float(taus[best]))
    seconds = evaluate(table, stages, num_devices=num_devices, num_microbatches=num_microbatches, serialized=serialized)
    status = StageStatus.OPTIMAL
    return StageChoice(
        stages=stages, seconds=seconds, status=status, num_bottlenecks=taus.size, num_evaluated=len(totals)
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _StageDp:
    """The dynamic program for a given tau; `cheapest` is g[r,i,k,m], infinite for k < i."""

    table: StageTable
    cheapest: NDArray[np.float64]
    num_devices: int
    min_stages: int
    max_stages: int

    @staticmethod
    def of(table: StageTable, *, num_devices: int, min_stages: int, max_stages: int) -> "_StageDp":
        layers = np.arange(table.num_layers)
        possible = (layers[:, None] <= layers[None, :])[:, :, None, None]
        cheapest = [
            np.where(possible & (table.max_following_stages >= following), table.seconds, np.inf).min(axis=3)
            for following in range(max_stages)
        ]
        return _StageDp(
            table=table,
            cheapest=np.stack(cheapest),
            num_devices=num_devices,
            min_stages=min_stages,
            max_stages=max_stages,
        )

    def sums(self, tau: float) -> NDArray[np.float64]:
        """f[s,i,d] for all s up to `max_stages`; rows i = 0..L, where row L holds no layer."""
        allowed = np.where(self.cheapest <= tau, self.cheapest, np.inf)
        num_layers = allowed.shape[1]
        sums = np.full((self.max_stages + 1, num_layers + 1, self.num_devices + 1), np.inf)
        sums[0, num_layers, 0] = 0.0
        for stage in range(1, self.max_stages + 1):
            for submesh, devices in enumerate(self.table.submesh_devices):
                rest = sums[stage - 1, 1:, : max(self.num_devices + 1 - devices, 0)]
                added = (allowed[stage - 1, :, :, submesh, None] + rest[None]).min(axis=1)
                target = sums[stage, :num_layers, devices:]
                np.minimum(target, added, out=target)
        return sums

    def total(self, tau: float) -> float:
        """F(tau); infinite if no choice stays below tau."""
        return float(self.sums(tau)[self.min_stages :, 0, self.num_devices].min())

    def stages(self, tau: float) -> tuple[StageAssignment, ...]:
        """Stages that attain F(tau), the fewest, read off the recurrence from the first layer on."""
        sums = self.sums(tau)
        left = self.min_stages + int(sums[self.min_stages :, 0, self.num_devices].argmin())
        allowed = np.where(self.cheapest <= tau, self.cheapest, np.inf)
        first, free = 0, self.num_devices
        found: list[StageAssignment] = []
        for following in reversed(range(left)):
            candidates = np.full(allowed.shape[2:], np.inf)
            for submesh, devices in enumerate(self.table.submesh_devices):
                if devices <= free:
                    candidates[:, submesh] = allowed[following, first, :, submesh] + sums[following, 1:, free - devices]
            last, submesh = (int(index) for index in np.unravel_index(candidates.argmin(), candidates.shape))
            fits = self.table.max_following_stages[first, last, submesh] >= following
            configuration = int(np.where(fits, self.table.seconds[first, last, submesh], np.inf).argmin())
            found.append(
                StageAssignment(first_layer=first, last_layer=last, submesh=submesh, configuration=configuration)
            )
            first, free = last + 1, free - self.table.submesh_devices[submesh]
        return tuple(found)


def _bottlenecks(cheapest: NDArray[np.float64]) -> NDArray[np.float64]:
    """The finite values of `cheapest`, ascending; of values within `BOTTLENECK_GAP` the largest, which admits all."""
    values = np.unique(cheapest[np.isfinite(cheapest)])
    with np.errstate(divide="ignore"):
        bins = np.floor(np.log(values) / np.log1p(BOTTLENECK_GAP))
    return values[np.append(bins[1:] != bins[:-1], True)] if values.size else values


def _search(
    sum_at: Callable[[int], float], taus: NDArray[np.float64], num_microbatches: int, *, early_stop: bool
) -> int:
    """The index of the best bottleneck, where `sum_at` of the last one is finite."""
    last = taus.size - 1
    totals: dict[int, float] = {}

    def visit(index: int) -> None:
        totals[index] = sum_at(index) + (num_microbatches - 1) * float(taus[index])

    visit(last)
    pending = [(-1, last)] if early_stop else []
    for index in () if early_stop else range(last):
        visit(index)
    while pending:
        low, high = pending.pop()
        if high - low < 2 or (low >= 0 and sum_at(low) == sum_at(high)):
            continue
        tau = float(taus[low + 1])
        if max(sum_at(high), tau) + (num_microbatches - 1) * tau >= min(totals.values()):
            continue
        middle = (low + high) // 2
        visit(middle)
        # The lower half comes first: good totals are found there. Below an infeasible value nothing is feasible.
        pending.append((middle, high))
        if sum_at(middle) < np.inf:
            pending.append((low, middle))
    return min(totals, key=lambda index: (totals[index], index))


def _infeasible(reason: str) -> StageChoice:
    return StageChoice(stages=(), seconds=np.inf, status=StageStatus.INFEASIBLE, reason=reason)


def _why_infeasible(dp: _StageDp) -> str:
    """The first limit that rules everything out, found by lifting the limits one by one."""
    table = dp.table
    count = f"{dp.min_stages} to {dp.max_stages} stages" if dp.min_stages < dp.max_stages else f"{dp.max_stages} stages"
    plan = f"{count} for the {table.num_layers} layers on {dp.num_devices} devices"

    def feasible(lifted: StageTable) -> bool:
        sizes = {"num_devices": dp.num_devices, "min_stages": dp.min_stages, "max_stages": dp.max_stages}
        return _StageDp.of(lifted, **sizes).total(np.inf) < np.inf

    no_limit = replace(table, max_following_stages=np.full(table.seconds.shape, dp.max_stages))
    if not feasible(replace(no_limit, seconds=np.zeros(table.seconds.shape))):
        sizes = ", ".join(str(devices) for devices in sorted(set(table.submesh_devices)))
        return (
            f"No {plan}: submeshes of {sizes} devices do not add up to {dp.num_devices} in so many stages."
            " Allow other submeshes or another number of stages."
        )
    if not feasible(no_limit):
        return f"No {plan}: every choice holds a stage that has no possible configuration."
    return (
        f"No {plan} fit into memory, though some would run without that limit. Use more devices, smaller or more"
        " micro-batches, or fewer stages."
    )
