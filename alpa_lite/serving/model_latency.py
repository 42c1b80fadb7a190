"""Models of a workflow whose latencies are predicted: the step seconds of a plan per worker, over its messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from alpa_lite.plan.plan import Plan
from alpa_lite.serving.workflow import AccuracySample, ModelVariant


def variant_of_plans(
    name: str, plans: Mapping[str, Plan], samples: Sequence[AccuracySample], *, messages_per_step: int = 1
) -> ModelVariant:
    """Return a model that runs on each worker by the plan of its forward pass for that worker's devices.

    Its cost is the mean latency in milliseconds.

    Args:
        name: name of the model.
        plans: a plan by worker, as of `al.plan(forward, params, message, cluster=…)`; one or more workers.
        samples: accuracies as measured.
        messages_per_step: messages that one step handles together, where it works on batches.
    """
    latency = {worker: 1000.0 * plan.prediction.step_seconds / messages_per_step for worker, plan in plans.items()}
    return ModelVariant(
        name=name, cost=sum(latency.values()) / len(latency), samples=tuple(samples), latency_ms=latency
    )
