"""Arguments that a program holds in parts are single arrays for the caller, and do not move between steps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from alpa_lite import _jax
from alpa_lite.program.phases import LeafPart
from alpa_lite.runtime.execute.crossing import Blanks
from alpa_lite.runtime.execute.placing import Alone
from alpa_lite.runtime.execute.stacked import Leaves

SHAPE = (8, 4, 6)


def _leaves(
    devices: Any, rows: list[int], spec: PartitionSpec, stages: list[int], donated: Sequence[bool] = ()
) -> Leaves:
    """One array in parts of so many rows on the given stages of two devices each, then a whole one."""
    meshes = [Mesh(np.array(devices[2 * i : 2 * i + 2]), ("x",)) for i in range(4)]
    ends = np.cumsum([0, *rows])
    parts = [LeafPart(leaf=0, rows=(int(a), int(b))) for a, b in pairwise(ends)]
    whole = NamedSharding(meshes[0], PartitionSpec())
    shardings = [*(NamedSharding(meshes[s], spec) for s in stages), whole]
    shapes = [(b - a, *SHAPE[1:]) for a, b in pairwise(ends.tolist())]
    return Leaves([*parts, LeafPart(leaf=1)], [*shapes, SHAPE[1:]], shardings, Alone(Blanks()), donated=donated)


ARRAY = np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE)

LAYOUTS = {
    "one part a stage": ([2, 2, 2, 2], PartitionSpec(), [0, 1, 2, 3]),
    "two parts a stage": ([2, 2, 2, 2], PartitionSpec(None, "x"), [0, 0, 1, 1]),
    "split along rows": ([4, 4], PartitionSpec("x"), [2, 3]),
    "one stage": ([4, 4], PartitionSpec(None, "x"), [1, 1]),
    "unequal": ([2, 2, 2, 2], PartitionSpec(None, "x"), [0, 0, 0, 1]),
    "a block of two stages": ([1] * 8, PartitionSpec(None, "x"), [0, 0, 0, 1, 1, 1, 2, 2]),
    "dealt out": ([2, 2, 2, 2], PartitionSpec(None, "x"), [0, 1, 0, 1]),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_splitting_and_joining_are_inverse(name: str, devices: Any) -> None:
    rows, spec, stages = LAYOUTS[name]
    leaves = _leaves(devices, rows, spec, stages)
    for array in (ARRAY, jax.device_put(ARRAY, leaves.sharding(0))):
        *parts, other = leaves.split([array, ARRAY[0]])
        ends = np.cumsum([0, *rows])
        for part, (start, stop), stage in zip(parts, pairwise(ends), stages, strict=True):
            np.testing.assert_array_equal(part, ARRAY[start:stop])
            assert part.devices() == set(devices[2 * stage : 2 * stage + 2])
        results = [*parts, other]
        joined, same = leaves.join(results)
        assert not results
        np.testing.assert_array_equal(joined, ARRAY)
        assert joined.sharding == leaves.sharding(0) and same is other


@pytest.mark.parametrize(
    ("name", "together"), [("one part a stage", True), ("split along rows", True), ("unequal", False)]
)
def test_equal_stages_hold_their_rows_without_copies(name: str, together: bool, devices: Any) -> None:
    leaves = _leaves(devices, *LAYOUTS[name])
    array = jax.device_put(ARRAY, leaves.sharding(0))
    *parts, _ = leaves.split([array, ARRAY])
    where = lambda x: {s.data.unsafe_buffer_pointer() for s in x.addressable_shards}  # noqa: E731
    assert (where(array) == set().union(*map(where, parts))) == together
    joined, _ = leaves.join([*parts, ARRAY])
    assert (where(joined) == set().union(*map(where, parts))) == together
    assert (len(array.devices()) == sum(len(p.devices()) for p in parts)) == together


@pytest.mark.parametrize("given_away", [True, False])
@pytest.mark.parametrize("name", ["unequal", "a block of two stages", "dealt out"])
def test_rows_of_unequal_stages_wait_on_devices_of_their_own(name: str, given_away: bool, devices: Any) -> None:
    rows, _, stages = LAYOUTS[name]
    leaves = _leaves(devices, *LAYOUTS[name], donated=[given_away])
    array = jax.device_put(ARRAY, leaves.sharding(0))
    assert not array.is_fully_replicated
    owners = [stage for count, stage in zip(rows, stages, strict=True) for _ in range(count)]
    for shard in array.addressable_shards:
        held = range(*shard.index[0].indices(len(owners)))
        assert shard.device in {d for row in held for d in devices[2 * owners[row] : 2 * owners[row] + 2]}
    *parts, _ = leaves.split([array, ARRAY])
    assert array.is_deleted() == given_away
    np.testing.assert_array_equal(np.concatenate(parts), ARRAY)


def test_a_block_that_is_as_its_stage_wants_it_is_not_given_up(devices: Any) -> None:
    """Two stages that split other dims: the rows of the second lie as it reads them, and are its own from then on."""
    meshes = [Mesh(np.array(devices[2 * i : 2 * i + 2]), ("x",)) for i in range(2)]
    specs = PartitionSpec(None, "x"), PartitionSpec(None, None, "x")
    shardings = [NamedSharding(mesh, spec) for mesh, spec in zip(meshes, specs, strict=True)]
    parts = [LeafPart(leaf=0, rows=(0, 4)), LeafPart(leaf=0, rows=(4, 8))]
    leaves = Leaves(parts, [(4, 4, 6), (4, 4, 6)], shardings, Alone(Blanks()), donated=[True])
    array = jax.device_put(ARRAY, leaves.sharding(0))
    found = leaves.split([array])
    where = lambda x: {s.data.unsafe_buffer_pointer() for s in x.addressable_shards}  # noqa: E731
    assert where(found[1]) <= where(array)
    np.testing.assert_array_equal(np.concatenate(found), ARRAY)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "bool", "bfloat16"])
@pytest.mark.parametrize(
    "spec", [PartitionSpec(), PartitionSpec("x"), PartitionSpec(None, "y"), PartitionSpec("y", "x")]
)
def test_numpy_arrays_are_put_as_jax_puts_them(dtype: str, spec: tuple[str | None, ...], devices: Any) -> None:
    sharding = NamedSharding(Mesh(np.array(devices).reshape(2, 4), ("x", "y")), PartitionSpec(*spec))
    array = np.arange(64).reshape(8, 8).astype(jnp.dtype(dtype))
    got, want = Alone(Blanks()).put(array[:, ::-1], sharding), jax.device_put(array[:, ::-1], sharding)
    assert (got.dtype, got.sharding, got.committed) == (want.dtype, want.sharding, want.committed)
    np.testing.assert_array_equal(got, want)
    for a, b in zip(got.addressable_shards, want.addressable_shards, strict=True):
        assert (a.device, a.index) == (b.device, b.index)
        np.testing.assert_array_equal(a.data, b.data)


@pytest.mark.parametrize("spec", [PartitionSpec(), PartitionSpec("x"), PartitionSpec("y", "x")])
def test_blocks_are_copied_as_jax_copies_them(spec: PartitionSpec, devices: Any) -> None:
    source, target = (
        NamedSharding(Mesh(np.array(part).reshape(2, 2), ("x", "y")), spec) for part in (devices[:4], devices[4:])
    )
    array = jax.device_put(np.arange(64.0).reshape(8, 8), source)
    (got,), want = _jax.copying_to([target])([array]), jax.device_put(array, target)
    assert (got.dtype, got.sharding, got.committed) == (want.dtype, want.sharding, want.committed)
    for a, b, block in zip(got.addressable_shards, want.addressable_shards, _jax.blocks(got), strict=True):
        assert (a.device, a.index) == (b.device, b.index)
        np.testing.assert_array_equal(a.data, b.data)
        np.testing.assert_array_equal(block, b.data)
    assert not array.is_deleted()
