"""Without which processes a step goes on, and what stands in the place of what they would have sent."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.errors import ExecutionError
from alpa_lite.plan.instructions import InstructionKind
from alpa_lite.planners import ParameterServer
from alpa_lite.runtime.execute.survival import Survival, losses_of
from alpa_lite.schedule import OneFOneB, ServerSchedule
from tests.end_to_end import test_parameter_server as served

ASYNCHRONOUS = ServerSchedule(workers=2, consistency="async")


@pytest.mark.parametrize(
    ("schedule", "processes", "expected", "words"),
    [
        (ASYNCHRONOUS, [[0], [1], [2]], [{1}, {2}], ""),
        (ServerSchedule(workers=2, consistency="bounded", delay=1), [[0], [1], [2]], [{1}, {2}], ""),
        (ServerSchedule(workers=2), [[0], [1], [2]], [], "it needs all of them"),
        (OneFOneB(), [[0], [1], [2]], [], "it needs all of them"),
        (OneFOneB(), [[0], [0]], [], ""),
        # A worker beside the servers; servers on another process than the first, or on two.
        (ASYNCHRONOUS, [[0], [0], [1]], [{1}], ""),
        (ASYNCHRONOUS, [[1], [0], [2]], [], "its servers lie in process 1,"),
        (ASYNCHRONOUS, [[0, 1], [1], [2]], [], "its servers lie in processes 0, 1,"),
        # Workers on two processes, a process of two workers, and a worker on the first process and another one.
        (ASYNCHRONOUS, [[0], [1, 2], [3]], [{1, 2}, {3}], ""),
        (ASYNCHRONOUS, [[0], [1, 2], [2, 3]], [{1, 2, 3}], ""),
        (ASYNCHRONOUS, [[0], [0, 1], [2]], [{2}], "processes 0, 1 share workers"),
    ],
)
def test_processes_that_may_be_lost(schedule: Any, processes: Any, expected: list[set[int]], words: str) -> None:
    found = losses_of(schedule, processes)
    assert sorted(found.may_be_lost, key=min) == expected
    assert words in found.why_not and bool(words) == bool(found.why_not)


@pytest.fixture(scope="module")
def executor() -> Any:
    """Of two workers with two updates per step."""
    planner = ParameterServer(servers=1, workers=2, consistency=al.planners.Bounded(1))
    state, batch = served.state_of(), served.batch_of(4)
    parallel = al.parallelize(served.step, planner=planner, num_microbatches=4, cluster=served.hosts(3))
    return parallel.compiled(state, batch).executor


def survival_of(executor: Any, lost: set[int]) -> Survival:
    return Survival(
        program=executor.program,
        step=executor.step,
        bound=executor.bound,
        processes=[[0], [1], [2]],
        channel=None,  # pyright: ignore[reportArgumentType]
        lost=lost,
    )


@pytest.mark.parametrize("lost", [set(), {2}, {1}])
def test_lost_workers_contribute_nothing(executor: Any, lost: set[int]) -> None:
    """The events of a step in the order of the program, against the equations without the gradients of the lost."""
    arguments = served.state_of(), served.batch_of(4)
    survival, schedule = survival_of(executor, lost), executor.plan.schedule
    slots = executor.bound.slots(executor.inputs.split(jax.tree.leaves(arguments)))
    actions, events = range(len(executor.bound.actions)), [*schedule.events(4)]
    parts = [executor.arrivals.parts[event] for event in events]
    survival.run(slots, actions[: parts[0].start])
    for part in parts:
        survival.run(slots, part)
    survival.complete(slots)
    survival.run(slots, actions[parts[-1].stop :])
    outputs = jax.tree.structure((served.state_of(), {"count": 0, "loss": 0}))
    state, metrics = jax.tree.unflatten(outputs, [slots[i] for i in executor.bound.outputs])
    applied = [b for b in range(4) if 1 + b % 2 not in lost]
    want, loss = served.by_equations(events, schedule, 2, 2, served.state_of(), applied)
    served.close((state, metrics["loss"]), (want, loss))
    assert metrics["count"] == 1


def test_all_workers_lost_is_a_sentence(executor: Any) -> None:
    survival = survival_of(executor, {1, 2})
    add = next(i for i in executor.program.instructions if i.kind is InstructionKind.ADD)
    slots = [None] * executor.bound.num_slots
    with pytest.raises(ExecutionError, match="All workers of the parameter server have died"):
        survival._fill(add, slots)


@pytest.mark.parametrize(("kind", "expected"), [("ADD", 0.0), ("CONCAT", 3.0)])
def test_what_stands_in_for_what_is_missing(executor: Any, kind: str, expected: float) -> None:
    """Zeros in a sum; the mean of the others in a mean of updates."""
    survival = survival_of(executor, {2})
    found = [
        i
        for i in executor.program.instructions
        if i.kind.name == kind and executor.step.batch_dims[i.writes[0].value] is None and len(i.reads) == 2
    ]
    instruction = next(i for i in found if executor.step.graph.values[i.writes[0].value].dtype == "float32")
    slots = [None] * executor.bound.num_slots
    first, second = (executor.bound.slot[b] for b in instruction.reads)
    slots[first] = jnp.full((2,), 3.0)
    survival._fill(instruction, slots)
    np.testing.assert_array_equal(slots[second], jnp.full((2,), expected))
