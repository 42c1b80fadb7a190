"""What users name: functions that return steps, and files of pins; the reasons why they cannot be read."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_lite.cli.user_files import load_example, read_pins
from alpa_lite.errors import PlanError
from tests.mutations import damaged, mutated

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


def test_a_file_may_be_named_without_its_ending_and_begin_with_a_mark(file, monkeypatch):
    file.write_text("\ufeff" + FILE, encoding="utf-8")
    monkeypatch.chdir(file.parent)
    assert load_example("./of_a_user:plain").args == (5,)
    assert load_example(f"{file.parent}/of_a_user:plain").args == (5,)
    with pytest.raises(PlanError, match=r"There is no file 'no_such\.py'"):
        load_example("./no_such:plain")


def test_a_program_that_ends_itself_is_told(file):
    file.write_text("import sys\nsys.exit(3)\ndef example(): ...")
    with pytest.raises(PlanError, match=r"by sys\.exit\(3\), while .*of_a_user\.py is imported.*__main__"):
        load_example(f"{file}:example")
    file.write_text("import sys\ndef example():\n    sys.exit()")
    with pytest.raises(PlanError, match=r"by sys\.exit\(\), while .*example is called"):
        load_example(f"{file}:example")


def test_a_function_with_a_close_name_is_proposed(file):
    with pytest.raises(PlanError, match=r"has no function 'plan'\. Did you mean 'plain'"):
        load_example(f"{file}:plan")


def test_pins_may_begin_with_a_mark(tmp_path):
    path = tmp_path / "pins.yaml"
    path.write_text("\ufeffparams/w: [null, x]", encoding="utf-8")
    assert dict(read_pins(path).pins) == {"params/w": (None, "x")}


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


PINS = "state/params/head: [null, model]\nlayers/0/w: [[replica, data], null]\nboth: &x [null]\nthere: *x\n"


@pytest.mark.parametrize("count", [100, pytest.param(5000, marks=pytest.mark.long)])
def test_any_change_is_a_sentence_or_pins(count: int, tmp_path: Path) -> None:
    path = tmp_path / "pins.yaml"

    @settings(max_examples=count)
    @given(seed=st.integers(0, 2**32), changes=st.integers(0, 3))
    def run(seed: int, changes: int) -> None:
        chance = random.Random(seed)
        changed = yaml.safe_dump(mutated(yaml.safe_load(PINS), chance, changes=changes)).encode()
        path.write_bytes(changed if changes else damaged(PINS.encode(), chance))
        try:
            read_pins(path)
        except PlanError as error:
            assert str(path) in str(error)

    run()


HOSTILE = {
    "python": "a: !!python/object/apply:os.system ['exit 1']\n",
    "deep": "[" * 10**5,
    "cycle": "a: &a [*a]\n",
    "laughs": "a: &a [x,x,x,x,x,x,x,x,x]\n"
    + "".join(f"{chr(98 + i)}: &{chr(98 + i)} [{','.join([f'*{chr(97 + i)}'] * 9)}]\n" for i in range(9)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_sentences(name: str, tmp_path: Path) -> None:
    (tmp_path / "pins.yaml").write_text(HOSTILE[name])
    with pytest.raises(PlanError, match=r"pins\.yaml"):
        read_pins(tmp_path / "pins.yaml")
