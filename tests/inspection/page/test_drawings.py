"""Still drawings: devices, layers, blocks, bars."""

import re
from dataclasses import replace

import pytest

from alpa_lite.inspection.page.drawings import (
    block_svg,
    cluster_svg,
    kind_class,
    layers_svg,
    overlaid_svg,
    sharding_kind,
    sharding_words,
    timeline_svg,
)
from alpa_lite.inspection.text.timeline import predicted_timeline
from alpa_lite.sharding.specs import Spec
from tests.inspection.long_plans import with_tasks_repeated
from tests.inspection.markup import parse

SIZES = {"data": 2, "model": 4}
ROW, COLUMN = Spec((("data",), ())), Spec(((), ("model",)))
BOTH, WHOLE = Spec((("data",), ("model",))), Spec(((), ()))


def shares(svg):
    """Width and height of the part that the first device holds, of the whole drawing."""
    sizes = {
        name: [
            float(value) for value in re.search(rf'class="{name}"[^>]* width="([^"]+)" height="([^"]+)"', svg).groups()
        ]
        for name in ("all", "own")
    }
    return [own / whole for own, whole in zip(sizes["own"], sizes["all"], strict=True)]


@pytest.mark.parametrize(
    ("spec", "kind", "width", "height"),
    [
        (WHOLE, "replicated", 1, 1),
        (ROW, "row", 1, 1 / 2),
        (COLUMN, "column", 1 / 4, 1),
        (BOTH, "2-D", 1 / 4, 1 / 2),
        (Spec((("data", "model"), ())), "row", 1, 1 / 8),
        (Spec((("model",),)), "dim 0", 1 / 4, 1),
        (Spec((("model",), (), ())), "dim 0", 1, 1 / 4),
        (Spec(((), ("data",), ())), "row", 1, 1 / 2),
        (Spec(((), (), ("data",))), "column", 1 / 2, 1),
        (Spec((("data",), (), ("model",))), "2-D", 1 / 4, 1 / 2),
        (Spec(()), "replicated", 1, 1),
    ],
)
def test_blocks(spec, kind, width, height):
    assert sharding_kind(spec, SIZES) == kind
    svg = block_svg(spec, SIZES)
    parse(svg)
    assert shares(svg) == pytest.approx([width, height], rel=1e-3)
    # A line between any two blocks.
    assert len(re.findall("[vh]", svg.split('path d="')[1].split('"')[0])) == round(1 / width + 1 / height) - 2


def test_many_blocks_are_drawn_as_some():
    svg = block_svg(Spec((("x",), ())), {"x": 512})
    assert len(svg) < 1000 and shares(svg)[1] == pytest.approx(1 / 16, rel=1e-3)


def test_words():
    assert sharding_words(WHOLE, SIZES) == "whole; 8 copies"
    assert sharding_words(COLUMN, SIZES) == "dim 1 in 4 over model; 2 copies"
    assert sharding_words(BOTH, SIZES) == "dim 0 in 2 over data; dim 1 in 4 over model; 1 copy"


def test_an_axis_of_one_device_cuts_nothing():
    sizes = {"data": 1, "model": 4}
    assert sharding_words(BOTH, sizes) == "dim 1 in 4 over model; 1 copy" and sharding_kind(BOTH, sizes) == "column"
    both = Spec((("data", "model"), ()))
    assert sharding_words(both, sizes) == "dim 0 in 4 over model; 1 copy" and sharding_kind(both, sizes) == "row"
    assert sharding_words(ROW, sizes) == "whole; 4 copies"
    assert sharding_kind(Spec((("data",), ())), sizes) == "replicated"


def test_devices_have_the_colour_of_their_stage(pipeline_plan, interleaved_plan):
    svg = cluster_svg(pipeline_plan)
    parse(svg)
    assert svg.count('class="device stage-0"') == svg.count('class="device stage-1"') == 4
    assert svg.count('class="host"') == 1
    assert "device 5: stage 1" in svg
    # Two stages on each device.
    assert cluster_svg(interleaved_plan).count('data-stages="0 2"') == 4


