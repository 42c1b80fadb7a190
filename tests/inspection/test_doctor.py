"""The doctor."""

import json
import os

import jax
import pytest

from alpa_lite.inspection import doctor


def test_this_harness_is_healthy(devices):
    found = doctor.diagnose()
    assert found.healthy
    assert len(found.devices) == len(devices)
    assert found.versions["jax"] and found.versions["highspy"] != "not installed"
    assert not found.advice
    assert "All is well." in str(found)
    assert json.loads(json.dumps(found.to_json()))["healthy"] is True


def test_the_environment_of_the_demo_is_that_of_the_harness(devices):
    wanted = doctor.virtual_cpu_environment(len(devices))
    assert {name: os.environ[name] for name in wanted} == wanted


@pytest.mark.parametrize(
    ("devices", "environment", "words"),
    [
        (["cpu cpu"], {}, "one CPU device"),
        (["cpu cpu"] * 8, {}, "NPROC is not set"),
        (["cpu cpu"] * 8, {"NPROC": "8"}, "NPROC is 8"),
        (["cpu cpu"] * 8, {"NPROC": "32"}, "stuck collective"),
    ],
)
def test_advice(devices, environment, words):
    assert words in " ".join(doctor.device_advice(devices, environment))


def test_no_advice_for_accelerators():
    assert doctor.device_advice(["gpu NVIDIA H100"] * 8, {}) == ()


def test_a_broken_solver_is_a_sentence(monkeypatch):
    def broken(**options):
        raise OSError("no library")

    monkeypatch.setattr(doctor.pulp, "HiGHS", broken)
    assert "HiGHS does not run: no library" in doctor.solver_error()


def test_the_compilation_cache_is_on_or_off(tmp_path):
    assert doctor.compilation_cache().startswith("off; jax.config.update(")
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    try:
        assert str(tmp_path) in doctor.compilation_cache()
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
