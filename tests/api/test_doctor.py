"""The doctor."""

import json
import os
from dataclasses import replace

import jax
import pulp
import pytest

from alpa_lite.api import doctor


def test_this_harness_is_healthy(devices, monkeypatch):
    flags = os.environ["XLA_FLAGS"].split()
    tested = [flag for flag in flags if flag != "--xla_backend_optimization_level=0"]  # for time: its one fault
    monkeypatch.setenv("XLA_FLAGS", " ".join(tested))
    found = doctor.diagnose(test=False)
    assert found.healthy
    assert len(found.devices) == len(devices)
    assert found.versions["jax"] and found.versions["highspy"] != "not installed"
    assert not found.advice
    assert "All is well." in str(found)
    assert json.loads(json.dumps(found.to_json()))["healthy"] is True


def test_the_environment_of_the_demo_is_that_of_the_harness(devices):
    for name, wanted in doctor.virtual_cpu_environment(len(devices)).items():
        assert set(wanted.split()) <= set(os.environ[name].split())


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


def test_a_solver_of_another_version_is_a_sentence(monkeypatch):
    monkeypatch.delattr(pulp, "LpStatusOptimal")
    assert "HiGHS does not run" in doctor.solver_error() and "pulp<4" in doctor.solver_error()


def test_a_broken_solver_is_a_sentence(monkeypatch):
    def broken(**options):
        raise OSError("no library")

    monkeypatch.setattr(pulp, "HiGHS", broken)
    assert "HiGHS does not run: no library" in doctor.solver_error()


def test_the_compilation_cache_is_on_or_off(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        assert doctor.compilation_cache().startswith("off; jax.config.update(")
        jax.config.update("jax_compilation_cache_dir", str(tmp_path))
        assert str(tmp_path) in doctor.compilation_cache()
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def test_the_self_test_plans_and_runs(devices, caplog):
    found = doctor.self_test()
    assert caplog.records == []
    assert not found.error
    assert "8 described devices" in str(found) and f"on {len(devices)} devices as jax.jit does" in str(found)


def test_a_wrong_answer_fails_the_self_test(monkeypatch):
    right = doctor.parallelize
    monkeypatch.setattr(doctor, "parallelize", lambda f, **options: lambda *args: wrong(right(f, **options)(*args)))
    found = doctor.self_test()
    assert "differs from jax.jit" in found.error
    assert not replace(doctor.diagnose(test=False), self_test=found).healthy


def wrong(result):
    params, loss = result
    return params, loss + 1


@pytest.mark.parametrize(
    ("environment", "config", "words"),
    [
        ({}, {"jax_debug_nans": True}, "jax_debug_nans is True"),
        ({}, {"jax_enable_x64": True}, "8 bytes"),
        ({}, {"jax_default_matmul_precision": "highest"}, "fraction of the speed"),
        ({"XLA_FLAGS": "--a=1 --xla_dump_to=/tmp/x"}, {}, "written to disk"),
        ({"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}, {}, "allocated by the driver"),
    ],
)
def test_flags_that_hurt(environment, config, words):
    (sentence,) = doctor.flag_advice(environment, config)
    assert words in sentence


def test_harmless_settings_are_left_alone():
    assert (
        doctor.flag_advice({"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}, {"jax_debug_nans": False}) == ()
    )
