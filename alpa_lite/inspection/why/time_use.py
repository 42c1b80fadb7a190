"""Where the time of a step goes: by source line, collective and wait, each with what may be done about it.

Seconds are those of an average device: a stage counts by its part of the devices. Compute and collectives of a device
may overlap, so that the rows can add up to more than the step; what nothing hides is said in the second line.

    compute      kernels of a line, from the walk that also prices the plan                        (`_compute`)
    collective   of one kind over one axis for one line                                            (`_collectives`)
    transfer     between stages                                                                    (`_waits`)
    waiting      step − what the device is at work: bubble, other stages' updates, other hosts     (`_waits`)

Without the step (`Plan.request`) compute is known by stage and phase alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from alpa_lite.inspection.text.tables import Table, group_collectives, render
from alpa_lite.inspection.why.advice import (
    Spent,
    advice_on_collective,
    advice_on_compute,
    advice_on_transfers,
    advice_on_waiting,
)
from alpa_lite.inspection.why.op_costs import entries_of
from alpa_lite.inspection.why.repricing import Repricing
from alpa_lite.plan.plan import Plan
from alpa_lite.schedule import passes_of
from alpa_lite.text import show_milliseconds, show_numbers, show_percent, show_seconds

MAX_ITEMS = 10
"""Rows of the text; the data hold all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeItem:
    """One thing that takes time: seconds per step of an average device, where, and what to do about it."""

    kind: str
    what: str
    source: str
    stages: tuple[int, ...]
    phases: tuple[str, ...]
    seconds: float
    suggestion: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeUse:
    """A step taken apart; all seconds are those of an average device. `exposed_seconds`: communication that no compute
    hides; `by_line`: whether compute is known by line."""

    plan: str
    step_seconds: float
    compute_seconds: float
    collective_seconds: float
    exposed_seconds: float
    waiting_seconds: float
    by_line: bool
    items: tuple[TimeItem, ...]

    def __str__(self) -> str:
        step = self.step_seconds

        def part(seconds: float) -> str:
            return f"{show_seconds(seconds)} ({show_percent(seconds / step if step > 0 else 0.0)})"

        lines = [
            f"{self.plan}: a step takes {show_seconds(step)} (predicted). An average device computes for"
            f" {part(self.compute_seconds)}, communicates for {part(self.collective_seconds)}, of which nothing hides"
            f" {part(self.exposed_seconds)}, and waits for {part(self.waiting_seconds)}.",
        ]
        if not self.by_line:
            lines.append("Which lines compute so long is known with the step: al.plan(step, *args, planner=plan).")
        shown, rest = self.items[:MAX_ITEMS], self.items[MAX_ITEMS:]
        columns = ("", "ms", "of the step", "what, and what to do", "where")
        rows = tuple(
            (
                str(number),
                show_milliseconds(item.seconds),
                show_percent(item.seconds / step if step > 0 else 0.0),
                f"{item.what}: {item.suggestion}",
                item.source.split(" ")[0] if ":" in item.source else f"stage {show_numbers(item.stages)}",
            )
            for number, item in enumerate(shown, 1)
        )
        note = f"… and {len(rest)} more, {show_seconds(sum(item.seconds for item in rest))} in all" if rest else ""
        table = Table(
            title="Where the time goes", columns=columns, rows=rows, numeric=frozenset(columns[:3]), note=note
        )
        return render([*lines, ""], [table])

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"kind": "time", **asdict(self)}


def time_use(plan: Plan) -> TimeUse:
    """The time of a step by cause, the longest first."""
    weights = [stage.submesh.num_devices / plan.cluster.num_devices for stage in plan.stages]
    busy = sum(
        weight * (plan.num_microbatches * (stage.forward_seconds + stage.backward_seconds) + stage.update_seconds)
        for weight, stage in zip(weights, plan.stages, strict=True)
    )
    collectives = _collectives(plan, weights)
    step, in_all = plan.prediction.step_seconds, sum(item.seconds for item in collectives)
    if plan.request is not None:
        compute = _compute(plan, weights)
        total = sum(item.seconds for item in compute)
    else:
        compute = _compute_of_phases(plan, weights)
        total = max(0.0, busy - in_all)
    waiting = max(0.0, step - busy)
    items = [*compute, *collectives, *_waits(plan, waiting)]
    return TimeUse(
        plan=f"{plan.function} on {plan.cluster.name}, {plan.name}",
        step_seconds=step,
        compute_seconds=total,
        collective_seconds=in_all,
        exposed_seconds=min(in_all, max(0.0, busy - total)),
        waiting_seconds=waiting,
        by_line=plan.request is not None,
        items=tuple(sorted((item for item in items if item.seconds > 0), key=lambda item: -item.seconds)),
    )


