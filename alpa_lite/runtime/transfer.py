"""Carries out a planned transfer on devices: at most one program on each mesh, and copies between devices.

    cut     on the source mesh: resolves a partial sum and copies the boxes to send out of the blocks     `_cut`
    copy    all pieces at once, each from its device to another; those that stay are not touched          `_Crossing`
    land    on the receiving mesh: puts pieces into one chunk per device, and gathers the chunks          `_land`

Nothing goes through the host. Both programs are compiled ahead, for all devices of a mesh alike: a slot is a shape of
which every device has at most one piece, and tables say at which offset (`_slots`). Where the blocks of the source are
sent whole there is nothing to cut, and where they are what the receivers want nothing to land.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from numpy.typing import NDArray

from alpa_lite import _jax
from alpa_lite.cross_mesh import Box, PlannedTransfer
from alpa_lite.graph.phases import StepGraph
from alpa_lite.lower.emit import boundary_shape, boundary_spec, move
from alpa_lite.lower.program import Buffer, Program
from alpa_lite.sharding import Spec, local_shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Bytes that were handed from one device to another."""

    source: Any
    target: Any
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slot:
    """Pieces of one shape, at most one per device: their numbers by device (-1: none), and offsets [devices, dims]."""

    shape: tuple[int, ...]
    numbers: tuple[int, ...]
    offsets: NDArray[np.int32]

    @property
    def is_full(self) -> bool:
        """True when every device has one."""
        return -1 not in self.numbers


class Launched(Protocol):
    """Is told of the token of a program, and on which of the two meshes it runs."""

    def __call__(self, token: Any, *, at_source: bool) -> None:
        """A program was launched."""
        ...


class Transfer(ABC):
    """A planned transfer, compiled: call it with an array in the source layout to get it in the target layout."""

    @property
    @abstractmethod
    def num_programs(self) -> int:
        """How many programs one call launches."""

    @abstractmethod
    def __call__(self, array: Any, sent: list[Message] | None = None, launched: Launched | None = None) -> Any:
        """The array in the target layout, asynchronously; what goes to another device is appended to `sent`.

        `launched` is told of each program that may have to wait for other devices.
        """


def compile_transfers(program: Program, step: StepGraph, meshes: Sequence[Mesh]) -> dict[Buffer, Transfer]:
    """The transfer of each SEND of a program, by what it writes; equal ones are compiled once."""
    compiled, found = dict[object, Transfer](), dict[Buffer, Transfer]()
    for instruction in program.instructions:
        planned = instruction.transfer
        if planned is None:
            continue
        dtype = step.graph.values[instruction.writes[0].value].dtype
        source, target = meshes[instruction.source_stage], meshes[instruction.stage]
        key = (planned, dtype, source, target)
        if key not in compiled:
            compiled[key] = compile_transfer(planned, dtype, source, target)
        found[instruction.writes[0]] = compiled[key]
    return found


def compile_transfer(planned: PlannedTransfer, dtype: str, source: Mesh, target: Mesh) -> Transfer:
    """A transfer of arrays of a dtype (by name) between the JAX meshes of its two layouts.

    That of typed PRNG keys is planned for the words that they are stored as (`lower.program.planned_transfer`).
    """
    is_key = dtype.startswith("key<")
    outside, inside = planned.source.spec, planned.target.spec
    if _keeps_form(planned):
        return _Whole(source, target, Spec(inside.dims[:-1]) if is_key else inside, is_key=is_key)
    if is_key:
        return _OfKeys(planned, dtype, source, target)
    shape = boundary_shape(planned.shape, outside, dict(source.shape))
    array = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=NamedSharding(source, boundary_spec(outside)))
    return _InPlace(planned, source, array) if planned.in_place else _Crossing(planned, source, target, array)


