"""A calibration as text and as data."""

import json

import pytest

from alpa_lite.cli.machine_commands import calibration_data, calibration_text
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
