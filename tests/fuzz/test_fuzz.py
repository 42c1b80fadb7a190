"""Random train steps in micro-batches: equal to `jax.jit`, or refused where they are no sums over their samples."""

from __future__ import annotations

import pytest

from tests.fuzz.grammar import draw, failure, outcome, source

SEEDS = range(80)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", SEEDS)
def test_program(seed: int) -> None:
    program = draw(seed)
    found = outcome(program)
    what = failure(program, found)
    assert not what, f"{what}: {found.detail}\n{program.to_json()}\n{source(program)}"
