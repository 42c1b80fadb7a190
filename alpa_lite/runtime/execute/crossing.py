"""Move blocks of an array from the devices of one sharding to those of another, piece by piece.

    cut     on the source mesh: copies the pieces to send out of the blocks                       `_cut`
    copy    all pieces at once, each from its device to another of this process                   `Crossing.copy`
            those that go to another process by one program over all devices that take part      `exchange`
    land    on the receiving mesh: assembles the pieces into one chunk per device                 `_land`

A process without a device of a mesh launches nothing there. No data passes through the host. The programs are compiled
ahead of time, one for all devices of a mesh: a slot is a shape of which every device has at most one piece, and tables
hold the offsets (`_slots`). Blocks that are sent whole need no cut, and pieces that are the receivers' blocks no land.

The pieces of a plan's transfers are planned and priced. Those of arrays that the caller has placed in other shardings
than the plan's are computed here (`relocation`):

    boxes    the block of each device in the source and in the target sharding                 `_boxes`
    pieces   their intersections; a piece comes from the nearest device that has it            `course_between`
    windows  instead of all rows, several runs of equally many rows, one after the other: each device gets its share of
             every run, so that a run can then be sliced without communication                 `Windows`
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from numpy.typing import NDArray

from alpa_lite import _jax
from alpa_lite._jax import Device
from alpa_lite.runtime.execute.exchange import Blanks, Exchange, Sent, joined, stacked, stacked_spec, token
from alpa_lite.runtime.job.in_flight import Token
from alpa_lite.runtime.job.launch_order import in_turn
from alpa_lite.runtime.job.processes import devices_of, is_here
from alpa_lite.sharding.transfer import Box

Local = Callable[[jax.Array], jax.Array]
"""A function of a device's block, inside the program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A number of bytes sent from one device to another."""

    source: Device
    target: Device
    bytes: int


