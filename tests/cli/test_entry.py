"""How a run of a command ends: exit codes of real processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from alpa_lite.cli.exit_codes import Exit

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there are no signals")


def start(*arguments, cwd, **options):
    """A command as a process."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    environment = {**kept, "PYTHONPATH": str(ROOT), "ALPA_LITE_CACHE": "off"}
    command = [sys.executable, "-m", "alpa_lite.cli", *arguments]
    return subprocess.Popen(command, cwd=cwd, env=environment, stderr=subprocess.PIPE, text=True, **options)


BENCH = ["bench", "--model", "mlp-tiny", "--cluster", "p3.16xlarge", "--planners", "data_parallel"]


@pytest.mark.parametrize("arguments", [["completion", "bash"], ["doctor", "--quick", "--json"], BENCH])
def test_a_reader_that_left(arguments, tmp_path):
    """As in `alpa-lite … | head -1`, once head is done."""
    read, write = os.pipe()
    os.close(read)
    running = start(*arguments, cwd=tmp_path, stdout=write)
    os.close(write)
    _, said = running.communicate(timeout=60)
    assert running.returncode == Exit.PIPE_CLOSED
    assert said == ""


def test_an_interrupt_before_there_is_a_result(tmp_path, default_interrupt):
    (tmp_path / "slow.py").write_text(
        "import pathlib, time\ndef example():\n    pathlib.Path('begun').touch()\n    time.sleep(60)\n"
    )
    running = start("plan", "slow.py:example", "--cluster", "p3.16xlarge", cwd=tmp_path, stdout=subprocess.PIPE)
    try:
        while not (tmp_path / "begun").exists() and running.poll() is None:
            time.sleep(0.05)
        running.send_signal(signal.SIGINT)
        out, said = running.communicate(timeout=60)
    finally:
        running.kill()
    assert running.returncode == Exit.INTERRUPTED
    assert (out, said) == ("", "Interrupted: plan has no result yet.\n")
