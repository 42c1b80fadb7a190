"""What commands share: the envelope of their JSON, files that cannot be written, help with examples."""

import argparse
import json
import math
import re
import sys
from pathlib import Path

import pytest

from alpa_lite.cli.command import OutputError, answer, writing
from alpa_lite.cli.entry import COMMANDS, build_parser
from alpa_lite.cli.exit_codes import Exit

PAGE = Path(__file__).parents[2] / "docs" / "command-line.md"


def test_json_has_schema_and_version_and_no_nan(capsys):
    given = argparse.Namespace(command="plan", json=True, stdout=sys.stdout)
    answer(given, "text", lambda: {"bound": math.inf, "rows": ({"x": math.nan}, 1.5)})
    found = json.loads(capsys.readouterr().out)
    assert found == {"schema": "alpa-lite/plan", "version": 1, "bound": None, "rows": [{"x": None}, 1.5]}


def test_text_makes_no_data(capsys):
    answer(
        argparse.Namespace(command="plan", json=False, stdout=sys.stdout), "text", lambda: pytest.fail("not asked for")
    )
    assert capsys.readouterr().out == "text\n"


def test_a_file_that_cannot_be_written_is_a_sentence(tmp_path):
    path = tmp_path / "nowhere" / "plan.json"
    with pytest.raises(OutputError, match=r"plan\.json cannot be written: No such file"), writing(path):
        path.write_text("{}")


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_help_has_an_example_that_parses(command, capsys):
    parser = build_parser()
    with pytest.raises(SystemExit) as left:
        parser.parse_args([command.name, "--help"])
    assert left.value.code == 0
    assert f"alpa-lite {command.name} {command.example}" in capsys.readouterr().out
    words = [word for word in command.example.replace('"', "").split() if word != ">>" and not word.startswith("~")]
    assert parser.parse_args([command.name, *words]).command == command.name


def test_the_page_tells_every_command_and_exit_code():
    text = PAGE.read_text()
    assert set(re.findall(r"^### `alpa-lite ([a-z]+)", text, re.MULTILINE)) == {command.name for command in COMMANDS}
    table = dict(re.findall(r"^\| (\d+) \| (.*?) \|$", text, re.MULTILINE))
    assert {int(code) for code in table} == {code.value for code in Exit}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["benhc"], "Did you mean 'bench'?"),
        (
            ["plan", "m:f", "--clustr", "p3.16xlarge"],
            "alpa-lite plan: error: there is no option --clustr. Did you mean '--cluster'?",
        ),
        (["plan", "m:f", "--clustr=p3.16xlarge"], "there is no option --clustr. Did you mean '--cluster'?"),
        (["completion", "zhs"], "Did you mean 'zsh'?"),
        (["plan", "m:f", "--qqqqqq"], "there is no option --qqqqqq.\n"),
        (["plan", "m:f", "more"], "unrecognized arguments: more"),
    ],
)
def test_close_words_are_suggested(words, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        build_parser().parse_args(words)
    assert said in capsys.readouterr().err
