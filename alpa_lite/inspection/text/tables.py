"""A plan as tables: stages, parameters, collectives by cost, ops without a rule, undivided dims, other plans.

Each table is built once as data (`Table`); `plan_text` renders them for a terminal, `page/html` for a page.
"""

from __future__ import annotations

import io
import math
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from alpa_lite.inspection.text.groups import (
    ArgumentGroup,
    Arguments,
    CollectiveGroup,
    arguments_of,
    group_arguments,
    group_collectives,
)
from alpa_lite.plan.codec import encode
from alpa_lite.plan.host_use import fullest_host_bytes
from alpa_lite.plan.plan import Plan, StagePlan
from alpa_lite.schedule import AsynchronousSchedule
from alpa_lite.text import (
    short_source,
    show_bytes,
    show_count,
    show_likely,
    show_milliseconds,
    show_number,
    show_numbers,
    show_percent,
    show_range,
    show_ratio,
    show_seconds,
    show_usable,
)

WIDTH = 120
"""Width of text in a file or a pipe, in characters."""

LEAST_WIDTH, MOST_WIDTH = 60, 160
"""Limits of the width on a terminal: narrower tables break in the middle of words, wider ones are hard to follow."""

MAX_PARAMETER_ROWS = 25
MAX_COLLECTIVE_ROWS = 10

SCREEN_ROWS = {
    "stages": 16,
    "parameters": 8,
    "collectives": 6,
    "opaque": 4,
    "undivided": 4,
    "user_shardings": 6,
    "alternatives": 12,
}
"""Rows of each table of a plan in a terminal; `plan_tables`, pages and JSON have all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table of text: `numeric` columns are right-aligned; `note` is printed below."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: frozenset[str] = frozenset()
    note: str = ""


def plan_text(plan: Plan) -> str:
    """Return the plan on one screen: `WIDTH` columns, no colour codes."""
    return render([*headline(plan), ""], plan_tables(plan, SCREEN_ROWS))


def whole_plan_text(plan: Plan) -> str:
    """Return the plan with all rows of its tables."""
    return render([*headline(plan), ""], plan_tables(plan, dict.fromkeys(SCREEN_ROWS, sys.maxsize)))


def _shortened(table: Table, max_rows: int | None) -> Table:
    """Return a table's first rows, with a note on how many more there are; None: all of them."""
    rest = 0 if max_rows is None else len(table.rows) - max_rows
    if rest <= 0:
        return table
    note = "; ".join(filter(None, (f"… and {rest} more rows", table.note)))
    return replace(table, rows=table.rows[:max_rows], note=note)


def plan_tables(plan: Plan, max_rows: Mapping[str, int] | None = None) -> tuple[Table, ...]:
    """Return the tables of a plan in reading order, without the empty ones; `max_rows`: as `SCREEN_ROWS`."""
    most = max_rows or {}
    tables = (
        _shortened(stages_table(plan), most.get("stages")),
        parameters_table(plan, most.get("parameters", MAX_PARAMETER_ROWS)),
        collectives_table(plan, most.get("collectives", MAX_COLLECTIVE_ROWS)),
        _shortened(opaque_table(plan), most.get("opaque")),
        _shortened(undivided_table(plan), most.get("undivided")),
        _shortened(user_shardings_table(plan), most.get("user_shardings")),
        _shortened(alternatives_table(plan), most.get("alternatives")),
    )
    return tuple(table for table in tables if table.rows)


