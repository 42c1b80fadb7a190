"""Static SVG drawings of a plan: devices and layers by stage, the blocks of an array, the predicted step, alone or over
a measured one.

They take their colours from the CSS classes of `elements` and need no script, so notebooks show them too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from itertools import groupby
from math import ceil, prod, sqrt

from alpa_lite.inspection.page.elements import stage_class
from alpa_lite.inspection.text.timeline import Bar, predicted_timeline, row_name
from alpa_lite.plan.plan import Plan
from alpa_lite.schedule.tasks import SpanLike
from alpa_lite.sharding.specs import Spec
from alpa_lite.text import show_count, show_numbers, show_range, show_seconds

_CELL, _GAP, _PAD, _HEAD = 26.0, 3.0, 6.0, 16.0
_MAX_PER_LINE = 8
"""The greatest number of devices of a host on one line."""

_BIG = 512
"""The number of devices from which on they are drawn smaller and without their numbers."""

_LEFT, _WIDTH, _ROW = 64.0, 900.0, 26.0
_STRIP = 38.0
_MAX_BARS = 1500
"""The greatest number of tasks that are drawn as separate elements; more are merged into paths."""

_BLOCK_WIDTH, _BLOCK_HEIGHT = 48.0, 32.0
_MAX_LINES = 16
"""The greatest number of blocks drawn along one side of an array; more blocks are drawn as this many."""


def cluster_svg(plan: Plan) -> str:
    """Return hosts as boxes, with their devices as squares in the colour of the stage that runs on them."""
    cluster = plan.cluster
    hosts, devices = cluster.num_hosts, cluster.devices_per_host
    cell = _CELL if cluster.num_devices <= _BIG else 9.0
    across = min(devices, _MAX_PER_LINE)
    width = 2 * _PAD + across * (cell + _GAP) - _GAP
    height = _HEAD + ceil(devices / across) * (cell + _GAP) - _GAP + _PAD
    # So many columns that the whole drawing is about 2.6 times as wide as it is high, as the page is.
    columns = _columns(hosts, sqrt(hosts * height / width * 2.6))
    stages_of = _stages_by_device(plan)
    drawn: list[str] = []
    for host in range(hosts):
        x, y = (host % columns) * (width + 8), (host // columns) * (height + 8)
        drawn.append(f'<rect class="host" x="{x:.4g}" y="{y:.4g}" width="{width:.4g}" height="{height:.4g}" rx="4"/>')
        drawn.append(f'<text class="small" x="{x + _PAD:.4g}" y="{y + 11:.4g}">host {host}</text>')
        for run in _runs(plan, host * devices, across, stages_of):
            line, place = divmod(run.start - host * devices, across)
            corner = x + _PAD + place * (cell + _GAP), y + _HEAD + line * (cell + _GAP)
            drawn.append(_devices(plan, run, stages_of, corner, cell))
    total_width, total_height = columns * (width + 8) - 8, ceil(hosts / columns) * (height + 8) - 8
    label = f"{show_count(hosts, 'host')} with {show_count(devices, 'device')} each, in the colours of their stages"
    # At most as large as it is drawn: a single device would else fill the page.
    return (
        f'<svg class="cluster" viewBox="-1 -1 {total_width + 2:.5g} {total_height + 2:.5g}" '
        f'style="width:{1.15 * total_width:.0f}px; max-width:100%" role="img" aria-label="{escape(label)}">\n'
        + "\n".join(drawn)
        + "\n</svg>"
    )


def _columns(hosts: int, about: float) -> int:
    """Return the number of hosts per line: about `about`, adjusted so that all lines are full if possible."""
    usual = max(1, min(hosts, ceil(about)))
    # A last line with a few hosts would look as if the others were missing.
    full = [number for number in range(1, hosts + 1) if hosts % number == 0 and usual / 2 <= number <= 2 * usual]
    return min(full, key=lambda number: abs(number - usual), default=usual)


def _stages_by_device(plan: Plan) -> Mapping[int, tuple[int, ...]]:
    return {
        device: stages
        for stages in plan.stages_together
        for device in plan.stages[stages[0]].submesh.devices
    }  # fmt: skip


def _runs(plan: Plan, first: int, across: int, stages: Mapping[int, Sequence[int]]) -> Iterator[range]:
    """Yield each run of a host's devices that is drawn as one square."""
    devices = plan.cluster.devices_per_host
    if plan.cluster.num_devices <= _BIG:
        yield from (range(first + place, first + place + 1) for place in range(devices))
        return
    for line in range(0, devices, across):
        listed = range(first + line, first + min(line + across, devices))
        # One element for neighbours of one stage: browsers are slow with tens of thousands of elements.
        for _, run in groupby(listed, key=lambda device: stages.get(device)):
            members = list(run)
            yield range(members[0], members[-1] + 1)


