"""No buffer is given away twice, and no result shares memory with an argument or with another result.

Like `jax.jit`, which is the oracle, but for one array that comes twice where one is donated: there `jax.jit` raises an
error (on one device) or ends the process (on several), and here it is copied.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al

PLANNERS = {
    "one task": al.planners.DataParallel(),
    "sharded": al.planners.FSDP(),
    "split": al.planners.Megatron(tensor=8),
    "stages": al.planners.Pipeline(pipeline=2),
}
NAMES = "abcd"
everywhere = pytest.mark.parametrize(
    ("planner", "num_microbatches"), [("one task", 1), ("sharded", 1), ("split", 2), ("stages", 1), ("stages", 2)]
)


def _parallel(fun: Any, planner: str, num_microbatches: int, **options: Any) -> Any:
    return al.parallelize(
        fun, cluster="p3.16xlarge", planner=PLANNERS[planner], num_microbatches=num_microbatches, **options
    )


def _weights(shift: float = 0.0) -> dict[str, jax.Array]:
    return {name: jnp.eye(8) * 0.3 + shift + i * 0.01 for i, name in enumerate(NAMES)}


def _batch() -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)


def _loss(w: Any, x: Any) -> Any:
    for name in NAMES:
        x = jnp.tanh(x @ w[name])
    return jnp.mean(x**2)


def _step(s: Any, x: Any, teacher: Any) -> Any:
    """Averages, a hard copy, frozen weights, a counter, a key, an array without elements; data and more returned."""
    loss, grads = jax.value_and_grad(_loss)(s["w"], x)
    w = jax.tree.map(lambda w, g: w - 0.1 * g, s["w"], grads)
    ema = jax.tree.map(lambda e, n, t: 0.8 * e + 0.1 * n + 0.1 * t, s["ema"], w, teacher)
    return {**s, "w": w, "ema": ema, "hard": w, "count": s["count"] + 1}, loss, x, teacher


def _state(w: Any, ema: Any, hard: Any, frozen: Any) -> dict[str, Any]:
    more = {"count": 0, "key": jax.random.key(0), "empty": jnp.zeros((0, 3))}
    return {"w": w, "ema": ema, "hard": hard, "frozen": frozen, **more}


def _put(w: Any) -> Any:
    """Other arrays with the same buffers."""
    found = jax.tree.map(lambda x: jax.device_put(x, jax.devices()[0]), w)
    assert all(found[k] is not w[k] for k in w)
    return found


def _arguments(kind: str) -> tuple[Any, Any]:
    w = _weights()
    if kind == "all apart":
        return _state(w, _weights(), _weights(), _weights(1.0)), _weights()
    if kind == "one array":
        return _state(w, w, w, w), _weights()
    if kind == "one array that is kept as well":
        return _state(w, w, _weights(), w), w
    if kind == "one buffer":
        return _state(w, _put(w), _put(w), _put(w)), _put(w)
    raise AssertionError(kind)


def _arrays(tree: Any) -> list[jax.Array]:
    return [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]


def _assert_close(got: Any, want: Any) -> None:
    for g, w in zip(_arrays(got), _arrays(want), strict=True):
        assert g.dtype == w.dtype
        if jax.numpy.issubdtype(g.dtype, jax.dtypes.prng_key):
            g, w = jax.random.key_data(g), jax.random.key_data(w)
        np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-6)


def _assert_apart(tree: Any, others: Any) -> None:
    """Deleting any array leaves all that come later, and the others, alone."""
    arrays = _arrays(tree)
    for i, array in enumerate(arrays):
        array.delete()
        assert not any(other.is_deleted() for other in [*arrays[i + 1 :], *_arrays(others)])


@everywhere
@pytest.mark.parametrize("donated", [True, False])
@pytest.mark.parametrize("kind", ["all apart", "one array", "one array that is kept as well", "one buffer"])
def test_arrays_that_come_twice(kind: str, donated: bool, planner: str, num_microbatches: int, devices: Any) -> None:
    step = _parallel(_step, planner, num_microbatches, batch_argnums=1, donate_argnums=(0,) if donated else ())
    reference = jax.jit(_step)
    (mine, teacher), (theirs, same_teacher) = _arguments(kind), _arguments(kind)
    x = _batch()
    for _ in range(3):
        before = mine
        got, want = step(mine, x, teacher), reference(theirs, x, same_teacher)
        _assert_close(got, want)
        _assert_apart(got[1:], (got[0], teacher) if kind != "one buffer" or not donated else got[0])
        if kind == "one buffer" and donated:
            teacher = same_teacher  # it shares its memory with what was given away
        if not donated:
            assert not any(array.is_deleted() for array in _arrays(before))
        mine, theirs = got[0], want[0]
    _assert_apart(mine, (teacher, () if donated else before))
    assert len(step._compiled) == 1


@everywhere
def test_numpy_arrays_are_copied(planner: str, num_microbatches: int, devices: Any) -> None:
    step = _parallel(_step, planner, num_microbatches, batch_argnums=1)
    w, x = jax.tree.map(np.array, _weights()), _batch()
    want = jax.jit(_step)(_state(_weights(), _weights(), _weights(), _weights()), jnp.asarray(x), _weights())
    got = step(_state(w, w, w, w), x, w)
    jax.block_until_ready(got)
    for array in (x, *w.values()):
        array[...] = np.nan
    _assert_close(got, want)


@everywhere
def test_captured_arrays_are_copied(planner: str, num_microbatches: int, devices: Any) -> None:
    def make(host: Any, array: Any, key: Any) -> Any:
        def step(s: Any, x: Any) -> Any:
            loss, grads = jax.value_and_grad(lambda w: _loss({**w, "b": w["b"] * host, "c": w["c"] * array}, x))(s)
            noise = 0.01 * jax.random.normal(key, (8, 8))
            return jax.tree.map(lambda w, g: w - 0.1 * g + noise, s, grads), loss, host, array, key

        return step

    host, array, key = np.full((8, 8), 0.5, np.float32), jnp.full((8, 8), 2.0, jnp.float32), jax.random.key(3)
    reference = jax.jit(make(host.copy(), array + 0, key))
    step = _parallel(make(host, array, key), planner, num_microbatches, donate_argnums=0, batch_argnums=1)
    mine, theirs = {**_weights(), "a": array}, {**_weights(), "a": array + 0}  # the captured array is given away
    for _ in range(3):
        got, want = step(mine, _batch()), reference(theirs, _batch())
        _assert_close(got, want)
        host[...] = np.nan
        _assert_apart(got[2:], got[0])
        mine, theirs = got[0], want[0]


def test_donated_arrays_are_deleted_and_others_are_not(devices: Any) -> None:
    step = _parallel(_step, "one task", 1, batch_argnums=1, donate_argnums=0)
    teacher = _weights()
    state = step(_state(_weights(), _weights(), _weights(), _weights()), _batch(), teacher)[0]
    following = step(state, _batch(), teacher)[0]
    assert all(array.is_deleted() for array in _arrays((state["w"], state["ema"])))
    assert not any(array.is_deleted() for array in _arrays((following, teacher)))


def test_steady_steps_compare_no_buffers(devices: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    step = _parallel(_step, "one task", 1, batch_argnums=1, donate_argnums=0)
    teacher = _weights()
    state = step(_state(_weights(), _weights(), _weights(), _weights()), _batch(), teacher)[0]
    monkeypatch.setattr("alpa_lite._jax.addresses", None)
    for _ in range(3):
        state = step(state, _batch(), teacher)[0]


@everywhere
def test_each_result_takes_the_buffer_of_the_value_that_it_replaces(
    planner: str, num_microbatches: int, devices: Any
) -> None:
    """With another buffer of the same shape XLA would copy what it has to read later, in every step."""

    def step(state: Any, x: Any) -> Any:
        w, first, second = state

        def loss(w: Any) -> Any:
            return jnp.mean(jnp.tanh(jnp.tanh(jnp.tanh(x @ w["a"]) @ w["b"]) @ w["c"]) ** 2)

        value, g = jax.value_and_grad(loss)(w)
        # The moments are computed before the weights, which come first in the state.
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, g)
        second = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g**2, second, g)
        w = jax.tree.map(lambda w, m, v: w - 0.1 * m / (jnp.sqrt(v) + 1e-3), w, first, second)
        return (w, first, second), value

    random = np.random.default_rng(0)
    state = tuple(
        {name: jnp.asarray(random.normal(size=(16, 16)) * size, jnp.float32) for name in "abc"} for size in (1, 0, 0)
    )
    parallel = _parallel(step, planner, num_microbatches, batch_argnums=1, donate_argnums=0)
    compiled = parallel.compiled(state, jnp.ones((16, 16)))
    executor = compiled.executor
    replaced = compiled.step.step.aliases
    pairs = 0
    for executable in executor.executables:
        assert executable.compiled is not None
        head = executable.compiled.as_text().split("\n", 1)[0]
        ports = [(*executable.task.outputs, *executable.task.sums)[i].value for i in executable.order]
        for result, operand in re.findall(r"\{(\d+)\}: \((\d+), \{\}", head):
            if int(operand) < len(executable.task.inputs) and ports[int(result)] in replaced:
                assert replaced[ports[int(result)]] == executable.task.inputs[int(operand)].value
                pairs += 1
    assert pairs == 9
