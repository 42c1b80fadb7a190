"""Commands that measure, examine or occupy this machine: `calibrate`, `doctor`, `launch`, `bench` and `demo`.

`launch` starts a program as several processes; `bench` and `demo` are programs in processes of their own, which make
the devices.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import alpa_lite as al
from alpa_lite.api.doctor import diagnose, virtual_environment
from alpa_lite.cli.command import Command, answer, enveloped, positive, run_module, seconds
from alpa_lite.cli.exit_codes import Exit
from alpa_lite.errors import ExecutionError
from alpa_lite.inspection.text.progress_bar import shown_progress
from alpa_lite.inspection.text.tables import Table, render
from alpa_lite.runtime.calibrate.calibrate import Calibration
from alpa_lite.runtime.job.launch import GRACE_SECONDS, launch
from alpa_lite.text import show_seconds


def run_calibrate(given: argparse.Namespace) -> int:
    """Run `alpa_lite.calibrate` and write the file that `alpa_lite.local_cluster` reads."""
    if given.devices is not None:
        # In a new process: JAX has fixed the number of devices of this one already.
        options = ["--seconds", str(given.seconds), *(["--out", str(given.out)] if given.out else [])]
        words = ["calibrate", *options, *(["--json"] if given.json else [])]
        return run_module("alpa_lite.cli", words, virtual_environment(given.devices))
    with shown_progress("measure") as progress:
        found = al.calibrate(limit_seconds=given.seconds, progress=progress.counting("measure"))
    path = found.save(given.out)
    # Rendering the table takes a moment, which JSON does not need.
    text = "" if given.json else f"{calibration_text(found)}\nWritten to {path}."
    answer(given, text, lambda: {**calibration_data(found), "path": str(path)})
    return Exit.DONE


def calibration_text(calibration: Calibration) -> str:
    """Return a table of the measurements, and sentences on the fit."""
    rows = [
        (m.name, show_seconds(m.seconds), str(m.num_samples), f"{calibration.ratio(m):.2f}")
        for m in calibration.measurements
    ]
    columns = ("what", "measured", "median of", "predicted / measured")
    table = Table(title=calibration.cluster.name, columns=columns, rows=tuple(rows), numeric=frozenset(columns[1:]))
    launch = f"Launching a program takes {show_seconds(calibration.dispatch.seconds)}."
    return render([], [table]) + "\n\n" + render([launch, str(calibration.to_json()["notes"])])


def calibration_data(calibration: Calibration) -> dict[str, object]:
    """Return the content of the cluster file, and the measurements, as plain data."""
    measurements = [
        {
            "name": m.name,
            "seconds": m.seconds,
            "num_samples": m.num_samples,
            "predicted_over_measured": calibration.ratio(m),
        }
        for m in calibration.measurements
    ]
    return {"cluster": calibration.to_json(), "measurements": measurements}


def _calibrate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE.json",
        help="where to write the cluster (default: where local_cluster() looks)",
    )
    parser.add_argument("--seconds", type=seconds, default=60.0, metavar="S", help="limit for the timing (default: 60)")
    parser.add_argument("--devices", type=positive, metavar="N", help="measure N virtual CPU devices instead")


def run_doctor(given: argparse.Namespace) -> int:
    """Run `api.doctor.diagnose`; the exit code is 0 only if the machine is ready."""
    found = diagnose(test=not given.quick)
    answer(given, found, found.to_json)
    return Exit.DONE if found.healthy else Exit.ERROR


def _doctor_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="leave out the self-test, which takes some seconds")


CALIBRATE = Command(
    name="calibrate",
    about="measure this machine's devices",
    example="--seconds 30 --out mine.json",
    run=run_calibrate,
    add_arguments=_calibrate_arguments,
)

DOCTOR = Command(
    name="doctor",
    about="check whether this machine is ready",
    example="--json",
    run=run_doctor,
    add_arguments=_doctor_arguments,
)


def run_launch(given: argparse.Namespace) -> int:
    """Run `runtime.job.launch.launch`; with `--json` the output of the processes goes to the error stream."""
    # As for `python`: a file, or -m and a module, and then the arguments of the program.
    program = ["-m", *given.module] if given.module else given.program
    if not program or program == ["-m"]:
        raise ExecutionError("There is nothing to launch: give a Python file, or -m and a module.")
    if not given.module and not Path(program[0]).is_file():
        raise ExecutionError(
            f"{program[0]!r} is not a file. Give a Python file, or -m and a module, after the options."
        )
    # None leaves the devices to JAX, which on a machine with accelerators finds them.
    per_process = given.devices_per_process
    if per_process is not None and per_process < 1:
        raise ExecutionError(f"--devices-per-process {per_process} was given: each process needs at least one device.")
    ended = launch(
        program,
        num_processes=given.processes,
        environment=dict(os.environ) if per_process is None else _with_virtual_devices(per_process),
        port=given.port,
        grace_seconds=given.grace,
        recoverable=given.recoverable,
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


def _launch_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--processes", type=int, required=True, metavar="N", help="how many to start")
    parser.add_argument(
        "--devices-per-process",
        type=int,
        metavar="N",
        help="give each N virtual CPU devices (default: what JAX finds, the same for all)",
    )
    parser.add_argument(
        "--recoverable",
        action="store_true",
        help="let the others go on when a worker of an asynchronous parameter server was killed",
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
    add_arguments=_launch_arguments,
)


def run_benchmark(given: argparse.Namespace) -> int:
    """Run `alpa_lite.cli.bench` or `alpa_lite.cli.demo` in a new process.

    With `--json`, each line of JSON that the program prints is put into the envelope of the command.
    """

    def wrap(line: str) -> None:
        # Lines that are no JSON are messages of libraries.
        try:
            shown, stream = json.dumps(enveloped(given.command, json.loads(line))), given.stdout
        except ValueError:
            shown, stream = line, sys.stderr
        print(shown, file=stream, flush=True)

    # A process of its own: this one has loaded JAX, and with it the number of devices is fixed.
    return run_module(f"alpa_lite.cli.{given.command}", given.words, os.environ, read=wrap if given.json else None)


def _bench_arguments(parser: argparse.ArgumentParser) -> None:
    from alpa_lite.cli.bench.request import add_options

    add_options(parser)


def _demo_arguments(parser: argparse.ArgumentParser) -> None:
    from alpa_lite.cli.demo import add_options

    add_options(parser)


BENCH = Command(
    name="bench",
    about="planners against each other",
    example="--model train.py:example --cluster p3.16xlarge",
    run=run_benchmark,
    add_arguments=_bench_arguments,
)

DEMO = Command(
    name="demo",
    about="plan, train and compare on this machine",
    example="--steps 20",
    run=run_benchmark,
    add_arguments=_demo_arguments,
)
