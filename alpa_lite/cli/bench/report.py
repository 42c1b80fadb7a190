"""Rows as tables: one per model for the plans, one for what their devices do, and the verdicts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from alpa_lite.cli.bench.row import Environment, Row
from alpa_lite.cli.bench.verdict import Verdict, verdict
from alpa_lite.inspection.text.tables import Table
from alpa_lite.text import show_bytes, show_milliseconds, show_percent, show_ratio, show_seconds

MAX_REASON = 140
"""The greatest number of characters of a reason in a table; rows hold all of it."""


_PLANS_NOTE = (
    "Stages: how many on which logical mesh; batches: micro-batches; peak, allocated: bytes per device, predicted and "
    "as XLA allocates; gap: how far from the best a plan can be at most, as priced; slower: than the first."
)


def groups(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the rows of each model and cluster, in the order of first appearance."""
    return [list(some) for _, some in groupby(rows, key=lambda row: (row.model, row.cluster))]


def tables(rows: Sequence[Row]) -> Iterator[Table]:
    """Yield all tables that are printed."""
    for some in groups(rows):
        yield plans_table(some)
        yield from filter(None, [activity_table(some), reasons_table(some)])
    yield verdicts_table([verdict(some) for some in groups(rows)])


def plans_table(rows: Sequence[Row]) -> Table:
    """Return the plans of one model, the fastest first."""
    found = by_time(rows)
    measured = any(row.measured_step_seconds is not None for row in found)
    columns = ("planner", "stages", "batches", "predicted ms")
    columns += ("measured", "quartiles", "peak", "allocated") if measured else ("peak",)
    columns += ("gap", "planned", "slower")
    first = found[0].step_seconds if found else None
    return Table(
        title=title_of(rows[0]),
        columns=columns,
        rows=tuple(_plan_cells(row, measured=measured, first=first) for row in found),
        numeric=frozenset(columns[2:]) - {"quartiles"},
        note=_PLANS_NOTE if found else "No planner found a plan.",
    )


def title_of(row: Row) -> str:
    """Return a title of model, batch and cluster."""
    batch = "" if row.batch_size is None else f", batch {row.batch_size}"
    return f"{row.model}{batch}, on {row.cluster} ({row.num_devices} devices)"


def by_time(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with a plan, the fastest first; of equal ones the search first."""
    return sorted((row for row in rows if not row.reason), key=lambda row: (row.step_seconds or 0.0, not row.auto))


def _plan_cells(row: Row, *, measured: bool, first: float | None) -> tuple[str, ...]:
    predicted, step = row.predicted_step_seconds or 0.0, row.step_seconds or 0.0
    name = f"{row.planner} (as {row.same_as})" if row.same_as else row.planner
    cells = [name, row.plan, str(row.num_microbatches), show_milliseconds(predicted)]
    if measured:
        low, high = row.measured_quartiles or (0.0, 0.0)
        cells += [show_milliseconds(step), f"{show_milliseconds(low)}–{show_milliseconds(high)}"]
    cells += [show_bytes(row.predicted_peak_bytes or 0.0)]
    if measured:
        cells += ["" if row.allocated_peak_bytes is None else show_bytes(row.allocated_peak_bytes)]
    cells += [show_percent(row.solver_gap or 0.0), show_seconds(row.planning_seconds or 0.0)]
    return (*cells, show_ratio(step / first) if first else "")


def activity_table(rows: Sequence[Row]) -> Table | None:
    """Return the use of devices in a step of the searches and the best manual plan; None without simulated steps."""
    best = verdict(rows).manual
    shown = [row for row in rows if (row.searched or row is best) and row.simulated_step_seconds is not None]
    if not shown:
        return None
    return Table(
        title="Where the devices' time goes",
        columns=("planner", "step ms", "at work", "communication", "idle"),
        rows=tuple(
            (row.planner, show_milliseconds(row.simulated_step_seconds or 0.0), *map(show_percent, shares(row)))
            for row in shown
        ),
        numeric=frozenset(("step ms", "at work", "communication", "idle")),
        note="Of the simulated program, averaged over devices; communication is what keeps them from work.",
    )


def shares(row: Row) -> tuple[float, float, float]:
    """Return the shares of a simulated step: computing, waiting for communication, idle."""
    total = row.simulated_step_seconds or 1.0
    communication, idle = (row.communication_seconds or 0.0) / total, (row.idle_seconds or 0.0) / total
    return max(0.0, 1.0 - communication - idle), communication, idle


def reasons_table(rows: Sequence[Row]) -> Table | None:
    """Return the reasons why planners have no plan; None if all have one."""
    found = [row for row in rows if row.reason]
    if not found:
        return None
    return Table(
        title="Without a plan",
        columns=("planner", "reason"),
        rows=tuple((row.planner, shortened(row.reason)) for row in found),
    )


def shortened(reason: str) -> str:
    """Return the beginning of a reason."""
    return reason if len(reason) <= MAX_REASON else f"{reason[: MAX_REASON - 1].rstrip()}…"


def verdicts_table(verdicts: Sequence[Verdict]) -> Table:
    """Return the search against the best manual plan, per model."""
    return Table(
        title="Auto against the best manual plan (seconds of a step, auto / manual)",
        columns=("model", "best manual plan", "auto / manual", "quartiles", "predicted", "speed-up"),
        rows=tuple(_verdict_cells(each) for each in verdicts),
        numeric=frozenset(("auto / manual", "predicted", "speed-up")),
    )


def _verdict_cells(found: Verdict) -> tuple[str, ...]:
    manual = "none fits" if found.manual is None else found.manual.planner
    if found.ratio is None:
        return found.model, manual, "no plan" if found.auto is None else "", "", "", ""
    spread = found.ratio.quartiles
    return (
        found.model,
        manual,
        f"{found.ratio.value:.3f}",
        "predicted" if spread is None else f"{spread[0]:.3f}–{spread[1]:.3f}",
        "" if found.predicted is None else f"{found.predicted:.3f}",
        show_ratio(1.0 / found.ratio.value),
    )


def environment_lines(environment: Environment) -> list[str]:
    """Return lines on the commit, the versions and the machine."""
    versions = ", ".join(f"{name} {version}" for name, version in environment.versions.items())
    return [f"{environment.machine}; {versions}", f"commit {environment.git or 'unknown'}"]
