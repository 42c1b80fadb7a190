"""Forward the output of processes, line by line, prefixed with the number of the process.

    read    a thread per stream reads at most `PIECE_BYTES` at a time, so that memory does not grow with the output
    line    complete lines are forwarded at once, with the prefix `[2] `
    piece   a line longer than a piece is split: the first part has the prefix `[2] `, the others `[2+] `
    wait    while nobody reads the output, its process blocks when it prints, as it would without a launcher

Lines of different processes never mix. Nothing is dropped unless the target is closed or fails.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import BinaryIO

PIECE_BYTES = 2**16
"""Longest piece of a line that is forwarded at once, in bytes, without its prefix."""

LEFT_OPEN_SECONDS = 1.0
"""After the processes have ended, a stream that something else holds open is read until it is silent for this long."""

_LOOK_SECONDS = 0.5
_CONTINUATION = range(0x80, 0xC0)
"""The bytes that continue a UTF-8 character."""


class Target:
    """A stream that receives the output of many processes."""

    def __init__(self, stream: BinaryIO) -> None:
        """Wrap a stream, bypassing its buffer if it has one, so that no thread holds the buffer's lock."""
        with suppress(OSError, ValueError):
            stream.flush()
        self._stream = getattr(stream, "raw", stream)
        self._lock = threading.Lock()
        self.problem: OSError | None = None

    def same_as(self, other: Target) -> bool:
        """Return True if both are one file, as after `2>&1`."""
        with suppress(OSError, ValueError, AttributeError):
            mine, theirs = os.fstat(self._stream.fileno()), os.fstat(other._stream.fileno())
            return (mine.st_dev, mine.st_ino) == (theirs.st_dev, theirs.st_ino)
        return self._stream is other._stream

    def share_lock(self, other: Target) -> None:
        """Exclude writes of another target while this one writes."""
        self._lock = other._lock

    def write(self, text: bytes) -> None:
        """Write all of the text, however long that takes. After an error, drop further text and store the error."""
        left = memoryview(text)
        with self._lock:
            while left and self.problem is None:
                try:
                    written = self._stream.write(left)
                except OSError as error:
                    self.problem = error
                except ValueError:
                    self.problem = OSError("the stream is closed")
                else:
                    if written is None:  # the file is non-blocking (set by another process), and full
                        select.select([], [self._stream], [], 1.0)
                    left = left[written or 0 :]
            with suppress(OSError, ValueError):
                self._stream.flush()


class Listeners:
    """The threads that read the streams of the processes of one launch."""

    def __init__(self, targets: Sequence[Target]) -> None:
        """Start without threads. Targets that are one file share a lock."""
        for number, target in enumerate(targets):
            for earlier in targets[:number]:
                if target.same_as(earlier):
                    target.share_lock(earlier)
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []

    def listen(self, source: BinaryIO, target: Target, name: str) -> None:
        """Forward what arrives on a stream; each line has `name` as its prefix, in brackets."""
        thread = threading.Thread(target=self._run, args=(source, target, name), daemon=True, name="alpa_lite output")
        self._threads.append(thread)
        thread.start()

    def finish(self) -> None:
        """Return when everything is forwarded. All processes must have ended."""
        self._ended.set()
        for thread in self._threads:
            while thread.is_alive():
                thread.join(_LOOK_SECONDS)  # with a timeout, so that a signal can interrupt the wait

    def _run(self, source: BinaryIO, target: Target, name: str) -> None:
        first, next_one = f"[{name}] ".encode(), f"[{name}+] ".encode()
        held, begun = b"", False
        while part := self._read(source.fileno()):
            *lines, held = (held + part).split(b"\n")
            text = bytearray()
            for line in lines:
                text += (next_one if begun else first) + line + b"\n"
                begun = False
            while len(held) > PIECE_BYTES:
                end = _end_of_character(held, PIECE_BYTES)
                text += (next_one if begun else first) + held[:end] + b"\n"
                held, begun = held[end:], True
            if text:
                target.write(bytes(text))
        if held:
            target.write((next_one if begun else first) + held + b"\n")
        source.close()

    def _read(self, file: int) -> bytes:
        """Return the next bytes; none at the end, or if the processes have ended and nothing arrives for a while."""
        silent = 0.0
        while True:
            ended = self._ended.is_set()
            ready = select.poll()
            ready.register(file, select.POLLIN)
            if ready.poll(1000 * _LOOK_SECONDS):
                return os.read(file, PIECE_BYTES)
            silent = silent + _LOOK_SECONDS if ended else 0.0
            if silent >= LEFT_OPEN_SECONDS:
                return b""


def _end_of_character(text: bytes, at: int) -> int:
    """Return the last position up to `at` that splits no UTF-8 character; `at` if the text is not UTF-8."""
    return next((at - back for back in range(4) if text[at - back] not in _CONTINUATION), at)
