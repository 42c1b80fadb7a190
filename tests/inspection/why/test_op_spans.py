"""The ops inside of tasks."""

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import alpa_lite as al
from alpa_lite.inspection.text.timeline import predicted_timeline
from alpa_lite.inspection.why.op_spans import MAX_TRIPS, op_spans


def test_every_kind_of_bar_has_its_ops(tensor_plan, pipeline_plan, interleaved_plan):
    for plan in (tensor_plan, pipeline_plan, interleaved_plan):
        tracks = op_spans(plan)
        assert set(tracks) == {(bar.stage, bar.kind) for bar in predicted_timeline(plan).bars}
        for spans in (spans for listed in tracks.values() for spans in listed):
            assert all(0 <= span.start <= span.end <= 1 + 1e-9 for span in spans)
            kernels = sorted((s.start, s.end) for s in spans if not s.label.collective)
            # One stream: a kernel begins when the one before has ended.
            assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(kernels))
        forward = tracks[0, "forward"][0]
        products = [span for span in forward if span.label.what == "dot_general"]
        assert products and all("sequential_networks.py:" in span.label.source for span in products)
        assert all(" as [" in span.label.array for span in products)


def test_collectives_take_as_long_as_the_plan_says(tensor_plan):
    bars = {bar.kind: bar for bar in predicted_timeline(tensor_plan).bars}
    for phase in ("forward", "backward"):
        (spans,) = op_spans(tensor_plan)[0, phase]
        found = sum(span.end - span.start for span in spans if span.label.collective) * bars[phase].seconds
        uses = [use for use in tensor_plan.prediction.collectives if use.phase == phase]
        # Bars of one task share its time by the costs of their passes; contention makes collectives longer.
        assert uses and found == pytest.approx(sum(use.seconds * use.count for use in uses), rel=0.35)


@pytest.mark.parametrize("trips", [4, MAX_TRIPS + 1])
def test_loops_are_drawn_trip_by_trip(trips):
    def step(w, x):
        def body(h, _):
            return jnp.tanh(h @ w), None

        return jax.lax.scan(body, x, length=trips)[0].sum()

    shape = jax.ShapeDtypeStruct
    arguments = shape((512, 512), jnp.float32), shape((64, 512), jnp.float32)
    plan = al.plan(step, *arguments, cluster="p3.16xlarge", planner=al.planners.Hybrid(data=8), num_microbatches=1)
    listed = [span for tracks in op_spans(plan).values() for spans in tracks for span in spans]
    products = sorted(s.start for s in listed if s.label.what == "dot_general")
    loops = [span for span in listed if span.label.what.startswith("scan")]
    if trips > MAX_TRIPS:
        assert not products and [span.label.what for span in loops] == [f"scan, {trips} trips"]
    else:
        assert len(products) == trips and not loops
        gaps = [b - a for a, b in itertools.pairwise(products)]
        assert gaps == pytest.approx([gaps[0]] * len(gaps)) and gaps[0] > 0.5 * (products[-1] - products[0]) / trips


def test_a_plan_without_its_step_has_no_ops(tensor_plan):
    assert op_spans(replace(tensor_plan, request=None)) == {}