def _compute(plan: Plan, weights: Sequence[float]) -> list[TimeItem]:
    """The kernels of each line, by what they do."""
    repricing = Repricing.of(plan, plan.request)
    opaque = {use.primitive for use in plan.opaque}
    groups: dict[tuple[str, str], list[tuple[int, Any]]] = {}
    for number, stage in enumerate(repricing.stages):
        for entry in entries_of(stage, opaque):
            groups.setdefault((entry.source, entry.what), []).append((number, entry))
    found: list[TimeItem] = []
    for (source, what), members in groups.items():
        spent = Spent(
            seconds=sum(weights[n] * entry.seconds for n, entry in members),
            flops=sum(weights[n] * entry.flops for n, entry in members),
            bytes=sum(weights[n] * entry.bytes for n, entry in members),
            dtype=members[0][1].dtype,
            phases=_unique(entry.phase for _, entry in members),
            primitives=_unique(entry.primitive for _, entry in members),
        )
        found.append(
            TimeItem(
                kind="compute",
                what=f"{what}, {', '.join(spent.phases)}",
                source=source,
                stages=tuple(sorted({n for n, _ in members})),
                phases=spent.phases,
                seconds=spent.seconds,
                suggestion=advice_on_compute(plan, repricing.step, what, spent),
            )
        )
    return found


def _compute_of_phases(plan: Plan, weights: Sequence[float]) -> list[TimeItem]:
    """What a plan alone knows: the tasks of each stage, collectives included."""
    found: list[TimeItem] = []
    for number, (stage, weight) in enumerate(zip(plan.stages, weights, strict=True)):
        runs = plan.num_microbatches
        parts = (
            ("forward", runs * stage.forward_seconds),
            ("backward", runs * stage.backward_seconds),
            ("update", stage.update_seconds),
        )
        for phase, seconds in parts:
            found.append(
                TimeItem(
                    kind="task",
                    what=f"{phase} of stage {number}, collectives included",
                    source="",
                    stages=(number,),
                    phases=(phase,),
                    seconds=weight * seconds,
                    suggestion=f'plan.explain("stage {number}") takes it apart',
                )
            )
    return found


def _collectives(plan: Plan, weights: Sequence[float]) -> list[TimeItem]:
    uses = (replace(use, seconds=weights[use.stage] * use.seconds) for use in plan.prediction.collectives)
    return [
        TimeItem(
            kind="collective",
            what=f"{group.kind} over {group.axis}, {group.phase}",
            source=group.source,
            stages=group.stages,
            phases=(group.phase,),
            seconds=group.seconds,
            suggestion=advice_on_collective(plan, group),
        )
        for group in group_collectives(uses)
    ]


def _waits(plan: Plan, waiting: float) -> list[TimeItem]:
    everywhere = tuple(range(len(plan.stages)))
    boundaries = len(plan.stages) - 1
    found: list[TimeItem] = []
    if boundaries and plan.prediction.transfer_seconds > 0:
        found.append(
            TimeItem(
                kind="transfer",
                what="transfers between stages",
                source="",
                stages=everywhere,
                phases=passes_of(plan.schedule.tasks(len(plan.stages), plan.num_microbatches)[0]),
                seconds=plan.prediction.transfer_seconds / boundaries,
                suggestion=advice_on_transfers(plan),
            )
        )
    what = "waiting for other stages" if boundaries else "starting programs, and waiting for the slowest host"
    found.append(
        TimeItem(
            kind="waiting",
            what=what,
            source="",
            stages=everywhere,
            phases=(),
            seconds=waiting,
            suggestion=advice_on_waiting(plan),
        )
    )
    return found


def _unique(words: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(words))
