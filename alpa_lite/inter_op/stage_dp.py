"""The stage dynamic program of Alpa (OSDI'22, section 5.2 and appendix) on plain arrays.

`StageTable` holds what every possible stage costs, `evaluate` is the objective, and `solve` finds the stages that
minimise it.

Cut layers 0..L-1 into stages, give each a submesh and a configuration, and use all devices of each of G groups, D_1 to
D_G. With t the seconds of one micro-batch in a stage, e those that the first one takes in addition, u those that the
stage takes once per step (the update), B micro-batches and p stages,

    T*       = min over cuts, submeshes and configurations of  sum of (t + e) + max of ((B-1) * t + u)   `evaluate`
    t        = seconds[i,j,m,c] + inflow[i,n,m]   of layers i..j on submesh m with configuration c,
                                                  where the stage before is on submesh n
             = min over tau of  F(tau) + tau, tau over the bottlenecks (B-1) * t + u of all stages    `_bottlenecks`
    F(tau)   = min over s of  f[s,0,D]                                                               `_StageDp.total`
    f[s,i,d,n] = min over k, m of  t + e + f[s-1,k+1,d-devices(m),m], where (B-1) * t + u <= tau   `stage_kernels.fill`
    f[0,L,0,n] = 0
    t, e, u  of the choices at [s-1,i,k,m]: of the configurations that at least s-1 stages may follow, those than which
             no other has both fewer seconds and a lower bottleneck                        `stage_kernels.choices_of`

The first micro-batch passes through all stages, and the slowest stage then works without pause; updates of different
stages overlap, so that only the one that ends last counts.

f[s,i,d,n] is the least sum over layers i.. in s stages on d devices (of each group), fed by a stage on submesh n. The
number of stages is in the state because under 1F1B a stage that r stages follow holds r+1 micro-batches, so its memory
bounds r. tau is thinned out where values differ by less than 1e-6 (relative).

Three things make it small, and lose nothing (`_StageDp.of`): devices are counted in units of what all kinds have in
common, submeshes n of equal inflow are one, and beyond the last r on which any choice depends all s are one.

The search over tau is lossless (`_search`): F falls as tau grows, so between tau_a and tau_b no value can matter if
F(tau_a) = F(tau_b), or if F(tau_b) + tau already reaches the best total at the first tau after tau_a.

Under a schedule that leaves the share w of the waiting of 1F1B at the beginning and at the end,

    T*       = min of  sum of (w * t + e) + max of ((B-w) * t + u)
             = w * min of  sum of (t + e/w) + max of ((B/w-1) * t + u/w)

which is the same search with other bottlenecks.

Stages that share one processor never overlap; then T* = B * min of the sum of t + u/B, an F(infinity)      `solve`

`compile_kernels` compiles the kernels ahead of their first use (4 s, once).
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import gcd, prod

import numpy as np
from numpy.typing import NDArray

from alpa_lite.errors import PlanError
from alpa_lite.inter_op.stage_kernels import (
    BottleneckSums,
    FloatArray,
    StageArrays,
    choices_of,
    empty_sums,
    fill,
    trace,
)


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
        update_seconds: [L, L, S, C], once per step, of each stage; None for nothing. Infinite where `seconds` are.
        filling_seconds: [L, L, S, C], that the first micro-batch takes on top, such as for transfers that the work on
            others hides later; below 0 where it takes less; None for nothing.
    """

    seconds: NDArray[np.float64]
    max_following_stages: NDArray[np.int64]
    submesh_devices: tuple[int, ...]
    submesh_groups: tuple[int | None, ...] = ()
    inflow_seconds: NDArray[np.float64] | None = None
    update_seconds: NDArray[np.float64] | None = None
    filling_seconds: NDArray[np.float64] | None = None

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
        update, filling = self.update_seconds, self.filling_seconds
        if update is not None and (update.shape != shape or not bool(np.all(update >= 0))):
            raise PlanError(
                f"update_seconds needs the shape {shape} and at least 0 seconds, but an array of shape {update.shape}"
                " was given."
            )
        if filling is not None and (filling.shape != shape or bool(np.isnan(filling).any())):
            raise PlanError(
                f"filling_seconds needs the shape {shape} and numbers, but an array of shape {filling.shape} was given."
            )

    def _check_inflow(self, shape: tuple[int, int, int]) -> None:
        inflow = self.inflow_seconds
        if inflow is not None and (inflow.shape != shape or not bool(np.all((inflow >= 0) & (inflow < np.inf)))):
            raise PlanError(
                f"inflow_seconds needs the shape {shape}, by first layer, kind before and kind, and finite seconds of"
                f" at least 0, but an array of shape {inflow.shape} was given."
            )

    @property
    def num_layers(self) -> int:
        """The number of layers L."""
        return self.seconds.shape[0]

    @property
    def updates(self) -> NDArray[np.float64]:
        """[L, L, S, C]: the seconds that each stage takes once per step."""
        return np.zeros_like(self.seconds) if self.update_seconds is None else self.update_seconds

    @property
    def filling(self) -> NDArray[np.float64]:
        """[L, L, S, C]: the seconds that the first micro-batch takes on top in each stage."""
        return np.zeros_like(self.seconds) if self.filling_seconds is None else self.filling_seconds

    @property
    def groups(self) -> tuple[int | None, ...]:
        """The group of each kind; 0 for all where there is one group."""
        return self.submesh_groups or (0,) * len(self.submesh_devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageAssignment:
    """Layers `first_layer` to `last_layer` (inclusive) on one submesh kind, in one of its configurations."""

    first_layer: int
    last_layer: int
    submesh: int
    configuration: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTerms:
    """The conditions under which stages are chosen.

    Attributes:
        num_devices: devices of each group of the cluster (a number: there is one group); the submeshes of the stages
            add up to them.
        num_microbatches: B in the formulas of the module.
        min_stages, max_stages: limits of the number of stages; no maximum: as many as there are layers.
        serialized: whether all stages share one processor, so that their times add up.
        waiting_share: w, the share of the waiting at the beginning and at the end that the schedule leaves.
    """

    num_devices: int | Sequence[int]
    num_microbatches: int
    min_stages: int = 1
    max_stages: int | None = None
    serialized: bool = False
    waiting_share: float = 1.0

    @property
    def devices(self) -> tuple[int, ...]:
        """The number of devices of each group."""
        return (self.num_devices,) if isinstance(self.num_devices, int) else tuple(self.num_devices)

    def step_seconds(self, times: Sequence[float], updates: Sequence[float], filling: float = 0.0) -> float:
        """Return the seconds of a step whose stages take these times per micro-batch, and these once per step.

        `filling`: what the first micro-batch takes on top in all stages, where they do not share one processor.
        """
        total = sum(times)
        if self.serialized:
            return self.num_microbatches * total + sum(updates)
        if total == np.inf:
            return total
        again = self.num_microbatches - self.waiting_share
        return self.waiting_share * total + filling + max(again * t + u for t, u in zip(times, updates, strict=True))


def evaluate(table: StageTable, stages: Sequence[StageAssignment], terms: PipelineTerms) -> float:
    """Return the seconds of a step with these stages; infinite if they do not fit together or into memory."""
    next_layer, devices = 0, terms.devices
    used = Counter[int]()
    times, updates, filling = list[float](), list[float](), 0.0
    update_seconds, filling_seconds = table.updates, table.filling
    for index, stage in enumerate(stages):
        entry = (stage.first_layer, stage.last_layer, stage.submesh, stage.configuration)
        in_order = stage.first_layer == next_layer <= stage.last_layer
        # Under 1F1B a stage holds one micro-batch more than the number of stages that follow it.
        if not in_order or table.max_following_stages[entry] < len(stages) - 1 - index:
            return np.inf
        next_layer = stage.last_layer + 1
        used.update(_taken(table, stage.submesh, devices))
        times.append(float(table.seconds[entry]))
        updates.append(float(update_seconds[entry]))
        filling += float(filling_seconds[entry])
        if table.inflow_seconds is not None and index > 0:
            times[-1] += float(table.inflow_seconds[stage.first_layer, stages[index - 1].submesh, stage.submesh])
    if next_layer != table.num_layers or used != Counter(dict(enumerate(devices))):
        return np.inf
    return terms.step_seconds(times, updates, filling)


def _taken(table: StageTable, submesh: int, devices: tuple[int, ...]) -> dict[int, int]:
    """Return the devices that a kind of submesh takes from each group.

    A kind without a group must be the whole cluster; for another size the result exceeds the devices that there are.
    """
    size, group = table.submesh_devices[submesh], table.groups[submesh]
    if group is not None:
        return {group: size}
    return dict(enumerate(devices)) if size == sum(devices) else {0: size + devices[0]}


BOTTLENECK_GAP = 1e-6
"""Relative distance below which two bottlenecks count as one; the result is optimal up to this factor."""


class StageStatus(enum.Enum):
    """Outcome of the dynamic program."""

    OPTIMAL = "optimal"
    INFEASIBLE = "infeasible"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageChoice:
    """The best stages. If there are none, `seconds` is infinite and `reason` is a sentence that says why.

    `num_bottlenecks` is the number of values of tau, `num_evaluated` the number of those for which F was computed.
    """

    stages: tuple[StageAssignment, ...]
    seconds: float
    status: StageStatus
    reason: str = ""
    num_bottlenecks: int = 0
    num_evaluated: int = 0


def solve(table: StageTable, terms: PipelineTerms, *, early_stop: bool = True, explain: bool = True) -> StageChoice:
    """Return the stages of least total time that use all devices.

    Args:
        table: the cost of each possible stage.
        terms: the devices to use, and limits of the number of stages.
        early_stop: skip bottlenecks that cannot matter; without it each one is tried. The result is the same.
        explain: give a reason where nothing is possible, which takes as long again.
    """
    devices, min_stages, max_stages = terms.devices, terms.min_stages, terms.max_stages
    if min(devices, default=0) < 1 or terms.num_microbatches < 1 or min_stages < 1:
        raise PlanError(
            f"The stage search needs at least one device, micro-batch and stage, but got {_show(devices)} devices,"
            f" {terms.num_microbatches} micro-batches and at least {min_stages} stages."
        )
    beyond = [group for group in table.groups if group is not None and group >= len(devices)]
    if beyond:
        raise PlanError(
            f"A submesh kind belongs to group {beyond[0]}, but devices were given for {len(devices)} groups: give the"
            " number of devices of every group."
        )
    # Each stage has at least one layer and one device.
    most = min(table.num_layers, sum(devices), table.num_layers if max_stages is None else max_stages)
    if most < min_stages:
        return _infeasible(
            f"At least {min_stages} stages were asked for, but {table.num_layers} layers on {_show(devices)} devices"
            f"{'' if max_stages is None else f' with at most {max_stages} stages'} allow {most}."
        )
    as_run = replace(terms, max_stages=most)
    if terms.serialized:
        # Stages wait for each other's updates too, and the largest tau restricts nothing.
        seconds = table.seconds + table.updates / terms.num_microbatches
        dp = _StageDp.of(replace(table, seconds=seconds, update_seconds=None, filling_seconds=None), as_run)
    else:
        dp = _StageDp.of(table, as_run)
    taus = _bottlenecks(dp.arrays)
    totals: dict[int, float] = {}

    def sum_at(index: int) -> float:
        if index not in totals:
            totals[index] = dp.total(float(taus[index]))
        return totals[index]

    # F falls as tau grows: if the largest tau admits no stages, none does.
    if taus.size == 0 or sum_at(taus.size - 1) == np.inf:
        return _infeasible(_why_infeasible(dp) if explain else "")
    best = taus.size - 1 if terms.serialized else _search(sum_at, taus, early_stop=early_stop)
    stages = dp.stages(float(taus[best]))
    return StageChoice(
        stages=stages,
        seconds=evaluate(table, stages, terms),
        status=StageStatus.OPTIMAL,
        num_bottlenecks=taus.size,
        num_evaluated=len(totals),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _StageDp:
    """The dynamic program for a given tau; `kinds` are the kinds of the table that the arrays hold, some repeatedly.

    `passing`, `bottleneck`: t + e/w and tau of each entry of the table, without inflow.
    """

    table: StageTable
    terms: PipelineTerms
    passing: FloatArray
    bottleneck: FloatArray
    kinds: tuple[int, ...]
    arrays: StageArrays
    sums: BottleneckSums

    @staticmethod
    def of(table: StageTable, terms: PipelineTerms) -> _StageDp:
        """Build the arrays of the kernels, as small as the table allows; `terms` have a maximum number of stages."""
        devices, max_stages = terms.devices, terms.max_stages or table.num_layers
        scale = terms.num_microbatches / terms.waiting_share - 1
        # Impossible stages have no bottleneck: infinity times a scale of 0 is no number.
        possible = np.isfinite(table.seconds)
        bottleneck = scale * np.where(possible, table.seconds, 0.0) + table.updates / terms.waiting_share
        bottleneck = np.where(possible, bottleneck, np.inf)
        filling, usable = table.filling_seconds, _usable_kinds(table, devices)
        passing = table.seconds if filling is None else table.seconds + filling / terms.waiting_share
        # In one dtype and memory layout, for which numba compiles each kernel once.
        seconds, slowest = (np.array(part[:, :, usable], dtype=np.float64, order="C") for part in (passing, bottleneck))
        following = np.array(table.max_following_stages[:, :, usable], dtype=np.int64, order="C")
        num_choices = 1
        while True:
            cheapest, lowest, most = choices_of(seconds, slowest, following, max_stages, num_choices)
            if most <= num_choices:
                break
            num_choices = most
        # If only memory limits the number of stages, the choices are the same for all r from some r on, and one level
        # stands for all of these.
        open_ended = max_stages == min(table.num_layers, sum(devices))
        if open_ended:
            changes = ((cheapest[1:] != cheapest[:-1]) | (lowest[1:] != lowest[:-1])).any(axis=(1, 2, 3, 4))
            levels = max(int(np.flatnonzero(changes).max(initial=-1)) + 2, terms.min_stages)
            cheapest, lowest = cheapest[:levels], lowest[:levels]
        inflow, sender = _sender_classes(table, usable, np.isfinite(cheapest[0, ..., 0]))
        shift, block, num_states = _states(table, usable, devices)
        # The further choices of a kind are kinds of their own, where there are any.
        occurs = np.isfinite(cheapest).any(axis=(0, 1, 2))
        kinds, choices = np.nonzero(occurs)
        arrays = StageArrays(
            cheapest=np.ascontiguousarray(cheapest[..., kinds, choices]),
            bottleneck=np.ascontiguousarray(lowest[..., kinds, choices]),
            scale=scale,
            inflow=np.ascontiguousarray(inflow[:, kinds]),
            order=np.argsort(-inflow, axis=2, kind="stable").astype(np.int64)[:, kinds].copy(),
            sender=sender[kinds],
            shift=shift[kinds],
            block=block[kinds],
            num_states=num_states,
            open_ended=int(open_ended),
        )
        return _StageDp(
            table=table,
            terms=terms,
            passing=passing,
            bottleneck=bottleneck,
            kinds=tuple(usable[kind] for kind in kinds.tolist()),
            arrays=arrays,
            sums=empty_sums(arrays),
        )

    def total(self, tau: float) -> float:
        """Return F(tau); infinite if no stages stay below tau."""
        return float(fill(self.arrays, tau, self.sums)[self.terms.min_stages :].min())

    def stages(self, tau: float) -> tuple[StageAssignment, ...]:
        """Return stages that attain F(tau), read off the recurrence from the first layer on."""
        totals = fill(self.arrays, tau, self.sums)[self.terms.min_stages :]
        rows = trace(self.arrays, tau, self.sums, self.terms.min_stages + int(totals.argmin()))
        found: list[StageAssignment] = []
        first, arrays, sender = 0, self.arrays, 0
        for number, row in enumerate(rows):
            last, column = int(row[0]), int(row[1])
            entry = (first, last, self.kinds[column])
            # A choice only tells its seconds: any configuration with enough memory and bottlenecks up to tau that
            # takes the least will do.
            waits = arrays.scale * arrays.inflow[first, column, sender]
            fits = self.table.max_following_stages[entry] >= len(rows) - 1 - number
            fits &= self.bottleneck[entry] + waits <= tau
            configuration = int(np.where(fits, self.passing[entry], np.inf).argmin())
            found.append(
                StageAssignment(first_layer=first, last_layer=last, submesh=entry[2], configuration=configuration)
            )
            first, sender = last + 1, int(arrays.sender[column])
        return tuple(found)


def _usable_kinds(table: StageTable, devices: tuple[int, ...]) -> list[int]:
    """Return the kinds that some stage can be on; the state of the dynamic program grows with the others too."""
    layers = np.arange(table.num_layers)
    possible = (table.max_following_stages >= 0) & np.isfinite(table.seconds)
    possible &= (layers[:, None] <= layers[None, :])[:, :, None, None]
    occurs: NDArray[np.bool_] = np.any(possible, axis=(0, 1, 3))
    return [
        kind
        for kind, (size, group) in enumerate(zip(table.submesh_devices, table.groups, strict=True))
        if occurs[kind] and (size == sum(devices) if group is None else size <= devices[group])
    ]


def _sender_classes(
    table: StageTable, kinds: list[int], possible: NDArray[np.bool_]
) -> tuple[FloatArray, NDArray[np.int64]]:
    """Return the inflow by [first layer, kind, sender class], and the class of each kind; `possible` is [L, L, S]."""
    if table.inflow_seconds is None or not kinds:
        return np.zeros((table.num_layers, len(kinds), 1)), np.zeros(len(kinds), dtype=np.int64)
    received = table.inflow_seconds[:, kinds][:, :, kinds]
    # What no stage can receive tells no senders apart.
    occurs: NDArray[np.bool_] = np.any(possible, axis=1)
    received = np.where(occurs[:, None, :], received, 0.0)
    # Nothing is sent to the first stage.
    received[0] = 0.0
    by_sender, sender = np.unique(received.transpose(1, 0, 2).reshape(len(kinds), -1), axis=0, return_inverse=True)
    inflow = by_sender.reshape(-1, table.num_layers, len(kinds)).transpose(1, 2, 0)
    return np.ascontiguousarray(inflow), sender.reshape(-1).astype(np.int64)


def _states(
    table: StageTable, kinds: list[int], devices: tuple[int, ...]
) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """Return `shift` and `block` of each kind, and the number of states; see `stage_kernels`."""
    sizes, groups = table.submesh_devices, table.groups
    units = [gcd(size, *(sizes[k] for k in kinds if groups[k] == group)) for group, size in enumerate(devices)]
    digits = [size // unit + 1 for size, unit in zip(devices, units, strict=True)]
    steps = [prod(digits[group + 1 :]) for group in range(len(digits))]
    num_states = prod(digits)
    # A kind that is the whole cluster takes all digits at once.
    shift, block = np.full(len(kinds), num_states - 1), np.full(len(kinds), num_states)
    for index, kind in enumerate(kinds):
        group = groups[kind]
        if group is not None:
            shift[index] = sizes[kind] // units[group] * steps[group]
            block[index] = digits[group] * steps[group]
    return shift.astype(np.int64), block.astype(np.int64), num_states


def _bottlenecks(arrays: StageArrays) -> NDArray[np.float64]:
    """Return the bottlenecks that a stage can be, ascending; of values within `BOTTLENECK_GAP` only the largest."""
    lowest = arrays.bottleneck
    # A value counts once, at the first r that it belongs to.
    new = np.isfinite(lowest)
    new[1:] &= lowest[1:] != lowest[:-1]
    _, first, _, kind = np.nonzero(new)
    # Of a stage alone, and with the inflow from one of the sender classes.
    values = np.unique(lowest[new][:, None] + arrays.scale * arrays.inflow[first, kind])
    # The largest of a bin admits all stages of the others. It may be 0 s, whose logarithm is a bin of its own.
    with np.errstate(divide="ignore"):
        bins = np.floor(np.log(values) / np.log1p(BOTTLENECK_GAP))
    return values[np.append(bins[1:] != bins[:-1], True)] if values.size else values


def _search(sum_at: Callable[[int], float], taus: NDArray[np.float64], *, early_stop: bool) -> int:
    """Return the index of the best bottleneck; `sum_at` of the last one must be finite."""
    last = taus.size - 1
    totals: dict[int, float] = {}

    def visit(index: int) -> None:
        totals[index] = sum_at(index) + float(taus[index])

    visit(last)
    # Pairs of indices between which no value was visited; -1 stands before the first.
    pending = [(-1, last)] if early_stop else []
    for index in () if early_stop else range(last):
        visit(index)
    while pending:
        low, high = pending.pop()
        # Between equal sums the smallest tau is the best, and that one was visited.
        if high - low < 2 or (low >= 0 and sum_at(low) == sum_at(high)):
            continue
        # Nothing in between beats this bound, since F is at least that of `high`.
        if sum_at(high) + float(taus[low + 1]) >= min(totals.values()):
            continue
        middle = (low + high) // 2
        visit(middle)
        # The lower half comes first: good totals are found there. Below an infeasible value nothing is feasible.
        pending.append((middle, high))
        if sum_at(middle) < np.inf:
            pending.append((low, middle))
    # Of equal totals the smallest tau, whatever the order in which they were visited.
    return min(totals, key=lambda index: (totals[index], index))


def _show(devices: tuple[int, ...]) -> str:
    return " + ".join(map(str, devices))


def _infeasible(reason: str) -> StageChoice:
    return StageChoice(stages=(), seconds=np.inf, status=StageStatus.INFEASIBLE, reason=reason)


def _why_infeasible(dp: _StageDp) -> str:
    """Return a sentence about the limit that rules everything out; the limits are lifted one by one."""
    table, terms = dp.table, dp.terms
    least, most, devices = terms.min_stages, terms.max_stages or table.num_layers, _show(terms.devices)
    count = f"{least} to {most} stages" if least < most else f"{most} stages"
    plan = f"{count} for the {table.num_layers} layers on {devices} devices"

    def feasible(lifted: StageTable) -> bool:
        # The largest finite number: with tau = infinity, impossible stages would satisfy h <= tau.
        return _StageDp.of(lifted, terms).total(np.finfo(np.float64).max) < np.inf

    no_limit = replace(table, max_following_stages=np.full(table.seconds.shape, most))
    free = replace(no_limit, seconds=np.zeros(table.seconds.shape), update_seconds=None, filling_seconds=None)
    if not feasible(free):
        sizes = ", ".join(str(devices) for devices in sorted(set(table.submesh_devices)))
        return (
            f"No {plan}: submeshes of {sizes} devices do not add up to {devices} in so many stages."
            " Allow other submeshes or another number of stages."
        )
    if not feasible(no_limit):
        return f"No {plan}: every choice holds a stage that has no possible configuration."
    return (
        f"No {plan} fit into memory, though some would run without that limit. Use more devices, smaller or more"
        " micro-batches, or fewer stages."
    )


def compile_kernels() -> None:
    """Run every kernel on two layers; numba keeps the compiled code on disk."""
    shape = (2, 2, 1, 1)
    table = StageTable(
        seconds=np.ones(shape), max_following_stages=np.ones(shape, dtype=np.int64), submesh_devices=(1,)
    )
    solve(table, PipelineTerms(num_devices=2, num_microbatches=2))
