"""The time and memory of layers: each on one device (`Profile`), and a few on every logical mesh (`Survey`).

A profile measures layers against each other, and tells what can fit at all. On n devices a stage of layers i..j that
has h micro-batches of b samples in flight at its peak needs at least about

    state + sums + (h - 1) sum of saved + max over l of (saved of layers up to l + working(l)), over n  `Profile.holds`

where what a layer saves per micro-batch and works with grows with b.

A survey tells what stages would take at any number of micro-batches, from a few layers solved at a few numbers of them.
With b samples in a micro-batch, layer l on a logical mesh takes per micro-batch about

    t(l,b) = t(r,b) * loop(l) / loop(r),  and per step                                                  `Survey.guess`
    u(l) = min(u(r), alone(r)) * alone(l) / alone(r) + reduced(l)

where r is a layer that stands for l (`representatives`; on all devices together, the only stage of a plan without a
pipeline, an equal one where much would be guessed), loop is what they take on one device, t(r,b) lies on straight
lines through the sizes that were solved (latency and the gathering of weights do not shrink with b, the rest does), and
of the update u alone is what it takes on one device, and reduced what it takes longer than that, which follows from the
bytes of gradients that a layer makes (`_reduced`): it may add to the gradient of a weight that another layer updates.
These are guesses: they say where to look first, and the search puts costs in the place of those that its answer depends
on (`stage_search`).

Shapes that hold state whole on each of several hosts are not surveyed: without a limit of memory they take about as
long as those that may split it between hosts (`Space.stand_ins`).

Layers are surveyed without a limit of memory. Where a stage has memory for what its layers took, the guess is about
what it will take; elsewhere it will take longer, nobody knows how much (`Survey.holds`). What is kept for gradients
that are made at the end of the backward pass of several layers is not counted (`intra_op.stored_values`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from alpa_lite.inter_op.solved_stages import StagePlace
from alpa_lite.inter_op.space import Space
from alpa_lite.inter_op.stage_costs import StageCosts, expect
from alpa_lite.plan.parts import StageCost
from alpa_lite.sharding.meshes import LogicalMesh, Submesh

FloatArray = NDArray[np.float64]

MEMORY_SLACK = 1.1
"""The factor by which a stage may seem to exceed the memory of a device before it is left out."""

SAVES = 1.3
"""A policy of rematerialisation that stores this many times as much as a faster one is not worth it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Profile:
    """Time and memory of each layer on one device, arrays [layers].

    loop_seconds     of both passes of a micro-batch of `samples` samples
    update_seconds   of the update
    state_bytes      of parameters and optimizer state
    sums_bytes       of the sums of gradients over several micro-batches
    saved_bytes      that the forward pass saves, per sample
    working_bytes    that a layer works with in addition, for `samples` samples
    forward_share    the share of the forward pass in the seconds of both passes, of all layers together
    whole            the profile of all layers as the only one, if they save less so (`StageCosts.whole`)
    """

    loop_seconds: FloatArray
    update_seconds: FloatArray
    state_bytes: FloatArray
    sums_bytes: FloatArray
    saved_bytes: FloatArray
    working_bytes: FloatArray
    samples: float
    forward_share: float
    whole: Profile | None = None

    @staticmethod
    def of(costs: StageCosts) -> Profile:
        """Solve each layer on one device, without a limit of memory."""
        size = float(microbatch_size(costs) or 1)
        free = costs.with_pins({})
        layers = [alone_on_a_device(free, layer) for layer in range(costs.layers.num_layers)]
        return Profile(
            loop_seconds=np.array([cost.loop_seconds for cost in layers]),
            update_seconds=np.array([cost.update_seconds for cost in layers]),
            state_bytes=np.array([cost.state_bytes for cost in layers]),
            sums_bytes=np.array([cost.accumulator_bytes for cost in layers]),
            saved_bytes=np.array([cost.activation_bytes for cost in layers]) / size,
            working_bytes=np.array([cost.temporary_bytes for cost in layers]),
            samples=size,
            forward_share=sum(c.forward_seconds for c in layers) / max(sum(c.loop_seconds for c in layers), 1e-30),
            whole=None if costs.whole is costs else Profile.of(costs.whole),
        )

    def beats(self, other: Profile) -> bool:
        """Return True if layers are faster under this policy of rematerialisation, and most store hardly more."""
        more = np.median(self.saved_bytes / np.maximum(other.saved_bytes, 1.0))
        return bool(self.loop_seconds.sum() < other.loop_seconds.sum() and more < SAVES)

    def working_with(self, size: float) -> FloatArray:
        """Return [layers]: the least bytes that layers work with in addition to those that they save."""
        # What the update works with does not grow with the micro-batch, so that nothing is extrapolated upwards.
        return self.working_bytes * min(1.0, size / self.samples)

    @property
    def reduction_measure(self) -> FloatArray:
        """[layers]: what the reductions of gradients are proportional to."""
        # Without several micro-batches there are no sums, and gradients are reduced in the backward pass.
        return self.sums_bytes if self.sums_bytes.any() else self.update_seconds

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return self.loop_seconds.size

    @property
    def shares(self) -> FloatArray:
        """[layers]: each layer's share of the seconds of both passes."""
        return self.loop_seconds / max(float(self.loop_seconds.sum()), 1e-30)

    def holds(self, space: Space, size: float, number: int, in_flight: Sequence[int]) -> NDArray[np.int64]:
        """Return [layers, layers, kinds]: for how many of the numbers `in_flight` (ascending) stages may have memory.

        `number`: of micro-batches, of `size` samples each.
        """
        # At best the devices of a stage share all bytes equally.
        room = MEMORY_SLACK * space.room_bytes * np.array(space.devices, dtype=float)
        fixed = self.state_bytes + (self.sums_bytes if number > 1 else 0.0)
        saved, working = self.saved_bytes * size, self.working_with(size)
        found = in_flight_within(room, fixed[:, None], saved[:, None], working[:, None], in_flight)
        if self.whole is not None:
            found[0, -1] = np.maximum(found[0, -1], self.whole.holds(space, size, number, in_flight)[0, 0])
        return found

    def least_bytes(self, size: float, number: int, num_devices: int, num_stages: int) -> float:
        """Return the bytes per device of equal stages at best, with `number` micro-batches of `size` samples."""
        if num_stages == 1 and self.whole is not None:
            return self.whole.least_bytes(size, number, num_devices, num_stages)
        # The first stage holds as many micro-batches as there are stages.
        held = self.saved_bytes.sum() * size * min(number, num_stages)
        fixed = self.state_bytes.sum() + (self.sums_bytes.sum() if number > 1 else 0.0)
        return float((fixed + held + num_stages * self.working_with(size).max()) / num_devices)


