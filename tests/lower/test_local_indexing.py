"""Each device draws exactly its part of what the whole program, or the full batch, would draw."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from alpa_lite.lower.local_indexing import block_counters
from alpa_lite.lower.run_local import LocalOp, bind_local
from alpa_lite.rules import rule_of, view_of
from alpa_lite.sharding.specs import Spec, replicated
from alpa_lite.trace.from_jaxpr import from_jaxpr

SIZES = {"x": 2, "y": 4}
SHAPE = (8, 12)
DRAWS = {
    "bits 8": lambda key: jax.random.bits(key, SHAPE, jnp.uint8),
    "bits 16": lambda key: jax.random.bits(key, SHAPE, jnp.uint16),
    "bits 32": lambda key: jax.random.bits(key, SHAPE, jnp.uint32),
    "uniform": lambda key: jax.random.uniform(key, SHAPE),
    "normal": lambda key: jax.random.normal(key, SHAPE),
    "bernoulli": lambda key: jax.random.bernoulli(key, 0.3, SHAPE),
    "normal of 16 bits": lambda key: jax.random.normal(key, SHAPE, jnp.bfloat16),
}


@pytest.fixture(scope="module")
def mesh(devices: list[Any]) -> Mesh:
    """Axes x of 2 and y of 4 devices."""
    return Mesh(np.array(devices).reshape(2, 4), ("x", "y"))


def draw_sharded(mesh: Mesh, draw: Any, key: Any, spec: Spec, *, origin: Any = None, full: Any = None) -> Any:
    """All ops of a draw on blocks; arrays of the drawn shape lie as `spec`, smaller ones are whole.

    With an origin and a full shape, the draw is that part of the draw of the full shape.
    """
    traced = from_jaxpr(jax.make_jaxpr(draw)(key), ["key"])
    graph = traced.graph
    spec_of = lambda value: spec if value.shape == SHAPE else replicated(value.rank)  # noqa: E731

    def body(block: Any, *start: Any) -> Any:
        arrays = {graph.inputs[0]: block}
        for op, equation in zip(graph.ops, traced.equations, strict=True):
            values, results = graph.operands(op), graph.results(op)
            is_draw = op.primitive == "random_bits" and bool(start)
            local = LocalOp(
                primitive=equation.primitive,
                params=equation.params,
                rule=rule_of(view_of(graph, op)),
                operand_shapes=tuple(v.shape for v in values),
                result_shapes=tuple(v.shape for v in results),
                operand_specs=tuple(map(spec_of, values)),
                result_specs=tuple(map(spec_of, results)),
                axis_sizes=SIZES,
                origins=((start[0], 0) if is_draw else None,),
                full_shapes=(full if is_draw else None,),
            )
            read = [arrays[v.id] if v.literal is None else jnp.asarray(v.literal, v.dtype) for v in values]
            arrays.update(zip(op.results, bind_local(local, read), strict=True))
        return arrays[graph.outputs[0]]

    starts = () if origin is None else (jnp.int32(origin),)
    out = PartitionSpec(*(axes or None for axes in spec.dims))
    specs = (PartitionSpec(),) * (1 + len(starts))
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False))(key, *starts)


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_on_blocks_is_the_draw(mesh, name):
    key = jax.random.key(3)
    expected = DRAWS[name](key)
    found = draw_sharded(mesh, DRAWS[name], key, Spec((("x",), ("y",))))
    # From JAX 0.12 on XLA's erf_inv on CPU rounds by where in a loop an element comes: so does jax.jit on slices.
    if name == "normal" and jax.__version_info__ >= (0, 12):
        np.testing.assert_array_max_ulp(np.asarray(found), np.asarray(expected), maxulp=4)
    else:
        np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
@pytest.mark.parametrize("dims", [((), ()), (("x", "y"), ()), ((), ("y",))], ids=["whole", "rows", "columns"])
def test_a_micro_batch_draws_its_rows_of_the_full_batch(mesh, impl, dims):
    key = jax.random.key(3, impl=impl)
    full = (3 * SHAPE[0], SHAPE[1])
    expected = jax.random.bits(key, full)[SHAPE[0] : 2 * SHAPE[0]]
    found = draw_sharded(mesh, DRAWS["bits 32"], key, Spec(dims), origin=SHAPE[0], full=full)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


def test_the_older_layout_of_threefry_bits_is_kept_too(mesh):
    with jax.threefry_partitionable(False):
        key = jax.random.key(3)
        expected = DRAWS["bits 32"](key)
        found = draw_sharded(mesh, DRAWS["bits 32"], key, Spec((("x",), ("y",))))
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


def test_bits_of_64_need_both_words(mesh):
    with jax.enable_x64(True):
        key = jax.random.key(3)
        draw = lambda k: jax.random.bits(k, SHAPE, jnp.uint64)  # noqa: E731
        found = draw_sharded(mesh, draw, key, Spec((("x",), ("y",))))
        assert found.dtype == jnp.uint64
        np.testing.assert_array_equal(np.asarray(found), np.asarray(draw(key)))


@pytest.mark.parametrize(
    ("full", "start"),
    [
        ((6, 10), (2, 3)),
        ((2**20, 2**20), (2**20 - 4, 2**20 - 5)),
        ((2**13, 2**17, 2**10), (5000, 100_003, 1019)),
        ((7, 2**33), (3, 2**31 + 12345)),
        ((2**31 - 1, 3), (2**31 - 5, 0)),
    ],
)
def test_counters_are_exact_beyond_32_bits(full, start):
    block = (3,) * len(full)
    high, low = jax.jit(lambda s: block_counters(block, s, full))([jnp.asarray(s, jnp.uint32) for s in start])
    grid = np.indices(block, dtype=np.uint64)
    expected = np.zeros(block, np.uint64)
    for index, s, n in zip(grid, start, full, strict=True):
        expected = expected * np.uint64(n) + (index + np.uint64(s))
    np.testing.assert_array_equal(np.asarray(high), (expected >> np.uint64(32)).astype(np.uint32))
    np.testing.assert_array_equal(np.asarray(low), (expected & np.uint64(2**32 - 1)).astype(np.uint32))
