"""Transfers on virtual devices: every shard is what NumPy says, where it is wanted, and what is sent was planned."""

from __future__ import annotations

import re
from collections import Counter
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax.sharding import Mesh, NamedSharding

from alpa_lite.lower.emission import boundary_spec
from alpa_lite.runtime.execute.crossing import Message
from alpa_lite.runtime.execute.run_transfers import compile_transfer
from alpa_lite.sharding.transfer import ArrayForm, Placement, PlannedTransfer, plan_transfer
from tests.sharding.test_transfer import layout, spec, transfers

Y2, Y4, X2Y4, X2Y2 = {"x": 1, "y": 2}, {"x": 1, "y": 4}, {"x": 2, "y": 4}, {"x": 2, "y": 2}
R, S0, S1 = spec("", "", ""), spec("y", "", ""), spec("", "y", "")


def mesh_of(where: Placement) -> Mesh:
    chosen = np.array(jax.devices()[: where.submesh.devices[-1] + 1])[list(where.submesh.devices)]
    return Mesh(chosen.reshape(where.mesh.shape), where.mesh.axis_names)


def moved(planned: PlannedTransfer, array: Any, dtype: str | None = None) -> tuple[Any, list[Message]]:
    """An array placed in the source layout and transferred."""
    source, target = mesh_of(planned.source), mesh_of(planned.target)
    run = compile_transfer(planned, dtype or str(array.dtype), source, target)
    rank = array.ndim
    placed = jax.device_put(array, NamedSharding(source, boundary_spec(spec_of(planned.source, rank))))
    sent: list[Message] = []
    result = run(placed, sent)
    assert result.sharding.is_equivalent_to(NamedSharding(target, boundary_spec(spec_of(planned.target, rank))), rank)
    assert run(placed).sharding == result.sharding
    assert sum(message.bytes for message in sent) == planned.sent_bytes
    assert all(message.source != message.target for message in sent)
    return result, sent


def spec_of(where: Placement, rank: int) -> Any:
    """The spec of the array itself: that of keys has no dim for their words."""
    return spec(*("".join(axes) for axes in where.spec.dims[:rank]))


def check(shape: tuple[int, ...], source: Placement, target: Placement, dtype: Any = np.float32, **options: Any) -> Any:
    array = np.arange(prod(shape)).reshape(shape).astype(dtype)
    planned = plan_transfer(ArrayForm(shape, array.dtype.itemsize), source, target, devices_per_host=4, **options)
    result, sent = moved(planned, array)
    assert result.dtype == array.dtype
    for shard in result.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), array[shard.index])
    between = Counter[tuple[int, int]]()
    for message in sent:
        between[message.source.id, message.target.id] += message.bytes
    assert between == planned.bytes_between
    return planned


ALPA_PAIRS = [("R", "S0"), ("S0", "S0"), ("S1", "S0"), ("R", "R"), ("S0", "R"), ("S1", "R")]
"""What Alpa's tests transfer from one pair of devices to another."""


@pytest.mark.parametrize("direct_bytes", [-1, 1 << 16])
@pytest.mark.parametrize(("source", "target"), ALPA_PAIRS)
def test_the_pairs_of_alpas_tests(source: str, target: str, direct_bytes: int, devices: Any) -> None:
    specs = {"R": R, "S0": S0, "S1": S1}
    ends = layout(0, Y2, specs[source]), layout(2, Y2, specs[target])
    planned = check((4, 8, 16), *ends, direct_bytes=direct_bytes)
    if direct_bytes < 0:
        assert planned.sent_bytes == planned.array.bytes
        assert bool(planned.gathers) == (target == "R")


@pytest.mark.parametrize("direct_bytes", [-1, 1 << 16])
def test_last_of_them_with_uneven_dims(direct_bytes: int, devices: Any) -> None:
    check((3, 8, 2), layout(0, Y2, S1), layout(2, Y2, R), direct_bytes=direct_bytes)
    check((6, 8, 16), layout(0, Y4, R), layout(4, Y4, R), direct_bytes=direct_bytes)
    check((2, 64, 64), layout(0, X2Y2, spec("x", "", "")), layout(4, X2Y2, R), direct_bytes=direct_bytes)
    check((64, 64, 64), layout(0, X2Y2, spec("xy", "", "")), layout(4, X2Y2, spec("x", "", "y")))


