"""Transfer functions by their definition: whole and in parts, each value is what is claimed of it."""

from __future__ import annotations

from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_lite.errors import TraceError
from alpa_lite.step.relations import INVARIANT, MAX, MIN, SUM, ZERO, Refusal, RelationKind, join, mixed, samples
from alpa_lite.trace.trace import trace
from tests.step.claims import Checked, check_claims
from tests.step.draws import DRAWS, D, T

WHY = Refusal("line", "op", (), "mixes")


def drawn(kind: str, seed: int) -> Checked | None:
    """One drawn step of a kind, checked; None where it cannot be traced at the size of a micro-batch."""
    rng = Random(f"{kind} {seed}")
    count, rows = rng.choice([(2, 4), (3, 4), (4, 2), (2, 3), (3, 6), (4, 1)])
    fun, data = DRAWS[kind](rng), np.random.default_rng(seed)
    batch = count * rows
    args = (
        jnp.asarray(data.normal(size=12), jnp.float32),
        jnp.asarray(data.normal(size=(batch, T, D)), jnp.float32),
        jnp.asarray(data.integers(0, D, batch)),
    )

    def step(p: Any, x: Any, y: Any) -> Any:
        return p, fun(p, x, y)

    traced = trace(step, args, batch_argnums=(1, 2))
    try:
        return check_claims(traced, jax.tree.leaves(args), count, runs=rng.choice([1, 1, 2]) if rows % 2 == 0 else 1)
    except TraceError:
        return None


@pytest.mark.parametrize("kind", DRAWS)
@settings(max_examples=40)
@given(seed=st.integers(0, 10_000))
def test_claims_hold_of_what_is_drawn(kind: str, seed: int) -> None:
    drawn(kind, seed)


# --- the lattice ------------------------------------------------------------------------------------------------------

RELATIONS = [INVARIANT, ZERO, SUM, MAX, MIN, samples(0, 1), samples(0, None), samples(0, 2), samples(1, 1), mixed(WHY)]


@pytest.mark.parametrize("a", RELATIONS)
@pytest.mark.parametrize("b", RELATIONS)
def test_joins_do_not_depend_on_the_order_and_go_up(a: Any, b: Any) -> None:
    both = join(a, b, WHY)
    assert both == join(b, a, WHY)
    assert join(a, both, WHY) == join(b, both, WHY) == both


@pytest.mark.parametrize("c", RELATIONS)
@pytest.mark.parametrize("a", RELATIONS)
@pytest.mark.parametrize("b", RELATIONS)
def test_joins_are_associative(a: Any, b: Any, c: Any) -> None:
    assert join(join(a, b, WHY), c, WHY) == join(a, join(b, c, WHY), WHY)


def test_the_order_of_the_lattice() -> None:
    assert join(ZERO, SUM, WHY) == SUM
    assert join(INVARIANT, MAX, WHY) == MAX
    assert join(INVARIANT, SUM, WHY).kind is RelationKind.MIXED
    assert join(MAX, MIN, WHY).kind is RelationKind.MIXED
    assert join(samples(0, None), samples(0, 2), WHY) == samples(0, 2)


@pytest.mark.parametrize("over", ["reduction", "loop"])
def test_or_of_whole_numbers_is_no_maximum(over: str) -> None:
    """It works bit by bit: 1 | 2 is 3."""

    def step(p: Any, x: Any) -> Any:
        bits = (x * p[0]).astype(jnp.int32)
        if over == "reduction":
            return p, jax.lax.reduce(bits, jnp.int32(0), jnp.bitwise_or, (0,))
        return p, jax.lax.scan(lambda c, row: (c | row, None), jnp.int32(0), bits)[0]

    args = (jnp.ones(1), 2.0 ** jnp.arange(8))
    assert check_claims(trace(step, args, batch_argnums=1), jax.tree.leaves(args), 2).proof.refusals
