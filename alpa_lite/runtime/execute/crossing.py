"""Move blocks of an array from the devices of one sharding to those of another, piece by piece.

    cut     on the source mesh: copies the pieces to send out of the blocks                       `_cut`
    copy    all pieces at once, each from its device to another of this process                   `Crossing.copy`
            those that go to another process by one program over all devices that take part      `Exchange`
    land    on the receiving mesh: assembles the pieces into one chunk per device                 `_land`

A process without a device of a mesh launches nothing there. No data passes through the host. The programs are compiled
ahead of time, one for all devices of a mesh: a slot is a shape of which every device has at most one piece, and tables
hold the offsets (`_slots`). Blocks that are sent whole need no cut, and pieces that are the receivers' blocks no land.

Pieces between processes (`Exchange`):

    round     pieces of one shape, of which each device sends at most one and receives at most one  `_rounds`
    program   one permute per round, on an array that has a piece of each device along its first dim

A device that sends nothing in a round contributes a blank of that shape, and one that receives nothing gets zeros.
Every process that has one of the devices launches the program, in the same order among all programs that span
processes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jax.typing import DTypeLike
from numpy.typing import NDArray

from alpa_lite import _jax
from alpa_lite._jax import Device
from alpa_lite.runtime.job.activity import Token
from alpa_lite.runtime.job.consensus import meet
from alpa_lite.runtime.job.processes import any_here, devices_of, in_turn, is_here, processes_of

AXIS = "device"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A piece that one device sends to another."""

    number: int
    shape: tuple[int, ...]
    source: Device
    target: Device


class Blanks:
    """A cache of arrays of zeros, one per shape, dtype and device."""

    def __init__(self) -> None:
        """Start with an empty cache."""
        self._made: dict[tuple[tuple[int, ...], object, Device], jax.Array] = {}

    def get(self, shape: tuple[int, ...], dtype: DTypeLike, device: Device) -> jax.Array:
        """Return zeros of a shape on a device of this process."""
        # Shared by all transfers, since no program writes to its blanks.
        key = (shape, jnp.dtype(dtype), device)
        if key not in self._made:
            self._made[key] = jax.device_put(np.zeros(shape, dtype), device)
        return self._made[key]


def token() -> jax.Array:
    """Return a scalar that is ready when its program is done."""
    return jnp.zeros((), jnp.int8)


def stacked_spec(mesh: Mesh | AbstractMesh, shape: Sequence[int]) -> PartitionSpec:
    """Return the spec with a block per device along the first dim; scalars, which may differ, count as replicated."""
    return PartitionSpec(mesh.axis_names) if shape else PartitionSpec()


def stacked(mesh: Mesh | AbstractMesh, shape: tuple[int, ...], dtype: DTypeLike) -> jax.ShapeDtypeStruct:
    """Return an abstract array of one block of a shape per device of a mesh."""
    whole = (mesh.size * shape[0], *shape[1:]) if shape else ()
    return jax.ShapeDtypeStruct(whole, dtype, sharding=NamedSharding(mesh, stacked_spec(mesh, shape)))


def joined(like: jax.ShapeDtypeStruct, blocks: Sequence[jax.Array]) -> jax.Array:
    """Return an array made of the blocks on devices of this process."""
    return jax.make_array_from_single_device_arrays(like.shape, like.sharding, list(blocks), dtype=like.dtype)


class Exchange:
    """An exchange compiled on the processes that take part; call it with the pieces on devices of this process."""

    def __init__(self, pieces: Sequence[Sent], dtype: DTypeLike, blanks: Blanks) -> None:
        """Compile the exchange. Collective: all processes that take part must call this at about the same time."""
        ends = {device for piece in pieces for device in (piece.source, piece.target)}
        # In an order that does not depend on the process, as all of them must build the same program.
        devices = sorted(ends, key=lambda device: (device.process_index, device.id))
        self.is_here = any_here(devices)
        if not self.is_here:
            return
        self.rounds = _rounds(pieces, devices)
        # A mesh of its own, of the devices of both ends: a permute runs over the devices of one mesh.
        mesh = Mesh(np.array(devices), (AXIS,))
        self._avals = [stacked(mesh, each.shape, dtype) for each in self.rounds]
        self._mine = [(at, device) for at, device in enumerate(devices) if is_here(device)]
        self._blanks = [[self._blank(blanks, each, dtype, at, d) for at, d in self._mine] for each in self.rounds]
        specs = tuple(stacked_spec(mesh, each.shape) for each in self.rounds)
        pairs = [each.pairs for each in self.rounds]

        def permute(*arrays: jax.Array) -> tuple[jax.Array, ...]:
            return (*(lax.ppermute(x, AXIS, p) for x, p in zip(arrays, pairs, strict=True)), token())

        program = jax.shard_map(
            permute, mesh=mesh, in_specs=specs, out_specs=(*specs, PartitionSpec()), check_vma=False
        )
        self._permute = in_turn(_jax.compiled(jax.jit(program).lower(*self._avals)), devices)
        together(devices, lambda: self._permute(*map(_zeros, self._avals)))

    def _blank(self, blanks: Blanks, each: _Round, dtype: DTypeLike, at: int, device: Device) -> jax.Array | None:
        return None if at in each.sent else blanks.get(each.shape, dtype, device)

    def __call__(self, pieces: Mapping[int, jax.Array]) -> tuple[dict[int, jax.Array], Token]:
        """Send `pieces`; return the pieces that devices of this process receive, by number, and the token."""
        arrays: list[jax.Array] = []
        for each, aval, blanks in zip(self.rounds, self._avals, self._blanks, strict=True):
            shown = [
                pieces[each.sent[at]] if blank is None else blank
                for (at, _), blank in zip(self._mine, blanks, strict=True)
            ]
            arrays.append(joined(aval, shown))
        *results, done = self._permute(*arrays)
        received: dict[int, jax.Array] = {}
        for each, result in zip(self.rounds, results, strict=True):
            for (at, _), block in zip(self._mine, _jax.blocks(result), strict=True):
                if at in each.got:
                    received[each.got[at]] = block
        return received, done


@dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    """Pieces of one shape: pairs of device positions, and the number of the piece that a position sends or receives."""

    shape: tuple[int, ...]
    pairs: tuple[tuple[int, int], ...]
    sent: Mapping[int, int]
    got: Mapping[int, int]


def _rounds(pieces: Sequence[Sent], devices: Sequence[Device]) -> list[_Round]:
    """Assign each piece to the first round of its shape in which its sender and its receiver are idle."""
    place = {device: at for at, device in enumerate(devices)}
    rounds: dict[tuple[int, ...], list[tuple[dict[int, int], dict[int, int], list[tuple[int, int]]]]] = {}
    for piece in pieces:
        source, target = place[piece.source], place[piece.target]
        existing = rounds.setdefault(piece.shape, [])
        # First-fit colouring of the edges of a bipartite graph, of senders and receivers. As many rounds as the busiest
        # device has pieces would be enough (König's theorem), and first fit takes less than twice as many. Fewer rounds
        # are fewer collectives, but most transfers need only one or two.
        free = next((r for r in existing if source not in r[0] and target not in r[1]), None)
        if free is None:
            free = {}, {}, []
            existing.append(free)
        sent, got, pairs = free
        sent[source] = got[target] = piece.number
        pairs.append((source, target))
    return [
        _Round(shape=shape, pairs=tuple(pairs), sent=sent, got=got)
        for shape, existing in rounds.items()
        for sent, got, pairs in existing
    ]


def together(devices: Sequence[Device], run: Callable[[], object]) -> None:
    """Run a program on devices of several processes for the first time, after all of them are ready.

    The CPU's collectives connect the devices of a group at its first use, and time out when one is half a minute late.
    """
    meet(processes_of(devices))
    jax.block_until_ready(run())


def _zeros(like: jax.ShapeDtypeStruct) -> jax.Array:
    def block(index: Any) -> np.ndarray:
        # Slices of whole dims have no bounds of their own.
        shape = [len(range(*part.indices(n))) for part, n in zip(index, like.shape, strict=True)]
        return np.zeros(shape, like.dtype)

    return jax.make_array_from_callback(like.shape, like.sharding, block)


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
    """A piece: its two devices' positions, its shape, and its start in the source's block and in the target's chunk."""

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
        """True if every device has a piece."""
        return -1 not in self.numbers


class Transfer(ABC):
    """A compiled transfer: call it with an array in the source placement to get it in the target placement."""

    @property
    @abstractmethod
    def num_programs(self) -> int:
        """The number of programs that one call launches."""

    @abstractmethod
    def __call__(
        self, array: jax.Array | None, sent: list[Message] | None = None, launched: LaunchObserver | None = None
    ) -> jax.Array | None:
        """Return the array in the target placement, asynchronously; bytes for other devices are appended to `sent`.

        `launched` observes each program that may have to wait for other devices. A process without devices of the
        source may pass any `array`; one without devices of the target gets None.
        """


