"""Profiles of steps: the kernels that ran, and the ops that they ran."""

import random

import jax
import jax.numpy as jnp
import pytest

import alpa_lite as al
from alpa_lite.errors import ExecutionError
from alpa_lite.plan.instructions import InstructionKind
from alpa_lite.runtime.execute.step_profile import shared_seconds
from tests.runtime.pipelines import compiled


def brute_shares(spans, ticks):
    """The same, tick by tick, for spans of whole ticks."""
    found = [0.0] * len(spans)
    for tick in range(ticks):
        running = [i for i, (start, end) in enumerate(spans) if start <= tick < end]
        for i in running:
            found[i] += 1 / len(running)
    return found


@pytest.mark.parametrize("seed", range(20))
def test_time_in_which_several_run_is_split(seed):
    draw = random.Random(seed)
    spans = [(a, a + draw.randrange(6)) for a in (draw.randrange(12) for _ in range(draw.randrange(9)))]
    assert shared_seconds(spans) == pytest.approx(brute_shares(spans, 20))


def names(profile, path):
    return profile.step.graph.op_at(path).primitive


def test_kernels_run_the_ops_of_their_task(devices):
    step = compiled([1.0, 1.0, 1.0, 1.0], al.planners.Pipeline(pipeline=4), 2)
    before = list(step.executor.executables)
    profile = step.profile()
    assert step.executor.executables == before
    seen: dict[int, set[str]] = {}
    for number, time, kernels in zip(profile.numbers, profile.times, profile.kernels, strict=True):
        instruction = profile.program.instructions[number]
        if instruction.kind is not InstructionKind.RUN:
            assert not kernels
            continue
        task = profile.program.tasks[instruction.task]
        assert kernels and sum(k.seconds for k in kernels) <= time.end_seconds - time.start_seconds
        paths = [path for kernel in kernels for path in kernel.ops]
        # Stages of equal layers share a program; each has its own ops all the same.
        assert all(path[0] in task.ops for path in paths)
        seen.setdefault(instruction.task, set()).update(names(profile, path) for path in paths)
    assert len(seen) == len(profile.program.tasks)
    for number, found in seen.items():
        products = any(
            profile.step.graph.ops[op].primitive == "dot_general" for op in profile.program.tasks[number].ops
        )
        assert ("dot_general" in found) == products


def test_ops_in_loops_are_told_from_those_around_them(devices):
    def step(w, x):
        def body(h, u):
            return jnp.tanh(h @ u), None

        h, _ = jax.lax.scan(body, x, w)
        return jnp.sum(jnp.sin(h) @ w[0])

    function = al.parallelize(step, cluster="dgx-1", planner=al.planners.DataParallel(), num_microbatches=1)
    profile = function.trace(jnp.ones((3, 32, 32)), jnp.ones((64, 32))).plan().lower().compile().profile()
    kernels = [kernel for each in profile.kernels for kernel in each]
    products = [kernel for kernel in kernels if kernel.product]
    depths = {len(path) for k in products for path in k.ops if names(profile, path) == "dot_general"}
    assert depths == {1, 3}
    # The loop itself has an event around those of its body, which alone count.
    assert not any(kernel.opcode == "while" for kernel in kernels)


def test_only_one_profile_at_a_time(devices, tmp_path):
    step = compiled([1.0], al.planners.DataParallel(), 1)
    with jax.profiler.trace(str(tmp_path)), pytest.raises(ExecutionError, match="Only one profile"):
        step.profile()
