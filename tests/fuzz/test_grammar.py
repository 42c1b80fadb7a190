"""The labels of pieces, decided by numbers: what changes in a sample when another sample changes, without alpa_lite."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.fuzz.grammar import SLOTS, Program, build, draw, label, source
from tests.fuzz.pieces import EXTRAS, HIDDEN, LOSSES
from tests.fuzz.shrink import shrink

CHANGED = 1e-7
SETS = {"hidden": HIDDEN, "loss": LOSSES, "extras": EXTRAS}


def _function(slot: str, name: str) -> tuple[Callable[[Any], Any], Any]:
    """A piece as a function of hidden values, ``h -> (h, value)``, in float64; and hidden values."""
    chosen: dict[str, Any] = {"hidden": (), "extras": (), "loss": "sum_of_squares"}
    chosen[slot] = name if slot == "loss" else (name,)
    program = Program(**chosen, metrics=("samples",), features=8 if name == "reshaped_across" else 6)
    state, *data = jax.tree.map(lambda a: a.astype(jnp.float64) if a.dtype == jnp.float32 else a, build(program).args)
    text = (
        source(program)
        .replace("def loss(p, x,", "def loss(h, p, x,")
        .replace("more, h = x.shape[0], 0.0, x", "more = x.shape[0], 0.0")
    )
    if slot == "hidden":
        text = text.replace("value = ((h - x) ** 2).sum() / 8", "value = 0.0")
    elif slot == "extras":
        text = text.replace("value = ((h - x) ** 2).sum() / 8", "value = 0.0")
    namespace: dict[str, Any] = {}
    exec(text, namespace)
    x, y, s, *key = data
    loss = jax.jit(lambda h: namespace["loss"](h, state["net"], x, y, s, x[:, 0] ** 2, key[0] if key else None))

    def function(h: Any) -> Any:
        value, ((out, _),) = loss(h)
        return np.asarray(out), float(value)

    return function, np.asarray(jax.random.normal(jax.random.key(1), x.shape, jnp.float64)) * 0.6


def _meetings(slot: str, name: str) -> set[tuple[int, int]]:
    """The pairs of samples that meet: one changes the other, or both together change the loss in a way of their own."""
    function, h = _function(slot, name)
    n, found = len(h), set[tuple[int, int]]()
    moves = {(): function(h)}
    for size in (1, 2):
        for samples in itertools.combinations(range(n), size):
            changed = h.copy()
            changed[list(samples)] = -0.8 * h[list(samples)] + 0.3
            moves[samples] = function(changed)
    for i, j in itertools.combinations(range(n), 2):
        rows = max(np.abs(moves[(i,)][0][j] - moves[()][0][j]).max(), np.abs(moves[(j,)][0][i] - moves[()][0][i]).max())
        value = abs(moves[(i, j)][1] - moves[(i,)][1] - moves[(j,)][1] + moves[()][1])
        if rows > CHANGED or value > CHANGED:
            found.add((i, j))
    return found


@pytest.mark.parametrize(
    ("slot", "name"),
    [(slot, name) for slot, pieces in SETS.items() for name, piece in pieces.items() if piece.label != "unknown"],
)
def test_labels(slot: str, name: str) -> None:
    piece = SETS[slot][name]
    if piece.tolerance:
        pytest.skip("half precision hides what is small")
    with jax.enable_x64(True):
        met = _meetings(slot, name)
    if piece.label == "mixed":
        assert met
    elif piece.label == "pairs":
        assert all(i // 2 == j // 2 for i, j in met)
    else:
        assert not met


def test_programs_are_their_json_and_their_pieces_all_occur() -> None:
    programs = [draw(seed) for seed in range(3000)]
    assert all(Program.from_json(program.to_json()) == program for program in programs[:50])
    drawn = {(slot, name) for program in programs for slot, name, _ in program.pieces()}
    assert drawn == {(slot, name) for slot, pieces in SLOTS.items() for name in pieces}
    assert {label(program) for program in programs} == {"additive", "mixed", "unknown"}


@pytest.mark.parametrize("slot", list(SLOTS))
def test_each_piece_runs(slot: str) -> None:
    for name in SLOTS[slot]:
        one = name if slot in ("loss", "wrapper", "update") else ("dense", name) if slot == "hidden" else (name,)
        for size in (4, 8):
            built = build(Program(**{slot: one}, features=size))
            jax.eval_shape(built.step, *built.args)


def test_shrinking_keeps_what_fails() -> None:
    program = draw(7)
    small = shrink(program, lambda p: "dense" in p.hidden and p.num_microbatches > 0)
    assert small.hidden == ("dense",) and not small.metrics and small.loss == "mean_of_squares"
