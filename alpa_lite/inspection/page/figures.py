"""Figures of a plan for papers, drawn by matplotlib: `timeline_figure(plan).savefig("step.pdf")`.

timeline_figure    the step, a row per submesh; below it the simulated and measured spans if they are given
submesh_figure     hosts and devices in the colours of their stages, above the layers
memory_figure      the memory of a device of each submesh during the step, and its capacity

Each returns a new `matplotlib.figure.Figure`: nothing is shown and no backend is chosen. matplotlib is an optional
extra, `pip install 'alpa_lite[viz]'`.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import util
from typing import TYPE_CHECKING

from alpa_lite.errors import FigureError
from alpa_lite.inspection.page.drawings import kind_class
from alpa_lite.inspection.page.elements import KINDS, kind_name, stage_colour
from alpa_lite.inspection.text.timeline import memory_over_time, predicted_timeline, row_name
from alpa_lite.plan.plan import Plan
from alpa_lite.schedule.tasks import SpanLike
from alpa_lite.text import show_bytes, show_count, show_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH = 7.0
"""Width of a figure in inches: the text width of a page."""

_SMALL = 0.02
"""The share of the step below which a task is drawn without its micro-batch."""


def timeline_figure(
    plan: Plan, *, simulated: Sequence[SpanLike] | None = None, measured: Sequence[SpanLike] | None = None
) -> Figure:
    """Draw the predicted step over time, and below it simulated and measured spans. Raises `FigureError`."""
    given: dict[str, Sequence[SpanLike]] = {"predicted": predicted_timeline(plan).bars}
    given |= {name: spans for name, spans in (("simulated", simulated), ("measured", measured)) if spans}
    count = len(plan.stages_together)
    figure = _figure((0.7 + 0.28 * count) * len(given) + 0.5)
    all_axes: list[Axes] = figure.subplots(len(given), 1, sharex=True, squeeze=False)[:, 0].tolist()
    kinds: dict[str, None] = {}
    ends = {name: max(span.end_seconds for span in spans) for name, spans in given.items()}
    longest = max(*ends.values(), plan.prediction.step_seconds)
    # The predicted step does not end with its last task.
    ends["predicted"] = plan.prediction.step_seconds
    scale, unit = _seconds_unit(longest)
    for axes, (name, spans) in zip(all_axes, given.items(), strict=True):
        kinds |= dict.fromkeys(_draw_spans(axes, plan, spans, longest))
        axes.tick_params(labelsize=8)
        axes.set_yticks(range(count), [f"stage {row_name(stages)}" for stages in plan.stages_together], fontsize=8)
        # Downwards, so that the first stage is at the top.
        axes.set_ylim(count - 0.5, -0.5)
        axes.set_xlim(0.0, longest / scale)
        axes.set_title(f"{name}: {show_seconds(ends[name])}", fontsize=9, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[-1].set_xlabel(unit, fontsize=9)
    _legend(figure, [kind for kind in KINDS if kind in kinds])
    return figure


def _draw_spans(axes: Axes, plan: Plan, spans: Sequence[SpanLike], longest: float) -> set[str]:
    """Draw the tasks of devices, and transfers as thin lines below; return the kinds that occur."""
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
        microbatch = getattr(span, "microbatch", None)
        # A number on a narrow bar would cover its neighbours.
        if microbatch is not None and kind != "receive" and length > _SMALL * longest:
            middle = (span.start_seconds + span.end_seconds) / 2 / scale
            axes.text(middle, row, str(microbatch), ha="center", va="center", fontsize=6, color="white")
    for (kind, row), found in bars.items():
        place = (row + 0.36, 0.1) if kind == "receive" else (row - 0.34, 0.68)
        axes.broken_barh(found, place, facecolors=KINDS[kind][0], edgecolors="white", linewidth=0.2)
    return {kind for kind, _ in bars}


def submesh_figure(plan: Plan) -> Figure:
    """Draw hosts as rows of devices in the colours of their stages, above the layers. Raises `FigureError`."""
    cluster = plan.cluster
    hosts, devices = cluster.num_hosts, cluster.devices_per_host
    figure = _figure(1.5 + min(6.0, 0.22 * hosts))
    above, below = figure.subplots(2, 1, height_ratios=[max(1.0, 0.5 * hosts), 0.8])
    stage_of = {
        device: stages[0] for stages in plan.stages_together for device in plan.stages[stages[0]].submesh.devices
    }
    for device in range(cluster.num_devices):
        host, place = divmod(device, devices)
        colour = stage_colour(stage_of[device]) if device in stage_of else "#d5dae0"
        above.broken_barh([(place + 0.04, 0.92)], (host + 0.06, 0.88), facecolors=colour)
    above.set_xlim(0, devices)
    above.set_ylim(hosts, 0)
    # At most about 16 names, which would otherwise overlap.
    named = range(0, hosts, max(1, hosts // 16))
    above.set_xticks([])
    above.set_yticks([host + 0.5 for host in named], [f"host {host}" for host in named], fontsize=7)
    title = f"{plan.name} on {cluster.name}, {show_count(cluster.num_devices, 'device')}"
    above.set_title(title, fontsize=9, loc="left")
    for number, stage in enumerate(plan.stages):
        first, last = stage.layers
        cells = [(layer + 0.04, 0.92) for layer in range(first, last + 1)]
        below.broken_barh(cells, (0, 1), facecolors=stage_colour(number))
        if last - first + 1 > 0.03 * plan.num_layers:
            below.text((first + last + 1) / 2, 0.5, str(number), ha="center", va="center", fontsize=8, color="white")
    below.set_xlim(0, plan.num_layers)
    below.set_ylim(0, 1)
    below.set_yticks([])
    below.set_xticks([])
    below.set_xlabel(f"{show_count(plan.num_layers, 'layer')}, numbers of stages", fontsize=9)
    for axes in (above, below):
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
    return figure


def memory_figure(plan: Plan) -> Figure:
    """Draw bytes per device over time, a row per submesh; the capacity is dashed if near. Raises `FigureError`."""
    tracks = memory_over_time(plan)
    figure = _figure(0.6 + max(0.9, 0.55 * len(tracks)))
    # One scale for all stages, so that their memory can be compared.
    all_axes: list[Axes] = figure.subplots(len(tracks), 1, sharex=True, sharey=True, squeeze=False)[:, 0].tolist()
    end = max(track.seconds[-1] for track in tracks)
    capacity = min(track.capacity_bytes for track in tracks)
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
        if capacity < 3 * top:
            axes.axhline(capacity / scale, color="#b3261e", linestyle="dashed", linewidth=0.8)
        axes.set_ylabel(f"stage {row_name(track.stages)}\n{show_bytes(track.peak_bytes)}", fontsize=7, rotation=0)
        axes.yaxis.set_label_coords(-0.1, 0.3)
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[0].set_xlim(0.0, end / time_scale)
    all_axes[0].set_ylim(bottom=0.0)
    all_axes[0].set_title(f"{unit} per device, of {show_bytes(capacity)}", fontsize=9, loc="left")
    all_axes[-1].set_xlabel(time_unit, fontsize=9)
    return figure


def _seconds_unit(longest: float) -> tuple[float, str]:
    """Return the seconds per unit of a time axis, and the unit's name."""
    return next(((s, name) for s, name in ((1.0, "s"), (1e-3, "ms")) if longest >= 2 * s), (1e-6, "µs"))


def _legend(figure: Figure, kinds: Sequence[str]) -> None:
    from matplotlib.patches import Patch  # an optional extra

    handles = [Patch(color=KINDS[kind][0], label=kind_name(kind)) for kind in kinds]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8, frameon=False)


def _figure(height: float) -> Figure:
    # Not by trying to import it: an error inside of an installed matplotlib should be seen as it is.
    if util.find_spec("matplotlib") is None:
        raise FigureError("Figures are drawn by matplotlib, which is not installed: pip install 'alpa_lite[viz]'.")
    from matplotlib.figure import Figure  # an optional extra

    # Without pyplot, which would choose a backend and keep the figure alive.
    return Figure(figsize=(_WIDTH, height), layout="constrained")
