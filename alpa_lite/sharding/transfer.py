"""Transfers of an array between submeshes: the boxes that devices send, and the all-gathers among the receivers.

A block that several receivers need is sent to them in parts, a different part to each, and gathered inside the
receiving mesh. Every element thus crosses between the submeshes once, for any specs and numbers of devices.

    block(i)   = the box of the array that device i holds under a spec                      `blocks`
    chunk(i)   = of the c receivers of a block, the k-th gets part k, ceil(size / c) long   `blocks`, `_spread`
    pieces     = { block(s) ∩ chunk(t) : sources s, targets t }; of equal blocks one sends  `_BoxSenders`
    sent bytes = Σ over pieces between different devices of item bytes · Π (stop - start)   `PlannedTransfer.sent_bytes`
               = the bytes of the array without those already on their receiver, if copies are spread
    gathered   = a block per receiver, times c · ceil(size / c) / size                      `_gathers`

The sender of a piece is the receiver itself if it holds the piece, else a device on the receiver's host, else the
device with the least traffic so far, compared first by host and then by device. If sending every copy directly takes at
most `DIRECT_BYTES` more, nothing is gathered: launching the program of a gather takes about as long as sending this
many bytes. A partial sum is resolved before it is sent. Between equal meshes on the same devices, the array is
resharded by collectives (`sharding.reshard.reshard`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import prod

from alpa_lite.errors import PlanError
from alpa_lite.program.memo import memoized
from alpa_lite.sharding.meshes import LogicalMesh, Submesh
from alpa_lite.sharding.reshard import reshard
from alpa_lite.sharding.specs import Move, MoveKind, Spec, divides, local_shape, moves

Box = tuple[tuple[int, int], ...]
"""A rectangular part of an array: (start, stop) along each dim."""

DIRECT_BYTES = 1 << 16
"""The additional bytes up to which copies are sent directly rather than gathered: about 5 µs at 100 Gbit/s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The location of an array: a submesh, the logical mesh over its devices, and the spec on this mesh."""

    submesh: Submesh
    mesh: LogicalMesh
    spec: Spec

    def shifted(self, offset: int) -> Placement:
        """Return the same placement on devices whose ids are larger by `offset`."""
        return replace(self, submesh=replace(self.submesh, first_device=self.submesh.first_device + offset))


@dataclass(frozen=True, slots=True)
class ArrayForm:
    """The shape of a whole array, and the bytes of one of its elements."""

    shape: tuple[int, ...]
    item_bytes: int

    @property
    def bytes(self) -> int:
        """Size of the whole array."""
        return prod(self.shape) * self.item_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A box that one device sends to another; devices are numbered in the row-major order of their own mesh."""

    source: int
    target: int
    box: Box

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the box."""
        return tuple(stop - start for start, stop in self.box)


@dataclass(frozen=True, kw_only=True)
class PlannedTransfer:
    """The planned transfer of an array from one placement to another.

    array       form of the array
    source      its current placement
    target      the placement to reach
    resolve     moves on the source mesh before anything is sent: these resolve partial sums, or are the whole
                resharding if it is `in_place`
    pieces      the boxes that are sent from device to device
    spread      per dim, the axes of the receiving mesh along which the receivers of one block first get parts of it
    gathers     moves on the receiving mesh that assemble these parts: one all_gather per dim
    in_place    both placements have the same mesh on the same devices, so that there are no pieces
    """

    array: ArrayForm
    source: Placement
    target: Placement
    resolve: tuple[Move, ...] = ()
    pieces: tuple[Piece, ...] = ()
    spread: tuple[tuple[str, ...], ...] = ()
    gathers: tuple[Move, ...] = ()
    in_place: bool = False

    @property
    def is_trivial(self) -> bool:
        """True if there is nothing to do, because every receiver already holds its block."""
        return not (self.resolve or self.gathers or self.bytes_between)

    @property
    def sent_spec(self) -> Spec:
        """The spec on the source mesh after `resolve`, from which the pieces are sent."""
        return self.resolve[-1].spec if self.resolve else self.source.spec

    # Each micro-batch asks again, and there may be many thousand pieces.
    @cached_property
    def sent_bytes(self) -> int:
        """Bytes that are sent to another device, without the moves inside the two meshes."""
        return sum(self.bytes_between.values())

    @cached_property
    def bytes_between(self) -> Counter[tuple[int, int]]:
        """Bytes sent by (source, target) device id of the cluster, for pairs of different devices."""
        sources, targets = self.source.submesh.devices, self.target.submesh.devices
        found = Counter[tuple[int, int]]()
        for piece in self.pieces:
            if sources[piece.source] != targets[piece.target]:
                found[sources[piece.source], targets[piece.target]] += self.array.item_bytes * prod(piece.shape)
        return found

    def source_blocks(self) -> tuple[Box, ...]:
        """Return the box that each device of the source mesh holds when the array is sent."""
        return blocks(self.array.shape, self.source.mesh, self.sent_spec)

    def landing_blocks(self) -> tuple[Box, ...]:
        """Return the box that each device of the receiving mesh receives, before the gathers."""
        return blocks(self.array.shape, self.target.mesh, self.target.spec, self.spread)

    def __str__(self) -> str:
        sent = f"{self.source.spec} -> {self.target.spec}: {self.sent_bytes} of {self.array.bytes} bytes sent"
        steps = [f"{step.kind} over {'·'.join(step.axes)}" for step in (*self.resolve, *self.gathers)]
        return ", ".join([f"{sent} in {len(self.pieces)} pieces", *steps])


# Each micro-batch sends the same arrays between the same stages.
@memoized(entries=4096)
def plan_transfer(
    array: ArrayForm,
    source: Placement,
    target: Placement,
    *,
    devices_per_host: int,
    direct_bytes: float = DIRECT_BYTES,
) -> PlannedTransfer:
    """Plan the transfer of an array between two placements, whose submeshes may overlap.

    Args:
        array: form of the array.
        source: current placement; a partial sum is resolved before the array is sent.
        target: placement to reach; a partial sum is allowed only if the mesh and its devices do not change.
        devices_per_host: devices per host of the cluster; senders on the receiver's host are preferred.
        direct_bytes: additional bytes up to which copies are sent directly rather than gathered.

    Raises:
        PlanError: a spec does not fit the shape, a mesh does not fit its submesh, or the target is a partial sum that
            cannot be reached.
    """
    # Only whether devices share a host matters, so that equal stages further down a pipeline exchange the same pieces.
    skipped = min(source.submesh.first_device, target.submesh.first_device) // devices_per_host * devices_per_host
    if skipped:
        first, second = source.shifted(-skipped), target.shifted(-skipped)
        alike = plan_transfer(array, first, second, devices_per_host=devices_per_host, direct_bytes=direct_bytes)
        return replace(alike, source=source, target=target)
    shape = array.shape
    # Plans may be written by hand, and a wrong spec must not become a wrong transfer.
    for layout in (source, target):
        _check(shape, layout)
    # On equal meshes collectives move the array, which are faster than separate sends between all pairs.
    same = (source.submesh, source.mesh) == (target.submesh, target.mesh)
    # No steps also if the target is a partial sum that no move leads to; this is refused below.
    steps = reshard(source.spec, target.spec, shape, source.mesh.axis_sizes, array.item_bytes) if same else None
    if steps is not None:
        return PlannedTransfer(array=array, source=source, target=target, resolve=steps, in_place=True)
    if target.spec.partial:
        raise PlanError(
            f"An array of shape {shape} is to be sent as the partial sum {target.spec}, but only whole values are sent"
            " between submeshes: let the receiving stage read it in a spec without one."
        )
    # Sending all addends would send a multiple of the array, and the receivers would have to add them.
    resolve = _resolution(source, shape)
    senders = _BoxSenders(shape, source, resolve[-1].spec if resolve else source.spec, target.submesh, devices_per_host)
    none = ((),) * len(shape)
    found = senders.pieces(blocks(shape, target.mesh, target.spec))
    spread = _spread(shape, target)
    if spread != none:
        parts = senders.pieces(blocks(shape, target.mesh, target.spec, spread))
        extra = array.item_bytes * (senders.num_sent(found) - senders.num_sent(parts))
        found, spread = (parts, spread) if extra > direct_bytes else (found, none)
    return PlannedTransfer(
        array=array,
        source=source,
        target=target,
        resolve=resolve,
        pieces=found,
        spread=spread,
        gathers=_gathers(shape, target, spread),
    )


def _check(shape: tuple[int, ...], layout: Placement) -> None:
    sizes = layout.mesh.axis_sizes
    if len(layout.spec.dims) != len(shape) or not divides(layout.spec, shape, sizes):
        raise PlanError(
            f"An array of shape {shape} cannot have the spec {layout.spec} on the mesh {layout.mesh}: it needs one"
            " entry per dim, and dims that are multiples of the devices that split them."
        )
    if layout.mesh.num_devices != layout.submesh.num_devices:
        raise PlanError(
            f"The mesh {layout.mesh} has {layout.mesh.num_devices} devices, but its submesh has"
            f" {layout.submesh.num_devices}: the sizes of its axes must multiply to that number."
        )


def blocks(
    shape: Sequence[int], mesh: LogicalMesh, spec: Spec, spread: Sequence[tuple[str, ...]] = ()
) -> tuple[Box, ...]:
    """Return the box of each device of a mesh, in row-major order.

    `spread` splits the boxes further by mesh axes per dim. Sizes are rounded up, so that the last parts may be empty.
    """
    sizes, extra = mesh.axis_sizes, spread or ((),) * len(shape)
    found: list[Box] = []
    for place in product(*map(range, mesh.shape)):
        at = dict(zip(mesh.axis_names, place, strict=True))
        box: list[tuple[int, int]] = []
        for n, axes, parts in zip(shape, spec.dims, extra, strict=True):
            size = n // prod(sizes[a] for a in axes)
            # Rounded up, since all shards of a JAX array have one shape; the last chunk is then shorter, or empty.
            chunk = _chunk(size, parts, sizes)
            start = min(_number(parts, at, sizes) * chunk, size)
            first = _number(axes, at, sizes) * size
            box.append((first + start, first + min(start + chunk, size)))
        found.append(tuple(box))
    return tuple(found)


def _chunk(size: int, axes: tuple[str, ...], sizes: Mapping[str, int]) -> int:
    return -(-size // prod(sizes[a] for a in axes))


def _number(axes: Sequence[str], at: Mapping[str, int], sizes: Mapping[str, int]) -> int:
    """Return the index of a device along several axes together, the last axis fastest."""
    number = 0
    for axis in axes:
        number = number * sizes[axis] + at[axis]
    return number


def _spread(shape: tuple[int, ...], target: Placement) -> tuple[tuple[str, ...], ...]:
    """Return per dim the mesh axes along which the copies of a block are spread over their receivers.

    Every axis along which the target is replicated splits one dim of the block. The choice has the least padding, then
    the fewest dims, then the first ones. All assignments are enumerated, since meshes have few axes.
    """
    sizes = target.mesh.axis_sizes
    block = local_shape(target.spec, shape, sizes)
    axes = [a for a, n in sizes.items() if n > 1 and a not in target.spec.axes]
    # A scalar has no dim to split, and of an empty block there is nothing to send.
    if not axes or not prod(block) or not block:
        return ((),) * len(shape)

    def arranged(dims: Sequence[int]) -> tuple[tuple[str, ...], ...]:
        return tuple(tuple(a for a, d in zip(axes, dims, strict=True) if d == dim) for dim in range(len(block)))

    def cost(dims: Sequence[int]) -> tuple[int, int, Sequence[int]]:
        chunks = zip(block, arranged(dims), strict=True)
        padded = prod(_chunk(n, parts, sizes) * prod(sizes[a] for a in parts) for n, parts in chunks)
        return padded, len(set(dims)), dims

    return arranged(min(product(range(len(block)), repeat=len(axes)), key=cost))


def _gathers(shape: tuple[int, ...], target: Placement, spread: Sequence[tuple[str, ...]]) -> tuple[Move, ...]:
    """Return one all_gather per dim that is spread; the padding is removed after each, so that it does not multiply."""
    sizes = target.mesh.axis_sizes
    block = local_shape(target.spec, shape, sizes)
    held = [_chunk(n, parts, sizes) for n, parts in zip(block, spread, strict=True)]
    left, steps = list(spread), list[Move]()
    for dim, axes in enumerate(spread):
        if not axes:
            continue
        held[dim] *= prod(sizes[a] for a in axes)
        left[dim] = ()
        # The axes of the parts are minor: they divide the blocks of the target.
        dims = tuple((*wanted, *parts) for wanted, parts in zip(target.spec.dims, left, strict=True))
        factor = prod(held) / prod(shape)
        steps.append(Move(kind=MoveKind.ALL_GATHER, axes=axes, dim=dim, spec=Spec(dims), bytes_factor=factor))
        held[dim] = block[dim]
    return tuple(steps)


def _resolution(source: Placement, shape: tuple[int, ...]) -> tuple[Move, ...]:
    """Return the moves that resolve a partial sum.

    A reduce_scatter sends half as much as an all_reduce, and is used for every axis that can split a dim.
    """
    steps, spec, sizes = list[Move](), source.spec, source.mesh.axis_sizes
    for axis in source.spec.partial:
        possible = [step for step in moves(spec, shape, sizes) if step.axes == (axis,)]
        scattered = (step for step in possible if step.kind is MoveKind.REDUCE_SCATTER)
        summed = next(step for step in possible if step.kind is MoveKind.ALL_REDUCE)
        steps.append(next(scattered, summed))
        spec = steps[-1].spec
    return tuple(steps)


class _BoxSenders:
    """The holders of each block on the source mesh, and the choice of a sender for each piece."""

    def __init__(
        self, shape: tuple[int, ...], source: Placement, spec: Spec, target: Submesh, devices_per_host: int
    ) -> None:
        self.devices, self.receivers = source.submesh.devices, target.devices
        self.per_host = devices_per_host
        self.blocks = blocks(shape, source.mesh, spec)
        self.block = local_shape(spec, shape, source.mesh.axis_sizes)
        self.holders: dict[Box, list[int]] = {}
        for place, box in enumerate(self.blocks):
            # Devices with copies of a block are the alternatives of `_sender`.
            self.holders.setdefault(box, []).append(place)

    def num_sent(self, pieces: Sequence[Piece]) -> int:
        """Return the number of elements that are sent to another device."""
        return sum(prod(p.shape) for p in pieces if self.devices[p.source] != self.receivers[p.target])

    def pieces(self, wanted: Sequence[Box]) -> tuple[Piece, ...]:
        """Return the pieces that cover the box each receiver needs, sorted by receiver and box."""
        if self._are_counterparts(wanted):
            return tuple(Piece(source=i, target=i, box=box) for i, box in enumerate(wanted) if _size(box))
        # Every part of a box lies in one source block: a piece has one sender, and is one slice of its block.
        parts = [(target, box, held) for target, whole in enumerate(wanted) for held, box in self._overlaps(whole)]
        # Counts elements by device, and by ("host", number) for what leaves a host.
        sent, found = Counter[object](), list[Piece]()
        # Largest first, as in list scheduling: the greedy choice of senders then balances the traffic better.
        for target, box, held in sorted(parts, key=lambda part: -_size(part[1])):
            found.append(Piece(source=self._sender(target, held, _size(box), sent), target=target, box=box))
        return tuple(sorted(found, key=lambda piece: (piece.target, piece.box)))

    def _are_counterparts(self, wanted: Sequence[Box]) -> bool:
        """Return True if each receiver's box is held by the source device of the same index, and no device is shared.

        Sending index to index is then perfectly balanced, and the search for senders can be skipped.
        """
        if len(wanted) != len(self.blocks) or set(self.devices) & set(self.receivers):
            return False
        return all(
            not _size(box) or all(a <= start and stop <= b for (start, stop), (a, b) in zip(box, block, strict=True))
            for box, block in zip(wanted, self.blocks, strict=True)
        )

    def _overlaps(self, wanted: Box) -> list[tuple[Box, Box]]:
        """Return the source blocks that a box intersects, each with the intersection."""
        if not _size(wanted):
            return []
        # The source blocks form a regular grid, so the ones that a box meets follow from its borders.
        ranges = [
            [(k * n, (k + 1) * n) for k in range(start // n, -(-stop // n))]
            for (start, stop), n in zip(wanted, self.block, strict=True)
        ]
        return [
            (held, tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(wanted, held, strict=True)))
            for held in product(*ranges)
        ]

    def _sender(self, target: int, held: Box, size: int, sent: Counter[object]) -> int:
        receiver = self.receivers[target]

        def cost(place: int) -> tuple[int, ...]:
            device = self.devices[place]
            host = device // self.per_host
            away = host != receiver // self.per_host
            # Breaks ties: receivers next to each other take different senders.
            distance = (place - target) % len(self.devices)
            # Compared from left to right: sending nothing beats staying on the host, which beats balanced traffic.
            return device != receiver, away, sent["host", host] if away else 0, sent[device], distance

        place = min(self.holders[held], key=cost)
        device = self.devices[place]
        if device != receiver:
            sent[device] += size
            if device // self.per_host != receiver // self.per_host:
                sent["host", device // self.per_host] += size
        return place


def _size(box: Box) -> int:
    return prod(stop - start for start, stop in box)
