"""Connections between the first process of a job and each of the others, for what is decided while a step runs.

    order     the first process tells all others what to launch next                            `tell`, `heard`
    report    another process tells the first one that something it has launched has ended      `report`, `is_reported`
    loss      the connection of a process that has died breaks, and the first process notices   `Channel.on_loss`
    company   it tells those that share a worker with that process, which end too               `Channel.add_step`

What is decided and reported counts for one step (`begin`). JAX's coordination service would take a request per look;
here a message wakes the one that waits for it. A message is a line of JSON. Strangers are kept out by a secret that the
coordination service hands to the processes of the job.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import os
import queue
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from math import isinf
from typing import BinaryIO, NoReturn

from alpa_lite import _jax
from alpa_lite.errors import ExecutionError
from alpa_lite.runtime.job.consensus import Json, KeyValues
from alpa_lite.runtime.job.shutdown import (
    end_job,
    flush,
    go_on_without,
    hang_timeout,
    has_left,
    make_recoverable,
    say,
)

IDLE_SECONDS = 1.0
"""Seconds between two looks for signals while there is nothing to do but to wait for a decision, which wakes."""

GREETING_SECONDS = 10.0
"""Seconds in which whoever connects must give the secret."""

KEEPALIVE_SECONDS = 5
"""Seconds between two signs of life on a connection without messages; after three missing ones it is broken."""

COMPANY_SECONDS = 2.0
"""Seconds in which those that share a worker with a process that has died are told; transfers fail at once."""

_COMPANY = 0
"""Stands for the number of a step, which are from 1 on, where a process is told that its company has died."""


def channel() -> Channel:
    """Return the channel of this process's job, connected at the first call. Collective then."""
    job = _jax.job()
    assert job is not None and job.num_processes > 1, "a job of one process has nothing to agree on"
    return _channel_of(job)


def go_on_after_losses() -> None:
    """Connect the processes, and let the job go on where one dies that it can do without, else end. Collective."""
    connected = channel()
    if connected.leads:
        connected.on_loss(_lose)
    # JAX's coordination service, which the first process runs, has no barrier at the end of such jobs.
    make_recoverable(
        connected.wait_until_alone if connected.leads else lambda seconds: None,
        lambda reason: None if connected.leads else connected.wait_for_company(),
    )


def _lose(process: int) -> None:
    """Go on without a process, or end the job, unless that process has ended in good order."""
    if has_left(process):
        return
    reason = f"process {process} has died"
    connected = channel()
    company = connected.company_of(process)
    if company:
        go_on_without(process, reason)
        say(f"{reason}. The others go on without its workers.")
        connected.tell_company(company, process)
    else:
        end_job(f"{reason}, and the steps of this job cannot go on without it")


@lru_cache(maxsize=1)
def _channel_of(job: _jax.JobInfo) -> Channel:
    return Channel(job)


