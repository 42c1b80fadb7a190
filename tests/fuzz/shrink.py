"""Shrink a failing program: remove pieces, and take simpler ones, as long as it fails in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.fuzz.grammar import LISTS, Program

SIMPLEST = Program()
SCALARS = (
    "wrapper",
    "update",
    "loss",
    "time_major",
    "donate",
    "calls",
    "planner",
    "num_microbatches",
    "batch",
    "features",
    "tokens",
)


def simpler(program: Program) -> Iterator[Program]:
    """Programs that are one step simpler, the greatest steps first."""
    for slot in LISTS:
        names = getattr(program, slot)
        if names and slot != "hidden":
            yield replace(program, **{slot: ()})
        if len(names) > 1 or (names and slot == "hidden"):
            yield from (replace(program, **{slot: names[:i] + names[i + 1 :]}) for i in range(len(names)))
    for name in SCALARS:
        if getattr(program, name) != getattr(SIMPLEST, name):
            yield replace(program, **{name: getattr(SIMPLEST, name)})
    for i, name in enumerate(program.hidden):
        if name != "dense":
            yield replace(program, hidden=(*program.hidden[:i], "dense", *program.hidden[i + 1 :]))


def shrink(program: Program, fails: Callable[[Program], bool], max_runs: int = 60) -> Program:
    """The simplest program found that still fails, after at most `max_runs` calls of `fails`."""
    runs = 0
    progress = True
    while progress:
        progress = False
        for candidate in simpler(program):
            if candidate.batch % candidate.num_microbatches:
                continue
            if runs == max_runs:
                return program
            runs += 1
            if fails(candidate):
                program, progress = candidate, True
                break
    return program
