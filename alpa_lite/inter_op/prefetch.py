"""Questions about stages that workers answer before they are asked."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

from alpa_lite.inter_op.stage_cache import Question
from alpa_lite.inter_op.stage_costs import StageCosts
from alpa_lite.inter_op.workers import Likely
from alpa_lite.intra_op.solve import StageSolution
from alpa_lite.program.phases import StepGraph


def expect(likely: Iterable[tuple[StageCosts, Question]], *, later: bool = False) -> None:
    """Let workers look for the answers to what will likely be asked; see `Workers.expect`."""
    workers, questions = None, dict[Hashable, Likely]()
    for costs, asked in likely:
        workers = costs.workers
        if workers.at_work and not costs.knows(asked):
            family = workers.number_of(costs.builders)
            questions.setdefault(costs.key(asked), Likely(_solve, (costs.step, costs.given), (family, asked)))
    if workers is not None:
        workers.expect(questions, later=later)


def _solve(
    memory: dict[Any, Any], step: StepGraph, given: dict[str, Any], likely: tuple[int, Question]
) -> tuple[Question, StageSolution]:
    """What a worker does: it keeps the stage costs, and what those that share builders know of ops."""
    family, asked = likely
    key = id(given)
    if key not in memory:
        memory[key] = StageCosts(step=step, **given, builders=memory.setdefault(("builders", family), {}))
    return asked, memory[key].solve(asked)
