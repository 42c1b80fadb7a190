"""Lists of checksums: `sha256sum` agrees, parts are taken in, and whatever changes is named."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from alpa_lite.runtime.checkpoint.checksums import LIST, damage, write_checksums, write_part

FILES = {"one": b"1", "deep/er/two": b"22", "deep/three": b"", "name with  spaces": b"4"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, data in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    return tmp_path


def test_an_untouched_folder_has_no_damage(folder: Path) -> None:
    write_checksums(folder)
    assert damage(folder) == []
    (folder / "new").write_bytes(b"not listed")
    assert damage(folder) == []


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="there is no sha256sum")
def test_other_programs_read_the_list(folder: Path) -> None:
    write_checksums(folder)
    done = subprocess.run(["sha256sum", "-c", LIST], cwd=folder, capture_output=True, text=True, check=True)
    assert sorted(line.partition(": ")[0] for line in done.stdout.splitlines()) == sorted(FILES)


@pytest.mark.parametrize("name", FILES)
def test_what_changed_is_named(name: str, folder: Path) -> None:
    write_checksums(folder)
    (folder / name).write_bytes(FILES[name] + b"x")
    assert damage(folder) == [f"{name} is not what was written"]
    (folder / name).unlink()
    assert damage(folder) == [f"{name} is missing"]
    (folder / name).mkdir()
    assert len(damage(folder)) == 1 and f"{name} cannot be read" in damage(folder)[0]


@pytest.mark.parametrize("keep", [0, 1, 40, -1, -90])
def test_a_list_that_was_cut_off_is_damage(keep: int, folder: Path) -> None:
    write_checksums(folder)
    text = (folder / LIST).read_bytes()
    (folder / LIST).write_bytes(text[:keep])
    assert len(damage(folder)) == 1 and "list of checksums" in damage(folder)[0]
    (folder / LIST).write_bytes(b"\xff\xfe" + text)
    assert "list of checksums" in damage(folder)[0]


def test_every_file_is_in_one_share(folder: Path) -> None:
    write_checksums(folder)
    for name in FILES:
        (folder / name).unlink()
    found = [problem for share in range(3) for problem in damage(folder, share=share, num_shares=3)]
    assert sorted(found) == sorted(f"{name} is missing" for name in FILES)


def test_digests_of_a_part_are_taken_in_and_not_made_again(folder: Path) -> None:
    """Also where the part lies deeper: each process writes the list of its own subfolder."""
    write_part(folder / "deep", "er")
    (folder / "deep/er/two").write_bytes(b"changed since")
    write_checksums(folder)
    assert damage(folder) == ["deep/er/two is not what was written"]
    assert not list(folder.rglob(f"{LIST}.*"))


def test_a_part_may_be_empty(folder: Path) -> None:
    write_part(folder, "nothing")
    write_checksums(folder)
    assert damage(folder) == []
