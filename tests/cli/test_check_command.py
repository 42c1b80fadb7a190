"""`alpa-lite check`: a step against `jax.jit`, on virtual devices, with exit codes and data."""

import json
import subprocess
import sys

import pytest

from alpa_lite import cli
from alpa_lite.cli.exit_codes import Exit
from tests.cli.schema import documented
from tests.cli.steps import step_module

WRONG = """

import alpa_lite as al
import itertools

counts = itertools.count(1)

def drifting(params, x, y):
    new, value = train_step(params, x, y)
    return new, value * next(counts)

def wrong():
    return (drifting, *example()[1:])

def decorated():
    options = {"cluster": "p3.16xlarge", "planner": al.planners.DataParallel(), "num_microbatches": 4}
    return (al.parallelize(train_step, batch_argnums=("x", "y"), **options), *example()[1:])
"""


@pytest.fixture(autouse=True)
def at_work(tmp_path, monkeypatch):
    (tmp_path / "checked_model.py").write_text(step_module(layers=2, width=16, samples=32) + WRONG)
    monkeypatch.chdir(tmp_path)


def run(capsys, function, *arguments):
    capsys.readouterr()
    code = cli.main(["check", f"checked_model.py:{function}", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


PLANNED = ("--cluster", "p3.16xlarge", "--planner", "hybrid", "--option", "pipeline=2", "--option", "data=4")


def test_a_right_step(capsys, devices):
    code, out, err = run(capsys, "example", *PLANNED, "--num-microbatches", "4")
    assert code == Exit.DONE and not err
    assert (
        "gives what jax.jit gives: 3 outputs" in out
        and "0/1" in out
        and "arguments were drawn" in " ".join(out.split())
    )
    code, out, _ = run(capsys, "example", *PLANNED, "--num-microbatches", "4", "--json")
    found = documented("check", json.loads(out))
    assert code == Exit.DONE and found["ok"] and found["num_microbatches"] == 4 and found["drawn"]
    assert [leaf["name"] for leaf in found["leaves"]] == ["0/0", "0/1", "1"]


def test_a_wrong_step(capsys, devices):
    code, out, err = run(capsys, "wrong", *PLANNED)
    assert code == Exit.ERROR and "DIFFERS" in out and "1 (float32[]) is off by" in err and "Traceback" not in err
    code, out, err = run(capsys, "wrong", *PLANNED, "--json")
    found = documented("check", json.loads(out))
    assert code == Exit.ERROR and not found["ok"] and "is off by" in err
    assert [leaf["name"] for leaf in found["leaves"] if not leaf["ok"]] == ["1"]


def test_the_options_of_a_decorated_step_count(capsys, devices):
    code, out, _ = run(capsys, "decorated")
    assert code == Exit.DONE and "data parallel" in out and "in 4 micro-batches" in out
    code, out, _ = run(capsys, "decorated", "--num-microbatches", "2")
    assert code == Exit.DONE and "in 2 micro-batches" in out


def test_a_cluster_of_another_size_is_a_sentence(capsys, devices):
    code, _, err = run(capsys, "example", "--cluster", "p3.16xlarge:2")
    assert code == Exit.ERROR and "--devices 16" in err


def test_virtual_devices_are_those_of_another_process():
    command = ["check", "checked_model.py:example", "--devices", "4", "--cluster", "a4x-highgpu-4g", "--json"]
    command += ["--planner", "data_parallel", "--num-microbatches", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "alpa_lite.cli", *command], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["num_devices"] == 4
