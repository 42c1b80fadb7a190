"""Passes over a program, and the driver that runs them.

A pass is a frozen dataclass with a name, whose `apply` returns a rewritten program. The driver verifies every program
that a pass returns, times the pass, and reports both to a recorder, which may write the program to a file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from alpa_lite.program.ir import Graph, verify


class HasGraph(Protocol):
    """A program of any kind: a graph with what belongs to it."""

    @property
    def graph(self) -> Graph:
        """The graph of the program."""
        ...


Rewritten = TypeVar("Rewritten", bound=HasGraph)


class Pass(Protocol[Rewritten]):
    """A rewriting of a program."""

    @property
    def name(self) -> str:
        """Name in listings."""
        ...

    def apply(self, program: Rewritten, /) -> Rewritten:
        """Return the program rewritten; the program itself if there is nothing to do."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassRun:
    """One run of a pass.

    Attributes:
        name: name of the pass.
        seconds: how long it took, without the verification.
        program: the program that it returned.
    """

    name: str
    seconds: float
    program: HasGraph


@dataclass(frozen=True, slots=True, kw_only=True)
class PassDriver:
    """Runs passes, and verifies the program after each.

    Attributes:
        record: receives each run; None if nobody asks.
    """

    record: Callable[[PassRun], None] | None = None

    def run(self, program: Rewritten, passes: Sequence[Pass[Rewritten]]) -> Rewritten:
        """Return the program after all passes. Raises `VerificationError` if a pass returns one that is not valid."""
        for each in passes:
            program = self.made(each.name, partial(each.apply, program))
        return program

    def made(self, name: str, make: Callable[[], Rewritten]) -> Rewritten:
        """Return the program that `make` returns, verified and recorded as a run of a pass."""
        started = time.perf_counter()
        program = make()
        seconds = time.perf_counter() - started
        verify(program.graph)
        if self.record is not None:
            self.record(PassRun(name=name, seconds=seconds, program=program))
        return program
