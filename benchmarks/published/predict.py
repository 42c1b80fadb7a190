"""The predicted step of a published run: trace its model, make its manual plan, simulate the plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import lcm
from typing import Any

import alpa_lite as al
from alpa_lite.api.stages import TracedFunction
from alpa_lite.errors import AlpaLiteError
from alpa_lite.planners.hybrid import Hybrid
from benchmarks.published.cluster_of import cluster_of
from benchmarks.published.model_of import generator_of, model_of, training_of
from benchmarks.published.plan_of import (
    backend_of,
    devices_of_stages,
    expert_devices,
    has_expert_axis,
    loops_of,
    scatters_sums,
    schedule_of,
    sharding_of,
)
from benchmarks.published.row import Row, RowError
from cost_models.cluster import Cluster
from cost_models.hardware import Backend

#: Sequences per replica and micro-batch that are tried where a row does not say.
MICROBATCHES = (1, 2, 4)


@dataclass(frozen=True, kw_only=True)
class PredictedRun:
    """The plan and the predicted seconds of a run."""

    plan: al.Plan
    seconds: float

    def breakdown(self) -> dict[str, Any]:
        """Return the predicted seconds per step on one device by cause, and a description of the plan."""
        prediction, stages = self.plan.prediction, self.plan.stages
        count = self.plan.num_microbatches
        return {
            "plan": self.plan.name,
            "num_microbatches": count,
            "forward_seconds": count * max(stage.cost.forward_seconds for stage in stages),
            "backward_seconds": count * max(stage.cost.backward_seconds for stage in stages),
            "update_seconds": max(stage.cost.update_seconds for stage in stages),
            "compute_seconds": prediction.compute_seconds / len(stages),
            "collective_seconds": prediction.collective_seconds / len(stages),
            "transfer_seconds": prediction.transfer_seconds,
            "bubble_fraction": prediction.bubble_fraction,
            "peak_gigabytes": max(prediction.peak_bytes) / 1e9,
            "flops_per_device": prediction.flops_per_device,
        }


@dataclass(kw_only=True)
class Predictor:
    """Predicts rows; traced steps are memoised, since rows that differ only in devices share them."""

    change_backend: Callable[[Backend], Backend] = lambda backend: backend
    change_cluster: Callable[[Cluster], Cluster] = lambda cluster: cluster
    _traced: dict[object, TracedFunction] = field(default_factory=dict[object, TracedFunction])

    def predict(self, row: Row) -> PredictedRun:
        """Return the predicted step. Raises `RowError` with the reason if the run cannot be built.

        A row without a micro-batch size gets the fastest of a few, since tables omit tuned values.
        """
        if unequal := devices_of_stages(row):
            row = replace(row, data=lcm(*(max(1, n // (row.model * row.context)) for n in unequal)))
        if row.num_microbatches is None and row.global_batch is not None:
            sizes = [size for size in MICROBATCHES if row.global_batch % (row.data * size) == 0]
            if not sizes:
                raise RowError(
                    f"global_batch is {row.global_batch}: {row.data} data-parallel replicas do not divide it. Give the "
                    "micro_batch, or degrees whose replicas do."
                )
            return min((self.predict(replace(row, micro_batch=size)) for size in sizes), key=lambda run: run.seconds)
        try:
            plan = self._plan(row, self.change_cluster(cluster_of(row)), self.change_backend(backend_of(row)))
        except (AlpaLiteError, ValueError) as error:  # of plans, clusters, and models whose sizes do not fit
            raise RowError(str(error)) from error
        return PredictedRun(plan=plan, seconds=plan.prediction.step_seconds)

    def _plan(self, row: Row, cluster: Cluster, backend: Backend) -> al.Plan:
        sharding, devices = sharding_of(row), devices_of_stages(row)
        planner = Hybrid(
            pipeline=row.pipeline,
            data=None if devices else row.data,
            tensor=row.model,
            context=row.context,
            expert=expert_devices(row),
            split={"experts": "expert"} if has_expert_axis(row) else {},
            zero=sharding.stage,
            replicas=sharding.replicas,
            sequence_parallel=scatters_sums(row),
            schedule=schedule_of(row),
            equal="loops" if loops_of(row) > 1 and not row.blocks else "flops",
            shares=row.blocks or devices,
            devices=devices,
        )
        traced = self._traced_step(row)
        request = traced.request(cluster, row.num_microbatches or 1, backend=backend)
        request = replace(request, signature=replace(request.signature, function=row.id))
        return planner.plan(request)

    def _traced_step(self, row: Row) -> TracedFunction:
        segments = loops_of(row)
        key = (model_of(row, num_segments=segments), row.family, row.batch_size, generator_of(row))
        if key not in self._traced:
            self._traced.clear()
            training = training_of(row, num_segments=segments)
            self._traced[key] = al.parallelize(training.step).trace(training.state, training.batch, training.key)
        return self._traced[key]
