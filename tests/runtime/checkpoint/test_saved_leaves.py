"""Every leaf of a state comes back as it was: type, shape, dtype and bits."""

from __future__ import annotations

import collections
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import alpa_lite as al
from alpa_lite.errors import CheckpointError
from tests.runtime.checkpoint.saved_states import bits

EXOTIC = [
    *("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "float8_e3m4", "float8_e8m0fnu"),
    *("float4_e2m1fn", "int4", "uint4", "int2", "uint2"),
]
PLAIN = ["bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "float32", "complex64"]
ONLY_NUMPY = ["int64", "uint64", "float64", "complex128"]


class Counters(NamedTuple):
    """A state of the user's."""

    step: Any
    skipped: Any


@jax.tree_util.register_dataclass
@dataclass
class Nothing:
    """A pytree without leaves."""


def there_and_back(folder: Path, state: Any, like: Any = None) -> Any:
    """A state, saved and restored."""
    with al.Checkpoints(folder, keep=1) as checkpoints:
        checkpoints.save(0, state)
        return checkpoints.restore(state if like is None else like)[1]


def assert_same_bits(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert bits(one) == bits(other)


def all_bits(dtype: str, count: int = 64) -> np.ndarray:
    """Values of every kind: infinities, NaNs with payloads, zeros with a sign, as far as a dtype has them."""
    kind = np.dtype(dtype)
    raw = np.random.default_rng(0).integers(0, 256, count * kind.itemsize, np.uint8)
    if kind == np.bool_:
        return raw[:count] % 2 == 0
    if dtype in EXOTIC and (kind.name.startswith(("int", "uint", "float4"))):
        return np.arange(count).astype(np.float32).astype(kind) if "float" in dtype else (raw[:count] % 2).astype(kind)
    return raw.view(kind)


def test_every_dtype_comes_back(tmp_path: Path) -> None:
    state: dict[str, Any] = {dtype: jax.device_put(all_bits(dtype)) for dtype in [*EXOTIC, *PLAIN]}
    state |= {f"numpy {dtype}": all_bits(dtype) for dtype in [*EXOTIC, *PLAIN, *ONLY_NUMPY]}
    assert_same_bits(there_and_back(tmp_path, state), state)


def test_zeros_keep_their_sign(tmp_path: Path) -> None:
    """Storage may leave out chunks that equal its fill value."""
    state = {"minus": jnp.full((8,), -0.0), "plus": jnp.zeros((8,)), "half": jnp.full((8,), -0.0, jnp.bfloat16)}
    assert_same_bits(there_and_back(tmp_path, state), state)


def test_all_that_a_state_may_hold_comes_back(tmp_path: Path) -> None:
    state = {
        "counters": Counters(step=jnp.int32(3), skipped=None),
        "key": jax.random.key(1),
        "keys": jax.random.split(jax.random.key(2, impl="rbg"), (2, 3)),
        "old key": jax.random.PRNGKey(3),
        "empty": jnp.zeros((0, 3)),
        "empty keys": jax.random.split(jax.random.key(0), 0),
        "empty numpy": np.zeros((3, 0), np.float64),
        "numbers": [True, 7, 2**40, 0.1, 1 - 2j],
        "numpy numbers": (np.float64(0.1), np.int8(-3), np.bool_(True), ml_dtypes.bfloat16(1.5)),
        "a/b": jnp.ones(2),
        "a": {"b": jnp.zeros(2)},
        "": collections.OrderedDict(z=jnp.ones(()), y={"": np.arange(3)}),
        "nothing": [Nothing(), {}, (), None],
        "große Zahlen / %": jnp.ones(3),
    }
    assert_same_bits(there_and_back(tmp_path, state), state)


@pytest.mark.parametrize("state", [{}, None, {"x": np.zeros((0,))}, 5, jnp.ones(3)])
def test_small_states_come_back(state: Any, tmp_path: Path) -> None:
    with al.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, state)
        assert_same_bits(checkpoints.restore(state)[1], state)


@given(
    state=st.recursive(
        arrays.arrays(
            dtype=st.sampled_from(["float32", "bool", "int8", "uint16", "complex64", "float64"]),
            shape=arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
        )
        | st.none()
        | st.integers(-(2**63), 2**63 - 1)
        | st.floats(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=8,
    )
)
@settings(max_examples=40)
def test_any_state_comes_back(state: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert_same_bits(there_and_back(tmp_path_factory.mktemp("state"), state), state)


def test_states_of_libraries_come_back(tmp_path: Path) -> None:
    model = linen.Dense(4)
    params = model.init(jax.random.key(0), jnp.ones((1, 3)))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(1e-3, 100)))
    flax_state = TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)
    network = nnx.Sequential(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), nnx.BatchNorm(4, rngs=nnx.Rngs(1)))
    state = {"flax": flax_state, "nnx": nnx.state(network), "multi": optax.MultiSteps(optimizer, 2).init(params)}
    assert_same_bits(there_and_back(tmp_path, state), state)


