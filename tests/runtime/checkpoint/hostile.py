"""Checkpoints that somebody has changed, at random: each is refused in a sentence, or gives what was saved.

A trial copies a small checkpoint, changes some of its files (`ATTACKS`), mostly writes the checksums anew, so that what
lies behind them is reached, and restores. Whoever writes checksums anew may write other numbers into the arrays: such a
state counts as forged.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import shutil
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts

import alpa_lite as al
from alpa_lite.errors import CheckpointError
from alpa_lite.runtime.checkpoint.checkpoint_folder import RECORD
from alpa_lite.runtime.checkpoint.checksums import LIST
from tests.plan.test_plan import planned
from tests.runtime.checkpoint.saved_states import bits

STEP = 5
JSON = ("leaves.json", "plan.json", "_METADATA", RECORD)
NAMES = (
    *("/etc/passwd", "../../x", "a/../../x", "./x", "", " ", "a//b", "x\\y", "\x1b[2J", "a\rb", "é" * 3000),
    *("leaves.json/x", "d", ".", "..", "~/x", "con:", "\u202e", "x" * 2000, "d/../leaves.json"),
)
VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 2**31, 2**63, 2**64, 10**30, 1e308, 0.5, "", "\x1b[31m", "\ud800", "x" * 10_000, [], {}),
    *(
        [[[[]]]],
        {"": {"": {}}},
        "float64",
        "O",
        "i4,f8",
        "(1000,1000)f8",
        "key<fry>",
        "key<\x1b>",
        "int4",
        [2**40, 2**40],
    ),
)
TEXTS = (
    *(
        b"",
        b"{",
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b"NaN",
        b"1e999",
        b"9" * 5000,
        b'"\\ud800"',
        b"\xff\xfe",
        b"\0" * 100,
    ),
    *(b"[" + b"[]," * 3_000_000 + b"[]]", b'"' + b"\\" * 1_000_001, b'{"format": 1, "leaves": {"\\u001b[2J": {}}}'),
)


def state() -> dict[str, Any]:
    """What is saved: arrays of some kinds, a key, a number."""
    return {
        "w": {"a": jnp.arange(16.0), "b": jnp.ones((3, 5), jnp.bfloat16)},
        "counts": np.arange(300, dtype=np.int64),
        "key": jax.random.key(3),
        "n": 7,
        "empty": jnp.zeros((0, 2)),
    }


def original(folder: Path) -> None:
    """The checkpoint that is changed."""
    with al.Checkpoints(folder) as checkpoints:
        checkpoints.save(STEP, state(), plan=planned("mlp", "hybrid").last_plan)


def sign(folder: Path) -> None:
    """Write the checksums anew, as one who wants to deceive would."""
    try:
        data = json.loads(file(folder, RECORD).read_bytes())
        data.pop("sha256", None)
        digest = hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
        (folder / RECORD).write_text(json.dumps({**data, "sha256": digest}))
    except (OSError, ValueError, AttributeError, TypeError, RecursionError):
        pass
    names = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink() and path.name != LIST]
    write_list(
        folder, [f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.relative_to(folder).as_posix()}" for p in names]
    )


def write_list(folder: Path, lines: list[str]) -> None:
    """A list that agrees with its own first line."""
    text = "".join(f"{line}\n" for line in lines).encode("utf-8", "surrogatepass")
    first = f"# alpa_lite checkpoint, sha256 of the lines below: {hashlib.sha256(text).hexdigest()}\n"
    (folder / LIST).unlink(missing_ok=True)
    (folder / LIST).write_bytes(first.encode() + text)


def regular(folder: Path, rng: random.Random) -> Path:
    return rng.choice(sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()))


def file(folder: Path, name: str) -> Path:
    """A file that is still one, so that this program does not hang itself."""
    if not (folder / name).is_file() or (folder / name).is_symlink():
        raise FileNotFoundError(name)
    return folder / name


def flip(folder: Path, rng: random.Random) -> None:
    path = regular(folder, rng)
    data = bytearray(path.read_bytes() or b"\0")
    for _ in range(rng.choice((1, 1, 4, 40))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def cut(folder: Path, rng: random.Random) -> None:
    path = regular(folder, rng)
    data = path.read_bytes()
    path.write_bytes(data[: rng.randrange(len(data) + 1)] + rng.choice((b"", b"", rng.randbytes(rng.randrange(300)))))


def swap(folder: Path, rng: random.Random) -> None:
    one, other = regular(folder, rng), regular(folder, rng)
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)


def lose(folder: Path, rng: random.Random) -> None:
    regular(folder, rng).unlink()


def blow_up(folder: Path, rng: random.Random) -> None:
    """A file of 4 GiB that needs no room."""
    os.truncate(regular(folder, rng), 2**32)


def replace(folder: Path, rng: random.Random) -> None:
    """By a link, a FIFO, a folder."""
    path = regular(folder, rng)
    kept = path.with_name("kept")
    path.rename(kept)
    targets = ("/dev/zero", "/etc/passwd", "/proc/self/mem", path.name, str(kept), "kept", "nowhere", "..", "/")
    kind = rng.randrange(4)
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        path.mkdir()
    else:
        path.symlink_to(rng.choice(targets))


def replace_folder(folder: Path, rng: random.Random) -> None:
    """By a link that leads out, or in a circle."""
    path = rng.choice(sorted(path for path in folder.rglob("*") if path.is_dir()))
    shutil.rmtree(path)
    path.symlink_to(rng.choice(("/proc/self", "..", path.name, "/dev", "/tmp")))


def text(folder: Path, rng: random.Random) -> None:
    file(folder, rng.choice(JSON)).write_bytes(rng.choice(TEXTS))


def _paths(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [path, *(each for key, value in items for each in _paths(value, (*path, key)))]


def edit(folder: Path, rng: random.Random) -> None:
    """Other values, names and types somewhere in a JSON file."""
    path = file(folder, rng.choice((*JSON, "leaves.json", RECORD)))
    data = json.loads(path.read_bytes())
    for _ in range(rng.choice((1, 1, 2, 5))):
        *way, last = rng.choice(_paths(data)[1:] or [("x",)])
        place = data
        try:
            for key in way:
                place = place[key]
            if rng.random() < 0.2 and isinstance(place, dict):
                place[rng.choice(("\x1b[2J", "\ud800", "x" * 5000, "", "w/a", "/", "../x"))] = place.pop(last)
            else:
                place[last] = rng.choice(VALUES)
        except (KeyError, TypeError, IndexError):
            continue
    path.write_bytes(json.dumps(data).encode())


def listed(folder: Path, rng: random.Random) -> None:
    """Names that lead out, are none, or are there twice."""
    lines = file(folder, LIST).read_text().splitlines()[1:]
    name = rng.choice((*NAMES, lines[0][66:]))
    lines.append(
        f"{rng.choice((lines[0][:64], '0' * 64, 'g' * 64, '0' * 63))}{rng.choice(('  ', '  ', ' *', ' '))}{name}"
    )
    rng.shuffle(lines)
    write_list(folder, lines if rng.random() < 0.9 else lines * rng.choice((2, 3000)))


def header(folder: Path, rng: random.Random) -> None:
    """What the store says of an array: other shapes, dtypes, chunks; or chunks of other sizes."""
    file(folder, "manifest.ocdbt")
    store = ts.KvStore.open({"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder}/"}}).result(5)
    keys = store.list().result(5)
    key = rng.choice([key for key in keys if key.endswith(b".zarray")])
    if rng.random() < 0.2:
        chunk = rng.choice([key for key in keys if not key.endswith(b".zarray")])
        store.write(chunk, rng.randbytes(rng.choice((0, 1, 63, 64, 65, 100_000)))).result(5)
        return
    if rng.random() < 0.1:
        store.write(key, rng.choice(TEXTS[:-3])).result(5)
        return
    data = json.loads(store.read(key).result(5).value)
    numbers: tuple[Any, ...] = (2**30, 2**40, 0, -1, 1.5, "1", None, True)
    field = rng.choice([*data])
    bad: dict[str, tuple[Any, ...]] = {
        "chunks": ([rng.choice(numbers) for _ in data["shape"]], [2**30, 2**30], [1] * 5000, "x"),
        "shape": ([rng.choice(numbers) for _ in data["shape"]], [1] * 5000),
        "dtype": ("<f8", "|V100000000", "<i4", "bfloat16", [["a", "<f4"]], "|O", "x" * 1000, ">f4", "(9,9)f4"),
        "compressor": ({"id": "zstd"}, {"id": "blosc", "cname": "\x1b", "clevel": 9}, "x"),
        "order": ("F", "K", 1),
        "zarr_format": (3, "2", 1e308),
    }
    data[field] = rng.choice((*bad.get(field, ()), *VALUES))
    store.write(key, json.dumps(data).encode()).result(5)


ATTACKS: tuple[Callable[[Path, random.Random], None], ...] = (
    *(flip, cut, swap, lose, blow_up, replace, replace_folder, text, edit, edit, listed, header, header),
)


@dataclass
class Report:
    """What has come of the trials."""

    counts: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    slowest: float = 0.0
    slow: str = ""


def trial(source: Path, work: Path, seed: int, report: Report) -> None:
    """One checkpoint, changed as a seed says; the outcome goes into the report."""
    rng = random.Random(seed)
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(source, work)
    step, done = work / f"{STEP}", list[str]()
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        attack = rng.choice(ATTACKS)
        try:
            attack(step, rng)
        except (OSError, ValueError, TypeError, KeyError, IndexError, RecursionError):
            continue  # what it would change is gone
        done.append(attack.__name__)
        if attack is blow_up:
            break  # the other attacks would read all of it
    is_signed = rng.random() < 0.6 and "listed" not in done and "blow_up" not in done
    if is_signed:
        with suppress(IsADirectoryError):
            sign(step)
    verify = rng.random() < 0.7
    began = time.monotonic()
    try:
        what = _outcome(work, verify)
    except BaseException as error:
        what = f"{type(error).__name__}: {str(error)[:300]!r}"
    seconds = time.monotonic() - began
    if seconds > report.slowest:
        report.slowest, report.slow = seconds, f"seed {seed} ({', '.join(done)}): {what}"
    if what == "other" and (is_signed or not verify):
        what = "forged"
    report.counts[what if what in ("refused", "equal", "forged", "none") else "lost"] += 1
    if what not in ("refused", "equal", "forged", "none"):
        report.lost.append(f"seed {seed} ({', '.join(done)}): {what}")


def _outcome(folder: Path, verify: bool) -> str:
    checkpoints, outcome = al.Checkpoints(folder), "equal"
    if not checkpoints.steps:
        return "none"
    for ask in (checkpoints.plan, lambda: checkpoints.restore(state(), verify=verify)):
        try:
            found = ask()
        except CheckpointError as error:
            if not str(error).isprintable() or len(str(error)) > 2000:
                return f"message {str(error)!r:.2000}"
            outcome = "refused"
            continue
        if isinstance(found, tuple):
            pairs = zip(jax.tree.leaves(found[1]), jax.tree.leaves(state()), strict=True)
            outcome = "equal" if all(bits(got) == bits(want) for got, want in pairs) else "other"
    return outcome


def run(work: Path, count: int, seed: int, *, progress: bool = False) -> Report:
    """So many trials, one after the other."""
    report, source = Report(), work / "original"
    original(source)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(count):
            trial(source, work / "changed", seed + number, report)
            if progress and number % 500 == 499:
                print(f"{number + 1} tried: {dict(report.counts)}", report.lost[-1:], flush=True)
    return report


def peak_bytes() -> int:
    """The most memory that this process has had."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