@pytest.mark.parametrize(("senders", "receivers"), [(2, 4), (4, 2), (3, 4), (4, 3), (3, 5), (1, 7), (7, 1), (2, 3)])
@pytest.mark.parametrize("target", ["R", "S0", "S1"])
@pytest.mark.parametrize("source", ["R", "S0", "S1"])
def test_unequal_numbers_of_devices(source: str, target: str, senders: int, receivers: int, devices: Any) -> None:
    specs = {"R": spec("", ""), "S0": spec("y", ""), "S1": spec("", "y")}
    size = senders * receivers
    ends = (
        layout(0, {"x": 1, "y": senders}, specs[source]),
        layout(senders, {"x": 1, "y": receivers}, specs[target]),
    )
    planned = check((size, size), *ends, direct_bytes=-1)
    assert planned.sent_bytes == planned.array.bytes


@settings(max_examples=40)
@given(transfers())
def test_any_layouts(drawn: Any) -> None:
    shape, source, target = drawn
    shift = min(source.submesh.first_device, target.submesh.first_device)
    ends = [layout(w.submesh.first_device - shift, w.mesh.axis_sizes, w.spec) for w in (source, target)]
    if max(end.submesh.devices[-1] for end in ends) < len(jax.devices()):
        check(shape, *ends, direct_bytes=-1)


@pytest.mark.parametrize("direct_bytes", [-1, 1 << 16])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.bool_, np.int8, np.int32, np.uint32, np.float16, np.complex64])
def test_dtypes(dtype: Any, direct_bytes: int, devices: Any) -> None:
    check(
        (6, 4), layout(0, {"x": 2}, spec("x", "")), layout(2, {"x": 3}, spec("", "")), dtype, direct_bytes=direct_bytes
    )


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
@pytest.mark.parametrize("direct_bytes", [-1, 1 << 16])
@pytest.mark.parametrize("shape", [(), (6,)])
def test_typed_keys(shape: tuple[int, ...], direct_bytes: int, impl: str, devices: Any) -> None:
    keys = jax.random.split(jax.random.key(3, impl=impl), shape) if shape else jax.random.key(3, impl=impl)
    words = jax.random.key_data(keys).shape
    ends = [
        layout(first, {"x": n}, spec(*(["x"] * bool(shape and first == 0)), *([""] * bool(shape and first)), ""))
        for first, n in ((0, 2), (2, 3))
    ]
    planned = plan_transfer(ArrayForm(words, 4), *ends, devices_per_host=4, direct_bytes=direct_bytes)
    result, _ = moved(planned, keys)
    assert result.dtype == keys.dtype
    np.testing.assert_array_equal(jax.random.key_data(result), jax.random.key_data(keys))


@pytest.mark.parametrize("source", [{"x": 1}, {"x": 3}, X2Y2])
def test_scalars_and_empty_arrays(source: dict[str, int], devices: Any) -> None:
    for target in ({"x": 1}, {"x": 4}, X2Y2):
        check((), layout(0, source, spec()), layout(4, target, spec()), np.int32)
        check((0, 4), layout(0, source, spec("", "")), layout(4, target, spec("x", "")))


def test_devices_of_both_meshes(devices: Any) -> None:
    """Pieces that stay are not sent, and are still right."""
    planned = check((8, 8), layout(0, Y4, spec("", "")), layout(2, Y4, spec("", "y")), direct_bytes=-1)
    assert planned.sent_bytes == 8 * 8 * 4 // 2
    assert check((8, 8), layout(0, Y4, spec("", "")), layout(0, X2Y2, spec("y", "x"))).sent_bytes == 0
    assert check((8, 8), layout(0, Y4, spec("y", "")), layout(0, Y4, spec("", "y"))).in_place


