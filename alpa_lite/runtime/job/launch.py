"""Run several processes of one job on this machine: start them, forward their output, and end them together.

    start     each receives a coordinator's address on loopback and its number, as variables that `initialize` reads
    listen    their output is forwarded line by line, prefixed with the number of the process       `Listeners`
    end       the first one that fails ends the others: SIGTERM, and SIGKILL after some seconds

Each process leads a process group of its own, so that Ctrl-C reaches the launcher alone, and everything that a process
has started ends with it. If the launcher is killed, a separate process ends the others (`orphans`).

Output:

    read    a thread per stream reads at most `PIECE_BYTES` at a time, so that memory does not grow with the output
    line    complete lines are forwarded at once, with the prefix `[2] `
    piece   a line longer than a piece is split: the first part has the prefix `[2] `, the others `[2+] `
    wait    while nobody reads the output, its process blocks when it prints, as it would without a launcher

Lines of different processes never mix. Nothing is dropped unless the target is closed or fails.
"""

from __future__ import annotations

import os
import select
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
from typing import BinaryIO

from alpa_lite.errors import ExecutionError
from alpa_lite.runtime.job.orphans import DONE

PIECE_BYTES = 2**16
"""Longest piece of a line that is forwarded at once, in bytes, without its prefix."""

LEFT_OPEN_SECONDS = 1.0
"""After the processes have ended, a stream that something else holds open is read until it is silent for this long."""

_POLL_SECONDS = 0.5
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
        # With separate locks, lines of the two streams could mix where `2>&1` makes them one file.
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
                thread.join(_POLL_SECONDS)  # with a timeout, so that a signal can interrupt the wait

    def _run(self, source: BinaryIO, target: Target, name: str) -> None:
        # Bytes, not text: the output of a program may be in any encoding, or in none.
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
            # Unlike `select`, it takes file descriptors above 1023, which a launch of many processes needs.
            ready = select.poll()
            ready.register(file, select.POLLIN)
            if ready.poll(1000 * _POLL_SECONDS):
                return os.read(file, PIECE_BYTES)
            silent = silent + _POLL_SECONDS if ended else 0.0
            if silent >= LEFT_OPEN_SECONDS:
                return b""


def _end_of_character(text: bytes, at: int) -> int:
    """Return the last position up to `at` that splits no UTF-8 character; `at` if the text is not UTF-8."""
    return next((at - back for back in range(4) if text[at - back] not in _CONTINUATION), at)


COORDINATOR, NUM_PROCESSES, PROCESS_ID, RECOVERABLE, REGISTER = (
    "ALPA_LITE_COORDINATOR",
    "ALPA_LITE_NUM_PROCESSES",
    "ALPA_LITE_PROCESS_ID",
    "ALPA_LITE_RECOVERABLE",
    "ALPA_LITE_REGISTER",
)
"""Environment variables of a launched process; the last holds the number of a pipe's end, in which it registers.
`RECOVERABLE` is set if the job goes on when a process has died that it can do without.
"""

GRACE_SECONDS = 5.0
"""Seconds that a process gets between SIGTERM and SIGKILL."""

ENDED = 143
"""Exit code of a process that ends because another process of the job failed."""

HUNG = 124
"""Exit code of a process that ends because it hangs, or because another process of its job does."""

_CAUSE_SECONDS = 5.0
"""Seconds that the launcher waits after an exit with one of these codes for the others, which may still state the
cause.
"""

_LOOK_SECONDS = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchResult:
    """The result of a launch.

    codes    exit code of each process; 128 + n where signal n ended it
    failed   the number of the process that failed first, of several at once that with the worst code; None: none did.
             Processes that end because of it do not count, whether the launcher ended them or they did by themselves,
             nor those without which a recoverable job went on to its end.
    """

    codes: tuple[int, ...]
    failed: int | None

    @property
    def code(self) -> int:
        """The exit code of the process that failed."""
        return 0 if self.failed is None else self.codes[self.failed]


