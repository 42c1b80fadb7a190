"""Buckets of gradients: as many all_reduces in the compiled program as the greedy rule makes, in backward order."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.planners import DataParallel
from alpa_lite.planners.data_parallel import buckets
from alpa_lite.program.ir import Value
from cost_models.hardware import Backend
from tests.end_to_end.cases import assert_same, eager_cluster
from tests.end_to_end.collectives import emitted, handed_over, planned

WIDTHS = (24, 32, 40, 16, 48, 8)


def _loss(params: Any, x: Any) -> Any:
    h = x
    for w in params:
        h = jnp.tanh(h @ w)
    return jnp.mean(h**2)


def _step(params: Any, x: Any) -> Any:
    loss, grads = jax.value_and_grad(_loss)(params, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), loss


def _arguments() -> Any:
    rng = np.random.default_rng(0)
    sizes = pairwise(WIDTHS)
    return [jnp.asarray(rng.normal(size=s) * 0.2, jnp.float32) for s in sizes], jnp.asarray(rng.normal(size=(64, 24)))


def _compiled(planner: DataParallel, num_microbatches: int = 1) -> Any:
    options = dict(cluster=eager_cluster(), planner=planner, num_microbatches=num_microbatches)
    return al.parallelize(_step, **options).compiled(*_arguments())


def _reductions(compiled: Any) -> list[tuple[int, ...]]:
    """Of each all_reduce of gradients in the executables the elements of what it reduces."""
    text = "\n".join(executable.compiled.as_text() for executable in compiled.executor.executables)
    found = re.findall(r" = (\(.*?\)|\S+) all-reduce(?:-start)?\(", text)
    sizes = [
        tuple(int(np.prod([int(n) for n in dims.split(",") if n])) for dims in re.findall(r"f32\[([\d,]*)\]", shape))
        for shape in found
    ]
    return [size for size in sizes if max(size) > 1]


def _by_pytorch(sizes: list[int], first: int, later: int) -> list[list[int]]:
    """The rule as it is stated: fill a bucket, in reverse order of the forward pass, until it is full."""
    found: list[list[int]] = [[]]
    for size in reversed(sizes):
        found[-1].append(size)
        if 4 * sum(found[-1]) >= (first if len(found) == 1 else later):
            found.append([])
    return [bucket for bucket in found if bucket]


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize(("first", "later"), [(1, 4000), (2**20, 2**24), (4000, 6000), (1, 1)])
def test_there_is_one_all_reduce_for_each_bucket(first: int, later: int, num_microbatches: int, devices: Any) -> None:
    sizes = [a * b for a, b in pairwise(WIDTHS)]
    compiled = _compiled(DataParallel(bucket_bytes=later, first_bucket_bytes=first), num_microbatches)
    want = _by_pytorch(sizes, min(first, later), later)
    got = [sorted(n for n in size if n > 1) for size in _reductions(compiled)]
    assert sorted(got) == sorted(map(sorted, want))
    assert handed_over(compiled) == emitted(compiled) == planned(compiled.plan)
    values = compiled.step.step.graph.values
    assert [[values[v].num_elements for v in bucket] for bucket in compiled.plan.buckets] == want
    assert_same(compiled(*_arguments()), jax.jit(_step)(*_arguments()))


def test_without_buckets_xla_combines_what_it_likes(devices: Any) -> None:
    plain, bucketed = _compiled(DataParallel()), _compiled(DataParallel(bucket_bytes=4000))
    assert plain.plan.buckets == () and len(_reductions(plain)) < len(_reductions(bucketed))
    assert plain.plan.prediction == bucketed.plan.prediction
    assert "gradients in" in str(bucketed.plan) and "gradients in" not in str(plain.plan)


def test_a_plan_with_buckets_is_saved_and_read(tmp_path: Any, devices: Any) -> None:
    plan = _compiled(DataParallel(bucket_bytes=4000)).plan
    plan.save(tmp_path / "plan.json")
    assert al.Plan.load(tmp_path / "plan.json") == plan


def test_each_dtype_has_buckets_of_its_own() -> None:
    dtypes = ("float32", "bfloat16", "float32", "float32", "bfloat16")
    values = [Value(id=i, shape=(10,), dtype=dtype) for i, dtype in enumerate(dtypes)]
    assert buckets(values, 40, 80) == ((0,), (2, 3), (1, 4))


def test_buckets_without_bytes_are_refused() -> None:
    with pytest.raises(al.errors.PlanError, match="Buckets of 0 bytes"):
        DataParallel(bucket_bytes=0)


@pytest.mark.parametrize("width", [512, 2048, 8192])
def test_gradients_that_are_reduced_beside_the_backward_pass_hide_what_they_can(width: int) -> None:
    """Never slower than one after the other, never faster than the longer of both."""
    shape = jax.ShapeDtypeStruct
    arguments = [shape((width, width), jnp.float32)] * 6, shape((2048, width), jnp.float32)
    traced, cluster = al.parallelize(_step).trace(*arguments), al.cluster("p3.16xlarge")
    seconds = dict[bool, float]()
    for overlap in (False, True):
        request = traced.request(cluster, backend=Backend(overlap_gradients=overlap), num_microbatches=1)
        prediction = DataParallel().plan(request).prediction
        seconds[overlap] = prediction.step_seconds
        assert prediction.step_seconds >= max(prediction.compute_seconds, prediction.collective_seconds)
    assert seconds[True] < seconds[False]
