"""Differences between plans: of two plans, of one step on several clusters, and of a plan with and without pins.

compare             decisions, specs and collectives, and their effect on time and memory
ClusterComparison   one step on several clusters, some of which may be described with other memory or links (`varied`)
PinsCost            the cost of the user's pins against the free optimum
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from alpa_lite.inspection.text.groups import Argument, arguments_of, group_arguments
from alpa_lite.inspection.text.tables import Table, plan_summary, render
from alpa_lite.inter_op.assembly import with_microbatches
from alpa_lite.plan.plan import CollectiveUse, Plan
from alpa_lite.sharding.specs import Spec
from alpa_lite.text import (
    show_bytes,
    show_layers,
    show_milliseconds,
    show_number,
    show_percent,
    show_ratio,
    show_seconds,
)
from cost_models import uncertainty
from cost_models.cluster import Cluster, with_bandwidth, with_memory

_MAX_SPEC_ROWS = 25


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One difference, in words."""

    what: str
    before: str
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDiff:
    """The differences between two plans.

    before, after      name and cluster of each plan
    seconds            predicted seconds per step, (before, after)
    peak_bytes         greatest peak memory per device over the stages, in bytes, (before, after)
    decisions          differences in cluster, micro-batches, schedule, rematerialisation and stages
    specs              differences in the specs of arguments
    collectives        differences in the collectives per step, by kind
    different_steps    whether the plans were certainly made for different steps
    indistinguishable  whether each predicted step lies within the range of the other (`Plan.likely_seconds`)
    """

    before: str
    after: str
    seconds: tuple[float, float]
    peak_bytes: tuple[float, float]
    decisions: tuple[Difference, ...]
    specs: tuple[Difference, ...]
    collectives: tuple[Difference, ...]
    different_steps: bool
    indistinguishable: bool

    def __str__(self) -> str:
        # Another mesh changes every spec: a screenful is enough, and `to_json` has all.
        return render((*self.summary(), ""), self.tables(_MAX_SPEC_ROWS))

    def tables(self, max_specs: int | None = None) -> list[Table]:
        """Return the differences as tables, without empty ones; of specs, the first `max_specs`."""
        shown = self.specs if max_specs is None else self.specs[:max_specs]
        tables = (
            _table("Decisions", self.decisions, "what"),
            _table("Specs", shown, "argument", more=len(self.specs) - len(shown)),
            _table("Collectives per step", self.collectives, "kind"),
        )
        return [table for table in tables if table.rows]

    def summary(self) -> tuple[str, ...]:
        """Return the effect on time and memory in sentences."""
        lines = [f"From {self.before} to {self.after}:", f"  {_buys(*self.seconds)} {_memory(*self.peak_bytes)}"]
        if self.indistinguishable and self.decisions:
            lines.append(
                "  The prediction cannot tell which is faster: each of the two lies in the range in which the other is "
                "likely to be."
            )
        if self.different_steps:
            lines.append("  The plans were made for different steps: other code, or arguments of other shapes.")
        if not (self.decisions or self.specs or self.collectives):
            lines.append("  The plans decide the same.")
        return tuple(lines)

    def to_json(self) -> dict[str, object]:
        """Return plain data for JSON."""
        return asdict(self)


def diff(plan: Plan, other: Plan) -> str:
    """Return the differences from `plan` to `other` as text."""
    return str(compare(plan, other))


def compare(plan: Plan, other: Plan) -> PlanDiff:
    """Return the differences from `plan` to `other` as data."""
    return PlanDiff(
        before=f"{plan.name} on {plan.cluster.name}",
        after=f"{other.name} on {other.cluster.name}",
        seconds=(plan.prediction.step_seconds, other.prediction.step_seconds),
        peak_bytes=(max(plan.prediction.peak_bytes, default=0.0), max(other.prediction.peak_bytes, default=0.0)),
        decisions=_decisions(plan, other),
        specs=_specs(plan, other),
        collectives=_collectives(plan.prediction.collectives, other.prediction.collectives),
        different_steps=_different_steps(plan, other),
        indistinguishable=indistinguishable(plan, other),
    )


def indistinguishable(plan: Plan, other: Plan) -> bool:
    """Return whether each predicted step lies within the range of the other."""
    seconds, others = plan.prediction.step_seconds, other.prediction.step_seconds
    return uncertainty.indistinguishable(seconds, plan.likely_seconds, others, other.likely_seconds)


def _different_steps(plan: Plan, other: Plan) -> bool:
    """Return True if the plans certainly belong to different code or shapes.

    The fingerprint covers the step at its numbers of micro-batches and updates, so it tells nothing if these differ.
    """
    sizes = [(each.num_microbatches, each.loop_parts, each.update_every) for each in (plan, other)]
    alike = sizes[0] == sizes[1]
    return alike and plan.fingerprint != other.fingerprint