class _Whole(Transfer):
    """Each device hands its block to the one of the same number, in the same spec: JAX copies device by device."""

    def __init__(self, source: Mesh, target: Mesh, spec: Spec, *, is_key: bool) -> None:
        self.pairs = list(zip(source.devices.flat, target.devices.flat, strict=True))
        wanted = [NamedSharding(target, boundary_spec(spec))]
        # Keys are arrays around arrays, which only JAX takes apart.
        self.copy = partial(jax.device_put, device=wanted) if is_key else _jax.copying_to(wanted)

    @property
    def num_programs(self) -> int:
        return 0

    def __call__(self, array: Any, sent: list[Message] | None = None, launched: Launched | None = None) -> Any:
        if sent is not None:
            for block, (source, target) in zip(_jax.blocks(array), self.pairs, strict=True):
                _note(sent, block, source, target)
        return self.copy([array])[0]


class _InPlace(Transfer):
    """The walk of collectives between two specs on one mesh."""

    def __init__(self, planned: PlannedTransfer, mesh: Mesh, array: jax.ShapeDtypeStruct) -> None:
        self.walk = _compiled(_walk(planned, mesh), [array])

    @property
    def num_programs(self) -> int:
        return 1

    def __call__(self, array: Any, sent: list[Message] | None = None, launched: Launched | None = None) -> Any:
        moved, token = self.walk(array)
        if launched is not None:
            launched(token, at_source=True)
        return moved


class _Crossing(Transfer):
    """Cut, copy, land."""

    def __init__(self, planned: PlannedTransfer, source: Mesh, target: Mesh, array: jax.ShapeDtypeStruct) -> None:
        pieces, held, landed = planned.pieces, planned.source_blocks(), planned.landing_blocks()
        boxes = [piece.box for piece in pieces]
        self.planned = planned
        self.source, self.target = list(source.devices.flat), list(target.devices.flat)
        self.wanted = NamedSharding(target, boundary_spec(planned.target.spec))
        self.whole = [n for n, p in enumerate(pieces) if p.box == held[p.source] and not planned.resolve]
        others = [n for n in range(len(pieces)) if n not in set(self.whole)]
        self.cut_slots = _slots([(n, pieces[n].source) for n in others], boxes, held)
        self.land_slots = _slots([(n, piece.target) for n, piece in enumerate(pieces)], boxes, landed)
        self.copied = [n for n, p in enumerate(pieces) if self.source[p.source] != self.target[p.target]]
        self.copy = _jax.copying_to([SingleDeviceSharding(self.target[pieces[n].target]) for n in self.copied])
        self.cut = _compiled(_cut(planned, source, self.cut_slots), [array]) if others else None
        avals = [_stacked(target, slot, array.dtype) for slot in self.land_slots]
        needed = not _lands_as_wanted(planned, self.land_slots)
        landing = _land(planned, target, self.land_slots, array.dtype)
        self.land = _compiled(landing, avals, self.wanted) if needed else None
        self.landing = [(aval.shape, aval.sharding) for aval in avals]
        self.blanks = [self._blanks(slot, array.dtype) for slot in self.land_slots]

    def _blanks(self, slot: _Slot, dtype: Any) -> dict[int, Any]:
        """What devices without a piece in a slot show instead, by their place."""
        missing = [at for at, number in enumerate(slot.numbers) if number < 0]
        return {at: jax.device_put(np.zeros(slot.shape, dtype), self.target[at]) for at in missing}

    @property
    def num_programs(self) -> int:
        return (self.cut is not None) + (self.land is not None)

    def __call__(self, array: Any, sent: list[Message] | None = None, launched: Launched | None = None) -> Any:
        pieces = self._pieces(array, launched)
        leaving = [pieces[n] for n in self.copied]
        pieces.update(zip(self.copied, self.copy(leaving), strict=True))
        if sent is not None:
            for n, piece in zip(self.copied, leaving, strict=True):
                planned = self.planned.pieces[n]
                _note(sent, piece, self.source[planned.source], self.target[planned.target])
        if self.land is None:
            (slot,) = self.land_slots
            return _joined(self.planned.shape, self.wanted, [pieces[n] for n in slot.numbers])
        parts: list[Any] = []
        for slot, blanks, (shape, sharding) in zip(self.land_slots, self.blanks, self.landing, strict=True):
            shown = [pieces[n] if n >= 0 else blanks[at] for at, n in enumerate(slot.numbers)]
            parts.append(_joined(shape, sharding, shown))
        landed, token = self.land(*parts)
        if launched is not None:
            launched(token, at_source=False)
        return landed

    def _pieces(self, array: Any, launched: Launched | None) -> dict[int, Any]:
        """Each piece on its source device."""
        found = dict[int, Any]()
        if self.whole:
            blocks = _jax.blocks(array)
            found = {n: blocks[self.planned.pieces[n].source] for n in self.whole}
        if self.cut is not None:
            *cut, token = self.cut(array)
            if launched is not None:
                launched(token, at_source=True)
            for slot, made in zip(self.cut_slots, cut, strict=True):
                found.update({n: block for n, block in zip(slot.numbers, _jax.blocks(made), strict=True) if n >= 0})
        return found


