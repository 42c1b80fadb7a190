"""Every change that checkpoints make to a file system, apart from the arrays that Orbax writes.

All of them go through these functions, so that tests can let each one fail, and can record them to compute what is left
after a loss of power. A name that was made, changed or removed is on the disk once its folder was synced (`sync`).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_MAX_THREADS = 8
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)
"""What file systems say that cannot sync a folder, and need not: buckets that are mounted."""


def make_folder(path: Path) -> None:
    """Make a folder in one that is there. Raises FileExistsError."""
    path.mkdir()


def create(path: Path, data: bytes) -> None:
    """Write a file that is not there yet. Raises FileExistsError: of two that do this at once, one succeeds."""
    with path.open("xb") as file:
        file.write(data)


def write(path: Path, data: bytes) -> None:
    """Write a file, new or in place of what it held."""
    with path.open("wb") as file:
        file.write(data)


def sync(path: Path) -> None:
    """Wait until the content of a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not (path.is_dir() and error.errno in _NO_FOLDER_SYNC):
            raise
    finally:
        os.close(descriptor)


def rename(path: Path, new: Path) -> None:
    """Give a folder another name, which nothing else has."""
    path.rename(new)


def unlink(path: Path) -> None:
    """Remove a file."""
    path.unlink()


def remove_folder(path: Path) -> None:
    """Remove an empty folder. Raises OSError for one that is not."""
    path.rmdir()


def sync_tree(folder: Path) -> None:
    """Sync all files and folders in a folder, and the folder itself."""
    files, folders = list[Path](), list[Path]()
    for place, _, names in os.walk(folder):
        folders.append(Path(place))
        files += [Path(place, name) for name in names]
    _sync_all(files)
    _sync_all(folders)


def make_folders(path: Path) -> None:
    """Make a folder and those above it that are missing; all of them are on the disk when this returns."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    for each in reversed(missing):
        try:
            make_folder(each)
        except FileExistsError:
            continue  # somebody else was faster
        sync(each.parent)


def _sync_all(paths: Iterable[Path]) -> None:
    with ThreadPoolExecutor(_MAX_THREADS) as pool:
        list(pool.map(sync, paths))
