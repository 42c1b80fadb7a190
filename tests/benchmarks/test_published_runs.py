"""The benchmark of published runs, on invented ones: from the table to predictions, errors and JSON."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import published_runs
from benchmarks.published.parameters import parameters
from benchmarks.published.predict import MICROBATCHES, Predictor
from benchmarks.published.row import RowError
from benchmarks.published_runs import all_predictions, main, predict_rows
from tests.benchmarks.published.runs import PLAIN, cells, row

SMALL = {"hidden": 64, "heads": 4, "ffn_hidden": 256, "layers": 2, "vocab": 256}


def small(**changes: Any) -> dict[str, str]:
    return cells(**{**SMALL, **changes})


RUNS = [
    small(id="a-dp"),
    small(id="a-tp", tp=2, act_recompute="full"),
    small(id="b-new", group="b", measured_step_time_s="", hardware="H100-SXM-80GB"),
    small(id="b-odd", group="b", tp=3),
]


def in_this_process(rows: Sequence[Mapping[str, str]], ablation: str, num_processes: int) -> Any:
    assert num_processes >= 1
    return iter(predict_rows(rows, ablation))


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The runs as a file; predicted in this process, which has JAX already."""
    monkeypatch.setattr(published_runs, "all_predictions", in_this_process)
    return write(tmp_path / "runs.csv", RUNS)


def write(path: Path, runs: Sequence[Mapping[str, str]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(PLAIN))
        writer.writeheader()
        writer.writerows(runs)
    return path


def test_experts_lie_on_the_devices_that_the_table_gives_them() -> None:
    """And not on the tensor devices, where that would be cheaper."""
    run = Predictor().predict(
        row(**SMALL, family="moe", experts_topk="8/2", n_devices=8, tp=2, ep=4, zero_fsdp="distributed optimizer")
    )
    specs = {path: str(spec) for path, spec in run.plan.stages[0].specs.items() if "/experts/w_" in path}
    held = [spec for path, spec in specs.items() if "opt_state" not in path and "router" not in path]
    assert len(held) == 2 and all("expert" in spec for spec in held)


def test_the_host_issues_the_products_of_each_expert() -> None:
    """Two products forward, and two for each backward, in each layer."""
    predictor = Predictor(change_backend=lambda backend: replace(backend, call_seconds=0.01))
    small = {**SMALL, "n_devices": 1, "global_batch": 4, "micro_batch": 4, "family": "moe"}
    four, eight = (predictor.predict(row(**small, experts_topk=text)).seconds for text in ("4/2", "8/2"))
    assert eight - four == pytest.approx((8 - 4) * 6 * SMALL["layers"] * 0.01)


def test_predictions_are_written_row_by_row(table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--runs", str(table), "--out", str(tmp_path / "out.json")])
    found = json.loads((tmp_path / "out.json").read_text())
    means = {"error", "left_out_error", "covered", "left_out_covered"}
    assert set(found) == {"rows", "groups", "parameters", *means}
    rows = {entry["id"]: entry for entry in found["rows"]}
    assert list(rows) == ["a-dp", "a-tp", "b-new", "b-odd"]
    common = {"id", "predicted_step_seconds", "likely_step_seconds", "measured_step_seconds", "error", "breakdown"}
    assert all(set(entry) - {"reason"} == common for entry in rows.values())
    for name in ("a-dp", "a-tp"):
        entry = rows[name]
        assert entry["error"] == pytest.approx(entry["predicted_step_seconds"] / 0.5 - 1)
        assert entry["breakdown"]["num_microbatches"] == (2 if name == "a-dp" else 4)
        parts = entry["breakdown"]
        assert 0 < parts["forward_seconds"] < parts["backward_seconds"] < entry["predicted_step_seconds"]
    assert rows["b-new"]["predicted_step_seconds"] > 0 and rows["b-new"]["error"] is None
    assert rows["b-odd"]["predicted_step_seconds"] is None
    assert "2 data × 3 tensor = 6 devices were asked for" in rows["b-odd"]["reason"]
    groups = {group["group"]: group for group in found["groups"]}
    assert groups["b"]["num_failed"] == 1 and groups["b"]["error"] is None
    assert found["error"] == pytest.approx(groups["tiny"]["error"])
    printed = capsys.readouterr().out
    assert "b-odd: " in printed and "mean of groups" in printed
    assert f"{len(parameters())} numbers were set on measured steps" in printed.replace("\n", " ")
    low, high = rows["a-dp"]["likely_step_seconds"]
    assert low < rows["a-dp"]["predicted_step_seconds"] < high


def test_tables_are_scored_together(table: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "more.csv", [small(id="c", group="c")])
    main(["--runs", str(table), str(other), "--out", str(tmp_path / "out.json"), "--only", "a-dp", "c"])
    found = json.loads((tmp_path / "out.json").read_text())
    assert [group["group"] for group in found["groups"]] == ["tiny", "c"]
    # Each group is the other's only one of its hardware: the same run, measured alike, has no error without it.
    assert found["left_out_error"] == pytest.approx(0.0) and found["error"] > 0.1


def test_groups_and_starts_of_ids_can_be_picked(table: Path, tmp_path: Path) -> None:
    main(["--runs", str(table), "--out", str(tmp_path / "out.json"), "--only", "b", "a-t"])
    found = json.loads((tmp_path / "out.json").read_text())
    assert [entry["id"] for entry in found["rows"]] == ["a-tp", "b-new", "b-odd"]


def test_ablations_are_listed_and_leave_the_file_alone(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["--runs", str(table), "--out", str(tmp_path / "out.json"), "--only", "a-dp", "--ablate"])
    main(["--runs", str(table), "--out", str(tmp_path / "plain.json"), "--only", "a-dp"])
    assert (tmp_path / "out.json").read_text() == (tmp_path / "plain.json").read_text()
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("fusion", "overlap", "efficiency curve", "latency"))


def test_rows_are_predicted_in_processes_of_their_own() -> None:
    found = list(all_predictions([small(id="one"), small(id="two", tp=3)], "nothing", 1))
    assert [p.outcome.id for p in found] == ["one", "two"]
    assert found[0].outcome.predicted_seconds and not found[1].outcome.predicted_seconds


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hardware": "Gaudi2"}, "no such device"),
        ({"kv_heads": 3}, "multiple of num_kv_heads"),
        ({"precision": "int4"}, "precision is 'int4'"),
        ({"seq_len": ""}, "seq_len is ''"),
        ({"micro_batch": "", "global_batch": 12}, "8 data-parallel replicas do not divide it"),
        ({"measured_step_time_s": "fast"}, "measured_step_time_s is 'fast'"),
        ({"n_devices": 12}, "devices were asked for"),
        ({"heads": ""}, "heads is ''"),
    ],
)
def test_what_cannot_be_built_is_a_reason_and_no_crash(changes: dict[str, Any], reason: str) -> None:
    ((prediction,),) = [predict_rows([small(**changes)], "nothing")]
    assert prediction.outcome.predicted_seconds is None and prediction.breakdown == {}
    assert reason in prediction.outcome.reason


