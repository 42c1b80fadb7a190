"""Calibration: what is concluded on a simulated machine, and the file that comes of it."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from alpa_lite.errors import ExecutionError
from alpa_lite.runtime.calibrate.calibrate import Calibration, CalibrationPrograms, conclude, quick_calibration
from alpa_lite.runtime.calibrate.measurements import Stopwatch, TimedProgram, predicted_seconds
from alpa_lite.runtime.calibrate.probes import Probe
from cost_models import Cluster, Link, cluster_sources, load_cluster
from tests.runtime.calibrate.test_measurements import GUESS, TRUTH, measurements

SHARED = replace(GUESS, num_hosts=1, devices_per_host=8, shared_processor=True)


def simulate(guess=GUESS, truth=TRUTH, *, alone=None, seed=0, noise=0.0):
    """Calibrate against a clock that says what `truth` predicts; blocks on all devices take 8 s, on one `alone`."""
    now, rng = 0.0, np.random.default_rng(seed)

    def program(name, seconds):
        def run(trips):
            nonlocal now
            now += trips * seconds * float(np.exp(rng.normal(0, noise)))

        return TimedProgram(name=name, run=run)

    probes = [
        Probe(
            program=program(m.name, m.seconds),
            series=m.series,
            size=m.size,
            parts=m.parts,
            num_active_devices=m.num_active_devices,
        )
        for m in measurements(truth)
    ]
    blocks = [] if alone is None else [program("alone", alone), program("together", 8.0)]
    programs = CalibrationPrograms(dispatch=program("dispatch", 3e-4), blocks=blocks, probes=probes)
    stopwatch = Stopwatch(clock=lambda: now, limit_seconds=1e9)
    return conclude(guess, programs, stopwatch, "these devices")


@pytest.fixture(scope="module")
def found():
    return simulate(noise=0.05)


def test_the_fitted_cluster_says_what_was_measured(found):
    assert found.cluster.device.dispatch_seconds == pytest.approx(3e-4, rel=0.05)
    assert found.errors[-1] < 1.5
    for m in measurements():
        assert predicted_seconds(m, found.cluster) == pytest.approx(m.seconds, rel=0.5)


@pytest.mark.parametrize(("alone", "share"), [(8.0, 1.0), (16.0, 0.5), (0.1, 1.0), (100.0, 1 / 4)])
def test_the_share_of_one_device(alone, share):
    """All four of a host together take 8 s, and so does one that can use everything."""
    few = replace(SHARED, intra_host=Link(bandwidth_bytes_per_second=2e11, latency_seconds=4e-6))
    truth = replace(TRUTH, num_hosts=2, device=few.device)
    assert simulate(replace(SHARED, num_hosts=2, devices_per_host=4), truth, alone=alone).cluster.device_share == share


def test_the_file_holds_the_cluster_and_where_it_comes_from(found, tmp_path):
    path = found.save(tmp_path / "new" / "mine.json")
    assert load_cluster(str(path)) == found.cluster
    sources = cluster_sources(str(path))
    assert sources["device.memory_bandwidth"].startswith(f"measured on {found.date}, some device, median of ")
    assert sources["intra_host.latency_seconds"] == sources["device.memory_bandwidth"]
    assert sources["device.tiles"] == "assumed, not measured"
    assert sources["fingerprint"] == "these devices"
    assert json.loads(path.read_text())["notes"].startswith("Constants of a fit")
    assert Cluster.from_json(found.to_json()) == found.cluster


def test_a_file_that_cannot_be_written_is_a_sentence(found, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ExecutionError, match="choose another with --out"):
        found.save(tmp_path / "file" / "below.json")


def test_these_devices(devices):
    """The quick way, on the devices of the harness: structure, not speed."""
    cluster = quick_calibration(devices).cluster
    assert cluster.num_devices == len(devices) and cluster.num_hosts == 1
    assert cluster.shared_processor and 1 / len(devices) <= cluster.device_share <= 1
    assert cluster.device.memory_bandwidth > 0 and cluster.intra_host.bytes_per_second > 0
    one = quick_calibration(devices[:1]).cluster
    assert one.num_devices == 1 and not one.shared_processor


def test_hosts_with_different_numbers_of_devices_are_refused():
    fakes = [SimpleNamespace(process_index=i, platform="gpu", device_kind="g") for i in (0, 0, 1)]
    with pytest.raises(ExecutionError, match=r"The hosts have 2, 1 of the devices.*as many devices of each host"):
        quick_calibration(fakes)


def test_a_calibration_is_a_value(found):
    assert isinstance(found, Calibration)
    assert found.errors == tuple(sorted(found.errors)) and found.errors[0] >= 1
