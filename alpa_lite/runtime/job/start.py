"""Join this process to a job."""

from __future__ import annotations

import faulthandler
import ipaddress
import os
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any

import jax

from alpa_lite import _jax
from alpa_lite.errors import ExecutionError
from alpa_lite.runtime.job.channel import go_on_after_losses
from alpa_lite.runtime.job.launch import COORDINATOR, NUM_PROCESSES, PROCESS_ID, RECOVERABLE
from alpa_lite.runtime.job.launched import leave, summary
from alpa_lite.runtime.job.shutdown import SHUTDOWN_SECONDS, Heartbeat, roll_call

HEARTBEAT_SECONDS = 20
"""Default seconds without a sign of life after which a process counts as lost; JAX's default is 100 s."""

HANG_TIMEOUT_SECONDS = 1800.0
"""Default seconds that processes wait for another one's message, while it neither plans nor compiles."""

STOPPED_SHARE = 0.25
"""Fraction of the heartbeat's timeout after which a stopped process is reported, before JAX ends all.

JAX sends a sign of life each half of that timeout, and it may be half the timeout after the stop that it misses the
next one. It would end all others, and nobody would wake the stopped process.
"""


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    coordinator_bind_address: str | None = None,
    heartbeat_timeout_seconds: int = HEARTBEAT_SECONDS,
    hang_timeout_seconds: float | None = HANG_TIMEOUT_SECONDS,
    preemption_service: bool = False,
    recoverable: bool = False,
    **options: Any,
) -> None:
    """Join the other processes of the job: `jax.distributed.initialize`, before anything else that uses JAX.

    Arguments that are not given come from `alpa-lite launch`, or else from the scheduler that JAX detects: SLURM, Open
    MPI, Kubernetes, Cloud TPU. If there is none, this process is the whole job, and says so.

    Args:
        coordinator_address: where the first process listens, as `host:port`; the same on all processes.
        num_processes: number of processes in the job.
        process_id: number of this process.
        coordinator_bind_address: the interface and port on which the first process listens. Default: the
            coordinator's address if it is a number or `localhost`, so that a job on loopback cannot be reached from
            outside; for names of hosts JAX's default, all interfaces.
        heartbeat_timeout_seconds: a process that gives no sign of life for so long is taken for lost, which ends the
            others. Most are noticed at once, by the connections that break.
        hang_timeout_seconds: where a process waits for so long for another one's part in a plan, a compilation or a
            checkpoint, and that one neither plans nor compiles, all end with exit code `HUNG`; None waits for ever.
            What steps of a plan wait for is another matter: `parallelize(watchdog_seconds=…)`.
        preemption_service: whether JAX's own starts, for programs that call
            `jax.experimental.multihost_utils.reached_preemption_sync_point`. It takes SIGTERM from then on, also where
            nobody calls that. `Checkpoints.stop_requested` does without.
        recoverable: whether the job goes on when a process has died that its steps can go on without: one that has
            workers of an asynchronous `ParameterServer` alone. The same on all processes, and always so under
            `alpa-lite launch --recoverable`. JAX calls its part of this experimental.
        options: others of `jax.distributed.initialize`.

    Raises:
        ExecutionError: the port is in use, the others were not there in time, or an option has no such value.
    """
    if hang_timeout_seconds is not None and not hang_timeout_seconds > 0:
        raise ExecutionError(f"hang_timeout_seconds={hang_timeout_seconds!r} was given; give seconds, or None.")
    launched = coordinator_address is None and COORDINATOR in os.environ
    if launched:
        coordinator_address = os.environ[COORDINATOR]
        num_processes, process_id = int(os.environ[NUM_PROCESSES]), int(os.environ[PROCESS_ID])
        # JAX must not look for more in the variables of a scheduler in whose allocation the launcher may run.
        options = {"cluster_detection_method": "deactivate", **options}
        recoverable = recoverable or RECOVERABLE in os.environ
    if coordinator_bind_address is None and "JAX_COORDINATOR_BIND_ADDRESS" not in os.environ:
        coordinator_bind_address = _interface(coordinator_address)
    # The launcher has checked the port and reserves it for the coordinator.
    if not launched and process_id == 0 and (listens_at := coordinator_bind_address or coordinator_address):
        _check_port(listens_at)
    # A job on loopback should not be reachable from outside by its collectives either.
    if _is_loopback(coordinator_address):
        _jax.collectives_at("127.0.0.1")
    try:
        with _jax.joining(preemption_service=preemption_service, recoverable=recoverable):
            jax.distributed.initialize(
                coordinator_address,
                num_processes,
                process_id,
                coordinator_bind_address=coordinator_bind_address,
                heartbeat_timeout_seconds=heartbeat_timeout_seconds,
                **options,
            )
        _look_after_each_other(hang_timeout_seconds, heartbeat_timeout_seconds, options)
        if recoverable and roll_call() is not None:
            go_on_after_losses()
    except ValueError as error:
        # JAX says "… should be defined" where it finds no other processes; any other `ValueError` is about an option.
        if (coordinator_address, num_processes, process_id) != (None, None, None) or "defined" not in str(error):
            raise
        print("alpa_lite: no other processes were found; this one is the whole job.", file=sys.stderr, flush=True)
    except jax.errors.JaxRuntimeError as error:
        raise ExecutionError(
            f"Process {process_id} could not join the job at {coordinator_address}: {error}. Start all {num_processes} "
            "processes, the first of them on the host of that address; others may use the port, or a firewall close it."
        ) from error


def _look_after_each_other(hang_timeout: float | None, heartbeat_timeout: float, options: Mapping[str, Any]) -> None:
    """Watch the other processes from now on: the end of one process, or a hang, ends all."""
    with suppress(OSError, ValueError, RuntimeError):  # the error stream may have no file descriptor
        if not faulthandler.is_enabled():
            faulthandler.enable()  # writes the stacks when JAX aborts a process in which Python hangs
    _leave_when_failing()
    if (here := roll_call()) is not None:
        heartbeat = Heartbeat(here, seconds=options.get("shutdown_timeout_seconds", SHUTDOWN_SECONDS))
        heartbeat.begin(hang_timeout, STOPPED_SHARE * heartbeat_timeout)


def _interface(address: str | None) -> str | None:
    """Return the interface to listen on for an address; None leaves it to JAX."""
    host, _, _ = (address or "").rpartition(":")
    if host == "localhost":
        return address
    with suppress(ValueError):
        ipaddress.ip_address(host.strip("[]"))
        return address
    return None


def _is_loopback(address: str | None) -> bool:
    """Return True if all processes of a job with this coordinator are on this machine."""
    host = (address or "").rpartition(":")[0].strip("[]")
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _check_port(address: str) -> None:
    """Raise `ExecutionError` if the port is in use.

    The coordination service would silently share the port of another one, and mix up their processes.
    """
    host, _, port = address.rpartition(":")
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(place)
    except (OSError, ValueError) as error:
        raise ExecutionError(
            f"The coordinator cannot listen at {address}: {error}. Give a coordinator_address whose port is free and "
            "whose host is this one."
        ) from error


def _leave_when_failing() -> None:
    """End this process at once on an uncaught error: at exit JAX waits for the others, which wait for this one."""
    # The present hook may be the user's or a debugger's: it still reports first.
    tell = sys.excepthook

    def tell_and_leave(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        tell(kind, error, traceback)
        leave(130 if issubclass(kind, KeyboardInterrupt) else 1, summary(error))

    sys.excepthook = tell_and_leave