class Channel:
    """This process's end of the connections: to all others on the first process, else to the first one."""

    def __init__(self, job: _jax.JobInfo) -> None:
        """Connect. Collective."""
        self.me, self.num_processes = job.process, job.num_processes
        self.step = 0
        self.lost: list[int] = []
        """Processes whose connection is broken, in the order in which that was seen."""
        self._may_lose: tuple[frozenset[int], ...] | None = None
        self._sending = threading.Lock()
        self._losses = threading.Condition()
        self._on_loss: Callable[[int], object] = lambda process: None
        self._reported: set[tuple[int, int]] = set()
        self._heard: queue.SimpleQueue[tuple[int, Json] | None] = queue.SimpleQueue()
        words = KeyValues(job)
        self._peers = _accepted(job, words) if self.leads else {0: _connected(job, words)}
        for process, peer in self._peers.items():
            name = f"alpa_lite channel {process}"
            threading.Thread(target=self._read, args=(process, peer), daemon=True, name=name).start()

    @property
    def leads(self) -> bool:
        """Whether this is the first process, which decides."""
        return self.me == 0

    def add_step(self, may_lose: Sequence[frozenset[int]]) -> None:
        """Take note of a step that is compiled, and of the processes that it can go on without.

        may_lose: sets of processes, of which all end when one has died, since they share work.
        """
        if self._may_lose is not None:
            everybody = frozenset(range(self.num_processes))
            needed = [everybody.difference(*groups) for groups in (self._may_lose, may_lose)]
            # What two steps need apart may hang together by what a third process shares with each of them.
            groups = joined_groups([*self._may_lose, *may_lose, *needed])
            may_lose = [group for group in groups if not any(group & each for each in needed)]
        self._may_lose = tuple(may_lose)

    def company_of(self, process: int) -> frozenset[int]:
        """Return the processes that end when this one has died, itself too; none if the job ends then."""
        return next((group for group in self._may_lose or () if process in group), frozenset())

    def tell_company(self, company: frozenset[int], process: int) -> None:
        """Tell the others of its company that a process has died; they end at once."""
        for other in company - {process, *self.lost}:
            self._send(other, [_COMPANY, process])

    def wait_for_company(self) -> None:
        """Before this process ends for a failure: let it be told first if it fails because its company has died."""
        if len(self.company_of(self.me)) > 1:
            time.sleep(COMPANY_SECONDS)

    def begin(self) -> None:
        """Begin a step. All processes must begin the same steps."""
        self.step += 1
        # Of earlier steps: a process reports only what it was told in this one.
        self._reported.clear()

    def tell(self, what: Json) -> None:
        """Tell all other processes a decision of this step."""
        for process in self._peers:
            if process not in self.lost:
                self._send(process, [self.step, what])

    def heard(self, seconds: float) -> Json | None:
        """Return the next decision of the first process; None if there is none within `seconds`.

        Raises `ExecutionError` if the first process is gone.
        """
        try:
            told = self._heard.get(timeout=seconds)
        except queue.Empty:
            return None
        if told is None or told[0] != self.step:
            why = "has ended" if told is None else f"is at step {told[0]}, and process {self.me} at step {self.step}"
            raise ExecutionError(
                f"Process 0, which decides in which order a step goes on, {why}. All processes of a job must call the "
                "same steps in the same order."
            )
        return told[1]

    def report(self, number: int) -> None:
        """Report to the first process what has ended in this step."""
        self._send(0, [self.step, number])

    def is_reported(self, number: int) -> bool:
        """Return whether a process has reported this in this step."""
        return (self.step, number) in self._reported

    def on_loss(self, call: Callable[[int], object]) -> None:
        """Let a function be called, in another thread, with the number of each process that is lost, also earlier."""
        with self._losses:
            self._on_loss = call
            for process in self.lost:
                call(process)

    def is_lost(self, process: int, seconds: float) -> bool:
        """Return whether the connection to a process is broken, or breaks within some seconds."""
        with self._losses:
            return self._losses.wait_for(lambda: process in self.lost, seconds)

    def wait_until_alone(self, seconds: float) -> None:
        """Return when the connections to all other processes are broken, or after some seconds."""
        with self._losses:
            self._losses.wait_for(lambda: len(self.lost) == len(self._peers), seconds)

    def close(self) -> None:
        """Close the connections of this process, as its end does."""
        for peer in self._peers.values():
            with suppress(OSError):  # the other end may have closed it
                peer.shutdown(socket.SHUT_RDWR)
            peer.close()

    def _send(self, process: int, what: Json) -> None:
        # The thread that reads sees a loss as well. Several threads send, whole lines each.
        with suppress(OSError), self._sending:
            self._peers[process].sendall(_line(what))

    def _read(self, process: int, peer: socket.socket) -> None:
        with suppress(OSError, ValueError), peer.makefile("rb") as lines:
            for line in lines:
                step, what = json.loads(line)
                if self.leads:
                    self._reported.add((step, int(what)))
                elif step == _COMPANY:
                    _end_with(what, self.me)
                else:
                    self._heard.put((step, what))
        if self.leads:
            with self._losses:
                self.lost.append(process)
                self._on_loss(process)
                self._losses.notify_all()
        else:
            self._heard.put(None)


