"""What-if questions: one step on several clusters, and the cost of the user's pins against the free optimum."""

from __future__ import annotations

from dataclasses import dataclass, replace

from alpa_lite.inspection.text.diff import PlanDiff, compare
from alpa_lite.inspection.text.tables import Table, plan_summary, render
from alpa_lite.inter_op.assembly import with_microbatches
from alpa_lite.plan.plan import Plan
from alpa_lite.text import show_bytes, show_milliseconds, show_percent, show_ratio, show_seconds
from cost_models.cluster import Cluster, with_bandwidth, with_memory


def varied(cluster: Cluster, *, memory_bytes: float | None = None, bandwidth_scale: float | None = None) -> Cluster:
    """Return the cluster with other memory or link bandwidth, as its name then says.

    memory_bytes       memory per device in bytes; None: unchanged
    bandwidth_scale    factor on the bandwidth of all links; None: unchanged

    Raises `ClusterError` for impossible values.
    """
    if memory_bytes is not None:
        changed = with_memory(cluster, memory_bytes)
        cluster = replace(changed, name=f"{cluster.name} with {show_bytes(memory_bytes)} per device")
    if bandwidth_scale is not None:
        changed = with_bandwidth(cluster, bandwidth_scale)
        cluster = replace(changed, name=f"{cluster.name} at {bandwidth_scale:g} × bandwidth")
    return cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A cluster with its plan; without a plan, `problem` is the error message."""

    cluster: Cluster
    plan: Plan | None
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterComparison:
    """The same step planned for several clusters."""

    candidates: tuple[Candidate, ...]

    @property
    def fastest(self) -> Plan | None:
        """The plan with the shortest step; None if no cluster has a plan."""
        # A cluster on which nothing fits is still listed, with its reason.
        plans = [candidate.plan for candidate in self.candidates if candidate.plan is not None]
        return min(plans, key=lambda plan: plan.prediction.step_seconds, default=None)

    def __str__(self) -> str:
        columns = ("cluster", "devices", "plan", "stages", "ms", "slower", "device-s", "bubble", "peak memory")
        table = Table(
            title="Clusters",
            columns=columns,
            rows=tuple(map(self._row, self.candidates)),
            numeric=frozenset({"devices", *columns[3:]}),
            note="ms: per step, predicted; slower: against the fastest; device-s: devices × seconds per step, what a "
            "step costs where each device costs the same",
        )
        problems = [f"{each.cluster.name}: {each.problem}" for each in self.candidates if each.problem]
        return "\n\n".join([render([], [table]), *([render(problems)] if problems else [])])

    def _row(self, candidate: Candidate) -> tuple[str, ...]:
        cluster, plan, fastest = candidate.cluster, candidate.plan, self.fastest
        head = (cluster.name, str(cluster.num_devices))
        if plan is None or fastest is None:
            return (*head, "none", *[""] * 6)
        seconds = plan.prediction.step_seconds
        fullest = plan.fullest_stage
        peak, capacity = plan.prediction.peak_bytes[fullest], plan.capacity_bytes(fullest)
        return (
            *head,
            with_microbatches(plan),
            str(len(plan.stages)),
            show_milliseconds(seconds),
            show_ratio(seconds / fastest.prediction.step_seconds),
            f"{seconds * cluster.num_devices:.3g}",
            show_percent(plan.prediction.bubble_fraction),
            f"{show_bytes(peak)} ({show_percent(peak / capacity)})",
        )

    def to_json(self) -> dict[str, object]:
        """Return plain data for JSON."""
        return {
            "clusters": [
                {
                    "cluster": each.cluster.name,
                    "num_devices": each.cluster.num_devices,
                    "problem": each.problem or None,
                    "plan": None if each.plan is None else plan_summary(each.plan),
                }
                for each in self.candidates
            ]
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class PinsCost:
    """A plan with pins and the plan without."""

    pins: tuple[str, ...]
    free: Plan
    pinned: Plan

    @property
    def fraction(self) -> float:
        """The time that the pins add, as a fraction of the free step; negative if the free search was suboptimal."""
        free = self.free.prediction.step_seconds
        return (self.pinned.prediction.step_seconds - free) / free if free > 0 else 0.0

    @property
    def changes(self) -> PlanDiff:
        """The differences from the free plan to the pinned one."""
        return compare(self.free, self.pinned)

    @property
    def sentence(self) -> str:
        """The cost of the pins in a sentence."""
        before, after = (show_seconds(plan.prediction.step_seconds) for plan in (self.free, self.pinned))
        what = "Your pin" if len(self.pins) == 1 else f"Your {len(self.pins)} pins"
        verb = "costs" if len(self.pins) == 1 else "cost"
        if abs(self.fraction) < 5e-4:
            return f"{what} {verb} nothing: {after} per step with and without."
        if self.fraction < 0:
            # Possible as the free search ends within a gap, or by heuristics.
            gained = show_percent(-self.fraction)
            return f"{what} made the search find a plan that is {gained} faster: {before} → {after} per step."
        return f"{what} {verb} {show_percent(self.fraction)}: {before} per step without, {after} with."

    def __str__(self) -> str:
        return f"{self.pinned}\n\n{self.sentence}\n\n{self.changes}"

    def to_json(self) -> dict[str, object]:
        """Return plain data for JSON."""
        return {
            "pins": list(self.pins),
            "pins_cost_fraction": self.fraction,
            "free_step_seconds": self.free.prediction.step_seconds,
            "diff": self.changes.to_json(),
        }