@pytest.mark.parametrize("target", [spec("", ""), spec("x", "")])
def test_partial_sums_arrive_resolved(target: Any, devices: Any) -> None:
    source = layout(0, {"x": 2, "y": 2}, spec("y", "", partial="x"))
    addends = np.arange(2 * 8 * 4, dtype=np.float32).reshape(2, 8, 4)
    planned = plan_transfer(
        ArrayForm((8, 4), 4),
        source,
        layout(4, {"x": 3} if not any(target.dims) else X2Y2, target),
        devices_per_host=4,
        direct_bytes=-1,
    )
    run = compile_transfer(planned, "float32", mesh_of(source), mesh_of(planned.target))
    sent: list[Message] = []
    result = run(jax.device_put(addends, NamedSharding(mesh_of(source), boundary_spec(source.spec))), sent)
    np.testing.assert_array_equal(result, addends.sum(0))
    assert sum(message.bytes for message in sent) == planned.sent_bytes == 8 * 4 * 4


def test_programs_hold_the_planned_collectives(devices: Any) -> None:
    """The only collective of a landing is its all_gather, with the bytes that the plan says; cutting has none."""
    planned = plan_transfer(
        ArrayForm((7, 4), 4),
        layout(0, {"x": 2}, spec("", "")),
        layout(4, {"x": 3}, spec("", "")),
        devices_per_host=4,
        direct_bytes=-1,
    )
    run = compile_transfer(planned, "float32", mesh_of(planned.source), mesh_of(planned.target))
    assert run.num_programs == 2
    (landing,) = re.findall(r"= f32\[([\d,]+)\]\S* all-gather\(", run.land.as_text())
    assert 4 * prod(map(int, landing.split(","))) == planned.gathers[0].bytes_factor * planned.array.bytes
    for program in (run.cut, run.land):
        assert not re.search(r" (all-reduce|all-to-all|collective-permute|reduce-scatter)\(", program.as_text())
    assert "all-gather" not in run.cut.as_text()


def test_equal_layouts_launch_nothing(devices: Any) -> None:
    ends = layout(0, X2Y2, spec("x", "y")), layout(4, X2Y2, spec("x", "y"))
    planned = plan_transfer(ArrayForm((1 << 10, 1 << 10), 4), *ends, devices_per_host=4)
    assert compile_transfer(planned, "float32", *map(mesh_of, ends)).num_programs == 0


@pytest.mark.parametrize("source", [spec("x", ""), spec("", "")])
def test_meshes_of_other_axes_that_cut_alike_launch_nothing(source: Any, devices: Any) -> None:
    """Four devices along x, or two by two along y and z: rows, or copies."""
    target = spec("yz", "") if any(source.dims) else source
    planned = check((8, 8), layout(0, {"x": 4}, source), layout(4, {"y": 2, "z": 2}, target))
    ends = map(mesh_of, (planned.source, planned.target))
    assert compile_transfer(planned, "float32", *ends).num_programs == 0


def test_nothing_goes_through_the_host(devices: Any) -> None:
    """JAX refuses copies between host and devices, in either direction, while transfers run."""
    ends = [
        (layout(0, {"x": 3}, spec("x", "")), layout(3, Y4, spec("", "y"))),
        (layout(0, Y4, spec("y", "")), layout(4, X2Y2, spec("", ""))),
        (layout(0, Y4, spec("y", "")), layout(4, Y4, spec("y", ""))),
        (layout(0, Y4, spec("y", "")), layout(0, Y4, spec("", "y"))),
    ]
    for source, target in ends:
        planned = plan_transfer(ArrayForm((12, 12), 4), source, target, devices_per_host=4, direct_bytes=-1)
        run = compile_transfer(planned, "float32", mesh_of(source), mesh_of(target))
        array = jax.device_put(
            np.ones((12, 12), np.float32), NamedSharding(mesh_of(source), boundary_spec(source.spec))
        )
        with (
            jax.transfer_guard_host_to_device("disallow_explicit"),
            jax.transfer_guard_device_to_host("disallow_explicit"),
        ):
            result = run(array)
        np.testing.assert_array_equal(result, 1.0)