class Crossing(Transfer):
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
        exchange = Exchange(sent, dtype, blanks) if sent else None
        self.exchange = exchange if exchange is not None and exchange.is_here else None

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
        # With one piece per device, in the form of its block, joining the pieces makes the result without a program.
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
        """True if the result shares no buffer with the source array."""
        # Only a whole block that remains on its device is passed on as it is.
        stays = (self.source[h.source] == self.target[h.target] for h in map(self.course.hands.__getitem__, self.whole))
        return self.land is not None or not any(stays)

    @property
    def num_programs(self) -> int:
        return (self.cut is not None) + (self.exchange is not None) + (self.land is not None)

    def __call__(
        self, array: jax.Array | None, sent: list[Message] | None = None, launched: LaunchObserver | None = None
    ) -> jax.Array | None:
        note = launched if launched is not None else _ignore
        pieces = self._pieces(array, note) if self.here and array is not None else {}
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
        cut_out = dict[int, jax.Array]()
        if self.whole:
            blocks = dict(zip(self.here, _jax.blocks(array), strict=True))
            cut_out = {n: blocks[at] for n in self.whole if (at := self.course.hands[n].source) in blocks}
        if self._launch_cut is not None:
            *cut, done = self._launch_cut(array)
            note(done, at_source=True)
            for slot, made in zip(self.cut_slots, cut, strict=True):
                blocks = zip(self.here, _jax.blocks(made), strict=True)
                cut_out.update({slot.numbers[at]: block for at, block in blocks if slot.numbers[at] >= 0})
        return cut_out

    def _tell(self, sent: list[Message], leaving: Sequence[jax.Array]) -> None:
        for n, piece in zip(self.copied, leaving, strict=True):
            hand = self.course.hands[n]
            source, target = self.source[hand.source], self.target[hand.target]
            sent.append(Message(source=source, target=target, bytes=piece.nbytes))


def _ignore(token: Token, *, at_source: bool) -> None:
    del token, at_source


def compiled(
    function: Callable[..., object], avals: Sequence[jax.ShapeDtypeStruct], wanted: NamedSharding | None = None
) -> jax.stages.Compiled:
    """Compile a function, with a token added. `wanted`: sharding of its result, which JAX may drop if that is empty."""
    shardings = None if wanted is None else (wanted, NamedSharding(wanted.mesh, PartitionSpec()))
    return _jax.compiled(jax.jit(function, out_shardings=shardings).lower(*avals))


def _slots(pieces: Sequence[tuple[int, int, tuple[int, ...]]], hands: Sequence[Hand], count: int) -> list[PieceSlot]:
    """Group pieces, (number, device position, offset), by shape and its count so far on each of `count` devices."""
    seen = Counter[tuple[int, tuple[int, ...]]]()
    places: dict[tuple[tuple[int, ...], int], dict[int, tuple[int, tuple[int, ...]]]] = {}
    for number, at, offset in pieces:
        shape = hands[number].shape
        places.setdefault((shape, seen[at, shape]), {})[at] = number, offset
        # A device with several pieces of one shape has the next one in the next slot.
        seen[at, shape] += 1
    slots: list[PieceSlot] = []
    for (shape, _), at_device in places.items():
        offsets = np.zeros((count, len(shape)), np.int32)
        for at, (_, offset) in at_device.items():
            offsets[at] = offset
        numbers = tuple(at_device[at][0] if at in at_device else -1 for at in range(count))
        slots.append(PieceSlot(shape=shape, numbers=numbers, offsets=offsets))
    return slots


def _cut(course: Course, slots: Sequence[PieceSlot]) -> Callable[..., tuple[jax.Array, ...]]:
    """Return a function that gives an array per slot, with each device's piece, or any part where it has none."""
    mesh = course.source.mesh

    def cut(x: jax.Array) -> tuple[jax.Array, ...]:
        at = lax.axis_index(mesh.axis_names)
        # Pieces are cut out of the resolved block: a partial sum has no values to send yet.
        x = x if course.resolve is None else course.resolve(x)
        cuts = [lax.dynamic_slice(x, tuple(jnp.asarray(slot.offsets)[at]), slot.shape) for slot in slots]
        return (*cuts, token())

    # Without the check of replication: tokens, and scalars that differ by device, are declared replicated.
    out_specs = (*(stacked_spec(mesh, slot.shape) for slot in slots), PartitionSpec())
    return jax.shard_map(cut, mesh=mesh, in_specs=course.source.spec, out_specs=out_specs, check_vma=False)


def _land(course: Course, slots: Sequence[PieceSlot]) -> Callable[..., tuple[jax.Array, ...]]:
    """Return a function that assembles the pieces of each device and gathers them, dropping the gather's padding."""
    mesh, chunk, dtype = course.wanted.mesh, course.chunk, course.array.dtype
    # One piece per device that is the whole chunk needs no array of zeros to be put into.
    whole = len(slots) == 1 and slots[0].is_full and slots[0].shape == chunk

    def land(*parts: jax.Array) -> tuple[jax.Array, ...]:
        at = lax.axis_index(mesh.axis_names)
        x = parts[0] if whole else jnp.zeros(chunk, dtype)
        # Not strict, since a whole chunk leaves nothing to place.
        for slot, part in zip(slots, () if whole else parts, strict=False):
            placed = lax.dynamic_update_slice(x, part, tuple(jnp.asarray(slot.offsets)[at]))
            # One program runs on all devices: one without a piece in this slot was given a blank, which is dropped.
            present = np.array(slot.numbers) >= 0
            x = placed if slot.is_full else jnp.where(jnp.asarray(present)[at], placed, x)
        return x if course.gather is None else course.gather(x), token()

    in_specs = tuple(stacked_spec(mesh, slot.shape) for slot in slots)
    out_specs = (course.wanted.spec, PartitionSpec())
    return jax.shard_map(land, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
