"""Nothing older goes before the new is on the disk: power is lost at any time, and every operation fails once."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.errors import CheckpointError, UnusableFileWarning
from alpa_lite.runtime.checkpoint import disk, lease
from tests.plan.test_plan import planned
from tests.runtime.checkpoint.power_loss import Recorder, Tree, unpack


def state(step: int) -> dict[str, Any]:
    return {"x": np.arange(200) * (step + 1), "n": step}


Run = list[tuple[int | None, int]]
"""Saves: the step to restore before (None: none), and the step."""

RUNS: dict[str, tuple[int, Run]] = {
    "one after the other": (2, [(None, 1), (None, 2), (None, 3), (None, 4)]),
    "only the newest": (1, [(None, 1), (None, 2), (None, 3)]),
    "going back": (3, [(None, 1000), (None, 2000), (None, 3000), (1000, 1100), (None, 1200)]),
    "the same step again": (2, [(None, 1), (None, 2), (None, 2), (None, 2)]),
}
"""How many are kept, and the saves."""


def saves(folder: Path, keep: int, run: Run, acceptable: Callable[[frozenset[int | None]], None]) -> None:
    """Save; what may be restored at a time is told: what was complete when it was last waited for, or what is on its
    way. Of a step that is saved again both have the same number, so the states of all saves differ."""
    complete: int | None = None
    with al.Checkpoints(folder, keep=keep) as checkpoints:
        for begin, step in run:
            if begin is not None:
                checkpoints.restore(state(0), step=begin)
            acceptable(frozenset({complete, step}))
            checkpoints.save(step, state(step), plan=planned("mlp", "hybrid").last_plan)
            checkpoints.wait()
            complete = step
            acceptable(frozenset({complete}))


def newest(folder: Path) -> int | None:
    """The step that is restored, whose state is that which was saved; None where there is none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnusableFileWarning)
        checkpoints = al.Checkpoints(folder)
        if not checkpoints.steps:
            return None
        step, found = checkpoints.restore(state(0))
    assert found["x"].tobytes() == state(step)["x"].tobytes() and found["n"] == step
    return step


def and_on(folder: Path, step: int) -> None:
    """A run that goes on there saves and finds what it saved; nothing half done is left."""
    with al.Checkpoints(folder, keep=1) as checkpoints:
        checkpoints.save(step, state(step))
    assert newest(folder) == step
    kinds = {path.name.partition(".")[2].partition("-")[0] for path in folder.iterdir()}
    assert kinds <= {"", "aside", "damaged", "txt"}, sorted(path.name for path in folder.iterdir())


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease whose content was lost may be that of somebody alive; here it is not."""
    monkeypatch.setattr(lease, "EXPIRY_SECONDS", 0.0)


def bystander(folder: Path) -> None:
    (folder / "7").mkdir(parents=True)
    (folder / "7" / "thesis.tex").write_text("the only copy")
    (folder / "notes.txt").write_text("mine")


def is_untouched(folder: Path) -> bool:
    return (folder / "7" / "thesis.tex").read_text() == "the only copy" and (folder / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("name", RUNS)
def test_after_a_loss_of_power_the_newest_complete_step_is_there(name: str, tmp_path: Path) -> None:
    """Some of what may be left; `python -m tests.runtime.checkpoint power-loss` tries all of it."""
    assert replay(name, tmp_path, most=120) >= 100, "the model has looked at next to nothing"


def replay(name: str, work: Path, *, most: int | None = None) -> int:
    """Record a run, and try all that may be left, or so much of it; how many that were."""
    folder = work / "run"
    bystander(folder)
    keep, run = RUNS[name]
    recorder = Recorder(folder)

    def acceptable(steps: frozenset[int | None]) -> None:
        recorder.acceptable = steps

    with recorder.watching():
        saves(folder, keep, run, acceptable)
        recorder.note()
    every = 1 if most is None else max(1, len(recorder.states) // most)
    tried = [*recorder.states.items()][::every]
    for number, (tree, allowed) in enumerate(tried):
        place = work / "left"
        unpack(tree, place)
        found = newest(place)
        assert all(found in steps for steps in allowed), (name, number, found, allowed, outline(tree))
        assert is_untouched(place)
        if number % 10 == 0:
            and_on(place, 4000)
            assert is_untouched(place)
        shutil.rmtree(place)
    return len(tried)


def outline(tree: Tree) -> list[Any]:
    """For a message."""
    return [(name, len(what) if isinstance(what, bytes) else outline(what)) for name, what in tree]


FORGOTTEN = {
    "sync_tree": lambda folder: None,
    "sync": lambda path: None,
}


@pytest.mark.parametrize("what", FORGOTTEN)
def test_the_model_would_see_it(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without waiting for the disk, steps are lost."""
    monkeypatch.setattr(disk, what, FORGOTTEN[what])
    if what == "sync":
        monkeypatch.setattr(Recorder, "_after", lambda self, name, path: (self._disk.look(at_once=True), self.note()))
    with pytest.raises((AssertionError, CheckpointError)):
        replay("only the newest", tmp_path, most=500)


@pytest.mark.parametrize("name", ["going back", "the same step again", "only the newest"])
@pytest.mark.parametrize("code", [pytest.param(5, marks=pytest.mark.long), 28])
def test_whichever_operation_fails_nothing_complete_is_lost(name: str, code: int, tmp_path: Path) -> None:
    keep, run = RUNS[name]
    last = 4 if name == "going back" else len(run)
    before, counting = tmp_path / "before", Recorder()
    bystander(before)
    saves(before, keep, run[: last - 1], lambda steps: None)
    shutil.copytree(before, tmp_path / "counted")
    with counting.watching():
        saves(tmp_path / "counted", keep, run[last - 1 : last], lambda steps: None)
    assert {*counting.names} >= {"make_folder", "create", "write", "sync", "rename", "unlink"}
    complete, step = run[last - 2][1], run[last - 1][1]
    refused = 0
    for number in range(len(counting.names)):
        folder = tmp_path / f"{number}"
        shutil.copytree(before, folder)
        failing = Recorder(fail=number, error=OSError(code, "It fails"))
        with failing.watching():
            try:
                saves(folder, keep, run[last - 1 : last], lambda steps: None)
                assert newest(folder) == step
            except CheckpointError as error:
                refused += 1
                assert "It fails" in str(error) and len(str(error)) < 1000
                assert newest(folder) in (complete, step)
        assert is_untouched(folder)
        and_on(folder, 4000)
        shutil.rmtree(folder)
    assert refused > len(counting.names) / 3


def test_orbax_files_are_on_the_disk_before_the_list_is_written(tmp_path: Path) -> None:
    """All files and folders of a step are synced, then comes the list, then the renaming, then the folder."""
    recorder, synced = Recorder(), list[str]()
    real = disk.sync
    with al.Checkpoints(tmp_path) as checkpoints, recorder.watching():
        watched = disk.sync

        def sync(path: Path) -> None:
            synced.append(path.name)
            watched(path)

        disk.sync = sync
        checkpoints.save(1, state(1))
        checkpoints.wait()
    disk.sync = real
    files = {path.name for path in (tmp_path / "1").rglob("*")}
    assert files <= {*synced} and "1" not in synced
    publish = max(i for i, name in enumerate(recorder.names) if name == "rename")
    assert recorder.names[publish + 1] == "sync" and synced[-1] == tmp_path.name
