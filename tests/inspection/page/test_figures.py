"""Figures for papers."""

import itertools
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

import alpa_lite as al
from alpa_lite.errors import FigureError
from alpa_lite.inspection.page.drawings import block_counts
from alpa_lite.inspection.page.elements import KINDS
from alpa_lite.inspection.page.figures import (
    COLUMN,
    memory_figure,
    plans_figure,
    sharding_figure,
    submesh_figure,
    timeline_figure,
)
from alpa_lite.inspection.text.groups import arguments_of, group_arguments
from alpa_lite.inspection.text.timeline import predicted_timeline


@pytest.mark.parametrize("draw", [timeline_figure, submesh_figure, memory_figure, sharding_figure])
@pytest.mark.parametrize("form", ["pdf", "png"])
def test_figures_are_drawn(draw, form, pipeline_plan, interleaved_plan, tmp_path):
    pytest.importorskip("matplotlib")
    for number, plan in enumerate((pipeline_plan, interleaved_plan)):
        path = tmp_path / f"{number}.{form}"
        draw(plan).savefig(path)
        assert path.stat().st_size > 3000


def bars_of(axes):
    return [path for collection in axes.collections for path in collection.get_paths()]


def test_a_bar_per_task(pipeline_plan):
    pytest.importorskip("matplotlib")
    (axes,) = timeline_figure(pipeline_plan).axes
    timeline = predicted_timeline(pipeline_plan)
    moving = [bar for bar in timeline.bars if bar.communication_seconds]
    drawn = sum(int((path.codes == path.MOVETO).sum()) for path in bars_of(axes))
    assert drawn == len(timeline.bars) + len(timeline.transfers) + len(moving)
    # In the middle of a task there is its bar, and where its stage waits there is none.
    scale, first = 1e3, next(bar for bar in timeline.bars if bar.stage == 0)
    heavy = [path for path in bars_of(axes) if path.get_extents().height > 0.5 and path.get_extents().y1 < 0.5]
    middle = scale * (first.start_seconds + first.end_seconds) / 2, 0.0
    assert sum(path.contains_point(middle) for path in heavy) == 1
    gap = next(
        (one.end_seconds + two.start_seconds) / 2
        for one, two in itertools.pairwise([bar for bar in timeline.bars if bar.stage == 0])
        if two.start_seconds > one.end_seconds + 1e-6
    )
    assert not any(path.contains_point((scale * gap, 0.0)) for path in heavy)
    ends = [float(path.get_extents().x1) for path in bars_of(axes)]
    assert axes.get_xlabel() == "ms"
    assert max(ends) == pytest.approx(1e3 * max(bar.end_seconds for bar in timeline.bars))


def test_lines_between_bars_do_not_cover_narrow_ones(pipeline_plan):
    pytest.importorskip("matplotlib")
    span = SimpleNamespace(stage=0, kind="forward", name="forward", start_seconds=0.0, end_seconds=1.0)
    for length, lined in ((0.1, True), (1e-4, False)):
        short = SimpleNamespace(**{**vars(span), "start_seconds": 2.0, "end_seconds": 2.0 + length})
        _, axes = timeline_figure(pipeline_plan, measured=[span, short]).axes
        (bars,) = axes.collections
        assert bool(len(bars.get_edgecolors())) is lined


def test_memory_is_drawn_up_to_the_predicted_peak(pipeline_plan):
    pytest.importorskip("matplotlib")
    figure = memory_figure(pipeline_plan)
    tops = [float(bars_of(axes)[0].get_extents().y1) for axes in figure.axes]
    assert figure.axes[0].get_title(loc="left").startswith("MiB per device")
    assert tops == pytest.approx([peak / 2**20 for peak in pipeline_plan.prediction.peak_bytes])


def test_devices_and_layers_are_all_drawn(pipeline_plan):
    pytest.importorskip("matplotlib")
    above, below = submesh_figure(pipeline_plan).axes
    assert len(bars_of(above)) == 8 and len(bars_of(below)) == pipeline_plan.num_layers


def numbers_of(axes):
    return [text.get_text() for text in axes.texts]


def test_devices_have_their_numbers(pipeline_plan):
    pytest.importorskip("matplotlib")
    for style in (al.figures.PAGE, COLUMN):
        above, below = submesh_figure(pipeline_plan, style=style).axes
        assert numbers_of(above) == [str(device) for device in range(8)] and numbers_of(below) == ["0", "1"]
        assert all(text.get_fontsize() >= 5 for text in above.texts)


def test_memory_lasts_as_long_as_the_step(pipeline_plan):
    pytest.importorskip("matplotlib")
    later = replace(pipeline_plan, prediction=replace(pipeline_plan.prediction, step_seconds=1.0))
    (axes, *_) = memory_figure(later).axes
    assert axes.get_xlim() == (0.0, 1000.0)
    assert float(bars_of(axes)[0].get_extents().x1) == pytest.approx(1000.0)


