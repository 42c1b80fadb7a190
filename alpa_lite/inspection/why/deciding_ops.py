"""The ops of a source line that have a choice."""

from __future__ import annotations

from alpa_lite.inspection.why.repricing import Repricing
from alpa_lite.inspection.why.stage_problem import StageProblem
from alpa_lite.intra_op.placements import Key, Placed
from alpa_lite.program.ir import Graph, Op
from alpa_lite.rules.op_info import rule_of_op
from alpa_lite.text import short_source


def deciding_ops(repricing: Repricing, wanted: str) -> dict[int, Key]:
    """By stage the op with the most work among those of a source line that have a choice, where they do the same."""
    found: dict[int, Key] = {}
    for number, stage in enumerate(repricing.stages):
        fitting = [
            key for key, placed in stage.builder.placed.items() if _chooses(placed) and _is_at(stage, key, wanted)
        ]
        if fitting:
            found[number] = max(fitting, key=lambda key: _work_of(*stage.op(key)))
    if not found:
        return {}
    kinds = {number: _kind_of(*repricing.stages[number].op(key)) for number, key in found.items()}
    return {number: key for number, key in found.items() if kinds[number] == kinds[min(kinds)]}


def _chooses(placed: object) -> bool:
    return isinstance(placed, Placed) and len(placed.options) > 1


def _is_at(stage: StageProblem, key: Key, wanted: str) -> bool:
    _, op = stage.op(key)
    return wanted in op.source or wanted in short_source(op.source)


def _work_of(graph: Graph, op: Op) -> float:
    return rule_of_op(graph, op.id).flops


def _kind_of(graph: Graph, op: Op) -> object:
    return op.primitive, op.source, [(v.shape, v.dtype) for v in (*graph.operands(op), *graph.results(op))]
