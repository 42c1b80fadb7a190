"""Real training programs equal `jax.jit` under every kind of plan, after two steps and in every leaf.

By default each program runs under one planner, and the planners take turns. The slow tests run all pairs, and two
micro-batches: a step that is no sum over its samples must then be refused, in a sentence and by no other error.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import pytest

import alpa_lite as al
from tests.end_to_end.cases import PLANNERS, eager_cluster
from tests.zoo import compare
from tests.zoo.registry import PROGRAMS, VARIANTS, Program, load

load()

TURNS = ("auto", "data_parallel", "fsdp", "megatron", "pipeline_2", "hybrid")
DEFAULT = [name for name in PROGRAMS if name not in VARIANTS]
SPLIT_THE_BATCH = ("data_parallel", "fsdp", "pipeline_2", "hybrid")
REFUSALS = (al.errors.NonAdditiveError, al.errors.BatchError, al.errors.TraceError)


@pytest.fixture(autouse=True)
def quick_compilation() -> Iterator[None]:
    """Compiling takes most of the time, and XLA's optimisations half of that."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def parallel(program: Program, planner: str, num_microbatches: int) -> Any:
    """The program's step, parallelised."""
    return al.parallelize(
        program.step,
        cluster=eager_cluster(),
        planner=PLANNERS[planner],
        num_microbatches=num_microbatches,
        batch_argnums=program.batch_argnums,
    )


def check(name: str, planner: str, num_microbatches: int) -> None:
    """The program gives what `jax.jit` gives, up to rounding."""
    program = PROGRAMS[name]()
    step = parallel(program, planner, num_microbatches)
    if not program.batch_first and planner in SPLIT_THE_BATCH:
        with pytest.raises(al.errors.PlanError, match="batch"):
            step(program.state, *program.inputs)
        return
    got = program.run(step)
    quotient, where = compare.worst(got, name)
    assert quotient <= 1, f"{where} is off by {quotient:.2g} times what rounding explains"


@pytest.mark.parametrize(("name", "planner"), [(name, TURNS[i % len(TURNS)]) for i, name in enumerate(DEFAULT)])
def test_program(name: str, planner: str, devices: Any) -> None:
    check(name, planner, 1)


@pytest.mark.slow
@pytest.mark.parametrize("planner", TURNS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_program_under_every_kind_of_plan(name: str, planner: str, devices: Any) -> None:
    check(name, planner, 1)


@pytest.mark.slow
@pytest.mark.parametrize("planner", TURNS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_program_in_micro_batches_is_equal_or_refused(name: str, planner: str, devices: Any) -> None:
    program = PROGRAMS[name]()
    try:
        parallel(program, planner, 2).trace(program.state, *program.inputs).plan()
    except REFUSALS as refusal:
        assert str(refusal)
    else:
        check(name, planner, 2)


@pytest.mark.parametrize("planner", ["data_parallel", "hybrid"])
def test_what_a_step_prints_is_printed_once(planner: str, devices: Any, capfd: pytest.CaptureFixture[str]) -> None:
    program = PROGRAMS["printing"]()
    program.run(parallel(program, planner, 1))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("loss") == 2
