"""The data that crosses the boundaries of stages: values per micro-batch, and rows of stacked arguments per step.

A stage receives values from earlier ones once per micro-batch, each straight from the stage that makes it. A value that
is read far above where it is made (a skip connection) is sent once to each stage that reads it, not through those
between.

Stacked arguments between steps: where all stages hold equally many rows in one form, on devices of their own, the array
lies over these devices as it is. Else its rows lie in equal blocks (`alpa_lite.sharding.stacked_rest`), and move:

    before a step   the devices of a stage distribute their rows among each other, a copy to each device that reads one
    after a step    they bring one copy of each row together                                        `seconds_of_rows`

Rows of blocks on another stage come from there (`stacks_at_rest`). The stage search charges a stage for its rows like
for its update.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from alpa_lite.inter_op.space import Space
from alpa_lite.inter_op.stage_costs import PlacedStage, StageCosts, StagePlace
from alpa_lite.intra_op.solve import StageSolution
from alpa_lite.plan.pricing import crosses_hosts, dispatch_seconds
from alpa_lite.program.ir import Value
from alpa_lite.program.phases import Phase, StepGraph
from alpa_lite.rules.op_info import free_values
from alpa_lite.sharding.meshes import Submesh
from alpa_lite.sharding.specs import Spec, num_shards
from alpa_lite.sharding.stacked_rest import Resting, resting
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


def inflows(model: CostModel, step: StepGraph, layers: Layers, space: Space) -> NDArray[np.float64]:
    """Return [layers, layers, kinds]: seconds in which a layer range receives its operands from earlier layers.

    The sender is a submesh of the same kind.

    With several hosts some of the stages receive from another host, wherever they are cut, and the slowest one counts.
    """
    sizes, counts = _received(step, layers)
    found = np.zeros((*sizes.shape, len(space.kinds)))
    # Which pairs of stages are on different hosts is not known before stages are chosen, and the pipeline runs at the
    # pace of its slowest stage: so each transfer is priced as if it left the host.
    crosses = space.cluster.num_hosts > 1
    for k, links in enumerate(space.devices):
        for first, last in np.argwhere(counts).tolist():
            size, count = float(sizes[first, last]), int(counts[first, last])
            found[first, last, k] = _seconds(model, size, count, crosses_hosts=crosses, num_links=links)
    return found


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


def seconds_of_rows(costs: StageCosts, place: StagePlace, solution: StageSolution) -> float:
    """Return the seconds per step in which a stage brings its rows to their readers and back.

    The rows lie as its solution says. A stage that is the whole step moves none.
    """
    landing, leaving, submesh = 0.0, 0.0, place.submesh
    chosen = solution.choice.inputs if solution.choice is not None else dict[int, Spec]()
    if place.last - place.first + 1 < costs.layers.num_layers:
        for rows, home in _rows(costs):
            if place.first <= home <= place.last:
                devices, sizes = submesh.num_devices, place.mesh.axis_sizes
                shards = num_shards(chosen[rows.id], sizes) if rows.id in chosen else devices
                # Before the step every copy of a shard has to arrive; after it one copy is enough to bring back.
                leaving += rows.bytes
                landing += rows.bytes * devices / shards
    return sum(dealing_seconds(costs.cost_model, size, submesh) for size in (landing, leaving))


def equally_many_rows(costs: StageCosts) -> bool:
    """Return True if each layer holds equally many rows of every stacked argument, so that none has to move."""
    homes: dict[int, Counter[int]] = {}
    step, count = costs.step, costs.layers.num_layers
    for part, v, home in zip(step.input_parts, step.graph.inputs, costs.layers.of_input, strict=True):
        if part.rows is not None:
            homes.setdefault(part.leaf, Counter())[home] += step.graph.values[v].shape[0]
    return all(len(rows) == count and len({*rows.values()}) == 1 for rows in homes.values())


def least_seconds_of_rows(costs: StageCosts, space: Space) -> NDArray[np.float64]:
    """Return [layers, layers, kinds]: the least `seconds_of_rows` of a layer range; each row is read by one device."""
    count = costs.layers.num_layers
    of_layers = np.zeros(count)
    for rows, home in _rows(costs):
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


def _rows(costs: StageCosts) -> Iterator[tuple[Value, int]]:
    """Yield the inputs of the graph that are rows of stacked arguments, each with the layer that holds it."""
    step = costs.step
    for part, v, home in zip(step.input_parts, step.graph.inputs, costs.layers.of_input, strict=True):
        if part.rows is not None:
            yield step.graph.values[v], home


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


def stacks_at_rest(cost_model: CostModel, step: StepGraph, layers: Layers, stages: Sequence[PlacedStage]) -> AtRest:
    """Return the time and memory that the stacked arguments of a step take between steps, given its stages."""
    submeshes = list(dict.fromkeys(stage.submesh for stage in stages))
    state = {submesh: sum(s.solution.cost.state_bytes for s in stages if s.submesh == submesh) for submesh in submeshes}
    landing, leaving = dict.fromkeys(submeshes, 0.0), dict.fromkeys(submeshes, 0.0)
    away, moved = 0.0, 0
    for rows in _stacked(step, layers, stages, submeshes):
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
    step: StepGraph, layers: Layers, stages: Sequence[PlacedStage], submeshes: Sequence[Submesh]
) -> Iterator[_Rows]:
    """Yield the rows of each stacked argument that does not lie as the stages read it."""
    graph, num_devices = step.graph, tuple(submesh.num_devices for submesh in submeshes)
    inputs = zip(step.input_parts, graph.inputs, layers.of_input, strict=True)
    # Inputs of one stacked argument follow each other, in the order of their rows.
    for _, members in groupby((m for m in inputs if m[0].rows is not None), key=lambda member: member[0].leaf):
        runs: list[tuple[PlacedStage, Spec | None, int]] = []
        value = None
        for _, v, home in members:
            stage = next(s for s in stages if s.first <= home <= s.last)
            spec = stage.solution.choice.inputs.get(v) if stage.solution.choice else None
            value, before = graph.values[v], runs[-1] if runs else None
            if before is not None and before[0] is stage and before[1] == spec:
                runs[-1] = (stage, spec, before[2] + value.shape[0])
            else:
                runs.append((stage, spec, value.shape[0]))
        assert value is not None
        # Equal runs on distinct submeshes are the shards of one array over all devices: nothing moves.
        if len({(stage.mesh, spec, rows) for stage, spec, rows in runs}) == 1:
            if len({stage.submesh for stage, _, _ in runs}) == len(runs):
                continue
        readers = tuple(stage.submesh for stage, _, rows in runs for _ in range(rows))
        shards = (num_shards(spec, stage.mesh.axis_sizes) if spec is not None else 1 for stage, spec, _ in runs)
        yield _Rows(
            row_bytes=value.bytes / value.shape[0],
            readers=readers,
            num_shards=tuple(n for n, (_, _, rows) in zip(shards, runs, strict=True) for _ in range(rows)),
            at=resting((len(readers), *value.shape[1:]), tuple(map(submeshes.index, readers)), num_devices),
        )
