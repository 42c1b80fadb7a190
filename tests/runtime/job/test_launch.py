"""Several processes on this machine: what they print, how they end, and that none is left."""

from __future__ import annotations

import io
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from alpa_lite.errors import ExecutionError
from alpa_lite.runtime.job import launch as launch_module
from alpa_lite.runtime.job.launch import (
    ENDED,
    HUNG,
    NUM_PROCESSES,
    PIECE_BYTES,
    PROCESS_ID,
    _Job,
    launch,
    reserved_port,
)

NUMBER = f"import os, sys, time\nme = int(os.environ[{PROCESS_ID!r}])\n"


@pytest.fixture
def program(tmp_path: Path) -> Any:
    """Writes a program that knows its number as `me`; returns its path."""

    def write(text: str) -> str:
        path = tmp_path / "program.py"
        path.write_text(NUMBER + text)
        return str(path)

    return write


def launched(*program: str, num_processes: int = 3, **options: Any) -> tuple[Any, str, str]:
    """The outcome, and what came out on both streams."""
    out, err = io.BytesIO(), io.BytesIO()
    ended = launch(program, num_processes=num_processes, out=out, err=err, **options)
    return ended, out.getvalue().decode(), err.getvalue().decode()


def is_gone(pid: int) -> bool:
    """Whether a process has ended; nobody has to wait for it any more (a zombie is still there)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] == "Z"


def all_gone(*pids: int) -> bool:
    """Whether processes have ended, or do so in a while: nobody waits for a signal to arrive."""
    until = time.monotonic() + 15
    while not (gone := all(map(is_gone, pids))) and time.monotonic() < until:
        time.sleep(0.05)
    return gone


def test_lines_come_with_the_number_of_their_process(program: Any) -> None:
    of = f"print('of', os.environ[{NUM_PROCESSES!r}], *sys.argv[1:])"
    path = program(f"{of}\nprint('no end', me, end='', file=sys.stderr)")
    ended, out, err = launched(path, "--steps", "3")
    assert ended.codes == (0, 0, 0) and ended.failed is None and ended.code == 0
    assert sorted(out.splitlines()) == [f"[{i}] of 3 --steps 3" for i in range(3)]
    assert sorted(err.splitlines()) == [f"[{i}] no end {i}" for i in range(3)]


def test_a_module_runs_as_python_runs_it(program: Any, tmp_path: Path, monkeypatch: Any) -> None:
    program("import pickle\ndef f(): pass\nif __name__ == '__main__':\n    pickle.dumps(f)\n    print(sys.argv[1:])")
    monkeypatch.chdir(tmp_path)
    ended, out, err = launched("-m", "program", "a", num_processes=1)
    assert (ended.code, out, err) == (0, "[0] ['a']\n", "")


def test_the_first_that_fails_ends_the_others(program: Any) -> None:
    path = program("if me == 1:\n    raise ValueError('it broke')\ntime.sleep(60)")
    began = time.monotonic()
    ended, _, err = launched(path)
    assert time.monotonic() - began < 30
    assert ended.codes == (128 + signal.SIGTERM, 1, 128 + signal.SIGTERM) and ended.failed == 1 and ended.code == 1
    lines = [line for line in err.splitlines() if line.startswith("[1]")]
    assert lines[0] == "[1] Traceback (most recent call last):" and lines[-1] == "[1] ValueError: it broke"
    assert not any("runpy" in line or "launched.py" in line for line in lines)
    assert "process 1 ended with exit code 1: the others are ended." in err


@pytest.mark.parametrize(("how", "code"), [("raise SystemExit(7)", 7), ("sys.exit('no')", 1), ("os.abort()", 134)])
def test_the_exit_code_is_that_of_the_one_that_failed(how: str, code: int, program: Any) -> None:
    ended, _, err = launched(program(f"if me == 2:\n    {how}\ntime.sleep(60)"))
    assert (ended.failed, ended.code) == (2, code)
    assert ("SIGABRT" in err) == (code == 134)


class Ends:
    """A process that ends with a code after so many looks."""

    def __init__(self, code: int, looks: int) -> None:
        self.code, self.looks, self.returncode = code, looks, None

    def poll(self) -> int | None:
        """As Popen's."""
        self.looks -= 1
        self.returncode = self.code if self.looks < 0 else None
        return self.returncode


