"""Several processes on this machine, as if each were on another: started, listened to, and ended together.

    start     each gets the address of a coordinator on loopback and its number, as variables that `initialize` reads
    listen    what they print comes out line by line, with the number of the process before it
    end       the first one that fails ends the others: SIGTERM, and SIGKILL after some seconds

Each process leads a group of its own, so that Ctrl-C reaches the launcher alone, and what a process has started ends
with it. Should the launcher be killed, a pipe of which it has the other end tells the processes (`start.initialize`).
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from alpa_lite.errors import ExecutionError

COORDINATOR, NUM_PROCESSES, PROCESS_ID, LAUNCHER = (
    "ALPA_LITE_COORDINATOR",
    "ALPA_LITE_NUM_PROCESSES",
    "ALPA_LITE_PROCESS_ID",
    "ALPA_LITE_LAUNCHER",
)
"""Environment variables of a launched process; the last holds the number of the end of a pipe."""

GRACE_SECONDS = 5.0
"""What a process gets between SIGTERM and SIGKILL."""

ENDED = 143
"""Exit code of a process that ends because its launcher is gone or another process of the job failed."""

_CAUSE_SECONDS = 5.0
"""So long after such a one the launcher waits for the one that failed by itself: it may still tell the others why."""

_LOOK_SECONDS = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """How it went.

    codes    exit code of each process; 128 + n where signal n ended it
    failed   the number of the one that failed first, of several at once that with the worst code; None: none did.
             Those that end because of it do not count, whether the launcher ended them or they did by themselves.
    """

    codes: tuple[int, ...]
    failed: int | None

    @property
    def code(self) -> int:
        """The exit code of the one that failed."""
        return 0 if self.failed is None else self.codes[self.failed]


def free_port() -> int:
    """A port of the loopback interface that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def launch(
    program: Sequence[str],
    *,
    num_processes: int,
    environment: Mapping[str, str] | None = None,
    port: int | None = None,
    grace_seconds: float = GRACE_SECONDS,
    out: BinaryIO | None = None,
    err: BinaryIO | None = None,
) -> Launched:
    """Run a Python program as so many processes of one job; returns when all have ended.

    Args:
        program: a file and its arguments, or "-m", a module and its arguments.
        num_processes: how many.
        environment: of the processes; default this one's.
        port: of the coordinator; default one that is free.
        grace_seconds: between SIGTERM and SIGKILL.
        out: gets what they write to standard output; default this process's.
        err: gets what they write to the error stream; default this process's.

    Raises:
        ExecutionError: there are no processes to start, or the program cannot be started.
    """
    if num_processes < 1:
        raise ExecutionError(f"{num_processes} processes were asked for: at least one is needed.")
    streams = out or sys.stdout.buffer, err or sys.stderr.buffer
    base = dict(os.environ if environment is None else environment)
    base |= {COORDINATOR: f"127.0.0.1:{port or free_port()}", NUM_PROCESSES: str(num_processes)}
    command = [sys.executable, str(Path(__file__).with_name("launched.py")), *program]
    job = _Job(streams, grace_seconds)
    with _ended_by_sigterm():
        try:
            for number in range(num_processes):
                job.start(command, {**base, PROCESS_ID: str(number), "PYTHONUNBUFFERED": "1"})
            failed = job.wait()
        finally:
            job.end()
    return Launched(codes=tuple(job.codes()), failed=failed)


class _Job:
    """The processes of one launch."""

    def __init__(self, streams: tuple[BinaryIO, BinaryIO], grace_seconds: float) -> None:
        self.streams, self.grace_seconds = streams, grace_seconds
        self.processes: list[subprocess.Popen[bytes]] = []
        self.listeners: list[threading.Thread] = []
        self.lock = threading.Lock()
        self.their_end, self.my_end = os.pipe()

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """One more process."""
        try:
            process = subprocess.Popen(
                list(command),
                env={**environment, LAUNCHER: str(self.their_end)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(self.their_end,),
                start_new_session=True,
            )
        except OSError as error:
            raise ExecutionError(f"{command[0]!r} cannot be started: {error.strerror or error}.") from error
        prefix = f"[{len(self.processes)}] ".encode()
        self.processes.append(process)
        for source, target in zip((process.stdout, process.stderr), self.streams, strict=True):
            listener = threading.Thread(target=self._listen, args=(source, target, prefix), daemon=True)
            self.listeners.append(listener)
            listener.start()

    def wait(self) -> int | None:
        """Until all have ended, or one has failed; its number."""
        until = None
        while True:
            codes = [process.poll() for process in self.processes]
            failed = [number for number, code in enumerate(codes) if code]
            causes = [number for number in failed if codes[number] != ENDED]
            until = until or (time.monotonic() + _CAUSE_SECONDS if failed else None)
            if causes or (until is not None and (None not in codes or time.monotonic() > until)):
                worst = max(causes or failed, key=[*self.codes()].__getitem__)
                self._say(worst)
                return worst
            if None not in codes:
                return None
            time.sleep(_LOOK_SECONDS)

    def end(self) -> None:
        """End what still runs, and hear what was said last."""
        for how, seconds in ((signal.SIGTERM, self.grace_seconds), (signal.SIGKILL, None)):
            for process in self.processes:
                # What a process has started may outlive it.
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, how)
            try:
                self._await(seconds)
            except KeyboardInterrupt:  # once more: no time is left
                continue
        for listener in self.listeners:
            listener.join(timeout=1.0)
        os.close(self.their_end)
        os.close(self.my_end)

    def codes(self) -> Iterator[int]:
        """The exit codes as shells tell them."""
        for process in self.processes:
            code = process.returncode or 0
            yield 128 - code if code < 0 else code

    def _await(self, seconds: float | None) -> None:
        until = None if seconds is None else time.monotonic() + seconds
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(None if until is None else max(0.0, until - time.monotonic()))

    def _say(self, number: int) -> None:
        code = self.processes[number].returncode
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        others = ": the others are ended" if len(self.processes) > 1 else ""
        self._write(self.streams[1], f"alpa-lite launch: process {number} {how}{others}.\n".encode())

    def _listen(self, source: Any, target: BinaryIO, prefix: bytes) -> None:
        for line in source:
            self._write(target, prefix + (line if line.endswith(b"\n") else line + b"\n"))
        source.close()

    def _write(self, target: BinaryIO, text: bytes) -> None:
        # Nobody may be reading any more (`| head`); the processes go on all the same.
        with self.lock, suppress(OSError, ValueError):
            target.write(text)
            target.flush()


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends what is inside in good order. In other threads than the first there are no signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _exit(number: int, frame: object) -> None:
    del frame
    raise SystemExit(128 + number)
