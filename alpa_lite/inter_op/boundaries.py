"""The data that crosses the boundaries of stages: values per micro-batch, and rows of stacked arguments per step.

A stage receives values from earlier ones once per micro-batch, each straight from the stage that makes it. A value that
is read far above where it is made (a skip connection) is sent once to each stage that reads it, not through those
between.

Stacked arguments lie as their stages read them, or move before and after a step (`plan.stacked_cost`). The stage search
charges a stage for its rows like for its update (`seconds_of_rows`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from alpa_lite.inter_op.solved_stages import PlacedStage, StagePlace
from alpa_lite.inter_op.space import Space
from alpa_lite.inter_op.stage_costs import StageCosts
from alpa_lite.intra_op.stage import StageSolution
from alpa_lite.plan.parts import StagePlan
from alpa_lite.plan.pricing import dispatch_seconds
from alpa_lite.plan.stacked_cost import AtRest, at_rest, dealing_seconds
from alpa_lite.program.ir import Value
from alpa_lite.program.phases import Phase, StepGraph
from alpa_lite.rules.op_info import free_values
from alpa_lite.sharding.specs import Spec, num_shards
from alpa_lite.step.layers import Layers
from cost_models.composed import CostModel


def received_values(step: StepGraph, layers: Layers, stages: Sequence[tuple[int, int]]) -> list[list[Value]]:
    """Return for each stage, given by its first and last layer, the forward values that it reads from earlier ones."""
    found: list[list[Value]] = [[] for _ in stages]
    for value, made, readers in _forward_values(step, layers):
        for (first, last), values in zip(stages, found, strict=True):
            if made < first and any(first <= layer <= last for layer in readers):
                values.append(value)
    return found


def inflow_seconds(model: CostModel, values: Sequence[Value], *, crosses_hosts: bool, num_links: int) -> float:
    """Return the seconds to send values between two stages; each is dispatched separately (`dispatch_seconds`)."""
    size = float(sum(v.bytes for v in values))
    return _seconds(model, size, len(values), crosses_hosts=crosses_hosts, num_links=num_links)


class Inflows(NamedTuple):
    """Seconds in which layer ranges receive their operands from earlier layers, on a submesh of the sender's kind.

    slowest   [layers, layers, kinds]: between hosts where there are several. Some boundary between stages is one of
              hosts, wherever layers are cut, and a pipeline runs at the pace of its slowest stage
    mean      the same over all boundaries of a pipeline of such submeshes, of which those within a host do not count
              as ones of hosts
    """

    slowest: NDArray[np.float64]
    mean: NDArray[np.float64]

    def times(self, scale: float) -> Inflows:
        """Return the seconds for so many times as much data."""
        return Inflows(self.slowest * scale, self.mean * scale)


def inflows(model: CostModel, step: StepGraph, layers: Layers, space: Space) -> Inflows:
    """Return the seconds in which layer ranges receive their operands, by kind of submesh."""
    sizes, counts = _received(step, layers)
    within, between = (np.zeros((*sizes.shape, len(space.kinds))) for _ in range(2))
    several = space.cluster.num_hosts > 1
    for k, links in enumerate(space.devices):
        for first, last in np.argwhere(counts).tolist():
            size, count = float(sizes[first, last]), int(counts[first, last])
            within[first, last, k] = _seconds(model, size, count, crosses_hosts=False, num_links=links)
            between[first, last, k] = _seconds(model, size, count, crosses_hosts=several, num_links=links)
    share = np.minimum(1.0, np.array(space.devices) / space.cluster.devices_per_host)
    return Inflows(slowest=between, mean=within + share * (between - within))


def slower_inflows(model: CostModel, step: StepGraph, layers: Layers, space: Space) -> NDArray[np.float64]:
    """Return [layers, kinds, kinds]: the extra seconds if the stage before is on fewer devices than the stage itself.

    A stage from a layer on is on the second kind, and the stage before it on the first.
    """
    # As many links work in parallel as the smaller submesh has devices. The values that a stage reads at its first
    # layer, which are on the diagonal, stand for all that it receives.
    sizes, crosses, devices = np.diag(_received(step, layers)[0]), space.cluster.num_hosts > 1, space.devices

    def seconds(size: float, num_links: int) -> float:
        return model.transfer_seconds(size, crosses_hosts=crosses, num_links=num_links)

    return np.array(
        [
            [[max(0.0, seconds(size, min(n, m)) - seconds(size, m)) for m in devices] for n in devices]
            for size in sizes.tolist()
        ]
    )


def _received(step: StepGraph, layers: Layers) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return [layers, layers] each: bytes and number of the values that a layer range reads from earlier layers."""
    sizes, counts = (np.zeros((layers.num_layers, layers.num_layers)) for _ in range(2))
    for value, made, readers in _forward_values(step, layers):
        for first in range(made + 1, max(readers) + 1):
            # Every range that begins after the producer and reaches the nearest reader receives the value once.
            nearest = min(layer for layer in readers if layer >= first)
            sizes[first, nearest:] += value.bytes
            counts[first, nearest:] += 1
    return sizes, counts


