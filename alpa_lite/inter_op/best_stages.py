"""The stage DP on a cluster: among stages that are alike in one of several ways, and with what hosts must dispatch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from alpa_lite.inter_op.space import Space
from alpa_lite.inter_op.stage_dp import PipelineTerms, StageChoice, StageStatus, StageTable, solve
from alpa_lite.schedule import Schedule
from cost_models.composed import CostModel

_NOTHING = StageChoice(stages=(), seconds=np.inf, status=StageStatus.INFEASIBLE, reason="No equal stages are possible.")

_ROUNDING = 1e-9
"""Sums that are the same may differ by so much."""


@dataclass(frozen=True, slots=True)
class PipelinedBatch:
    """A schedule, and the number of micro-batches that it runs.

    Attributes:
        postponed: the share of the work of a micro-batch that are gradients of weights.
        forward_share: the share of the forward pass in the work of a micro-batch, if stages run in an order that is
            made for their tasks, in the memory of the schedule; None where they run under the schedule itself.
    """

    schedule: Schedule
    num_microbatches: int
    postponed: float = 0.0
    forward_share: float | None = None

    def waiting_share(self, least_stages: int = 2) -> float:
        """Return the least share of the waiting at the beginning and at the end that is left in so many stages or more.

        Of p equal stages that take 1 for a micro-batch, f of it forward and w for gradients of weights, the last one
        waits for p - 1 forward passes. The first one computes no gradient before a micro-batch has passed through all
        stages and back, and runs the forward passes of at most m - 1 others meanwhile:

            waiting >= max((p - 1) f, (p - 1) (1 - w) - (m - 1) f)
        """
        number, stages = self.num_microbatches, max(2, least_stages)
        share = self.schedule.waiting_share(self.postponed, stages, number)
        if self.forward_share is None:
            return share
        there_and_back = 1 - self.postponed - (number - 1) / (stages - 1) * self.forward_share
        return min(share, max(self.forward_share, there_and_back))

    def in_flight(self, following: int) -> int:
        """Return the number of micro-batches in flight on a stage that `following` stages follow."""
        return self.schedule.in_flight(0, following + 1, self.num_microbatches)

    def held(self, num_layers: int) -> list[int]:
        """Return the micro-batches in flight on a stage that is followed by none, by one, up to `num_layers` - 1."""
        return [self.in_flight(following) for following in range(num_layers)]


@dataclass(frozen=True, slots=True)
class StageCounts:
    """The numbers of stages to choose from: `least` to `most`; None: as many as there are layers."""

    least: int = 1
    most: int | None = None

    def fewer_than(self, count: int) -> StageCounts:
        """Return those of the numbers that are below one of them."""
        return replace(self, most=count - 1)

    def more_than(self, count: int) -> StageCounts:
        """Return those of the numbers that are above one of them."""
        return replace(self, least=count + 1)

    @property
    def is_empty(self) -> bool:
        """Whether there is no such number."""
        return self.most is not None and self.most < self.least


@dataclass(frozen=True, kw_only=True)
class BestStages:
    """The stage DP for one step, where stages may be alike in several ways.

    Tables may hold the first configurations alone.

    ways          masks of the stages that a plan may consist of, one for each way to be alike; see `space.ways`
    num_stages    number of stages; None for the best number
    update_tasks  the most tasks that the update of a stage is, where there are several stages
    """

    space: Space
    cost_model: CostModel
    batch: PipelinedBatch
    ways: Sequence[NDArray[np.bool_]]
    num_stages: int | None
    update_tasks: int = 1

    def __call__(self, table: StageTable, counts: StageCounts | None = None) -> StageChoice:
        """Return the best stages of all ways, in one of these numbers if given; of equally good ways the first."""
        counts = self._counts if counts is None else counts
        seconds = table.seconds
        # The first stage runs for every micro-batch: no stages of a way take less than the fastest first one.
        masks = [np.broadcast_to(way[..., : seconds.shape[-1]], seconds.shape) for way in self.ways]
        least = (1 - _ROUNDING) * self.batch.num_microbatches
        bounds = [least * float(np.where(mask[0], seconds[0], np.inf).min()) for mask in masks]
        best, number = _NOTHING, len(masks)
        # By rising bounds, so that the first way that cannot win ends the search.
        for n in sorted(range(len(masks)), key=bounds.__getitem__):
            if bounds[n] > best.seconds or math.isinf(bounds[n]):
                break
            of_way = replace(table, seconds=np.where(masks[n], seconds, np.inf))
            other = self._best_dispatched(of_way, counts)
            if (other.seconds, n) < (best.seconds, number):
                best, number = other, n
        return best

    def why_impossible(self, table: StageTable) -> str:
        """Return a sentence that says why there are no such stages; empty if there are."""
        of_ways = (replace(table, seconds=np.where(way, table.seconds, np.inf)) for way in self.ways)
        found = [solve(of_way, self._terms(self._counts)) for of_way in of_ways]
        return "" if any(each.stages for each in found) else (found or [_NOTHING])[0].reason

    @property
    def _counts(self) -> StageCounts:
        """The numbers of stages of the search."""
        return StageCounts(self.num_stages or 1, self.num_stages)

    def _best_dispatched(self, table: StageTable, counts: StageCounts) -> StageChoice:
        """Return the best stages, with what hosts need to dispatch all tasks (`_dispatched`)."""
        best = _NOTHING
        while True:
            chosen = solve(table, self._terms(counts), explain=False)
            found = self._dispatched(chosen)
            best = found if found.seconds < best.seconds else best
            # Of no more stages none take less by the DP. But where dispatching takes longest fewer may take less.
            fewest = len(found.stages) <= counts.least
            if fewest or found.seconds <= chosen.seconds + self.space.cluster.skew_seconds:
                return best
            counts = counts.fewer_than(len(found.stages))

    def _terms(self, counts: StageCounts) -> PipelineTerms:
        """Return the terms of the DP for numbers of stages."""
        return PipelineTerms(
            num_devices=self.space.devices_of_groups,
            num_microbatches=self.batch.num_microbatches,
            min_stages=counts.least,
            max_stages=counts.most,
            serialized=self.space.cluster.shared_processor,
            waiting_share=self.batch.waiting_share(counts.least),
        )

    def _dispatched(self, found: StageChoice) -> StageChoice:
        """Raise the seconds to what a host needs to dispatch all tasks, and add the skew of hosts."""
        cluster = self.space.cluster
        if not found.stages:
            return found
        # A host dispatches the tasks of all stages on its devices.
        beside = max(1, cluster.devices_per_host // self.space.devices[found.stages[0].submesh])
        count, stages = self.batch.num_microbatches, min(len(found.stages), beside)
        # One stage with one micro-batch is one program.
        per_stage = 2 * count + (self.update_tasks if len(found.stages) > 1 else 1)
        tasks = 1 if len(found.stages) == count == 1 else per_stage * stages
        dispatched = max(found.seconds, self.cost_model.launch_seconds() * tasks)
        return replace(found, seconds=dispatched + cluster.skew_seconds)
