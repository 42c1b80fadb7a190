"""What is done to the stages that the search found: solved closer to the best, run under other schedules.

polish      each stage again, to a smaller gap, within a time limit                              `polished`
schedules   the same stages under each schedule whose micro-batches in flight they hold          `rescheduled`
chunks      the layers in several times as many parts, dealt out over the same submeshes         `interleaved`
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from alpa_lite.errors import PlanError
from alpa_lite.inter_op.stage_costs import StageCosts
from alpa_lite.intra_op.solve import RELATIVE_GAP, StageSolution
from alpa_lite.layers import Cut
from alpa_lite.plan import Prediction
from alpa_lite.planners.agreement import forms_given
from alpa_lite.planners.planner import PlacedStage, PlanRequest, predict
from alpa_lite.planners.shared_devices import solve_together
from alpa_lite.planners.steps import Steps
from alpa_lite.rematerialise import Remat
from alpa_lite.schedule import Interleaved1F1B, Schedule

POLISH_SECONDS = 3.0
"""How long one stage may be solved again."""


CHUNKS = (2, 4, 8)
"""Of interleaved pipelines, the chunks of each group of devices: more of them while that is faster."""

UNSEEN = 0.1
"""By how much a simulated step may take longer than the stage DP says before that is not relied on."""

BUBBLE = 0.03
"""Idle part of a pipeline from which on interleaving is tried."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """Solved stages of a step, under a schedule; `sum_seconds` is what the stage DP makes of them."""

    costs: StageCosts
    stages: tuple[PlacedStage, ...]
    schedule: Schedule
    prediction: Prediction
    sum_seconds: float = math.inf

    @staticmethod
    def of(request: PlanRequest, costs: StageCosts, stages: Sequence[PlacedStage], schedule: Schedule) -> Found:
        """The stages with what they are predicted to take."""
        prediction = predict(request, costs.step, costs.layers, stages, schedule)
        return Found(costs=costs, stages=tuple(stages), schedule=schedule, prediction=prediction)

    @property
    def seconds(self) -> float:
        """Of one step."""
        return self.prediction.step_seconds

    @property
    def trusted_seconds(self) -> float:
        """What the stage DP makes of the stages, which compares with its other answers, or the simulation where they
        wait for much that it does not see."""
        return self.sum_seconds if self.seconds <= (1 + UNSEEN) * self.sum_seconds else self.seconds

    @property
    def policies(self) -> tuple[Remat, ...]:
        """What the layers of each stage compute again."""
        remat = self.costs.remat
        return tuple(remat[stage.first] if remat else Remat.NONE for stage in self.stages)

    @property
    def in_flight(self) -> list[int]:
        """Micro-batches in flight on each stage."""
        count = len(self.stages)
        return [self.schedule.in_flight(i, count, self.costs.step.num_microbatches) for i in range(count)]


def refined(
    request: PlanRequest, found: Sequence[Found], steps: Steps, schedules: Sequence[Schedule], *, dealt_out: bool
) -> Found:
    """The best of what was found, solved closer to the best, and (`dealt_out`) in chunks if that is faster.

    Then what waited for longer may be the best in chunks.
    """

    def refine(way: Found) -> Found:
        whole = rescheduled(request, polished(request, way), schedules)
        return _in_chunks(request, whole, steps) if dealt_out and len(whole.stages) > 1 else whole

    first, *others = sorted(found, key=lambda way: way.seconds)
    best = refine(first)
    for other in others if best.schedule.stages_per_processor > 1 else ():
        if other.seconds * (1 - other.prediction.bubble_fraction) < best.seconds:
            best = min(best, refine(other), key=lambda way: way.seconds)
    return best


def _in_chunks(request: PlanRequest, whole: Found, steps: Steps) -> Found:
    """The stages in the number of chunks that is the fastest, or whole."""
    best = whole
    for chunks in CHUNKS:
        if best.prediction.bubble_fraction <= BUBBLE:
            break
        dealt_out = interleaved(request, whole, steps, chunks)
        if dealt_out is None or dealt_out.seconds >= best.seconds:
            break
        best = dealt_out
    return best


def polished(request: PlanRequest, found: Found) -> Found:
    """Stages solved again to a smaller gap, where that is faster; stacked arguments keep their form."""
    pins = {v: spec for stage in found.stages for v, spec in forms_given(found.costs, stage).items()}
    costs = found.costs.with_pins({**found.costs.pins, **pins})
    costs = replace(costs, relative_gap=RELATIVE_GAP, time_limit_seconds=POLISH_SECONDS)
    stages: list[PlacedStage] = []
    # The last first: what is best with the fewest micro-batches in flight is so with more, where it fits.
    for stage, held in reversed([*zip(found.stages, found.in_flight, strict=True)]):
        solution = costs.solution(stage.first, stage.last, stage.submesh, stage.mesh, in_flight=held)
        better = solution.choice is not None and _seconds(solution) < _seconds(stage.solution)
        stages.append(replace(stage, solution=solution) if better else stage)
    stages.reverse()
    again = replace(
        found,
        stages=tuple(stages),
        prediction=predict(request, found.costs.step, found.costs.layers, stages, found.schedule),
    )
    return again if again.seconds < found.seconds else found


def _seconds(solution: StageSolution) -> float:
    return solution.forward_seconds + solution.backward_seconds


def rescheduled(request: PlanRequest, found: Found, schedules: Sequence[Schedule]) -> Found:
    """The same stages under the fastest schedule that their memory allows."""
    best = found
    for schedule in schedules if len(found.stages) > 1 else ():
        other = replace(found, schedule=schedule)
        held = zip(found.stages, other.in_flight, strict=True)
        if all(s.solution.bytes_in_flight(n) <= found.costs.room_bytes(s.submesh) for s, n in held):
            prediction = predict(request, found.costs.step, found.costs.layers, found.stages, schedule)
            best = min(best, replace(other, prediction=prediction), key=lambda way: way.seconds)
    return best


def interleaved(request: PlanRequest, found: Found, steps: Steps, num_chunks: int) -> Found | None:
    """So many chunks of the layers dealt out over the submesh of each stage; None where that is not possible."""
    schedule = Interleaved1F1B(num_chunks=num_chunks)
    parts, number = len(found.stages), found.costs.step.num_microbatches
    chunks = parts * num_chunks
    if number % parts:
        return None
    try:
        costs, per_chunk = steps.mixed(number, Cut.into(chunks), found.policies * num_chunks)
    except PlanError:  # too few ops
        return None
    tasks = schedule.tasks(chunks, costs.step.num_microbatches)
    solved: dict[int, StageSolution] = {}
    for number in reversed(range(parts)):

        def solve(
            chunk: int, in_flight: int, limit_bytes: float, place: PlacedStage = found.stages[number]
        ) -> StageSolution:
            first, last = _layers_of(chunk, per_chunk)
            where = (place.submesh, place.mesh)
            return costs.solution(first, last, *where, in_flight=in_flight, limit_bytes=limit_bytes)

        together = solve_together(solve, tasks[number], costs.room_bytes(found.stages[number].submesh))
        if not together.fits:
            return None
        solved |= together.solutions
    stages = [
        PlacedStage(
            first=first,
            last=last,
            submesh=found.stages[chunk % parts].submesh,
            mesh=found.stages[chunk % parts].mesh,
            solution=solved[chunk],
        )
        for chunk in range(chunks)
        for first, last in [_layers_of(chunk, per_chunk)]
    ]
    return Found.of(request, costs, stages, schedule)


def _layers_of(chunk: int, per_chunk: int) -> tuple[int, int]:
    return chunk * per_chunk, (chunk + 1) * per_chunk - 1
