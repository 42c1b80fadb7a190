"""Where the description of this process's devices comes from."""

import json
import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest

import alpa_lite as al
from alpa_lite.api.doctor import calibration_found
from alpa_lite.errors import ExecutionError, UnusableFileWarning
from alpa_lite.runtime.calibrate import calibrate as module
from alpa_lite.runtime.calibrate.calibrate import CACHE_VARIABLE, Calibration, fingerprint, path_for
from alpa_lite.runtime.calibrate.measurements import Timing
from cost_models import ClusterError, load_cluster
from tests.runtime.calibrate.test_measurements import measurements


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty cache, and a quick measurement that is told apart."""
    monkeypatch.setattr(module, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(module, "quick_calibration", measured_quickly)
    module._measured.cache_clear()
    yield tmp_path / "cache"
    module._measured.cache_clear()


def measured_quickly(devices, memory_bytes=2e9):
    known = load_cluster("p3.16xlarge")
    device = replace(known.device, memory_bytes=memory_bytes)
    cluster = replace(known, name="measured quickly", devices_per_host=len(devices), device=device)
    return Calibration(
        cluster=cluster,
        measurements=tuple(measurements()[:1]),
        dispatch=Timing(seconds=1e-4, num_samples=3),
        alone=None,
        together=None,
        fingerprint=fingerprint(devices),
        date="2026-01-01",
        quick=True,
    )


def write(path, devices_fingerprint, **changes):
    data = {**load_cluster("p3.16xlarge").to_json(), "name": "from the file", **changes}
    data["sources"] = {} if devices_fingerprint is None else {"fingerprint": devices_fingerprint}
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(data))
    return path


def test_without_a_file_devices_are_measured(devices):
    assert al.local_cluster().name == "measured quickly"


def test_a_quick_measurement_is_kept_for_the_next_process(devices, folder, monkeypatch, caplog):
    monkeypatch.setenv(CACHE_VARIABLE, "on")
    with caplog.at_level(logging.INFO, logger="alpa_lite"):
        first = al.local_cluster()
    (path,) = folder.iterdir()
    assert str(path) in caplog.text
    # As in a new process, in which the devices would be measured differently.
    module._measured.cache_clear()
    monkeypatch.setattr(module, "quick_calibration", lambda devices: measured_quickly(devices, memory_bytes=1e9))
    assert al.local_cluster() == first
    assert al.local_cluster(devices=devices[:4]) != first
    assert len(list(folder.iterdir())) == 2
    assert "quickly" in calibration_found()[0]


def test_nothing_is_kept_with_the_cache_off(devices, folder):
    assert al.local_cluster().name == "measured quickly"
    assert not folder.exists()


def test_a_file_that_cannot_be_used_is_not_replaced(devices, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, "on")
    kept = write(path_for(fingerprint(devices)), "8 × gpu NVIDIA H100, 1 host")
    before = kept.read_text()
    with pytest.warns(UnusableFileWarning):
        al.local_cluster()
    assert kept.read_text() == before


def test_the_kept_file_is_read(devices):
    write(path_for(fingerprint(devices)), fingerprint(devices))
    assert al.local_cluster().name == "from the file"
    assert al.local_cluster(devices=devices[:4]).name == "measured quickly"


def test_a_given_file_comes_first(devices, tmp_path):
    write(path_for(fingerprint(devices)), fingerprint(devices))
    given = write(tmp_path / "mine.json", fingerprint(devices), name="given")
    assert al.local_cluster(given).name == "given"
    by_hand = write(tmp_path / "by_hand.json", None, name="by hand")
    assert al.local_cluster(str(by_hand)).name == "by hand"
    assert al.cluster(str(given)).name == "given"


def test_a_file_of_other_devices_is_refused(devices, tmp_path):
    other = write(tmp_path / "other.json", "8 × gpu NVIDIA H100, 1 host")
    with pytest.raises(ExecutionError, match=r"measured on other devices \(8 × gpu NVIDIA H100, 1 host\)"):
        al.local_cluster(other)
    few = write(tmp_path / "few.json", None, devices_per_host=4)
    with pytest.raises(ExecutionError, match="describes 4 devices, but there are 8 here"):
        al.local_cluster(few)


@pytest.mark.parametrize("text", ["{", "[]", "{}", "[" * 10**5, "\udcff"])
def test_a_broken_file_is_passed_over_unless_it_was_given(devices, tmp_path, text):
    kept = path_for(fingerprint(devices))
    kept.parent.mkdir()
    kept.write_text(text, errors="surrogateescape")
    with pytest.warns(UnusableFileWarning, match=r"cannot be used.* Run `alpa-lite calibrate` again, or delete"):
        assert al.local_cluster().name == "measured quickly"
    with pytest.raises(ClusterError):
        al.local_cluster(kept)


def test_a_kept_file_of_other_devices_is_passed_over(devices):
    write(path_for(fingerprint(devices)), "8 × gpu NVIDIA H100, 1 host")
    with pytest.warns(UnusableFileWarning, match="measured on other devices"):
        assert al.local_cluster().name == "measured quickly"


def test_fingerprints(devices):
    def fakes(kind="NVIDIA H100", count=8, hosts=1, platform="gpu"):
        return [
            SimpleNamespace(platform=platform, device_kind=kind, process_index=i * hosts // count) for i in range(count)
        ]

    machines = [fakes(), fakes(count=4), fakes("NVIDIA A100"), fakes(hosts=2), fakes(platform="tpu"), devices]
    assert len({path_for(fingerprint(machine)) for machine in machines}) == len(machines)
    assert fingerprint(fakes()) == fingerprint(fakes())
    assert fingerprint(fakes(hosts=2)).startswith("8 × gpu NVIDIA H100, 2 hosts, jax ")
    assert "processors" in fingerprint(devices) and "processors" not in fingerprint(fakes())
