"""The demo, small: it plans, trains, compares, and all plans agree."""

import io
import json
import math

import pytest
from rich.console import Console

from alpa_lite.cli import demo
from alpa_lite.cli.command import enveloped
from alpa_lite.cli.models.decoders import GPT
from alpa_lite.planners import DataParallel, Pipeline
from tests.cli.schema import documented


@pytest.fixture(scope="module")
def shown(devices):
    """Result and printed text of a small demo."""
    config = demo.DemoConfig(
        described=GPT(num_layers=2, hidden=32, num_heads=2, seq_len=16),
        model=GPT(num_layers=1, hidden=16, num_heads=2, seq_len=8),
        batch_size=32,
        num_steps=6,
        num_rounds=2,
        manual=(DataParallel(), Pipeline(pipeline=2)),
    )
    output = io.StringIO()
    result = demo.run(config, Console(file=output, width=120))
    return result, output.getvalue()


def test_the_first_plan_is_for_gpus_that_are_not_there(shown):
    # So small a model leaves most of them idle.
    cluster = shown[0].described.cluster
    assert "A10G" in cluster.device.name and not cluster.shared_processor
    assert "g5.12xlarge" in shown[1][: shown[1].index("2. The same step")]


def test_training_learns(shown):
    losses = shown[0].training.losses
    assert len(losses) == 6
    assert all(map(math.isfinite, losses))
    assert losses[-1] < losses[0] < 1.2 * math.log(256)


def test_all_plans_compute_the_same(shown):
    assert shown[0].max_loss_difference < 1e-4
    assert [row.name for row in shown[0].comparison[1:]] == [
        "data parallel",
        "2-stage pipeline",
        "jax.jit on one device",
    ]


def test_predictions_stand_beside_measurements(shown):
    rows = shown[0].comparison
    assert all(row.measured_seconds > 0 for row in rows)
    assert all(row.predicted_seconds > 0 for row in rows[:-1])
    assert rows[-1].predicted_seconds is None
    assert all(rows[0].predicted_seconds <= row.predicted_seconds for row in rows[1:-1])


def test_it_prints_plainly(shown):
    text = shown[1]
    for words in (
        "1. A plan for eight GPUs, without GPUs",
        "2. The same step on this machine",
        "3. Training",
        "4. The same steps",
        "Stages",
        "share this machine's cores",
        "(chosen)",
    ):
        assert words in text


def test_result_is_json(shown):
    found = json.loads(json.dumps(shown[0].to_json()))
    assert found["max_loss_difference"] == shown[0].max_loss_difference
    assert documented("demo", enveloped("demo", found))


def test_wrong_sizes_are_a_sentence(capsys):
    assert demo.main(["--hidden", "30", "--devices", "0"]) == 1
    assert "multiple of num_heads" in capsys.readouterr().err


def test_virtual_devices_are_asked_for_before_jax_starts(monkeypatch):
    started = []
    monkeypatch.setattr(demo, "run_module", lambda name, words, environment: started.append((name, words, environment)))
    demo.main(["--steps", "5", "--devices", "4"])
    ((name, words, environment),) = started
    assert (name, words) == ("alpa_lite.cli.demo", ["--steps", "5", "--devices", "4", "--devices", "0"])
    assert "device_count=4" in environment["XLA_FLAGS"] and environment["NPROC"] == "16"


@pytest.mark.slow
def test_the_described_model_is_planned_as_a_pipeline(devices):
    """What the tool is for: a plan that no line of a user gives."""
    plan = demo.plan_described(demo.GPT_DESCRIBED, demo.DemoConfig(), Console(file=io.StringIO()))
    assert len(plan.stages) > 1 and plan.num_microbatches > 1 and plan.idle_devices == 0
    assert all(seconds > plan.prediction.step_seconds for name, seconds in plan.alternatives if "auto" not in name)
