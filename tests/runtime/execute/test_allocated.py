"""What XLA allocates for a step, against an account by hand."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import alpa_lite as al

WIDTH, SAMPLES = 256, 64
TUPLE_BYTES = 64
"""Results come as a tuple, which takes a few bytes itself."""


def step(weights, x):
    """Two products."""

    def loss(weights):
        return jnp.mean((jnp.tanh(x @ weights[0]) @ weights[1]) ** 2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))


ARGUMENTS = (
    [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * 2,
    jax.ShapeDtypeStruct((SAMPLES, WIDTH), jnp.float32),
)


def compiled(planner, num_microbatches, **options):
    function = al.parallelize(step, cluster="dgx-1", planner=planner, num_microbatches=num_microbatches, **options)
    return function.trace(*ARGUMENTS).plan().lower().compile()


def test_one_executable_is_what_jax_says_of_it(devices):
    (found,) = compiled(al.planners.DataParallel(), 1, donate_argnums=0).allocated()
    weights, batch = 2 * 4 * WIDTH**2, 4 * SAMPLES * WIDTH / 8
    assert found.resident_bytes == weights + batch
    assert found.output_bytes < TUPLE_BYTES  # the weights are overwritten
    assert found.temporary_bytes > 0
    assert found.peak_bytes == found.resident_bytes + found.output_bytes + found.temporary_bytes


def test_without_donation_there_is_room_for_the_results(devices):
    (found,) = compiled(al.planners.DataParallel(), 1).allocated()
    assert found.output_bytes == pytest.approx(2 * 4 * WIDTH**2, abs=TUPLE_BYTES)


def test_state_is_there_before_an_instruction_names_it(devices):
    """The momentum is read by the update alone, and lies on its devices all the time."""

    def with_momentum(state, x):
        weights, momentum = state
        grads = jax.grad(lambda w: jnp.mean((jnp.tanh(x @ w[0]) @ w[1]) ** 2))(weights)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
        return jax.tree.map(lambda w, m: w - 0.1 * m, weights, momentum), momentum

    weights, x = ARGUMENTS
    # Activations of many samples, so that the peak is in a backward pass and not in the update.
    many = jax.ShapeDtypeStruct((64 * SAMPLES, WIDTH), x.dtype)
    planner, count = al.planners.Pipeline(pipeline=2), 2
    both = [
        al.parallelize(f, cluster="dgx-1", planner=planner, num_microbatches=count, donate_argnums=0)
        .trace(arguments, many)
        .plan()
        .lower()
        .compile()
        .allocated()
        for f, arguments in ((step, weights), (with_momentum, (weights, weights)))
    ]
    for without, found in zip(*both, strict=True):
        assert found.resident_bytes - without.resident_bytes == 4 * WIDTH**2


def test_each_stage_has_its_own(devices):
    pipeline = compiled(al.planners.Pipeline(pipeline=2), 4, donate_argnums=0)
    first, second = pipeline.allocated()
    for found, predicted in zip((first, second), pipeline.plan.prediction.peak_bytes, strict=True):
        assert found.resident_bytes >= 4 * WIDTH**2  # one of the weights
        assert predicted == pytest.approx(found.peak_bytes, rel=0.5)


def test_a_stage_on_other_processes_alone_is_refused(devices):
    pipeline = compiled(al.planners.Pipeline(pipeline=2), 4)
    executor = pipeline.executor
    # A process has no executable for a mesh without a device of its own.
    executor.executables = [
        replace(each, compiled=None) if each.task.stage == 1 else each for each in executor.executables
    ]
    for ask in (pipeline.allocated, pipeline.memory_analysis):
        with pytest.raises(al.errors.ExecutionError, match="compiled by other processes alone"):
            ask()
