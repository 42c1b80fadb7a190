"""KARMA: data parallelism beyond the memory of a device, by swapping and recomputing blocks of layers.

For each block the plan keeps what its backward pass reads, recomputes it (`Remat.FULL`), or swaps it to the memory of
the host and back (`Remat.OFFLOAD`). Wahib et al., SC 2020, describe the idea: a performance model of concurrent
computing and swapping over a full-duplex link, interleaved with recomputation, and updates that do not need all state
on the device. There is no public code, and the model below is this project's own.

Block i computes for f_i seconds forward and b_i backward, and swaps for w_i seconds each way (0 unless it swaps):

    forward     copies follow their block one after the other; the lag of the link behind the kernels is
                x_i = max(0, x_(i-1) - f_i) + w_i, and the pass takes Σ f_i + x_n
    backward    block i comes back while block i + 1 computes: w_n + Σ max(b_(i+1), w_i) + b_1
    memory      K_i = what blocks up to i store on the device
                forward of block i:  K_i + bytes of x_i seconds on the link + its temporaries
                backward of block i: K_i + what block i - 1 swaps in + its temporaries                 (time_and_peak)

Everything about block i depends on the blocks before it through K, x, and the choice of block i - 1 alone, and no more
of K or x ever helps: a dynamic program over blocks that keeps the choices that are best in one of time, K and x is
exact (`best_choices`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, cast

from alpa_lite.errors import InfeasibleError, PlanError, without_frames
from alpa_lite.inter_op.assembly import StagedStep, assembled, bytes_over, schedule_for, too_large
from alpa_lite.inter_op.loop_cuts import PipelineCut, natural_layers
from alpa_lite.inter_op.plan_request import PlanRequest
from alpa_lite.inter_op.solved_stages import SolvedStages, StagePlace
from alpa_lite.inter_op.stage_costs import Recomputed, StageConstraints, StageCosts
from alpa_lite.inter_op.what_would_fit import show_bytes
from alpa_lite.plan.parts import StageCost
from alpa_lite.plan.plan import Plan
from alpa_lite.planners.fewer_devices import AS_FAST
from alpa_lite.planners.hybrid import Hybrid, check_batch, check_host_bytes, check_host_memory, submeshes_of
from alpa_lite.planners.planner import Planner
from alpa_lite.schedule import OneFOneB
from alpa_lite.step.planned_step import planned_step, policies_of
from alpa_lite.step.recomputation import Remat
from alpa_lite.text import show_count
from cost_models.cluster import Cluster, with_memory_limit

CHOICES = (Remat.NONE, Remat.OFFLOAD, Remat.FULL)
"""Keep, swap and recompute; of equal plans the one that keeps more, and swaps rather than recomputes, is taken."""

AMPLE = 2.0
"""Nothing fits that takes so many times the memory by the model of this module."""

MOST_TRIES = 8
"""Choices of all blocks whose programs are priced, until one fits."""

LESS = 0.95
"""At most so much of the memory by the model of a choice that did not fit may the next one take by the model."""

LEAST_SAVED = 0.25
"""At least so many bytes of a program are taken to be saved with one of the model."""

FAR_SLOWER = 1.1
"""One choice for all blocks is not priced where it takes so many times as long by the model as one that fits."""


class BlockCost(NamedTuple):
    """A block under one choice.

    forward_seconds, backward_seconds: of its kernels and collectives.
    swap_seconds: of what it swaps, each way.
    stored_bytes: memory of a device from its forward to its backward pass.
    swap_bytes: what it swaps, on a device while it is copied.
    work_bytes: what it needs beside while it runs.
    """

    forward_seconds: float
    backward_seconds: float
    swap_seconds: float
    stored_bytes: float
    swap_bytes: float
    work_bytes: float


class _Priced(NamedTuple):
    """The plan of some choices, None if it does not fit, and the bytes that a device needs for its program."""

    plan: Plan | None
    peak_bytes: float


class Outcome(NamedTuple):
    """The seconds of both passes of all blocks, and the peak of the memory of a device, in bytes."""

    seconds: float
    peak_bytes: float


def time_and_peak(blocks: Sequence[BlockCost], bytes_per_second: float) -> Outcome:
    """Return the outcome of blocks under one choice each, by going through both passes in the order of time.

    bytes_per_second: rate of the link, by which what waits for it takes memory.
    """
    now, copied, held, peak = 0.0, 0.0, 0.0, 0.0
    for block in blocks:
        now += block.forward_seconds
        copied = max(now, copied) + block.swap_seconds
        held += block.stored_bytes
        peak = max(peak, held + bytes_per_second * (copied - now) + block.work_bytes)
    # The backward pass begins with the last block, which waits for its own copies.
    now = copied + (blocks[-1].swap_seconds if blocks else 0.0)
    for number in range(len(blocks) - 1, -1, -1):
        block, below = blocks[number], blocks[number - 1] if number else None
        peak = max(peak, held + (below.swap_bytes if below else 0.0) + block.work_bytes)
        now += max(block.backward_seconds, below.swap_seconds if below else 0.0)
        held -= block.stored_bytes
    return Outcome(now, peak)


class _Label(NamedTuple):
    """Some first blocks with their choices: the seconds so far, without x, the bytes they store, and the lag x."""

    seconds: float
    choices: tuple[int, ...]
    stored_bytes: float
    lag_seconds: float


def best_choices(
    blocks: Sequence[Sequence[BlockCost]], memory_bytes: float, bytes_per_second: float
) -> tuple[int, ...] | None:
    """Return the number of the choice of each block that takes the least time within the memory; None if none fits.

    blocks: for each block its cost under each choice. Of equally fast ones, those with the smallest numbers are taken.
    """
    labels = [_Label(0.0, (), 0.0, 0.0)]
    for number, options in enumerate(blocks):
        longer = list[_Label]()
        for label in labels:
            below = blocks[number - 1][label.choices[-1]] if number else None
            for choice, block in enumerate(options):
                stored = label.stored_bytes + block.stored_bytes
                lag = max(0.0, label.lag_seconds - block.forward_seconds) + block.swap_seconds
                coming = below.swap_bytes if below else 0.0
                if stored + max(bytes_per_second * lag, coming) + block.work_bytes > memory_bytes:
                    continue
                both = block.forward_seconds + max(block.backward_seconds, below.swap_seconds if below else 0.0)
                longer.append(_Label(label.seconds + both, (*label.choices, choice), stored, lag))
        labels = [label for choice in range(len(options)) for label in _undominated(longer, choice)]
    ends = ((label.seconds + label.lag_seconds + _last(blocks, label), label.choices) for label in labels)
    return min(ends, default=(math.inf, None))[1]


def _last(blocks: Sequence[Sequence[BlockCost]], label: _Label) -> float:
    return blocks[-1][label.choices[-1]].swap_seconds if blocks else 0.0


def _undominated(labels: Sequence[_Label], choice: int) -> list[_Label]:
    """Return the labels that end with a choice and are best in something."""
    found = list[_Label]()
    for label in sorted(label for label in labels if label.choices[-1] == choice):
        if not any(a.stored_bytes <= label.stored_bytes and a.lag_seconds <= label.lag_seconds for a in found):
            found.append(label)
    return found


@dataclass(frozen=True, kw_only=True)
class Karma(Planner):
    """Data parallelism whose blocks of layers keep, recompute or swap what their backward pass reads.

    Attributes:
        memory_bytes: memory of a device that the plan may use; None: all that is usable.
        zero: 0 (replicated state), 1 (optimizer state split over the devices), 3 (parameters too).
        host_optimizer: whether the state of the optimizer waits on the host; None: where the plan does not fit
            otherwise, or is slower.
    """

    memory_bytes: float | None = None
    zero: int = 0
    host_optimizer: bool | None = None

    @property
    def name(self) -> str:
        """Name for tables."""
        return "karma" + (f" × zero{self.zero}" if self.zero else "")

    def plan(self, request: PlanRequest, blocks: KarmaBlocks | None = None) -> Plan:
        """Return the fastest plan that fits. Raises `InfeasibleError` if none does.

        `blocks`: those of the request (`blocks_of`), where they were asked for before.
        """
        check_host_memory(self.name, request.cluster)
        if self.memory_bytes is not None and not self.memory_bytes > 0:
            raise PlanError(f"memory_bytes={self.memory_bytes!r} was given; it must be a number of bytes above 0.")
        limited = replace(request, cluster=self._limited(request.cluster))
        ways = (False, True) if self.host_optimizer is None else (self.host_optimizer,)
        plans, problems = list[Plan](), list[InfeasibleError]()
        for host_optimizer in ways:
            blocks = KarmaBlocks(self, limited, host_optimizer, known=blocks)
            try:
                plans.append(blocks.plan())
            except InfeasibleError as error:
                problems.append(error)
            else:
                # Where all is kept, or room for the state is of little use, nothing on the host is faster.
                gain = blocks.seconds_gained_by_room(plans[-1]) if plans[-1].remat else 0.0
                if gain <= AS_FAST * plans[-1].prediction.step_seconds:
                    break
        if not plans:
            raise problems[-1]
        best = min(plans, key=lambda plan: plan.prediction.step_seconds)
        return replace(best, cluster=request.cluster)

    def blocks_of(self, request: PlanRequest) -> KarmaBlocks:
        """Return the blocks of a request, nothing of which is solved yet."""
        check_host_memory(self.name, request.cluster)
        return KarmaBlocks(self, replace(request, cluster=self._limited(request.cluster)), host_optimizer=False)

    def _limited(self, cluster: Cluster) -> Cluster:
        return cluster if self.memory_bytes is None else with_memory_limit(cluster, self.memory_bytes)


class KarmaBlocks:
    """The blocks of a step under each choice, on the devices of a request."""

    def __init__(
        self, planner: Karma, request: PlanRequest, host_optimizer: bool, known: KarmaBlocks | None = None
    ) -> None:
        """Solve nothing yet. `known`: the same blocks with the state of the optimizer elsewhere, if there are any."""
        self.known = (known.known or known) if known is not None else None
        # Why the last program that was priced does not fit, if one does not.
        self.problem = cast("InfeasibleError | None", None)
        self.planner, self.host_optimizer, self.started = planner, host_optimizer, time.perf_counter()
        self.request, self.solved = request.under(OneFOneB(), 1), SolvedStages()
        self.base = Hybrid(zero=planner.zero)
        self.mesh, count = self.base.mesh(self.request), request.cluster.num_devices
        (self.submesh,) = submeshes_of(request.cluster, [count])
        numbers = self.base.default_microbatches(request.batch_size, count)
        self.cut: PipelineCut = natural_layers(self.request, numbers, (1,))
        check_batch(planner.name, self.cut.step, count)

    def plan(self) -> Plan:
        """Return a plan whose program fits as it is priced.

        None that keeps, swaps or recomputes all is faster, unless it takes far longer by the model of this module.
        """
        number, microbatches = self.cut.layers.num_layers, self.cut.step.num_microbatches
        keep, *others = ((policy,) * number for policy in CHOICES)
        tried = {keep: self._assembled(keep)}
        if tried[keep].plan is None:
            tried |= self._within_memory(tried[keep].peak_bytes)
            # What does not fit by the model, or is slower by it, may fit or be faster as the program is priced.
            fit = [self._by_model(policies).seconds for policies, way in tried.items() if way.plan is not None]
            at_most = FAR_SLOWER * min(fit, default=math.inf)
            others = [each for each in others if each not in tried and self._by_model(each).seconds <= at_most]
            tried |= {each: self._assembled(each) for each in others}
        if plans := [way.plan for way in tried.values() if way.plan is not None]:
            return min(plans, key=lambda plan: plan.prediction.step_seconds)
        if self.problem is not None:
            raise self.problem
        needed, how = min(
            (self._costs((policy,) * number).solution(self._place(number, 0)).peak_bytes, how)
            for policy, how in ((Remat.FULL, "recomputed"), (Remat.OFFLOAD, "swapped"))
        )
        raise InfeasibleError(
            f"{self.planner.name} does not fit: with every block {how} a device needs {show_bytes(needed)} at "
            f"{show_count(microbatches, 'micro-batch')}. Use more micro-batches, zero=3, or host_optimizer=True."
        )

    def seconds_gained_by_room(self, plan: Plan) -> float:
        """Return by how much a plan of these blocks would be faster by this model if all state were on the host."""
        now = self._by_model(plan.remat)
        limit = now.peak_bytes + plan.stages[0].cost.state_bytes
        # Sums of bytes in another order may exceed those of the plan by rounding: then there is nothing to gain.
        choices = best_choices(self.blocks, limit, self._rate) or ()
        then = self._by_model([CHOICES[choice] for choice in choices]) if choices else now
        return plan.num_microbatches * (now.seconds - then.seconds)

    def _within_memory(self, peak_bytes: float) -> dict[tuple[Remat, ...], _Priced]:
        """Return the choices that were priced until one fits; `peak_bytes`: where all is kept.

        The model of this module counts arrays between two blocks for both, so that more than all memory may fit by it:
        how many bytes of the program one of the model stands for follows from the programs that were priced.
        """
        tried, room, bytes_of_one = dict[tuple[Remat, ...], _Priced](), self._room_bytes, 1.0
        of_model = self._by_model((Remat.NONE,) * self.cut.layers.num_layers).peak_bytes
        for _ in range(MOST_TRIES):
            limit = min(of_model - (peak_bytes - room) / bytes_of_one, LESS * of_model)
            choices = best_choices(self.blocks, limit, self._rate)
            if choices is None:
                break
            policies = tuple(CHOICES[choice] for choice in choices)
            tried[policies] = priced = self._assembled(policies)
            if priced.plan is not None:
                break
            before, of_model = of_model, self._by_model(policies).peak_bytes
            saved, peak_bytes = peak_bytes - priced.peak_bytes, priced.peak_bytes
            bytes_of_one = min(max(saved / (before - of_model), LEAST_SAVED), 1.0)
        return tried

    def _by_model(self, policies: Sequence[Remat]) -> Outcome:
        """Return the outcome of the blocks under these policies by the model of this module."""
        chosen = zip(self.blocks, policies, strict=True)
        # The last block has one choice.
        return time_and_peak([of[min(CHOICES.index(policy), len(of) - 1)] for of, policy in chosen], self._rate)

    def least_seconds(self) -> float:
        """Return the seconds of both passes of all micro-batches by the model of this module, with ample memory.

        Infinite if the blocks do not fit even so. Collectives of one block do not hide behind another one here, as they
        may in a plan. It takes a fraction of the time of a plan.
        """
        choices = best_choices(self.blocks, AMPLE * self._room_bytes, self._rate)
        if choices is None:
            return math.inf
        return self.cut.step.num_microbatches * self._by_model([CHOICES[choice] for choice in choices]).seconds

    @property
    def _room_bytes(self) -> float:
        return self._costs((Remat.NONE,) * self.cut.layers.num_layers).room_bytes(self.submesh)

    @property
    def _rate(self) -> float:
        host = self.request.cluster.host_memory
        assert host is not None, "it was checked"
        return host.link.bytes_per_second

    def _place(self, per_stage: int, number: int) -> StagePlace:
        return StagePlace.nth(number, per_stage, self.submesh, self.mesh)

    def _costs(self, wanted: Sequence[Remat]) -> StageCosts:
        """Return the costs of stages of the step whose blocks follow these policies."""
        step, layers, request = self.cut.step, self.cut.layers, self.request
        remat = policies_of(step, layers, wanted)
        planned = planned_step(step, layers.of_op, remat, host_optimizer=self.host_optimizer)
        return StageCosts(
            step=planned.step,
            layers=replace(layers, of_op=planned.of_op),
            cost_model=request.cost_model,
            cost_model_for=request.cost_model_for,
            constraints=StageConstraints(restriction=self.base.restriction()),
            recomputed=Recomputed(remat=remat, traced_layers=layers.of_op, host_optimizer=self.host_optimizer),
            progress=request.progress,
            solved=self.solved,
        )

    @cached_property
    def blocks(self) -> list[list[BlockCost]]:
        """Return the cost of each block under each of `CHOICES`."""
        if self.known is not None:
            # Where the state of the optimizer waits matters for the update alone.
            return self.known.blocks
        number, per_policy = self.cut.layers.num_layers, dict[Remat, list[StageCost]]()
        for policy in Remat:
            costs = self._costs((policy,) * number)
            places = (self._place(1, block) for block in range(number))
            per_policy[policy] = [costs.solution(place, limit_bytes=math.inf).cost for place in places]
        found, link = list[list[BlockCost]](), self.request.cluster.host_memory
        assert link is not None, "it was checked"
        for block in range(number):
            kept, swapped = per_policy[Remat.SELECTIVE][block], per_policy[Remat.OFFLOAD][block]
            moved = max(0.0, kept.activation_bytes - swapped.activation_bytes)
            options = list[BlockCost]()
            for policy in CHOICES:
                cost, swaps = per_policy[policy][block], moved if policy is Remat.OFFLOAD else 0.0
                options.append(
                    BlockCost(
                        forward_seconds=per_policy[Remat.NONE][block].forward_seconds,
                        backward_seconds=per_policy[policy.recomputed][block].backward_seconds,
                        swap_seconds=link.link.seconds(swaps) if swaps else 0.0,
                        stored_bytes=cost.activation_bytes,
                        swap_bytes=swaps,
                        work_bytes=cost.temporary_bytes,
                    )
                )
            # The last block keeps everything: its backward pass follows at once (`policies_of`).
            found.append(options if any(option != options[0] for option in options) else options[:1])
        return found

    def _assembled(self, policies: Sequence[Remat]) -> _Priced:
        """Return the plan whose blocks follow these policies, without it if it has no room on devices or the host."""
        costs, number = self._costs(policies), self.cut.layers.num_layers
        place = self._place(number, 0)
        solution = costs.solution(place)
        if solution.choice is None:
            return _Priced(None, solution.peak_bytes)
        schedule = schedule_for(costs.step, OneFOneB())
        staged = StagedStep(
            step=costs.step, layers=costs.layers, stages=[place.with_solution(solution)], schedule=schedule
        )
        plan = assembled(self.planner.name, self.request, staged, self.started)
        try:
            # The program as it is priced may hold more than the stage by itself.
            if bytes_over(plan):
                raise too_large(plan)
            check_host_bytes(plan)
        except InfeasibleError as problem:
            self.problem = without_frames(problem)
            return _Priced(None, plan.prediction.peak_bytes[0])
        return _Priced(costs.recomputed.recorded_in(plan), plan.prediction.peak_bytes[0])
