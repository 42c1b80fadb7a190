"""When each stage of a plan holds the most, and what is alive then.

    predicted    state + sums + micro-batches in flight × saved values + temporaries, as the plan has them
    alive        the usages of the stage at the time of its peak, copies that readers need among them     (`_at_peak`)

Without the step (`Plan.request`) the four parts are known, but not the values.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from alpa_lite.inspection.text.parameter_groups import is_optimizer_state
from alpa_lite.inspection.text.tables import Table, render
from alpa_lite.inspection.why.repricing import Repricing
from alpa_lite.inspection.why.stage_problem import StageProblem
from alpa_lite.intra_op.memory.usages import stage_lives
from alpa_lite.intra_op.placements import Key
from alpa_lite.intra_op.shortage import moment_name, value_name
from alpa_lite.plan.plan import Plan
from alpa_lite.text import short_sources, show_bytes, show_percent

MAX_NAMES = 2
"""Values of each kind that the text names; the data hold all."""

_NOTED = 0.02
"""From this part of the peak on a difference to what is alive is told."""

MAX_DETAILED = 3
"""Stages of which the text lists the values."""

COPY = "copy for a reader"
"""What lies in another spec than it is kept in, while something reads it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveValues:
    """Values of one kind with one name (up to numbers in it), alive at the peak: bytes per device of all of them."""

    kind: str
    name: str
    count: int
    bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """One stage at its peak, in bytes per device. `peak_bytes` is what the plan predicts for its devices; `alive`, in
    order of size, adds up to `alive_bytes`. `moment` is empty where the step is not known."""

    stage: int
    peak_bytes: float
    capacity_bytes: float
    state_bytes: float
    accumulator_bytes: float
    saved_bytes: float
    temporary_bytes: float
    in_flight: int
    moment: str = ""
    alive: tuple[LiveValues, ...] = ()

    @property
    def alive_bytes(self) -> float:
        """What is known by name."""
        return sum(each.bytes for each in self.alive)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """The peaks of all stages."""

    plan: str
    stages: tuple[StageMemory, ...]

    def __str__(self) -> str:
        columns = ("stage", "peak", "of the memory", "arguments", "gradient sums", "saved", "temporaries")
        rows = tuple(
            (
                str(each.stage),
                show_bytes(each.peak_bytes),
                show_percent(each.peak_bytes / each.capacity_bytes),
                show_bytes(each.state_bytes),
                show_bytes(each.accumulator_bytes),
                f"{each.in_flight} × {show_bytes(each.saved_bytes)}",
                show_bytes(each.temporary_bytes),
            )
            for each in self.stages
        )
        summary = Table(
            title="Peak memory per device",
            columns=columns,
            rows=rows,
            numeric=frozenset(columns[1:]),
            note="saved: micro-batches in flight × what each keeps for its backward pass",
        )
        fullest = sorted(self.stages, key=lambda each: -each.peak_bytes / each.capacity_bytes)
        details = [_details(each) for each in fullest[:MAX_DETAILED] if each.alive]
        lines = [f"{self.plan}: what devices hold at most (predicted)."]
        if not details:
            lines.append("Which values these are is known with the step: al.plan(step, *args, planner=plan).")
        return render([*lines, ""], [summary, *details])

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"kind": "memory", **asdict(self)}


def _details(stage: StageMemory) -> Table:
    """A row per kind of value, with the largest of them by name."""
    kinds: dict[str, list[LiveValues]] = {}
    for each in stage.alive:
        kinds.setdefault(each.kind, []).append(each)
    columns = ("bytes", "of the peak", "kind", "arrays", "the largest")
    rows = tuple(
        (
            show_bytes(sum(each.bytes for each in members)),
            show_percent(sum(each.bytes for each in members) / stage.peak_bytes if stage.peak_bytes > 0 else 0.0),
            kind,
            str(sum(each.count for each in members)),
            "; ".join(f"{show_bytes(each.bytes)} of {each.name}" for each in members[:MAX_NAMES]),
        )
        for kind, members in sorted(kinds.items(), key=lambda item: -sum(each.bytes for each in item[1]))
    )
    over, note = stage.alive_bytes - stage.peak_bytes, ""
    if over > _NOTED * stage.peak_bytes:
        note = (
            f"{show_bytes(over)} of the copies are not in the predicted peak, which counts those that no choice avoids"
        )
    return Table(
        title=f"Alive on stage {stage.stage} {stage.moment}",
        columns=columns,
        rows=rows,
        numeric=frozenset({*columns[:2], "arrays"}),
        note=note,
    )


