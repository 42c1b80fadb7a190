"""A calibration as text and as data."""

import io
import json

import pytest
from rich.console import Console

from alpa_lite.cli.machine_commands import calibration_data, calibration_text
from alpa_lite.inspection.text.progress_bar import CalibrationProgress
from tests.runtime.calibrate.test_calibrate import simulate


@pytest.fixture(scope="module")
def found():
    return simulate()


def test_text_names_every_measurement(found):
    text = calibration_text(found)
    for m in found.measurements:
        assert m.name[:40] in text
    assert "within a factor of" in " ".join(text.split())
    assert "300" in text and "µs" in text  # what launching takes


def test_data_is_json(found):
    data = json.loads(json.dumps(calibration_data(found)))
    assert [m["name"] for m in data["measurements"]] == [m.name for m in found.measurements]
    assert all(0.5 < m["predicted_over_measured"] < 2 for m in data["measurements"])


@pytest.mark.parametrize("terminal", [True, False])
def test_progress(terminal):
    out = io.StringIO()
    with CalibrationProgress(Console(file=out, force_terminal=terminal, width=100)) as progress:
        progress("compiling", 0, 1)
        progress("pass, 65536", 5, 10)
    assert ("pass, 65536" in out.getvalue()) == terminal
