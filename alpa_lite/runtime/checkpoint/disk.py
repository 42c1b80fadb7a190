"""Changes that checkpoints make to a file system, apart from the arrays that Orbax writes; and guarded reads.

All changes go through these functions, so that tests can make each one fail, and can record them to compute the state
after a loss of power. A name that was made, changed or removed is on disk once its folder was synced (`sync`).

Files in a folder of checkpoints may be damaged, or changed by others:

    open_regular     open a regular file: this neither blocks (a FIFO) nor has an effect (a device)
    read_bounded     read such a file, if it is not too large
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from io import BufferedReader
from pathlib import Path

_MAX_THREADS = 8
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)
"""Error numbers of file systems that cannot sync a folder, and need not: mounted buckets."""


def make_folder(path: Path) -> None:
    """Make a folder in an existing one. Raises FileExistsError."""
    path.mkdir()


def create(path: Path, data: bytes) -> None:
    """Write a new file. Raises FileExistsError: of two simultaneous calls, one succeeds."""
    with path.open("xb") as file:
        file.write(data)


def write(path: Path, data: bytes) -> None:
    """Write a file, new or replacing its content."""
    with path.open("wb") as file:
        file.write(data)


def sync(path: Path) -> None:
    """Wait until the content of a file, or the names in a folder, are on disk."""
    # A folder can be opened only for reading, which is enough to sync it.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not (path.is_dir() and error.errno in _NO_FOLDER_SYNC):
            raise
    finally:
        os.close(descriptor)


def rename(path: Path, new: Path) -> None:
    """Rename a folder to a name that nothing else has."""
    path.rename(new)


def unlink(path: Path) -> None:
    """Remove a file."""
    path.unlink()


def remove_folder(path: Path) -> None:
    """Remove an empty folder. Raises OSError if it is not empty."""
    path.rmdir()


def sync_tree(folder: Path) -> None:
    """Sync all files and folders in a folder, and the folder itself."""
    files, folders = list[Path](), list[Path]()
    for place, _, names in os.walk(folder):
        folders.append(Path(place))
        files += [Path(place, name) for name in names]
    # Files first: a folder that is on disk then names no content that is not.
    _sync_all(files)
    _sync_all(folders)


def make_folders(path: Path) -> None:
    """Make a folder and missing ones above it; all of them are on disk when this returns."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    # From the top down, each synced into its parent before anything depends on it.
    for each in reversed(missing):
        try:
            make_folder(each)
        except FileExistsError:
            continue  # another process made it first
        sync(each.parent)


def _sync_all(paths: Iterable[Path]) -> None:
    # Each call waits for the disk, which serves several at the same time.
    with ThreadPoolExecutor(_MAX_THREADS) as pool:
        list(pool.map(sync, paths))


class TooLargeError(ValueError):
    """A file that is larger than any that alpa_lite writes."""


def open_regular(path: Path) -> BufferedReader:
    """Open a file for reading. Raises OSError, with a sentence if it is not a regular file."""
    # Before opening, which has an effect on some devices; and after it, as the file may have been replaced.
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError("it is no regular file")
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError("it is no regular file")
    return file


def read_bounded(path: Path, most: int) -> bytes:
    """Return the content of a file of at most `most` bytes. Raises OSError, or `TooLargeError`."""
    with open_regular(path) as file:
        _check_size(file, most)
        return file.read(most)


def check_size(path: Path, most: int) -> None:
    """Raise OSError or `TooLargeError` unless this is a regular file of at most `most` bytes."""
    with open_regular(path) as file:
        _check_size(file, most)


def _check_size(file: BufferedReader, most: int) -> None:
    if os.fstat(file.fileno()).st_size > most:
        raise TooLargeError(f"it has more than {most} bytes")
