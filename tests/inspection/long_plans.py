"""Plans with many tasks, without the time to make them."""

from __future__ import annotations

from dataclasses import replace

import alpa_lite as al
from alpa_lite.plan.parts import TaskRuns


def with_tasks_repeated(plan: al.Plan, times: int) -> al.Plan:
    """Return a plan whose prediction has all of its tasks so many times, one step after the other."""
    tasks, end = plan.prediction.tasks, plan.prediction.step_seconds
    shifts = [end * n for n in range(times) for _ in tasks.stages]
    repeated = TaskRuns(
        stages=tasks.stages * times,
        roles=tasks.roles * times,
        microbatches=tasks.microbatches * times,
        start_seconds=tuple(a + b for a, b in zip(tasks.start_seconds * times, shifts, strict=True)),
        end_seconds=tuple(a + b for a, b in zip(tasks.end_seconds * times, shifts, strict=True)),
        held_bytes=tasks.held_bytes * times,
    )
    return replace(plan, prediction=replace(plan.prediction, tasks=repeated))
