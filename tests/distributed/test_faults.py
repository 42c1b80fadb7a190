"""What goes wrong is told on every process in one sentence, and nothing is left waiting."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from alpa_lite.api.doctor import virtual_environment
from alpa_lite.runtime.job.consensus import differences
from alpa_lite.runtime.job.launch import COORDINATOR, NUM_PROCESSES, PROCESS_ID
from tests.distributed.launched import ROOT, free_port, run

STEP = """
import dataclasses, json
import alpa_lite as al
al.initialize()
import jax, jax.numpy as jnp, numpy as np
me = jax.process_index()

def step(w, x):
    loss, g = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
    return w - 0.1 * g, loss

w, x = np.ones((8, 8), np.float32), np.ones((16, 8), np.float32)
cluster = al.cluster("p3.16xlarge")

def refused(what, *args, **options):
    try:
        al.plan(what, *args, **options)
    except al.AlpaLiteError as error:
        print(json.dumps({"error": type(error).__name__, "text": str(error)}), flush=True)
"""

DIFFERENT = """
refused(step, w, x, planner=al.planners.Pipeline(pipeline=7), num_microbatches=5, cluster=cluster)
refused(step, w, x if me == 0 else x[:8], cluster=cluster)
refused(step, w, x, cluster=cluster, planner=al.planners.DataParallel() if me != 1 else al.planners.FSDP())
mine = al.plan(step, w, x, cluster=cluster, planner=al.planners.DataParallel())
compiled = al.parallelize(step, planner=mine, cluster=cluster).trace(w, x).plan().lower()
given = mine if me == 0 else dataclasses.replace(mine, name="other")
object.__setattr__(compiled.planned, "last_plan", given)
try:
    compiled.compile()
except al.AlpaLiteError as error:
    print(json.dumps({"error": type(error).__name__, "text": str(error)}), flush=True)
if me == 1:
    raise ValueError("the user's own")
al.plan(step, w, x, cluster=cluster)
"""


def test_errors_and_differences_are_told_on_every_process(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(STEP + DIFFERENT)
    done = run(3, 1, str(program), timeout=240)
    lines = {i: [line for line in done.stdout.splitlines() if line.startswith(f"[{i}] {{")] for i in range(3)}
    texts = [[line[4:] for line in lines[i]] for i in range(3)]
    assert texts[0] == texts[1] == texts[2] and len(texts[0]) == 4, done.stdout + done.stderr
    alone, shapes, planners, plans = texts[0]
    assert '"BatchError"' in alone or '"PlanError"' in alone
    assert '"MismatchError"' in shapes and "processes 1 and 2 have step 'step', traced as" in shapes
    assert "process 1 has planner FSDP" in planners and "where process 0 has data parallel" in planners
    assert "processes 1 and 2 have plan" in plans
    assert "[1] ValueError: the user's own" in done.stderr and done.returncode == 1


def test_facts_that_differ_in_words() -> None:
    same = {"jax": "0.10.2", "step": "abc"}
    assert differences([same, same, same]) == ""
    text = differences([same, {**same, "jax": "0.10.1"}, {"step": "abc"}, {**same, "jax": "0.10.1"}])
    assert "processes 1 and 3 have jax 0.10.1, where process 0 has 0.10.2" in text
    assert "process 2 has jax none, where process 0 has 0.10.2" in text


def test_a_port_in_use_is_a_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = run(1, 1, "--port", port, "-m", "tests.distributed.joins")
    assert done.returncode == 1 and f"The coordinator cannot listen at 127.0.0.1:{port}" in done.stderr
    assert "Address already in use" in done.stderr


def test_a_coordinator_that_starts_late_is_waited_for() -> None:
    port = free_port()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), NUM_PROCESSES: "2"}
    environment |= {COORDINATOR: f"127.0.0.1:{port}", "XLA_FLAGS": ""}
    processes = []
    for number in (1, 0):
        command = [sys.executable, "-m", "tests.distributed.joins"]
        processes.append(
            subprocess.Popen(command, cwd=ROOT, env={**environment, PROCESS_ID: str(number)}, stdout=subprocess.PIPE)
        )
        if number:
            time.sleep(6)
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert outputs == [b"process 1 of 2\n", b"process 0 of 2\n"]


STEPS = """
import os, signal, sys
cluster = dataclasses.replace(cluster, num_hosts=3, devices_per_host=1)
x = np.ones((24, 8), np.float32)
if me == 1 and when == "before the plan":
    fail()
