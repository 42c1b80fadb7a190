"""Rows for people: tables, a bar chart per model, and one self-contained page.

Bars show throughput by planner in the style of Alpa's evaluation (Zheng et al., OSDI 2022, figure 7). A planner without
a plan is a cross; where plans were measured, a dotted line is the prediction. `draw` writes the chart as PNG, `page`
draws it as SVG with the use of devices and all figures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from importlib import util
from itertools import groupby
from pathlib import Path

from alpa_lite.cli.bench.row import DeviceTime, Environment, Row, Verdict, verdict
from alpa_lite.errors import AlpaLiteError
from alpa_lite.inspection.page.elements import STYLE, page_html, table_html
from alpa_lite.inspection.text.tables import Table
from alpa_lite.text import show_bytes, show_milliseconds, show_percent, show_ratio, show_seconds
from cost_models.uncertainty import indistinguishable

MAX_REASON = 140
"""The greatest number of characters of a reason in a table; rows hold all of it."""


_PLANS_NOTE = (
    "Stages: how many on which logical mesh; batches: micro-batches; peak, allocated: bytes per device, predicted and "
    "as XLA allocates; gap: how far from the best a plan can be at most, as priced; slower: than the first."
)


def groups(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the rows of each model and cluster, in the order of first appearance."""
    # Rows of a model and cluster follow one another, as they were made in that order.
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
    measured = any(row.run is not None for row in found)
    columns = ("planner", "stages", "batches", "predicted ms")
    # A column of blanks would only take room where nothing was measured.
    columns += ("measured", "quartiles", "peak", "allocated") if measured else ("peak",)
    columns += ("gap", "planned", "slower")
    # All other plans are given relative to the fastest one.
    first = found[0].step_seconds if found else None
    return Table(
        title=title_of(rows[0]),
        columns=columns,
        rows=tuple(_plan_cells(row, measured=measured, first=first) for row in found),
        numeric=frozenset(columns[2:]) - {"quartiles"},
        note=f"{_PLANS_NOTE}{_alike(found)}" if found else "No planner found a plan.",
    )


def _alike(found: Sequence[Row]) -> str:
    """Return a sentence on the plans that predictions cannot tell from the fastest; "" if there are none.

    Where plans were measured, the measurements tell.
    """
    prices = [row.price for row in found if row.price is not None and row.run is None]
    if len(prices) < len(found):
        return ""
    first, names = prices[0], list[str]()
    for row, price in zip(found[1:], prices[1:], strict=True):
        if indistinguishable(first.step_seconds, first.likely_seconds, price.step_seconds, price.likely_seconds):
            names.append(row.planner)
    if not names:
        return ""
    return f" Indistinguishable from the first, each being predicted in the range of the other: {', '.join(names)}."


def title_of(row: Row) -> str:
    """Return a title of model, batch and cluster."""
    batch = "" if row.batch_size is None else f", batch {row.batch_size}"
    return f"{row.model}{batch}, on {row.cluster} ({row.num_devices} devices)"


