"""Checkpoints that somebody else has changed: a sentence at once, whatever is in them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given
from hypothesis import strategies as st

import alpa_lite as al
from alpa_lite.errors import CheckpointError
from alpa_lite.runtime.checkpoint.checkpoint_folder import RECORD
from cost_models.checks import excerpt, printable
from tests.runtime.checkpoint import hostile
from tests.runtime.checkpoint.hostile import STEP, sign, write_list


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    hostile.original(folder)
    return folder


@pytest.fixture
def step(source: Path, tmp_path: Path) -> Path:
    """A copy to be changed."""
    shutil.copytree(source / f"{STEP}", tmp_path / "run" / f"{STEP}")
    return tmp_path / "run" / f"{STEP}"


def refused(step: Path, *, verify: bool = True, plan: bool = False) -> str:
    """The sentence, which comes soon, needs little memory, and fits on a screen."""
    before, began = hostile.peak_bytes(), time.monotonic()
    checkpoints = al.Checkpoints(step.parent)
    with pytest.raises(CheckpointError) as caught:
        if plan:
            checkpoints.plan()
        else:
            checkpoints.restore(hostile.state(), verify=verify)
    assert time.monotonic() - began < 20, "as if it waited for something, or read it all"
    assert hostile.peak_bytes() - before < 200 * 2**20
    assert str(caught.value).isprintable() and len(str(caught.value)) < 2000
    return str(caught.value)


def rewrite_header(step: Path, name: str, **changes: Any) -> None:
    store = ts.KvStore.open({"driver": "ocdbt", "base": {"driver": "file", "path": f"{step}/"}}).result()
    header = json.loads(store.read(f"{name}/.zarray").result().value)
    store.write(f"{name}/.zarray", json.dumps({**header, **changes}).encode()).result()
    sign(step)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"chunks": [2**30]}, r"chunks have the shape \[1073741824\]"),
        ({"chunks": [0]}, "chunks"),
        ({"chunks": [16, 1]}, "chunks"),
        ({"shape": [2**40]}, "its shape is"),
        ({"dtype": "<f8"}, "its dtype"),
        ({"dtype": "|V100000000"}, "its dtype"),
        ({"compressor": {"id": "zstd", "level": 1}}, "compressed"),
        ({"filters": [{"id": "delta"}]}, "compressed"),
        ({"fill_value": "x" * 100_000}, "its header has 1"),
        ({"shape": None}, "its shape is None"),
    ],
)
def test_headers_are_compared_before_anything_is_allocated(
    changes: dict[str, Any], sentence: str, verify: bool, step: Path
) -> None:
    """An array of 64 bytes in a chunk of 4 GiB among them."""
    rewrite_header(step, "w/a", **changes)
    said = refused(step, verify=verify)
    assert "w/a is not stored as float32[16]" in said
    assert pytest.importorskip("re").search(sentence, said), said


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(
    "name", ["leaves.json", "manifest.ocdbt", "_METADATA", "SHA256SUMS", RECORD, "plan.json", "d/*"]
)
@pytest.mark.parametrize("what", ["fifo", "zero", "memory", "folder", "loop", "huge", "outside"])
def test_a_file_that_is_none_neither_hangs_nor_fills_memory(what: str, name: str, verify: bool, step: Path) -> None:
    path = next(step.glob(name))
    data = path.read_bytes()
    if what == "huge":
        os.truncate(path, 2**36)
    else:
        path.unlink()
        outside = step.parent.parent / "outside"
        outside.write_bytes(data)
        make: dict[str, Callable[[], None]] = {
            "fifo": lambda: os.mkfifo(path),
            "zero": lambda: path.symlink_to("/dev/zero"),
            "memory": lambda: path.symlink_to("/proc/self/mem"),
            "folder": path.mkdir,
            "loop": lambda: path.symlink_to(path.name),
            "outside": lambda: path.symlink_to(outside),
        }
        make[what]()
    if name == "plan.json" and what != "folder":
        if what != "outside":
            refused(step, plan=True)
    checkpoints = al.Checkpoints(step.parent)
    if checkpoints.steps and (verify or name not in ("SHA256SUMS", RECORD, "plan.json")):
        refused(step, verify=verify)


def test_a_folder_that_leads_out_is_refused(step: Path) -> None:
    shutil.move(step / "d", step.parent.parent / "d")
    (step / "d").symlink_to(step.parent.parent / "d")
    for verify in (True, False):
        assert "leads out of the folder" in refused(step, verify=verify)


def test_links_that_stay_inside_are_followed(step: Path) -> None:
    shutil.move(step / "manifest.ocdbt", step / "kept")
    (step / "manifest.ocdbt").symlink_to("kept")
    assert al.Checkpoints(step.parent).restore(hostile.state())[0] == STEP


@pytest.mark.parametrize("name", hostile.NAMES)
def test_names_in_lists_are_plain_and_inside(name: str, step: Path) -> None:
    lines = (step / "SHA256SUMS").read_text().splitlines()[1:]
    write_list(step, [*lines, f"{'0' * 64}  {name}"])
    refused(step)


@pytest.mark.parametrize("text", hostile.TEXTS)
@pytest.mark.parametrize("name", ["leaves.json", "_METADATA", "plan.json", RECORD])
def test_hostile_json_is_a_sentence(name: str, text: bytes, step: Path) -> None:
    (step / name).write_bytes(text)
    refused(step)
    sign(step)
    if name in ("leaves.json", "_METADATA"):
        refused(step, verify=False)
    if name == "plan.json":
        refused(step, plan=True)


def test_names_of_leaves_reach_no_terminal(step: Path) -> None:
    data = json.loads((step / "leaves.json").read_text())
    data["leaves"]["\x1b[2J\ud800" + "x" * 5000] = data["leaves"].pop("n")
    (step / "leaves.json").write_text(json.dumps(data))
    sign(step)
    assert "\\x1b[2J\\ud800xxx" in refused(step)


def test_too_many_leaves_are_refused_when_they_are_saved(tmp_path: Path) -> None:
    state = dict.fromkeys(map(str, range(200_001)), 1)
    with pytest.raises(CheckpointError, match=r"200001 leaves.* at most 200000"):
        al.Checkpoints(tmp_path).save(1, state)
    assert not [*tmp_path.iterdir()]


@given(st.text())
def test_what_is_shown_is_printable_and_short(text: str) -> None:
    assert printable(excerpt(text, 50)) == excerpt(text, 50) and len(excerpt(text, 50)) <= 51 * 10
    if printable(text) == text and len(text) <= 50:
        assert excerpt(text, 50) == text


def test_changes_at_random_are_refused_or_change_nothing() -> None:
    """Some of them, in a process of its own, which must not crash either."""
    command = [sys.executable, "-m", "tests.runtime.checkpoint", "hostile", "--count", "150", "--seed", "1"]
    root = Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0 and "'refused': 1" in done.stdout, (done.stdout[-3000:], done.stderr[-3000:])


def test_states_differ_by_their_bits() -> None:
    """What the trials compare."""
    assert not np.array_equal(hostile.state()["counts"], hostile.state()["counts"] + 1)
