"""Lower bounds on the seconds of a step, whatever the plan: its work, divided over all devices without loss.

    seconds    >=  sum over ops of  runs / sum over groups of  devices / least(op)                      `least_seconds`
    least(op)   =  the whole op's kernel, traffic and arithmetic, which wastes no more than its parts   `_least_of`

Each part of an op that a device does in one micro-batch starts a kernel, moves its bytes, and is a product of at most
as many rows, columns and depth as the whole, so that it wastes no less of the device (`composed.least_seconds`). Added
up over all parts, that is at least what `least` says of the whole op: waiting, communication and recomputation only add
to it. Larger micro-batches read weights less often, so that the step with one micro-batch bounds those with more.

In a pipeline of p stages on equally many devices each, which all run m micro-batches, devices wait as well. If backward
passes are not cut in two, stage j is idle until the first micro-batch has passed those before it, and after it has sent
the last one back to them. With t_j what it takes for one micro-batch,

    seconds  >=  m t_j + sum of t_i over i < j      for each j

and however the work is divided among the stages, that is at least (p / m) / (1 - (1 - 1/m)^p) times what it takes
divided over all devices: as long when all p are as large.                                         `pipeline_slowdown`
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from alpa_lite.plan.pricing import Pricer
from alpa_lite.plan.walk import replicated_placement
from alpa_lite.program.ir import Graph, Op, wiring_of
from alpa_lite.program.memo import memoized
from alpa_lite.program.phases import StepGraph
from alpa_lite.rules.op_info import free_values
from alpa_lite.sharding.meshes import LogicalMesh, Submesh
from cost_models.cluster import Cluster
from cost_models.composed import CostModel


@memoized
def least_seconds(step: StepGraph, cluster: Cluster, cost_model_for: Callable[[Cluster], CostModel]) -> float:
    """Return a lower bound on the seconds of one step on a cluster, whatever the plan."""
    return _least_seconds(step, step.graph.ops, cluster, cost_model_for) + cluster.skew_seconds


def least_loop_seconds(step: StepGraph, cluster: Cluster, cost_model_for: Callable[[Cluster], CostModel]) -> float:
    """Return the part of `least_seconds` that the loop over micro-batches takes."""
    ops = [op for op in step.graph.ops if step.phases[op.id].in_loop]
    return _least_seconds(step, ops, cluster, cost_model_for)


def pipeline_slowdown(num_stages: int, num_microbatches: int) -> float:
    """Return the least ratio of the seconds of a pipelined loop over micro-batches to those without any waiting."""
    return (num_stages / num_microbatches) / (1 - (1 - 1 / num_microbatches) ** num_stages)


def _least_seconds(
    step: StepGraph, some: Sequence[Op], cluster: Cluster, cost_model_for: Callable[[Cluster], CostModel]
) -> float:
    """Return a lower bound on the seconds of some ops of a step."""
    # Free values may be computed anywhere, or fused away: they count for nothing.
    ops = [op for op in some if free_values(step.graph).isdisjoint(op.results)]
    runs = np.array([step.runs_of(op) for op in ops], dtype=float)
    # For each op the runs per second of all devices together: groups of different devices add up.
    rates = np.zeros(len(ops))
    first = 0
    for num_hosts in [group.num_hosts for group in cluster.groups] or [cluster.num_hosts]:
        num_devices = num_hosts * cluster.devices_per_host
        model = cost_model_for(cluster.at(first, num_devices))
        # Virtual devices share the rates of their host's processor.
        processors = num_hosts if cluster.shared_processor else num_devices
        with np.errstate(divide="ignore"):
            rates += processors / _least_of_ops(step.graph, ops, model)
        first += num_devices
    return float((runs / rates).sum())


def _least_of_ops(graph: Graph, ops: Sequence[Op], cost_model: CostModel) -> NDArray[np.float64]:
    """Return the device seconds of one run of each op, not split."""
    alone = Submesh(first_device=0, num_hosts=1, devices_per_host=1)
    pricer = Pricer(cost_model=cost_model, submesh=alone, mesh=LogicalMesh(axis_names=("x",), shape=(1,)))
    known: dict[object, float] = {}
    return np.array([_least_of(graph, op, pricer, known) for op in ops])


def _least_of(graph: Graph, op: Op, pricer: Pricer, known: dict[object, float]) -> float:
    """Return the device seconds that one run of an op takes at least, however it is split."""
    wiring = wiring_of(op)
    if wiring is not None:
        inside = (_least_of(body, o, pricer, known) for body in op.bodies for o in body.ops)
        return wiring.trips * sum(inside)
    key = pricer.price_class(graph, op.id)
    if key not in known:
        work = pricer.op_work(graph, op, replicated_placement(graph, op))
        # On a shared processor all devices together are served best.
        together = pricer.cost_model.cluster.num_devices if pricer.cost_model.cluster.shared_processor else 1
        known[key] = pricer.cost_model.least_compute_seconds(work, num_active_devices=together) / together
    return known[key]
