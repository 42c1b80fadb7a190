"""Decide who may write into a folder of checkpoints: one process of one job, as long as it shows that it is alive.

    alpa_lite_writer.<n>.json   the owner, and a number that it raises every `BEAT_SECONDS`: the file with the largest n
                                is the lease; taking it over means creating file n + 1, which only one process can

A lease is taken over from a dead owner: at once if the death is visible (its process ran here and is gone), else when
its number has not changed for `EXPIRY_SECONDS` of this process's clock. Clocks are not compared, nothing is locked: the
file system only has to guarantee that of two that create the same file one fails. An owner checks before each change to
the folder whether the lease is still its own (`Lease.check`): one that was suspended for long must not go on.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import re
import socket
import threading
import time
import uuid
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from alpa_lite.errors import CheckpointError
from alpa_lite.runtime.checkpoint import disk
from cost_models.checks import excerpt, parse_json

BEAT_SECONDS = 10.0
"""Seconds between two signs of life of an owner."""

EXPIRY_SECONDS = 120.0
"""Seconds without a sign of life after which an owner on another host counts as dead."""

_LOOK_SECONDS = 0.5
_QUIET_SECONDS = 5.0
_MOST_BYTES = 4096
_NAME = re.compile(r"alpa_lite_writer\.([1-9][0-9]{0,17})\.json")

_logger = logging.getLogger("alpa_lite")

# Weak, so that a lease which is dropped without `give_back` does not look held for ever.
_open_here: weakref.WeakValueDictionary[str, Lease] = weakref.WeakValueDictionary()
"""The leases of this process by their tokens. A lease of this process that is not listed may be taken over."""


class Lease:
    """The right of this process to write into a folder, once it `hold`s it."""

    def __init__(self, folder: Path) -> None:
        """Prepare without writing; the time that an owner is silent counts from now on."""
        self.folder = folder
        self.token = uuid.uuid4().hex[:12]
        self._held: _Held | None = None
        self._seen: tuple[int, bytes, float] | None = None
        with suppress(OSError):  # `hold` reports the error
            self._look()

    def hold(self) -> None:
        """Take the lease, unless this process has it. Raises `CheckpointError` where another owner is alive."""
        if self._held is not None:
            return self.check()
        while True:
            newest = self._look()
            if newest is not None and (owner := self._alive(newest)) is not None:
                raise CheckpointError(
                    f"Another job saves checkpoints into {excerpt(self.folder, 300)}: {_in_words(owner)}. Two jobs "
                    "must not save into one folder: end that one, or give another folder."
                )
            if self._take(1 if newest is None else newest + 1):
                return None

    def check(self) -> None:
        """Raise `CheckpointError` unless the lease is still this process's."""
        held = self._held
        # A forked process inherits this object, but not the right to write.
        if held is None or held.process != os.getpid():
            raise CheckpointError(f"This process does not own the right to save into {excerpt(self.folder, 300)}.")
        if held.is_mine():
            return
        newest = _newest(self.folder)
        by = f" by {_in_words(_owner(_content(self.folder, newest)))}" if newest is not None else ""
        raise CheckpointError(
            f"The right to save into {excerpt(self.folder, 300)} was taken over from this process{by}, as it was "
            f"silent for more than {EXPIRY_SECONDS:.0f} s or its {held.path.name} was removed. Nothing more is "
            "written. Start the job again, alone, to go on from the newest checkpoint."
        )

    def give_back(self) -> None:
        """Release the lease: others may write from now on."""
        held, self._held = self._held, None
        _open_here.pop(self.token, None)
        if held is not None:
            held.end()

    def _look(self) -> int | None:
        """Return the number of the newest lease, and note when it was first seen in its present state."""
        newest = _newest(self.folder)
        if newest is None:
            self._seen = None
            return None
        content = _content(self.folder, newest)
        if self._seen is None or self._seen[:2] != (newest, content):
            self._seen = newest, content, time.monotonic()
        return newest

    def _alive(self, number: int) -> Mapping[str, object] | None:
        """Return the owner of a lease once it has shown that it is alive; None once it counts as dead."""
        first, told = self._seen, False
        while (seen := self._seen) is not None and first is not None and seen[0] == number:
            owner, silent = _owner(seen[1]), time.monotonic() - seen[2]
            # The kernel knows at once, while another host can only be awaited.
            if _is_here(owner):
                return owner if _runs(owner) else None
            # Its number was raised since the first look: whoever does that is alive.
            if seen != first:
                return owner
            if silent >= EXPIRY_SECONDS:
                return None
            if not told and silent > _QUIET_SECONDS:
                told = True
                _logger.warning(
                    "%s belongs to %s. It is awaited for %.0f s whether that one is alive.",
                    excerpt(self.folder, 300),
                    _in_words(owner),
                    EXPIRY_SECONDS - silent,
                )
            time.sleep(_LOOK_SECONDS)
            self._look()
        return None  # it is gone, or another process has taken it: look again

    def _take(self, number: int) -> bool:
        """Take over the lease; return False if another process was faster."""
        path = _path(self.folder, number)
        me = _myself(self.token)
        _open_here[self.token] = self  # registered before others can see the file
        try:
            # Of several processes that try this number the file system lets one succeed.
            disk.create(path, json.dumps(me).encode())
        except FileExistsError:
            return False
        held = _Held(path=path, number=number, me=me, process=os.getpid())
        if not held.is_mine():  # a newer lease exists: this process's view of the folder was out of date
            with suppress(OSError):
                disk.unlink(path)
            return False
        # A reader takes the largest number, so older files only take space.
        for older in (each for each in _numbers(self.folder) if each < number):
            with suppress(FileNotFoundError):
                disk.unlink(_path(self.folder, older))
        self._held = held
        threading.Thread(target=_beat, args=(held,), daemon=True, name="alpa_lite checkpoint lease").start()
        weakref.finalize(self, held.end)  # also at the exit of the interpreter
        return True


