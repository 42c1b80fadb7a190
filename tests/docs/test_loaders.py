"""The data loaders on the page about training loops, where the libraries are installed."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import alpa_lite as al

PAGE = (Path(__file__).parents[2] / "docs" / "training-loop.md").read_text(encoding="utf-8")
BATCH = 32
SAMPLES = 80  # two batches and a half


def names_of_block(start: str) -> dict[str, Any]:
    """Return what the block that begins with these words defines."""
    (code,) = re.findall(rf"^```text\n({start}\n.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"BATCH": BATCH}
    exec(compile(code, "training-loop.md", "exec"), names)
    return names


def arrays() -> dict[str, np.ndarray]:
    x = np.arange(SAMPLES, dtype=np.float32)[:, None] * np.ones(16, np.float32)
    return {"x": x, "y": 2 * x}


def numbers(batches: Iterable[dict[str, np.ndarray]]) -> list[int]:
    """Return the numbers of the samples in some batches, each of which is whole."""
    found = list[int]()
    for batch in batches:
        assert batch["x"].shape == (BATCH, 16) and np.array_equal(batch["y"], 2 * batch["x"])
        found += [int(row[0]) for row in batch["x"]]
    return found


def train(batch: dict[str, np.ndarray]) -> None:
    """A parallel step takes the batch as it is."""

    def step(w: Any, batch: Any) -> Any:
        return w - 1e-4 * jax.grad(lambda w: ((batch["x"] @ w - batch["y"]) ** 2).mean())(w)

    w = np.eye(16, dtype=np.float32)
    got = al.parallelize(step, planner=al.planners.DataParallel())(w, batch)
    np.testing.assert_allclose(got, jax.jit(step)(w, batch), rtol=1e-5)


@pytest.mark.usefixtures("devices")
def test_grain_reads_shuffles_and_goes_on_from_any_batch() -> None:
    pytest.importorskip("grain")
    page = names_of_block("import grain")
    first = list(itertools.islice(page["grain_loader"](arrays(), 0), 6))
    # Five batches are two epochs, of which each has all samples in an order of its own.
    read = numbers(first[:5])
    one, two = read[:SAMPLES], read[SAMPLES:]
    assert sorted(one) == sorted(two) == list(range(SAMPLES)) and one != two != sorted(one) != one
    again = list(itertools.islice(page["grain_loader"](arrays(), 0, start=4), 2))
    assert numbers(again) == numbers(first[4:])
    assert numbers([page["grain_batches"](arrays(), 0)[5]]) == numbers(first[5:])
    train(first[0])


@pytest.mark.usefixtures("devices")
def test_tf_data_reads_and_shuffles() -> None:
    pytest.importorskip("tensorflow")
    batches = list(names_of_block("import tensorflow as tf")["tf_loader"](arrays(), 0))
    found = numbers(batches)
    assert len(batches) == 2 and len(set(found)) == 64 and found != sorted(found)
    train(batches[0])