def reserved_port(port: int = 0) -> socket.socket:
    """Return a socket that reserves a port of the loopback interface until it is closed; 0: any free port.

    The coordinator, which shares its port, can still listen there. Without the socket another job, or any connection
    from this machine, could get the port before the first process listens.

    Raises:
        ExecutionError: the port is in use.
    """
    reserved = socket.socket()
    try:
        try:
            reserved.bind(("127.0.0.1", port))
        except OSError:
            # Connections of an earlier job in TIME_WAIT do not matter; a socket that listens does.
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reserved.bind(("127.0.0.1", port))
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # only after the bind has shown it to be free
    except (OSError, OverflowError) as error:
        reserved.close()
        raise ExecutionError(
            f"The coordinator cannot listen at 127.0.0.1:{port}: {error}. Give a port that is free, or none."
        ) from error
    return reserved


def launch(
    program: Sequence[str],
    *,
    num_processes: int,
    environment: Mapping[str, str] | None = None,
    port: int | None = None,
    grace_seconds: float = GRACE_SECONDS,
    recoverable: bool = False,
    out: BinaryIO | None = None,
    err: BinaryIO | None = None,
) -> LaunchResult:
    """Run a Python program as so many processes of one job; returns when all have ended.

    Args:
        program: a file and its arguments, or "-m", a module and its arguments.
        num_processes: number of processes.
        environment: environment variables of the processes; default: those of this process.
        port: port of the coordinator; default: a free one.
        grace_seconds: seconds between SIGTERM and SIGKILL.
        recoverable: whether the others are left to go on when a signal has ended one of them, but the first; see
            `alpa_lite.initialize`.
        out: receives the standard output of the processes; default: standard output of this process.
        err: receives the error streams of the processes; default: error stream of this process.

    Raises:
        ExecutionError: there are no processes to start, or the program cannot be started.
    """
    if num_processes < 1:
        raise ExecutionError(f"{num_processes} processes were requested: at least one is needed.")
    base = dict(os.environ if environment is None else environment)
    # By its path: with `-m`, Python would import this package, and JAX, before the program can set what JAX reads.
    command = [sys.executable, str(Path(__file__).with_name("launched.py")), *program]
    with reserved_port(port or 0) as reserved, _ended_by_sigterm():
        address = f"127.0.0.1:{reserved.getsockname()[1]}"
        # Unbuffered: Python would hold back what it writes to a pipe, and a killed process would lose it.
        base |= {COORDINATOR: address, NUM_PROCESSES: str(num_processes), "PYTHONUNBUFFERED": "1"}
        base |= {RECOVERABLE: "1"} if recoverable else {}
        job = _Job(out or sys.stdout.buffer, err or sys.stderr.buffer, grace_seconds, recoverable)
        try:
            for number in range(num_processes):
                job.start(command, {**base, PROCESS_ID: str(number)})
            failed = job.wait()
        finally:
            job.end()
    return LaunchResult(codes=tuple(job.codes()), failed=failed)


