"""Which values of a stage XLA keeps in memory, and for how long."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from alpa_lite.graph.phases import Phase
from alpa_lite.intra_op.stage import StageView
from alpa_lite.rules.graph_facts import rule_of_op


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """A value in memory from time `start` to before `end`; `saved` = made in the forward, read in the backward pass."""

    value: int
    start: int
    end: int
    saved: bool


def lives(view: StageView, time: Mapping[int, int]) -> list[Life]:
    """Values that occupy memory; `time` numbers the ops of the stage.

    Element-wise chains are fused, so a value counts only when a contraction makes or reads it, when several ops read
    it, or when the backward pass reads what the forward pass made.
    """
    graph, phases = view.graph, view.step.phases
    found: list[Life] = []
    for op_id in view.ops:
        heavy = rule_of_op(graph, op_id).work_kind != "elementwise"
        for r in graph.ops[op_id].results:
            readers = [c for c in graph.consumers[r] if c in time]
            saved = phases[op_id] is Phase.FORWARD and any(phases[c] is Phase.BACKWARD for c in readers)
            read_by_heavy = any(rule_of_op(graph, c).work_kind != "elementwise" for c in readers)
            if saved or heavy or read_by_heavy or len(readers) > 1:
                last = max((time[c] for c in readers), default=time[op_id])
                found.append(Life(value=r, start=time[op_id], end=last + 1, saved=saved))
    return found
