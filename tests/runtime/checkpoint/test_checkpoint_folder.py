"""Which steps count, and that nothing is removed that is not ours: foreign folders, branches, what a crash leaves."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import alpa_lite as al
from alpa_lite.errors import CheckpointError, UnusableFileWarning
from alpa_lite.runtime.checkpoint import disk
from alpa_lite.runtime.checkpoint.checkpoint_folder import RECORD
from alpa_lite.runtime.checkpoint.checksums import LIST


def small(value: int) -> dict[str, Any]:
    return {"x": np.arange(64) + value}


def saved(folder: Path, *steps: int, keep: int | None = None) -> None:
    """A run that saves these steps, one after the other."""
    with al.Checkpoints(folder, keep=keep) as checkpoints:
        for step in steps:
            checkpoints.save(step, small(step))


def restored(folder: Path, step: int | None = None) -> int:
    """The newest step, whose state is that which was saved."""
    number, state = al.Checkpoints(folder).restore(small(0), step=step)
    assert (state["x"] == small(number)["x"]).all()
    return number


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def tree(folder: Path) -> dict[str, bytes | None]:
    """All that is in a folder."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")
    }


def ordinary(folder: Path) -> None:
    """A folder of the user's with data and the list that `sha256sum * > SHA256SUMS` makes."""
    folder.mkdir(parents=True)
    (folder / "data.bin").write_bytes(b"the only copy")
    (folder / "leaves.json").write_text("{}")
    (folder / LIST).write_text(f"{hashlib.sha256(b'the only copy').hexdigest()}  data.bin\n")


# --- what is not ours -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["", ".replaced", ".removed", ".unfinished-0", ".damaged", ".aside"])
def test_numbered_folders_of_others_are_never_touched(suffix: str, tmp_path: Path) -> None:
    for year in (2, 3, 2019, 2020):
        ordinary(tmp_path / f"{year}{suffix}")
    before = tree(tmp_path)
    checkpoints = al.Checkpoints(tmp_path, keep=1)
    assert checkpoints.steps == () and checkpoints.set_aside == ()
    with checkpoints:
        for step in (1, 4, 5):
            checkpoints.save(step, small(step))
        checkpoints.wait()
        assert checkpoints.latest == 5
    assert {name: data for name, data in tree(tmp_path).items() if not name.startswith("5/") and name != "5"} == before


def test_a_save_onto_a_folder_of_others_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    ordinary(tmp_path / "2019")
    before = tree(tmp_path)
    with pytest.raises(CheckpointError, match="2019 is there and is no checkpoint of alpa_lite"):
        al.Checkpoints(tmp_path).save(2019, small(1))
    assert tree(tmp_path) == before


