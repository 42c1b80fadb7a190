"""Any sharding to any other: every shard is what NumPy says; pieces come from the nearest device that has them."""

from __future__ import annotations

from math import prod
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from alpa_lite.runtime.execute.crossing import Blanks, Exchange, Sent
from alpa_lite.runtime.execute.placing import Alone, Windows, course_between, relocation

SHAPE = (12, 8)


def sharding(devices: Any, first: int, sizes: dict[str, int], *spec: Any) -> NamedSharding:
    chosen = np.array(devices[first : first + prod(sizes.values())]).reshape(tuple(sizes.values()))
    return NamedSharding(Mesh(chosen, tuple(sizes)), PartitionSpec(*spec))


def moved(array: Any, source: NamedSharding, wanted: NamedSharding, windows: Windows | None = None) -> Any:
    like = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=source)
    return relocation(like, wanted, windows, Blanks())(jax.device_put(array, source))


LAYOUTS = [
    (0, {"x": 1}, ()),
    (0, {"x": 4}, ("x",)),
    (2, {"x": 4}, (None, "x")),
    (4, {"x": 2, "y": 2}, ("y", "x")),
    (0, {"x": 2, "y": 4}, (("x", "y"),)),
    (0, {"x": 2, "y": 4}, (None, "y")),
    (5, {"x": 3}, ("x",)),
]


@pytest.mark.parametrize("target", range(len(LAYOUTS)))
@pytest.mark.parametrize("source", range(len(LAYOUTS)))
def test_any_sharding_to_any_other(source: int, target: int, devices: Any) -> None:
    shape = (24, 8)
    ends = [sharding(devices, first, sizes, *spec) for first, sizes, spec in (LAYOUTS[source], LAYOUTS[target])]
    array = np.arange(prod(shape), dtype=np.float32).reshape(shape)
    result = moved(array, *ends)
    assert result.sharding == ends[1]
    np.testing.assert_array_equal(result, array)


@pytest.mark.parametrize("dim", [0, 1])
def test_windows_give_each_device_its_share_of_every_run(dim: int, devices: Any) -> None:
    """Of three runs of four rows, from row 4 on, each of four devices has one row of each."""
    array = np.arange(16 * 16, dtype=np.int32).reshape(16, 16)
    source = sharding(devices, 0, {"x": 8}, "x")
    spec = ("x", None) if dim == 0 else (None, "x")
    wanted = sharding(devices, 3, {"x": 4}, *spec)
    result = moved(array, source, wanted, Windows(dim=dim, start=4, size=4, count=3))
    assert result.shape == ((12, 16) if dim == 0 else (16, 12))
    for place, shard in enumerate(result.addressable_shards):
        rows = [4 + place, 8 + place, 12 + place]
        np.testing.assert_array_equal(shard.data, np.take(array, rows, axis=dim))


def test_the_receiver_itself_sends_where_it_can(devices: Any) -> None:
    like = jax.ShapeDtypeStruct(SHAPE, np.float32, sharding=sharding(devices, 0, {"x": 4}))
    found = course_between(like, sharding(devices, 2, {"x": 4}, "x"))
    pairs = {(devices[hand.source], devices[2 + hand.target]) for hand in found.hands}
    kept = {(devices[2], devices[2]), (devices[3], devices[3])}
    assert kept < pairs
    assert len({source for source, _ in pairs - kept}) == 2, "two different devices send the rest"


@pytest.mark.parametrize("dtype", [np.float32, np.int8, np.bool_, np.uint32, np.float16, np.complex64])
def test_dtypes_and_scalars(dtype: Any, devices: Any) -> None:
    ends = sharding(devices, 0, {"x": 2}, "x"), sharding(devices, 4, {"x": 3})
    array = np.arange(12).reshape(6, 2).astype(dtype)
    np.testing.assert_array_equal(moved(array, *ends), array)
    whole = sharding(devices, 0, {"x": 2}), sharding(devices, 4, {"x": 3})
    np.testing.assert_array_equal(moved(np.asarray(3, dtype), *whole), np.asarray(3, dtype))


def test_an_exchange_hands_every_piece_to_its_receiver(devices: Any) -> None:
    """Several pieces between the same devices, of several shapes, some of them to the sender itself."""
    ends = [(0, 1), (0, 1), (1, 0), (2, 0), (0, 2), (3, 3), (1, 2)]
    shapes = [(2, 3), (2, 3), (2, 3), (4,), (4,), (), (2, 3)]
    pieces = [
        Sent(number=n, shape=shape, source=devices[a], target=devices[b])
        for n, ((a, b), shape) in enumerate(zip(ends, shapes, strict=True))
    ]
    exchange = Exchange(pieces, np.float32, Blanks())
    values = {p.number: jax.device_put(np.full(p.shape, p.number + 1, np.float32), p.source) for p in pieces}
    found, done = exchange(values)
    jax.block_until_ready(done)
    assert set(found) == set(values)
    for piece in pieces:
        assert found[piece.number].devices() == {piece.target}
        np.testing.assert_array_equal(found[piece.number], np.full(piece.shape, piece.number + 1, np.float32))
    busy = [[pair[0] for pair in each.pairs] for each in exchange.rounds]
    assert all(len(set(senders)) == len(senders) for senders in busy)


def test_an_array_on_the_only_device_is_described_anew(devices: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`jax.device_put` of such an array takes a millisecond, and batches come as such arrays in every step."""
    wanted = sharding(devices, 0, {"x": 1}, "x")
    array = jax.numpy.arange(8.0)
    assert not array.committed
    monkeypatch.setattr(jax, "device_put", lambda *_, **__: pytest.fail("put"))
    placed = Alone(Blanks()).put(array, wanted)
    assert placed.committed and placed.sharding == wanted
    assert placed.unsafe_buffer_pointer() == array.unsafe_buffer_pointer()
    placed.delete()
    assert array.is_deleted()  # as when a step is given the array to overwrite
