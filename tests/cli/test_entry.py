"""The command as a program: exit codes, a reader that left, and completion scripts that know every option."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from alpa_lite import cli
from alpa_lite.cli.entry import SHELLS, build_parser, words_of
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


def script(shell, capsys):
    capsys.readouterr()
    assert cli.main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("shell", SHELLS)
def test_the_scripts_in_the_package_are_those_of_the_parser(shell, capsys):
    wanted = SHELLS[shell](words_of(build_parser())) + "\n"
    assert script(shell, capsys) == wanted, "write them anew: make completions"


@pytest.mark.parametrize("shell", SHELLS)
def test_every_command_and_option_is_known(shell, capsys):
    text, words = script(shell, capsys), words_of(build_parser())
    assert set(words) >= {"plan", "explain", "diff", "simulate", "bench", "calibrate", "solve", "demo", "doctor"}
    for name, command in words.items():
        assert name in text
        for option in command.options:
            for flag in option.flags:
                assert (flag if shell != "fish" else flag.lstrip("-")) in text


def proposed(text, *words):
    """What bash proposes for the last word."""
    line = " ".join(f"'{word}'" for word in words)
    program = (
        f"{text}\nCOMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _alpa_lite; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    assert not done.stderr
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("pl",), {"plan", "planners"}),
        (("planners", "hy"), {"hybrid"}),
        (("plan", "--plan"), {"--planner"}),
        (("plan", "--planner", "meg"), {"megatron"}),
        (("plan", "--cluster", "p3.16"), {"p3.16xlarge"}),
        (("solve", "--solver", "port"), {"portfolio"}),
        (("completion", "z"), {"zsh"}),
        (("explain", "--t"), {"--time"}),
        (("bench", "--fail"), {"--fail-above"}),
        (("bench", "--model", "gpt-st"), {"gpt-steady"}),
        (("bench", "--cluster", "loc"), {"local"}),
        (("demo", "--ro"), {"--rounds"}),
    ],
)
def test_bash_proposes(words, expected, capsys):
    assert set(proposed(script("bash", capsys), "alpa-lite", *words)) == expected


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_proposes_files_where_nothing_is_known(capsys, tmp_path, monkeypatch):
    (tmp_path / "mine.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert proposed(script("bash", capsys), "alpa-lite", "diff", "mi") == ["mine.json"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_parse_it(shell, capsys):
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"there is no {shell}")
    subprocess.run([program, "-n"], input=script(shell, capsys), text=True, check=True)
