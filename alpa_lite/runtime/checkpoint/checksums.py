"""Checksums of all files of a checkpoint, in a file that `sha256sum -c` reads.

    write   digests of the files, the last thing that a folder gets before it counts as complete    `write_checksums`
    check   missing, truncated or changed files, in sentences                                       `damage`

Several processes share the work: each writes a part of the list for files of its own, and checks every n-th file. The
first line is the digest of the rest, in a wording that no other program writes: it distinguishes a checkpoint from a
folder with an ordinary list (`list_kind`).
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from pathlib import Path

from alpa_lite.runtime.checkpoint import disk
from cost_models.checks import excerpt

LIST = "SHA256SUMS"
"""The file with the digests; those of a subfolder are in `SHA256SUMS.<its name>` until the whole list is written."""


class ListKind(StrEnum):
    """The kind of a list of checksums: of a checkpoint with a record (`checkpoint_folder.Record`), or of an old one."""

    NEW = "new"
    OLD = "old"


# What the first line of a list says before the digest of the others.
_FIRST_LINES = {
    ListKind.NEW: "# alpa_lite checkpoint, sha256 of the lines below: ",
    ListKind.OLD: "# sha256 of the lines below: ",
}
_LINE = re.compile(r"([0-9a-f]{64})  (\S.*)")
_MAX_THREADS = 8
# Far more than any list of ours needs: a file that somebody else has made must not fill the memory.
_MOST_BYTES = 64 * 2**20
_MOST_LETTERS = 1024


def write_checksums(folder: Path) -> None:
    """Write the list of a folder.

    Digests of subfolders that were written before (`write_part`) are merged into the list, and their own lists removed.
    """
    parts = sorted(folder.rglob(f"{LIST}.*"))
    listed = {
        (path.parent / name).relative_to(folder).as_posix(): digest
        for path in parts
        for name, digest in read_list(path).items()
    }
    rest = [name for name in _files(folder) if name not in listed and not _is_list(name)]
    # Before the whole list is written, after which nothing in the folder changes any more.
    for path in parts:
        disk.unlink(path)
    _write(folder / LIST, listed | _digests(folder, rest))


def write_part(folder: Path, part: str) -> None:
    """Write the digests of a subfolder whose files are final, and sync all of it to disk."""
    names = [f"{part}/{name}" for name in _files(folder / part)]
    if names:
        disk.sync_tree(folder / part)
    _write(folder / f"{LIST}.{part}", _digests(folder, names))


def list_kind(folder: Path) -> ListKind | None:
    """Return the kind of a folder's list; None if the folder has no list of ours."""
    try:
        with disk.open_regular(folder / LIST) as file:
            # Bounded: a foreign file of this name may be large and have no line break.
            line = file.read(200).partition(b"\n")[0]
    except OSError:
        return None
    return next(
        (kind for kind, start in _FIRST_LINES.items() if re.fullmatch(f"{start}[0-9a-f]{{64}}".encode(), line)), None
    )


def damage(folder: Path, *, share: int = 0, num_shares: int = 1, names: Sequence[str] | None = None) -> list[str]:
    """Return a sentence for each damaged file of a folder; checks every `num_shares`-th file, from number `share` on.

    names: of these files only.
    """
    try:
        digests = read_list(folder / LIST)
    except (OSError, ValueError) as error:
        return [f"its list of checksums, {LIST}, cannot be read ({excerpt(_reason(error))})"]
    names = [name for name in sorted(digests)[share::num_shares] if names is None or name in names]
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
        # Reading and hashing release Python's lock, so threads use several cores.
        problems = pool.map(lambda name: _problem(folder, name, digests[name]), names)
        return [problem for problem in problems if problem]


def read_list(path: Path) -> dict[str, str]:
    """Return the digest of each file by its name in the folder.

    Raises ValueError for a list that was truncated or changed, or names a file outside.
    """
    # The first line has the digest of the others: a list that was cut off or changed does not match it.
    first, _, lines = disk.read_bounded(path, _MOST_BYTES).decode("utf-8").partition("\n")
    if first not in {start + _of_text(lines) for start in _FIRST_LINES.values()}:
        raise ValueError("it was cut off or changed")
    digests: dict[str, str] = {}
    for line in lines.split("\n")[:-1]:
        match = _LINE.fullmatch(line)
        if match is None or not _is_inside(match[2]) or match[2] in digests:
            raise ValueError(f"{excerpt(line[66:] or line)} is no name of a file in the folder, or is there twice")
        digests[match[2]] = match[1]
    return digests


def _is_inside(name: str) -> bool:
    """Return True if a name is a relative path that stays inside the folder."""
    plain = name.isprintable() and "\\" not in name and len(name) <= _MOST_LETTERS
    return plain and all(part not in ("", ".", "..") for part in name.split("/"))


def _problem(folder: Path, name: str, digest: str) -> str:
    try:
        # The name stays inside, but a link on its way may lead elsewhere.
        if not (folder / name).resolve().is_relative_to(folder.resolve()):
            return f"{excerpt(name)} leads out of the folder"
        return "" if _digest(folder / name) == digest else f"{excerpt(name)} is not what was written"
    except FileNotFoundError:
        return f"{excerpt(name)} is missing"
    except (OSError, RuntimeError) as error:  # `resolve` raises RuntimeError for cyclic links
        return f"{excerpt(name)} cannot be read ({excerpt(_reason(error))})"


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else "") or str(error)


def _digests(folder: Path, names: Iterable[str]) -> dict[str, str]:
    listed = list(names)
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
        return dict(zip(listed, pool.map(lambda name: _digest(folder / name), listed), strict=True))


def _digest(path: Path) -> str:
    with disk.open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def _is_list(name: str) -> bool:
    return name.rpartition("/")[2].startswith(LIST)


def _write(path: Path, digests: dict[str, str]) -> None:
    """Write and sync a list: an existing list vouches for the files, also after a loss of power."""
    lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items()))
    disk.write(path, f"{_FIRST_LINES[ListKind.NEW]}{_of_text(lines)}\n{lines}".encode())
    disk.sync(path)
    disk.sync(path.parent)


def _of_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
