"""Manage the steps in a folder of checkpoints; only the owner of its lease changes it.

    <step>                         a checkpoint; it counts when it has our list of checksums
    <step>.unfinished-<owner>      one that is being written
    <step>.replaced                one whose step was saved again, until the new one has its final name
    <step>.removed                 one that is being removed
    <step>.aside, <step>.damaged   no longer counted, never removed: of an abandoned branch; or damaged

Only folders with our own mark (the record, or the first line of our list of checksums) are counted, renamed or
removed, and of these only the files that we write are removed. A step is on an abandoned branch if a lower one was
saved after it. The records tell, so the last rename of a save (`publish`) makes the new branch the current one
atomically, whatever happens before or after. Nothing older is removed before that rename is on disk.

The record of a checkpoint is a file that exists from its first moment on (`Record`). It contains its own digest, as it
is read long before all other checksums are compared:

    step     its number, which reveals a folder that was renamed
    parent   the step that its run had saved or restored before
    save     how many saves there were in the folder: it tells which of two branches is newer
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from alpa_lite.errors import CheckpointError
from alpa_lite.runtime.checkpoint import disk
from alpa_lite.runtime.checkpoint.checksums import LIST, ListKind, list_kind, read_list
from alpa_lite.runtime.checkpoint.lease import Lease
from cost_models.checks import excerpt, parse_json

RECORD = "alpa_lite_checkpoint.json"
"""Name of the file."""

# The names that alpa_lite, Orbax and OCDBT give to files. Any other file is somebody else's and is never removed.
_OWN = re.compile(
    rf"SHA256SUMS(\..+)?|{re.escape(RECORD)}|leaves\.json|plan\.json|_METADATA|_CHECKPOINT_METADATA|commit_success\.txt"
    r"|(ocdbt\.process_[0-9]+/)?(d/[0-9a-f]{32}|manifest\.ocdbt)(\.__lock)?"
)
_MOST_BYTES = 4096
_LARGEST = 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The content of a record. `parent` is None if nothing was saved or restored before."""

    step: int
    parent: int | None
    save: int

    def to_bytes(self) -> bytes:
        """Return the content of the file."""
        data = asdict(self)
        return json.dumps({**data, "sha256": _digest(data)}).encode()


def read_record(folder: Path) -> Record | None:
    """Return the record of a checkpoint; None if it is missing, damaged, or of a later version."""
    try:
        data = parse_json(disk.read_bounded(folder / RECORD, _MOST_BYTES), any_text=True, max_values=16, max_depth=1)
        digest = data.pop("sha256")
        record = Record(**data)
    # `TypeError` comes of a record with other fields, as a later version may write.
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    numbers = (record.step, record.save, 0 if record.parent is None else record.parent)
    # By exact type, as a bool is an int to Python; bounded, as JSON has integers of any size.
    is_valid = all(type(number) is int and 0 <= number < _LARGEST for number in numbers)
    return record if is_valid and digest == _digest(asdict(record)) else None


def is_own(name: str) -> bool:
    """Return True if a file of a checkpoint, by its path in the folder, is one that alpa_lite or Orbax writes."""
    return _OWN.fullmatch(name) is not None


def files_of(folder: Path) -> list[str]:
    """Return the paths of all files in a folder and its subfolders; links are not followed."""
    paths = list[str]()
    for place, folders, names in os.walk(folder):
        # `os.walk` lists a link to a folder among the folders; it counts as a file here.
        links = [name for name in folders if Path(place, name).is_symlink()]
        paths += [Path(place, name).relative_to(folder).as_posix() for name in (*names, *links)]
    return paths


