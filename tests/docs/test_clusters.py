"""The job files of the pages on clusters, tried without one: with stand-ins for its commands."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from alpa_lite.api.doctor import virtual_cpu_environment

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted((DOCS / "clusters").glob("*.md"))
SCRIPT = DOCS / "examples" / "checkpointed_training.py"
BLOCK = re.compile(r"^```(bash|yaml)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

PYTHON = """#!/bin/bash
echo "python $*" >> "$LOG"
trap 'echo told >> "$LOG"; exit 75' TERM
echo ready >> "$LOG"
for _ in $(seq 200); do sleep 0.05; done
"""
MPIRUN = """#!/bin/bash
trap 'kill -USR1 "$rank"' USR1
while [ "$1" != bash ]; do shift; done
OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=1 "$@" &
rank=$!
wait "$rank"; code=$?
while kill -0 "$rank" 2>/dev/null; do wait "$rank"; code=$?; done
exit "$code"
"""
SRUN = """#!/bin/bash
shift
exec "$@"
"""
LOGGED = """#!/bin/bash
echo "$(basename "$0") $*" >> "$LOG"
"""


def job_file(page: str) -> str:
    """The one job file of a page."""
    ((_, text),) = BLOCK.findall((DOCS / "clusters" / f"{page}.md").read_text())
    return text


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Starts a job file where the commands of the cluster are stand-ins, which log what they are asked for."""
    commands = tmp_path / "commands"
    commands.mkdir()
    stand_ins = {"python": PYTHON, "mpirun": MPIRUN, "srun": SRUN, "scontrol": LOGGED, "gcloud": LOGGED}
    for name, text in stand_ins.items():
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    environment = {"PATH": f"{commands}:{os.environ['PATH']}", "LOG": str(tmp_path / "log")}

    def run(page: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        (tmp_path / "log").touch()
        (tmp_path / "job").write_text(job_file(page))
        return subprocess.Popen(
            ["bash", str(tmp_path / "job"), *arguments], cwd=tmp_path, env={**environment, **variables}, text=True
        )

    return run


def until(log: Path, line: str) -> None:
    """Wait for a line of the log."""
    deadline = time.monotonic() + 20
    while line not in log.read_text().splitlines():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)


def test_each_page_has_one_job_file() -> None:
    assert [page.stem for page in PAGES] == ["cloud-tpu", "kubernetes", "mpirun", "slurm"]
    for page in PAGES:
        assert job_file(page.stem)


@pytest.mark.parametrize("page", ["slurm", "mpirun", "cloud-tpu"])
def test_scripts_are_scripts(page: str) -> None:
    subprocess.run(["bash", "-n"], input=job_file(page), text=True, check=True)


@pytest.fixture(scope="module")
def options() -> set[str]:
    """Those that the training script takes."""
    done = subprocess.run([sys.executable, str(SCRIPT), "--help"], capture_output=True, text=True, check=True)
    return set(re.findall(r"--[\w-]+", done.stdout))


@pytest.mark.parametrize("page", ["slurm", "kubernetes", "mpirun", "cloud-tpu"])
def test_job_files_call_the_example_with_options_that_it_has(page: str, options: set[str]) -> None:
    if page == "kubernetes":
        (container,) = _pod()["containers"]
        call = " ".join(container["command"])
    else:
        lines = job_file(page).replace("\\\n", " ").splitlines()
        (call,) = [line for line in lines if "checkpointed_training.py --" in line]
    used = set(re.findall(r"--[\w-]+", call.partition("checkpointed_training.py")[2]))
    assert {"--folder", "--steps", "--save-every"} <= used <= options


def test_slurm_signals_requeues_and_has_a_process_per_node() -> None:
    lines = re.findall(r"^#SBATCH --([\w-]+)=?(\S*)$", job_file("slurm"), re.MULTILINE)
    given = dict(lines)
    assert len(given) == len(lines) == job_file("slurm").count("#SBATCH")
    assert given["ntasks-per-node"] == "1" and re.fullmatch(r"TERM@\d+", given["signal"]) and "requeue" in given
    listed = re.search(r"JAX_LOCAL_DEVICE_IDS=([\d,]+)", job_file("slurm"))
    assert listed and [int(x) for x in listed[1].split(",")] == list(range(int(given["gpus-per-node"])))


