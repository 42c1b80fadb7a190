"""JAX's own test cases of its primitives: eight samples of each, split over eight devices, give what `jax.jit` does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al

SAMPLES = 8
CASES_PER_STEP = 32
"""Many cases are one step, since planning and compiling each by itself takes longer than running it."""

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("devices")]


class Case(NamedTuple):
    """A case as a function of its samples, which are stacked; a case without arguments has none."""

    name: str
    run: Callable[..., Any]
    samples: tuple[Any, ...]


def harnesses() -> list[Any]:
    """Return the cases that JAX can run on CPUs."""
    found: Iterable[Any] = import_module("jax._src.internal_test_util.test_harnesses").all_harnesses
    return [harness for harness in found if harness.filter("cpu")]


def case_of(harness: Any) -> Case | None:
    """Return a case as a step takes it; None if JAX cannot run several samples of it at once."""
    samples = [tuple(harness.dyn_args_maker(np.random.RandomState(seed))) for seed in range(SAMPLES)]
    stacked: tuple[Any, ...] = jax.tree.map(lambda *arrays: jnp.stack(list(map(jnp.asarray, arrays))), *samples)
    run = jax.vmap(lambda *arrays: harness.dyn_fun(*arrays)) if samples[0] else harness.dyn_fun
    try:
        jax.jit(run).lower(*stacked).compile()
    except Exception:  # a batching rule or a lowering for CPUs that JAX lacks
        return None
    return Case(harness.fullname, run, stacked)


def numbers(array: Any) -> np.ndarray[Any, Any]:
    is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(array) if is_key else array)


def assert_equal(name: str, found: Any, expected: Any) -> None:
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype), name
    a, b = numbers(found), numbers(expected)
    if jnp.issubdtype(a.dtype, jnp.inexact):
        tolerance = 3e-2 if jnp.finfo(a.dtype).bits <= 16 else 1e-4
        wide = np.complex128 if a.dtype.kind == "c" else np.float64
        np.testing.assert_allclose(a.astype(wide), b.astype(wide), rtol=tolerance, atol=tolerance, err_msg=name)
    else:
        np.testing.assert_array_equal(a, b, err_msg=name)


def check(cases: Sequence[Case]) -> None:
    """Run cases as one step."""

    def step(batch: Any) -> Any:
        return [case.run(*samples) for case, samples in zip(cases, batch, strict=True)]

    batch = [case.samples for case in cases]
    parallel = al.parallelize(step, planner=al.planners.DataParallel(), cluster="p3.16xlarge", num_microbatches=1)
    for case, found, expected in zip(cases, parallel(batch), jax.jit(step)(batch), strict=True):
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert_equal(case.name, a, b)
    jax.clear_caches()


def check_all(chosen: Sequence[Any]) -> int:
    """Check the cases of harnesses, and return how many there were."""
    cases = [case for harness in chosen if (case := case_of(harness))]
    for start in range(0, len(cases), CASES_PER_STEP):
        check(cases[start : start + CASES_PER_STEP])
    return len(cases)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_a_case_of_each_primitive(part: int) -> None:
    first = {harness.group_name: harness for harness in reversed(harnesses())}
    chosen = [*first.values()][part::4]
    assert len(chosen) > 20 and check_all(chosen) > 0.9 * len(chosen)


@pytest.mark.long
@pytest.mark.parametrize("part", range(40))
def test_all_cases(part: int) -> None:
    chosen = harnesses()[part::40]
    assert check_all(chosen) > 0.9 * len(chosen)