def test_keys_come_back_in_their_places(tmp_path: Path, devices: list[Any]) -> None:
    mesh = Mesh(np.array(devices[4:]), "x")
    spread = NamedSharding(mesh, PartitionSpec("x"))
    keys = jax.jit(lambda: jax.random.split(jax.random.key(0), 8), out_shardings=spread)()
    fours = jax.device_put(jnp.arange(8, dtype=jnp.int4), spread)
    state = {"keys": keys, "fours": fours}
    back = there_and_back(tmp_path, state)
    assert_same_bits(back, state)
    assert back["keys"].sharding == spread and back["fours"].sharding == spread
    assert_same_bits(there_and_back(tmp_path, state, jax.eval_shape(lambda: state)), jax.device_put(state, devices[0]))


def test_numbers_become_arrays_of_their_kind_and_back(tmp_path: Path) -> None:
    state = {"step": 3, "rate": 0.1, "on": True}
    like = {"step": jnp.int32(0), "rate": jnp.bfloat16(0), "on": jnp.array(False)}
    back = there_and_back(tmp_path, state, like)
    assert_same_bits(back, {"step": jnp.int32(3), "rate": jnp.bfloat16(0.1), "on": jnp.array(True)})
    assert there_and_back(tmp_path, back, state) == {"step": 3, "rate": float(jnp.bfloat16(0.1)), "on": True}
    with pytest.raises(CheckpointError, match="1099511627776 for step, which is too large for int32"):
        there_and_back(tmp_path, {"step": 2**40}, {"step": jnp.int32(0)})


def test_a_part_of_a_state(tmp_path: Path) -> None:
    with al.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, {"params": {"w": jnp.ones(3)}, "moments": jnp.zeros(3)})
        assert (checkpoints.restore({"params": {"w": jnp.zeros(3)}}, partial=True)[1]["params"]["w"] == 1).all()
        with pytest.raises(CheckpointError, match=r"has besides moments.* partial=True"):
            checkpoints.restore({"params": {"w": jnp.zeros(3)}})
        with pytest.raises(CheckpointError, match=r"lacks params/v\. Give"):
            checkpoints.restore({"params": {"v": jnp.zeros(3)}}, partial=True)


@pytest.mark.parametrize(
    ("like", "sentence"),
    [
        (jnp.zeros(4), r"holds float32\[3\] for w, but float32\[4\] is asked for"),
        (jnp.zeros(3, jnp.bfloat16), r"float32\[3\] for w, but bfloat16\[3\]"),
        (jnp.zeros(3, jnp.int32), r"but int32\[3\]"),
        (1.0, r"but float64\[\]"),
        (jax.random.split(jax.random.key(0), 3), r"but key<fry>\[3\]"),
    ],
)
def test_nothing_is_converted(like: Any, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        there_and_back(tmp_path, {"w": jnp.ones(3)}, {"w": like})


@pytest.mark.parametrize(
    "leaf", ["text", object(), np.array("text"), np.array([None]), np.zeros(2, "i4,f4"), 2**70, np.longdouble(1)]
)
def test_what_cannot_be_saved_is_named(leaf: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config/it of the state is a .*, but checkpoints hold arrays"):
        al.Checkpoints(tmp_path).save(0, {"config": {"it": leaf}})


def test_an_array_that_was_given_away_is_named(tmp_path: Path) -> None:
    weights = jnp.ones(3)
    weights.delete()
    with pytest.raises(CheckpointError, match=r"array w of the state was deleted"):
        al.Checkpoints(tmp_path).save(0, {"w": weights})