def test_predictions_do_not_know_the_measurement() -> None:
    runs = [small(id=str(text), measured_step_time_s=text) for text in ("", 0.001, 1000)]
    seconds = {p.outcome.predicted_seconds for p in predict_rows(runs, "nothing")}
    assert len(seconds) == 1


def test_micro_batches_that_nobody_states_are_the_fastest_of_a_few() -> None:
    predictor = Predictor()
    chosen = predictor.predict(row(**SMALL, micro_batch=""))
    tried = [predictor.predict(row(**SMALL, micro_batch=size)).seconds for size in MICROBATCHES]
    assert chosen.seconds == min(tried)


def test_steps_are_traced_once_for_rows_that_differ_in_devices_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.published import predict

    traced: list[str] = []
    original = predict.training_of
    monkeypatch.setattr(predict, "training_of", lambda r, **k: traced.append(r.id) or original(r, **k))
    predictor = Predictor()
    seconds = [predictor.predict(row(**SMALL, id=str(n), n_devices=n)).seconds for n in (4, 8)]
    assert traced == ["4"] and seconds[0] > seconds[1]
    predictor.predict(row(**SMALL, id="full", act_recompute="full"))
    assert traced == ["4", "full"]


@pytest.mark.parametrize(
    "changes",
    [
        {"family": "llama", "kv_heads": 2, "cp": 2, "zero_fsdp": "FSDP2 4"},
        {"family": "bert", "precision": "fp16"},
        {"family": "t5", "layers": "2+2", "seq_len": "32+16"},
        {"family": "moe", "experts_topk": "4/2 (every 2nd layer, group 64)", "ep": 2},
        {"family": "gpt", "pp": 2, "interleave_v": 1, "micro_batch": 2},
        {"family": "wresnet", "hidden": "base channels 32, width factor 2", "seq_len": "image 224x224", "layers": 50},
    ],
    ids=lambda changes: changes["family"],
)
def test_every_family_is_predicted(changes: dict[str, Any]) -> None:
    run = Predictor().predict(row(**{**SMALL, **changes}))
    assert 0 < run.seconds < 60
    parts = run.breakdown()
    assert parts["compute_seconds"] > 0 and parts["peak_gigabytes"] > 0


def test_errors_say_the_row() -> None:
    with pytest.raises(RowError, match="Gaudi"):
        Predictor().predict(row(hardware="Gaudi2"))