def alone_on_a_device(costs: StageCosts, layer: int) -> StageCost:
    """Return the cost of a layer on one device, without a limit of memory."""
    # Pins name the axes of other logical meshes.
    device = Submesh(first_device=0, num_hosts=1, devices_per_host=1)
    mesh = LogicalMesh(axis_names=("x",), shape=(1,))
    return costs.with_pins({}).solution(StagePlace(layer, layer, device, mesh), limit_bytes=math.inf).cost


def in_flight_within(
    room: FloatArray, fixed: FloatArray, saved: FloatArray, working: FloatArray, in_flight: Sequence[int]
) -> NDArray[np.int64]:
    """Return [layers, layers, …]: for how many of the numbers `in_flight` (ascending) stages have memory.

    `fixed`, `saved` and `working` bytes of each layer are [layers, …]; see the module docstring. Bytes that are unknown
    are infinite, and do not fit.
    """
    fixed_of, saved_of = (_of_ranges(part) for part in (fixed, saved))
    # In the backward pass of layer l the layers up to l still hold what they saved, and those after it hold no more.
    peak = np.zeros_like(saved_of)
    for first in range(fixed.shape[0]):
        peak[first, first:] = np.maximum.accumulate(saved_of[first, first:] + working[first:])
    least = fixed_of + peak
    found = np.zeros(np.broadcast_shapes(least.shape, room.shape), dtype=np.int64)
    with np.errstate(invalid="ignore"):
        for number, times in Counter(in_flight).items():
            found += times * (least + (number - 1) * saved_of <= room)
    return found