def headline(plan: Plan) -> tuple[str, ...]:
    """Return the lines above the tables: function and cluster, prediction, the batch if there is one, and notes."""
    prediction, solver, cluster = plan.prediction, plan.solver, plan.cluster
    layers = show_count(plan.num_layers, "layer")
    # Virtual devices: without this word a reader would expect a speed-up.
    shared = ", which share one processor" if cluster.shared_processor else ""
    first = (
        f"{plan.function} on {cluster.name} ({used_devices(plan)}{shared}): {plan.name}, "
        f"{show_count(len(plan.stages), 'stage')} of {layers}, {show_count(plan.num_microbatches, 'micro-batch')}"
        f"{_updates(plan)}, "
        f"schedule {plan.schedule}"
        + (f", rematerialised: {plan.recomputed}" if plan.recomputed else "")
        + (", optimizer state on the host" if plan.host_optimizer else "")
        + (f", gradients in {len(plan.buckets)} buckets" if plan.buckets else "")
    )
    # The stage with the largest share of its memory: it is the one that would overflow.
    fullest = plan.fullest_stage
    usable = show_usable(plan.capacity_bytes(fullest), plan.reserved_bytes(fullest))
    # Plans of earlier versions have no utilisation.
    rate = f"MFU {show_percent(prediction.mfu)} · " if prediction.mfu else ""
    second = (
        f"predicted step {show_step(plan)} · {rate}"
        f"bubble {show_percent(prediction.bubble_fraction)} · "
        f"peak {show_bytes(prediction.peak_bytes[fullest])} of {usable} · {_on_host(plan)}"
        f"no plan below {show_seconds(solver.bound)}, gap {show_percent(solver.gap)} · "
        f"solution {solver.status}, found in {show_seconds(solver.seconds)}"
    )
    batch = () if plan.batch is None else (f"batch: {plan.batch}",)
    return (first, second, *batch, *(f"note: {note}" for note in plan_notes(plan)))


def _on_host(plan: Plan) -> str:
    """Return the memory of the fullest host that a plan uses, if it uses any."""
    used, host = fullest_host_bytes(plan), plan.cluster.host_memory
    of = "" if host is None else f" of {show_usable(host.usable_bytes, host.memory_bytes - host.usable_bytes)}"
    return f"on the host {show_bytes(used)}{of} · " if used else ""


def show_step(plan: Plan) -> str:
    """Return the predicted seconds of a step, with the range in which they lie in four of five cases."""
    likely, seconds = plan.likely_seconds, plan.prediction.step_seconds
    return show_seconds(seconds) if likely is None else show_likely(seconds, *likely)


def plan_notes(plan: Plan) -> tuple[str, ...]:
    """Return the sentences on the choice of a plan, and on the setting of the backend that it needs, if it does."""
    return (*plan.notes, *needed_setting(plan))


def needed_setting(plan: Plan) -> tuple[str, ...]:
    """Return a sentence if a plan needs more memory than the backend gives to a program by default."""
    peaks = plan.prediction.peak_bytes
    lacking = [number for number, peak in enumerate(peaks) if peak > plan.default_bytes(number)]
    if not lacking:
        return ()
    fullest = max(lacking, key=lambda number: peaks[number] / plan.default_bytes(number))
    room, usable = plan.default_bytes(fullest), plan.capacity_bytes(fullest)
    fraction = usable / (usable + plan.reserved_bytes(fullest))
    return (
        f"stage {fullest} is predicted to use {show_bytes(peaks[fullest])} of each device, of which JAX gives "
        f"{show_bytes(room)} to a program by default: start it with XLA_CLIENT_MEM_FRACTION={fraction:.2g}, or plan "
        f"for less with Auto(max_memory_bytes={room:.4g}).",
    )


def _updates(plan: Plan) -> str:
    """Return how the results of micro-batches are used, if not as in the step on one device."""
    if plan.num_updates > 1:
        # Workers of a parameter server update nothing.
        stages = range(len(plan.stages)) if isinstance(plan.schedule, AsynchronousSchedule) else range(1)
        numbers = sorted({plan.updates_of(stage) for stage in stages})
        return f" with {' to '.join(map(str, dict.fromkeys((numbers[0], numbers[-1]))))} updates ({plan.semantics})"
    return ", whose results are averaged" if plan.averaged else ""


def used_devices(plan: Plan) -> str:
    """Return the number of devices of a plan, such as `8 devices` or `8 of 16 devices`."""
    count = plan.cluster.num_devices
    return (f"{count} of " if plan.idle_devices else "") + show_count(count + plan.idle_devices, "device")


