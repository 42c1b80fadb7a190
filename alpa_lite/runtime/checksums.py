"""Checksums of all files of a folder, in a file of the form that `sha256sum -c` reads.

    write   digests of the files, the last thing that a folder gets before it counts as complete    `write_checksums`
    check   what is missing, cut off or changed, in sentences                                       `damage`

Several processes share the work: each writes a part of the list for files of its own, and checks every n-th file.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

LIST = "SHA256SUMS"
"""The file with the digests; those of a subfolder are in `SHA256SUMS.<its name>` until the whole list is written."""

_FIRST_LINE = "# sha256 of the lines below: {}\n"
_MAX_THREADS = 8


def write_checksums(folder: Path, *, skip: Callable[[str], bool] = lambda name: False) -> None:
    """Write the list of a folder, less the files that `skip` is true for by their names.

    Digests that were written before, of subfolders (`write_part`), are taken into the list, and their own lists go.
    """
    parts = sorted(folder.rglob(f"{LIST}.*"))
    known = {
        (path.parent / name).relative_to(folder).as_posix(): digest
        for path in parts
        for name, digest in _read(path).items()
    }
    rest = [name for name in _files(folder) if name not in known and not _is_list(name) and not skip(name)]
    _write(folder / LIST, known | _digests(folder, rest))
    for path in parts:
        path.unlink()


def write_part(folder: Path, part: str) -> None:
    """Write the digests of a subfolder, of which no file will change."""
    names = [f"{part}/{name}" for name in _files(folder / part)]
    _write(folder / f"{LIST}.{part}", _digests(folder, names))


def damage(folder: Path, *, share: int = 0, num_shares: int = 1) -> list[str]:
    """What is wrong with a folder, a sentence each; of every `num_shares`-th file, from number `share` on."""
    try:
        known = _read(folder / LIST)
    except (OSError, ValueError) as error:
        return [f"its list of checksums, {LIST}, cannot be read ({error})"]
    names = sorted(known)[share::num_shares]
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
        found = pool.map(lambda name: _problem(folder, name, known[name]), names)
        return [problem for problem in found if problem]


def _problem(folder: Path, name: str, digest: str) -> str:
    try:
        return "" if _digest(folder / name) == digest else f"{name} is not what was written"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror or error})"


def _digests(folder: Path, names: Iterable[str]) -> dict[str, str]:
    found = list(names)
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
        return dict(zip(found, pool.map(lambda name: _digest(folder / name), found), strict=True))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def _is_list(name: str) -> bool:
    return name.rpartition("/")[2].startswith(LIST)


def _write(path: Path, digests: dict[str, str]) -> None:
    """On the disk before this returns: a list that is there vouches for the files, also after a loss of power."""
    lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items()))
    with path.open("w", encoding="utf-8") as file:
        file.write(_FIRST_LINE.format(_of_text(lines)) + lines)
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path) -> dict[str, str]:
    """The digest of each file. Raises ValueError for a list that was cut off or changed."""
    first, _, lines = path.read_text(encoding="utf-8").partition("\n")
    if first + "\n" != _FIRST_LINE.format(_of_text(lines)):
        raise ValueError("it was cut off or changed")
    pairs = (line.split("  ", 1) for line in lines.splitlines())
    return {name: digest for digest, name in pairs}


def _of_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