@pytest.mark.parametrize(
    ("ends", "failed"),
    [
        ([(1, 3), (7, 3), (3, 3)], 1),  # at once: the worst
        ([(1, 3), (-9, 3), (0, 0)], 1),  # a signal is worse than a code
        ([(3, 1), (7, 2), (-9, 5)], 0),  # one after the other: the first
        ([(ENDED, 1), (3, 4), (ENDED, 2)], 1),  # what others ended with does not hide the cause
        ([(ENDED, 1), (0, 2), (ENDED, 2)], 0),
        ([(HUNG, 1), (-6, 4), (HUNG, 2)], 0),  # what a hang ends with is not the cause
        ([(HUNG, 1), (HUNG, 2), (0, 2)], 0),
        ([(0, 1), (0, 5), (0, 2)], None),
    ],
)
def test_the_worst_of_those_that_failed_by_themselves_counts(
    ends: list[tuple[int, int]], failed: int | None, monkeypatch: Any
) -> None:
    monkeypatch.setattr(launch_module, "ended_with", Ends.poll)
    job = _Job(io.BytesIO(), io.BytesIO(), 1.0)
    try:
        job.processes = [Ends(*each) for each in ends]  # pyright: ignore[reportAttributeAccessIssue]
        assert job.wait() == failed
    finally:
        job.processes = []
        job.end()


def test_a_process_that_ends_because_of_another_waits_for_no_more_than_seconds(program: Any) -> None:
    began = time.monotonic()
    ended, _, err = launched(program(f"if me:\n    sys.exit({ENDED})\ntime.sleep(60)"), num_processes=2)
    assert ended.code == ENDED and time.monotonic() - began < 30 and "process 1 ended with exit code" in err


def test_who_does_not_listen_is_killed(program: Any) -> None:
    ignores = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    path = program(f"{ignores}if me == 0:\n    time.sleep(1)\n    sys.exit(3)\ntime.sleep(60)")
    began = time.monotonic()
    ended, _, _ = launched(path, num_processes=2, grace_seconds=0.5)
    assert ended.codes == (3, 128 + signal.SIGKILL) and time.monotonic() - began < 30


def test_what_a_process_started_ends_with_it(program: Any) -> None:
    path = program("import subprocess\nprint(subprocess.Popen(['sleep', '60']).pid)\nsys.exit(2)")
    _, out, _ = launched(path, num_processes=1)
    assert all_gone(int(out.split()[1]))


def started(*program: str, processes: int = 2, **options: Any) -> subprocess.Popen[bytes]:
    """`alpa-lite launch`, whose streams are pipes."""
    command = [sys.executable, "-m", "alpa_lite.cli", "launch", "--processes", str(processes), *program]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, **options
    )


LEAVES_CHILDREN = """
import signal, subprocess
if sys.argv[1] == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
print(os.getpid(), child.pid, flush=True)
if sys.argv[1] == "stopped":
    os.kill(os.getpid(), signal.SIGSTOP)
if sys.argv[1] == "has ended":
    sys.exit(0) if me else time.sleep(120)
while sys.argv[1] == "busy":
    pass
time.sleep(120)
"""


@pytest.mark.parametrize(
    ("number", "state"),
    [(signal.SIGKILL, state) for state in ("asleep", "busy", "stopped", "deaf", "has ended")]
    + [(signal.SIGTERM, "stopped"), (signal.SIGINT, "asleep")],
)
def test_ending_the_launcher_ends_all(number: int, state: str, program: Any, default_interrupt: None) -> None:
    """When it is killed it can do nothing itself. No process has joined the job; what they started ends as well."""
    process = started("--grace", "1", program(LEAVES_CHILDREN), state)
    try:
        assert process.stdout is not None
        found = [int(pid) for _ in range(2) for pid in process.stdout.readline().split()[1:]]
        assert len(found) == 4
        process.send_signal(number)
        process.wait(timeout=30)
        assert all_gone(*found)
        assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[number]
    finally:
        process.kill()
        process.communicate()


def test_a_launcher_that_is_killed_while_it_starts_leaves_nothing(program: Any) -> None:
    """Whenever that is: the processes say their numbers into a file as soon as the program runs."""
    path = program("open(sys.argv[1], 'a').write(f'{os.getpid()}\\n')\ntime.sleep(120)")
    for milliseconds in (0, 200):
        numbers = Path(path).with_name(f"numbers {milliseconds}")
        numbers.touch()
        process = started(path, str(numbers), processes=4)
        until = time.monotonic() + 60
        while not numbers.read_text() and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(milliseconds / 1000)
        process.kill()
        process.communicate()
        time.sleep(1.0)  # those that were about to begin do so, if they can
        assert all_gone(*map(int, numbers.read_text().split()))


