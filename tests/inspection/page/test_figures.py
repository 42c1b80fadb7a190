"""Figures for papers."""

import sys
from types import SimpleNamespace

import pytest

from alpa_lite.errors import FigureError
from alpa_lite.inspection.page.figures import memory_figure, submesh_figure, timeline_figure
from alpa_lite.inspection.text.timeline import predicted_timeline


@pytest.mark.parametrize("draw", [timeline_figure, submesh_figure, memory_figure])
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
    bars = predicted_timeline(pipeline_plan).bars
    assert len(bars_of(axes)) == len(bars)
    ends = [float(path.get_extents().x1) for path in bars_of(axes)]
    assert axes.get_xlabel() == "ms"
    assert max(ends) == pytest.approx(1e3 * max(bar.end_seconds for bar in bars))


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
