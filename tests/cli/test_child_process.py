"""Programs in processes of their own: what they print and return, and that they end with their parent."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from alpa_lite.cli.command import run_module
from alpa_lite.cli.exit_codes import Exit

ROOT = Path(__file__).parents[2]


@pytest.fixture
def environment(tmp_path):
    """Where `program` is a module, which says which signal it got."""
    (tmp_path / "program.py").write_text(
        "import pathlib, sys, time\n"
        "print('line 1'); print(*sys.argv[1:], flush=True)\n"
        "if sys.argv[1] == 'exit': sys.exit(int(sys.argv[2]))\n"
        "if sys.argv[1] == 'die': __import__('os').kill(__import__('os').getpid(), 9)\n"
        "try: pathlib.Path(sys.argv[2]).touch(); time.sleep(60)\n"
        "except KeyboardInterrupt: pathlib.Path(sys.argv[2]).write_text('interrupted')\n"
    )
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}


def test_lines_are_read_and_the_code_is_returned(environment):
    lines = []
    assert run_module("program", ["exit", "7"], environment, read=lines.append) == 7
    assert lines == ["line 1", "exit 7"]


@pytest.mark.skipif(sys.platform == "win32", reason="there are no signals")
def test_a_program_that_was_killed_has_the_code_of_its_signal(environment):
    assert run_module("program", ["die"], environment, read=lambda line: None) == 137


@pytest.mark.skipif(sys.platform == "win32", reason="there are no signals")
def test_an_interrupt_of_this_process_alone_ends_the_program_too(environment, tmp_path, default_interrupt):
    sign = tmp_path / "sign"
    code = (
        "import os, sys; from alpa_lite.cli.command import run_module\n"
        f"sys.exit(run_module('program', ['wait', {str(sign)!r}], os.environ))"
    )
    running = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.DEVNULL)
    try:
        while not sign.exists() and running.poll() is None:
            time.sleep(0.05)
        running.send_signal(signal.SIGINT)
        assert running.wait(30) == Exit.INTERRUPTED
    finally:
        running.kill()
    assert sign.read_text() == "interrupted"
