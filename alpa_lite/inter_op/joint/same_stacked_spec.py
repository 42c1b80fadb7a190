"""Stages that agree on how rows of stacked arguments lie.

A step returns one array for a stacked argument. If every stage holds equally many of its rows in one form, the array
lies over their devices as it is; if not, the rows are brought together after each step (`stacked.stacks_at_rest`).
Stages are solved one by one, and what is as good for one may be another form for the next. Here the stages that differ
are solved again with the form of one of them given.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from alpa_lite.inter_op.placed_stage import PlacedStage
from alpa_lite.inter_op.stacked_arguments import stacks_at_rest
from alpa_lite.inter_op.stage_costs import StageCosts
from alpa_lite.schedule import Schedule
from alpa_lite.sharding.specs import Spec


def agreeing(costs: StageCosts, stages: Sequence[PlacedStage], schedule: Schedule) -> Iterator[list[PlacedStage]]:
    """The same stages with the forms of each that differs, where they disagree on stacked arguments and it fits."""
    if not stacks_at_rest(costs.cost_model, costs.step, costs.layers, stages).seconds:
        return
    held = [schedule.in_flight(i, len(stages), costs.step.num_microbatches) for i in range(len(stages))]
    forms = [_forms(costs, stage) for stage in stages]
    for model in dict.fromkeys(tuple(sorted(form.items())) for form in forms):
        wanted = dict(model)
        pins = {v: wanted[leaf] for stage in stages for leaf, v in _rows(costs, stage) if leaf in wanted}
        given = costs.with_pins({**costs.pins, **pins})
        # The last first: what is best with the fewest micro-batches in flight is so with more, where it fits.
        found = [
            stage if _forms(costs, stage) == wanted else _solved_again(given, stage, in_flight)
            for stage, in_flight in reversed([*zip(stages, held, strict=True)])
        ]
        found.reverse()
        if all(stage.solution.choice is not None for stage in found):
            yield found


def _rows(costs: StageCosts, stage: PlacedStage) -> list[tuple[int, int]]:
    """Of each stacked argument that a stage holds rows of: its number, and the input of the graph."""
    step, layers = costs.step, costs.layers
    inputs = zip(step.input_parts, step.graph.inputs, layers.of_input, strict=True)
    return [(part.leaf, v) for part, v, home in inputs if part.rows is not None and stage.first <= home <= stage.last]


def _forms(costs: StageCosts, stage: PlacedStage) -> dict[int, Spec]:
    """How a stage holds its rows of each stacked argument."""
    choice = stage.solution.choice
    return {leaf: choice.inputs[v] for leaf, v in _rows(costs, stage) if v in choice.inputs} if choice else {}


def forms_given(costs: StageCosts, stage: PlacedStage) -> dict[int, Spec]:
    """The spec of each row of stacked arguments that a stage holds, by input of the graph."""
    choice = stage.solution.choice
    return {v: choice.inputs[v] for _, v in _rows(costs, stage) if v in choice.inputs} if choice else {}


def _solved_again(costs: StageCosts, stage: PlacedStage, in_flight: int) -> PlacedStage:
    solution = costs.solution(stage.first, stage.last, stage.submesh, stage.mesh, in_flight=in_flight)
    return replace(stage, solution=solution)