def test_a_folder_that_is_exchanged_just_before_it_is_removed_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mark is looked for again when it comes to removing."""
    sync = disk.sync

    def exchange(path: Path) -> None:
        sync(path)
        if (gone := tmp_path / "1.removed").exists() and not (gone / "data.bin").exists():
            shutil.rmtree(gone)
            ordinary(gone)

    with al.Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, small(1))
        checkpoints.wait()
        monkeypatch.setattr(disk, "sync", exchange)
        checkpoints.save(2, small(2))
    assert (tmp_path / "1.removed" / "data.bin").read_bytes() == b"the only copy"


def test_notes_in_a_checkpoint_are_never_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path, 1, 2)
    (tmp_path / "1" / "notes.txt").write_text("mine")
    (tmp_path / "2" / "d" / "notes.txt").write_text("mine too")
    saved(tmp_path, 2, 3, keep=1)
    assert names(tmp_path) == ["1.aside", "2.aside", "3"]
    assert (tmp_path / "1.aside" / "notes.txt").read_text() == "mine"
    assert (tmp_path / "2.aside" / "d" / "notes.txt").read_text() == "mine too"
    assert "it holds notes.txt, which alpa_lite did not write" in caplog.text


def test_a_link_to_a_checkpoint_is_read_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    archive, folder = tmp_path / "archive", tmp_path / "run"
    saved(archive, 1)
    folder.mkdir()
    (folder / "1").symlink_to(archive / "1")
    assert restored(folder) == 1
    saved(folder, 2, 3, keep=1)
    assert names(folder) == ["1.aside", "3"] and restored(archive) == 1


@pytest.mark.parametrize("name", ["007", "٣", "1e3", "+1", "99999999999999999999", "1 ", "-1"])
def test_names_that_only_look_like_steps_are_none(name: str, tmp_path: Path) -> None:
    saved(tmp_path, 1)
    shutil.copytree(tmp_path / "1", tmp_path / name)
    assert al.Checkpoints(tmp_path).steps == (1,)


# --- keeping ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [1, 2, 3, 4, 5, 6, 20, None])
def test_as_many_are_kept_as_were_asked_for(keep: int | None, tmp_path: Path) -> None:
    with al.Checkpoints(tmp_path, keep=keep) as checkpoints:
        for step in range(9):
            checkpoints.save(step, small(step))
            checkpoints.wait()
            assert checkpoints.steps == tuple(range(step + 1))[-(keep or 99) :]


# --- going back -------------------------------------------------------------------------------------------------------


def test_after_going_back_the_new_branch_is_the_one_that_counts(tmp_path: Path) -> None:
    saved(tmp_path, 1000, 2000, 3000)
    with al.Checkpoints(tmp_path, keep=3) as checkpoints:
        assert checkpoints.restore(small(0), step=1000)[0] == 1000
        assert checkpoints.latest == 3000
        checkpoints.save(1100, small(1100))
        checkpoints.wait()
        assert checkpoints.latest == 1100 and checkpoints.steps == (1000, 1100)
        assert checkpoints.parent(1100) == 1000 and checkpoints.parent(1000) is None
        assert [path.name for path in checkpoints.set_aside] == ["2000.aside", "3000.aside"]
        for step in (1200, 1300):
            checkpoints.save(step, small(step))
    assert restored(tmp_path) == 1300
    assert names(tmp_path) == ["1100", "1200", "1300", "2000.aside", "3000.aside"]


def test_those_set_aside_can_be_taken_back_by_hand_or_removed(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3)
    saved(tmp_path, 1)
    shutil.rmtree(tmp_path / "3.aside")
    shutil.rmtree(tmp_path / "1")
    (tmp_path / "2.aside").rename(tmp_path / "2")
    assert restored(tmp_path) == 2 and al.Checkpoints(tmp_path).set_aside == ()


def test_branches_that_are_left_again_and_again_all_stay(tmp_path: Path) -> None:
    for _ in range(3):
        saved(tmp_path, 1, 2, 3)
    assert names(tmp_path) == ["1", "2", "2.aside", "2.aside-2", "3", "3.aside", "3.aside-2"]


def test_a_run_from_the_beginning_in_a_folder_with_steps_counts(tmp_path: Path) -> None:
    saved(tmp_path, 100, 200)
    saved(tmp_path, 0, 50)
    assert restored(tmp_path) == 50 and al.Checkpoints(tmp_path).steps == (0, 50)
    assert len(al.Checkpoints(tmp_path).set_aside) == 2


def test_the_same_step_again_leaves_those_after_it(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3)
    saved(tmp_path, 2)
    assert al.Checkpoints(tmp_path).steps == (1, 2) and names(tmp_path) == ["1", "2", "3.aside"]


def test_a_save_that_fails_leaves_the_branch_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, 1000, 2000, 3000)
    before = tree(tmp_path)
    checkpoints = al.Checkpoints(tmp_path)
    checkpoints.restore(small(0), step=1000)
    monkeypatch.setattr(disk, "sync_tree", lambda folder: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(CheckpointError, match=r"step 1100 .*No space left.* newest one is of step 3000"):
        checkpoints.save(1100, small(1100))
        checkpoints.wait()
    checkpoints.close()
    assert tree(tmp_path) == before and checkpoints.latest == 3000


def test_a_crash_right_after_the_new_branch_is_complete_loses_nothing(tmp_path: Path) -> None:
    """The later steps still have their names, but do not count; the next save sets them aside."""
    saved(tmp_path, 1000, 2000, 3000)
    with al.Checkpoints(tmp_path) as checkpoints:
        checkpoints.restore(small(0), step=1000)
        checkpoints.save(1100, small(1100))
    for step in (2000, 3000):
        (tmp_path / f"{step}.aside").rename(tmp_path / f"{step}")
    assert restored(tmp_path) == 1100
    assert [path.name for path in al.Checkpoints(tmp_path).set_aside] == ["2000", "3000"]
    saved(tmp_path, 1200)
    assert names(tmp_path) == ["1000", "1100", "1200", "2000.aside", "3000.aside"]


def test_when_the_new_branch_is_damaged_the_one_that_was_left_is_not_taken(tmp_path: Path) -> None:
    saved(tmp_path, 1000, 2000, 3000)
    saved(tmp_path, 1100)
    (tmp_path / "1100" / "leaves.json").write_bytes(b"{}")
    with pytest.warns(UnusableFileWarning, match=r"step 1100 .*damaged.* Step 1000 is used"):
        assert restored(tmp_path) == 1000


@pytest.mark.parametrize("damage", [b"", b"{", b"[1]", b'{"step": 5}'])
def test_a_damaged_record_abandons_nothing(damage: bytes, tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3)
    for step in (1, 3):
        (tmp_path / f"{step}" / RECORD).write_bytes(damage)
    assert al.Checkpoints(tmp_path).steps == (1, 2, 3)
    with pytest.warns(UnusableFileWarning, match=rf"step 3 .*{RECORD} is not what was written"):
        assert restored(tmp_path) == 2


def test_a_number_that_was_changed_in_a_record_abandons_nothing(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3)
    path = tmp_path / "1" / RECORD
    path.write_text(path.read_text().replace('"save": 1', '"save": 9'))
    assert restored(tmp_path) == 3 and al.Checkpoints(tmp_path).steps == (1, 2, 3)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(runs=st.lists(st.tuples(st.integers(0, 6), st.lists(st.integers(1, 3), min_size=1, max_size=3)), max_size=5))
def test_the_branch_is_that_of_a_model(
    runs: list[tuple[int, list[int]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Runs that begin somewhere below or above the newest step and go on in strides; the model is a list."""
    logging.getLogger("alpa_lite").setLevel(logging.ERROR)
    folder, branch = tmp_path_factory.mktemp("runs"), list[int]()
    for begin, strides in runs:
        step = begin
        with al.Checkpoints(folder, keep=3) as checkpoints:
            for stride in strides:
                step += stride
                checkpoints.save(step, small(step))
                checkpoints.wait()
                branch = [*(each for each in branch if each < step), step][-3:]
                assert checkpoints.steps == tuple(branch) and restored(folder) == step
    logging.getLogger("alpa_lite").setLevel(logging.NOTSET)