def test_each_kind_of_device_has_its_capacity(pipeline_plan, monkeypatch):
    pytest.importorskip("matplotlib")
    peak = max(pipeline_plan.prediction.peak_bytes)
    monkeypatch.setattr(type(pipeline_plan), "capacity_bytes", lambda self, stage: (1.5 + stage) * peak)
    lines = [axes.lines[0].get_ydata()[0] for axes in memory_figure(pipeline_plan).axes]
    assert lines == pytest.approx([1.5 * peak / 2**20, 2.5 * peak / 2**20])


def heights(axes):
    return [patch.get_height() for patch in axes.patches]


def test_plans_side_by_side(pipeline_plan, tensor_plan):
    pytest.importorskip("matplotlib")
    slow = replace(tensor_plan, prediction=replace(tensor_plan.prediction, step_seconds=2.0))
    figure = plans_figure([pipeline_plan, slow], measured=[4.0, None], names=["pipeline", "tensor"], style=COLUMN)
    (axes,) = figure.axes
    samples = pipeline_plan.batch.size
    assert heights(axes) == pytest.approx(
        [samples / pipeline_plan.prediction.step_seconds, samples / 4.0, samples / 2.0]
    )
    assert axes.get_ylabel() == "samples per second" and [t.get_text() for t in axes.get_xticklabels()] == ["8 devices"]
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["pipeline", "tensor", "predicted", "measured"]
    assert figure.get_figwidth() == COLUMN.width_inches
    # Without a batch there are only steps.
    (axes,) = plans_figure([replace(slow, batch=None), pipeline_plan]).axes
    assert axes.get_ylabel() == "steps per second" and heights(axes)[0] == pytest.approx(0.5)


def test_idle_devices_count_as_devices(pipeline_plan):
    pytest.importorskip("matplotlib")
    (axes,) = plans_figure([pipeline_plan, replace(pipeline_plan, idle_devices=8)]).axes
    assert [t.get_text() for t in axes.get_xticklabels()] == ["8 devices", "16 devices"]


@pytest.mark.parametrize("given", [{"names": ["a"]}, {"measured": [1.0]}])
def test_lists_of_other_lengths_are_refused(given, pipeline_plan):
    with pytest.raises(FigureError, match="as many names and times"):
        plans_figure([pipeline_plan, pipeline_plan], **given)


def test_blocks_of_a_layer(tensor_plan):
    pytest.importorskip("matplotlib")
    groups = [g for g in group_arguments(arguments_of(tensor_plan).plain) if "params" in g.pattern]
    sizes = tensor_plan.stages[0].mesh_shape.axis_sizes
    figure = sharding_figure(tensor_plan, "params")
    shown = [axes for axes in figure.axes if axes.get_visible()]
    assert len(shown) == min(12, len(groups)) > 2
    wanted = sorted(down * across for down, across in (block_counts(group.spec, sizes) for group in groups))
    assert sorted(len(axes.patches) for axes in shown) == wanted[-len(shown) :]
    with pytest.raises(FigureError, match="no argument with 'no such layer'"):
        sharding_figure(tensor_plan, "no such layer")


def test_text_stays_text(pipeline_plan, tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    before = dict(matplotlib.rcParams)
    figure = timeline_figure(pipeline_plan, style=COLUMN)
    for form in ("pdf", "svg"):
        figure.savefig(tmp_path / f"step.{form}")
    assert b"CIDFontType2" in (pdf := (tmp_path / "step.pdf").read_bytes()) and b"/Type3" not in pdf
    assert ">stage 0</text>" in (tmp_path / "step.svg").read_text()
    assert dict(matplotlib.rcParams) == before


def test_a_notebook_draws_a_figure(pipeline_plan):
    pytest.importorskip("matplotlib")
    svg = memory_figure(pipeline_plan)._repr_svg_()
    assert svg.startswith("<?xml") and "</svg>" in svg


def test_figures_are_public():
    assert al.figures.memory_figure is memory_figure and "figures" in dir(al)


def test_communication_has_colours_of_its_own(pipeline_plan):
    pytest.importorskip("matplotlib")
    figure = timeline_figure(pipeline_plan)
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert {"forward", "backward", "update", "transfers"} <= set(names)
    assert len({colour for colour, _ in KINDS.values()}) == len(KINDS)


def test_measured_below_predicted(pipeline_plan):
    pytest.importorskip("matplotlib")
    span = SimpleNamespace(stage=1, kind="RUN", name="stage 1 forward", start_seconds=0.0, end_seconds=0.5)
    predicted, measured = timeline_figure(pipeline_plan, measured=[span]).axes
    assert predicted.get_title(loc="left").startswith("predicted")
    assert measured.get_title(loc="left") == "measured: 500 ms" and len(bars_of(measured)) == 1


def test_without_matplotlib_a_sentence(pipeline_plan, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FigureError, match=r"pip install 'alpa_lite\[viz\]'"):
        memory_figure(pipeline_plan)
