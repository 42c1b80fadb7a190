"""SIGTERM and Ctrl-C do what they do without alpa_lite, unless the program asks for something else."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import alpa_lite as al
from alpa_lite.runtime.job.launch import COORDINATOR, NUM_PROCESSES, PROCESS_ID
from tests.distributed.launched import ROOT, environment, free_port

COUNT = 3


def told(how: str, victims: list[int], folder: Path) -> tuple[list[int], list[str]]:
    """Exit codes and output of a job some of whose processes get SIGTERM when all are at work."""
    job = {**environment(1), NUM_PROCESSES: str(COUNT), COORDINATOR: f"127.0.0.1:{free_port()}"}
    printed, processes = [folder / f"printed {number}" for number in range(COUNT)], list[subprocess.Popen[bytes]]()
    command = [sys.executable, "-m", "tests.distributed.stops", how, str(folder / "checkpoints")]
    try:
        for number, path in enumerate(printed):
            with path.open("w") as out:
                mine = {**job, PROCESS_ID: str(number)}
                processes.append(subprocess.Popen(command, cwd=ROOT, env=mine, stdout=out, stderr=subprocess.STDOUT))
        until = time.monotonic() + 120
        while not all("goes on" in path.read_text() for path in printed) and time.monotonic() < until:
            time.sleep(0.05)
        for victim in victims:
            processes[victim].send_signal(signal.SIGTERM)
        codes = [process.wait(timeout=90) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return codes, [path.read_text() for path in printed]


@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.long)])
def test_sigterm_ends_a_job_that_never_asks(victim: int, tmp_path: Path) -> None:
    codes, printed = told("never", [victim], tmp_path)
    assert codes[victim] == -signal.SIGTERM and all(codes), (codes, printed)


@pytest.mark.parametrize("victims", [[1], *(pytest.param(each, marks=pytest.mark.long) for each in ([0], [2, 1, 0]))])
def test_those_that_ask_stop_after_the_same_step(victims: list[int], tmp_path: Path) -> None:
    """Whichever got the signal, and though one is far ahead of the others."""
    pytest.importorskip("orbax.checkpoint")
    codes, printed = told("asks", victims, tmp_path)
    steps = [re.findall(r"stops after step (\d+)", text) for text in printed]
    assert codes == [0] * COUNT and len(steps[0]) == 1 and steps[0] == steps[1] == steps[2], printed


ALONE = """
import sys, time
import alpa_lite as al
al.initialize(cluster_detection_method="deactivate")
checkpoints = al.Checkpoints(sys.argv[2])
if sys.argv[1] == "asks":
    assert not checkpoints.stop_requested(0)
print("goes on", flush=True)
for step in range(1, 1200):
    time.sleep(0.05)
    if sys.argv[1] == "asks" and checkpoints.stop_requested(step):
        sys.exit(75)
"""


@pytest.mark.parametrize(("how", "code"), [("never", -signal.SIGTERM), ("asks", 75)])
def test_one_process_alone(how: str, code: int, tmp_path: Path) -> None:
    pytest.importorskip("orbax.checkpoint")
    command = [sys.executable, "-c", ALONE, how, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, env=environment(1), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"goes on\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == code


PLANS = """
import sys
import jax, jax.numpy as jnp
import psutil
import alpa_lite as al
from alpa_lite.plan.progress import Progress

def follow(progress):
    if "stages" in progress.phases and psutil.Process().children():
        print("searches", flush=True)

def loss(params, x, y):
    for w in params["layers"]:
        x = x + jnp.tanh(x @ w[0]) @ w[1]
    return jnp.mean((x - y) ** 2)

def train_step(params, x, y):
    value, grads = jax.value_and_grad(loss)(params, x, y)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

if __name__ == "__main__":
    def f32(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)
    layers = [(f32(1024, 128 * (i + 2)), f32(128 * (i + 2), 1024)) for i in range(24)]
    options = {"on_interrupt": sys.argv[1]} if sys.argv[1] != "default" else {}
    try:
        plan = al.plan(train_step, {"layers": layers}, f32(512, 1024), f32(512, 1024), cache=False,
                       cluster=al.cluster("p3.16xlarge", num_hosts=4), progress=Progress(None, follow), **options)
        print("plan", plan.solver.status, flush=True)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    print("workers", len(psutil.Process().children(recursive=True)), flush=True)
    if sys.argv[1] == "default":
        raise SystemExit(9)
"""


@pytest.mark.parametrize(
    ("on_interrupt", "answer", "code"),
    [
        ("default", "interrupted", 9),
        ("best", "plan interrupted", 0),
        pytest.param("raise", "interrupted", 0, marks=pytest.mark.long),
    ],
)
def test_ctrl_c_in_a_script(on_interrupt: str, answer: str, code: int, tmp_path: Path, default_interrupt: Any) -> None:
    """While worker processes search as well: they are gone before the program goes on."""
    pytest.importorskip("psutil")
    program = tmp_path / "plans.py"
    program.write_text(PLANS)
    variables = {**environment(1), "ALPA_LITE_WORKERS": "2"}
    with subprocess.Popen(
        [sys.executable, str(program), on_interrupt], cwd=ROOT, env=variables, stdout=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"searches\n"
            process.send_signal(signal.SIGINT)
            printed, _ = process.communicate(timeout=120)
        finally:
            process.kill()
    assert printed.decode().replace("searches\n", "") == f"{answer}\nworkers 0\n" and process.returncode == code


@pytest.mark.parametrize("name", ["on_interrupt", "on_hang"])
def test_options_have_few_values(name: str) -> None:
    with pytest.raises(al.errors.PlanError, match=f"{name}='later' was given; it must be"):
        al.parallelize(lambda x: x, **{name: "later"})


@pytest.mark.parametrize("seconds", [0, -1.0, "300", True])
def test_patience_is_a_number_of_seconds(seconds: Any) -> None:
    with pytest.raises(al.errors.PlanError, match="must be a positive number of seconds, or None"):
        al.parallelize(lambda x: x, watchdog_seconds=seconds)
