"""Specs and resharding: every walk leads where it should, at the least cost, as a simulation on plain arrays shows.

`Holdings` gives each device of a small mesh its block of an array and carries out the elementary moves as the devices
would, knowing nothing of how walks are found. A brute-force search over walks is the twin of `reshard`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from math import prod

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from alpa_lite.sharding.reshard import STEP_BYTES, SpecGraph, Walks, reshard, spec_graph
from alpa_lite.sharding.specs import (
    Move,
    Spec,
    divides,
    local_shape,
    moves,
    num_shards,
    replicated,
    sent_bytes_factor,
)

Sizes = Mapping[str, int]
Place = tuple[tuple[str, int], ...]

MESHES: list[dict[str, int]] = [
    {"x": 2},
    {"x": 4},
    {"x": 2, "y": 2},
    {"x": 4, "y": 2},
    {"x": 2, "y": 3},
]


def places(sizes: Sizes) -> list[Place]:
    """The coordinates of every device."""
    return [tuple(zip(sizes, at, strict=True)) for at in itertools.product(*(range(n) for n in sizes.values()))]


def block(array: np.ndarray, spec: Spec, place: Place, sizes: Sizes) -> np.ndarray:
    """What a device holds of an array without partial sums: its block of each dim, major axis first."""
    at = dict(place)
    for dim, axes in enumerate(spec.dims):
        number, count = 0, 1
        for axis in axes:
            number, count = number * sizes[axis] + at[axis], count * sizes[axis]
        array = np.split(array, count, axis=dim)[number]
    return array


class Holdings:
    """The blocks of all devices, moved about step by step."""

    def __init__(self, array: np.ndarray, spec: Spec, sizes: Sizes) -> None:
        """Blocks of `array`; devices along an axis of a partial sum hold different addends of it."""
        self.sizes = sizes
        self.blocks: dict[Place, np.ndarray] = {}
        rng = np.random.default_rng(0)
        summands = list(itertools.product(*(range(sizes[a]) for a in spec.partial)))
        addends = {s: rng.integers(-50, 50, array.shape) for s in summands[1:]}
        addends[summands[0]] = array - sum(addends.values(), np.zeros_like(array))
        for place in places(sizes):
            summand = tuple(dict(place)[a] for a in spec.partial)
            self.blocks[place] = block(addends[summand], spec, place, sizes)

    def group(self, place: Place, axis: str) -> list[Place]:
        """The devices along an axis, in order."""
        return [tuple((a, i if a == axis else at) for a, at in place) for i in range(self.sizes[axis])]

    def take(self, step: Move) -> None:
        """Carry out one move on all devices."""
        new: dict[Place, np.ndarray] = {}
        if step.kind == "permute":
            self.permute(step)
            return
        for place in self.blocks:
            mine, count = dict(place)[step.axis], self.sizes[step.axis]
            peers = [self.blocks[p] for p in self.group(place, step.axis)]
            own = self.blocks[place]
            if step.kind == "addend":
                new[place] = own if mine == 0 else np.zeros_like(own)
            elif step.kind == "slice":
                new[place] = np.split(own, count, axis=step.dim)[mine]
            elif step.kind == "all_gather":
                new[place] = np.concatenate(peers, axis=step.dim)
            elif step.kind == "all_reduce":
                new[place] = sum(peers[1:], peers[0])
            elif step.kind == "reduce_scatter":
                new[place] = np.split(sum(peers[1:], peers[0]), count, axis=step.dim)[mine]
            else:
                assert step.kind == "all_to_all"
                parts = [np.split(peer, count, axis=step.target_dim)[mine] for peer in peers]
                new[place] = np.concatenate(parts, axis=step.dim)
        self.blocks = new

    def permute(self, step: Move) -> None:
        """Each device of a group sends its block to one other; the last of the axes counts fastest."""

        def number(place: Place) -> int:
            found = 0
            for axis in step.axes:
                found = found * self.sizes[axis] + dict(place)[axis]
            return found

        count = prod(self.sizes[a] for a in step.axes)
        assert sorted(a for a, _ in step.pairs) == sorted(b for _, b in step.pairs) == list(range(count))
        elsewhere = lambda place: [(a, i) for a, i in place if a not in step.axes]  # noqa: E731
        self.blocks = {
            there: self.blocks[here]
            for here, there in itertools.product(self.blocks, self.blocks)
            if elsewhere(here) == elsewhere(there) and (number(here), number(there)) in step.pairs
        }

    def assert_hold(self, array: np.ndarray, spec: Spec) -> None:
        """All devices hold their blocks, partial sums added up over their axes."""
        for place in self.blocks:
            members = [
                other
                for other in self.blocks
                if all(a == b or axis in spec.partial for (axis, a), (_, b) in zip(place, other, strict=True))
            ]
            total = sum(self.blocks[member] for member in members)
            assert np.array_equal(total, block(array, spec, place, self.sizes)), (place, spec)


def all_specs(shape: tuple[int, ...], sizes: Sizes, *, partial: bool) -> list[Spec]:
    """Every spec of an array on a mesh: each axis unused, a partial sum, or on a dim, in every order on each dim."""
    found: set[Spec] = set()
    homes = [-1, *([-2] if partial else []), *range(len(shape))]
    for order in itertools.permutations(sizes):
        for choice in itertools.product(homes, repeat=len(order)):
            dims: list[tuple[str, ...]] = [()] * len(shape)
            for axis, home in zip(order, choice, strict=True):
                if home >= 0:
                    dims[home] = (*dims[home], axis)
            summed = tuple(sorted(a for a, home in zip(order, choice, strict=True) if home == -2))
            spec = Spec(tuple(dims), summed)
            if divides(spec, shape, sizes):
                found.add(spec)
    return sorted(found, key=str)


def cost(steps: tuple[Move, ...], shape: tuple[int, ...], sizes: Sizes, item_bytes: int = 4) -> float:
    """What `reshard` minimises, by its docstring: bytes sent per device and `STEP_BYTES` per collective."""
    sent = sum(sent_bytes_factor(s, sizes) for s in steps) * prod(shape) * item_bytes
    return sent + sum(STEP_BYTES if s.kind not in ("slice", "addend") else 1.0 for s in steps)


def cheapest_by_relaxation(source: Spec, shape: tuple[int, ...], sizes: Sizes) -> dict[Spec, float]:
    """Bellman-Ford over all specs: the least cost to every spec that can be reached."""
    best = {source: 0.0}
    changed = True
    while changed:
        changed = False
        for spec, value in list(best.items()):
            for step in moves(spec, shape, sizes):
                total = value + cost((step,), shape, sizes)
                if total < best.get(step.spec, float("inf")) - 1e-9:
                    best[step.spec] = total
                    changed = True
    return best


PAIRS = [
    (sizes, shape)
    for sizes in MESHES
    for shape in ((), (24,), (12, 24), (4, 6))
    if len(sizes) == 1 or prod(sizes.values()) <= 8
]


@pytest.mark.parametrize(("sizes", "shape"), PAIRS, ids=str)
def test_every_walk_leads_to_its_target(sizes: dict[str, int], shape: tuple[int, ...]) -> None:
    array = np.arange(prod(shape)).reshape(shape)
    specs = all_specs(shape, sizes, partial=True)
    for source, target in itertools.product(specs, specs):
        steps = reshard(source, target, shape, sizes)
        if steps is None:
            continue
        holdings = Holdings(array, source, sizes)
        for step in steps:
            holdings.take(step)
        holdings.assert_hold(array, target)
        assert (steps[-1].spec if steps else source) == target


@pytest.mark.parametrize(("sizes", "shape"), PAIRS, ids=str)
def test_no_walk_is_cheaper_and_none_is_missed(sizes: dict[str, int], shape: tuple[int, ...]) -> None:
    specs = all_specs(shape, sizes, partial=True)
    for source in specs:
        best = cheapest_by_relaxation(source, shape, sizes)
        for target in specs:
            steps = reshard(source, target, shape, sizes)
            if steps is None:
                assert target not in best, f"{source} -> {target}"
            else:
                assert cost(steps, shape, sizes) == pytest.approx(best[target]), f"{source} -> {target}"


@pytest.mark.parametrize(("sizes", "shape"), PAIRS, ids=str)
def test_no_array_but_a_scalar_becomes_a_partial_sum(sizes: dict[str, int], shape: tuple[int, ...]) -> None:
    specs = all_specs(shape, sizes, partial=True)
    for source, target in itertools.product(specs, specs):
        impossible = bool(shape) and not set(target.partial) <= set(source.partial)
        assert (reshard(source, target, shape, sizes) is None) == impossible, f"{source} -> {target}"


def test_a_target_that_does_not_divide_is_impossible() -> None:
    assert reshard(replicated(1), Spec((("x",),)), (6,), {"x": 4}) is None
    assert reshard(replicated(2), Spec((("x", "y"), ())), (6, 8), {"x": 2, "y": 2}) is None


def test_every_move_says_truly_where_it_leads_and_what_it_costs() -> None:
    sizes, shape = {"x": 2, "y": 3}, (12, 24)
    array = np.arange(prod(shape)).reshape(shape)
    for spec in all_specs(shape, sizes, partial=True):
        for step in moves(spec, shape, sizes):
            holdings = Holdings(array, spec, sizes)
            before = next(iter(holdings.blocks.values())).size
            holdings.take(step)
            holdings.assert_hold(array, step.spec)
            after = next(iter(holdings.blocks.values())).size
            # The buffer of a collective per device: the larger of what goes in and what comes out.
            expected = 0.0 if step.kind == "slice" else max(before, after) / array.size
            assert step.bytes_factor == pytest.approx(expected), (spec, step)


def test_blocks_of_one_shape_change_hands_by_a_permute() -> None:
    square, oblong = {"x": 4, "y": 4}, {"x": 2, "y": 4}
    pairs = [
        (square, Spec((("x",), ())), Spec((("y",), ()))),
        (square, Spec((("x",), ("y",))), Spec((("y",), ("x",)))),
        (oblong, Spec((("x", "y"), ())), Spec((("y", "x"), ()))),
    ]
    for sizes, source, target in pairs:
        steps = reshard(source, target, (1024, 1024), sizes) or ()
        assert [s.kind for s in steps] == ["permute"]
        assert sent_bytes_factor(steps[0], sizes) == 1 / num_shards(source, sizes)
    # Not where gathering along a short axis is cheaper, and not for sums.
    assert [s.kind for s in reshard(Spec(((), ()), ("x",)), Spec((("y",), ())), (64, 64), square) or ()] == [
        "slice",
        "all_reduce",
    ]


@settings(max_examples=150)
@given(
    st.sampled_from([{"a": 2, "b": 2, "c": 2}, {"a": 2, "b": 3, "c": 2}, {"a": 2, "b": 2, "c": 2, "d": 2}]), st.data()
)
def test_walks_on_meshes_of_many_axes_lead_to_their_target(sizes: dict[str, int], data: st.DataObject) -> None:
    shape = (24, 8, 16)

    def drawn(*, partial: bool) -> Spec:
        homes: list[list[str]] = [[], [], [], []]
        for axis in data.draw(st.permutations(list(sizes))):
            home = data.draw(st.integers(-1, 3 if partial else 2))
            if home >= 0:
                homes[home].append(axis)
        return Spec(tuple(map(tuple, homes[:3])), tuple(sorted(homes[3])))

    source, target = drawn(partial=True), drawn(partial=False)
    assume(divides(source, shape, sizes) and divides(target, shape, sizes))
    array, steps = np.arange(prod(shape)).reshape(shape), reshard(source, target, shape, sizes)
    assert steps is not None
    holdings = Holdings(array, source, sizes)
    for step in steps:
        holdings.take(step)
    holdings.assert_hold(array, target)


def test_reductions_that_end_split_are_reduce_scatters() -> None:
    sizes, shape = {"data": 4}, (1024, 1024)
    assert [s.kind for s in reshard(Spec(((), ()), ("data",)), Spec(((), ())), shape, sizes) or ()] == ["all_reduce"]
    split = reshard(Spec(((), ()), ("data",)), Spec((("data",), ())), shape, sizes)
    assert [s.kind for s in split or ()] == ["reduce_scatter"]
    moved = reshard(Spec((("data",), ())), Spec(((), ("data",))), shape, sizes)
    assert [s.kind for s in moved or ()] == ["all_to_all"]


def test_sent_bytes_are_those_of_ring_algorithms() -> None:
    sizes, shape = {"x": 4}, (8, 8)
    summed, split, whole = Spec(((), ()), ("x",)), Spec((("x",), ())), Spec(((), ()))
    by_kind = {s.kind: sent_bytes_factor(s, sizes) for s in moves(summed, shape, sizes)}
    by_kind |= {s.kind: sent_bytes_factor(s, sizes) for s in (*moves(split, shape, sizes), *moves(whole, shape, sizes))}
    expected = {"all_reduce": 1.5, "reduce_scatter": 0.75, "all_gather": 0.75, "all_to_all": 0.75 / 4, "slice": 0.0}
    assert by_kind == pytest.approx(expected)


@given(st.sampled_from(MESHES), st.sampled_from([(24,), (12, 24), (4, 6, 8)]), st.data())
def test_specs_count_their_shards(sizes: dict[str, int], shape: tuple[int, ...], data: st.DataObject) -> None:
    spec = data.draw(st.sampled_from(all_specs(shape, sizes, partial=True)))
    assert prod(local_shape(spec, shape, sizes)) * num_shards(spec, sizes) == prod(shape)
    assert spec.is_replicated == (num_shards(spec, sizes) == 1 and not spec.partial)
    assert spec.without_partial().partial == () and spec.without_partial().dims == spec.dims


def test_specs_print_readably() -> None:
    assert str(Spec((("data", "model"), ()), ("pipe",))) == "[data·model, -]+pipe"
    assert str(replicated(0)) == "[]"


def test_shapes_that_can_be_split_alike_share_their_specs() -> None:
    sizes = (("x", 2), ("y", 4))
    assert spec_graph((24, 7), sizes) is spec_graph((8, 1), sizes)
    assert spec_graph((24, 7), sizes) is not spec_graph((12, 7), sizes)
    assert spec_graph((0,), sizes) is not spec_graph((8,), sizes)  # blocks of nothing are not split


@pytest.mark.parametrize("sizes", [{"a": 2, "b": 4}, {"a": 2, "b": 2, "c": 4}, {"a": 3, "b": 2}])
@pytest.mark.parametrize("shape", [(8, 6, 4), (3 << 12, 1 << 13)])
def test_walks_of_large_arrays_are_those_that_their_own_bytes_lead_to(
    shape: tuple[int, ...], sizes: dict[str, int]
) -> None:
    graph, names = SpecGraph(shape, sizes), tuple(sizes)
    nothing = ((),) * (len(shape) - 1)
    sources = (Spec(((), *nothing)), Spec((names, *nothing)), Spec(((), *nothing), names[:1]))
    for source in (s for s in sources if divides(s, shape, sizes)):
        exhausted = Walks(graph, source, prod(shape) * 4)
        walks = spec_graph(shape, tuple(sizes.items())).walks(source, prod(shape) * 4)
        targets = [Spec(dims) for dims in itertools.permutations(((names[0],), names[1:], *nothing[1:]))]
        for target in (*targets, Spec(((), *nothing)), Spec(((), *nothing), names[1:])):
            found = walks.to(target)
            assert found == exhausted.to(target), (source, target)
            reachable = set(target.partial) <= set(source.partial) and divides(target, shape, sizes)
            assert (found is not None) == reachable


@pytest.mark.parametrize("sizes", [{"a": 2, "b": 4}, {"a": 2, "b": 2, "c": 4}])
def test_walks_to_all_specs_are_priced_as_their_steps(sizes: dict[str, int]) -> None:
    shape, names = (8, 6, 4), tuple(sizes)
    graph = SpecGraph(shape, sizes)

    def price(step: Move) -> float:
        return {"slice": 0.0, "all_gather": 3.0, "all_to_all": 5.0}.get(step.kind, 7.0) * sizes[step.axes[0]]

    summed = Walks(graph, Spec(((), names[1:], ()), names[:1]), prod(shape) * 4)
    walks = Walks(graph, Spec(((names[0],), (), ())), prod(shape) * 4)
    specs = all_specs(shape, sizes, partial=True)
    numbers = [graph.number(spec) for spec in specs]
    for found in (summed, walks):
        seconds = found.seconds(price)
        for spec, number in zip(specs, numbers, strict=True):
            steps = found.to(spec)
            assert seconds[number] == (sum(map(price, steps)) if steps is not None else np.inf)