def stages_table(plan: Plan) -> Table:
    """Return a row per stage: its layers, devices, mesh and memory, and its times, communication included."""
    rows = [_stage_row(plan, number, stage) for number, stage in enumerate(plan.stages)]
    rooms = sorted({(plan.capacity_bytes(n), plan.reserved_bytes(n)) for n in range(len(plan.stages))})
    # Devices of several kinds have different capacities.
    capacity = " to ".join(show_usable(*room) for room in dict.fromkeys((rooms[0], rooms[-1])))
    per = "per micro-batch" if plan.num_microbatches > 1 else "per step"
    columns = (
        "stage",
        "layers",
        "devices",
        "mesh",
        "parameters",
        "forward",
        "backward",
        "communication",
        "update",
        "peak memory",
    )
    return Table(
        title="Stages",
        columns=columns,
        rows=tuple(rows),
        numeric=frozenset(columns[4:]),
        note=f"per device, of {capacity}{shared_note(plan)}; parameters with their optimizer state; "
        f"forward and backward: ms {per}; communication (all collectives, hidden ones too) and update: ms per step",
    )


def shared_note(plan: Plan) -> str:
    """Return a note that the memory counts all stages on the device; "" if no stages share devices."""
    return "" if len(plan.stages_together) == len(plan.stages) else ", with that of all stages on the device"


def _stage_row(plan: Plan, number: int, stage: StagePlan) -> tuple[str, ...]:
    # Collectives are per step, forward and backward per micro-batch: the note of the table says so.
    uses = [use for use in plan.prediction.collectives if use.stage == number]
    peak = plan.prediction.peak_bytes[number]
    devices = stage.submesh.devices
    return (
        str(number),
        show_range(*stage.layers),
        show_range(devices[0], devices[-1]),
        str(stage.mesh_shape),
        show_bytes(stage.cost.state_bytes),
        show_milliseconds(stage.cost.forward_seconds),
        show_milliseconds(stage.cost.backward_seconds),
        show_milliseconds(sum(use.seconds * use.count for use in uses)) if uses else "none",
        show_milliseconds(stage.cost.update_seconds),
        f"{show_bytes(peak)} ({show_percent(peak / plan.capacity_bytes(number))})",
    )


def parameters_table(plan: Plan, max_rows: int = MAX_PARAMETER_ROWS) -> Table:
    """Return a row per group of parameters (and inputs) with one spec; optimizer state only where its spec differs."""
    arguments = arguments_of(plan)
    # Optimizer state lies like its parameter in most plans, and would triple the rows.
    groups = (*group_arguments(arguments.plain), *group_arguments(arguments.unlike_parameter))
    rows = [_parameter_row(group) for group in groups[:max_rows]]
    if len(groups) > max_rows:
        # In the table and not in its note, which is on the optimizer state.
        rows.append((f"… and {len(groups) - max_rows} more", "", "", "", ""))
    return Table(
        title="Parameters and inputs (mesh axes per dim, - where it is whole)",
        columns=("path", "spec", "arrays", "stages", "each device holds"),
        rows=tuple(rows),
        numeric=frozenset({"arrays"}),
        note=_optimizer_note(arguments),
    )


def _parameter_row(group: ArgumentGroup) -> tuple[str, ...]:
    # Stages with other meshes split the same spec into other numbers of blocks.
    shares = sorted({member.num_shards for member in group.members})
    held = " or ".join("all" if n == 1 else f"1/{n}" for n in shares)
    return group.pattern, str(group.spec), f"×{len(group.names)}", show_numbers(group.stages), held


def _optimizer_note(arguments: Arguments) -> str:
    if not arguments.optimizer:
        return ""
    unlike, owned = len(arguments.unlike_parameter), len(arguments.owners)
    rest = len(arguments.optimizer) - owned
    like = f"{owned - unlike} arrays lie like their parameter" if owned > unlike else ""
    differ = f"{unlike} otherwise (listed)" if unlike else ""
    other = f"{rest} belong to no parameter" if rest else ""
    return "optimizer state: " + ", ".join(filter(None, (like, differ, other)))


def collectives_table(plan: Plan, max_rows: int = MAX_COLLECTIVE_ROWS) -> Table:
    """Return the collectives that cost most."""
    return groups_table("Collectives by time", group_collectives(plan.prediction.collectives), max_rows)