class _OfKeys(Transfer):
    """Typed PRNG keys, transferred as the words that they are stored as."""

    def __init__(self, planned: PlannedTransfer, dtype: str, source: Mesh, target: Mesh) -> None:
        self.words = compile_transfer(planned, "uint32", source, target)
        (outside, sent), (wanted, landed) = (
            [NamedSharding(mesh, boundary_spec(spec)) for spec in (Spec(layout.spec.dims[:-1]), layout.spec)]
            for layout, mesh in ((planned.source, source), (planned.target, target))
        )
        keys = _jax.struct(planned.shape[:-1], dtype)
        held = jax.ShapeDtypeStruct(keys.shape, keys.dtype, sharding=outside)
        words = jax.ShapeDtypeStruct(planned.shape, jnp.uint32, sharding=landed)
        impl = _jax.key_implementation(dtype)
        self.unwrap = jax.jit(jax.random.key_data, out_shardings=sent).lower(held).compile()
        wrap = jax.jit(lambda x: jax.random.wrap_key_data(x, impl=impl), out_shardings=wanted)
        self.wrap = wrap.lower(words).compile()

    @property
    def num_programs(self) -> int:
        return 2 + self.words.num_programs

    def __call__(self, array: Any, sent: list[Message] | None = None, launched: Launched | None = None) -> Any:
        return self.wrap(self.words(self.unwrap(array), sent, launched))


def _keeps_form(planned: PlannedTransfer) -> bool:
    """True when each device hands its block to the one of the same number: one `device_put`.

    JAX copies from device to device where both shardings cut alike; otherwise it would go through the host.
    """
    if planned.resolve or planned.gathers:
        return False
    held = planned.source_blocks()
    pairs = [(p.source, p.target) for p in planned.pieces if p.box == held[p.source]]
    return planned.in_place or (held == planned.landing_blocks() and pairs == [(i, i) for i in range(len(held))])


def _note(sent: list[Message], array: Any, source: Any, target: Any) -> None:
    if source != target:
        sent.append(Message(source=source, target=target, bytes=array.nbytes))


def _joined(shape: tuple[int, ...], sharding: Any, parts: Sequence[Any]) -> Any:
    return jax.make_array_from_single_device_arrays(shape, sharding, list(parts))


def _slots(pieces: Sequence[tuple[int, int]], boxes: Sequence[Box], blocks: Sequence[Box]) -> list[_Slot]:
    """Pieces, given as (number, place of the device), by their shape and how many of it their device has before."""
    seen, places = Counter[tuple[int, tuple[int, ...]]](), dict[tuple[tuple[int, ...], int], dict[int, int]]()
    for number, at in pieces:
        shape = tuple(stop - start for start, stop in boxes[number])
        places.setdefault((shape, seen[at, shape]), {})[at] = number
        seen[at, shape] += 1
    slots: list[_Slot] = []
    for (shape, _), numbers in places.items():
        offsets = np.zeros((len(blocks), len(shape)), np.int32)
        for at, number in numbers.items():
            offsets[at] = [start - first for (start, _), (first, _) in zip(boxes[number], blocks[at], strict=True)]
        by_place = tuple(numbers.get(at, -1) for at in range(len(blocks)))
        slots.append(_Slot(shape=shape, numbers=by_place, offsets=offsets))
    return slots


def _stacked_spec(mesh: Mesh, slot: _Slot) -> PartitionSpec:
    """One piece per device, along the first dim; scalars are the same everywhere."""
    return PartitionSpec(mesh.axis_names) if slot.shape else PartitionSpec()


