"""Predicted timelines and traces."""

import json
from itertools import pairwise
from types import SimpleNamespace

import pytest

from alpa_lite.inspection.text.timeline import chrome_trace, overlaid, predicted_timeline
from alpa_lite.schedule import OneFOneB, simulate


def test_makespan_is_the_prediction(tensor_plan, pipeline_plan):
    for plan in (tensor_plan, pipeline_plan):
        timeline = predicted_timeline(plan)
        assert timeline.makespan_seconds == pytest.approx(plan.prediction.step_seconds, rel=1e-9)
        assert timeline.bubble_fraction == pytest.approx(plan.prediction.bubble_fraction)


def test_every_task_is_there_once(pipeline_plan):
    timeline = predicted_timeline(pipeline_plan)
    count = pipeline_plan.num_microbatches
    for stage in range(2):
        kinds = [bar.kind for bar in timeline.bars if bar.stage == stage]
        assert (kinds.count("forward"), kinds.count("backward"), kinds.count("update")) == (count, count, 1)
    text = str(timeline)
    assert "predicted step" in text and "busy ms" in text


def test_stages_on_the_same_devices_share_a_row(interleaved_plan):
    timeline = predicted_timeline(interleaved_plan)
    assert timeline.makespan_seconds == pytest.approx(interleaved_plan.prediction.step_seconds, rel=0.02)
    assert timeline.bubble_fraction == pytest.approx(interleaved_plan.prediction.bubble_fraction, rel=0.1)
    assert timeline.rows == ((0, 2), (1, 3))
    for row in range(2):
        bars = sorted((bar for bar in timeline.bars if bar.row == row), key=lambda bar: bar.start_seconds)
        assert {bar.stage for bar in bars} == set(timeline.rows[row])
        # One after the other, the updates too.
        assert all(a.end_seconds <= b.start_seconds + 1e-12 for a, b in pairwise(bars))
    assert sum(bar.kind == "update" for bar in timeline.bars) == 4
    assert " 0, 2 " in str(timeline) and " 1, 3 " in str(timeline)
    trace = chrome_trace(timeline)["traceEvents"]
    names = {event["args"]["name"] for event in trace if event["ph"] == "M"}
    assert names == {"step", "stage 0, 2", "stage 1, 3", "stage 0, 2 receives", "stage 1, 3 receives"}
    tasks = {(event["tid"], event["args"]["stage"]) for event in trace if event["ph"] == "X" and event["cat"] != "SEND"}
    assert tasks == {(1, 0), (1, 2), (2, 1), (2, 3)}


def test_trace_of_a_plan(pipeline_plan):
    trace = json.loads(json.dumps(chrome_trace(predicted_timeline(pipeline_plan), "predicted")))
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    names = {event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"}
    assert names == {"predicted", "stage 0", "stage 1", "stage 0 receives", "stage 1 receives"}
    timeline = predicted_timeline(pipeline_plan)
    assert len(spans) == len(timeline.bars) + len(timeline.transfers)
    assert all(event["dur"] > 0 and event["ts"] >= 0 for event in spans)


def test_transfers_are_those_of_the_simulated_program(planned):
    plan = planned.last_plan
    sends = [s for s in planned.lower().simulate().times if s.kind == "SEND" and s.end_seconds > s.start_seconds]
    transfers = predicted_timeline(plan).transfers
    assert sends and sum(bar.seconds for bar in transfers) == pytest.approx(
        sum(span.end_seconds - span.start_seconds for span in sends)
    )
    assert sum(plan.prediction.transfers.bytes) == pytest.approx(
        sum(i.bytes for i in planned.lower().program.instructions if i.kind == "SEND")
    )
    for field in ("start_seconds", "end_seconds"):
        assert {getattr(bar, field) for bar in transfers} <= {getattr(span, field) for span in sends}
    # The task that reads what arrives does not begin before.
    first = min(bar.start_seconds for bar in predicted_timeline(plan).bars if bar.stage == 1)
    assert first >= min(bar.end_seconds for bar in transfers if bar.stage == 1)


def test_bars_have_the_collectives_of_their_phase(tensor_plan, interleaved_plan):
    for plan in (tensor_plan, interleaved_plan):
        bars = predicted_timeline(plan).bars
        assert all(0 <= bar.communication_seconds <= bar.seconds for bar in bars)
        for stage in range(len(plan.stages)):
            uses = [u for u in plan.prediction.collectives if u.stage == stage and u.phase == "forward"]
            mine = [bar for bar in bars if bar.stage == stage and bar.kind == "forward"]
            whole = sum(u.seconds * u.count for u in uses)
            found = sum(bar.communication_seconds for bar in mine)
            assert found == pytest.approx(min(whole, sum(bar.seconds for bar in mine)))


def test_trace_of_a_simulated_schedule():
    timeline = simulate(OneFOneB().tasks(2, 3), [1.0, 1.0], [2.0, 2.0])
    spans = [event for event in chrome_trace(timeline)["traceEvents"] if event["ph"] == "X"]
    assert len(spans) == 12
    assert max(event["ts"] + event["dur"] for event in spans) == pytest.approx(timeline.makespan_seconds * 1e6)
    assert {event["cat"] for event in spans} == {"forward", "backward"}


def test_trace_of_measured_spans():
    span = SimpleNamespace(
        stage=1, kind="RUN", name="stage 1 forward", microbatch=2, start_seconds=1.0, end_seconds=1.5
    )
    event = chrome_trace([span], "measured")["traceEvents"][-1]
    assert (event["name"], event["ts"], event["dur"], event["tid"]) == ("stage 1 forward 2", 1e6, 5e5, 2)


def check_trace(trace):
    """What Perfetto and chrome://tracing ask for: rows with positive numbers, all named, spans one after another."""
    events = json.loads(json.dumps(trace))["traceEvents"]
    named = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    groups = {e["pid"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    rows = {}
    for event in events:
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert 0 < event["pid"] < 2**31 and 0 < event["tid"] < 2**31
        assert event["ph"] in ("M", "X") and event["name"]
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0
            rows.setdefault((event["pid"], event["tid"]), []).append(event)
    assert set(rows) <= named and {pid for pid, _ in rows} == groups
    for found in rows.values():
        ordered = sorted(found, key=lambda event: (event["ts"], event["ts"] + event["dur"]))
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-6 for a, b in pairwise(ordered))
    return rows


def test_traces_are_valid(tensor_plan, pipeline_plan, interleaved_plan):
    for plan in (tensor_plan, pipeline_plan, interleaved_plan):
        rows = check_trace(chrome_trace(predicted_timeline(plan)))
        # A row for the tasks of each submesh, and one for what it receives.
        assert len(rows) == len(plan.stages_together) * (2 if len(plan.stages) > 1 else 1)


def test_spans_that_overlap_get_further_rows():
    def send(start, end):
        return SimpleNamespace(stage=1, kind="SEND", name="SEND", microbatch=0, start_seconds=start, end_seconds=end)

    spans = [send(0.0, 2.0), send(1.0, 3.0), send(1.5, 1.6), send(2.0, 4.0), send(3.5, 5.0)]
    trace = overlaid(spans, spans)
    rows = check_trace(trace)
    assert sorted(len(found) for (pid, _), found in rows.items() if pid == 2) == [1, 2, 2]
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"}
    assert names == {"predicted", "measured", "stage 1 receives"}