def allocated_table(plan: Plan, allocated_bytes: Sequence[float]) -> Table:
    """The predicted peak of each stage beside what XLA allocates for its programs."""
    columns = ("stage", "predicted peak", "allocated by XLA", "predicted / allocated")
    return Table(
        title="Predicted and allocated memory",
        columns=columns,
        rows=tuple(
            (str(number), show_bytes(peak), show_bytes(found), f"{peak / found:.2f}" if found > 0 else "–")
            for number, (peak, found) in enumerate(zip(plan.prediction.peak_bytes, allocated_bytes, strict=True))
        ),
        numeric=frozenset(columns[1:]),
        note="per device; on CPUs XLA needs other temporaries than on GPUs",
    )


def memory_use(plan: Plan) -> MemoryUse:
    """The peak of each stage, with what is alive then where the step is known."""
    problems: Sequence[StageProblem | None] = [None] * len(plan.stages)
    if plan.request is not None:
        problems = Repricing.of(plan, plan.request).stages
    found: list[StageMemory] = []
    for number, (stage, problem) in enumerate(zip(plan.stages, problems, strict=True)):
        moment, alive = "", tuple[LiveValues, ...]()
        if problem is not None:
            moment, alive = _at_peak(problem)
        found.append(
            StageMemory(
                stage=number,
                peak_bytes=plan.prediction.peak_bytes[number],
                capacity_bytes=plan.capacity_bytes(number),
                state_bytes=stage.state_bytes,
                accumulator_bytes=stage.accumulator_bytes,
                saved_bytes=stage.activation_bytes,
                temporary_bytes=stage.temporary_bytes,
                in_flight=plan.schedule.in_flight(number, len(plan.stages), plan.num_microbatches),
                moment=moment,
                alive=alive,
            )
        )
    return MemoryUse(plan=f"{plan.function} on {plan.cluster.name}, {plan.name}", stages=tuple(found))


def _at_peak(stage: StageProblem) -> tuple[str, tuple[LiveValues, ...]]:
    """When a stage holds the most under the plan's choices, and what."""
    usages = stage.usages
    if not usages:
        return "", ()
    changes = np.zeros(1 + max(usage.end for usage in usages))
    for usage in usages:
        changes[usage.start] += usage.sizes[0]
        changes[usage.end] -= usage.sizes[0]
    time = int(np.argmax(np.cumsum(changes)))
    builder = stage.builder
    lives = stage_lives(builder.view, builder.catalogue)
    owned = {((), life.value): (life.start, life.end) for life in lives.lives if not life.path}
    saved = {life.value for life in lives.lives if life.saved and not life.path}
    whole = {(0, lives.end), (0, lives.loop_end)}
    groups: dict[tuple[str, str], list[float]] = {}
    for usage in usages:
        size, times = float(usage.sizes[0]), (usage.start, usage.end)
        if size > 0 and usage.start <= time < usage.end:
            is_itself = times in whole or usage.value[0] > 0 or owned.get(((), usage.value[1])) == times
            kind = _kind(stage, usage.value, saved) if is_itself else _kind_of_other(stage, usage.value)
            groups.setdefault((kind, _name(stage, usage.value)), []).append(size)
    alive = (LiveValues(kind=k, name=n, count=len(sizes), bytes=sum(sizes)) for (k, n), sizes in groups.items())
    moment = short_sources(moment_name(builder.view, lives, time))
    return moment, tuple(sorted(alive, key=lambda each: -each.bytes))


def _kind_of_other(stage: StageProblem, key: Key) -> str:
    """Of what takes memory besides a value itself: sums on their way, and copies in the spec that a reader wants."""
    return _kind(stage, key, set()) if key[1] in stage.builder.crossings and key[0] == 0 else COPY


def _kind(stage: StageProblem, key: Key, saved: set[int]) -> str:
    scope, v = key
    step = stage.view.step
    if scope:
        return "temporary"
    if v in stage.builder.crossings:
        return "gradient sum" if step.num_microbatches > 1 else "gradient"
    if step.graph.producer[v] is None:
        if step.batch_dims[v] is not None:
            return "batch"
        return "optimizer state" if is_optimizer_state(step.graph.values[v].name) else "parameter"
    return "saved for backward" if v in saved else "temporary"


def _name(stage: StageProblem, key: Key) -> str:
    """The name of a value without the numbers of layers in it, and without the folders of its source."""
    graph = stage.builder.scopes[key[0]].graph
    name = value_name(graph, key[1])
    if graph.producer[key[1]] is None:
        path, blank, kind = name.rpartition(" ")
        return re.sub(r"(?<![^/_])\d+(?![^/])", "*", path) + blank + kind
    return short_sources(name)
