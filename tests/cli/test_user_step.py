"""The step of a user by the name of a function: in a module, or in a file."""

import sys

import pytest

from alpa_lite.cli.user_step import load_example
from alpa_lite.errors import PlanError

FILE = """
import alpa_lite as al
from beside import SIZE

def step(x, *, scale=1):
    return x * scale

def plain():
    return step, [SIZE]

def decorated():
    return al.parallelize(step), (SIZE,), {"scale": 2}

def wrong():
    return step

number = 3
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "of_a_user.py").write_text(FILE)
    (tmp_path / "beside.py").write_text("SIZE = 5")
    yield tmp_path / "of_a_user.py"
    for name in ("of_a_user", "beside"):
        sys.modules.pop(name, None)


def test_a_file_finds_what_lies_beside_it(file):
    before = list(sys.path)
    step, arguments, keywords = load_example(f"{file}:plain")
    assert arguments == (5,) and keywords == {} and step(3, scale=2) == 6
    assert sys.path == before


def test_a_decorated_step_comes_as_it_is(file):
    step, arguments, keywords = load_example(f"{file}:decorated")
    assert step.__name__ == "step" and not hasattr(step, "last_plan")
    assert arguments == (5,) and keywords == {"scale": 2}


def test_a_module_is_found_in_the_folder_of_work(file, monkeypatch):
    monkeypatch.chdir(file.parent)
    assert load_example("of_a_user:plain")[1] == (5,)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("plain", "does not name a function"),
        (":plain", "does not name a function"),
        ("of_a_user:", "does not name a function"),
        ("nowhere.py:plain", "no file 'nowhere.py'"),
        ("of_nobody:plain", "no module 'of_nobody'"),
        ("of_a_user:missing", "no function 'missing'"),
        ("of_a_user:number", "no function 'number'"),
        ("of_a_user:wrong", "returned function, but"),
    ],
)
def test_wrong_names_are_sentences(name, words, file, monkeypatch):
    monkeypatch.chdir(file.parent)
    with pytest.raises(PlanError, match=words):
        load_example(name)


def test_what_a_module_lacks_itself_is_its_own_error(tmp_path, monkeypatch):
    (tmp_path / "lacking.py").write_text("import surely_not_installed")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="surely_not_installed"):
        load_example("lacking:f")


def test_a_file_does_not_stand_in_for_a_module_of_its_name(tmp_path):
    import json

    path = tmp_path / "json.py"
    path.write_text("from dataclasses import dataclass\n@dataclass\nclass A:\n  a: int\ndef f():\n  return A, (1,)")
    assert load_example(f"{path}:f")[1] == (1,)
    assert sys.modules["json"] is json
