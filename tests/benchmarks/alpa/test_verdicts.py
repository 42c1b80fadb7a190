"""What is said of prices."""

from __future__ import annotations

from benchmarks.alpa.price import Price
from benchmarks.alpa.verdicts import verdicts


def price(system: str, seconds: float | None, **more) -> Price:
    known = {"case": "c", "plan": "p", "num_microbatches": 1, "planning_seconds": 0.0, "global_batch": 10}
    return Price(system=system, seconds=seconds, **{**known, **more})


def said(*prices: Price) -> dict[str, bool]:
    return {claim.text: claim.holds for claim in verdicts(prices)}


def test_ours_is_held_against_the_best_of_each_kind():
    found = said(price("alpa_lite", 2.0), price("Alpa", 2.0), price("Megatron-LM", 3.0), price("best manual", 1.9))
    assert found == {
        "c: our plan is priced no worse than Alpa's": True,
        "c: our plan is priced no worse than the best manual plan": False,
    }


def test_smaller_batches_are_compared_by_sample():
    assert all(said(price("alpa_lite", 2.0), price("Megatron-LM", 0.3, global_batch=1)).values())


def test_programs_that_compute_less_are_no_rivals():
    ours, theirs = price("alpa_lite", 2.0, flops_per_sample=4.0), price("intra-op only", 1.0, flops_per_sample=3.0)
    assert said(ours, theirs) == {}
    assert said(ours, price("intra-op only", 1.0, flops_per_sample=4.0)) != {}


def test_no_plan_of_ours_is_worse_than_any():
    assert not any(said(price("alpa_lite", None), price("Alpa", 1e9)).values())


def test_predictions_are_held_against_measurements():
    assert said(price("Alpa", 1.0, as_run_tflops=1.1, measured_tflops=1.0)) == {
        "c, Alpa: predicted within 15% of what was measured": True
    }
    assert not any(said(price("Alpa", 1.0, as_run_tflops=1.2, measured_tflops=1.0)).values())
    assert not any(said(price("Alpa", None, measured_tflops=1.0)).values())