def _digest(data: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


class _FolderState(StrEnum):
    """The state of a step that the name of its folder gives after the number; see the docstring of this module."""

    UNFINISHED = "unfinished"
    REPLACED = "replaced"
    REMOVED = "removed"
    ASIDE = "aside"
    DAMAGED = "damaged"


# No leading zeros, so that each number has one name.
_STEP = r"(0|[1-9][0-9]{0,18})"
_NUMBERED = re.compile(_STEP)
_NAMED = re.compile(rf"{_STEP}\.({'|'.join(_FolderState)})(?:-[0-9a-z]+)?")

_logger = logging.getLogger("alpa_lite")


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedStep:
    """A checkpoint that exists: its folder, and its record if that can be read.

    is_old: it was written before records were introduced: before all those that have one.
    """

    number: int
    path: Path
    record: Record | None
    is_old: bool

    @property
    def save(self) -> int | None:
        """The number of saves when it was saved; None if unknown."""
        if self.record is None or self.record.step != self.number:
            return 0 if self.is_old else None
        return self.record.save


class Folder:
    """The steps in a folder."""

    def __init__(self, path: Path) -> None:
        """Open the folder without reading or writing, except that the lease is read."""
        self.path = path
        self.lease = Lease(path)

    def branch(self) -> dict[int, SavedStep]:
        """Return the steps of the current branch by number, rising; damaged or not."""
        there = self._there()
        abandoned = _abandoned(there)
        return {number: step for number, step in there.items() if number not in abandoned}

    def set_aside(self) -> tuple[Path, ...]:
        """Return the folders that no longer count: of abandoned branches, or damaged."""
        renamed = [
            path
            for path, state in self._named()
            if state in (_FolderState.ASIDE, _FolderState.DAMAGED) and _is_marked(path)
        ]
        return tuple(sorted([*renamed, *(step.path for step in _abandoned(self._there()).values())]))

    def prepare(self, number: int, parent: int | None, damaged: Iterable[int]) -> Path:
        """Clean up after an earlier run, and make the folder of a step; `damaged` steps are not to count any more."""
        place = self.path / f"{number}"
        if _exists(place) and not _is_marked(place):
            raise CheckpointError(
                f"{excerpt(place, 300)} is there and is no checkpoint of alpa_lite, so that it is not replaced. Remove "
                "it, or give another folder."
            )
        disk.make_folders(self.path)
        self.lease.hold()
        self._put_right()
        there = self._there()
        # Damaged ones too keep their content, under another name: somebody may still rescue it.
        broken = [there[step].path for step in damaged if step in there]
        for path in [*broken, *([place] if _exists(place) and number not in there else [])]:
            self._rename(path, f"{_number(path)}.{_FolderState.DAMAGED}")
        # After the clean-up, so that the number is above every step that counts.
        save = 1 + max((step.save or 0 for step in self._there().values()), default=0)
        unfinished = self.path / f"{number}.{_FolderState.UNFINISHED}-{self.lease.token}"
        self.lease.check()
        disk.make_folder(unfinished)
        disk.create(unfinished / RECORD, Record(step=number, parent=parent, save=save).to_bytes())
        # The mark is written first: after a loss of power the folder is recognised as ours and can be removed.
        disk.sync(unfinished / RECORD)
        disk.sync(unfinished)
        return unfinished

    def publish(self, unfinished: Path, number: int) -> None:
        """Give a checkpoint whose files are on disk its final name, by which it counts, and sync that."""
        place, replaced = self.path / f"{number}", None
        if _exists(place):
            # In two steps, as a rename cannot replace a folder that has content.
            replaced = self._rename(place, f"{number}.{_FolderState.REPLACED}")
            disk.sync(self.path)
        self.lease.check()
        try:
            disk.rename(unfinished, place)
        except OSError:
            if replaced is not None:
                # The step that was to be replaced counts again at once.
                disk.rename(replaced, place)
            raise
        disk.sync(self.path)

    def settle(self, number: int, keep: int | None, but: set[int]) -> None:
        """Clean up after a save: set aside abandoned steps, and remove those beyond the number to keep.

        but: steps that do not count, as they are damaged; they stay. Failures are reported, and tried again after the
        next save: the new checkpoint exists.
        """
        try:
            self._set_abandoned_aside()
            others = [step.path for step in self.branch().values() if step.number not in {number, *but}]
            # The new checkpoint is one of those to keep, and is not among the others.
            self._remove(others[: max(0, len(others) - keep + 1)] if keep is not None else [])
            self._remove(self._replaced())
        except OSError as error:
            _logger.warning("Old checkpoints in %s could not be removed: %s", excerpt(self.path, 300), error)

    def give_up(self, unfinished: Path) -> None:
        """Remove the files of a failed save, and restore the step that it was to replace."""
        self._remove([unfinished])
        self._bring_back()

    def _there(self) -> dict[int, SavedStep]:
        paths = {number: path for path, number in self._numbered() if _is_complete(path)}
        for path, state in self._named():
            if state is _FolderState.REPLACED and _is_complete(path):
                # A crash between the two renames of `publish` leaves only this name: the step has not been lost.
                paths.setdefault(_number(path), path)
        return {number: _step(number, paths[number]) for number in sorted(paths)}

    def _put_right(self) -> None:
        self._bring_back()
        left = [path for path, state in self._named() if state in (_FolderState.UNFINISHED, _FolderState.REMOVED)]
        self._remove([*left, *self._replaced()])
        self._set_abandoned_aside()

    def _bring_back(self) -> None:
        """Restore steps that were to be replaced but were not."""
        for path, state in self._named():
            if state is _FolderState.REPLACED and _is_complete(path) and not _exists(self.path / f"{_number(path)}"):
                self._rename(path, f"{_number(path)}")

    def _replaced(self) -> list[Path]:
        """Return the earlier checkpoints of steps that have been saved again completely."""
        earlier = (path for path, state in self._named() if state is _FolderState.REPLACED)
        return [path for path in earlier if _is_complete(self.path / f"{_number(path)}")]

    def _set_abandoned_aside(self) -> None:
        for number, step in _abandoned(self._there()).items():
            moved = self._rename(step.path, f"{number}.{_FolderState.ASIDE}")
            _logger.warning(
                "The checkpoint of step %d in %s is of a branch that was left, and is called %s from now on. Remove it "
                "by hand when it is no longer needed.",
                number,
                excerpt(self.path, 300),
                moved.name,
            )

    def _rename(self, path: Path, name: str) -> Path:
        """Rename a checkpoint of ours, with a number appended if the name is taken."""
        self.lease.check()
        if not _is_marked(path):
            raise CheckpointError(f"{excerpt(path, 300)} is no checkpoint of alpa_lite any more, and is not touched.")
        names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
        new = next(self.path / each for each in names if not _exists(self.path / each))
        disk.rename(path, new)
        return new

    def _remove(self, paths: Iterable[Path]) -> None:
        """Remove checkpoints of ours; those that contain foreign files are set aside, others are left alone."""
        doomed = list[Path]()
        for path in paths:
            # A folder that a crash left before the mark was written in it.
            if _is_empty(path):
                self.lease.check()
                disk.remove_folder(path)
            elif _is_marked(path):
                foreign = _foreign(path)
                if foreign:
                    self._keep_foreign(path, foreign)
                else:
                    # Renamed first, so that a checkpoint which is removed in part does not count.
                    is_going = (name := _NAMED.fullmatch(path.name)) is not None and name[2] == _FolderState.REMOVED
                    doomed.append(path if is_going else self._rename(path, f"{_number(path)}.{_FolderState.REMOVED}"))
        if doomed:
            disk.sync(self.path)
        for path in doomed:
            self.lease.check()
            # Only now that the new names are on disk: after a loss of power the files could be gone, but not the old
            # name.
            _wipe(path)

    def _keep_foreign(self, path: Path, foreign: str) -> None:
        moved = self._rename(path, f"{_number(path)}.{_FolderState.ASIDE}")
        _logger.warning(
            "%s was to be removed, but %s, which alpa_lite did not write: it stays as %s.",
            excerpt(path, 300),
            foreign,
            moved.name,
        )

    def _numbered(self) -> Iterator[tuple[Path, int]]:
        for name in self._names():
            if _NUMBERED.fullmatch(name):
                yield self.path / name, int(name)

    def _named(self) -> list[tuple[Path, _FolderState]]:
        """Return the folders whose names contain the state of a step, with that state."""
        matches = ((name, _NAMED.fullmatch(name)) for name in self._names())
        return [(self.path / name, _FolderState(match[2])) for name, match in matches if match is not None]

    def _names(self) -> list[str]:
        try:
            return sorted(os.listdir(self.path))
        except (FileNotFoundError, NotADirectoryError):
            return []


def _abandoned(there: Mapping[int, SavedStep]) -> dict[int, SavedStep]:
    """Return the steps, in rising order, after which a lower one was saved."""
    # In rising order, so that the saves of all lower steps are counted when a step is compared with them.
    abandoned, newest = dict[int, SavedStep](), -1
    for number, step in there.items():
        if step.save is not None and step.save < newest:
            abandoned[number] = step
        # A step whose record cannot be read abandons nothing.
        newest = max(newest, step.save or 0)
    return abandoned


def _step(number: int, path: Path) -> SavedStep:
    return SavedStep(number=number, path=path, record=read_record(path), is_old=list_kind(path) is ListKind.OLD)


def _number(path: Path) -> int:
    return int(path.name.partition(".")[0])


def _exists(path: Path) -> bool:
    return os.path.lexists(path)


def _is_marked(path: Path) -> bool:
    """Return True if a folder carries our mark; checked again before each change to it."""
    return path.is_dir() and ((path / RECORD).is_file() or list_kind(path) is not None)


def _is_complete(path: Path) -> bool:
    return (path / LIST).is_file() and _is_marked(path)


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and not any(path.iterdir())


def _foreign(path: Path) -> str:
    """Return the foreign content of a folder, in words; empty if there is none."""
    if path.is_symlink():
        return "it is a link to a folder"
    try:
        listed = read_list(path / LIST)
    except (OSError, ValueError):
        listed = {}
    for name in files_of(path):
        if not (is_own(name) or name in listed):
            return f"it holds {excerpt(name)}"
    return ""


def _wipe(path: Path) -> None:
    """Remove the files that are ours and the folders that become empty; the mark last, after a sync."""
    if _foreign(path):
        return
    # Without the mark a folder that is left by a crash would never be cleaned up.
    files = sorted(files_of(path), key=lambda name: (name == RECORD, name == LIST))
    last = [name for name in files if name in (LIST, RECORD)]
    for name in files[: len(files) - len(last)]:
        disk.unlink(path / name)
    for place, _, _ in os.walk(path, topdown=False):
        if Path(place) != path:
            disk.remove_folder(Path(place))
    disk.sync(path)
    for name in last:
        disk.unlink(path / name)
    with suppress(FileNotFoundError):
        disk.remove_folder(path)
