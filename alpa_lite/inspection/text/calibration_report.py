"""A calibration as text: the measurements, and how well the fitted cluster predicts them."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from alpa_lite.inspection.text.tables import Table, render
from alpa_lite.runtime.calibrate.calibrate import Calibration
from alpa_lite.text import show_seconds


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


def calibration_data(calibration: Calibration) -> dict[str, Any]:
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


class CalibrationProgress:
    """A progress bar that is redrawn while devices are measured; silent without a terminal."""

    def __init__(self, console: Console) -> None:
        """Create a bar that draws on `console` inside its `with` block."""
        columns = (TextColumn("measuring"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("", total=None)

    def __enter__(self) -> CalibrationProgress:
        """Start drawing."""
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop drawing and remove the bar."""
        self._bar.stop()

    def __call__(self, what: str, done: int, total: int) -> None:
        """Show what is being measured, and how many of the measurements are done; called by `runtime.calibrate`."""
        self._bar.update(self._task, description=what, completed=done, total=total)
