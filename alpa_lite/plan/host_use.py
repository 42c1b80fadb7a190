"""The memory of hosts that a plan uses: for arrays that wait there (`step.offloading`).

bytes per device = state on the host + micro-batches in flight * values that a forward pass writes there
bytes of a host  = Σ over its devices                                                     (fullest_host_bytes)
"""

from __future__ import annotations

from collections import defaultdict

from alpa_lite.plan.plan import Plan
from alpa_lite.plan.pricing import block_bytes
from alpa_lite.program.phases import Phase, StepGraph
from alpa_lite.schedule import peak_in_flight


def host_bytes_of(plan: Plan, step: StepGraph) -> tuple[float, ...]:
    """Return for each stage the bytes of the host's memory that each of its devices uses; () if nothing waits there.

    plan: the decisions, with the ids of ops and values of `step`, the step as planned.
    """
    graph, found = step.graph, [0.0] * len(plan.stages)
    if not any(value.on_host for value in graph.values):
        return ()
    tasks = plan.schedule.tasks(len(plan.stages), plan.num_microbatches)
    for number, stage in enumerate(plan.stages):
        sizes = stage.mesh_shape.axis_sizes
        (mine,) = (each for each in tasks if any(task.stage == number for task in each))
        in_flight = peak_in_flight([task for task in mine if task.stage == number])
        for v, spec in stage.inputs.items():
            # Values of other stages are sent from device to device.
            if graph.values[v].on_host and graph.producer[v] is None:
                found[number] += block_bytes(graph.values[v], spec, sizes)
        for op, placement in stage.ops.items():
            for r, spec in zip(graph.ops[op].results, placement.results, strict=True):
                if graph.values[r].on_host and step.phases[op] is Phase.FORWARD:
                    found[number] += in_flight * block_bytes(graph.values[r], spec, sizes)
    return tuple(found)


def fullest_host_bytes(plan: Plan) -> float:
    """Return the bytes that the plan uses of the memory of the fullest host."""
    hosts = defaultdict[int, float](float)
    for stage, used in zip(plan.stages, plan.prediction.host_bytes, strict=False):
        for device in stage.submesh.devices:
            hosts[device // plan.cluster.devices_per_host] += used
    return max(hosts.values(), default=0.0)
