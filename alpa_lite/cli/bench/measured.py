"""Run plans in turn: one step of each, round after round, so that disturbances of the machine affect all alike."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from alpa_lite.cli.bench.planned import PlannedEntry, Say, same_plan
from alpa_lite.cli.bench.row import Row
from alpa_lite.cli.bench.targets import BenchTarget
from alpa_lite.runtime.execute.function import CompiledFunction
from alpa_lite.trace.call import Call, NamedArguments

WARM_UP = 2
"""Rounds that do not count: the first one compiles the rest, the second one settles the memory allocator."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Running:
    """A compiled step with its arguments; each call runs one step on the state of the previous call."""

    compiled: CompiledFunction
    leaves: list[Any]

    @staticmethod
    def of(compiled: CompiledFunction, leaves: Sequence[Any]) -> Running:
        """Put the arguments on their devices."""
        return Running(compiled=compiled, leaves=jax.block_until_ready(compiled.executor.place_inputs(list(leaves))))

    def __call__(self) -> None:
        """Run one step and wait until all of it is done."""
        outputs = jax.tree.leaves(jax.block_until_ready(self.compiled.run_flat(self.leaves, None)))
        for out, into in self.compiled.traced.aliases.items():
            self.leaves[into] = outputs[out]


def in_turn(
    steps: Mapping[str, Callable[[], None]],
    rounds: int,
    say: Say,
    *,
    warm_up: int = WARM_UP,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Return the seconds of each step in each round that counts; every other round runs in reverse order."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for number in range(warm_up + rounds):
        say(f"round {number + 1} of {warm_up + rounds}")
        for name in list(steps)[:: -1 if number % 2 else 1]:
            began = clock()
            steps[name]()
            seconds[name].append(clock() - began)
    return {name: found[warm_up:] for name, found in seconds.items()}


def measured_rows(target: BenchTarget, entries: Sequence[PlannedEntry], rounds: int, say: Say) -> list[Row]:
    """Return the rows with measurements. A plan that fails on the devices becomes a row with the reason."""
    # Copies on the host: what is on a device already may be given away only once.
    call = Call.of(target.step, target.values(), target.keywords, NamedArguments())
    leaves = [_on_host(leaf) for leaf in jax.tree.leaves(call.tree)]
    rows, running = [entry.row for entry in entries], dict[int, Running]()
    same: dict[int, int] = {}
    for number, entry in enumerate(entries):
        if entry.plan is None or entry.lowered is None:
            continue
        twin = next((i for i in running if same_plan(_plan(entries[i]), entry.plan)), None)
        if twin is not None:
            same[number] = twin
            continue
        say(f"{target.name}: compiling {entry.row.planner}")
        began = time.perf_counter()
        try:
            started = Running.of(entry.lowered.compile(), leaves)
            compile_seconds = time.perf_counter() - began
            started()
        except RuntimeError as error:  # also what XLA raises, as when memory runs out
            rows[number] = replace(rows[number], reason=f"It failed when it was run: {_first_line(error)}")
            continue
        allocated = max(each.peak_bytes for each in started.compiled.allocated())
        rows[number] = replace(rows[number], compile_seconds=compile_seconds, allocated_peak_bytes=allocated)
        running[number] = started
    times = in_turn(
        {str(number): step for number, step in running.items()}, rounds, lambda s: say(f"{target.name}: {s}")
    )
    for number in running:
        rows[number] = rows[number].measured(times[str(number)])
    for number, twin in same.items():
        alike = replace(rows[number], allocated_peak_bytes=rows[twin].allocated_peak_bytes)
        rows[number] = alike.measured(times[str(twin)], same_as=rows[twin].planner)
    return rows


def _on_host(leaf: Any) -> Any:
    is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return leaf if is_key else np.array(leaf)


def _plan(entry: PlannedEntry) -> Any:
    return entry.plan


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