def _devices(
    plan: Plan, devices: range, stages_of: Mapping[int, Sequence[int]], corner: tuple[float, float], cell: float
) -> str:
    (x, y), device, count = corner, devices.start, len(devices)
    stages = stages_of.get(device, ())
    name = f"device {device}" if count == 1 else f"devices {device}–{device + count - 1}"
    title = f"{name}: no stage"
    if stages and count > 1:
        title = f"{name}: {_stages(stages)}, {plan.stages[stages[0]].mesh_shape}"
    elif stages:
        stage = plan.stages[stages[0]]
        place = device - stage.submesh.first_device
        where = ", ".join(f"{axis} {at}" for axis, at in _coordinates(place, stage.mesh_shape.axis_sizes).items())
        title = f"device {device}: {_stages(stages)}, at {where} of {stage.mesh_shape}"
    colour = stage_class(stages[0]) if stages else "unused"
    # Drawn for large squares only: on small ones it could not be read.
    number = f'<text class="on" x="{x + cell / 2:.4g}" y="{y + cell / 2 + 3.5:.4g}">{device}</text>'
    return (
        f'<g class="device {colour}" data-stages="{" ".join(map(str, stages))}"><title>{escape(title)}</title>'
        f'<rect x="{x:.5g}" y="{y:.5g}" width="{count * (cell + _GAP) - _GAP:.4g}" height="{cell:.4g}" rx="2"/>'
        f"{number if cell >= _CELL else ''}</g>"
    )


def _stages(stages: Sequence[int]) -> str:
    return f"stage {stages[0]}" if len(stages) == 1 else f"stages {row_name(stages)}"