def joined_groups(groups: Sequence[Iterable[int]]) -> list[frozenset[int]]:
    """Return groups without common members: those that have some are joined."""
    found = list[frozenset[int]]()
    for group in map(frozenset, groups):
        met = [other for other in found if other & group]
        found = [other for other in found if not other & group] + ([group.union(*met)] if group else [])
    return found


def _end_with(process: int, me: int) -> NoReturn:
    """End this process, with whose devices those of a process that has died shared work."""
    say(f"process {process} has died, with which process {me} shares a worker. This one ends, too.")
    flush()
    # As that one did: a launcher tells it from a failure, and the main thread may wait for a message that never comes.
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("SIGKILL ends a process")


def _accepted(job: _jax.JobInfo, words: KeyValues) -> dict[int, socket.socket]:
    """Return the connections that the other processes have opened, by their numbers."""
    secret, peers = secrets.token_hex(16), dict[int, socket.socket]()
    interface = _interface(job.host)
    family = socket.AF_INET6 if ":" in interface else socket.AF_INET
    with socket.create_server((interface, 0), family=family, backlog=job.num_processes) as server:
        server.settimeout(None if isinf(hang_timeout()) else hang_timeout())
        words.set("channel", [server.getsockname()[1], secret])
        while len(peers) < job.num_processes - 1:
            try:
                peer, _ = server.accept()
            except TimeoutError:
                raise ExecutionError(
                    f"Only {len(peers)} of {job.num_processes - 1} other processes have connected to process 0 within "
                    f"{hang_timeout():.0f} s. A firewall may close the port, or one of them does not come so far."
                ) from None
            if (process := _greeted(peer, secret)) is None:
                peer.close()
            else:
                peers[process] = peer
    return peers


def _interface(host: str) -> str:
    """Return the interface on which the first process listens: of its address if that is a number, else all."""
    if host == "localhost":
        return host
    with suppress(ValueError):
        return str(ipaddress.ip_address(host))
    return ""


def _greeted(peer: socket.socket, secret: str) -> int | None:
    """Return the number of the process at the other end; None for a stranger."""
    _prepare(peer)
    peer.settimeout(GREETING_SECONDS)
    try:
        said, process = json.loads(_first_line(peer))
        if not hmac.compare_digest(str(said), secret):
            return None
    except (OSError, ValueError, TypeError):
        return None
    peer.settimeout(None)
    return int(process)


def _first_line(peer: socket.socket) -> bytes:
    """Return the first line; unbuffered, so that what follows it is left for the thread that reads."""
    with peer.makefile("rb", buffering=0) as file:
        stream: BinaryIO = file  # pyright: ignore[reportAssignmentType]
        return stream.readline(200)


def _connected(job: _jax.JobInfo, words: KeyValues) -> socket.socket:
    port, secret = words.get("channel", 0)
    try:
        peer = socket.create_connection((job.host, port), timeout=GREETING_SECONDS)
        _prepare(peer)
        peer.sendall(_line([secret, job.process]))
    except OSError as error:
        raise ExecutionError(
            f"Process {job.process} cannot connect to process 0 at {job.host}:{port}: {error}. The order of this step "
            "is decided while it runs, over a connection to a free port of process 0's host: let no firewall close it."
        ) from error
    peer.settimeout(None)
    return peer


def _prepare(peer: socket.socket) -> None:
    """Send messages at once, and notice a host that is gone."""
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_SECONDS),
        ("TCP_KEEPINTVL", KEEPALIVE_SECONDS),
        ("TCP_KEEPCNT", 3),
    ):
        if hasattr(socket, option):  # Linux has all of them
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _line(value: object) -> bytes:
    return json.dumps(value).encode() + b"\n"