def test_devices_that_do_nothing(pipeline_plan):
    svg = cluster_svg(replace(pipeline_plan, stages=pipeline_plan.stages[:1]))
    assert svg.count("unused") == 4 and svg.count('class="device stage-0"') == 4


def test_of_very_many_devices_those_of_a_stage_are_drawn_together(pipeline_plan):
    halves = [
        replace(stage, submesh=replace(stage.submesh, first_device=2048 * number, num_hosts=256, devices_per_host=8))
        for number, stage in enumerate(pipeline_plan.stages)
    ]
    cluster = replace(pipeline_plan.cluster, num_hosts=512)
    svg = cluster_svg(replace(pipeline_plan, stages=tuple(halves), cluster=cluster))
    parse(svg)
    assert svg.count('class="device stage-0"') == svg.count('class="device stage-1"') == 256
    assert "devices 4088–4095: stage 1" in svg
    assert len(svg) < 300_000


def test_layers(pipeline_plan):
    svg = layers_svg(pipeline_plan)
    parse(svg)
    first = pipeline_plan.stages[0].layers
    assert svg.count('class="layer stage-0"') == first[1] - first[0] + 1
    assert svg.count('class="layer stage-') == pipeline_plan.num_layers
    assert "layer 0: stage 0" in svg


def test_a_bar_per_task(pipeline_plan):
    found = parse(timeline_svg(pipeline_plan))
    assert found.tags.count("rect") == len(predicted_timeline(pipeline_plan).bars)


def test_many_tasks_are_drawn_together(pipeline_plan):
    svg = timeline_svg(with_tasks_repeated(pipeline_plan, 1000))
    found = parse(svg)
    assert found.tags.count("path") == 3 and found.tags.count("rect") == 0
    assert len(svg) < 150_000


def test_stages_on_the_same_devices_share_a_row(interleaved_plan, pipeline_plan):
    svg = timeline_svg(interleaved_plan)
    assert ">stage 0, 2</text>" in svg and ">stage 1, 3</text>" in svg
    heights = [svg.split("viewBox=")[1].split('"')[1] for svg in (svg, timeline_svg(pipeline_plan))]
    assert heights[0] == heights[1]
    bars = svg.count("<rect")
    assert bars == 4 * (2 * interleaved_plan.num_microbatches + 1)


@pytest.mark.parametrize(
    ("kind", "colour"),
    [
        ("forward", "forward"),
        ("stage 3 forward", "forward"),
        ("stage 0 forward+backward", "backward"),
        ("input gradient", "backward"),
        ("weight gradient", "weight"),
        ("stage 1 update 2", "update"),
        ("stage 0 step", "backward"),
        ("SEND", "receive"),
        ("PLACE", "other"),
    ],
)
def test_colours_of_tasks(kind, colour):
    assert kind_class(kind) == colour


def test_two_timelines_have_one_axis(pipeline_plan):
    predicted = predicted_timeline(pipeline_plan)
    spans = [*predicted.bars, *predicted.transfers]
    later = [replace(bar, start_seconds=2 * bar.start_seconds, end_seconds=2 * bar.end_seconds) for bar in spans]
    svg = overlaid_svg(spans, later)
    parse(svg)
    stages = {bar.stage for bar in spans}
    assert all(f"{side} {stage}<" in svg for side in ("predicted", "measured") for stage in stages)
    boxes = [tuple(map(float, found)) for found in re.findall(r'x="([\d.]+)" y="([\d.]+)" width="([\d.]+)"', svg)]
    assert len(boxes) == 2 * len([bar for bar in spans if bar.end_seconds > bar.start_seconds])
    rows = sorted({y for _, y, _ in boxes})
    assert len(rows) == 2 * len(stages)
    # The slower step fills the axis, and the other one half of it.
    ends = [max(x + width for x, y, width in boxes if y in rows[side::2]) - 64 for side in (0, 1)]
    assert ends == pytest.approx([450, 900], abs=1.0)


def test_two_long_timelines_are_merged(pipeline_plan):
    bars = predicted_timeline(pipeline_plan).bars
    svg = overlaid_svg(bars * 400, bars * 400)
    parse(svg)
    assert "<rect" not in svg and svg.count("<path") == len({kind_class(bar.kind) for bar in bars})
