"""Files of pins that are damaged or hostile: a sentence, or pins; nothing in them is ever run."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_lite.cli.plan_command import read_pins
from alpa_lite.errors import PlanError
from tests.mutations import damaged, mutated

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