def _stacked(mesh: Mesh, slot: _Slot, dtype: Any) -> jax.ShapeDtypeStruct:
    shape = (len(slot.numbers) * slot.shape[0], *slot.shape[1:]) if slot.shape else ()
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, _stacked_spec(mesh, slot)))


def _lands_as_wanted(planned: PlannedTransfer, slots: Sequence[_Slot]) -> bool:
    block = local_shape(planned.target.spec, planned.shape, planned.target.mesh.axis_sizes)
    return not planned.gathers and len(slots) == 1 and slots[0].is_full and slots[0].shape == block


def _compiled(function: Callable[..., Any], avals: Sequence[Any], wanted: NamedSharding | None = None) -> Any:
    """A program that also gives a token; `wanted`: where its result lies, which JAX may lose of empty arrays."""
    shardings = None if wanted is None else (wanted, NamedSharding(wanted.mesh, PartitionSpec()))
    return jax.jit(function, out_shardings=shardings).lower(*avals).compile()


def _token() -> jax.Array:
    """A scalar that is there when its program is done."""
    return jnp.zeros((), jnp.int8)


def _local(x: Any, planned: PlannedTransfer, sizes: Mapping[str, int]) -> Any:
    x = x[0] if planned.source.spec.partial else x
    for step in planned.resolve:
        x = move(x, step, sizes)
    return x


def _walk(planned: PlannedTransfer, mesh: Mesh) -> Callable[..., Any]:
    sizes, wanted = dict(mesh.shape), planned.target.spec

    def walk(x: Any) -> Any:
        x = _local(x, planned, sizes)
        return x[None] if wanted.partial else x, _token()

    return jax.shard_map(
        walk,
        mesh=mesh,
        in_specs=boundary_spec(planned.source.spec),
        out_specs=(boundary_spec(wanted), PartitionSpec()),
        check_vma=False,
    )


def _cut(planned: PlannedTransfer, mesh: Mesh, slots: Sequence[_Slot]) -> Callable[..., Any]:
    """One array per slot, with the piece of each device; devices without one give some other part of their block."""
    sizes = dict(mesh.shape)

    def cut(x: Any) -> Any:
        x, at = _local(x, planned, sizes), lax.axis_index(mesh.axis_names)
        cuts = [lax.dynamic_slice(x, tuple(jnp.asarray(slot.offsets)[at]), slot.shape) for slot in slots]
        return (*cuts, _token())

    out_specs = (*(_stacked_spec(mesh, slot) for slot in slots), PartitionSpec())
    return jax.shard_map(
        cut, mesh=mesh, in_specs=boundary_spec(planned.source.spec), out_specs=out_specs, check_vma=False
    )


def _land(planned: PlannedTransfer, mesh: Mesh, slots: Sequence[_Slot], dtype: Any) -> Callable[..., Any]:
    """The pieces of each device put together, and gathered; padding that a gather brings along is cut off."""
    block = local_shape(planned.target.spec, planned.shape, dict(mesh.shape))
    chunk = tuple(max((b - a for a, b in ends), default=0) for ends in zip(*planned.landing_blocks(), strict=True))
    whole = len(slots) == 1 and slots[0].is_full and slots[0].shape == chunk

    def land(*parts: Any) -> Any:
        at = lax.axis_index(mesh.axis_names)
        x = parts[0] if whole else jnp.zeros(chunk, dtype)
        for slot, part in zip(slots, () if whole else parts, strict=False):
            placed = lax.dynamic_update_slice(x, part, tuple(jnp.asarray(slot.offsets)[at]))
            present = np.array(slot.numbers) >= 0
            x = placed if slot.is_full else jnp.where(jnp.asarray(present)[at], placed, x)
        for step in planned.gathers:
            x = lax.all_gather(x, step.axes, axis=step.dim, tiled=True)
            x = lax.slice_in_dim(x, 0, block[step.dim], axis=step.dim)
        return x, _token()

    in_specs = tuple(_stacked_spec(mesh, slot) for slot in slots)
    out_specs = (boundary_spec(planned.target.spec), PartitionSpec())
    return jax.shard_map(land, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
