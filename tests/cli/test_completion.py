"""Completion scripts: they know every option, and bash proposes from them."""

import shutil
import subprocess

import pytest

from alpa_lite import cli
from alpa_lite.cli.completion import SHELLS, words_of
from alpa_lite.cli.entry import build_parser


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
        (("pl",), {"plan"}),
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
