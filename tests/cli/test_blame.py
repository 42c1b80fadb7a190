"""Errors of a user's code: told with its lines; errors of nobody's are not."""

import pytest

from alpa_lite.cli.command import blamed, ended
from alpa_lite.cli.exit_codes import Exit
from alpa_lite.cli.user_files import load_example


@pytest.fixture
def at_work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def raised(name):
    try:
        load_example(name)
    except Exception as error:
        return error
    raise AssertionError(f"{name} raised nothing")


def lines_of(text):
    """Without the first line, and without where the test itself stands."""
    return [line for line in text.splitlines() if "test_blame.py" not in line]


def test_lines_that_led_there(at_work):
    (at_work / "model.py").write_text("def example():\n    return layers({})\n\ndef layers(p):\n    return p['w']\n")
    found = ["KeyError: 'w'", "  model.py:2 in example: return layers({})", "  model.py:5 in layers: return p['w']"]
    assert lines_of(blamed(raised("model.py:example"))) == found


def test_a_file_that_is_no_python(at_work):
    (at_work / "broken.py").write_text("x = 1\ndef example(:\n")
    found = ["SyntaxError: invalid syntax", "  broken.py:2: def example(:"]
    assert lines_of(blamed(raised("broken.py:example"))) == found


def test_an_import_that_fails(at_work):
    (at_work / "importing.py").write_text("import no_such_package\n")
    assert "importing.py:1 in <module>: import no_such_package" in blamed(raised("importing.py:example"))


def test_the_last_lines_of_many(at_work):
    (at_work / "deep.py").write_text("def example(n=50):\n    return example(n - 1) if n else 1 / 0\n")
    lines = blamed(raised("deep.py:example")).splitlines()
    assert lines[0] == "ZeroDivisionError: division by zero" and lines[1].endswith(" more") and len(lines) == 8


def test_what_nobody_foresaw_is_raised(capsys):
    def defect():
        raise ValueError("of this package")

    defect.__code__ = defect.__code__.replace(co_filename=ended.__code__.co_filename)
    with pytest.raises(ValueError, match="of this package"):
        ended("plan", defect)
    assert not capsys.readouterr().err


def test_the_exit_code(at_work, capsys):
    (at_work / "failing.py").write_text("def example():\n    raise RuntimeError('no data')\n")

    def run():
        load_example("failing.py:example")
        return 0

    assert ended("plan", run) == Exit.ERROR
    found = ["RuntimeError: no data", "  failing.py:2 in example: raise RuntimeError('no data')"]
    assert lines_of(capsys.readouterr().err) == found