def _forward_values(step: StepGraph, layers: Layers) -> Iterator[tuple[Value, int, set[int]]]:
    """Yield the values of the loop that later layers read in the forward pass, with their producer and its readers."""
    graph, free = step.graph, free_values(step.graph)
    for value, producer in zip(graph.values, graph.producer, strict=True):
        made = layers.of_op[producer] if producer is not None else None
        # Free values are made anew by each reader. What is made outside the loop is sent once per step, not per
        # micro-batch.
        if producer is None or made is None or value.id in free or not step.phases[producer].in_loop:
            continue
        forward = (layers.of_op[c] for c in graph.consumers[value.id] if step.phases[c] is Phase.FORWARD)
        readers = {layer for layer in forward if layer is not None and layer > made}
        if readers:
            yield value, made, readers


def _seconds(model: CostModel, size: float, count: int, *, crosses_hosts: bool, num_links: int) -> float:
    moved = model.transfer_seconds(size, crosses_hosts=crosses_hosts, num_links=num_links)
    return moved + count * dispatch_seconds(model.cluster)


def seconds_of_rows(
    costs: StageCosts, place: StagePlace, solution: StageSolution, *, arrays: Collection[int] | None = None
) -> float:
    """Return the seconds per step in which a stage brings its rows to their readers and back.

    The rows lie as its solution says. A stage that is the whole step moves none. `arrays`: stacked arguments whose rows
    move, by leaf; None for all.
    """
    landing, leaving, submesh = 0.0, 0.0, place.submesh
    chosen = solution.choice.inputs if solution.choice is not None else dict[int, Spec]()
    if place.last - place.first + 1 < costs.layers.num_layers:
        for leaf, rows, home in _rows(costs):
            if place.first <= home <= place.last and (arrays is None or leaf in arrays):
                devices, sizes = submesh.num_devices, place.mesh.axis_sizes
                shards = num_shards(chosen[rows.id], sizes) if rows.id in chosen else devices
                # Before the step every copy of a shard has to arrive; after it one copy is enough to bring back.
                leaving += rows.bytes
                landing += rows.bytes * devices / shards
    return sum(dealing_seconds(costs.cost_model, size, submesh) for size in (landing, leaving) if size)


def uneven_arrays(costs: StageCosts) -> frozenset[int]:
    """Return the stacked arguments, by leaf, of which some layers hold more rows than others, so that rows move.

    Layers without rows do not matter: the array lies over the devices of the others.
    """
    homes: dict[int, Counter[int]] = {}
    for leaf, rows, home in _rows(costs):
        homes.setdefault(leaf, Counter())[home] += rows.shape[0]
    return frozenset(leaf for leaf, counts in homes.items() if len({*counts.values()}) > 1)


def least_seconds_of_rows(costs: StageCosts, space: Space) -> NDArray[np.float64]:
    """Return [layers, layers, kinds]: the least `seconds_of_rows` of a layer range; each row is read by one device."""
    count = costs.layers.num_layers
    of_layers = np.zeros(count)
    for _, rows, home in _rows(costs):
        of_layers[home] += rows.bytes
    ends = np.concatenate([[0.0], np.cumsum(of_layers)])
    # Pricing is slow, and equal layers give few different sizes.
    sizes, where = np.unique(np.maximum(0.0, ends[None, 1:] - ends[:-1, None]), return_inverse=True)
    found = np.zeros((count, count, len(space.kinds)))
    for kind in range(len(space.kinds)):
        submesh = space.submesh(kind)
        seconds = np.array([2 * dealing_seconds(costs.cost_model, size, submesh) for size in sizes.tolist()])
        found[..., kind] = seconds[where].reshape(count, count)
    found[0, count - 1] = 0.0
    return found


def _rows(costs: StageCosts) -> Iterator[tuple[int, Value, int]]:
    """Yield the inputs that are rows of stacked arguments: the leaf of the argument, the rows, and their layer."""
    step = costs.step
    for part, v, home in zip(step.input_parts, step.graph.inputs, costs.layers.of_input, strict=True):
        if part.rows is not None:
            yield part.leaf, step.graph.values[v], home


def stacks_at_rest(cost_model: CostModel, step: StepGraph, layers: Layers, stages: Sequence[PlacedStage]) -> AtRest:
    """Return the time and memory that the stacked arguments of a step take between steps, given its stages."""
    readers = [
        StagePlan(
            layers=(stage.first, stage.last),
            submesh=stage.submesh,
            mesh_shape=stage.mesh,
            specs={},
            inputs=stage.solution.choice.inputs if stage.solution.choice is not None else {},
            ops={},
            accumulators={},
            cost=stage.solution.cost,
        )
        for stage in stages
    ]
    stage_of = [number for number, stage in enumerate(stages) for _ in range(stage.first, stage.last + 1)]
    return at_rest(cost_model, step, [stage_of[home] for home in layers.of_input], readers)