def test_a_reader_that_sleeps_misses_nothing(program: Any) -> None:
    """Far more than pipes hold; the processes have long ended when it is read."""
    text = "for i in range(3000):\n    print(me, i, 'x' * 100)\nprint('é' * 100_000, file=sys.stderr)"
    process = started(program(text))
    time.sleep(float(os.environ.get("ALPA_LITE_TEST_SLEEP", "6")))
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0
    for number in range(2):
        mine = [line for line in out.decode().splitlines() if line.startswith(f"[{number}] ")]
        assert mine == [f"[{number}] {number} {i} {'x' * 100}" for i in range(3000)]
    assert err.decode().count("é") == 200_000


def test_a_line_of_400_megabytes_comes_in_pieces_at_constant_memory(program: Any) -> None:
    megabytes = 400
    lines = f"for i in range({megabytes}):\n    sys.stdout.write('é' * 2**19)\nprint('!')\nprint('after')"
    text = f"sys.stdout.write('?')\n{lines}"
    process = started(program(text), processes=1)
    assert process.stdout is not None
    first, size, last, longest, peak = process.stdout.readline(), 0, b"", 0, 0
    assert first.startswith(b"[0] ")
    size, start = len(first) - 5, peak_bytes(process.pid)
    for line in process.stdout:
        if line.startswith(b"[0+] "):
            size, longest = size + len(line) - 6, max(longest, len(line))
            if size % 2**26 < PIECE_BYTES:
                line.decode()  # no character is cut
                peak = max(peak, peak_bytes(process.pid))
        last = line
    process.communicate()
    assert process.returncode == 0 and last == b"[0] after\n"
    assert size == megabytes * 2**20 + 2 and longest <= PIECE_BYTES + 6
    assert peak and peak - start < 50 * 2**20, (start, peak)


def peak_bytes(pid: int) -> int:
    """Memory that a process held at most so far."""
    text = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(next(line for line in text.splitlines() if line.startswith("VmHWM")).split()[1])


def test_lines_of_several_processes_do_not_mix(program: Any) -> None:
    text = "for i in range(300):\n    (sys.stdout if i % 2 else sys.stderr).write(str(me) * (i * 97 % 9000) + '\\n')"
    command = [sys.executable, "-m", "alpa_lite.cli", "launch", "--processes", "4", program(text)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True)
    lines = done.stdout.decode().splitlines()
    for number in range(4):
        mine = sorted(len(line) - 4 for line in lines if line[1] == str(number))
        assert mine == sorted(i * 97 % 9000 for i in range(300))
    assert all(set(line[4:]) <= {line[1]} for line in lines)


def test_output_that_cannot_be_written_is_told(program: Any) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("there is no /dev/full")
    path = program("print('lost')")
    with open("/dev/full", "wb") as full:
        err = io.BytesIO()
        ended = launch([path], num_processes=1, out=full, err=err)
    assert ended.code == 0 and b"output was lost" in err.getvalue() and b"No space left" in err.getvalue()


def test_what_holds_a_stream_open_is_not_waited_for(program: Any) -> None:
    """A process with a session of its own, which the launcher leaves alone."""
    path = program("import subprocess\nprint(subprocess.Popen(['sleep', '30'], start_new_session=True).pid)")
    began = time.monotonic()
    _, out, _ = launched(path, num_processes=1)
    assert time.monotonic() - began < 25
    os.kill(int(out.split()[1]), signal.SIGKILL)


def test_a_reserved_port_is_nobody_elses_but_the_coordinators() -> None:
    with reserved_port() as reserved, socket.socket() as coordinator, socket.socket() as other:
        port = reserved.getsockname()[1]
        with pytest.raises(ExecutionError, match=f"cannot listen at 127.0.0.1:{port}"):
            reserved_port(port)
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        coordinator.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        coordinator.bind(("127.0.0.1", port))
        coordinator.listen()
        socket.create_connection(("127.0.0.1", port)).close()


def test_nothing_to_start_is_a_sentence(program: Any) -> None:
    with pytest.raises(ExecutionError, match="at least one is needed"):
        launch(["x.py"], num_processes=0)
