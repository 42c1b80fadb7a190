"""What stages receive from earlier ones per micro-batch, each value straight from the stage that makes it.

A value that is read far above where it is made (a skip connection) is sent once to each stage that reads it, not
through those between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from alpa_lite.inter_op.space import Space
from alpa_lite.plan.pricing import dispatch_seconds
from alpa_lite.program.ir import Value
from alpa_lite.program.phases import Phase, StepGraph
from alpa_lite.rules.op_info import free_values
from alpa_lite.step.layers import Layers
from cost_models.composed import CostModel


def received_values(step: StepGraph, layers: Layers, stages: Sequence[tuple[int, int]]) -> list[list[Value]]:
    """Of each stage, given by its first and last layer, the forward values that it reads from earlier ones."""
    found: list[list[Value]] = [[] for _ in stages]
    for value, made, readers in _forward_values(step, layers):
        for (first, last), values in zip(stages, found, strict=True):
            if made < first and any(first <= layer <= last for layer in readers):
                values.append(value)
    return found


def inflow_seconds(model: CostModel, values: Sequence[Value], *, crosses_hosts: bool, num_links: int) -> float:
    """Time to send values from one stage to another: each is dispatched by itself (`dispatch_seconds`)."""
    size = float(sum(v.bytes for v in values))
    return _seconds(model, size, len(values), crosses_hosts=crosses_hosts, num_links=num_links)


def inflows(model: CostModel, step: StepGraph, layers: Layers, space: Space) -> NDArray[np.float64]:
    """[layers, layers, kinds]: time for the layers from one to another to receive what they read from earlier ones,
    from a submesh of the same kind.

    With several hosts some of the stages receive from another host, wherever they are cut, and the slowest one counts.
    """
    sizes, counts = _received(step, layers)
    found = np.zeros((*sizes.shape, len(space.kinds)))
    crosses = space.cluster.num_hosts > 1
    for k, links in enumerate(space.devices):
        for first, last in np.argwhere(counts).tolist():
            size, count = float(sizes[first, last]), int(counts[first, last])
            found[first, last, k] = _seconds(model, size, count, crosses_hosts=crosses, num_links=links)
    return found


def slower_inflows(model: CostModel, step: StepGraph, layers: Layers, space: Space) -> NDArray[np.float64]:
    """[layers, kinds, kinds]: how much longer a stage from a layer on takes to receive that, if the stage before it is
    on fewer devices: on the first kind, and it on the second."""
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
    """[layers, layers]: the bytes, and the number, of the values that layers from one to another read from earlier
    ones."""
    sizes, counts = (np.zeros((layers.num_layers, layers.num_layers)) for _ in range(2))
    for value, made, readers in _forward_values(step, layers):
        for first in range(made + 1, max(readers) + 1):
            nearest = min(layer for layer in readers if layer >= first)
            sizes[first, nearest:] += value.bytes
            counts[first, nearest:] += 1
    return sizes, counts


def _forward_values(step: StepGraph, layers: Layers) -> Iterator[tuple[Value, int, set[int]]]:
    """The values of the loop that later layers read in the forward pass, with the layers that make and read them."""
    graph, free = step.graph, free_values(step.graph)
    for value, producer in zip(graph.values, graph.producer, strict=True):
        made = layers.of_op[producer] if producer is not None else None
        if producer is None or made is None or value.id in free or not step.phases[producer].in_loop:
            continue
        forward = (layers.of_op[c] for c in graph.consumers[value.id] if step.phases[c] is Phase.FORWARD)
        readers = {layer for layer in forward if layer is not None and layer > made}
        if readers:
            yield value, made, readers


def _seconds(model: CostModel, size: float, count: int, *, crosses_hosts: bool, num_links: int) -> float:
    moved = model.transfer_seconds(size, crosses_hosts=crosses_hosts, num_links=num_links)
    return moved + count * dispatch_seconds(model.cluster)
