"""Where the description of this process's devices comes from."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

import alpa_lite as al
from alpa_lite.errors import ExecutionError, UnusableFileWarning
from alpa_lite.runtime.calibrate import calibrate as module
from alpa_lite.runtime.calibrate.calibrate import fingerprint, path_for
from cost_models import ClusterError, load_cluster


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty cache, and a quick measurement that is told apart."""
    monkeypatch.setattr(module, "cache_folder", lambda: tmp_path / "cache")
    measured = replace(load_cluster("p3.16xlarge"), name="measured quickly")
    monkeypatch.setattr(module, "_measured", lambda devices: measured)
    return tmp_path / "cache"


def write(path, devices_fingerprint, **changes):
    data = {**load_cluster("p3.16xlarge").to_json(), "name": "from the file", **changes}
    data["sources"] = {} if devices_fingerprint is None else {"fingerprint": devices_fingerprint}
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(data))
    return path


def test_without_a_file_devices_are_measured(devices):
    assert al.local_cluster().name == "measured quickly"


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
