"""The driver of passes: it verifies what each returns, and reports each run with its program."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import pytest

from alpa_lite.errors import VerificationError
from alpa_lite.program.equations import GraphWithEquations
from alpa_lite.program.passes import PassDriver, PassRun
from alpa_lite.trace.from_jaxpr import from_jaxpr


@dataclass(frozen=True)
class Renamed:
    """A pass that renames the first value."""

    name: str

    def apply(self, program: GraphWithEquations) -> GraphWithEquations:
        first, *rest = program.graph.values
        return replace(program, graph=replace(program.graph, values=(replace(first, name=self.name), *rest)))


@dataclass(frozen=True)
class Backwards:
    """A pass that turns the order of the ops, and so reads values before they are made."""

    name = "backwards"

    def apply(self, program: GraphWithEquations) -> GraphWithEquations:
        ops = tuple(replace(op, id=i) for i, op in enumerate(reversed(program.graph.ops)))
        return replace(program, graph=replace(program.graph, ops=ops))


def _program() -> GraphWithEquations:
    return from_jaxpr(jax.make_jaxpr(lambda x: jnp.sin(jnp.cos(x)))(jnp.ones(3)), ["x"])


def test_passes_run_in_order_and_are_reported_with_what_they_returned() -> None:
    runs: list[PassRun] = []
    made = PassDriver(record=runs.append).run(_program(), (Renamed("a"), Renamed("b")))
    assert [(run.name, run.program.graph.values[0].name) for run in runs] == [("a", "a"), ("b", "b")]
    assert made is runs[-1].program and all(run.seconds >= 0 for run in runs)


def test_a_pass_that_returns_an_invalid_program_is_refused_and_the_next_does_not_run() -> None:
    runs: list[PassRun] = []
    with pytest.raises(VerificationError, match="before they are made"):
        PassDriver(record=runs.append).run(_program(), (Renamed("a"), Backwards(), Renamed("b")))
    assert [run.name for run in runs] == ["a"]
