"""Several processes in one job: they measure together and describe the same cluster."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_lite import _jax
from alpa_lite.api.doctor import virtual_cpu_environment
from alpa_lite.runtime.job.consensus import TURN, _Service, agreed_data, agreed_number

PROGRAM = """
import json, sys
from pathlib import Path
import jax
number, port, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=number)
import alpa_lite as al
from alpa_lite.runtime import fingerprint
from alpa_lite.runtime.job.consensus import agreed_data, agreed_number
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


@pytest.mark.long
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


class Table:
    """The keys of JAX's coordination service, for threads that stand for processes."""

    def __init__(self) -> None:
        self.words, self.removed, self.most = dict[str, bytes](), set[str](), 0
        self.changed = threading.Condition()

    def key_value_set_bytes(self, key: str, value: bytes, allow_overwrite: bool = False) -> None:
        """As JAX's."""
        with self.changed:
            assert key not in self.words and key not in self.removed, key
            self.words[key] = value
            self.most = max(self.most, len(self.words))
            self.changed.notify_all()

    def key_value_delete(self, key: str) -> None:
        """As JAX's: it removes what is under the key as well."""
        with self.changed:
            found = [each for each in self.words if each == key or each.startswith(f"{key}/")]
            assert found, key
            self.removed.update(found)
            for each in found:
                del self.words[each]

    def blocking_key_value_get_bytes(self, key: str, milliseconds: int) -> bytes:
        """As JAX's; nobody reads what was removed."""
        with self.changed:
            assert key not in self.removed, key
            assert self.changed.wait_for(lambda: key in self.words, 60), key
            return self.words[key]


AGREEMENTS = ("said", "everywhere", "compared", "meet", "meet without the first")


def agree(service: Any, kind: str, me: int, number: int) -> None:
    """Process `me`'s part in an agreement, with what it comes to."""
    if kind == "said":
        assert service.said_by_first(number if me == 0 else None) == number
    elif kind == "everywhere":
        assert service.everywhere([me, number]) == [[p, number] for p in range(3)]
    elif kind == "compared":
        assert "process 2 has" in service.compared({"number": str(number if me < 2 else -1)})
    elif kind == "meet" or me:
        service.meet((0, 1, 2) if kind == "meet" else (1, 2))


@settings(max_examples=40, deadline=None)
@given(
    kinds=st.lists(st.sampled_from(AGREEMENTS), min_size=60, max_size=90),
    pauses=st.lists(st.integers(0, 3), min_size=7),
)
def test_words_are_removed_when_all_have_read_them(kinds: list[str], pauses: list[int]) -> None:
    """Whatever the processes agree upon, and whichever of them is ahead."""
    table: Any = Table()
    problems: list[BaseException] = []

    def process(me: int) -> None:
        service = _Service(_jax.JobInfo(client=table, process=me, num_processes=3))
        try:
            for number, kind in enumerate(kinds):
                time.sleep(0.0002 * pauses[(number * (me + 1)) % len(pauses)])
                agree(service, kind, me, number)
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=process, args=(me,)) for me in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems, problems
    # Of each set of processes the words of one agreement, and what the first said alone since then.
    assert table.most <= 2 * (3 + 1) + (2 + 1) * 2 + TURN