def _coordinates(place: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return a device's coordinates on a logical mesh, whose last axis varies fastest."""
    found: dict[str, int] = {}
    # From the fastest axis to the slowest: the remainder is the coordinate, the quotient goes on.
    for axis, size in reversed(list(sizes.items())):
        place, found[axis] = divmod(place, size)
    return {axis: found[axis] for axis in sizes}


def layers_svg(plan: Plan) -> str:
    """Return all layers in a row, in the colours of their stages; wide ones have their number."""
    count = max(1, plan.num_layers)
    # One width for all: layers are of about equal work, as the clustering makes them.
    width = _WIDTH / count
    ops = [0] * count
    for layer in plan.op_layers:
        if layer is not None and layer < count:
            ops[layer] += 1
    cells = "".join(
        f'<g class="layer {stage_class(stage)}" data-stages="{stage}"><title>layer {layer}: stage {stage}, '
        f"{show_count(ops[layer], 'op')}{_recomputes(plan, layer)}</title>"
        f'<rect x="{layer * width:.5g}" y="0" width="{max(width - 1, 0.6 * width):.5g}" height="20"/>'
        + (f'<text class="on" x="{(layer + 0.5) * width:.5g}" y="14">{layer}</text>' if width >= 16 else "")
        + "</g>"
        for stage, placed in enumerate(plan.stages)
        for layer in range(placed.layers[0], placed.layers[1] + 1)
    )
    names = "".join(
        f'<text class="small" x="{stage.layers[0] * width:.5g}" y="{_STRIP - 6:.0f}">{_strip_name(plan, number)}</text>'
        for number, stage in enumerate(plan.stages)
        if (stage.layers[1] - stage.layers[0] + 1) * width >= 52 or number == 0
    )
    label = f"{show_count(plan.num_layers, 'layer')} in {show_count(len(plan.stages), 'stage')}"
    box = f"0 0 {_WIDTH:.0f} {_STRIP:.0f}"
    return f'<svg class="layers" viewBox="{box}" role="img" aria-label="{label}">\n{cells}{names}\n</svg>'


def _strip_name(plan: Plan, number: int) -> str:
    first, last = plan.stages[number].layers
    short = f"stage {number}"
    # What fits: about six points for each letter.
    full = f"{short}: {'layer' if first == last else 'layers'} {show_range(first, last)}"
    return full if (last - first + 1) * _WIDTH / max(1, plan.num_layers) >= 6.2 * len(full) else short


def _recomputes(plan: Plan, layer: int) -> str:
    return f", rematerialised: {plan.remat[layer].value}" if layer < len(plan.remat) else ""


def block_svg(spec: Spec, sizes: Mapping[str, int]) -> str:
    """Return an array as its blocks, with the block of the first device filled.

    Of more than two dims, only split dims are drawn, the last ones first.
    """
    rows, _ = drawn_dims(spec)
    down, across = block_counts(spec, sizes)
    # A vector is drawn flatter than a matrix.
    high = _BLOCK_HEIGHT if rows is not None else _BLOCK_HEIGHT / 3
    top = (_BLOCK_HEIGHT - high) / 2
    lines = "".join(f"M0 {top + high * i / down:.4g}h{_BLOCK_WIDTH:.0f}" for i in range(1, down))
    lines += "".join(f"M{_BLOCK_WIDTH * i / across:.4g} {top:.4g}v{high:.4g}" for i in range(1, across))
    return (
        f'<svg class="block" width="50" height="34" viewBox="-1 -1 50 34" aria-hidden="true">'
        f'<rect class="all" y="{top:.4g}" width="{_BLOCK_WIDTH:.0f}" height="{high:.4g}"/>'
        f'<rect class="own" y="{top:.4g}" width="{_BLOCK_WIDTH / across:.4g}" height="{high / down:.4g}"/>'
        f'<path d="{lines}"/></svg>'
    )


def block_counts(spec: Spec, sizes: Mapping[str, int]) -> tuple[int, int]:
    """Return the numbers of blocks that are drawn downwards and across."""
    rows, columns = drawn_dims(spec)
    # More lines would merge into one dark area.
    return min(_MAX_LINES, _parts(spec, rows, sizes)), min(_MAX_LINES, _parts(spec, columns, sizes))


def drawn_dims(spec: Spec) -> tuple[int | None, int | None]:
    """Return the dims that are drawn vertically and horizontally; None where there is none."""
    rank = len(spec.dims)
    if rank < 2:
        return None, 0 if rank else None
    cut = [dim for dim in range(rank) if spec.dims[dim]]
    # Split dims before whole ones, and of both the last ones: in a stack of matrices these are the dims of a matrix.
    shown = sorted((*cut[-2:], *[dim for dim in (rank - 1, rank - 2) if dim not in cut])[:2])
    return shown[0], shown[1]


def _parts(spec: Spec, dim: int | None, sizes: Mapping[str, int]) -> int:
    return 1 if dim is None else prod(sizes[axis] for axis in spec.dims[dim])


def sharding_kind(spec: Spec, sizes: Mapping[str, int]) -> str:
    """Return the kind of sharding: `replicated`, `dim 0`, `2-D`; for matrices, stacked ones too, `row` or `column`.

    An axis of one device cuts nothing.
    """
    rank = len(spec.dims)
    cut = [dim for dim in range(rank) if _parts(spec, dim, sizes) > 1]
    if not cut:
        return "replicated"
    if len(cut) > 1:
        return f"{len(cut)}-D"
    if rank < 2 or cut[0] < rank - 2:
        return f"dim {cut[0]}"
    return "row" if cut[0] == rank - 2 else "column"


def sharding_words(spec: Spec, sizes: Mapping[str, int]) -> str:
    """Return the sharding in words, such as `dim 1 in 8 over model; 2 copies`."""
    cut = [
        f"dim {dim} in {parts} over {' × '.join(axis for axis in axes if sizes[axis] > 1)}"
        for dim, axes in enumerate(spec.dims)
        if (parts := _parts(spec, dim, sizes)) > 1
    ]
    copies = prod(size for axis, size in sizes.items() if axis not in spec.axes)
    # `show_count` forms the plural by an s alone.
    held = show_count(copies, "copy").replace("copys", "copies")
    return "; ".join([*(cut or ["whole"]), held])


def timeline_svg(plan: Plan) -> str:
    """Return the predicted step: a row per submesh, a bar per task, with a description as tooltip."""
    timeline = predicted_timeline(plan)
    # A plan of ops that take no time has a step of zero seconds.
    longest = max(timeline.step_seconds, timeline.makespan_seconds)
    scale = _WIDTH / max(longest, 1e-12)
    height = _ROW * len(timeline.rows) + 18
    labels = "".join(
        f'<text x="0" y="{_ROW * number + 16:.0f}">{_row_label(stages)}</text>'
        for number, stages in enumerate(timeline.rows)
    )
    # Many bars become a path per kind, which loses their tooltips but keeps the page responsive.
    few = len(timeline.bars) <= _MAX_BARS
    bars = "\n".join(_bar(bar, scale) for bar in timeline.bars) if few else _merged(timeline.bars, scale)
    step, end = show_seconds(timeline.step_seconds), show_seconds(longest)
    return (
        f'<svg viewBox="0 0 {_LEFT + _WIDTH:.0f} {height:.0f}" role="img" aria-label="Predicted timeline of {step}">\n'
        f'{labels}\n{bars}\n<text x="{_LEFT:.0f}" y="{height - 4:.0f}">0</text>'
        f'<text x="{_LEFT + _WIDTH:.0f}" y="{height - 4:.0f}" text-anchor="end">{end}</text>\n</svg>\n'
    )


def overlaid_svg(predicted: Sequence[SpanLike], measured: Sequence[SpanLike]) -> str:
    """Return two timelines over one axis: for each stage a row of predicted spans above one of measured spans.

    predicted, measured    tasks, transfers and other instructions, in seconds from the start of the step
    """
    stages = sorted({span.stage for span in (*predicted, *measured)})
    row_of = {stage: 2 * number for number, stage in enumerate(stages)}
    bars = [
        Bar(
            stage=span.stage,
            row=row_of[span.stage] + side,
            kind=str(getattr(span, "name", "") or span.kind),
            microbatch=getattr(span, "microbatch", None),
            start_seconds=span.start_seconds,
            end_seconds=span.end_seconds,
        )
        for side, spans in enumerate((predicted, measured))
        for span in spans
        if span.end_seconds > span.start_seconds
    ]
    ends = [max((span.end_seconds for span in spans), default=0.0) for spans in (predicted, measured)]
    longest = max(*ends, 1e-12)
    scale, height = _WIDTH / longest, 2 * _ROW * len(stages) + 18
    labels = "".join(
        f'<text class="small" x="0" y="{_ROW * (row_of[stage] + side) + 17:.0f}">{name} {stage}</text>'
        for stage in stages
        for side, name in enumerate(("predicted", "measured"))
    )
    few = len(bars) <= _MAX_BARS
    drawn = "\n".join(_bar(bar, scale) for bar in bars) if few else _merged(bars, scale)
    words = f"Predicted {show_seconds(ends[0])}, measured {show_seconds(ends[1])}"
    return (
        f'<svg viewBox="0 0 {_LEFT + _WIDTH:.0f} {height:.0f}" role="img" aria-label="{words}">\n'
        f'{labels}\n{drawn}\n<text x="{_LEFT:.0f}" y="{height - 4:.0f}">0</text>'
        f'<text x="{_LEFT + _WIDTH:.0f}" y="{height - 4:.0f}" text-anchor="end">{show_seconds(longest)}</text>'
        "\n</svg>\n"
    )


def _row_label(stages: Sequence[int]) -> str:
    """Return the label of a row, abbreviated to fit, with the full text as tooltip."""
    if len(stages) <= 2:
        return f"stage {row_name(stages)}"
    return f"stage {stages[0]}, …<title>stages {row_name(stages)}</title>"


def kind_class(kind: str) -> str:
    """Return the CSS class of a kind of task; `input gradient` has the colour of the backward pass."""
    words = kind.lower()
    named = (
        # In order: the more special words come before those that they contain.
        ("weight gradient", "weight"),
        ("gradient", "backward"),
        ("backward", "backward"),
        ("forward", "forward"),
        ("update", "update"),
        ("step", "backward"),
        ("send", "receive"),
        ("collective", "collective"),
    )
    return next((colour for word, colour in named if word in words), "other")


def _bar(bar: Bar, scale: float) -> str:
    x, width = _LEFT + bar.start_seconds * scale, (bar.end_seconds - bar.start_seconds) * scale
    which = "" if bar.microbatch is None else f" of micro-batch {bar.microbatch}"
    title = f"{bar.kind}{which}, stage {bar.stage}: {show_seconds(bar.end_seconds - bar.start_seconds)}"
    return (
        f'<rect class="{kind_class(bar.kind)}" x="{x:.2f}" y="{_ROW * bar.row + 3:.1f}" '
        f'width="{max(width - 0.5, 0.3):.2f}" height="{_ROW - 6:.1f}" rx="2"><title>{escape(title)}</title></rect>'
    )


def _merged(bars: Iterable[Bar], scale: float) -> str:
    """Return many bars as one path per kind, rounded to the nearest point."""
    found: dict[str, dict[tuple[int, int, int], None]] = {}
    for bar in bars:
        # Bars that round to the same place are one: thousands of short tasks then take few elements.
        left, right = round(bar.start_seconds * scale), round(bar.end_seconds * scale)
        found.setdefault(kind_class(bar.kind), {})[bar.row, left, max(right, left + 1)] = None
    return "\n".join(
        f'<path class="{kind}" d="'
        + "".join(f"M{_LEFT + a:.0f} {_ROW * row + 3:.0f}h{b - a}v20h{a - b}z" for row, a, b in sorted(spans))
        + '"/>'
        for kind, spans in found.items()
    )


def stage_names(stages: Iterable[int]) -> str:
    """Return stages as chips in their colours, ranges as `0–3`."""
    listed = list(stages)
    if len(listed) > 6:
        return escape(show_numbers(listed))
    return " ".join(f'<span class="chip {stage_class(stage)}">{stage}</span>' for stage in listed)