def groups_table(title: str, groups: Sequence[CollectiveGroup], max_rows: int) -> Table:
    """Return a row per group of collectives, the first `max_rows` of them."""
    rows = tuple(
        (
            group.kind,
            group.axis,
            group.phase,
            show_numbers(group.stages),
            show_number(group.count),
            # The mean of all runs, since a group may join arrays of several sizes.
            show_bytes(group.bytes / group.count),
            show_milliseconds(group.seconds),
            group.source,
        )
        for group in groups[:max_rows]
    )
    rest = groups[max_rows:]
    note = f"… and {len(rest)} more, {show_seconds(sum(g.seconds for g in rest))} in all" if rest else ""
    columns = ("kind", "axis", "phase", "stages", "count", "bytes each", "ms per step", "source")
    return Table(title=title, columns=columns, rows=rows, numeric=frozenset(columns[4:7]), note=note)


def opaque_table(plan: Plan) -> Table:
    """Return the primitives that have no sharding rule, with their source lines."""
    rows = tuple(
        (
            use.primitive,
            str(use.num_ops),
            show_bytes(use.bytes),
            # The repeated layers of a model have their ops on the same lines.
            ", ".join(dict.fromkeys(map(short_source, use.sources))),
        )
        for use in plan.opaque
    )
    columns = ("primitive", "ops", "bytes of results", "source")
    note = "give them a rule with al.register_rule, if they can be split: docs/extend/primitive.md"
    return Table(
        title="Run whole on every device, without a sharding rule",
        columns=columns,
        rows=rows,
        numeric=frozenset(columns[1:3]),
        note=note,
    )


def undivided_table(plan: Plan) -> Table:
    """Return the dims that stay whole because the axis size does not divide them, and what padding would save."""
    rows = tuple(
        (
            dim.name,
            f"{dim.dim} ({dim.size})",
            f"{dim.axis} ({dim.num_devices})",
            str(dim.padded),
            show_bytes(dim.bytes_saved),
            show_milliseconds(dim.seconds_saved),
        )
        for dim in plan.undivided[:MAX_PARAMETER_ROWS]
    )
    columns = ("argument", "dim (size)", "axis (devices)", "padded to", "saves per device", "saves ms")
    rest = len(plan.undivided) - len(rows)
    note = "pad them in the model to have them split" + (f"; {rest} more" if rest else "")
    return Table(
        title="Whole because the devices do not divide them",
        columns=columns,
        rows=rows,
        numeric=frozenset(columns[3:]),
        note=note,
    )


def user_shardings_table(plan: Plan) -> Table:
    """Return the shardings that the user's code gives, next to the plan's; those that differ come first."""
    # False sorts before True.
    uses = sorted(plan.user_shardings, key=lambda use: use.follows)
    rows = tuple(
        (
            short_source(use.source),
            str(list(use.shape)),
            f"{use.wanted} of {' × '.join(f'{axis}={n}' for axis, n in use.mesh)}",
            ", ".join(use.planned),
            "yes" if use.follows else "no" if use.divides else "no: unequal parts",
        )
        for use in uses
    )
    return Table(
        title="Shardings that your code gives",
        columns=("where", "shape", "yours", "of the plan", "same"),
        rows=rows,
        note='user_shardings="pin" makes a plan that has them; plan.explain_user_shardings() says what each would cost',
    )


def alternatives_table(plan: Plan) -> Table:
    """Return the other plans that the search priced, or why there is none; a manual plan has no others."""
    chosen, reasons = plan.prediction.step_seconds, dict(plan.refusals)
    # With nothing to compare, the chosen plan alone makes no table.
    rows = [(f"{plan.name} (chosen)", show_milliseconds(chosen), show_ratio(1.0))] if plan.alternatives else []
    for name, seconds in plan.alternatives:
        # A plan that does not fit has an infinite time.
        works, ratio = math.isfinite(seconds), show_ratio(seconds / chosen) if chosen > 0 else ""
        rows.append((name, show_milliseconds(seconds), ratio) if works else (name, "does not work", ""))
    columns = ("plan", "predicted ms per step", "against the chosen one")
    if reasons:
        # The first sentence says why; the others, what to do if exactly this plan is wanted.
        rows = [(*row, reasons.get(row[0], "").partition(". ")[0].rstrip(".")) for row in rows]
    return Table(
        title="Plans considered",
        columns=(*columns, "why not") if reasons else columns,
        rows=tuple(rows),
        numeric=frozenset(columns[1:]),
    )


