"""Figures of plans for papers, drawn by matplotlib: `al.figures.timeline_figure(plan).savefig("step.pdf")`.

plans_figure       plans side by side: throughput as predicted, and as measured if it is given
timeline_figure    the step, a row per submesh; below it the simulated and measured spans if they are given
submesh_figure     hosts and devices in the colours of their stages, above the layers
memory_figure      the memory of a device of each submesh during the step, and its capacity
sharding_figure    the arrays of a layer as blocks, that of the first device filled

Each returns a new `matplotlib.figure.Figure`: nothing is shown and no backend is chosen. PDF, PostScript and SVG hold
text as text (Type 42 fonts), and a notebook draws a figure that ends a cell. matplotlib is an optional extra,
`pip install 'alpa_lite[viz]'`.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import util
from typing import TYPE_CHECKING, Any

import numpy as np

from alpa_lite.errors import FigureError
from alpa_lite.inspection.page.drawings import block_counts, kind_class, sharding_words
from alpa_lite.inspection.page.elements import KINDS, kind_name, stage_colour
from alpa_lite.inspection.text.groups import ArgumentGroup, arguments_of, group_arguments
from alpa_lite.inspection.text.timeline import Bar, memory_over_time, predicted_timeline, row_name
from alpa_lite.plan.plan import Plan
from alpa_lite.schedule.tasks import SpanLike
from alpa_lite.text import show_bytes, show_count, show_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.path import Path

__all__ = [
    "COLUMN",
    "PAGE",
    "FigureStyle",
    "memory_figure",
    "plans_figure",
    "sharding_figure",
    "submesh_figure",
    "timeline_figure",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureStyle:
    """The size and the letters of a figure.

    Attributes:
        width_inches: width of the figure; its height follows from what it shows.
        font_points: size of titles and axis labels; the numbers of ticks and in bars are smaller.
        has_titles: whether axes have titles; captions often say the same.
    """

    width_inches: float = 7.0
    font_points: float = 9.0
    has_titles: bool = True

    @property
    def small(self) -> float:
        """The size of the numbers of ticks."""
        return self.font_points - 1


PAGE = FigureStyle()
"""The text width of a page, 7 inches."""

COLUMN = FigureStyle(width_inches=3.35, font_points=7.5)
"""One column of two, 3.35 inches."""

_SMALL = 0.02
"""The share of the step below which a task is drawn without its micro-batch."""

_MOST_ARRAYS = 12
"""The greatest number of groups of arrays whose blocks one figure shows."""


def plans_figure(
    plans: Sequence[Plan],
    *,
    measured: Sequence[float | None] | None = None,
    names: Sequence[str] | None = None,
    style: FigureStyle = PAGE,
) -> Figure:
    """Draw the throughput of plans as bars, grouped by the number of devices.

    Args:
        plans: the plans, also of several clusters.
        measured: seconds per step of each plan as measured, None where it was not; drawn as hatched bars.
        names: names of the plans; plans of one name have one colour. Default: their own.
        style: size and letters.

    Raises:
        FigureError: there is no plan, other lists have other lengths, or matplotlib is missing.
    """
    labels, times = list(names or [plan.name for plan in plans]), list(measured or [None] * len(plans))
    if not plans or not len(plans) == len(labels) == len(times):
        raise FigureError(
            f"plans_figure got {len(plans)} plans, {len(labels)} names and {len(times)} measured times: give at least "
            "one plan, and as many names and times as plans (None where nothing was measured)."
        )
    figure = _figure(style, 0.36 * style.width_inches + 0.4)
    axes: Axes = figure.subplots()
    # Devices that a plan leaves idle are there all the same.
    counts = [plan.cluster.num_devices + plan.idle_devices for plan in plans]
    sizes = sorted(set(counts))
    order = {name: number for number, name in enumerate(dict.fromkeys(labels))}
    width = 0.8 / len(order)
    # Samples only if all plans know them: otherwise one bar would be in other units than its neighbours.
    per_step = [plan.batch.size if plan.batch is not None else 0 for plan in plans]
    unit = "samples per second" if all(per_step) else "steps per second"
    for plan, count, name, seconds, samples in zip(plans, counts, labels, times, per_step, strict=True):
        work = samples if all(per_step) else 1
        left = sizes.index(count) - 0.4 + order[name] * width
        colour = stage_colour(order[name])
        _rate_bar(axes, left, width, work / max(plan.prediction.step_seconds, 1e-12), colour, hatched=False)
        if seconds is not None:
            _rate_bar(axes, left, width, work / max(seconds, 1e-12), colour, hatched=True)
    axes.set_xticks(range(len(sizes)), [show_count(size, "device") for size in sizes], fontsize=style.small)
    axes.set_ylabel(unit, fontsize=style.font_points)
    axes.tick_params(labelsize=style.small)
    axes.set_ylim(bottom=0.0)
    axes.spines[["top", "right"]].set_visible(False)
    entries = [(name, stage_colour(number), None) for name, number in order.items()]
    if any(seconds is not None for seconds in times):
        entries += [("predicted", "#c9ced4", None), ("measured", "white", "////")]
    _legend(figure, entries, style)
    return figure


def _rate_bar(axes: Axes, left: float, width: float, rate: float, colour: str, *, hatched: bool) -> None:
    """Draw a predicted bar, or a measured one: narrower, hatched and in front."""
    if not hatched:
        axes.bar(left + width / 2, rate, 0.94 * width, color=colour, linewidth=0)
        return
    axes.bar(left + width / 2, rate, 0.5 * width, facecolor="white", edgecolor=colour, hatch="////", linewidth=1)


def timeline_figure(
    plan: Plan,
    *,
    simulated: Sequence[SpanLike] | None = None,
    measured: Sequence[SpanLike] | None = None,
    style: FigureStyle = PAGE,
) -> Figure:
    """Draw the predicted step over time, and below it simulated and measured spans. Raises `FigureError`.

    Thin lines below the tasks are collectives (of predicted tasks, at their ends) and transfers.
    """
    predicted = predicted_timeline(plan)
    given: dict[str, Sequence[SpanLike]] = {"predicted": (*predicted.bars, *predicted.transfers)}
    given |= {name: spans for name, spans in (("simulated", simulated), ("measured", measured)) if spans}
    count = len(plan.stages_together)
    figure = _figure(style, (0.7 + 0.28 * count) * len(given) + 0.5)
    all_axes: list[Axes] = figure.subplots(len(given), 1, sharex=True, squeeze=False)[:, 0].tolist()
    kinds: dict[str, None] = {}
    ends = {name: max((span.end_seconds for span in spans), default=0.0) for name, spans in given.items()}
    longest = max(*ends.values(), plan.prediction.step_seconds)
    # The predicted step does not end with its last task.
    ends["predicted"] = plan.prediction.step_seconds
    scale, unit = _seconds_unit(longest)
    for axes, (name, spans) in zip(all_axes, given.items(), strict=True):
        kinds |= dict.fromkeys(_draw_spans(axes, plan, spans, longest))
        axes.tick_params(labelsize=style.small)
        axes.set_yticks(range(count), [f"stage {row_name(s)}" for s in plan.stages_together], fontsize=style.small)
        # Downwards, so that the first stage is at the top.
        axes.set_ylim(count - 0.5, -0.5)
        axes.set_xlim(0.0, max(longest, 1e-12) / scale)
        if style.has_titles or len(given) > 1:
            axes.set_title(f"{name}: {show_seconds(ends[name])}", fontsize=style.font_points, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[-1].set_xlabel(unit, fontsize=style.font_points)
    _legend(figure, [(kind_name(kind), KINDS[kind][0], None) for kind in KINDS if kind in kinds], style)
    return figure


def _draw_spans(axes: Axes, plan: Plan, spans: Sequence[SpanLike], longest: float) -> set[str]:
    """Draw the tasks of devices, and communication as thin lines below; return the kinds that occur."""
    from matplotlib.collections import PathCollection

    row_of = {stage: row for row, stages in enumerate(plan.stages_together) for stage in stages}
    bars: dict[tuple[str, int], list[tuple[float, float]]] = {}
    scale, _ = _seconds_unit(longest)
    for span in spans:
        length = span.end_seconds - span.start_seconds
        if length <= 0:
            continue
        # All tasks of a program are instructions of one kind: their names say which pass they are.
        kind = kind_class(str(getattr(span, "name", span.kind)) if span.kind == "RUN" else str(span.kind))
        row = row_of[span.stage]
        bars.setdefault((kind, row), []).append((span.start_seconds / scale, length / scale))
        if isinstance(span, Bar) and span.communication_seconds > 0:
            begin = span.end_seconds - span.communication_seconds
            bars.setdefault(("collective", row), []).append((begin / scale, span.communication_seconds / scale))
        microbatch = getattr(span, "microbatch", None)
        # A number on a narrow bar would cover its neighbours.
        if microbatch is not None and kind != "receive" and length > _SMALL * longest:
            middle = (span.start_seconds + span.end_seconds) / 2 / scale
            axes.text(middle, row - 0.08, str(microbatch), ha="center", va="center", fontsize=6, color="white")
    for (kind, row), found in bars.items():
        thin = {"collective": 0.24, "receive": 0.36}
        place = (row + thin[kind], 0.1) if kind in thin else (row - 0.38, 0.6)
        # White lines keep neighbours apart, and would cover bars that are not wider than a point.
        wide = min(length for _, length in found) * scale > longest / 500
        rectangles = PathCollection(
            [_rectangles(found, *place)],
            facecolors=KINDS[kind][0],
            edgecolors="white" if wide else "none",
            linewidths=0.2,
        )
        axes.add_collection(rectangles)
    return {kind for kind, _ in bars}


def _rectangles(spans: Sequence[tuple[float, float]], bottom: float, height: float) -> Path:
    """Return rectangles of one height, given by left side and width, as one path.

    A plan has tens of thousands of tasks, and drawing as many paths takes half a minute.
    """
    from matplotlib.path import Path

    left, width = np.array(spans).T
    right, low, high = left + width, np.full(len(spans), bottom), np.full(len(spans), bottom + height)
    corners = [(left, low), (left, high), (right, high), (right, low), (left, low)]
    vertices = np.stack([np.stack(corner, axis=1) for corner in corners], axis=1).reshape(-1, 2)
    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * len(spans)
    return Path(vertices, codes)


def submesh_figure(plan: Plan, *, style: FigureStyle = PAGE) -> Figure:
    """Draw hosts as rows of devices in the colours of their stages, above the layers. Raises `FigureError`."""
    cluster = plan.cluster
    hosts, devices = cluster.num_hosts, cluster.devices_per_host
    figure = _figure(style, 1.5 + min(6.0, 0.22 * hosts))
    above, below = figure.subplots(2, 1, height_ratios=[max(1.0, 0.5 * hosts), 0.8])
    stage_of = {
        device: stages[0] for stages in plan.stages_together for device in plan.stages[stages[0]].submesh.devices
    }
    # In points; half of the width of a square has room for a number of two or three digits.
    square = 72 * 0.85 * style.width_inches / devices
    letters = min(style.small, 0.38 * square, 300 / max(hosts, 1))
    for device in range(cluster.num_devices):
        host, place = divmod(device, devices)
        colour = stage_colour(stage_of[device]) if device in stage_of else "#d5dae0"
        above.broken_barh([(place + 0.04, 0.92)], (host + 0.06, 0.88), facecolors=colour)
        # Smaller numbers could not be read.
        if letters >= 5:
            ink = "white" if device in stage_of else "#59636e"
            above.text(place + 0.5, host + 0.5, str(device), ha="center", va="center", fontsize=letters, color=ink)
    above.set_xlim(0, devices)
    above.set_ylim(hosts, 0)
    # At most about 16 names, which would otherwise overlap.
    named = range(0, hosts, max(1, hosts // 16))
    above.set_xticks([])
    above.set_yticks([host + 0.5 for host in named], [f"host {host}" for host in named], fontsize=style.small)
    if style.has_titles:
        title = f"{plan.name} on {cluster.name}, {show_count(cluster.num_devices, 'device')}"
        above.set_title(title, fontsize=style.font_points, loc="left")
    for number, stage in enumerate(plan.stages):
        first, last = stage.layers
        cells = [(layer + 0.04, 0.92) for layer in range(first, last + 1)]
        below.broken_barh(cells, (0, 1), facecolors=stage_colour(number))
        if last - first + 1 > 0.03 * plan.num_layers:
            middle = (first + last + 1) / 2
            below.text(middle, 0.5, str(number), ha="center", va="center", fontsize=style.small, color="white")
    below.set_xlim(0, plan.num_layers)
    below.set_ylim(0, 1)
    below.set_yticks([])
    below.set_xticks([])
    below.set_xlabel(f"{show_count(plan.num_layers, 'layer')}, numbers of stages", fontsize=style.font_points)
    for axes in (above, below):
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
    return figure


def memory_figure(plan: Plan, *, style: FigureStyle = PAGE) -> Figure:
    """Draw bytes per device over the whole step, a row per submesh; the capacity is dashed if near.

    Raises `FigureError`.
    """
    tracks = memory_over_time(plan)
    figure = _figure(style, 0.6 + max(0.9, 0.55 * len(tracks)))
    # One scale for all stages, so that their memory can be compared.
    all_axes: list[Axes] = figure.subplots(len(tracks), 1, sharex=True, sharey=True, squeeze=False)[:, 0].tolist()
    # After its last task a device holds its state until the next step begins.
    end = max(*(track.seconds[-1] for track in tracks), plan.prediction.step_seconds)
    # Devices of several kinds have different capacities.
    capacities = sorted({track.capacity_bytes for track in tracks})
    capacity = " to ".join(show_bytes(capacity) for capacity in dict.fromkeys((capacities[0], capacities[-1])))
    top = max(track.peak_bytes for track in tracks)
    time_scale, time_unit = _seconds_unit(end)
    scale, unit = next(((2.0**p, u) for p, u in ((30, "GiB"), (20, "MiB"), (10, "KiB")) if top >= 2.0**p), (1.0, "B"))
    for axes, track in zip(all_axes, tracks, strict=True):
        times = [seconds / time_scale for seconds in (*track.seconds, end)]
        # With `step="post"` a value holds until the next time, so that the last one is repeated at the end of the step.
        held = [size / scale for size in (*track.bytes, track.bytes[-1])]
        colour = stage_colour(track.stages[0])
        axes.fill_between(times, held, step="post", facecolor=colour, alpha=0.35, edgecolor=colour, linewidth=0.6)
        # A capacity far above would leave the memory as a flat line at the bottom.
        if capacities[0] < 3 * top:
            axes.axhline(track.capacity_bytes / scale, color="#b3261e", linestyle="dashed", linewidth=0.8)
        label = f"stage {row_name(track.stages)}\n{show_bytes(track.peak_bytes)}"
        axes.set_ylabel(label, fontsize=style.small - 1, rotation=0, ha="right", va="center")
        axes.tick_params(labelsize=style.small - 1)
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[0].set_xlim(0.0, max(end, 1e-12) / time_scale)
    all_axes[0].set_ylim(bottom=0.0)
    all_axes[0].set_title(f"{unit} per device, of {capacity}", fontsize=style.font_points, loc="left")
    all_axes[-1].set_xlabel(time_unit, fontsize=style.font_points)
    return figure


def sharding_figure(plan: Plan, layer: str = "", *, stage: int = 0, style: FigureStyle = PAGE) -> Figure:
    """Draw the arrays of a layer as blocks, that of the first device filled.

    Args:
        plan: the plan.
        layer: a part of the paths of its arguments, such as `layers/0`; "": all arguments.
        stage: number of the stage that holds them.
        style: size and letters.

    Raises:
        FigureError: no argument of the stage has such a path, or matplotlib is missing.
    """
    arguments = [a for a in arguments_of(plan).plain if a.stage == stage and layer in a.name]
    if not arguments:
        raise FigureError(f"Stage {stage} has no argument with {layer!r} in its path: str(plan) lists the paths.")
    # The largest ones: biases and scales hardly matter, and look alike.
    groups = sorted(group_arguments(arguments), key=lambda group: -sum(_bytes(group)))[:_MOST_ARRAYS]
    sizes = plan.stages[stage].mesh_shape.axis_sizes
    columns = min(len(groups), max(1, round(style.width_inches / 1.75)))
    rows = -(-len(groups) // columns)
    figure = _figure(style, 1.25 * rows + 0.1)
    grid: list[Axes] = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
    for axes, group in zip(grid, groups, strict=False):
        _draw_blocks(axes, group, sizes, style)
    for axes in grid[len(groups) :]:
        axes.set_visible(False)
    return figure


def _bytes(group: ArgumentGroup) -> list[int]:
    return [0 if member.shape is None else member.shape.bytes for member in group.members]


def _draw_blocks(axes: Axes, group: ArgumentGroup, sizes: Mapping[str, int], style: FigureStyle) -> None:
    """Draw the blocks of an array, its first drawn dim downwards, with its path above and its spec below."""
    from matplotlib.patches import Rectangle  # an optional extra

    down, across = block_counts(group.spec, sizes)
    high = 0.3 if len(group.spec.dims) < 2 else 1.0
    colour = stage_colour(0)
    for row in range(down):
        for column in range(across):
            corner = column / across, high * (1 - (row + 1) / down)
            fill = colour if row == column == 0 else "#dbe7f6"
            axes.add_patch(Rectangle(corner, 1 / across, high / down, facecolor=fill, edgecolor=colour, linewidth=0.6))
    axes.set_xlim(-0.02, 1.02)
    axes.set_ylim(-0.02, 1.02)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    # The last components tell the arrays of a layer apart.
    name = "/".join(group.pattern.split("/")[-2:])
    axes.set_title(name, fontsize=style.small - 1, loc="left")
    shape = group.members[0].shape
    dims = "" if shape is None else f"{' × '.join(map(str, shape.dims))}\n"
    axes.set_xlabel(f"{dims}{sharding_words(group.spec, sizes)}", fontsize=style.small - 1.5)


def _seconds_unit(longest: float) -> tuple[float, str]:
    """Return the seconds per unit of a time axis, and the unit's name."""
    return next(((s, name) for s, name in ((1.0, "s"), (1e-3, "ms")) if longest >= 2 * s), (1e-6, "µs"))


