"""Steps in micro-batches, made anew for each test."""

from __future__ import annotations

from alpa_lite.step.split import StepPrograms, TracedStep
from alpa_lite.trace.trace import Traced


def split_step(traced: Traced, num_microbatches: int, *, loop_parts: int = 0) -> TracedStep:
    """The step with its equations at a number of micro-batches."""
    return StepPrograms(traced=traced).with_equations(num_microbatches, loop_parts)
