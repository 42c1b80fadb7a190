"""Steps of every kind: equal to `jax.jit` without micro-batches, and with them equal or refused with the line."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import alpa_lite as al
from tests.end_to_end import programs
from tests.end_to_end.cases import PLANNERS, assert_same, eager_cluster, parallel
from tests.end_to_end.collectives import handed_over, planned
from tests.end_to_end.programs import PROGRAMS

ADDITIVE = [name for name, program in PROGRAMS.items() if not program.refused]
REFUSED = [name for name, program in PROGRAMS.items() if program.refused]


def _check(name: str, planner: str, num_microbatches: int) -> None:
    program = PROGRAMS[name]
    got = parallel(program, planner, num_microbatches)(*program.args)
    assert_same(got, jax.jit(program.step)(*program.args))


@pytest.mark.parametrize("name", ADDITIVE)
def test_micro_batches_give_the_same_result(name: str, devices: Any) -> None:
    _check(name, "hybrid", 4)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_sum_over_samples_runs_without_micro_batches(name: str, devices: Any) -> None:
    _check(name, "hybrid", 1)


@pytest.mark.long
@pytest.mark.parametrize("planner", ["data_parallel", "megatron", "fsdp", "pipeline_2"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_under_every_kind_of_plan(name: str, planner: str, devices: Any) -> None:
    _check(name, planner, 1)


@pytest.mark.parametrize("name", REFUSED)
def test_micro_batches_refuse_what_is_no_sum_over_samples(name: str) -> None:
    program = PROGRAMS[name]
    with pytest.raises(al.errors.NonAdditiveError) as caught:
        parallel(program, "hybrid", 4).trace(*program.args).plan()
    message = str(caught.value)
    assert f"{programs.__file__}:{program.refused_line}" in message
    assert "num_microbatches=1" in message


def test_automatic_search_leaves_out_micro_batches_that_would_change_the_step(devices: Any) -> None:
    program = PROGRAMS["batch_norm"]
    step = al.parallelize(program.step, cluster=eager_cluster(), planner=PLANNERS["auto"])
    assert_same(step(*program.args), jax.jit(program.step)(*program.args))
    assert step.last_plan is not None and step.last_plan.num_microbatches == 1


@pytest.mark.parametrize("planner", ["data_parallel", "fsdp", "pipeline_2"])
def test_a_step_with_its_batch_size_written_into_it_is_split_all_the_same(planner: str, devices: Any) -> None:
    def step(p: Any, x: Any, y: Any) -> Any:
        def loss(p: Any) -> Any:
            start = jnp.zeros((programs.NUM_SAMPLES, 16))
            h, _ = jax.lax.scan(lambda h, _: (jnp.tanh(h + x @ p["w1"]) @ p["w2"], None), start, None, length=2)
            return jnp.mean((h.reshape(programs.NUM_SAMPLES, 2, -1).mean(1) @ p["w2"][:8, :4] - y) ** 2)

        value, grads = jax.value_and_grad(loss)(p)
        return jax.tree.map(lambda w, g: w - 0.1 * g, p, grads), value

    arguments = (programs.PARAMS, programs.X, programs.Y)
    program = programs.Program(step=step, args=arguments, batch_argnums=(1, 2))
    with pytest.raises(al.errors.TraceError, match="cannot be traced at 8 samples"):
        parallel(program, planner, 2).trace(*arguments).plan()
    parallelised = parallel(program, planner)
    assert_same(parallelised(*arguments), jax.jit(step)(*arguments))
    assert parallelised.last_plan is not None
    inputs = [spec for stage in parallelised.last_plan.stages for spec in stage.inputs.values()]
    assert any(spec.dims and spec.dims[0] for spec in inputs)


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("planner", ["fsdp", "hybrid"])
def test_callbacks_are_called_once(planner: str, num_microbatches: int, devices: Any) -> None:
    program = PROGRAMS["printed_once"]
    programs.PRINTED.clear()
    loss = parallel(program, planner, num_microbatches)(*program.args)[1]
    jax.effects_barrier()
    assert [float(x) for x in programs.PRINTED] == [pytest.approx(float(loss))]


@pytest.mark.parametrize(("planner", "num_devices"), [("fsdp", 8), ("hybrid", 2 * 2)])
def test_what_callbacks_return_is_shared_by_collectives_of_the_plan(
    planner: str, num_devices: int, devices: Any
) -> None:
    program = PROGRAMS["told_by_callback"]
    want = jax.jit(program.step)(*program.args)
    compiled = parallel(program, planner).compiled(*program.args)
    programs.PRINTED.clear()
    assert_same(compiled(*program.args), want)
    jax.effects_barrier()
    assert len(programs.PRINTED) == 1
    plan = planned(compiled.plan)
    # Three truth values and five floats.
    assert plan["all_reduce", 3, num_devices] == plan["all_reduce", 20, num_devices] == 1
    assert handed_over(compiled) == plan


def test_what_has_no_derivative_in_forward_mode_is_refused_with_its_line() -> None:
    own = jax.custom_vjp(jnp.sin)
    own.defvjp(lambda h: (jnp.sin(h), h), lambda h, g: (g * jnp.cos(h),))

    def step(p: Any, x: Any) -> Any:
        return p, jax.jvp(lambda x: own(x), (x,), (x,))[1]

    with pytest.raises(al.errors.TraceError, match=r"test_programs\.py.*custom_vjp.*forward mode"):
        al.plan(step, *PROGRAMS["printed_once"].args[:2], cluster=eager_cluster())


def test_ordered_callbacks_are_refused() -> None:
    def step(p: Any, x: Any) -> Any:
        jax.debug.print("{x}", x=x, ordered=True)
        return p, x

    with pytest.raises(al.errors.TraceError, match=r"test_programs\.py.*ordered=False"):
        al.plan(step, *PROGRAMS["printed_once"].args[:2], cluster=eager_cluster())