def _legend(figure: Figure, entries: Sequence[tuple[str, str, str | None]], style: FigureStyle) -> None:
    """Draw a legend below the axes: name, colour and hatching of each entry."""
    from matplotlib.patches import Patch  # an optional extra

    handles = [
        Patch(facecolor=colour, label=name, hatch=hatch, edgecolor="#59636e" if hatch else colour)
        for name, colour, hatch in entries
    ]
    # As many columns as fit: about 13 letters per inch, and a mark before each name.
    longest = max((len(name) for name, _, _ in entries), default=1) + 5
    columns = max(1, min(len(handles), int(style.width_inches * 130 / style.font_points / longest)))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, fontsize=style.small, frameon=False)


def _figure(style: FigureStyle, height: float) -> Figure:
    # Not by trying to import it: an error inside of an installed matplotlib should be seen as it is.
    if util.find_spec("matplotlib") is None:
        raise FigureError("Figures are drawn by matplotlib, which is not installed: pip install 'alpa_lite[viz]'.")
    from matplotlib import rc_context  # an optional extra
    from matplotlib.figure import Figure

    class PaperFigure(Figure):
        """A figure for print, without pyplot, which would choose a backend and keep the figure alive."""

        def savefig(self, fname: Any, **options: Any) -> None:
            """Save the figure with fonts of Type 42; the arguments are those of matplotlib."""
            # Journals refuse Type 3 fonts, which matplotlib embeds by default; text in Type 42 can be edited and
            # searched. The fonts are a setting of the moment at which a file is written, not of the figure.
            with rc_context({"pdf.fonttype": 42, "ps.fonttype": 42, "svg.fonttype": "none"}):
                super().savefig(fname, **options)

        def _repr_svg_(self) -> str:
            """Draw the figure in a notebook, whatever its backend."""
            text = io.StringIO()
            # With letters as paths: the notebook may have other fonts.
            super().savefig(text, format="svg")
            return text.getvalue()

    return PaperFigure(figsize=(style.width_inches, height), layout="constrained")
