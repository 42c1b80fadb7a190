"""The peak memory of each stage of a plan, and the values that are alive at the peak.

predicted    state + gradient sums + micro-batches in flight × saved values + temporaries, from the plan
alive        the usages of the stage at the time of its peak, copies for readers included             (`_at_peak`)

Without the step (`Plan.request`) only the four parts of the sum are available, not the values.
"""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from dataclasses import asdict, dataclass

import numpy as np

from alpa_lite.inspection.text.groups import is_optimizer_state
from alpa_lite.inspection.text.tables import Table, render
from alpa_lite.inspection.why.repricing import Repricing
from alpa_lite.inspection.why.stage_problem import StageProblem
from alpa_lite.intra_op.shortage import moment_name, value_name
from alpa_lite.intra_op.stage import Key
from alpa_lite.intra_op.usages import stage_lives
from alpa_lite.plan.plan import Plan
from alpa_lite.text import short_sources, show_bytes, show_percent

MAX_NAMES = 2
"""The number of values of each kind that the text names; the data have all."""

_NOTED = 0.02
"""The share of the peak from which on a difference to the sum of the values alive is mentioned."""

MAX_DETAILED = 3
"""The number of stages whose values the text lists."""

COPY = "copy for a reader"
"""A copy of a value in another spec than it is stored in, alive while an op reads it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveValues:
    """Values of one kind and one name (with numbers in it ignored) that are alive at the peak.

    kind     the role of the values
    name     their common name
    count    how many there are
    bytes    bytes per device of all of them
    """

    kind: str
    name: str
    count: int
    bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """One stage at its peak, in bytes per device.

    peak_bytes       the plan's prediction for its devices
    capacity_bytes   what a plan may use of a device
    reserved_bytes   what of a device is kept for the allocator
    *_bytes          the parts of the prediction: arguments (state), gradient sums (accumulator), saved values of one
                     micro-batch, temporaries
    in_flight        micro-batches whose saved values are alive at the peak
    moment           the op at the peak, in words; "" without the step
    alive            the values alive at the peak, the largest first; they add up to `alive_bytes`
    """

    stage: int
    peak_bytes: float
    capacity_bytes: float
    reserved_bytes: float
    state_bytes: float
    accumulator_bytes: float
    saved_bytes: float
    temporary_bytes: float
    in_flight: int
    moment: str = ""
    alive: tuple[LiveValues, ...] = ()

    @property
    def alive_bytes(self) -> float:
        """The bytes of all values that are listed in `alive`."""
        return sum(each.bytes for each in self.alive)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """The peaks of all stages; whether these include old versions of weights, as asynchronous pipelines hold them."""

    plan: str
    stages: tuple[StageMemory, ...]
    has_old_weights: bool = False

    def __str__(self) -> str:
        columns = ("stage", "peak", "of the usable memory", "arguments", "gradient sums", "saved", "temporaries")
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
            note="saved: micro-batches in flight × what each keeps for its backward pass"
            + ("; the peak includes the old weights of micro-batches in flight" if self.has_old_weights else ""),
        )
        # By their share: where devices differ, the largest number of bytes need not fill the most of its device.
        fullest = sorted(self.stages, key=lambda each: -each.peak_bytes / each.capacity_bytes)
        details = [_details(each) for each in fullest[:MAX_DETAILED] if each.alive]
        lines = [f"{self.plan}: what devices hold at most (predicted)."]
        if not details:
            lines.append("Which values these are can be listed with the step: al.plan(step, *args, planner=plan).")
        return render([*lines, ""], [summary, *details])

    def to_json(self) -> dict[str, object]:
        """Return plain data for JSON."""
        return {"kind": "memory", **asdict(self)}


def _details(stage: StageMemory) -> Table:
    """Return a row per kind of value, with the names of the largest."""
    # `alive` is sorted by size, so that the first of each kind is its largest.
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
    # Copies that some choice could avoid are left out of the prediction, but may be made by this plan.
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
    """Return a table of the predicted peak of each stage and the bytes that XLA allocates for its programs."""
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
    """Return the peak of each stage, with the values alive at it if the plan has its request."""
    problems: Sequence[StageProblem | None] = [None] * len(plan.stages)
    if plan.request is not None:
        # Values are known to the problem of a stage alone; a saved plan has only sums.
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
                reserved_bytes=plan.reserved_bytes(number),
                state_bytes=stage.cost.state_bytes,
                accumulator_bytes=stage.cost.accumulator_bytes,
                saved_bytes=stage.cost.activation_bytes,
                temporary_bytes=stage.cost.temporary_bytes,
                in_flight=plan.schedule.in_flight(number, len(plan.stages), plan.num_microbatches),
                moment=moment,
                alive=alive,
            )
        )
    return MemoryUse(
        plan=f"{plan.function} on {plan.cluster.name}, {plan.name}",
        stages=tuple(found),
        has_old_weights=plan.num_updates > 1,
    )


def _at_peak(stage: StageProblem) -> tuple[str, tuple[LiveValues, ...]]:
    """Return the moment of a stage's peak under the plan's choices, and the values alive then."""
    usages = stage.usages
    if not usages:
        return "", ()
    # The sum of all sizes over time, from their beginnings and ends alone.
    changes = np.zeros(1 + max(usage.end for usage in usages))
    for usage in usages:
        # One size each: `stage.usages` are cut down to the chosen strategies.
        changes[usage.start] += usage.sizes[0]
        changes[usage.end] -= usage.sizes[0]
    # A sweep over the ends of intervals: sizes change nowhere else, so that the peak is at one of them.
    time = int(np.argmax(np.cumsum(changes)))
    builder = stage.builder
    lives = stage_lives(builder.view, builder.catalogue)
    owned = {((), life.value): (life.start, life.end) for life in lives.lives if not life.path}
    scopes = {path: scope for scope, path in builder.paths().items()}
    saved = {(scopes.get(life.path, -1), life.value) for life in lives.lives if life.saved}
    whole = {(0, lives.end), (0, lives.loop_end)}
    groups: dict[tuple[str, str], list[float]] = {}
    for usage in usages:
        size, times = float(usage.sizes[0]), (usage.start, usage.end)
        if size > 0 and usage.start <= time < usage.end:
            # A usage that lasts as long as its value, or the whole step, is the value itself; a shorter one is a copy
            # of it for a reader, or a partial sum.
            is_itself = times in whole or usage.value[0] > 0 or owned.get(((), usage.value[1])) == times
            kind = _kind(stage, usage.value, saved) if is_itself else _kind_of_other(stage, usage.value)
            groups.setdefault((kind, _name(stage, usage.value)), []).append(size)
    alive = (LiveValues(kind=k, name=n, count=len(sizes), bytes=sum(sizes)) for (k, n), sizes in groups.items())
    moment = short_sources(moment_name(builder.view, lives, time))
    return moment, tuple(sorted(alive, key=lambda each: -each.bytes))


def _kind_of_other(stage: StageProblem, key: Key) -> str:
    """Return the kind of memory that is not a value itself: a partial sum being reduced, or a copy for a reader."""
    return _kind(stage, key, frozenset()) if key[1] in stage.builder.crossings and key[0] == 0 else COPY


def _kind(stage: StageProblem, key: Key, saved: Set[Key]) -> str:
    scope, v = key
    step = stage.view.step
    if scope:
        return "saved for backward" if key in saved else "temporary"
    if v in stage.builder.crossings:
        # With one micro-batch per update nothing is summed.
        return "gradient sum" if step.accumulates else "gradient"
    if step.graph.producer[v] is None:
        # Inputs with a dim of samples; without one they are state.
        if step.batch_dims[v] is not None:
            return "batch"
        return "optimizer state" if is_optimizer_state(step.graph.values[v].name) else "parameter"
    return "saved for backward" if key in saved else "temporary"


def _name(stage: StageProblem, key: Key) -> str:
    """Return the name of a value without layer numbers and without the folders of its source."""
    graph = stage.builder.scopes[key[0]].graph
    name = value_name(graph, key[1])
    if graph.producer[key[1]] is None:
        # `value_name` puts dtype and shape last, whose numbers must stay.
        path, blank, kind = name.rpartition(" ")
        # Only numbers that end a part of a path count layers, as in `layers/0` or `layer_0`.
        return re.sub(r"(?<![^/_])\d+(?![^/])", "*", path) + blank + kind
    return short_sources(name)
