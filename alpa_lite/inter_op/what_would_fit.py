"""Advice if no plan fits into memory: the stage that needs the most, and the cheapest change that would help."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Protocol

import numpy as np

from alpa_lite.errors import AlpaLiteError
from alpa_lite.inter_op.loop_cuts import state_bytes
from alpa_lite.inter_op.plan_request import PlanRequest
from alpa_lite.inter_op.solved_stages import Question, SolvedStage, StagePlace
from alpa_lite.inter_op.space import Space
from alpa_lite.inter_op.stage_cost_cache import StageCostCache
from alpa_lite.inter_op.stage_costs import StageCosts
from alpa_lite.inter_op.survey import Profile
from alpa_lite.intra_op.shortage import Shortage
from alpa_lite.plan.plan import Plan
from alpa_lite.text import show_bytes, show_seconds, show_usable
from cost_models.cluster import with_times_the_hosts
from cost_models.hardware import Device

#: Number of larger numbers of micro-batches, and of doublings of the cluster, that are tried.
MAX_TRIES = 4


class MakesPlans(Protocol):
    """The interface of a planner; `planners` imports this package, and not the other way round."""

    def plan(self, request: PlanRequest) -> Plan:
        """Raises `PlanError` when there is no plan."""
        ...


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """A change to a request or planner: its description, and the planner and request to try."""

    text: str
    planner: MakesPlans
    request: PlanRequest


def more_microbatches(planner: MakesPlans, request: PlanRequest, tried: int) -> Iterator[Remedy]:
    """Yield the same planner with more micro-batches than `tried`."""
    size = request.batch_size or 1
    larger = [m for m in range(tried + 1, size + 1) if size % m == 0]
    # Evenly spread over the divisors, with the smallest and the largest.
    steps = sorted({larger[i * (len(larger) - 1) // (MAX_TRIES - 1)] for i in range(MAX_TRIES)}) if larger else []
    for m in steps:
        yield Remedy(text=f"num_microbatches={m}", planner=planner, request=replace(request, num_microbatches=m))


def more_hosts(planner: MakesPlans, request: PlanRequest) -> Iterator[Remedy]:
    """Yield the same planner on two, four, … times as many hosts."""
    for doubling in range(1, MAX_TRIES + 1):
        cluster = with_times_the_hosts(request.cluster, 1 << doubling)
        text = f"{cluster.num_hosts} hosts instead of {request.cluster.num_hosts}"
        yield Remedy(text=text, planner=planner, request=replace(request, cluster=cluster))


def cheapest_fit(without_hardware: Sequence[Remedy], with_hardware: Iterator[Remedy]) -> str:
    """Return a sentence that names the fastest of the changes that fit, or the fewest additional hosts that suffice."""
    fits: list[tuple[float, str]] = []
    for change in without_hardware:
        seconds = _predicted(change)
        if seconds is not None:
            fits.append((seconds, change.text))
    if fits:
        seconds, text = min(fits)
        return f"The cheapest change that fits: {text}, predicted {show_seconds(seconds)} per step."
    # One after the other, from the fewest hosts on: the first that fits is the answer.
    for change in with_hardware:
        seconds = _predicted(change)
        if seconds is not None:
            return f"What would fit: {change.text}, predicted {show_seconds(seconds)} per step."
    return "None of the changes tried fits either: use devices with more memory, or jax.checkpoint around the layers."


def _predicted(change: Remedy) -> float | None:
    try:
        # Without advice of its own, which would try changes of the changes.
        return change.planner.plan(replace(change.request, advise=False)).prediction.step_seconds
    except AlpaLiteError:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tight:
    """A range of the layers of a step that does not fit: the least bytes per `device` that it needs, and why.

    `in_flight`: the number of micro-batches in flight, of which fewer would fit; None if no number fits.
    """

    first: int
    last: int
    num_layers: int
    in_flight: int | None
    peak_bytes: float
    device: Device
    shortage: Shortage | None


def tightest_stage(steps: StageCostCache, space: Space, number: int, profiles: Collection[Profile]) -> str:
    """Return a sentence about the part of the step that needs the most memory even at its best.

    `number`: of micro-batches; `profiles`: of the layers under each policy that they may follow.
    """
    request = steps.request
    if not steps.solved.within_memory(number):
        _try_hardest(steps.of(number, steps.natural), space)
    tried = sorted(steps.solved.within_memory(number), key=_order)
    for _, of_step in groupby(tried, key=_order):
        tight = _tightest(steps.known, [*of_step], explain=request.advise)
        if tight is not None:
            where = f"layer {tight.first}" if tight.first == tight.last else f"layers {tight.first}..{tight.last}"
            held = f" with {tight.in_flight} micro-batches in flight" if tight.in_flight is not None else ""
            device, why = tight.device, show_shortage(tight.shortage)
            has = show_usable(device.usable_bytes, device.reserved_bytes, decimals=2)
            return (
                f"No plan fits into memory. The tightest stage is {where} of {tight.num_layers} layers{held}, "
                f"which needs at least {_show_bytes(tight.peak_bytes)} per device of {request.cluster.name} at "
                f"num_microbatches={number}; {device.name} has {has}. {why}"
            ).rstrip()
    # Each layer fits alone, so that the sum over all layers is the obstacle.
    least = min(profiles, key=lambda profile: profile.saved_bytes.sum())
    needed = _needed_by_all(request, least, number)
    return f"No plan fits into memory at num_microbatches={number}, though each layer does by itself: {needed}"


def _order(solved: SolvedStage) -> tuple[int, int, int]:
    """Return a key by which steps of the most layers come first, of these the ones that recompute most.

    Recomputation adds ops, and the more a step recomputes the less memory it needs.
    """
    step = solved.view.step
    return -solved.view.layers.num_layers, -len(step.graph.ops), id(step)


def _tightest(known: StageCosts, tried: Sequence[SolvedStage], *, explain: bool) -> Tight | None:
    """Return the shortest stage that did not fit, of several the one with the most state, and its needs.

    Stages that fit with fewer micro-batches in flight come last. None if all fitted. `known`: costs of the same search;
    `tried`: stages of one step; `explain`: say what needs the memory.
    """
    view, fitted = tried[0].view, {(s.asked.first, s.asked.last) for s in tried if s.solution.choice is not None}
    failed = [solved.asked for solved in tried if solved.solution.choice is None]
    if not failed:
        return None
    held = np.concatenate([[0.0], np.cumsum(state_bytes(view.step, view.layers))])

    def order(asked: Question) -> tuple[float, ...]:
        first, last = asked.first, asked.last
        more_state = held[first] - held[last + 1]
        return ((first, last) in fitted, last - first, more_state, -asked.submesh.num_devices, asked.in_flight)

    asked = min(failed, key=order)
    costs = replace(known, step=view.step, layers=view.layers, constraints=replace(known.constraints, pins=view.pins))
    # The search only sees that a stage does not fit. Its least memory takes longer to find, and is found for one stage.
    needs = costs.least_peak(asked, in_flight=asked.in_flight, limit_bytes=asked.limit_bytes)
    return Tight(
        first=asked.first,
        last=asked.last,
        num_layers=view.layers.num_layers,
        in_flight=asked.in_flight if (asked.first, asked.last) in fitted else None,
        peak_bytes=needs,
        device=costs.device(asked.submesh),
        shortage=costs.shortage(asked, in_flight=asked.in_flight) if explain else None,
    )


def _needed_by_all(request: PlanRequest, profile: Profile, number: int) -> str:
    """Return a clause that compares the least memory of all layers with the memory of all devices."""
    size, cluster = (request.batch_size or 1) / number, request.cluster
    fixed = float(profile.state_bytes.sum()) + (float(profile.sums_bytes.sum()) if number > 1 else 0.0)
    kept = float(profile.saved_bytes.sum()) * size
    working = float(profile.working_with(size).max())
    rooms = [(group.num_hosts, group.device) for group in cluster.groups] or [(cluster.num_hosts, cluster.device)]
    room = cluster.devices_per_host * sum(hosts * device.usable_bytes for hosts, device in rooms)
    reserve = cluster.devices_per_host * sum(hosts * device.reserved_bytes for hosts, device in rooms)
    # Memory may suffice in total and still not for any stages, whose parts are uneven.
    enough = "" if fixed + kept + working > room else ", with which no stages that were tried make do"
    return (
        f"together the {profile.num_layers} layers need at least {_show_bytes(fixed + kept + working)} "
        f"({_show_bytes(fixed)} of parameters, optimizer state and sums of gradients, {_show_bytes(kept)} that one "
        f"micro-batch keeps for its backward pass, {_show_bytes(working)} beside these), and the "
        f"{cluster.num_devices} devices of {cluster.name} have {show_usable(room, reserve, decimals=2)}{enough}."
    )


def _try_hardest(costs: StageCosts, space: Space) -> None:
    """Solve the layer with the most state on the largest submesh that makes sense for it, to learn its needs."""
    layer = int(state_bytes(costs.step, costs.layers).argmax())
    count = costs.layers.num_layers
    # Equal shares of the work, since no profile tells more here.
    useful = np.flatnonzero(space.worthwhile(np.full(count, 1 / count))[layer, layer])
    kind = max(useful.tolist() or range(len(space.kinds)), key=lambda k: space.devices[k])
    costs.solution(StagePlace(layer, layer, space.submesh(kind), space.mesh(kind, 0)))


def show_shortage(shortage: Shortage | None) -> str:
    """Return a sentence about the values that need the memory, followed by a space; empty if nothing is known."""
    sentence = shortage.sentence(show_bytes=_show_bytes) if shortage is not None else ""
    return f"{sentence} " if sentence else ""


def _show_bytes(count: float) -> str:
    # Two digits after the point: the sentences compare what is needed with what there is, which may be close.
    return show_bytes(count, decimals=2)
