"""`alpa-lite launch`: run a program as several processes on this machine."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from alpa_lite.api.doctor import virtual_environment
from alpa_lite.cli.command import Command, answer
from alpa_lite.errors import ExecutionError
from alpa_lite.runtime.job.launch import GRACE_SECONDS, launch


def run_launch(given: argparse.Namespace) -> int:
    """Run `runtime.job.launch.launch`; with `--json` the output of the processes goes to the error stream."""
    program = ["-m", *given.module] if given.module else given.program
    if not program or program == ["-m"]:
        raise ExecutionError("There is nothing to launch: give a Python file, or -m and a module.")
    if not given.module and not Path(program[0]).is_file():
        raise ExecutionError(
            f"{program[0]!r} is not a file. Give a Python file, or -m and a module, after the options."
        )
    per_process = given.devices_per_process
    if per_process is not None and per_process < 1:
        raise ExecutionError(f"--devices-per-process {per_process} was given: each process needs at least one device.")
    ended = launch(
        program,
        num_processes=given.processes,
        environment=dict(os.environ) if per_process is None else _with_virtual_devices(per_process),
        port=given.port,
        grace_seconds=given.grace,
        # The output must be JSON alone.
        out=sys.stderr.buffer if given.json else None,
    )
    if given.json:
        answer(given, "", lambda: {"codes": ended.codes, "failed": ended.failed})
    return ended.code


def _with_virtual_devices(count: int) -> dict[str, str]:
    """Return this environment with virtual CPU devices; flags in XLA_FLAGS that are already set remain."""
    found = virtual_environment(count)
    return {**found, "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {found['XLA_FLAGS']}".strip()}


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--processes", type=int, required=True, metavar="N", help="how many to start")
    parser.add_argument(
        "--devices-per-process",
        type=int,
        metavar="N",
        help="give each N virtual CPU devices (default: what JAX finds, the same for all)",
    )
    parser.add_argument("--port", type=int, metavar="N", help="of the coordinator on loopback (default: a free one)")
    parser.add_argument(
        "--grace",
        type=float,
        default=GRACE_SECONDS,
        metavar="SECONDS",
        help=f"between asking a process to end and ending it (default: {GRACE_SECONDS:g})",
    )
    parser.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE", help="run a module, with all that follows"
    )
    # All that follows belongs to the program, also what looks like an option.
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="PROGRAM.py", help="with its arguments")


LAUNCH = Command(
    name="launch",
    about="run a program as several processes on this machine",
    example="--processes 4 --devices-per-process 2 train.py --steps 10",
    run=run_launch,
    add_arguments=_arguments,
)