def _decisions(plan: Plan, other: Plan) -> tuple[Difference, ...]:
    pairs = [
        ("function", plan.function, other.function),
        ("cluster", _cluster(plan), _cluster(other)),
        ("micro-batches", str(plan.num_microbatches), str(other.num_microbatches)),
        ("schedule", str(plan.schedule), str(other.schedule)),
        ("semantics", plan.semantics, other.semantics),
        ("rematerialised", plan.recomputed or "nothing", other.recomputed or "nothing"),
        ("optimizer state", *("on the host" if each.host_optimizer else "on devices" for each in (plan, other))),
        ("stages", str(len(plan.stages)), str(len(other.stages))),
    ]
    for number in range(max(len(plan.stages), len(other.stages))):
        pairs.append((f"stage {number}", _stage(plan, number), _stage(other, number)))
    return tuple(Difference(what=what, before=a, after=b) for what, a, b in pairs if a != b)


def _cluster(plan: Plan) -> str:
    return f"{plan.cluster.name}, {plan.cluster.num_devices} devices"


def _stage(plan: Plan, number: int) -> str:
    # One plan may have more stages than the other.
    if number >= len(plan.stages):
        return "–"
    stage = plan.stages[number]
    return f"{show_layers(*stage.layers)} of {plan.num_layers}, {stage.submesh}, {stage.mesh_shape}"


def _specs(plan: Plan, other: Plan) -> tuple[Difference, ...]:
    """Return the specs that differ, with repeated layers as one row.

    Optimizer state that changes like its parameter is left out. Axis names count: [x] and [data] are different specs.
    """
    arguments, others = arguments_of(plan), arguments_of(other)
    before, after = arguments.by_name, others.by_name
    texts = {name: (_text(before.get(name)), _text(after.get(name))) for name in dict.fromkeys([*before, *after])}
    # Of either plan, since an array may exist in one of them alone.
    owners = {**others.owners, **arguments.owners}
    changed: dict[tuple[str, str], list[Argument]] = {}
    for name, (old, new) in texts.items():
        # Optimizer state that changes exactly as its parameter does says nothing new.
        if old != new and (name not in owners or texts[owners[name]] != (old, new)):
            argument = before.get(name) or after[name]
            # One spec for all, so that only the change decides what is grouped.
            changed.setdefault((old, new), []).append(replace(argument, spec=Spec(())))
    return tuple(
        Difference(
            what=group.pattern + (f" ×{len(group.members)}" if len(group.members) > 1 else ""), before=old, after=new
        )
        for (old, new), arguments in changed.items()
        for group in group_arguments(arguments)
    )


def _text(argument: Argument | None) -> str:
    return "–" if argument is None else str(argument.spec)


def _collectives(before: Sequence[CollectiveUse], after: Sequence[CollectiveUse]) -> tuple[Difference, ...]:
    # Of either plan, since a kind that only one of them has is a difference too.
    kinds = sorted({use.kind for use in (*before, *after)})
    pairs = [(kind, _kind_text(before, kind), _kind_text(after, kind)) for kind in kinds]
    return tuple(Difference(what=kind, before=a, after=b) for kind, a, b in pairs if a != b)


def _kind_text(uses: Sequence[CollectiveUse], kind: str) -> str:
    mine = [use for use in uses if use.kind == kind]
    if not mine:
        return "none"
    moved, seconds = sum(u.bytes * u.count for u in mine), sum(u.seconds * u.count for u in mine)
    return f"{show_number(sum(u.count for u in mine))}, {show_bytes(moved)}, {show_seconds(seconds)}"


def _buys(before: float, after: float) -> str:
    times = f"{show_seconds(before)} → {show_seconds(after)} per step (predicted)"
    # Below this the figures, which have three or four digits, are printed alike.
    if before <= 0 or after <= 0 or abs(after - before) < 5e-4 * before:
        return f"{times}, the same."
    word, ratio = ("faster", before / after) if after < before else ("slower", after / before)
    return f"{times}, {ratio:.2f}× {word}."


def _memory(before: float, after: float) -> str:
    change = after - before
    # Predictions are floats: a difference of less than half a byte is rounding.
    sign = "the same" if abs(change) < 0.5 else f"{show_bytes(abs(change))} {'less' if change < 0 else 'more'}"
    return f"Peak memory per device {show_bytes(before)} → {show_bytes(after)}, {sign}."


def _table(title: str, changes: Sequence[Difference], first: str, more: int = 0) -> Table:
    rows = tuple((change.what, change.before, change.after) for change in changes)
    return Table(
        title=title, columns=(first, "before", "after"), rows=rows, note=f"… and {more} more" if more > 0 else ""
    )


def varied(cluster: Cluster, *, memory_bytes: float | None = None, bandwidth_scale: float | None = None) -> Cluster:
    """Return the cluster with other memory or link bandwidth, as its name then says.

    memory_bytes       usable memory per device in bytes; None: unchanged
    bandwidth_scale    factor on the bandwidth of all links; None: unchanged

    Raises `ClusterError` for impossible values.
    """
    if memory_bytes is not None:
        # The name of the cluster says what was changed, since it heads every table of the plan.
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
        # By share of its memory, as stages may have devices of different kinds.
        fullest = plan.fullest_stage
        peak, capacity = plan.prediction.peak_bytes[fullest], plan.capacity_bytes(fullest)
        return (
            *head,
            with_microbatches(plan),
            str(len(plan.stages)),
            show_milliseconds(seconds),
            show_ratio(seconds / fastest.prediction.step_seconds),
            # Faster clusters may cost more in total; this column compares what is paid.
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
        # A step of no time cannot get relatively longer.
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
        # As in `_buys`: both times would be printed alike.
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
