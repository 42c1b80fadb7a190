"""The oracle sees what is wrong and forgives what rounding explains; processes that die are results."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.fuzz import oracle
from tests.fuzz.grammar import Program, failure, label
from tests.fuzz.oracle import Outcome, Setup, compare, judge, setups
from tests.fuzz.pool import Worker

X = np.linspace(1.0, 2.0, 8, dtype=np.float32).reshape(4, 2)
ONE: Setup = setups(2)[0]


@pytest.mark.parametrize(
    ("factor", "kind"), [(1.0, "equal"), (1 + 1e-6, "equal"), (1 + 1e-3, "wrong"), (2.0, "wrong"), (np.nan, "wrong")]
)
def test_differences_are_judged_by_float64(factor: float, kind: str) -> None:
    assert judge([X * np.float32(factor)], [X], lambda: [X.astype(np.float64)]).kind == kind


def test_rounding_of_jit_itself_is_forgiven() -> None:
    exact = X.astype(np.float64) * (1 + 5e-4)
    assert judge([X * np.float32(1 - 5e-4)], [X], lambda: [exact]).kind == "equal"
    assert judge([X * np.float32(1 - 5e-4)], [X], lambda: [X.astype(np.float64)]).kind == "wrong"


def test_integers_shapes_and_kinds_must_agree() -> None:
    whole = np.arange(4)
    for other in (whole + 1, whole[:2], whole.astype(np.float32)):
        assert judge([other], [whole], lambda: None).kind == "wrong"
    assert judge([], [whole], lambda: None).kind == "wrong"


def test_each_kind_of_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(step, planner=ONE.planner):
        return compare(
            step, (X, X), setup=replace(ONE, planner=planner), num_microbatches=2, batch_argnums=(1,), calls=1
        )

    assert run(lambda p, x: (p, x.sum())).kind == "equal"
    assert run(lambda p, x: (p, jnp.sum((p * x) @ (p * x).T))).kind == "refused"
    assert run(lambda p, x: (p, x.sum() / 0)).kind == "unusable"
    assert run(lambda p, x: {}["nothing"]).kind == "unusable"
    monkeypatch.setattr(oracle.al, "parallelize", lambda step, **_: lambda p, x: (p, x[:2].sum()))
    assert run(lambda p, x: (p, x.sum())).kind == "wrong"
    monkeypatch.setattr(oracle.al, "parallelize", lambda step, **_: lambda p, x: {}["nothing"])
    assert run(lambda p, x: (p, x.sum())).kind == "crashed"


def test_what_flips_by_rounding_is_unstable() -> None:
    def step(p, x):
        return p, jnp.sin(x.sum() * 1e7)

    want = oracle.run(jax.jit(step), (X, X), 1)
    assert oracle._is_unstable(step, (X, X), 1, [want[0], want[1] + np.float32(0.5)], want)
    assert not oracle._is_unstable(step, (X, X), 1, [want[0] + 1, want[1]], want)


def test_failures() -> None:
    refused, mixed = Outcome(kind="refused"), Program(hidden=("dense", "rolled"))
    assert (label(Program()), label(mixed)) == ("additive", "mixed")
    assert failure(Program(), refused) == "refused although additive" and failure(mixed, refused) == ""
    assert failure(mixed, Outcome(kind="wrong")) == "wrong" and failure(mixed, Outcome(kind="equal")) == ""


def test_a_process_that_dies_is_a_result_and_is_replaced() -> None:
    worker = Worker()
    try:
        assert worker.outcome(Program(hidden=("no such piece",))).kind == "died"
        assert worker.outcome(Program(num_microbatches=1)).kind == "equal"
    finally:
        worker.close()