def test_slurm_queues_a_job_again_that_was_told_to_stop(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    job = start("slurm", SLURM_JOB_ID="7", SLURM_SUBMIT_DIR="/shared")
    log = tmp_path / "log"
    until(log, "ready")
    (called,) = [line for line in log.read_text().splitlines() if line.startswith("python")]
    assert shlex.split(called)[1:5] == ["checkpointed_training.py", "--distributed", "--folder", "/shared/run"]
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children")
    for child in children.read_text().split():
        os.kill(int(child), signal.SIGTERM)  # SLURM tells the tasks, not the script
    assert job.wait(20) == 75
    assert log.read_text().splitlines()[-2:] == ["told", "scontrol requeue 7"]


def test_mpirun_hands_on_that_it_is_told_to_stop(start: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("first slots=8\nsecond slots=8\n")
    job = start("mpirun", "hosts")
    log = tmp_path / "log"
    until(log, "ready")
    (called,) = [line for line in log.read_text().splitlines() if line.startswith("python")]
    wanted = "--coordinator first:12345 --num-processes 2 --process-id 1 --folder"
    assert wanted in called and f"{tmp_path}/run" in called
    job.send_signal(signal.SIGTERM)
    assert job.wait(20) == 75
    assert log.read_text().splitlines()[-1] == "told"


def test_cloud_tpu_makes_a_slice_trains_and_deletes_it(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    assert start("cloud-tpu").wait(20) == 0
    log = (tmp_path / "log").read_text()
    calls = re.findall(r"gcloud compute tpus tpu-vm (\w+) (\S+)", log)
    assert calls == [
        ("create", "train"),
        ("scp", "checkpointed_training.py"),
        ("ssh", "train"),
        ("ssh", "train"),
        ("delete", "train"),
    ]
    assert log.count("--worker=all") == 3


def documents() -> dict[str, Any]:
    """Those of the page on Kubernetes, by kind."""
    found = list(yaml.safe_load_all(job_file("kubernetes")))
    assert len({document["kind"] for document in found}) == len(found)
    return {document["kind"]: document for document in found}


def _pod() -> Any:
    (workers,) = documents()["JobSet"]["spec"]["replicatedJobs"]
    return workers["template"]["spec"]["template"]["spec"]


def test_the_jobset_is_one_that_jax_can_read() -> None:
    """`jax.distributed` takes the number of processes from `parallelism`, and this one's from its index."""
    jobset = documents()["JobSet"]
    assert jobset["apiVersion"] == "jobset.x-k8s.io/v1alpha2" and jobset["spec"]["failurePolicy"]["maxRestarts"] > 0
    (workers,) = jobset["spec"]["replicatedJobs"]
    job = workers["template"]["spec"]
    assert workers["replicas"] == 1 and job["completionMode"] == "Indexed"
    assert job["parallelism"] == job["completions"] > 1 and job["backoffLimit"] == 0
    pod = _pod()
    assert pod["restartPolicy"] == "Never" and pod["terminationGracePeriodSeconds"] >= 60
    (container,) = pod["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    folder = next(word.partition("=")[2] for word in container["command"] if word.startswith("--folder"))
    assert any(folder.startswith(f"{mount['mountPath']}/") for mount in container["volumeMounts"])


def test_the_service_account_may_read_what_jax_asks_for() -> None:
    found = documents()
    name = found["ServiceAccount"]["metadata"]["name"]
    assert _pod()["serviceAccountName"] == name == found["RoleBinding"]["subjects"][0]["name"]
    assert found["RoleBinding"]["roleRef"]["name"] == found["Role"]["metadata"]["name"]
    allowed: dict[tuple[str, str], list[str]] = {}
    for rule in found["Role"]["rules"]:
        allowed |= {(group, kind): rule["verbs"] for group in rule["apiGroups"] for kind in rule["resources"]}
    assert "list" in allowed["", "pods"] and "list" in allowed["", "services"] and "get" in allowed["batch", "jobs"]


def test_the_example_saves_when_told_to_stop_and_goes_on_where_it_was(
    tmp_path: Path, python_environment: dict[str, str]
) -> None:
    def environment(num_devices: int) -> dict[str, str]:
        devices = virtual_cpu_environment(num_devices)
        return {**python_environment, **devices, "PYTHONUNBUFFERED": "1", "ALPA_LITE_CACHE": str(tmp_path / "plans")}

    def run(folder: str, steps: int, num_devices: int) -> list[str]:
        command = [sys.executable, str(SCRIPT), "--folder", str(tmp_path / folder), "--steps", str(steps)]
        done = subprocess.run(command, env=environment(num_devices), capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    command = [sys.executable, str(SCRIPT), "--folder", str(tmp_path / "run"), "--steps", "100000"]
    with subprocess.Popen(command, env=environment(2), stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None and first.stdout.readline().startswith("step 5 ")
        first.send_signal(signal.SIGTERM)
        said = first.stdout.read().splitlines()
    assert first.returncode == 75
    last = int(said[-1].split()[1])
    again = run("run", last + 7, num_devices=1)
    assert again[0] == f"going on from step {last}"
    loss, wanted = (float(lines[-2].split()[-1]) for lines in (again, run("whole", last + 7, num_devices=2)))
    assert abs(loss - wanted) <= 1e-4 and again[-1] == "done"
