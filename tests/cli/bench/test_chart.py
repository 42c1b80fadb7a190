"""The chart is drawn, with what matters on it; without matplotlib it is a sentence."""

from importlib import util

import pytest

from alpa_lite.cli.bench import chart
from alpa_lite.cli.bench.chart import MAX_BARS, ChartError, bars, draw, rate

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.mark.skipif(util.find_spec("matplotlib") is None, reason="matplotlib is an extra")
@pytest.mark.parametrize("measured", [True, False])
def test_a_chart_is_drawn(row, auto_row, tmp_path, measured):
    rows = [auto_row(), row(), row(planner="no plan", reason="it does not fit")]
    rows = [each.measured([1.0, 2.0, 3.0]) if measured and not each.reason else each for each in rows]
    draw(rows, tmp_path / "chart.png")
    data = (tmp_path / "chart.png").read_bytes()
    assert data.startswith(PNG) and len(data) > 5000


def test_searches_and_missing_plans_have_a_place(row, auto_row):
    many = [row(planner=f"plan {i}", predicted_step_seconds=1.0 + i) for i in range(30)]
    slow = auto_row(predicted_step_seconds=99.0)
    found = bars([*many, slow, row(planner="none", reason="no")])
    assert len(found) <= MAX_BARS and slow in found and found[-1].planner == "none" and found[0].planner == "plan 0"


def test_rates_are_samples_per_second(row):
    assert rate(row(), 4.0) == 8.0 and rate(row(batch_size=None), 4.0) == 0.25 and rate(row(), None) == 0.0


def test_without_matplotlib_it_is_a_sentence(row, tmp_path, monkeypatch):
    monkeypatch.setattr(chart.util, "find_spec", lambda name: None)
    with pytest.raises(ChartError, match=r"pip install 'alpa_lite\[viz\]'"):
        draw([row()], tmp_path / "chart.png")
