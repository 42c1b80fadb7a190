"""The time and memory of stacked arguments between steps, where they do not lie as the stages read them.

    before a step   the devices of a stage distribute their rows among each other, a copy to each device that reads one
    after a step    they bring one copy of each row together

Where all stages hold equally many rows in one spec, on devices of their own, the array lies over these devices as it
is, and nothing moves. Else rows lie in equal blocks (`alpa_lite.sharding.stacked_rest`), and those of blocks on another
stage come from there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from alpa_lite.plan.parts import StagePlan
from alpa_lite.plan.pricing import crosses_hosts
from alpa_lite.program.phases import StepGraph
from alpa_lite.sharding.meshes import Submesh
from alpa_lite.sharding.specs import Spec, num_shards
from alpa_lite.sharding.stacked_rest import Resting, resting
from cost_models.composed import CostModel


def dealing_seconds(cost_model: CostModel, size: float, submesh: Submesh) -> float:
    """Return the seconds to move ``size`` bytes between devices of one submesh."""
    return cost_model.transfer_seconds(size, crosses_hosts=submesh.num_hosts > 1, num_links=submesh.num_devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class AtRest:
    """Time and memory of the stacked arguments between steps.

    seconds       per step, to bring them to the stages before it and back after it
    state_bytes   per device of each submesh, of all arguments between steps
    """

    seconds: float
    state_bytes: Mapping[Submesh, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """The rows of a stacked argument that do not lie where they are read.

    row_bytes    of one row
    readers      the submesh that reads each row
    num_shards   the number of different blocks into which each row is split there
    at           the blocks of rows between steps
    """

    row_bytes: float
    readers: tuple[Submesh, ...]
    num_shards: tuple[int, ...]
    at: Resting


def at_rest(
    cost_model: CostModel, step: StepGraph, stage_of_input: Sequence[int], stages: Sequence[StagePlan]
) -> AtRest:
    """Return the time and memory that the stacked arguments of a step take between steps."""
    submeshes = list(dict.fromkeys(stage.submesh for stage in stages))
    state = {submesh: sum(s.cost.state_bytes for s in stages if s.submesh == submesh) for submesh in submeshes}
    landing, leaving = dict.fromkeys(submeshes, 0.0), dict.fromkeys(submeshes, 0.0)
    away, moved = 0.0, 0
    for rows in _stacked(step, stage_of_input, stages, submeshes):
        moved += 1
        for row, (reader, shards) in enumerate(zip(rows.readers, rows.num_shards, strict=True)):
            holder = submeshes[rows.at.holder_of(row)]
            landing[reader] += rows.row_bytes * reader.num_devices / shards
            leaving[reader] += rows.row_bytes
            away += rows.row_bytes if holder != reader else 0.0
            # `state_bytes` of the solution counts the row where it is read; between steps it lies with its holder.
            state[reader] -= rows.row_bytes / shards
        for holder in {*rows.at.holders}:
            state[submeshes[holder]] += rows.row_bytes * rows.at.rows_per_block / rows.at.group_size
    if not moved:
        return AtRest(seconds=0.0, state_bytes=state)
    cluster = cost_model.cluster
    # Submeshes work at the same time: the slowest counts, once before the step and once after it.
    inside = sum(max(dealing_seconds(cost_model, each[s], s) for s in submeshes) for each in (landing, leaving))
    apart = any(crosses_hosts(cluster, submeshes[0], other) for other in submeshes[1:])
    between = 2 * cost_model.transfer_seconds(away, crosses_hosts=apart) if away else 0.0
    # A program of the devices that have the rows, and one of those that get them, there and back.
    return AtRest(seconds=inside + between + 4 * moved * cost_model.launch_seconds(), state_bytes=state)


def _stacked(
    step: StepGraph, stage_of_input: Sequence[int], stages: Sequence[StagePlan], submeshes: Sequence[Submesh]
) -> Iterator[_Rows]:
    """Yield the rows of each stacked argument that does not lie as the stages read it."""
    graph, num_devices = step.graph, tuple(submesh.num_devices for submesh in submeshes)
    inputs = zip(step.input_parts, graph.inputs, stage_of_input, strict=True)
    # Inputs of one stacked argument follow each other, in the order of their rows.
    for _, members in groupby((m for m in inputs if m[0].rows is not None), key=lambda member: member[0].leaf):
        runs: list[tuple[StagePlan, Spec | None, int]] = []
        value = None
        for _, v, number in members:
            stage = stages[number]
            spec = stage.inputs.get(v)
            value, before = graph.values[v], runs[-1] if runs else None
            if before is not None and before[0] is stage and before[1] == spec:
                runs[-1] = (stage, spec, before[2] + value.shape[0])
            else:
                runs.append((stage, spec, value.shape[0]))
        assert value is not None
        # Equal runs on distinct submeshes are the shards of one array over all devices: nothing moves.
        if len({(stage.mesh_shape, spec, rows) for stage, spec, rows in runs}) == 1:
            if len({stage.submesh for stage, _, _ in runs}) == len(runs):
                continue
        readers = tuple(stage.submesh for stage, _, rows in runs for _ in range(rows))
        shards = (num_shards(spec, stage.mesh_shape.axis_sizes) if spec is not None else 1 for stage, spec, _ in runs)
        yield _Rows(
            row_bytes=value.bytes / value.shape[0],
            readers=readers,
            num_shards=tuple(n for n, (_, _, rows) in zip(shards, runs, strict=True) for _ in range(rows)),
            at=resting((len(readers), *value.shape[1:]), tuple(map(submeshes.index, readers)), num_devices),
        )
