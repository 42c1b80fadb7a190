"""Planned transfers bring every element where it is wanted, and across just once.

The evaluator knows nothing of how pieces are found: it gives each device its block of a NumPy array, hands the boxes
over, carries out the gathers as devices would, and compares with the blocks that are wanted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import product
from math import inf, prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_lite.errors import PlanError
from alpa_lite.sharding.meshes import LogicalMesh, Submesh
from alpa_lite.sharding.specs import Spec
from alpa_lite.sharding.transfer import DIRECT_BYTES, ArrayForm, Placement, PlannedTransfer, blocks, plan_transfer

HOST = 4
"""Devices per host."""


def layout(first: int, sizes: dict[str, int], spec: Spec) -> Placement:
    submesh = Submesh(first_device=first, num_hosts=1, devices_per_host=prod(sizes.values()))
    return Placement(submesh=submesh, mesh=LogicalMesh(axis_names=tuple(sizes), shape=tuple(sizes.values())), spec=spec)


def spec(*dims: str, partial: str = "") -> Spec:
    """`spec("", "xy")`: the second dim is split over x and y."""
    return Spec(tuple(tuple(axes) for axes in dims), tuple(partial))


def transfer(shape: tuple[int, ...], source: Placement, target: Placement, **options: Any) -> PlannedTransfer:
    return plan_transfer(ArrayForm(shape, 4), source, target, devices_per_host=HOST, **options)


def block_of(array: np.ndarray, where: Placement, place: int) -> np.ndarray:
    """What a device has of an array, split dim by dim."""
    at = dict(zip(where.mesh.axis_names, np.unravel_index(place, where.mesh.shape), strict=True))
    sizes = where.mesh.axis_sizes
    for dim, axes in enumerate(where.spec.dims):
        for axis in axes:
            array = np.split(array, sizes[axis], axis=dim)[at[axis]]
    return array


def cut(array: np.ndarray, box: Any) -> np.ndarray:
    return array[(*(slice(start, stop) for start, stop in box), ...)]


def evaluate(planned: PlannedTransfer) -> Counter[int]:
    """Carry a transfer out and check what arrives; how often each element goes to another device."""
    assert not planned.resolve and not planned.in_place
    shape, source, target = planned.array.shape, planned.source, planned.target
    array = np.arange(prod(shape)).reshape(shape)
    known = {i: set(block_of(array, source, i).ravel().tolist()) for i in range(source.mesh.num_devices)}
    crossed, landed = Counter[int](), [np.full(shape, -1) for _ in range(target.mesh.num_devices)]
    for piece in planned.pieces:
        moved = cut(array, piece.box)
        assert moved.size, "an empty piece"
        assert set(moved.ravel().tolist()) <= known[piece.source], "a device sends what it does not have"
        place = cut(landed[piece.target], piece.box)
        assert (place == -1).all(), "an element is handed to a device twice"
        place[...] = moved
        if source.submesh.devices[piece.source] != target.submesh.devices[piece.target]:
            crossed.update(moved.ravel().tolist())
    check_blocks(planned, array, gathered(planned, landed))
    return crossed


def gathered(planned: PlannedTransfer, landed: list[np.ndarray]) -> list[np.ndarray]:
    """Devices along the axes of a step give each other what they have."""
    mesh, held = planned.target.mesh, landed
    for step in planned.gathers:
        assert step.kind == "all_gather"
        joined = list(held)
        for group in mesh.groups(*step.axes):
            together = np.max([held[i] for i in group], axis=0)
            for i in group:
                joined[i] = together
        held = joined
    return held


def check_blocks(planned: PlannedTransfer, array: np.ndarray, held: list[np.ndarray]) -> None:
    for i, found in enumerate(held):
        wanted = block_of(array, planned.target, i)
        assert (np.isin(array, wanted) == (found != -1)).all(), "not the block that is wanted"
        assert (found[found != -1] == array[found != -1]).all()


@st.composite
def layouts(draw: Any, rank: int) -> tuple[Placement, list[int]]:
    """A layout on 1 to 8 devices, and by how much each dim is split."""
    shapes = [m for k in (1, 2, 3) for m in product(range(1, 9), repeat=k) if prod(m) <= 8 and (k == 1 or 1 not in m)]
    mesh = draw(st.sampled_from(shapes))
    names = "xyz"[: len(mesh)]
    dims = [""] * rank
    for axis in draw(st.permutations(names)):
        dim = draw(st.integers(-1, rank - 1))
        if dim >= 0:
            dims[dim] += axis
    sizes = dict(zip(names, mesh, strict=True))
    first = draw(st.integers(0, 8))
    return layout(first, sizes, spec(*dims)), [prod(sizes[a] for a in axes) for axes in dims]


@st.composite
def transfers(draw: Any) -> tuple[tuple[int, ...], Placement, Placement]:
    rank = draw(st.integers(0, 3))
    (source, cuts), (target, other) = draw(layouts(rank)), draw(layouts(rank))
    shape = tuple(int(np.lcm(a, b)) * draw(st.integers(1, 3)) for a, b in zip(cuts, other, strict=True))
    return shape, source, target


@settings(max_examples=300)
@given(transfers())
def test_every_element_arrives_and_crosses_once(drawn: Any) -> None:
    shape, source, target = drawn
    planned = transfer(shape, source, target, direct_bytes=-1)
    if planned.in_place:
        assert (source.submesh, source.mesh) == (target.submesh, target.mesh)
        assert planned.sent_bytes == 0
        return
    crossed = evaluate(planned)
    assert planned.sent_bytes == 4 * crossed.total()
    if shape and not set(source.submesh.devices) & set(target.submesh.devices):
        assert set(crossed.values()) == {1}
        assert planned.sent_bytes == planned.array.bytes
    if shape:
        assert planned.sent_bytes <= planned.array.bytes


@given(transfers())
def test_direct_transfers_gather_nothing_and_arrive(drawn: Any) -> None:
    planned = transfer(*drawn, direct_bytes=inf)
    if not planned.in_place:
        assert not planned.gathers
        assert evaluate(planned) == Counter(lacking(planned))


def lacking(planned: PlannedTransfer) -> Iterator[int]:
    """What each receiver wants and does not have as a sender."""
    array, devices = np.arange(prod(planned.array.shape)).reshape(planned.array.shape), planned.source.submesh.devices
    for i, device in enumerate(planned.target.submesh.devices):
        wanted = set(block_of(array, planned.target, i).ravel().tolist())
        if device in devices:
            wanted -= set(block_of(array, planned.source, devices.index(device)).ravel().tolist())
        yield from wanted


@given(transfers(), st.sampled_from([0, 64, 1024]))
def test_copies_are_sent_only_for_so_many_bytes_more(drawn: Any, extra: int) -> None:
    once, chosen = (transfer(*drawn, direct_bytes=n) for n in (-1, extra))
    assert chosen.sent_bytes - once.sent_bytes <= extra or chosen == once


@given(transfers())
def test_gathers_send_what_the_receivers_lack(drawn: Any) -> None:
    """Each gathers to its block, with at most the padding of the last parts."""
    planned = transfer(*drawn, direct_bytes=-1)
    if not planned.gathers:
        return
    block = prod(planned.array.shape) / prod(
        planned.target.mesh.size(a) for dim in planned.target.spec.dims for a in dim
    )
    last = planned.gathers[-1]
    assert last.spec == planned.target.spec
    assert last.bytes_factor * prod(planned.array.shape) >= block * (1 - 1e-12)
    exact = all(
        n % prod(planned.target.mesh.size(a) for a in (*axes, *parts)) == 0
        for n, axes, parts in zip(planned.array.shape, planned.target.spec.dims, planned.spread, strict=True)
    )
    if exact:
        assert last.bytes_factor * prod(planned.array.shape) == pytest.approx(block)


X4, X2Y2, X3 = {"x": 4}, {"x": 2, "y": 2}, {"x": 3}


def test_equal_layouts_hand_each_block_to_the_counterpart() -> None:
    planned = transfer((8, 8), layout(0, X4, spec("x", "")), layout(4, X4, spec("x", "")))
    assert [(p.source, p.target) for p in planned.pieces] == [(i, i) for i in range(4)]
    assert not planned.gathers and planned.sent_bytes == 256


def test_replicas_are_sent_in_parts_by_all_and_gathered() -> None:
    planned = transfer((8, 8), layout(0, X4, spec("", "")), layout(4, X2Y2, spec("", "")), direct_bytes=0)
    assert [(p.source, p.target) for p in planned.pieces] == [(i, i) for i in range(4)]
    assert planned.sent_bytes == 256
    assert [(s.kind, s.axes, s.dim, s.bytes_factor) for s in planned.gathers] == [("all_gather", ("x", "y"), 0, 1.0)]


def test_small_arrays_and_scalars_are_sent_to_every_receiver() -> None:
    where = layout(0, X4, spec("")), layout(4, X4, spec(""))
    assert transfer((8,), *where).sent_bytes == 4 * 32
    assert transfer((), layout(0, X4, spec()), layout(4, X4, spec()), direct_bytes=-1).sent_bytes == 4 * 4
    elements = DIRECT_BYTES // (4 * 3)
    assert transfer((elements // 4 * 4,), *where).gathers == ()
    assert transfer((elements // 4 * 4 + 4,), *where).gathers


def test_senders_share_the_load() -> None:
    """Six devices have the whole array, and three blocks go to three devices of another host each."""
    planned = transfer((12, 2), layout(0, {"x": 6}, spec("", "")), layout(8, X3, spec("x", "")))
    assert max(Counter(p.source for p in planned.pieces).values()) == 1
    # The first four senders are on one host, the other two on the next.
    hosts = Counter(p.source // HOST for p in planned.pieces)
    assert set(hosts) == {0, 1}


@pytest.mark.parametrize(("first", "near"), [(0, [4, 5]), (3, [5, 5]), (8, [4, 5]), (11, [5, 5])])
def test_senders_on_the_receivers_host_are_preferred(first: int, near: list[int]) -> None:
    """Of six devices that hold the array one or two are on the host of four on which the two that want it are."""
    source, target = layout(first, {"x": 6}, spec("", "")), layout(first + 6, {"x": 2}, spec("x", ""))
    planned = transfer((8, 2), source, target)
    assert sorted(p.source for p in planned.pieces) == near
    assert (planned.source, planned.target) == (source, target)


def test_what_is_there_already_is_not_sent() -> None:
    planned = transfer((8, 8), layout(0, X4, spec("", "")), layout(2, X4, spec("", "")), direct_bytes=-1)
    assert planned.sent_bytes == 128
    planned = transfer((8, 8), layout(0, X4, spec("x", "")), layout(0, X2Y2, spec("xy", "")))
    assert planned.sent_bytes == 0 and len(planned.pieces) == 4
    planned = transfer((8, 8), layout(0, X4, spec("", "")), layout(0, X2Y2, spec("", "")))
    assert planned.sent_bytes == 0 and not planned.gathers


def test_one_mesh_takes_a_walk() -> None:
    planned = transfer((8, 8), layout(0, X4, spec("x", "")), layout(0, X4, spec("", "x")))
    assert planned.in_place and [step.kind for step in planned.resolve] == ["all_to_all"]


def test_partial_sums_are_resolved_before_they_are_sent() -> None:
    planned = transfer((8, 8), layout(0, X4, spec("", "", partial="x")), layout(4, X4, spec("", "")), direct_bytes=0)
    assert [step.kind for step in planned.resolve] == ["reduce_scatter"]
    assert planned.sent_spec == spec("x", "") and planned.sent_bytes == 256
    scalar = transfer((), layout(0, X4, spec(partial="x")), layout(4, X4, spec()))
    assert [step.kind for step in scalar.resolve] == ["all_reduce"]


def test_receivers_that_do_not_divide_a_dim_get_parts_of_unequal_size() -> None:
    """Seven rows for three receivers: 3, 3 and 1; the gather brings nine."""
    planned = transfer((7, 2), layout(0, {"x": 2}, spec("", "")), layout(4, X3, spec("", "")), direct_bytes=-1)
    assert [box[0] for box in planned.landing_blocks()] == [(0, 3), (3, 6), (6, 7)]
    assert planned.sent_bytes == 7 * 2 * 4
    assert planned.gathers[0].bytes_factor == pytest.approx(9 / 7)


def test_nothing_is_sent_of_empty_arrays() -> None:
    planned = transfer((0, 4), layout(0, X4, spec("", "x")), layout(4, X4, spec("", "")))
    assert planned.pieces == () and planned.gathers == ()


def test_blocks_follow_the_axes_major_first() -> None:
    where = layout(0, X2Y2, spec("yx"))
    assert blocks((8,), where.mesh, where.spec) == (((0, 2),), ((4, 6),), ((2, 4),), ((6, 8),))


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(PlanError, match="multiples of the devices"):
        transfer((7,), layout(0, X4, spec("x")), layout(4, X4, spec("")))
    with pytest.raises(PlanError, match="only whole values are sent"):
        transfer((8,), layout(0, X4, spec("")), layout(4, X4, spec("", partial="x")))
    short = Placement(
        submesh=Submesh(first_device=0, num_hosts=1, devices_per_host=2),
        mesh=LogicalMesh(axis_names=("x",), shape=(4,)),
        spec=spec("x"),
    )
    with pytest.raises(PlanError, match="submesh has 2"):
        transfer((8,), short, short)