def plan_summary(plan: Plan) -> dict[str, object]:
    """Return the numbers of `plan_text` as plain data, for JSON."""
    prediction, reasons = plan.prediction, dict(plan.refusals)
    return {
        "function": plan.function,
        "name": plan.name,
        "cluster": plan.cluster.name,
        "num_devices": plan.cluster.num_devices,
        "first_device": plan.first_device,
        "idle_devices": plan.idle_devices,
        "notes": list(plan_notes(plan)),
        "num_microbatches": plan.num_microbatches,
        "schedule": plan.schedule.name,
        "semantics": plan.semantics,
        "num_updates": plan.num_updates,
        "step_seconds": prediction.step_seconds,
        "likely_seconds": plan.likely_seconds and list(plan.likely_seconds),
        "bubble_fraction": prediction.bubble_fraction,
        "flops_per_device": prediction.flops_per_device,
        "mfu": prediction.mfu,
        "hfu": prediction.hfu,
        "breakdown_seconds": prediction.breakdown(),
        "solver": {"status": plan.solver.status, "gap": plan.solver.gap, "seconds": plan.solver.seconds},
        "stages": [
            {
                "layers": list(stage.layers),
                "devices": list(stage.submesh.devices),
                "mesh": stage.mesh_shape.axis_sizes,
                "forward_seconds": stage.cost.forward_seconds,
                "backward_seconds": stage.cost.backward_seconds,
                "update_seconds": stage.cost.update_seconds,
                "communication_seconds": sum(u.seconds * u.count for u in prediction.collectives if u.stage == number),
                "state_bytes": stage.cost.state_bytes,
                "peak_bytes": peak,
                "capacity_bytes": plan.capacity_bytes(number),
                "reserved_bytes": plan.reserved_bytes(number),
                "host_bytes": host,
                # Specs in their written form: readers of JSON should not need the classes of this package.
                "specs": {name: str(spec) for name, spec in stage.specs.items()},
                "shapes": {name: str(shape) for name, shape in stage.shapes.items()},
            }
            for number, (stage, peak, host) in enumerate(
                zip(plan.stages, prediction.peak_bytes, prediction.host_bytes or [0.0] * len(plan.stages), strict=True)
            )
        ],
        "alternatives": [
            # JSON has no infinity.
            {"name": name, "step_seconds": seconds if math.isfinite(seconds) else None, "why_not": reasons.get(name)}
            for name, seconds in plan.alternatives
        ],
        "opaque": [
            {"primitive": use.primitive, "num_ops": use.num_ops, "bytes": use.bytes, "sources": list(use.sources)}
            for use in plan.opaque
        ],
        # In the form in which plans are saved, so that one description of these fields serves both.
        "undivided": [encode(dim) for dim in plan.undivided],
        "user_shardings": [encode(use) for use in plan.user_shardings],
        "averaged": plan.averaged,
        "batch": encode(plan.batch),
    }


def render(lines: Iterable[str], tables: Iterable[Table] = ()) -> str:
    """Render lines and tables as plain text in the columns of the terminal, else `WIDTH`; long lines are wrapped."""
    # Neither colours nor markup: specs as [data, -] would be taken for the latter.
    console = Console(file=io.StringIO(), width=_width(), color_system=None, markup=False, highlight=False, emoji=False)
    with console.capture() as captured:
        for line in lines:
            console.print(line)
        for number, table in enumerate(tables):
            if number:
                console.print()
            console.print(rich_table(table))
            if table.note:
                console.print(f" {table.note}")
    lines = [line.rstrip() for line in captured.get().rstrip().splitlines()]
    # Rich leaves blank lines around tables; of several in a row one stays.
    return "\n".join(line for line, before in zip(lines, ["x", *lines], strict=False) if line or before)


def _width() -> int:
    """Return the columns for text: those of the terminal that shows it, within limits; `WIDTH` in files and pipes."""
    if sys.stdout is None or not sys.stdout.isatty():
        return WIDTH
    return min(max(shutil.get_terminal_size().columns, LEAST_WIDTH), MOST_WIDTH)


def rich_table(table: Table) -> RichTable:
    """Return the table for rich, without its note."""
    # `fold`: long paths and sources are wrapped and never cut, as users copy them.
    rich = RichTable(title=table.title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in table.columns:
        rich.add_column(column, justify="right" if column in table.numeric else "left", overflow="fold")
    for row in table.rows:
        rich.add_row(*row)
    return rich
