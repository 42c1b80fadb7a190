"""A model of a file system that forgets: what may be on a disk after a loss of power, of the operations that were seen.

A file holds what it held when it was last synced; anything later may be there, or not, or half of it. A name that was
made, changed or removed may be so or as before until its folder was synced; of several such changes any may be there
without the others (`Disk.worst`: none, all, all before one, each alone, all but each). A renaming within a folder is
one change. What TensorStore writes is seen by looking at the folder before and after each of our own operations; that
it syncs by itself is left out of account.
"""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from alpa_lite.runtime.checkpoint import disk

OPERATIONS = ("make_folder", "create", "write", "sync", "rename", "unlink", "remove_folder")
"""The functions of `disk` that change something or wait for it."""

Tree = tuple[tuple[str, Any], ...]
"""Names and what they are: bytes of a file, or a tree."""


@dataclass
class File:
    """A file: what it holds, and what it held when it was last synced."""

    content: bytes
    synced: bytes | None = None


@dataclass
class FolderNode:
    """A folder: the names that are on the disk for certain."""

    names: dict[str, int] = field(default_factory=dict)


Change = tuple[tuple[int, str, int | None], ...]
"""What happens to names at once: folder, name, and what it stands for then."""


class Disk:
    """A folder as it is, and as it may be after a loss of power."""

    def __init__(self, root: Path) -> None:
        """Everything that is there now is on the disk."""
        self.root = root
        self._nodes: dict[int, File | FolderNode] = {}
        self._known: dict[int, int] = {}  # by inode
        self._now: dict[tuple[int, str], int] = {}
        self._pending: list[Change] = []
        self._top = self._number(root.stat().st_ino, FolderNode())
        self.look()
        for change in self._pending:
            self._apply(self._nodes, change)
        self._pending.clear()
        for node in self._nodes.values():
            if isinstance(node, File):
                node.synced = node.content

    def look(self, *, at_once: bool = False) -> None:
        """See what has changed; `at_once`: by one operation."""
        seen: dict[tuple[int, str], int] = {}
        self._scan(self.root, self._top, seen)
        keys = [*dict.fromkeys([*self._now, *seen])]
        changes = [(*key, seen.get(key)) for key in keys if seen.get(key) != self._now.get(key)]
        if changes:
            self._pending += [tuple(changes)] if at_once else [(change,) for change in changes]
        self._now = seen
        alive = {self._top, *seen.values()}
        self._known = {inode: number for inode, number in self._known.items() if number in alive}

    def _scan(self, path: Path, folder: int, seen: dict[tuple[int, str], int]) -> None:
        for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
            inode = entry.inode()
            if entry.is_dir():
                number = self._number(inode, FolderNode())
                self._scan(Path(entry.path), number, seen)
            else:
                content = Path(entry.path).read_bytes()
                number = self._number(inode, File(content))
                node = self._nodes[number]
                assert isinstance(node, File)
                node.content = content
            seen[folder, entry.name] = number

    def _number(self, inode: int, node: File | FolderNode) -> int:
        if inode not in self._known:
            self._known[inode] = len(self._nodes)
            self._nodes[len(self._nodes)] = node
        return self._known[inode]

    def synced(self, path: Path) -> None:
        """A file or a folder is on the disk."""
        if not path.is_relative_to(self.root):
            return
        number = self._known[path.stat().st_ino]
        node = self._nodes[number]
        if isinstance(node, File):
            node.synced = node.content
            return
        for change in [change for change in self._pending if any(folder == number for folder, _, _ in change)]:
            self._apply(self._nodes, change)
            self._pending.remove(change)

    @staticmethod
    def _apply(nodes: dict[int, Any], change: Change) -> None:
        for folder, name, what in change:
            names = nodes[folder].names
            if what is None:
                names.pop(name, None)
            else:
                names[name] = what

    def worst(self) -> Iterator[Tree]:
        """What may be left."""
        count = range(len(self._pending))
        chosen = [[], *([i] for i in count), *(list(range(i)) for i in count), [*count]]
        chosen += [[j for j in count if j != i] for i in count]
        for which in {tuple(each) for each in chosen}:
            nodes = {
                i: copy.copy(node) if isinstance(node, File) else FolderNode(dict(node.names))
                for i, node in self._nodes.items()
            }
            for i in which:
                self._apply(nodes, self._pending[i])
            for lost in (_as_written, _as_synced, _half):
                yield _tree(nodes, self._top, lost)


def _as_written(file: File) -> bytes:
    return file.content


def _as_synced(file: File) -> bytes:
    return file.synced or b""


def _half(file: File) -> bytes:
    return file.content if file.synced == file.content else file.content[: len(file.content) // 2]


def _tree(nodes: dict[int, Any], number: int, lost: Callable[[File], bytes]) -> Tree:
    node = nodes[number]
    if isinstance(node, File):
        raise AssertionError("a file is no tree")
    items = ((name, nodes[what], what) for name, what in sorted(node.names.items()))
    return tuple(
        (name, lost(each) if isinstance(each, File) else _tree(nodes, what, lost)) for name, each, what in items
    )


def unpack(tree: Tree, folder: Path) -> None:
    """Make what a tree says."""
    folder.mkdir()
    for name, what in tree:
        if isinstance(what, bytes):
            (folder / name).write_bytes(what)
        else:
            unpack(what, folder / name)


class Recorder:
    """Sees every operation of `disk`; `states` are all trees that may be left at any time, with `acceptable` then.

    acceptable   what may be restored at this time; set by whoever runs the saves
    fail         the number of the operation that fails, with what; None: none does
    """

    def __init__(self, root: Path | None = None, *, fail: int | None = None, error: OSError | None = None) -> None:
        self.acceptable: frozenset[int | None] = frozenset()
        self.states: dict[Tree, set[frozenset[int | None]]] = {}
        self.names: list[str] = []
        self._disk = None if root is None else Disk(root)
        self._fail, self._error = fail, error or OSError(5, "Input/output error")
        self._lock = threading.RLock()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within, operations are seen."""
        before = {name: getattr(disk, name) for name in OPERATIONS}
        for name, function in before.items():
            setattr(disk, name, self._wrapped(name, function))
        try:
            yield
        finally:
            for name, function in before.items():
                setattr(disk, name, function)

    def _wrapped(self, name: str, function: Callable[..., None]) -> Callable[..., None]:
        def operation(path: Path, *args: Any) -> None:
            with self._lock:
                self.names.append(name)
                if self._fail == len(self.names) - 1:
                    raise self._error
                self._before()
                function(path, *args)
                self._after(name, path)

        return operation

    def _before(self) -> None:
        if self._disk is not None:
            self._disk.look()
            self.note()

    def _after(self, name: str, path: Path) -> None:
        if self._disk is not None:
            self._disk.look(at_once=True)
            if name == "sync":
                self._disk.synced(path)
            self.note()

    def note(self) -> None:
        """Power may be lost now."""
        assert self._disk is not None
        for tree in self._disk.worst():
            self.states.setdefault(tree, set()).add(self.acceptable)