class _Job:
    """The processes of one launch."""

    def __init__(self, out: BinaryIO, err: BinaryIO, grace_seconds: float, recoverable: bool = False) -> None:
        self.grace_seconds, self.recoverable = grace_seconds, recoverable
        self.died: set[int] = set()
        self.targets = Target(out), Target(err)
        self.listeners = Listeners(self.targets)
        self.processes: list[subprocess.Popen[bytes]] = []
        # Isolated and without site packages it starts in milliseconds, whatever environment the user has.
        orphans = [sys.executable, "-I", "-S", str(Path(__file__).with_name("orphans.py"))]
        pipe, self.register = os.pipe()
        # Only `orphans` keeps the reading end: a write after its end fails instead of blocking.
        with open(pipe, "rb") as registered:
            self.orphans = subprocess.Popen(
                [*orphans, str(os.getpid()), str(grace_seconds)],
                stdin=registered,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start one more process."""
        try:
            process = subprocess.Popen(
                list(command),
                env={**environment, REGISTER: str(self.register)},
                # None of several processes can be the one that reads the terminal.
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(self.register,),
                start_new_session=True,
            )
        except OSError as error:
            raise ExecutionError(f"{command[0]!r} cannot be started: {error.strerror or error}.") from error
        name = str(len(self.processes))
        self.processes.append(process)
        for source, target in zip((process.stdout, process.stderr), self.targets, strict=True):
            assert source is not None
            self.listeners.listen(source, target, name)  # pyright: ignore[reportArgumentType]

    def wait(self) -> int | None:
        """Wait until all have ended, or one has failed; return its number."""
        until = None
        while True:
            codes = [ended_with(process) for process in self.processes]
            failed = [number for number, code in enumerate(codes) if code]
            if self.recoverable:
                failed = self._without_died(failed, codes)
            # A process that detected a hang knows the cause: the exits of others follow from it, as does `ENDED`.
            causes = [] if HUNG in codes else [number for number in failed if codes[number] != ENDED]
            until = until or (time.monotonic() + _CAUSE_SECONDS if failed else None)
            if causes or (until is not None and (None not in codes or time.monotonic() > until)):
                worst = max(causes or failed, key=lambda n: (codes[n] == HUNG, _as_shells_tell(codes[n] or 0)))
                self._say(worst, codes[worst] or 0)
                return worst
            if None not in codes:
                return None
            time.sleep(_LOOK_SECONDS)

    def _without_died(self, failed: list[int], codes: Sequence[int | None]) -> list[int]:
        """Return those that have failed, but none if signals have ended all of them: the first process decides then."""
        died = {number for number in failed if (codes[number] or 0) < 0 and number > 0}
        for number in sorted(died - self.died):
            self._say(number, codes[number] or 0, "the first process decides whether the others go on")
        self.died = died
        return [] if died == {*failed} else failed

    def end(self) -> None:
        """End the processes that still run, and forward their last output; a second signal cuts that short."""
        # A process may save its state on SIGTERM; SIGKILL ends those that take too long.
        for how, seconds in ((signal.SIGTERM, self.grace_seconds), (signal.SIGKILL, None)):
            for process in self.processes:
                # Child processes may outlive a process, whose id remains the id of its group.
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, how)
                    # A stopped process acts on SIGTERM only once it is continued.
                    os.killpg(process.pid, signal.SIGCONT)
            with suppress(KeyboardInterrupt, SystemExit):  # a second signal: do not wait
                self._await(seconds)
        # Before `wait` below makes the ids of the processes free: `orphans` must not signal a group that reuses one.
        with suppress(BrokenPipeError):
            os.write(self.register, DONE + b"\n")
        os.close(self.register)
        with suppress(KeyboardInterrupt, SystemExit):
            self.listeners.finish()
        for process in (*self.processes, self.orphans):
            process.wait()
        for target in self.targets:
            if target.problem is not None and not isinstance(target.problem, BrokenPipeError):
                self.targets[1].write(f"alpa-lite launch: output was lost: {target.problem}.\n".encode())

    def codes(self) -> Iterator[int]:
        """Yield the exit codes in the convention of shells."""
        return (_as_shells_tell(process.returncode or 0) for process in self.processes)

    def _await(self, seconds: float | None) -> None:
        """Wait at most `seconds` until all have ended. Remaining processes keep their numbers."""
        until = None if seconds is None else time.monotonic() + seconds
        while None in map(ended_with, self.processes) and (until is None or time.monotonic() < until):
            time.sleep(_LOOK_SECONDS)

    def _say(self, number: int, code: int, then: str = "the others are ended") -> None:
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        others = f": {then}" if len(self.processes) > 1 else ""
        self.targets[1].write(f"alpa-lite launch: process {number} {how}{others}.\n".encode())


def ended_with(process: subprocess.Popen[bytes]) -> int | None:
    """Return the code of a process that has ended, else None; it stays waitable, so that its id is not reused."""
    status = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if status is None:
        return None
    return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status


def _as_shells_tell(code: int) -> int:
    return 128 - code if code < 0 else code


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Context in which SIGTERM ends the launch in good order. Only the main thread can handle signals."""
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
