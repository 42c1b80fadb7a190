"""Several processes on this machine: what they print, how they end, and that none is left."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from alpa_lite.errors import ExecutionError
from alpa_lite.runtime.job.launch import ENDED, NUM_PROCESSES, PROCESS_ID, _Job, launch

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
        ([(0, 1), (0, 5), (0, 2)], None),
    ],
)
def test_the_worst_of_those_that_failed_by_themselves_counts(ends: list[tuple[int, int]], failed: int | None) -> None:
    job = _Job((io.BytesIO(), io.BytesIO()), 1.0)
    job.processes = [Ends(*each) for each in ends]  # pyright: ignore[reportAttributeAccessIssue]
    assert job.wait() == failed


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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_ending_the_launcher_ends_all(number: int, program: Any, tmp_path: Path, default_interrupt: None) -> None:
    """When it is killed it can do nothing; processes that called `initialize` see their end of its pipe closed."""
    path = program(
        "from alpa_lite.runtime.job.start import _end_with_launcher\n_end_with_launcher()\n"
        "print(os.getpid(), flush=True)\ntime.sleep(60)"
    )
    command = [sys.executable, "-m", "alpa_lite.cli", "launch", "--processes", "2", path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        found = [int(process.stdout.readline().split()[1]) for _ in range(2)]
        process.send_signal(number)
        process.wait(timeout=15)
        assert all_gone(*found)
        assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[number]
    finally:
        process.kill()
        process.communicate()


def test_nothing_to_start_is_a_sentence(program: Any) -> None:
    with pytest.raises(ExecutionError, match="at least one is needed"):
        launch(["x.py"], num_processes=0)