def _of_ranges(part: FloatArray) -> FloatArray:
    """Return [layers, layers, …]: sums over layer ranges of [layers, …]; infinite where a layer of a range is."""
    # Infinite layers are counted apart: in the cumulative sums they would make all later differences ∞ - ∞.
    finite = np.isfinite(part)
    sums, missing = (
        np.concatenate([np.zeros((1, *part.shape[1:])), np.cumsum(each, axis=0)])
        for each in (np.where(finite, part, 0.0), ~finite)
    )
    complete = missing[None, 1:] == missing[:-1, None]
    return np.where(complete, sums[None, 1:] - sums[:-1, None], np.inf)


def microbatch_size(costs: StageCosts) -> int | None:
    """Return the samples per micro-batch; None without a batch."""
    step = costs.step
    return None if step.batch.size is None else step.batch.size // step.num_microbatches


def summed(alone: NDArray[np.float64], possible: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return [layers, layers, kinds, shapes]: sums over layer ranges of the seconds `alone` [layers, kinds, shapes].

    They are infinite where a stage is not `possible`, or the seconds of a layer are infinite.
    """
    return np.where(possible[..., None], _of_ranges(alone), np.inf)


Beyond = Literal["as before", "more shared"]
"""Assumption for micro-batches larger than the surveyed ones: devices share the work no better than before; they share
the additional work without loss."""

MAX_REPRESENTATIVES = 4
ENOUGH = 0.6
"""Layers are surveyed until they represent this share of both passes and of the update, but at most so many."""

WELL = 0.7
"""Where layers equal to a surveyed one take less than this share, each layer is surveyed on all devices together."""

AGAIN = 1 / 3
"""The share of the surveyed logical meshes that are usually promising enough to be surveyed again."""

FAR = 1.4
"""A logical mesh is surveyed again if a layer takes at most so many times as long there as on the submesh's best."""

DEAR = 2.0
"""A submesh is surveyed no further if it takes so many times as many device seconds as another that has memory, and of
which a stage per layer can fill the cluster, unless it has all devices. Smaller micro-batches only make it worse."""

FIRST_SHAPES = 2
"""Number of logical meshes of a submesh that are always surveyed: that of one axis, and that of hosts and devices."""


def representatives(structures: Sequence[object], seconds: FloatArray) -> list[int]:
    """Return for each layer the layer that represents it: an equal one if these take much time, else the nearest one.

    `structures`: equal for equal layers; `seconds`: [2, layers], of both passes and of the update.
    """
    weight: dict[object, FloatArray] = {}
    # Without an update all its shares are 0 rather than NaN.
    shares = seconds / np.maximum(seconds.sum(axis=1, keepdims=True), 1e-30)
    for structure, share in zip(structures, shares.T, strict=True):
        weight[structure] = weight.get(structure, np.zeros(2)) + share
    chosen: list[object] = []
    left = shares.sum(axis=1)
    while not chosen or ((left > 1 - ENOUGH).any() and len(chosen) < MAX_REPRESENTATIVES):
        # Both kinds of seconds must be represented: the next structure is the largest in the one that is less so.
        chosen.append(max(weight, key=lambda s: weight[s][left.argmax()]))
        left = left - weight.pop(chosen[-1])
    first = {s: list(structures).index(s) for s in chosen}
    standing = np.array([i for i, s in enumerate(structures) if s in first])
    nearest = (int(standing[np.abs(standing - i).argmin()]) for i in range(len(structures)))
    return [first[structures[n]] for n in nearest]


@dataclass(frozen=True, slots=True, eq=False)
class _Taken:
    """Seconds and bytes of a layer at one size of micro-batches, arrays [kinds, shapes]; infinite where unknown.

    `alone_seconds` and `updated_alone` are [1, 1]: of both passes and of the update on one device. `saved_bytes` is per
    sample.
    """

    alone_seconds: FloatArray
    updated_alone: FloatArray
    loop_seconds: FloatArray
    update_seconds: FloatArray
    state_bytes: FloatArray
    sums_bytes: FloatArray
    saved_bytes: FloatArray
    working_bytes: FloatArray

    @property
    def own_update(self) -> FloatArray:
        """[kinds, shapes]: of the update, what it takes without reductions at most."""
        return np.minimum(self.update_seconds, self.updated_alone)

    @property
    def reduced(self) -> FloatArray:
        """[kinds, shapes]: how much longer the update takes than on one device, for reductions of gradients."""
        return np.maximum(0.0, self.update_seconds - self.updated_alone)

    def beside(self, other: _Taken) -> _Taken:
        """Return these figures, and those of other logical meshes where they are unknown."""
        return _Taken(*(np.minimum(getattr(self, f.name), getattr(other, f.name)) for f in fields(_Taken)))


class Survey:
    """Seconds of a few layers on every logical mesh of a space, at some numbers of micro-batches."""

    def __init__(self, space: Space, profile: Profile, structures: Sequence[object]) -> None:
        """Start without surveyed layers; `structures` are equal for equal layers."""
        self.space, self.profile = space, profile
        seconds = np.stack([profile.loop_seconds, profile.update_seconds])
        self._stands = representatives(structures, seconds)
        equal = [*map([*structures].index, structures)]
        known = seconds[:, np.isin(equal, self._stands)].sum(axis=1) >= WELL * seconds.sum(axis=1)
        self._equal = self._stands if known.all() else equal
        self._whole: NDArray[np.bool_] = np.array(space.devices)[:, None] == space.cluster.num_devices
        self._taken: dict[float, dict[int, _Taken]] = {}
        self._numbers: dict[float, int] = {}
        self._between: dict[float, dict[int, _Taken]] = {}
        nowhere = np.zeros((len(space.kinds), space.most_shapes))
        self._seen = dict.fromkeys((*self._stands, *self._equal), nowhere)

    def add(self, costs: StageCosts, *, further: int = 0, kinds: Collection[int] = ()) -> None:
        """Solve the layers that represent others, at the micro-batch size of a step; `further` steps follow.

        `kinds`: solve on all logical meshes of these kinds of submesh alone; without, on promising ones of all kinds.
        """
        asked, possible = np.isin(np.arange(len(self.space.kinds)), [*kinds])[:, None], self._possible(costs)

        def promising(layer: int) -> NDArray[np.bool_]:
            return possible & (asked if kinds else self._promising(layer))

        self._take(costs, {layer: promising(layer) for layer in self._stands}, further)
        # What is far from the best for those that represent others is so for these.
        close = np.stack([promising(layer) for layer in self._stands]).any(axis=0) & self._whole
        self._take(costs, {layer: close for layer in self._equal if layer not in self._stands}, further)

    def _take(self, costs: StageCosts, wanted: Mapping[int, NDArray[np.bool_]], further: int) -> None:
        """Solve layers on logical meshes [kinds, shapes] each, at the micro-batch size of a step; see `add`."""
        size, progress = float(microbatch_size(costs) or 1), costs.progress
        taken = self._taken.setdefault(size, {})
        self._numbers[size] = costs.step.num_microbatches
        # What lies between surveyed sizes changes with a new one.
        self._between.clear()
        for layer in wanted:
            # Where only smaller micro-batches were found too slow, larger ones are still to be seen.
            here = np.where(wanted[layer], size, 0.0)
            self._seen[layer] = np.maximum(self._seen[layer], np.take_along_axis(here, self.space.stand_ins, axis=1))
        num_solves = sum(int(each.sum()) for each in wanted.values())
        progress.expect("survey", num_solves * (1 + AGAIN * further))
        self.expect(costs, wanted)
        for layer, where in wanted.items():
            found = self._look(costs, layer, where, size)
            taken[layer] = found.beside(taken[layer]) if layer in taken else found
        progress.expect("survey", num_solves * AGAIN * further)

    def _look(self, costs: StageCosts, layer: int, where: NDArray[np.bool_], size: float) -> _Taken:
        """Solve a layer on logical meshes [kinds, shapes], and leave submeshes that turn out to be expensive."""
        alone = alone_on_a_device(costs, layer)
        figures = np.full((6, *where.shape), np.inf)
        taken = _Taken(np.full((1, 1), alone.loop_seconds), np.full((1, 1), alone.update_seconds), *figures)
        for k, c in np.argwhere(where).tolist():
            # All devices together are the only stage of a plan without a pipeline, however badly they share the work.
            if c >= FIRST_SHAPES and not self._whole[k] and not self._cheap(taken, size)[k]:
                continue
            found = costs.solution(self._place(layer, k, c), limit_bytes=math.inf)
            if found.choice is not None:
                cost = found.cost
                figures[:, k, c] = (
                    cost.loop_seconds,
                    cost.update_seconds,
                    cost.state_bytes,
                    cost.accumulator_bytes,
                    cost.activation_bytes / size,
                    cost.temporary_bytes,
                )
        # `taken` holds views of `figures`, which are filled in from the stand-ins here.
        figures[:] = np.take_along_axis(figures, self.space.stand_ins[None], axis=2)
        return taken

    def expect(
        self, costs: StageCosts, wanted: Mapping[int, NDArray[np.bool_]] | None = None, *, later: bool = False
    ) -> None:
        """Let workers start on layers on logical meshes [kinds, shapes], by default on all of them."""
        wanted = dict.fromkeys(self._stands, self._possible(costs)) if wanted is None else wanted
        looked_at = [(layer, k, c) for layer, where in wanted.items() for k, c in np.argwhere(where).tolist()]
        # First those that are solved in any case. The survey itself solves the layers in the opposite order, so that
        # workers and survey meet late.
        ordered = sorted(reversed(looked_at), key=lambda each: each[2] >= FIRST_SHAPES)
        places = (self._place(*each) for each in ordered)
        expect(((costs, costs.question(place, limit_bytes=math.inf)) for place in places), later=later)

    def _place(self, layer: int, kind: int, shape: int) -> StagePlace:
        return StagePlace(layer, layer, self.space.submesh(kind), self.space.mesh(kind, shape))

    def _possible(self, costs: StageCosts) -> NDArray[np.bool_]:
        """Return [kinds, shapes]: logical meshes that divide the micro-batches of a step and have no stand-in."""
        alone = self.space.stand_ins == np.arange(self.space.most_shapes)
        return self.space.divides(microbatch_size(costs)) & alone

    def reaches(self, kind: int, size: float) -> bool:
        """Return True if layers were surveyed on a kind of submesh with micro-batches of this size or larger."""
        return all(bool(self._seen[layer][kind].max() >= size) for layer in self._stands)

    @property
    def numbers(self) -> list[int]:
        """The numbers of micro-batches at which layers were solved."""
        return [*self._numbers.values()]

    @property
    def first_size(self) -> float:
        """Samples per micro-batch of the first surveyed step, for which layers were solved on all logical meshes."""
        return next(iter(self._taken))

    def _promising(self, layer: int) -> NDArray[np.bool_]:
        """Return [kinds, shapes]: where a layer was at some size nearly as fast as on the best mesh of the submesh."""
        found = np.zeros((len(self.space.kinds), self.space.most_shapes), dtype=np.bool_)
        for size, layers in self._taken.items():
            taken = layers[layer]
            seconds = taken.loop_seconds + taken.update_seconds / self._numbers[size]
            found |= (seconds <= FAR * seconds.min(axis=1, keepdims=True)) & self._cheap(taken, size)[:, None]
        # Before the first survey every mesh is promising.
        return found if self._taken else ~found

    def _cheap(self, taken: _Taken, size: float) -> NDArray[np.bool_]:
        """Return [kinds]: which submeshes take not many more device seconds than the best one so far; see `DEAR`."""
        devices = np.array(self.space.devices)
        enough = devices * self.profile.num_layers >= self.space.cluster.num_devices
        best = (taken.loop_seconds + taken.update_seconds / self._numbers[size]).min(axis=1) * devices
        bytes_ = taken.state_bytes + taken.sums_bytes + taken.saved_bytes * size + taken.working_bytes
        has_room = (bytes_ <= self.space.room_bytes[:, None]).any(axis=1)
        # While no submesh is known to have memory, the limit is infinite and rules out none.
        return best <= DEAR * best[has_room & enough].min(initial=math.inf)

    def guess(
        self, size: float, profile: Profile | None = None, *, beyond: Beyond = "as before"
    ) -> tuple[FloatArray, FloatArray]:
        """Return [layers, kinds, shapes] twice: guessed seconds of each layer per micro-batch, and of its update.

        They are infinite where a logical mesh does not divide micro-batches of `size` samples. `profile`: of layers
        that recompute values; None for the surveyed ones. `beyond`: assumption for sizes above the surveyed ones.
        """
        loop, alone = self._loop_seconds(size, profile), self._alone_seconds(size, profile)
        update = self._scaled(lambda t: t.own_update, lambda p: p.update_seconds, profile, size)
        update = update + self._reduced(size)
        # Where small micro-batches cannot be split over all devices, the lines are not valid for larger ones.
        largest = self._of_layers(lambda _, at: self._seen[at])
        devices = np.array(self.space.devices, dtype=float)[:, None]
        for surveyed in self._taken:
            before, alone_before = self._loop_seconds(surveyed, profile), self._alone_seconds(surveyed, profile)
            if beyond == "as before":
                grows = np.divide(alone, alone_before, out=np.ones_like(alone), where=alone_before > 0)
                further = np.maximum(loop, before * grows)
            else:
                further = before + (alone - alone_before) / devices
            loop = np.where((largest == surveyed) & (surveyed < size), further, loop)
        possible = self.space.divides(int(size)) & np.isfinite(loop) & np.isfinite(update)
        return np.where(possible, loop, np.inf), np.where(possible, update, np.inf)

    def _reduced(self, size: float) -> FloatArray:
        """Return [layers, kinds, shapes]: how much longer updates take than on one device, to reduce gradients.

        That of a layer with fewer bytes than its representative is in proportion. For more bytes it takes as long per
        byte as where there are most: the time of few bytes is mostly latency, which does not grow with them.
        """
        taken, measure = self._taken_at(size), self.profile.reduction_measure
        most = max(self._stands, key=lambda layer: measure[layer])
        per_byte = np.nan_to_num(taken[most].reduced / max(measure[most], 1e-30), posinf=0.0)

        def reduced(layer: int, at: int) -> FloatArray:
            here = measure[layer]
            share = min(1.0, here / measure[at]) if measure[at] > 0 else 1.0
            return share * taken[at].reduced + max(0.0, here - measure[at]) * per_byte

        return self._of_layers(reduced)

    def _loop_seconds(self, size: float, profile: Profile | None) -> FloatArray:
        return self._scaled(lambda t: t.loop_seconds, lambda p: p.loop_seconds, profile, size)

    def _alone_seconds(self, size: float, profile: Profile | None) -> FloatArray:
        return self._scaled(lambda t: t.alone_seconds, lambda p: p.loop_seconds, profile, size)

    def holds(
        self, size: float, number: int, in_flight: Sequence[int], profile: Profile | None = None
    ) -> NDArray[np.int64]:
        """Return [layers, layers, kinds, shapes]: for how many of the numbers `in_flight` (ascending) there is memory.

        Layers are sharded as in the survey. `number`: of micro-batches, of `size` samples each; `profile`: as in
        `guess`.
        """
        fixed = self._scaled(lambda t: t.state_bytes, lambda p: p.state_bytes, profile, size)
        if number > 1:
            fixed = fixed + self._scaled(lambda t: t.sums_bytes, lambda p: p.sums_bytes, profile, size)
        saved = size * self._scaled(lambda t: t.saved_bytes, lambda p: p.saved_bytes, profile, size)
        # Of the bytes worked with, what the update needs does not shrink with the size.
        working = self._scaled(lambda t: t.working_bytes, lambda p: p.working_bytes, profile, size)
        return in_flight_within(self.space.room_bytes[:, None], fixed, saved, working, in_flight)

    def _scaled(
        self,
        figure: Callable[[_Taken], FloatArray],
        measure: Callable[[Profile], FloatArray],
        profile: Profile | None,
        size: float,
    ) -> FloatArray:
        """Return [layers, kinds, shapes]: a figure of each layer, scaled from its representative by `measure`.

        `figure` is taken at micro-batches of `size` samples; `measure` is of each layer on one device.
        """
        taken = self._taken_at(size)
        alone, known = measure(profile or self.profile), measure(self.profile)
        return self._of_layers(
            lambda layer, at: figure(taken[at]) * (alone[layer] / known[at] if known[at] > 0 else 1.0)
        )

    def _of_layers(self, figure: Callable[[int, int], FloatArray]) -> FloatArray:
        """Return [layers, kinds, shapes]: `figure(layer, at)`, where `at` is the layer that represents a layer.

        On all devices together it is the first equal layer, if that was solved.
        """
        found = list[FloatArray]()
        for layer, (equal, stands) in enumerate(zip(self._equal, self._stands, strict=True)):
            own = self._whole & (self._seen[equal] > 0)
            # A layer that takes nothing on one device takes nothing on others, though ∞ · 0 is no number.
            with np.errstate(invalid="ignore"):
                found.append(np.where(own, figure(layer, equal), figure(layer, stands)))
        return np.nan_to_num(np.stack(found), posinf=np.inf)

    def _taken_at(self, size: float) -> dict[int, _Taken]:
        """Return the figures of the representatives at a size, interpolated between the surveyed sizes.

        Seconds of both passes lie on lines. The rest depends on the sharding more than on the size, and is taken from
        the nearest surveyed size.
        """
        if size not in self._between:
            lines, nearest = _on_lines(size), _nearest(size)
            ways = {f.name: lines if f.name in ("alone_seconds", "loop_seconds") else nearest for f in fields(_Taken)}
            sizes = sorted(self._taken)

            def between(layer: int, name: str) -> FloatArray:
                points = np.stack([getattr(self._taken[s][layer], name) for s in sizes])
                return _at_each(np.array(sizes), points, ways[name])

            layers = dict.fromkeys(self._seen)
            self._between[size] = {layer: _Taken(*(between(layer, name) for name in ways)) for layer in layers}
        return self._between[size]


_Between = Callable[[FloatArray, FloatArray], FloatArray]
"""A function from ascending sizes [sizes] and values at these [sizes, n] to values [n] at another size."""


def _at_each(sizes: FloatArray, points: FloatArray, between: _Between) -> FloatArray:
    """Return [...]: `points` [sizes, ...] interpolated between the known ones; infinite where none is known."""
    flat = points.reshape(sizes.size, -1)
    known, result = np.isfinite(flat), np.full(flat.shape[1], np.inf)
    # Columns with the same known sizes are interpolated together: there are few such patterns.
    for sizes_known in np.unique(known, axis=1).T:
        alike = (known == sizes_known[:, None]).all(axis=0)
        if sizes_known.any():
            result[alike] = between(sizes[sizes_known], flat[sizes_known][:, alike])
    return result.reshape(points.shape[1:])


def _nearest(size: float) -> _Between:
    """Return the function that takes the value at the nearest size on a logarithmic scale."""
    return lambda sizes, values: values[np.abs(np.log(sizes / size)).argmin()]


def _on_lines(size: float) -> _Between:
    """Return the function that takes the value on the line through the nearest sizes; one size gives a proportion."""

    def between(sizes: FloatArray, values: FloatArray) -> FloatArray:
        if sizes.size == 1:
            return values[0] * (size / sizes[0])
        right = int(np.clip(np.searchsorted(sizes, size), 1, sizes.size - 1))
        # Seconds that fall with more samples, as tiles are filled better, do not go on falling.
        slope = np.maximum(0.0, (values[right] - values[right - 1]) / (sizes[right] - sizes[right - 1]))
        # The part that does not shrink with the size is at least nothing.
        fixed = np.maximum(0.0, values[right] - slope * sizes[right])
        return fixed + (values[right] - fixed) * (size / sizes[right])

    return between