# --- steps that were renamed, or come from before ---------------------------------------------------------------------


def test_a_checkpoint_under_another_number_is_damaged(tmp_path: Path) -> None:
    saved(tmp_path, 3)
    (tmp_path / "3").rename(tmp_path / "4")
    with pytest.raises(CheckpointError, match="saved as step 3, and its folder was renamed"):
        al.Checkpoints(tmp_path).restore(small(0))
    with pytest.raises(CheckpointError, match="saved as step 3"):
        al.Checkpoints(tmp_path).restore(small(0), step=4, verify=False)


def without_record(folder: Path) -> None:
    """A checkpoint as it was written before there were records."""
    (folder / RECORD).unlink()
    lines = (folder / LIST).read_text().partition("\n")[2]
    kept = "".join(line for line in lines.splitlines(keepends=True) if RECORD not in line)
    (folder / LIST).write_text(f"# sha256 of the lines below: {hashlib.sha256(kept.encode()).hexdigest()}\n{kept}")


def test_checkpoints_from_before_there_were_records_are_read_and_left_and_removed(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3)
    for step in (1, 2, 3):
        without_record(tmp_path / f"{step}")
    assert restored(tmp_path) == 3 and al.Checkpoints(tmp_path).steps == (1, 2, 3)
    with al.Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.restore(small(0), step=1)
        checkpoints.save(2, small(2))
    assert restored(tmp_path) == 2 and names(tmp_path) == ["2", "3.aside"]


def test_one_that_lost_its_list_makes_room(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    (tmp_path / "2" / LIST).unlink()
    assert restored(tmp_path) == 1
    saved(tmp_path, 2)
    assert restored(tmp_path) == 2 and names(tmp_path) == ["1", "2", "2.damaged"]


def test_what_a_crash_leaves_is_put_right(tmp_path: Path) -> None:
    """Half written, half removed, empty; and a step between its two names."""
    saved(tmp_path, 1, 2, 3, 4)
    (tmp_path / "4").rename(tmp_path / "4.replaced")
    shutil.copytree(tmp_path / "4.replaced", tmp_path / "4.unfinished-abc")
    shutil.copytree(tmp_path / "2", tmp_path / "0.removed")
    (tmp_path / "0.removed" / LIST).unlink()
    shutil.copytree(tmp_path / "3", tmp_path / "3.replaced")
    for name in ("5.unfinished-abc", "6.removed"):
        (tmp_path / name).mkdir()
    assert restored(tmp_path) == 4
    saved(tmp_path, 5)
    assert names(tmp_path) == ["1", "2", "3", "4", "5"] and [restored(tmp_path, step) for step in (3, 4)] == [3, 4]


def test_the_record_says_what_it_should(tmp_path: Path) -> None:
    saved(tmp_path, 1, 5)
    data = json.loads((tmp_path / "5" / RECORD).read_text())
    assert (data["step"], data["parent"], data["save"]) == (5, 1, 2)
    assert RECORD in (tmp_path / "5" / LIST).read_text()


def test_messages_fit_on_a_screen(tmp_path: Path) -> None:
    """However many steps are there, and whatever the folder is called."""
    folder = tmp_path / "run\x1b[2J"
    saved(folder, 1)
    for step in range(2, 120):
        shutil.copytree(folder / "1", folder / f"{step}")
    os.unlink(folder / "1" / "leaves.json")
    for what in ({}, {"step": 500}):
        with pytest.raises(CheckpointError) as caught:
            al.Checkpoints(folder).restore(small(0), **what)
        assert len(str(caught.value)) < 2000 and "\x1b" not in str(caught.value)