def by_time(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with a plan, the fastest first; of equal ones the search first."""
    return sorted((row for row in rows if not row.reason), key=lambda row: (row.step_seconds or 0.0, not row.auto))


def _plan_cells(row: Row, *, measured: bool, first: float | None) -> tuple[str, ...]:
    price, run = row.price, row.run
    assert price is not None, "rows without a plan are in a table of their own"
    name = f"{row.planner} (as {run.same_as})" if run is not None and run.same_as else row.planner
    cells = [name, price.meshes, str(price.num_microbatches), show_milliseconds(price.step_seconds)]
    if measured:
        low, high = (0.0, 0.0) if run is None else run.quartiles
        cells += [show_milliseconds(row.step_seconds or 0.0), f"{show_milliseconds(low)}–{show_milliseconds(high)}"]
    cells += [show_bytes(price.peak_bytes)]
    if measured:
        cells += ["" if run is None or run.allocated_peak_bytes is None else show_bytes(run.allocated_peak_bytes)]
    cells += [show_percent(price.solver_gap), show_seconds(row.planning_seconds or 0.0)]
    return (*cells, show_ratio((row.step_seconds or 0.0) / first) if first else "")


def _simulated(rows: Sequence[Row]) -> list[tuple[str, DeviceTime]]:
    """Return the simulated steps of the searches and of the best manual plan, by planner."""
    best = verdict(rows).manual
    shown = [row for row in rows if row.searched or row is best]
    return [(row.planner, row.simulation) for row in shown if row.simulation is not None]


def activity_table(rows: Sequence[Row]) -> Table | None:
    """Return the use of devices in a step of the searches and the best manual plan; None without simulated steps."""
    simulated = _simulated(rows)
    if not simulated:
        return None
    return Table(
        title="Where the devices' time goes",
        columns=("planner", "step ms", "at work", "communication", "idle"),
        rows=tuple(
            (planner, show_milliseconds(time.step_seconds), *map(show_percent, shares(time)))
            for planner, time in simulated
        ),
        numeric=frozenset(("step ms", "at work", "communication", "idle")),
        note="Of the simulated program, averaged over devices; communication is what keeps them from work.",
    )


def shares(time: DeviceTime) -> tuple[float, float, float]:
    """Return the shares of a simulated step: computing, waiting for communication, idle."""
    total = time.step_seconds or 1.0
    communication, idle = time.communication_seconds / total, time.idle_seconds / total
    # Rounding may leave a little less than nothing.
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
    # Without measurements there is one ratio and no spread.
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


MAX_BARS = 16
COLOURS = {"auto": "#1a7f5a", "search": "#5fb49c", "manual": "#8c96a3"}


class ChartError(AlpaLiteError):
    """Charts cannot be drawn."""


def check_matplotlib() -> None:
    """Raise `ChartError` if charts cannot be drawn."""
    if util.find_spec("matplotlib") is None:
        raise ChartError("Charts (PNG) are drawn by matplotlib, which is not installed: pip install 'alpa_lite[viz]'.")


def bars(rows: Sequence[Row]) -> list[Row]:
    """Return the rows to draw: the fastest plans, every search, then those without a plan, while there is room."""
    found = by_time(rows)
    # Searches are always drawn, since they are what manual plans are compared with; the rest is room for reasons.
    kept = [row for number, row in enumerate(found) if row.searched or number < MAX_BARS - 4]
    return [*kept, *[row for row in rows if row.reason]][:MAX_BARS]


def rate(row: Row, seconds: float | None) -> float:
    """Return samples per second; steps per second if there is no batch."""
    return 0.0 if not seconds else (row.batch_size or 1) / seconds


def kind(row: Row) -> str:
    """Return the kind of bar."""
    return "auto" if row.auto else "search" if row.searched else "manual"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write the chart of the rows of one model as PNG. Raises `ChartError` without matplotlib."""
    check_matplotlib()
    # A figure without pyplot: no backend is chosen, and nothing stays alive.
    from matplotlib.figure import Figure  # an optional extra

    shown = bars(rows)
    figure = Figure(figsize=(max(5.0, 1.1 + 0.62 * len(shown)), 4.2), layout="constrained")
    axes = figure.subplots()
    for number, row in enumerate(shown):
        colour = COLOURS[kind(row)]
        if row.reason:
            axes.text(number, 0.0, "×", ha="center", va="bottom", fontsize=16, color="#c0392b")
            continue
        # Throughput, not time, as in the figures of papers: higher is better.
        height = rate(row, row.step_seconds)
        spread = None
        if row.run is not None:
            # The longer time is the lower rate.
            low, high = (rate(row, seconds) for seconds in reversed(row.run.quartiles))
            spread = [[max(0.0, height - low)], [max(0.0, high - height)]]
        axes.bar(number, height, width=0.72, color=colour, yerr=spread, ecolor="#333333", capsize=2)
        if row.run is not None:
            predicted = rate(row, row.predicted_seconds)
            axes.hlines(predicted, number - 0.36, number + 0.36, colors="#222222", linestyles="dotted")
    axes.set_xticks(range(len(shown)), [row.planner for row in shown], rotation=40, ha="right", fontsize=8)
    measured = any(row.run is not None for row in shown)
    unit = "samples / s" if rows[0].batch_size else "steps / s"
    axes.set_ylabel(f"{unit} ({'measured; dotted: predicted' if measured else 'predicted'})", fontsize=9)
    axes.set_title(title_of(rows[0]), fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_ylim(bottom=0.0)
    figure.savefig(path, dpi=150)


_OWN_STYLE = """
.alpa-lite { --auto: #1a7f5a; --search: #5fb49c; --manual: #8c96a3; --wait: #d9a441; --idle: #d5dae0; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { .alpa-lite { --auto: #3fb68b; --search: #2f7d66; --manual: #6b7785;
  --wait: #b8862b; --idle: #30363d; --bad: #ff7b72; } }
.alpa-lite h2.model { margin-top: 2.5rem; padding-top: 1rem; border-top: 1px solid var(--line); font-size: 1.1rem; }
.alpa-lite .auto { fill: var(--auto); } .alpa-lite .search { fill: var(--search); }
.alpa-lite .manual { fill: var(--manual); } .alpa-lite .work { fill: var(--auto); }
.alpa-lite .wait { fill: var(--wait); }
.alpa-lite .idle { fill: var(--idle); } .alpa-lite text.bad { fill: var(--bad); }
.alpa-lite line { stroke: var(--ink); stroke-width: 1.5; } .alpa-lite line.predicted { stroke-dasharray: 2 2; }
"""
_LEFT, _WIDTH, _RIGHT, _ROW = 250.0, 520.0, 290.0, 22.0


def page(rows: Sequence[Row], environment: Environment) -> str:
    """Return the page; it needs no network, and follows the reader's choice of light or dark."""
    found = groups(rows)
    parts = [
        f"<style>{STYLE}{_OWN_STYLE}</style>",
        "<h1>Planners against each other</h1>",
        *(f"<p>{escape(line)}</p>" for line in environment_lines(environment)),
        table_html(verdicts_table([verdict(some) for some in found])),
        *(_model(some) for some in found),
    ]
    return page_html("Planners against each other", '<div class="alpa-lite">\n' + "\n".join(parts) + "\n</div>")


def _model(rows: Sequence[Row]) -> str:
    more = [table_html(table) for table in (activity_table(rows), plans_table(rows), reasons_table(rows)) if table]
    parts = [f'<h2 class="model">{escape(title_of(rows[0]))}</h2>', f"<p>{escape(str(verdict(rows)))}</p>"]
    return "\n".join([*parts, bars_svg(rows), activity_svg(rows), *more])


def bars_svg(rows: Sequence[Row]) -> str:
    """Draw each planner's throughput: a line for quartiles, dots for the prediction, a cross where there is no plan."""
    shown = bars(rows)
    rates = [rate(row, seconds) for row in shown for seconds in (row.step_seconds, row.predicted_seconds)]
    # All bars have one scale, and never divide by zero where no planner has a plan.
    scale = _WIDTH / max([*rates, 1e-30])
    unit = "samples per second" if rows[0].batch_size else "steps per second"
    bodies = [_bar(row, number, scale) for number, row in enumerate(shown)]
    return f"<h2>Throughput, {unit}</h2>\n{_svg(bodies, len(shown), f'{unit} of each planner')}"


def _bar(row: Row, number: int, scale: float) -> str:
    y = _ROW * number
    label = f'<text x="{_LEFT - 8:.0f}" y="{y + 15:.1f}" text-anchor="end">{escape(row.planner)}</text>'
    if row.reason:
        why = f"<title>{escape(shortened(row.reason))}</title>"
        return f'{label}<text class="bad" x="{_LEFT:.0f}" y="{y + 15:.1f}">× no plan{why}</text>'
    height, seconds = rate(row, row.step_seconds), row.step_seconds or 0.0
    marks = (
        f'<rect class="{kind(row)}" x="{_LEFT:.1f}" y="{y + 4:.1f}" width="{height * scale:.1f}" height="{_ROW - 8}"/>'
    )
    if row.run is not None:
        # The quartiles change places, since a longer time is a lower rate.
        low, high = (_LEFT + rate(row, end) * scale for end in reversed(row.run.quartiles))
        predicted = _LEFT + rate(row, row.predicted_seconds) * scale
        middle, top, bottom = y + _ROW / 2, y + 3, y + _ROW - 3
        marks += f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{middle:.1f}" y2="{middle:.1f}"/>'
        marks += f'<line class="predicted" x1="{predicted:.1f}" x2="{predicted:.1f}" y1="{top:.1f}" y2="{bottom:.1f}"/>'
    tflops = None if row.price is None else row.price.tflops_per_device
    extra = "" if tflops is None else f", {tflops:.1f} TFLOPS per device"
    # The number stands behind the longer of bar and prediction, so that it covers neither.
    value = f"{height:.4g}  ({show_milliseconds(seconds)} ms{extra})"
    end = _LEFT + max(height, rate(row, row.predicted_seconds)) * scale
    return f'{label}{marks}<text x="{end + 6:.1f}" y="{y + 15:.1f}">{escape(value)}</text>'


def activity_svg(rows: Sequence[Row]) -> str:
    """Draw shares of a simulated step (computing, communication, idle) for the searches and the best manual plan."""
    simulated = _simulated(rows)
    if not simulated:
        return ""
    scale = _WIDTH / max(*(time.step_seconds for _, time in simulated), 1e-30)
    bodies = [_parts(planner, time, number, scale) for number, (planner, time) in enumerate(simulated)]
    return (
        f"<h2>Where the devices' time goes</h2>\n{_svg(bodies, len(simulated), 'work, communication and idle time')}"
        "<p>green: at work, yellow: kept from work by communication, grey: idle; simulated, average over devices</p>"
    )


def _parts(planner: str, time: DeviceTime, number: int, scale: float) -> str:
    y, x, seconds = _ROW * number, _LEFT, time.step_seconds
    drawn = f'<text x="{_LEFT - 8:.0f}" y="{y + 15:.1f}" text-anchor="end">{escape(planner)}</text>'
    for name, share in zip(("work", "wait", "idle"), shares(time), strict=True):
        width = share * seconds * scale
        drawn += f'<rect class="{name}" x="{x:.1f}" y="{y + 4:.1f}" width="{width:.1f}" height="{_ROW - 8}"/>'
        x += width
    return f'{drawn}<text x="{x + 6:.1f}" y="{y + 15:.1f}">{show_milliseconds(seconds)} ms</text>'


def _svg(bodies: Sequence[str], count: int, label: str) -> str:
    # The drawing scales with the page; text keeps its size relative to the bars.
    box = f"0 0 {_LEFT + _WIDTH + _RIGHT:.0f} {_ROW * count + 4:.0f}"
    return f'<svg viewBox="{box}" role="img" aria-label="{escape(label)}">\n' + "\n".join(bodies) + "\n</svg>"
