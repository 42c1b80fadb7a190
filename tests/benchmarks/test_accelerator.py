"""The benchmark of one accelerator, with small programs on a CPU: plans give the numbers of `jax.jit`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from alpa_lite.errors import CheckError
from alpa_lite.runtime.check_report import CheckedLeaf, CheckReport
from benchmarks import accelerator, program_on_device, zoo_on_device
from benchmarks.accelerator import Session, Task
from benchmarks.accelerator_programs import NUM_PREDICTED, cases
from cost_models.catalogue import known_clusters

TINY = {case.name: case for case in cases(tiny=True)}
KEPT = sorted(accelerator.RESULTS.glob("*.json"))
H100 = accelerator.one_device("dgx-h100")


def test_a_program_is_measured(devices: Any) -> None:
    turns: list[int] = []
    row = program_on_device.measured(TINY["MLP, bf16"], H100, lambda: turns.append(1))
    assert turns == [1] and row.equal and row.predicted_bytes > 0 and row.xla_bytes > 0
    assert 0 < row.plan_seconds and 0 < row.jit_seconds
    assert row == program_on_device.Row(**json.loads(json.dumps(asdict(row))))


def test_differences_of_states() -> None:
    a, b = {"w": jnp.array([3.0, 4.0]), "n": jnp.array([1])}, {"w": jnp.array([3.0, 4.5]), "n": jnp.array([1])}
    whole, largest = program_on_device.difference(a, b, 0.5)
    assert float(whole) == pytest.approx(0.5 / (3**2 + 4.5**2 + 1) ** 0.5)
    assert float(largest) == pytest.approx(0.5 / (4.5 + 0.5))


def test_a_pipeline_whose_stages_share_a_device_is_checked(devices: Any) -> None:
    found = zoo_on_device.checked("mlp-tiny", "pipeline", H100)
    assert found.equal and found.num_stages == 2 and 0 <= found.share < 1 and not found.worst


def test_a_difference_is_a_result(devices: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    leaf = CheckedLeaf(
        name="loss",
        shape=(),
        dtype="float32",
        error=1.0,
        rounding_steps=64.0,
        allowed_steps=32.0,
        limit=0.5,
        ok=False,
    )

    def differs(compiled: Any, *_: Any) -> None:
        raise CheckError("differs", CheckReport(function="step", plan=compiled.plan, leaves=(leaf,)))

    monkeypatch.setattr(zoo_on_device, "check_compiled", differs)
    found = zoo_on_device.checked("mlp-tiny", "one device", H100)
    assert not found.equal and found.share == 2.0 and found.worst == leaf.sentence


@pytest.mark.parametrize(
    ("kind", "cluster"),
    [("NVIDIA H100 80GB HBM3", "dgx-h100"), ("NVIDIA A100-SXM4-40GB", "dgx-a100-40gb"), ("some chip", None)],
)
def test_the_cluster_of_a_device(kind: str, cluster: str | None) -> None:
    assert accelerator.cluster_with(kind) == cluster


def test_every_shipped_cluster_has_one_device() -> None:
    assert all(accelerator.one_device(name).num_devices == 1 for name in known_clusters())


def test_programs_are_of_every_kind_and_small_ones_have_the_same_names() -> None:
    names = [case.name for case in cases(tiny=False)]
    assert len({*names}) == len(names) and {*TINY} < {*names}
    assert names[:NUM_PREDICTED] == [*TINY][:NUM_PREDICTED]
    for kind in ("GPT", "Llama", "experts", "ViT", "ResNet", "U-Net", "LSTM", "T5", "bf16", "fp32"):
        assert any(kind in name for name in names[:NUM_PREDICTED]), kind


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_kept_figures_are_shown(path: Path) -> None:
    found = json.loads(path.read_text())
    assert path.name == accelerator.file_name(found["device"])
    assert len(accelerator.rendered(found)) == 3
    assert found["device"] in accelerator.verdict({**found, "summary": accelerator.summary(found)})


def test_the_summary_is_of_the_programs_that_are_judged() -> None:
    row = json.loads(KEPT[0].read_text())["rows"][0]
    known = {"predicted_seconds": 1.1, "plan_seconds": 1.0, "ratio": 1.02, "predicted_bytes": 99.0, "xla_bytes": 100.0}
    rows = [
        {**row, **known, "name": "T5, bf16"},
        {**row, **known, "name": "U-Net, fp32", "predicted_seconds": 0.7, "equal": False},
        {**row, **known, "name": "MLP, bf16", "predicted_seconds": 9.0},
    ]
    checks = [{"equal": True}, {"equal": False}]
    found = accelerator.summary({"rows": rows, "checks": checks, "skipped": [{}]})
    assert (found["num_programs"], found["num_equal"]) == (2, 1)
    assert (found["num_checks"], found["num_checks_equal"], found["num_skipped"]) == (2, 1, 1)
    assert found["median_time_error"] == pytest.approx(0.2)
    assert found["median_bytes_error"] == pytest.approx(0.01)
    assert found["median_overhead"] == pytest.approx(0.02)
    assert accelerator.summary({"rows": [], "checks": [], "skipped": []})["median_time_error"] is None


class Pretended:
    """A worker whose results are its arguments; "slow" ends the session's time, "broken" fails after its results."""

    started: list[str]

    def __init__(self, words: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self.words = words
        self.started.append(words[0])

    def run(self, deadline: float) -> Iterator[dict[str, Any]]:
        for word in self.words:
            if word == "slow":
                time.sleep(0.05)
            yield {"error": "line\nit broke"} if word == "broken" else {"result": word}

    def end(self) -> None:
        pass


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> type[Pretended]:
    Pretended.started = []
    monkeypatch.setattr(accelerator, "Worker", Pretended)
    return Pretended


def session(seconds: float, **options: Any) -> Session:
    return Session(seconds=seconds, num_ahead=2, environment={}, keep=lambda found: None, **options)


def test_results_are_kept_and_what_is_missing_is_said(
    pretended: type[Pretended], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    running = session(60.0)
    running.run(
        [
            Task("checks", ("a", "broken"), ("check a", "check b", "check c")),
            Task("rows", ("program",), ("p",)),
            Task("calibration", ("rates",), ("calibration",)),
        ],
        tmp_path,
    )
    assert running.found["checks"] == [{"result": "a"}] and running.found["rows"] == [{"result": "program"}]
    assert running.found["calibration"] == {"result": "rates"}
    assert [each["name"] for each in running.found["skipped"]] == ["check b", "check c"]
    assert "check b: skipped, it broke" in capsys.readouterr().out


def test_what_has_no_time_left_is_skipped_and_not_started(pretended: type[Pretended], tmp_path: Path) -> None:
    running = session(0.04)
    running.run([Task("rows", (word,), (word,)) for word in ("slow", "ahead", "late", "later")], tmp_path)
    assert running.found["rows"] == [{"result": "slow"}]
    assert [each["name"] for each in running.found["skipped"]] == ["ahead", "late", "later"]
    assert all("no time was left" in each["why"] for each in running.found["skipped"])
    assert pretended.started == ["slow", "ahead"]


def test_a_share_of_the_time_is_for_checks(pretended: type[Pretended], tmp_path: Path) -> None:
    running = session(0.1)
    tasks = [Task("checks", (word,), (word,)) for word in ("slow", "a")]
    running.run(tasks, tmp_path, share=0.4)
    running.run([Task("rows", ("b",), ("b",))], tmp_path)
    assert [each["name"] for each in running.found["skipped"]] == ["a"] and running.found["rows"] == [{"result": "b"}]


def test_checks_are_dealt_out() -> None:
    tasks = accelerator.check_tasks("dgx-h100", ["a", "b", "c"], 2)
    assert [task.words[1] for task in tasks] == ["a,c", "b"]
    assert tasks[1].names == ("check of b, one device", "check of b, pipeline")
    assert len(accelerator.check_tasks("dgx-h100", ["a"], 5)) == 1


def test_a_process_that_fails_is_a_row_with_its_error(tmp_path: Path) -> None:
    worker = accelerator.Worker(["--case", "no such program", "--cluster", "dgx-h100", "--tiny"], tmp_path / "log")
    (found,) = worker.run(time.monotonic() + 120)
    worker.end()
    assert "no such program" in found["error"]


def run_here(out: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> dict[str, Any]:
    """Run the command on this machine's CPU; nothing is skipped but what a CPU cannot say."""
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    code = accelerator.main(["--out", str(out), "--platform", "cpu", "--seconds", "3600", "--ahead", "2", *words])
    assert code == 0, "a result differs from that of jax.jit"
    found = json.loads((out / "cpu.json").read_text())
    assert [each["name"] for each in found["skipped"]] == ["peak bytes of the device"]
    assert not found["data_sheet"] and "cluster" in found["calibration"]
    assert all(row["predicted_seconds"] == row["calibrated_seconds"] > 0 for row in found["rows"])
    return found


@pytest.mark.slow
def test_the_command_runs_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run_here(tmp_path, monkeypatch, "--only", "mlp", "Llama 0.5B, 4")
    assert [(check["model"], check["num_stages"]) for check in found["checks"]] == [("mlp-tiny", 1), ("mlp-tiny", 2)]
    assert [row["name"] for row in found["rows"]] == ["Llama 0.5B, 4 micro-batches"]


@pytest.mark.long
def test_the_whole_command_runs_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run_here(tmp_path, monkeypatch)
    assert [row["name"] for row in found["rows"]] == [*TINY][:NUM_PREDICTED]
    assert len(found["checks"]) == len(zoo_on_device.SMALL) * len(zoo_on_device.PLANS)
    assert found["summary"]["num_equal"] == NUM_PREDICTED
