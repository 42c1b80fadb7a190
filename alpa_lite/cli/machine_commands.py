"""`alpa-lite calibrate` and `alpa-lite doctor`: measure and examine this machine."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

import alpa_lite as al
from alpa_lite.api.doctor import diagnose, virtual_environment
from alpa_lite.cli.command import Command, answer, positive, run_module, seconds
from alpa_lite.cli.exit_codes import Exit
from alpa_lite.inspection.text.progress_bar import CalibrationProgress
from alpa_lite.inspection.text.tables import Table, render
from alpa_lite.runtime.calibrate.calibrate import Calibration
from alpa_lite.text import show_seconds


def run_calibrate(given: argparse.Namespace) -> int:
    """Run `alpa_lite.calibrate` and write the file that `alpa_lite.local_cluster` reads."""
    if given.devices is not None:
        # In a new process: JAX has fixed the number of devices of this one already.
        options = ["--seconds", str(given.seconds), *(["--out", str(given.out)] if given.out else [])]
        words = ["calibrate", *options, *(["--json"] if given.json else [])]
        return run_module("alpa_lite.cli", words, virtual_environment(given.devices))
    with CalibrationProgress(Console(stderr=True)) as progress:
        found = al.calibrate(limit_seconds=given.seconds, progress=progress)
    path = found.save(given.out)
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
