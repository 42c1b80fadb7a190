"""Hostile files; see `hostile`, which also tries out many."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from alpa_lite.cli import main
from tests.hostile import KINDS, ended, hostile

COUNT = 150


@pytest.mark.parametrize("kind", KINDS)
def test_changed_files_are_used_or_refused(kind: str, tmp_path: Path) -> None:
    assert ended(kind, KINDS[kind].text(), tmp_path / f"{kind}.json") == "used"
    seen = {ended(kind, hostile(kind, random.Random(seed)), tmp_path / f"{kind}.json") for seed in range(COUNT)}
    assert seen == {"used", "refused"}


def _plan(**changes: Any) -> bytes:
    return json.dumps({**json.loads(KINDS["plan"].text()), **changes}).encode()


def _cluster(**changes: Any) -> bytes:
    return json.dumps({**json.loads(KINDS["cluster"].text()), **changes}).encode()


PLANS = {
    "many micro-batches": (_plan(num_microbatches=2**24), "micro-batches"),
    "many devices": (_plan(cluster=json.loads(_cluster(num_hosts=2**21))), "devices"),
    "a name with an escape": (_plan(name="\x1b[2J"), "cannot be shown"),
    "half a character": (_plan(function="\ud800"), "cannot be shown"),
    "a long name": (_plan(function="x" * 10**5), "a text of 100000 characters"),
    "nesting near Python's limit": (b'{"format": 5, "stages": ' + b"[" * 985 + b"]" * 985 + b"}", "nests 986 deep"),
    "nesting beyond it": (b"[" * 10**5, "nests 100000 deep"),
    "many values": (b"[" + b"{}," * 4_000_000 + b"1]", "values"),
    "a large file": (b" " * 2**25, "more than 16384 KiB"),
}
CLUSTERS = {
    "many devices": (_cluster(num_hosts=2**21), "devices"),
    "more devices than there are atoms": (_cluster(num_hosts=10**400), "devices"),
    "a key with an escape": (_cluster(**{"\x1b[2J": 1}), "cannot be shown"),
    "a long key": (_cluster(**{"x" * 10**5: 1}), "a text of 100000 characters"),
    "half a character": (_cluster(name="\ud800"), "cannot be shown"),
    "nesting": (b'{"name": ' + b"[" * 985 + b"]" * 985 + b"}", "nests 986 deep"),
    "a large file": (b" " * 2**25, "more than 1024 KiB"),
}
PINS = {
    "aliases of aliases": (
        b"a: &a [x, x]\n" + b"".join(b"b%d: &b%d [*a, *a]\n" % (i, i) for i in range(9)),
        "no argument",
    ),
    "a list of itself": (b"a: &a [*a]\n", "a list"),
    "nesting": (b"a: " + b"[" * 10**5, "nests too deeply"),
    "an escape": (b'"\\e[2J": [x]\n', "no argument"),
    "an axis with an escape": (b'params/a: ["\\e[2J"]\n', "axes"),
    "half a character": (b'"\\ud800": [x]\n', "no argument"),
    "a long axis": (b"params/a: [" + b"x" * 10**5 + b"]\n", "axes"),
    "a number without end": (b"params/a: [0x" + b"f" * 10**5 + b"]\n", "the entry 0xfff"),
    "a date": (b"params/a: [2020-01-01]\n", "the entry 2020-01-01"),
    "many pins": (b"".join(b"p%d: [x]\n" % i for i in range(10**5)), "more than 256 KiB"),
}
STEP = """
import jax, jax.numpy as jnp
from tests.hostile import train_step

def example():
    return train_step, ({"a": SHAPE, "b": SHAPE}, SHAPE)

SHAPE = jax.ShapeDtypeStruct((64, 64), jnp.float32)
"""


@pytest.mark.parametrize(
    ("words", "text", "told"),
    [
        *((["explain", "file.json", *more], *case) for case in PLANS.values() for more in ([], ["--html", "a.html"])),
        *((["simulate", "file.json"], *case) for case in PLANS.values()),
        *((["plan", "steps.py:example", "--cluster", "file.json"], *case) for case in CLUSTERS.values()),
        *(
            (["plan", "steps.py:example", "--cluster", "p3.16xlarge", "--pins", "file.json"], *case)
            for case in PINS.values()
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else value if isinstance(value, str) else "",
)
def test_commands_refuse_them_in_a_sentence(
    words: list[str],
    text: bytes,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.json").write_bytes(text)
    (tmp_path / "steps.py").write_text(STEP)
    assert main(words) == 1
    printed = capsys.readouterr()
    assert not printed.out and told in printed.err and len(printed.err) < 3100
    assert printed.err.rstrip("\n").isprintable()
