"""Rows of stacked arguments between steps: what a stage takes to move its own, where stages hold different ones.

    before a step   its devices deal them out among each other, a copy to each that reads one       `seconds_of_rows`
    after it        they bring one copy of each together

The stage search charges a stage for it like for its update.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from alpa_lite.inter_op.space import Space
from alpa_lite.inter_op.stage_costs import StageCosts
from alpa_lite.intra_op.solve import StageSolution
from alpa_lite.program.ir import Value
from alpa_lite.sharding.meshes import LogicalMesh, Submesh
from alpa_lite.sharding.specs import Spec, num_shards
from cost_models.interface import CostModel


def seconds_of_rows(
    costs: StageCosts, first: int, last: int, submesh: Submesh, mesh: LogicalMesh, solution: StageSolution
) -> float:
    """Of a stage that holds its rows as its solution says, per step; none where it is all of the step."""
    landing, leaving = 0.0, 0.0
    chosen = solution.choice.inputs if solution.choice is not None else dict[int, Spec]()
    if last - first + 1 < costs.layers.num_layers:
        for rows, home in _rows(costs):
            if first <= home <= last:
                shards = num_shards(chosen[rows.id], mesh.axis_sizes) if rows.id in chosen else submesh.num_devices
                leaving += rows.bytes
                landing += rows.bytes * submesh.num_devices / shards
    return sum(dealing_seconds(costs.cost_model, size, submesh) for size in (landing, leaving))


def least_seconds_of_rows(costs: StageCosts, space: Space) -> NDArray[np.float64]:
    """[layers, layers, kinds]: that of stages from one layer to another, if each row is read by one device."""
    count = costs.layers.num_layers
    of_layers = np.zeros(count)
    for rows, home in _rows(costs):
        of_layers[home] += rows.bytes
    ends = np.concatenate([[0.0], np.cumsum(of_layers)])
    sizes, where = np.unique(np.maximum(0.0, ends[None, 1:] - ends[:-1, None]), return_inverse=True)
    found = np.zeros((count, count, len(space.kinds)))
    for kind in range(len(space.kinds)):
        submesh = space.submesh(kind)
        seconds = np.array([2 * dealing_seconds(costs.cost_model, size, submesh) for size in sizes.tolist()])
        found[..., kind] = seconds[where].reshape(count, count)
    found[0, count - 1] = 0.0
    return found


def _rows(costs: StageCosts) -> Iterator[tuple[Value, int]]:
    """The inputs of the graph that are rows of stacked arguments, each with the layer that holds it."""
    step = costs.step
    for part, v, home in zip(step.input_parts, step.graph.inputs, costs.layers.of_input, strict=True):
        if part.rows is not None:
            yield step.graph.values[v], home


def dealing_seconds(cost_model: CostModel, size: float, submesh: Submesh) -> float:
    """Time to bring so many bytes from devices of a submesh to others of it."""
    return cost_model.transfer_seconds(size, crosses_hosts=submesh.num_hosts > 1, num_links=submesh.num_devices)