class LaunchObserver(Protocol):
    """A callback that receives the token of each launched program, and on which of the two meshes it runs."""

    def __call__(self, token: Token, *, at_source: bool) -> None:
        """Observe the launch of a program."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Hand:
    """A piece: the positions of its two devices in their meshes, its shape, and its start in the block of its source
    and in the chunk of its target.
    """

    source: int
    target: int
    shape: tuple[int, ...]
    start: tuple[int, ...]
    landing: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Course:
    """The pieces to send, and the local functions before and after.

    array    shape, dtype and sharding on the source mesh
    held     shape of the blocks out of which pieces are cut; `resolve` makes them from the array's if they differ
    chunk    shape of the assembled pieces; `gather` makes a block of the result from it if they differ
    shape    of the result, whose sharding is `wanted`
    """

    array: jax.ShapeDtypeStruct
    hands: tuple[Hand, ...]
    held: tuple[int, ...]
    chunk: tuple[int, ...]
    shape: tuple[int, ...]
    wanted: NamedSharding
    resolve: Local | None = None
    gather: Local | None = None

    @property
    def source(self) -> NamedSharding:
        """The sharding of the source array."""
        sharding = self.array.sharding
        assert isinstance(sharding, NamedSharding)
        return sharding


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceSlot:
    """Pieces of one shape, at most one per device: their numbers by device (-1: none), and offsets [devices, dims]."""

    shape: tuple[int, ...]
    numbers: tuple[int, ...]
    offsets: NDArray[np.int32]

    @property
    def is_full(self) -> bool:
        """Whether every device has a piece."""
        return -1 not in self.numbers


class Crossing:
    """A course with its compiled programs: call it with the array in its source sharding."""

    def __init__(self, course: Course, blanks: Blanks) -> None:
        """Compile the programs in which this process takes part."""
        hands, self.course = course.hands, course
        self.source, self.target = devices_of(course.source.mesh), devices_of(course.wanted.mesh)
        self.here = [at for at, device in enumerate(self.source) if is_here(device)]
        self.landing_here = [at for at, device in enumerate(self.target) if is_here(device)]
        # A piece that is the block itself is sent as it is, without a program that copies it.
        self.whole = [
            n for n, h in enumerate(hands) if h.shape == course.held and not any(h.start) and course.resolve is None
        ]
        others = sorted({*range(len(hands))} - {*self.whole})
        self.cut_slots = _slots([(n, hands[n].source, hands[n].start) for n in others], hands, len(self.source))
        self.land_slots = _slots([(n, h.target, h.landing) for n, h in enumerate(hands)], hands, len(self.target))
        ends = [(self.source[h.source], self.target[h.target]) for h in hands]
        # Pieces for other processes go through the exchange below, and those that stay need no copy.
        self.copied = [n for n, (a, b) in enumerate(ends) if a != b and is_here(a) and is_here(b)]
        self.copy = _jax.copying_to([SingleDeviceSharding(ends[n][1]) for n in self.copied])
        self.cut = compiled(_cut(course, self.cut_slots), [course.array]) if others and self.here else None
        self._compile_landing(blanks)
        dtype = course.array.dtype
        # Between processes only, where nothing but a collective can send.
        sent = [
            Sent(number=n, shape=hands[n].shape, source=a, target=b)
            for n, (a, b) in enumerate(ends)
            if a.process_index != b.process_index
        ]
        self._launch_cut = None if self.cut is None else in_turn(self.cut, self.source)
        self._launch_land = None if self.land is None else in_turn(self.land, self.target)
        found = Exchange(sent, dtype, blanks) if sent else None
        self.exchange = found if found is not None and found.is_here else None

    def _compile_landing(self, blanks: Blanks) -> None:
        course, mesh = self.course, self.course.wanted.mesh
        self.landing = [stacked(mesh, slot.shape, course.array.dtype) for slot in self.land_slots]
        needed = bool(self.landing_here) and not self._lands_as_wanted()
        landing = _land(course, self.land_slots)
        self.land = compiled(landing, self.landing, course.wanted) if needed else None
        self.blanks = [
            {
                at: blanks.get(slot.shape, course.array.dtype, self.target[at])
                for at in self.landing_here
                if needed and slot.numbers[at] < 0
            }
            for slot in self.land_slots
        ]

    def _lands_as_wanted(self) -> bool:
        slots, course = self.land_slots, self.course
        return (
            course.gather is None
            and len(slots) == 1
            and slots[0].is_full
            and slots[0].shape == course.chunk
            and not slots[0].offsets.any()
        )

    @property
    def copies(self) -> bool:
        """Whether the result shares no buffer with the source array."""
        stays = (self.source[h.source] == self.target[h.target] for h in map(self.course.hands.__getitem__, self.whole))
        return self.land is not None or not any(stays)

    @property
    def num_programs(self) -> int:
        """The number of programs that a call launches from this process."""
        return (self.cut is not None) + (self.exchange is not None) + (self.land is not None)

    def __call__(self, array: Any, sent: list[Message] | None = None, launched: LaunchObserver | None = None) -> Any:
        """Return the array in its target sharding; None on processes without its devices, which may pass any value."""
        note = launched if launched is not None else _ignore
        pieces = self._pieces(array, note) if self.here else {}
        leaving = [pieces[n] for n in self.copied]
        exchanged: dict[int, jax.Array] = {}
        if self.exchange is not None:
            # One program over both meshes: it counts as a launch on each of them.
            exchanged, done = self.exchange(pieces)
            note(done, at_source=True)
            note(done, at_source=False)
        if sent is not None:
            self._tell(sent, leaving)
        pieces.update(zip(self.copied, self.copy(leaving), strict=True))
        return self._landed({**pieces, **exchanged}, note) if self.landing_here else None

    def _landed(self, pieces: dict[int, jax.Array], note: LaunchObserver) -> jax.Array:
        if self._launch_land is None:
            (slot,) = self.land_slots
            # The pieces are the blocks of the result, so no program has to assemble them.
            like = jax.ShapeDtypeStruct(self.course.shape, self.course.array.dtype, sharding=self.course.wanted)
            return joined(like, [pieces[slot.numbers[at]] for at in self.landing_here])
        parts: list[jax.Array] = []
        for slot, blanks, like in zip(self.land_slots, self.blanks, self.landing, strict=True):
            shown = [blanks[at] if slot.numbers[at] < 0 else pieces[slot.numbers[at]] for at in self.landing_here]
            parts.append(joined(like, shown))
        landed, done = self._launch_land(*parts)
        note(done, at_source=False)
        return landed

    def _pieces(self, array: jax.Array, note: LaunchObserver) -> dict[int, jax.Array]:
        """Return each piece of this process on its source device."""
        found = dict[int, jax.Array]()
        if self.whole:
            blocks = dict(zip(self.here, _jax.blocks(array), strict=True))
            found = {n: blocks[at] for n in self.whole if (at := self.course.hands[n].source) in blocks}
        if self._launch_cut is not None:
            *cut, done = self._launch_cut(array)
            note(done, at_source=True)
            for slot, made in zip(self.cut_slots, cut, strict=True):
                blocks = zip(self.here, _jax.blocks(made), strict=True)
                found.update({slot.numbers[at]: block for at, block in blocks if slot.numbers[at] >= 0})
        return found

    def _tell(self, sent: list[Message], leaving: Sequence[jax.Array]) -> None:
        for n, piece in zip(self.copied, leaving, strict=True):
            hand = self.course.hands[n]
            source, target = self.source[hand.source], self.target[hand.target]
            sent.append(Message(source=source, target=target, bytes=piece.nbytes))


def _ignore(token: Token, *, at_source: bool) -> None:
    del token, at_source


def compiled(function: Callable[..., Any], avals: Sequence[Any], wanted: NamedSharding | None = None) -> Any:
    """Compile a function that also returns a token; `wanted`: sharding of its result, which JAX may drop for empty
    arrays.
    """
    shardings = None if wanted is None else (wanted, NamedSharding(wanted.mesh, PartitionSpec()))
    return _jax.compiled(jax.jit(function, out_shardings=shardings).lower(*avals))


def _slots(pieces: Sequence[tuple[int, int, tuple[int, ...]]], hands: Sequence[Hand], count: int) -> list[PieceSlot]:
    """Group pieces, given as (number, device position, offset), by their shape and the count of that shape on their
    device.

    `count`: number of devices.
    """
    seen = Counter[tuple[int, tuple[int, ...]]]()
    places: dict[tuple[tuple[int, ...], int], dict[int, tuple[int, tuple[int, ...]]]] = {}
    for number, at, offset in pieces:
        shape = hands[number].shape
        places.setdefault((shape, seen[at, shape]), {})[at] = number, offset
        # A device with several pieces of one shape has the next one in the next slot.
        seen[at, shape] += 1
    slots: list[PieceSlot] = []
    for (shape, _), found in places.items():
        offsets = np.zeros((count, len(shape)), np.int32)
        for at, (_, offset) in found.items():
            offsets[at] = offset
        numbers = tuple(found[at][0] if at in found else -1 for at in range(count))
        slots.append(PieceSlot(shape=shape, numbers=numbers, offsets=offsets))
    return slots


def _cut(course: Course, slots: Sequence[PieceSlot]) -> Callable[..., Any]:
    """Return a function that gives one array per slot, with the piece of each device; a device without one gives any
    part.
    """
    mesh = course.source.mesh

    def cut(x: jax.Array) -> Any:
        at = lax.axis_index(mesh.axis_names)
        x = x if course.resolve is None else course.resolve(x)
        cuts = [lax.dynamic_slice(x, tuple(jnp.asarray(slot.offsets)[at]), slot.shape) for slot in slots]
        return (*cuts, token())

    # Without the check of replication: tokens, and scalars that differ by device, are declared replicated.
    out_specs = (*(stacked_spec(mesh, slot.shape) for slot in slots), PartitionSpec())
    return jax.shard_map(cut, mesh=mesh, in_specs=course.source.spec, out_specs=out_specs, check_vma=False)


def _land(course: Course, slots: Sequence[PieceSlot]) -> Callable[..., Any]:
    """Return a function that assembles the pieces of each device and gathers them, dropping the gather's padding."""
    mesh, chunk, dtype = course.wanted.mesh, course.chunk, course.array.dtype
    whole = len(slots) == 1 and slots[0].is_full and slots[0].shape == chunk

    def land(*parts: jax.Array) -> Any:
        at = lax.axis_index(mesh.axis_names)
        x = parts[0] if whole else jnp.zeros(chunk, dtype)
        for slot, part in zip(slots, () if whole else parts, strict=False):
            placed = lax.dynamic_update_slice(x, part, tuple(jnp.asarray(slot.offsets)[at]))
            # One program runs on all devices: one without a piece in this slot was given a blank, which is dropped.
            present = np.array(slot.numbers) >= 0
            x = placed if slot.is_full else jnp.where(jnp.asarray(present)[at], placed, x)
        return x if course.gather is None else course.gather(x), token()

    in_specs = tuple(stacked_spec(mesh, slot.shape) for slot in slots)
    out_specs = (course.wanted.spec, PartitionSpec())
    return jax.shard_map(land, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Runs of rows along a dim: `count` runs of `size` rows, the first from row `start`."""

    dim: int
    start: int
    size: int
    count: int


def relocation(array: jax.ShapeDtypeStruct, wanted: NamedSharding, windows: Windows | None, blanks: Blanks) -> Crossing:
    """Compile a relocation. Collective: all processes that take part must call this. `array` carries its sharding."""
    return Crossing(course_between(array, wanted, windows), blanks)


def course_between(array: jax.ShapeDtypeStruct, wanted: NamedSharding, windows: Windows | None = None) -> Course:
    """Return the pieces between two shardings. With windows the result has `count * size` rows along their dim."""
    source = array.sharding
    assert isinstance(source, NamedSharding)
    here, there = devices_of(source.mesh), devices_of(wanted.mesh)
    held, shape = _boxes(source, array.shape), array.shape
    runs = [0]
    if windows is not None:
        shape = _with_rows(shape, windows.dim, windows.size)
        runs = [windows.start + i * windows.size for i in range(windows.count)]
    landed = _boxes(wanted, shape)
    senders = _PieceSenders(held, here)
    hands: list[Hand] = []
    for target, box in enumerate(landed):
        for number, first in enumerate(runs):
            moved = box if windows is None else _shifted(box, windows.dim, first)
            # In the chunk of a device its shares of the runs lie one after the other.
            shift = tuple(number * (b - a) if windows and d == windows.dim else 0 for d, (a, b) in enumerate(box))
            for owned, part in senders.overlaps(moved):
                landing = [a - first + by for (a, _), (first, _), by in zip(part, moved, shift, strict=True)]
                hands.append(
                    Hand(
                        source=senders.choose(owned, part, there[target]),
                        target=target,
                        shape=_size(part),
                        start=tuple(a - first for (a, _), (first, _) in zip(part, owned, strict=True)),
                        landing=tuple(landing),
                    )
                )
    count = 1 if windows is None else windows.count
    rows = {} if windows is None else {windows.dim: count}
    chunk = tuple(n * rows.get(d, 1) for d, n in enumerate(_size(landed[0])))
    whole = tuple(n * rows.get(d, 1) for d, n in enumerate(shape))
    return Course(array=array, hands=tuple(hands), held=_size(held[0]), chunk=chunk, shape=whole, wanted=wanted)


def on_plain_mesh(sharding: NamedSharding) -> NamedSharding:
    """Return the sharding on a mesh whose axes have no types, which programs on local blocks need."""
    mesh = sharding.mesh
    assert isinstance(mesh, Mesh)
    return NamedSharding(Mesh(mesh.devices, mesh.axis_names), sharding.spec)


class _PieceSenders:
    """Which devices hold each box, and how many bytes each sends."""

    def __init__(self, held: Sequence[Box], devices: Sequence[Device]) -> None:
        self.devices, self.sent = devices, Counter[int]()
        self.holders: dict[Box, list[int]] = {}
        for place, box in enumerate(held):
            self.holders.setdefault(box, []).append(place)

    def overlaps(self, wanted: Box) -> list[tuple[Box, Box]]:
        """Return the distinct boxes that overlap `wanted`, each with the intersection."""
        found: list[tuple[Box, Box]] = []
        for owned in self.holders:
            part = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(wanted, owned, strict=True))
            if all(a < b for a, b in part):
                found.append((owned, part))
        return found

    def choose(self, owned: Box, part: Box, receiver: Device) -> int:
        """Return the sender: the receiver itself, a device of its process, or the device that has sent the fewest
        bytes.
        """

        def cost(place: int) -> tuple[bool, bool, int, int]:
            device = self.devices[place]
            # The place comes last, so that all processes choose the same among equals.
            return device != receiver, device.process_index != receiver.process_index, self.sent[place], place

        place = min(self.holders[owned], key=cost)
        if self.devices[place] != receiver:
            self.sent[place] += prod(_size(part))
        return place


def _boxes(sharding: NamedSharding, shape: tuple[int, ...]) -> list[Box]:
    """Return the box of each device, in the order of the mesh."""
    indices = sharding.devices_indices_map(shape)
    return [
        tuple((part.start or 0, n if part.stop is None else part.stop) for part, n in zip(index, shape, strict=True))
        for index in (indices[device] for device in devices_of(sharding.mesh))
    ]


def _size(box: Box) -> tuple[int, ...]:
    return tuple(b - a for a, b in box)


def _shifted(box: Box, dim: int, by: int) -> Box:
    return tuple((a + by, b + by) if d == dim else (a, b) for d, (a, b) in enumerate(box))


def _with_rows(shape: tuple[int, ...], dim: int, rows: int) -> tuple[int, ...]:
    return tuple(rows if d == dim else n for d, n in enumerate(shape))
