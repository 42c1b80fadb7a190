"""Several processes in one job: they measure together and describe the same cluster."""

import json
import os
import socket
import subprocess
import sys

import pytest

from alpa_lite.inspection.doctor import virtual_cpu_environment
from alpa_lite.runtime.job.agreement import agreed_data, agreed_number

PROGRAM = """
import json, sys
from pathlib import Path
import jax
number, port, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=number)
import alpa_lite as al
from alpa_lite.runtime import fingerprint
from alpa_lite.runtime.job.agreement import agreed_data, agreed_number
fingerprint.cache_folder = lambda: Path(folder) / str(number)
assert agreed_number(0.1 + number) == 0.1
assert agreed_data({"text": "x" * (5 + 7 * number)}) == {"text": "xxxxx"}
measured = al.local_cluster()
kept = al.calibrate(limit_seconds=1.0)
kept.save()
read = al.local_cluster()
assert read == kept.cluster and read != measured
assert (Path(folder) / str(number)).exists() == (number == 0)
print(json.dumps([measured.to_json(), read.to_json()]))
"""


def test_one_process_agrees_with_itself():
    assert agreed_number(0.1) == 0.1
    assert agreed_data([1, "a"]) == [1, "a"]


@pytest.mark.slow
def test_two_processes_describe_the_same_cluster(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {**os.environ, **virtual_cpu_environment(2), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PROGRAM]
    processes = [
        subprocess.Popen(
            [*command, str(number), port, str(tmp_path)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], outputs
    first, second = (json.loads(out.splitlines()[-1]) for out, _ in outputs)
    assert first == second
    assert first[0]["num_hosts"] == 2 and first[0]["devices_per_host"] == 2
    assert first[1]["inter_host"] != first[0]["inter_host"]
