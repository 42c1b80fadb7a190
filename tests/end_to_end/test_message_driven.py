"""Message-driven pipelines on devices: equal numbers whatever arrives when, and no more under way than the limit."""

import random
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.schedule import MessageDriven, OneFOneB
from tests.end_to_end.test_parameter_server import SlowToken

STAGES, MICROBATCHES, WIDTH = 4, 8, 16


def step(weights, x):
    """Weights of the first layer are read by the last one too."""

    def loss(ws):
        h = x
        for w in ws:
            h = jnp.tanh(h @ w)
        return jnp.mean((h @ ws[0].T - x) ** 2)

    value, grads = jax.value_and_grad(loss)(weights)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in grads))
    return [w - 0.1 * g / norm for w, g in zip(weights, grads, strict=True)], value


def arguments():
    keys = jax.random.split(jax.random.key(0), STAGES + 1)
    weights = [jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5 for key in keys[1:]]
    return weights, jax.random.normal(keys[0], (4 * MICROBATCHES, WIDTH))


def compiled_of(schedule):
    planner = al.planners.Pipeline(pipeline=STAGES, schedule=schedule)
    traced = al.parallelize(step, planner=planner, num_microbatches=MICROBATCHES).trace(*arguments())
    return traced.plan().lower().compile()


def delayed(compiled, seed: int):
    """Let every launch of a task seem to take a random time."""
    chance, executor = random.Random(seed), compiled.executor

    def slow(run):
        def call(*arrays):
            *results, token = run(*arrays)
            return (*results, SlowToken(token, chance.choice((0, 0, 3, 40))))

        return call

    for number, each in enumerate(executor.executables):
        executor.executables[number] = replace(each, compiled=slow(each.compiled))
    executor.bind()
    return compiled


@pytest.mark.parametrize("limit", [*(pytest.param(limit, marks=pytest.mark.slow) for limit in (1, 0, 20)), 3])
def test_numbers_are_those_of_1f1b_bit_by_bit_under_random_delays(limit):
    want = compiled_of(OneFOneB())(*arguments())
    compiled = compiled_of(MessageDriven(limit=limit))
    for seed in (None, 0, 1):
        got = (compiled if seed is None else delayed(compiled, seed))(*arguments())
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        assert 1 <= compiled.executor.arrivals.most_under_way <= min(limit or STAGES, MICROBATCHES)
    assert compiled.plan.semantics == "synchronous"


def test_check_accepts_it():
    planner = al.planners.Pipeline(pipeline=STAGES, schedule=MessageDriven())
    assert al.check(step, *arguments(), planner=planner, num_microbatches=MICROBATCHES).ok
