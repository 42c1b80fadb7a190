"""States that lie on several processes: every process writes and reads its own shards, and none waits for another
that failed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import alpa_lite as al
from tests.distributed.launched import free_port
from tests.plan.test_plan import planned
from tests.runtime.checkpoint.saved_states import ROWS, global_values

ROOT = Path(__file__).parents[3]


def _run_two(folder: Path, *, fails: int = -1) -> list[dict[str, Any]]:
    """What each of two processes says."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "NPROC": "16",
    }
    script, port = str(Path(__file__).with_name("saving_processes.py")), str(free_port())
    processes = [
        subprocess.Popen(
            [sys.executable, script, port, str(number), str(folder), str(fails)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    ended = [process.communicate(timeout=120) for process in processes]
    assert all(process.returncode == 0 for process in processes), ended
    return [json.loads(out.splitlines()[-1]) for out, _ in ended]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The folder of the two processes, and what each of them said."""
    folder = tmp_path_factory.mktemp("two")
    return folder, _run_two(folder)


@pytest.mark.parametrize("way", ["same", "other"])
def test_arrays_of_some_processes_come_back_in_any_place(way: str, said: tuple[Path, list[dict[str, Any]]]) -> None:
    for found in said[1]:
        assert found[f"{way}: right"] and found[f"{way}: placed"]
        assert found[f"{way}: host"] == [[0, 1, 2], 5, [0, 1, 2, 3, 4], 3]


@pytest.mark.parametrize("way", ["same", "other"])
def test_each_process_reads_its_part(way: str, said: tuple[Path, list[dict[str, Any]]]) -> None:
    """A half, and where a device needs a part of what another wrote at once, the rest of that; devices that read at the
    same time may each read what both need (0.83 was seen), but never is everything read."""
    whole = sum(array.nbytes for array in global_values().values())
    for found in said[1]:
        assert found[f"{way}: bytes"] / whole < (0.51 if way == "same" else 0.99)


def test_old_ones_go_and_all_processes_see_the_same(said: tuple[Path, list[dict[str, Any]]]) -> None:
    for found in said[1]:
        assert found["steps"] == [3, 4]
        assert found["left"] == ["3", "4.damaged", "5"]


def test_damage_that_one_process_sees_counts_for_all(said: tuple[Path, list[dict[str, Any]]]) -> None:
    sentences = [sentence for found in said[1] for sentence in found["told"]]
    assert [found["after damage"] for found in said[1]] == [3, 3] and len(sentences) == 2
    assert all("step 4" in sentence and "Step 3 is used" in sentence for sentence in sentences)
    assert "is not what was written" in sentences[0] and sentences[0] == sentences[1]


def test_one_process_restores_what_two_saved(said: tuple[Path, list[dict[str, Any]]]) -> None:
    keys = jax.random.split(jax.random.key(7), ROWS)
    like = {name: np.zeros_like(array) for name, array in global_values().items() if name != "keys"}
    _, state = al.Checkpoints(said[0]).restore(
        {**like, "keys": keys, "numbers": np.zeros(3, int), "epoch": 0, "own": np.zeros(5, np.int32)}
    )
    wanted = {**global_values(), "numbers": np.arange(3), "own": np.arange(5)}
    assert all(np.array_equal(state[name], wanted[name]) for name in like)
    assert (jax.random.key_data(state["keys"]) == global_values()["keys"]).all() and state["epoch"] == 5


@pytest.mark.parametrize("fails", [1, pytest.param(0, marks=pytest.mark.long)])
def test_what_goes_wrong_on_one_process_is_told_on_all_and_holds_up_nobody(fails: int, tmp_path: Path) -> None:
    planned("mlp", "hybrid").last_plan.save(tmp_path / "plan.json")
    found = _run_two(tmp_path / "run", fails=fails)
    assert all(each.pop("seconds") < 60 for each in found)
    assert found[0] == found[1], "the same is told on all processes"
    room, folder = found[0]["no room"], found[0]["no folder"]
    assert all("step 2 " in each and "newest one is of step 1. Look for space" in each for each in (room, folder))
    assert "File too large" in room and f"(process {fails})" in room
    assert "File exists" in folder and "(process 0)" in folder
    assert found[0]["left"] == ["1", "alpa_lite_writer.1.json"]
    assert "step 2 " in found[0]["cannot be read"] and "cannot be restored" in found[0]["cannot be read"]
    assert "d/" in found[0]["damaged"] and "Leave step= out" in found[0]["damaged"]
    assert "plan of step 2 " in found[0]["plan"] and "cannot be read" in found[0]["plan"]
    assert found[0]["plan of the one before"] and "That of step 1 is used" in found[0]["warned"][0]
    assert found[0]["used"] == 1 and "Step 1 is used" in found[0]["warned"][1] and len(found[0]["warned"]) == 2
