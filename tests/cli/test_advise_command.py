"""The command `advise`: tables, JSON, files, a picture, and what cannot be had."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import alpa_lite as al
from alpa_lite.cli.entry import main
from alpa_lite.cli.exit_codes import Exit
from tests.cli.schema import documented

MODEL = "llama-8b:num_layers=4:hidden=512:num_heads=8:inner=1024:vocab_size=4096"
GIVEN = ("advise", MODEL, "--cluster", "dgx-a100:2", "--batch", "32", "--seq", "512", "--seconds", "30")


def test_tables_files_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, picture = tmp_path / "plans", tmp_path / "plans.svg"
    assert main([*GIVEN, "--price", "2.5", "--output", str(folder), "--picture", str(picture)]) == Exit.DONE
    text = capsys.readouterr().out
    assert text.startswith(f"{MODEL} on 16 devices of dgx-a100, a batch of 32 sequences of 512 tokens\n")
    assert all(words in text for words in ("Megatron-like", "4 hosts", "batch 64", "1024 tokens", "a step costs"))
    names = {"fsdp.json", "maxtext.json", "megatron.json", "anything.json", "torchtitan.toml", "maxtext.yml"}
    assert {path.name for path in folder.iterdir()} == names | {"megatron.txt"}
    assert al.Plan.load(folder / "fsdp.json").cluster.num_devices == 16
    assert picture.read_text().lstrip().startswith("<?xml")


def test_json_is_documented(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GIVEN, "--json"]) == Exit.DONE
    found = documented("advise", json.loads(capsys.readouterr().out))
    assert (found["num_devices"], found["batch_size"], found["seq_len"]) == (16, 32, 512)
    steps = {each["name"]: each["plan"]["step_seconds"] for each in found["families"]}
    assert steps[found["fastest"]] == min(steps.values())
    assert [each["name"] for each in found["other_sizes"]] == [
        "1 host", "4 hosts", "batch 16", "batch 64", "256 tokens", "1024 tokens"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("lama-70b", "Did you mean 'llama-70b'?"),
        ("llama-70b:layers=3", "has no option 'layers'. Did you mean 'num_layers'?"),
        ("llama-70b:num_layers=0", "num_layers takes a whole number of at least 1"),
        ("llama-70b:hidden=100", "do not fit together"),
    ],
)
def test_models_that_there_are_not(model: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", model, "--cluster", "dgx-1", "--batch", "8"]) == Exit.ERROR
    assert said in " ".join(capsys.readouterr().err.split())


def test_what_fits_nowhere_and_files_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "gpt-1t", "--cluster", "dgx-1", "--batch", "8"]) == Exit.INFEASIBLE
    assert "Megatron-like: no plan." in capsys.readouterr().out
    (tmp_path / "file").touch()
    assert main([*GIVEN, "--output", str(tmp_path / "file")]) == Exit.ERROR
    assert main([*GIVEN, "--picture", str(tmp_path / "no" / "plans.svg")]) == Exit.ERROR
