"""What the page's script draws."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from alpa_lite.inspection.page.page_data import MAX_POINTS, TICKS, page_data, pair_data, safe_json
from alpa_lite.inspection.text.timeline import memory_over_time, predicted_timeline
from tests.inspection.long_plans import with_tasks_repeated


def tasks_of(row, data):
    """The tasks of a row, read as the script reads them: kind, stage, micro-batch, start and end in seconds."""
    found, start, tick = [], 0, data["tick_seconds"]
    for i in range(0, len(row["tasks"]), 5):
        kind, stage, microbatch, since, length = row["tasks"][i : i + 5]
        start += since
        found.append((data["kinds"][kind], stage, microbatch, start * tick, (start + length) * tick))
    return found


def test_tasks_are_those_of_the_timeline(pipeline_plan):
    data = page_data(pipeline_plan)
    timeline = predicted_timeline(pipeline_plan)
    (lane,) = data["lanes"]
    assert lane["title"] == "predicted" and lane["end"] == TICKS
    assert data["tick_seconds"] * TICKS == pytest.approx(timeline.makespan_seconds)
    rows = len(timeline.rows)
    assert [row["receives"] for row in lane["rows"]] == [False, True] * rows
    for number, row in enumerate(lane["rows"]):
        drawn = timeline.transfers if row["receives"] else timeline.bars
        bars = sorted((bar for bar in drawn if bar.row == number // 2), key=lambda bar: bar.start_seconds)
        found = tasks_of(row, data)
        assert [task[:3] for task in found] == [
            ("receive" if bar.kind == "SEND" else bar.kind, bar.stage, -1 if bar.microbatch is None else bar.microbatch)
            for bar in bars
        ]
        for task, bar in zip(found, bars, strict=True):
            precise = 2e-6 * timeline.makespan_seconds
            assert task[3:] == pytest.approx((bar.start_seconds, bar.end_seconds), abs=precise)


def span(**given):
    return SimpleNamespace(**{"stage": 0, "kind": "RUN", "name": "", "microbatch": 0, **given})


def test_measured_spans_are_a_lane_of_their_own(pipeline_plan):
    longest = 4 * predicted_timeline(pipeline_plan).makespan_seconds
    spans = [
        span(name="stage 0 forward", start_seconds=0.0, end_seconds=longest / 4),
        span(kind="PLACE", name="PLACE", start_seconds=0.0, end_seconds=0.0),
        span(kind="SEND", name="SEND", stage=1, start_seconds=longest / 4, end_seconds=longest / 2),
        span(name="stage 1 forward+backward", stage=1, start_seconds=longest / 2, end_seconds=longest),
    ]
    data = page_data(pipeline_plan, measured=spans)
    assert [lane["title"] for lane in data["lanes"]] == ["predicted", "measured"]
    assert data["lanes"][0]["end"] == pytest.approx(TICKS / 4, abs=1)
    rows = {row["name"]: tasks_of(row, data) for row in data["lanes"][1]["rows"]}
    assert list(rows) == ["stage 0", "stage 1", "to stage 1"]
    assert [task[0] for row in rows.values() for task in row] == ["forward", "backward", "receive"]


def test_memory_is_that_of_the_tracks(pipeline_plan):
    data = page_data(pipeline_plan)
    for shown, track in zip(data["memory"], memory_over_time(pipeline_plan), strict=True):
        levels = shown["points"][1::2]
        assert max(levels) * shown["full_bytes"] / shown["levels"] == pytest.approx(track.peak_bytes, rel=1e-3)
        assert sum(shown["points"][::2]) * data["tick_seconds"] == pytest.approx(track.seconds[-1], rel=1e-4)
        step = pipeline_plan.prediction.step_seconds
        assert shown["end"] * data["tick_seconds"] == pytest.approx(step, rel=1e-4)
        assert shown["capacity_bytes"] == pipeline_plan.cluster.device.usable_bytes


def test_long_lines_are_thinned_and_keep_their_peak(pipeline_plan):
    long = with_tasks_repeated(pipeline_plan, 1000)
    data = page_data(long)
    for shown, track in zip(data["memory"], memory_over_time(long), strict=True):
        assert len(track.bytes) > 2 * MAX_POINTS
        assert len(shown["points"]) <= 2 * MAX_POINTS + 2
        assert max(shown["points"][1::2]) * shown["full_bytes"] / shown["levels"] == pytest.approx(
            track.peak_bytes, rel=1e-3
        )
        assert all(since >= 0 for since in shown["points"][::2])
    assert len(safe_json(data)) < 500_000


def test_no_name_ends_the_script():
    data = {"name": "</script><!-- & \u2028"}
    text = safe_json(data)
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == data


def test_two_plans_are_on_one_clock(pipeline_plan, tensor_plan):
    slower = replace(tensor_plan, prediction=replace(tensor_plan.prediction, step_seconds=1.0))
    data = pair_data(pipeline_plan, slower)
    first, second = data["lanes"]
    assert (first["title"], second["title"]) == (f"before: {pipeline_plan.name}", f"after: {tensor_plan.name}")
    step = pipeline_plan.prediction.step_seconds
    assert first["end"] * data["tick_seconds"] == pytest.approx(step, rel=1e-4) and second["end"] == TICKS
    assert second["seconds"] == "1.00 s"
    assert [track["name"] for track in data["memory"]] == ["before, stage 0", "before, stage 1", "after, stage 0"]
    # Tracks of both plans are in one list, by which their tasks refer to them.
    used = {number for lane in data["lanes"] for row in lane["rows"] for *_, found in row["inside"] for number in found}
    assert used == set(range(len(data["tracks"])))
    assert all(label < len(data["labels"]) for track in data["tracks"] for label in track[::3])


def test_collectives_of_a_plan_without_its_step_have_a_share(tensor_plan):
    data = page_data(replace(tensor_plan, request=None))
    (row,) = data["lanes"][0]["rows"]
    bars = {bar.kind: bar for bar in predicted_timeline(tensor_plan).bars}
    assert data["tracks"] == [] and row["inside"]
    for kind, stage, share, tracks in row["inside"]:
        bar = bars[data["kinds"][kind]]
        assert stage == 0 and tracks == []
        assert share == pytest.approx(bar.communication_seconds / bar.seconds, abs=1e-4) and share > 0
