"""Prices of plans: predicted seconds and TFLOPS per device, as the software that they were measured with runs them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import alpa_lite as al
from alpa_lite.api.stages import TracedFunction
from alpa_lite.cli.bench.entries import described
from alpa_lite.cli.models.alpa_cases import Case
from alpa_lite.errors import AlpaLiteError
from alpa_lite.plan.progress import Progress
from alpa_lite.planners import Auto
from alpa_lite.planners.planner import Planner
from benchmarks.alpa.fixed_plans import XLA, FixedPlan, Software
from cost_models.cluster import with_memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """The cost model's prediction for a plan, and the measurement.

    Attributes:
        system: the name of the system that made the plan.
        seconds, tflops, peak_bytes: predicted: of a step, per device, of the fullest device; None without a plan.
        as_run_tflops: predicted for the execution by its own system; None where it does not fit.
        planning_seconds: from the function to the plan.
        flops_per_sample: as the evaluation counts them.
        problem: the reason why there is no plan; else "".
    """

    case: str
    system: str
    plan: str
    global_batch: int
    num_microbatches: int
    planning_seconds: float
    seconds: float | None = None
    tflops: float | None = None
    peak_bytes: float | None = None
    as_run_tflops: float | None = None
    measured_tflops: float | None = None
    flops_per_sample: float | None = None
    problem: str = ""

    @property
    def ratio(self) -> float | None:
        """Predicted to measured TFLOPS, for the execution by its own system."""
        if self.as_run_tflops is None or self.measured_tflops is None:
            return None
        return self.as_run_tflops / self.measured_tflops


@dataclass(frozen=True, kw_only=True)
class Desk:
    """Prices plans, and memoises the traced steps of the current case."""

    progress: Progress = field(default_factory=Progress, repr=False)
    _traced: dict[Case, TracedFunction] = field(default_factory=dict[Case, TracedFunction], repr=False)

    def price(self, fixed: FixedPlan) -> Price:
        """Return the price of one plan; a plan that does not fit has a problem instead."""
        started, case = time.perf_counter(), fixed.case
        seconds = tflops = peak = None
        took = 0.0
        text, problem, count = fixed.planner.name, "", fixed.num_microbatches
        try:
            plan = self.plan(case, fixed.planner, fixed.num_microbatches)
            took = time.perf_counter() - started
        except AlpaLiteError as error:
            problem, took = str(error), time.perf_counter() - started
        else:
            text = described(plan) if isinstance(fixed.planner, Auto) else text
            count, seconds = plan.num_microbatches, plan.prediction.step_seconds
            tflops, peak = case.tflops_per_device(seconds), max(plan.prediction.peak_bytes)
        as_run = self._as_run(fixed, tflops)
        return Price(
            case=case.id,
            system=fixed.system,
            plan=text,
            global_batch=case.global_batch,
            num_microbatches=count,
            planning_seconds=took,
            seconds=seconds,
            tflops=tflops,
            peak_bytes=peak,
            as_run_tflops=as_run,
            measured_tflops=fixed.measured_tflops,
            flops_per_sample=case.flops_per_step / case.global_batch,
            problem=problem,
        )

    def _as_run(self, fixed: FixedPlan, tflops: float | None) -> float | None:
        """Return the TFLOPS per device for the execution by its own system, which may differ from the comparison."""
        if fixed.ran_on == XLA and fixed.ran_as is None:
            return tflops
        try:
            plan = self.plan(fixed.case, fixed.ran_as or fixed.planner, fixed.num_microbatches, fixed.ran_on)
        except AlpaLiteError:
            return None
        return fixed.case.tflops_per_device(plan.prediction.step_seconds)

    def plan(self, case: Case, planner: Planner, num_microbatches: int, software: Software = XLA) -> al.Plan:
        """Return the plan that a planner makes. Raises `AlpaLiteError`."""
        if case not in self._traced:
            self._traced[case] = al.parallelize(case.train_step(), progress=self.progress).trace(*case.arguments())
        cluster = case.cluster
        if software.memory_bytes is not None:
            cluster = with_memory(cluster, software.memory_bytes)
        request = self._traced[case].request(cluster, num_microbatches, backend=software.backend)
        return planner.plan(replace(request, signature=replace(request.signature, function=case.id)))


def seconds_per_sample(price: Price) -> float:
    """Return the seconds per sample, infinite without a plan.

    Some systems were measured with smaller batches, so seconds per step are not comparable.
    """
    return float("inf") if price.seconds is None else price.seconds / price.global_batch


def best(prices: Sequence[Price]) -> Price | None:
    """Return the price with the fewest seconds per sample; None if none has a plan."""
    return min((price for price in prices if price.seconds is not None), key=seconds_per_sample, default=None)
