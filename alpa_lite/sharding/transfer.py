"""An array from one submesh to another: who sends which box to whom, and what the receivers gather among themselves.

What several receivers want is sent to them in parts, a different one to each, and gathered inside the receiving mesh,
so that every element crosses between the submeshes once, whatever the specs and the numbers of devices.

    block(i)   = the part of the array that device i has in a spec                          `blocks`
    chunk(i)   = of the c receivers of a block, the k-th gets part k, ceil(size / c) long   `blocks`, `_spread`
    pieces     = { block(s) ∩ chunk(t) : sources s, targets t }; of equal blocks one sends  `_BoxSenders`
    sent bytes = Σ over pieces between different devices of item bytes · Π (stop - start)   `PlannedTransfer.sent_bytes`
               = the bytes of the array, less those that are where they belong, if copies are spread
    gathered   = a block per receiver, times c · ceil(size / c) / size                      `_gathers`

The sender of a piece is its receiver if that has it, else a device on its host, else the one that has sent least so
far, hosts before devices. Where copies that are sent device by device take at most `DIRECT_BYTES` more, they are sent
so and nothing is gathered: so many bytes cross a network in about the time that launching a program takes. A partial
sum is resolved before it is sent. Between equal meshes on the same devices a walk of collectives moves the array
(`walks.reshard`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod

from alpa_lite.errors import PlanError
from alpa_lite.sharding.meshes import LogicalMesh, Submesh
from alpa_lite.sharding.reshard import reshard
from alpa_lite.sharding.specs import Move, Spec, divides, local_shape, moves

Box = tuple[tuple[int, int], ...]
"""Start and stop along each dim."""

DIRECT_BYTES = 1 << 16
"""Copies may be sent, rather than gathered by their receivers, for so many bytes more: 5 µs at 100 Gbit/s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where an array is: the devices, the mesh over them, and its spec there."""

    submesh: Submesh
    mesh: LogicalMesh
    spec: Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A box of the array that one device hands to another; both by their place in the row-major order of their mesh."""

    source: int
    target: int
    box: Box

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the box."""
        return tuple(stop - start for start, stop in self.box)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTransfer:
    """How an array gets from one layout to another.

    resolve     steps inside the source mesh before anything is sent: partial sums; the whole walk if it is `in_place`
    pieces      what is handed from device to device
    spread      per dim, the axes of the receiving mesh along which receivers of one block get parts of it at first
    gathers     steps inside the receiving mesh, which put those parts together: one all_gather per dim
    in_place    both meshes are the same, on the same devices: there are no pieces
    """

    shape: tuple[int, ...]
    item_bytes: int
    source: Placement
    target: Placement
    resolve: tuple[Move, ...] = ()
    pieces: tuple[Piece, ...] = ()
    spread: tuple[tuple[str, ...], ...] = ()
    gathers: tuple[Move, ...] = ()
    in_place: bool = False

    @property
    def array_bytes(self) -> int:
        """Size of the whole array."""
        return prod(self.shape) * self.item_bytes

    @property
    def is_trivial(self) -> bool:
        """True when nothing is done: every device has what it gets."""
        return not (self.resolve or self.gathers or self.bytes_between)

    @property
    def sent_spec(self) -> Spec:
        """The spec on the source mesh in which the array is sent."""
        return self.resolve[-1].spec if self.resolve else self.source.spec

    @property
    def sent_bytes(self) -> int:
        """Bytes that are handed to another device; not what is resolved and gathered inside the meshes."""
        return sum(self.bytes_between.values())

    @property
    def bytes_between(self) -> Counter[tuple[int, int]]:
        """Bytes by (sending, receiving) device of the cluster, of different devices."""
        sources, targets = self.source.submesh.devices, self.target.submesh.devices
        found = Counter[tuple[int, int]]()
        for piece in self.pieces:
            if sources[piece.source] != targets[piece.target]:
                found[sources[piece.source], targets[piece.target]] += self.item_bytes * prod(piece.shape)
        return found

    def source_blocks(self) -> tuple[Box, ...]:
        """What each device of the source mesh has when the array is sent."""
        return blocks(self.shape, self.source.mesh, self.sent_spec)

    def landing_blocks(self) -> tuple[Box, ...]:
        """What each device of the receiving mesh gets before anything is gathered."""
        return blocks(self.shape, self.target.mesh, self.target.spec, self.spread)

    def __str__(self) -> str:
        sent = f"{self.source.spec} -> {self.target.spec}: {self.sent_bytes} of {self.array_bytes} bytes sent"
        steps = [f"{step.kind} over {'·'.join(step.axes)}" for step in (*self.resolve, *self.gathers)]
        return ", ".join([f"{sent} in {len(self.pieces)} pieces", *steps])


@lru_cache(maxsize=4096)
def plan_transfer(
    shape: tuple[int, ...],
    item_bytes: int,
    source: Placement,
    target: Placement,
    *,
    devices_per_host: int,
    direct_bytes: float = DIRECT_BYTES,
) -> PlannedTransfer:
    """The transfer of an array between two layouts, whose submeshes may overlap.

    Args:
        shape: of the whole array.
        item_bytes: per element.
        source: may have a partial sum, which is resolved first.
        target: none.
        devices_per_host: of the cluster; senders on the receiver's host are preferred.
        direct_bytes: copies are sent, rather than gathered, for so many bytes more.

    Raises:
        PlanError: a dim is not a multiple of the devices that split it, or the target is a partial sum.
    """
    for layout in (source, target):
        _check(shape, layout)
    same = (source.submesh, source.mesh) == (target.submesh, target.mesh)
    steps = reshard(source.spec, target.spec, shape, source.mesh.axis_sizes, item_bytes) if same else None
    if steps is not None:
        return PlannedTransfer(
            shape=shape, item_bytes=item_bytes, source=source, target=target, resolve=steps, in_place=True
        )
    if target.spec.partial:
        raise PlanError(
            f"An array of shape {shape} is to be sent as the partial sum {target.spec}, but only whole values are sent"
            " between submeshes: let the receiving stage read it in a spec without one."
        )
    resolve = _resolution(source, shape)
    senders = _BoxSenders(shape, source, resolve[-1].spec if resolve else source.spec, target.submesh, devices_per_host)
    none = ((),) * len(shape)
    found = senders.pieces(blocks(shape, target.mesh, target.spec))
    spread = _spread(shape, target)
    if spread != none:
        parts = senders.pieces(blocks(shape, target.mesh, target.spec, spread))
        extra = item_bytes * (senders.num_sent(found) - senders.num_sent(parts))
        found, spread = (parts, spread) if extra > direct_bytes else (found, none)
    return PlannedTransfer(
        shape=shape,
        item_bytes=item_bytes,
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
    """The box of each device of a mesh, row-major; `spread` cuts them further, and the last parts may be empty."""
    sizes, extra = mesh.axis_sizes, spread or ((),) * len(shape)
    found: list[Box] = []
    for place in product(*map(range, mesh.shape)):
        at = dict(zip(mesh.axis_names, place, strict=True))
        box: list[tuple[int, int]] = []
        for n, axes, parts in zip(shape, spec.dims, extra, strict=True):
            size = n // prod(sizes[a] for a in axes)
            chunk = _chunk(size, parts, sizes)
            start = min(_number(parts, at, sizes) * chunk, size)
            first = _number(axes, at, sizes) * size
            box.append((first + start, first + min(start + chunk, size)))
        found.append(tuple(box))
    return tuple(found)


def _chunk(size: int, axes: tuple[str, ...], sizes: Mapping[str, int]) -> int:
    return -(-size // prod(sizes[a] for a in axes))


def _number(axes: Sequence[str], at: Mapping[str, int], sizes: Mapping[str, int]) -> int:
    """The number of a device along axes together, the last one fastest."""
    number = 0
    for axis in axes:
        number = number * sizes[axis] + at[axis]
    return number


def _spread(shape: tuple[int, ...], target: Placement) -> tuple[tuple[str, ...], ...]:
    """Along which dim each axis with copies cuts their block: least padding, then fewest dims, then the first ones."""
    sizes = target.mesh.axis_sizes
    block = local_shape(target.spec, shape, sizes)
    axes = [a for a, n in sizes.items() if n > 1 and a not in target.spec.axes]
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
    """One all_gather per dim that is spread; padding is cut off after each."""
    sizes = target.mesh.axis_sizes
    block = local_shape(target.spec, shape, sizes)
    held = [_chunk(n, parts, sizes) for n, parts in zip(block, spread, strict=True)]
    left, steps = list(spread), list[Move]()
    for dim, axes in enumerate(spread):
        if not axes:
            continue
        held[dim] *= prod(sizes[a] for a in axes)
        left[dim] = ()
        dims = tuple((*wanted, *parts) for wanted, parts in zip(target.spec.dims, left, strict=True))
        factor = prod(held) / prod(shape)
        steps.append(Move(kind="all_gather", axes=axes, dim=dim, spec=Spec(dims), bytes_factor=factor))
        held[dim] = block[dim]
    return tuple(steps)


def _resolution(source: Placement, shape: tuple[int, ...]) -> tuple[Move, ...]:
    """The steps that resolve a partial sum: scattered where a dim can be split, which sends half as much."""
    steps, spec, sizes = list[Move](), source.spec, source.mesh.axis_sizes
    for axis in source.spec.partial:
        possible = [step for step in moves(spec, shape, sizes) if step.axes == (axis,)]
        scattered = (step for step in possible if step.kind == "reduce_scatter")
        summed = next(step for step in possible if step.kind == "all_reduce")
        steps.append(next(scattered, summed))
        spec = steps[-1].spec
    return tuple(steps)


class _BoxSenders:
    """Who has what on the source mesh, and chooses who sends it."""

    def __init__(
        self, shape: tuple[int, ...], source: Placement, spec: Spec, target: Submesh, devices_per_host: int
    ) -> None:
        self.devices, self.receivers = source.submesh.devices, target.devices
        self.per_host = devices_per_host
        self.blocks = blocks(shape, source.mesh, spec)
        self.block = local_shape(spec, shape, source.mesh.axis_sizes)
        self.holders: dict[Box, list[int]] = {}
        for place, box in enumerate(self.blocks):
            self.holders.setdefault(box, []).append(place)

    def num_sent(self, pieces: Sequence[Piece]) -> int:
        """Elements that go to another device."""
        return sum(prod(p.shape) for p in pieces if self.devices[p.source] != self.receivers[p.target])

    def pieces(self, wanted: Sequence[Box]) -> tuple[Piece, ...]:
        """The pieces of what each receiver wants, receiver by receiver."""
        if self._are_counterparts(wanted):
            return tuple(Piece(source=i, target=i, box=box) for i, box in enumerate(wanted) if _size(box))
        parts = [(target, box, held) for target, whole in enumerate(wanted) for held, box in self._overlaps(whole)]
        sent, found = Counter[object](), list[Piece]()
        for target, box, held in sorted(parts, key=lambda part: -_size(part[1])):
            found.append(Piece(source=self._sender(target, held, _size(box), sent), target=target, box=box))
        return tuple(sorted(found, key=lambda piece: (piece.target, piece.box)))

    def _are_counterparts(self, wanted: Sequence[Box]) -> bool:
        """True when each receiver finds what it wants with the sender of the same number, elsewhere: all send alike."""
        if len(wanted) != len(self.blocks) or set(self.devices) & set(self.receivers):
            return False
        return all(
            not _size(box) or all(a <= start and stop <= b for (start, stop), (a, b) in zip(box, block, strict=True))
            for box, block in zip(wanted, self.blocks, strict=True)
        )

    def _overlaps(self, wanted: Box) -> list[tuple[Box, Box]]:
        """The blocks that a box reaches into, each with their common part."""
        if not _size(wanted):
            return []
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
            distance = (place - target) % len(self.devices)
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