@dataclass(kw_only=True)
class _Held:
    """A lease that was taken; the thread that renews it refers only to this, so that dropping the `Lease` ends it."""

    path: Path
    number: int
    me: dict[str, object]
    process: int
    beats: int = 0
    over: threading.Event = field(default_factory=threading.Event)

    def is_mine(self) -> bool:
        """Return True if it is the newest lease of the folder, and still belongs to this process."""
        if _newest(self.path.parent) != self.number:
            return False
        return _owner(_content(self.path.parent, self.number)).get("token") == self.me["token"]

    def renew(self) -> None:
        """Write a sign of life into the existing file: a removed one is not made again."""
        self.beats += 1
        self.me |= {"beat": _beat_text(self.beats), "heard": _now()}
        # All contents of a lease have one length, so nothing of the old one remains behind the new one.
        with self.path.open("r+b") as file:
            file.write(json.dumps(self.me).encode())

    def end(self) -> None:
        """Remove the lease file, unless another process has taken it over; may be called twice."""
        if self.over.is_set() or self.process != os.getpid():
            return
        self.over.set()
        with suppress(OSError):
            if self.is_mine():
                disk.unlink(self.path)


def _beat(held: _Held) -> None:
    while not held.over.wait(BEAT_SECONDS):
        with suppress(OSError):  # retried at the next beat; others wait much longer for a sign of life
            if not held.is_mine():
                return
            held.renew()


def _beat_text(number: int) -> str:
    """Return the number in a fixed width, so that a reader in the middle of a change can parse the lease."""
    return f"{number:015d}"


def _path(folder: Path, number: int) -> Path:
    return folder / f"alpa_lite_writer.{number}.json"


def _numbers(folder: Path) -> list[int]:
    try:
        return [int(match[1]) for name in os.listdir(folder) if (match := _NAME.fullmatch(name))]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _newest(folder: Path) -> int | None:
    return max(_numbers(folder), default=None)


def _content(folder: Path, number: int) -> bytes:
    """Return the content of a lease file; empty if the file is gone or is no lease."""
    try:
        return disk.read_bounded(_path(folder, number), _MOST_BYTES)
    except (FileNotFoundError, ValueError):
        return b""


def _owner(content: bytes) -> dict[str, object]:
    """Return the owner that a lease names; empty if it cannot be parsed, as while it is being written."""
    try:
        data = parse_json(content, any_text=True, max_values=32, max_depth=1)
    except ValueError:
        return {}
    return data if isinstance(data, dict) else {}


def _myself(token: str) -> dict[str, object]:
    number = os.getpid()
    return {
        "token": token,
        "host": socket.gethostname(),
        "kernel": _text("/proc/sys/kernel/random/boot_id"),
        "namespace": _link("/proc/self/ns/pid"),
        "process": number,
        "began": _began(number),
        "started": _now(),
        "beat": _beat_text(0),
        "heard": _now(),
    }


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _place(owner: Mapping[str, object]) -> tuple[object, ...] | None:
    """Return a key of the process namespace (of one running kernel); None if unknown."""
    place = owner.get("kernel"), owner.get("namespace")
    return place if all(isinstance(part, str) and part for part in place) else None


def _is_here(owner: Mapping[str, object]) -> bool:
    """Return True if the owner's process id is valid in this process's namespace."""
    return (place := _place(owner)) is not None and place == _place(_myself(""))


def _began(process: int) -> str:
    """Return when a process was started, in ticks of its kernel.

    Empty if there is none, "over" for a zombie, "hidden" for a process of another user.
    """
    state, *rest = _text(f"/proc/{process}/stat").rpartition(") ")[2].split() or [""]
    if state:
        # The state is field 3 of the file, and the start is field 22. A zombie has ended, but its exit code was not
        # read.
        return "over" if state in "ZX" else rest[18]
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        pass
    return "hidden"


def _runs(owner: Mapping[str, object]) -> bool:
    """Return True if a process on this machine is alive; for this process, if the holder of the lease exists."""
    process = owner.get("process")
    # The start time tells whether the id belongs to another process by now; the content may be anything.
    if type(process) is not int or not 0 < process < 2**31 or _began(process) not in (owner.get("began"), "hidden"):
        return False
    if process != os.getpid():
        return True
    gc.collect()  # an unreachable lease may still await collection
    return owner.get("token") in _open_here


def _in_words(owner: Mapping[str, object]) -> str:
    if not owner:
        return "one that has not said who it is"
    host, process, started, heard = (excerpt(owner.get(key, "?")) for key in ("host", "process", "started", "heard"))
    if _is_here(owner) and owner.get("process") == os.getpid():
        return "this process, through another Checkpoints, which must be closed first"
    return f"process {process} on {host}, which began to save at {started} and was last heard of at {heard}"