compiled = al.parallelize(step, planner=al.planners.DataParallel(), cluster=cluster).compiled(w, x)
for number in range(1000):
    if me == 1 and when == "between steps" and number == 5:
        fail()
    w, loss = compiled(w, x)
    float(loss)
"""

SAVES = """
import os, signal
from alpa_lite.runtime.checkpoint import saved_arrays
checkpoints, state = al.Checkpoints(when), {"w": jax.device_put(np.ones((8, 1000), np.float32), jax.local_devices()[0])}
with checkpoints:
    checkpoints.save(1, state)
    checkpoints.wait()
    if me == 1:
        where, name = (saved_arrays.Writer, "start") if how == "begin" else (saved_arrays, "write_part")
        setattr(where, name, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    checkpoints.save(2, state)
"""


def alone(text: str, folder: Path, victim: int) -> tuple[list[int], list[str], float]:
    """Three processes without a launcher: codes, what they printed, and the seconds from the end of one to the last."""
    (folder / "program.py").write_text(text)
    job = {**virtual_environment(1), NUM_PROCESSES: "3", COORDINATOR: f"127.0.0.1:{free_port()}"}
    job |= {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "ALPA_LITE_CACHE": "off"}
    printed, processes = [folder / f"printed {number}" for number in range(3)], list[subprocess.Popen[bytes]]()
    try:
        for number, path in enumerate(printed):
            command, mine = [sys.executable, str(folder / "program.py")], {**job, PROCESS_ID: str(number)}
            with path.open("w") as out:
                processes.append(subprocess.Popen(command, cwd=ROOT, env=mine, stdout=out, stderr=subprocess.STDOUT))
        while "fails now" not in printed[victim].read_text() and processes[victim].poll() is None:
            time.sleep(0.05)
        began = time.monotonic()
        codes = [process.wait(timeout=60) for process in processes]
        return codes, [path.read_text() for path in printed], time.monotonic() - began
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    ("how", "when"),
    [
        ("raise KeyError('mine')", "between steps"),
        pytest.param("raise KeyError('mine')", "before the plan", marks=pytest.mark.long),
        pytest.param("sys.exit(3)", "between steps", marks=pytest.mark.long),
        pytest.param("sys.exit(0)", "between steps", marks=pytest.mark.long),
        pytest.param("sys.exit('no data')", "before the plan", marks=pytest.mark.long),
    ],
)
def test_one_that_fails_or_leaves_without_a_launcher_is_named_by_all(how: str, when: str, tmp_path: Path) -> None:
    defined = f"import sys\nwhen = {when!r}\ndef fail():\n    print('fails now', flush=True)\n    {how}\n"
    codes, printed, seconds = alone(STEP + defined + STEPS, tmp_path, 1)
    assert all(codes) and seconds < 30, (codes, seconds, printed)
    if how.startswith("raise"):
        told = ["process 1 failed first: KeyError: 'mine'"] * 3
        told[1] = "KeyError: 'mine'"
    else:
        told = ["process 1 came to its end"] * 3
    assert all(each.lower().count(text.lower()) for each, text in zip(printed, told, strict=True)), printed


@pytest.mark.long
@pytest.mark.parametrize("how", ["begin", "write"])
def test_one_that_is_lost_during_a_save_is_named_and_space_is_not_looked_for(how: str, tmp_path: Path) -> None:
    pytest.importorskip("orbax.checkpoint")
    folder = tmp_path / "checkpoints"
    codes, printed, seconds = alone(f"{STEP}when, how = {str(folder)!r}, {how!r}\n{SAVES}", tmp_path, 1)
    assert codes[1] == -signal.SIGKILL and all(codes) and seconds < 30, (codes, seconds)
    for text in (printed[0], printed[2]):
        assert "no word from process 1" in text or "stopped sending heartbeats):\n1\n" in text, text
        assert "Look for space" not in text
    assert (folder / "1").exists() and not (folder / "2").exists()
