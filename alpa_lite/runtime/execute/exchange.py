"""Programs over devices of several processes: the exchange of pieces of arrays, and the delivery of small results.

    round     pieces of one shape, of which each device sends at most one and receives at most one  `_rounds`
    program   one permute per round, on an array that has a piece of each device along its first dim  `Exchange`

A device that sends nothing in a round contributes a blank of that shape, and one that receives nothing gets zeros.
Every process that has one of the devices launches the program, in the same order among all programs that span
processes.

Small results of a step are delivered to every process, so that `float(loss)` works on all of them (`Delivery`):

    which     results of at most `MAX_BYTES` that some process could not read, except arrays of the state   `wanted`
    gather    on the stage that has a result, if it is split there
    deliver   one program over one device of each process, for all results of a step

Scalars of the state (a step counter) are delivered too; the next step takes them from the process's own device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from alpa_lite import _jax
from alpa_lite._jax import Device
from alpa_lite.runtime.job.consensus import meet
from alpa_lite.runtime.job.in_flight import Token
from alpa_lite.runtime.job.launch_order import in_turn
from alpa_lite.runtime.job.processes import any_here, devices_of, is_here, processes_of

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
        key = (shape, jnp.dtype(dtype), device)
        if key not in self._made:
            self._made[key] = jax.device_put(np.zeros(shape, dtype), device)
        return self._made[key]


def token() -> jax.Array:
    """Return a scalar that is ready when its program is done."""
    return jnp.zeros((), jnp.int8)


def stacked_spec(mesh: Mesh | AbstractMesh, shape: Sequence[int]) -> PartitionSpec:
    """Return the spec with one block per device along the first dim; scalars are declared replicated, though they may
    differ.
    """
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
        found = {device for piece in pieces for device in (piece.source, piece.target)}
        # In an order that does not depend on the process, as all of them must build the same program.
        devices = sorted(found, key=lambda device: (device.process_index, device.id))
        self.is_here = any_here(devices)
        if not self.is_here:
            return
        self.rounds = _rounds(pieces, devices)
        mesh = Mesh(np.array(devices), (AXIS,))
        self._avals = [stacked(mesh, each.shape, dtype) for each in self.rounds]
        self._mine = [(at, device) for at, device in enumerate(devices) if is_here(device)]
        self._blanks = [[self._blank(blanks, each, dtype, at, d) for at, d in self._mine] for each in self.rounds]
        specs = tuple(stacked_spec(mesh, each.shape) for each in self.rounds)
        pairs = [each.pairs for each in self.rounds]

        def permute(*arrays: jax.Array) -> Any:
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
        found: dict[int, jax.Array] = {}
        for each, result in zip(self.rounds, results, strict=True):
            for (at, _), block in zip(self._mine, _jax.blocks(result), strict=True):
                if at in each.got:
                    found[each.got[at]] = block
        return found, done


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
        # Fewer rounds are fewer collectives, though this greedy choice may need more than the least possible number.
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


def warm(mesh: Mesh) -> None:
    """Connect the devices of a mesh of several processes, in every group that collectives may use."""
    axes = [axis for axis, size in mesh.shape.items() if size > 1]
    # Every set of axes is a group of its own to the collectives, with connections of its own.
    groups = [tuple(a for i, a in enumerate(axes) if chosen >> i & 1) for chosen in range(1, 1 << len(axes))]

    def reduce() -> tuple[jax.Array]:
        return (jax.numpy.stack([lax.psum(jnp.ones(()), group) for group in groups]),)

    program = jax.shard_map(reduce, mesh=mesh, in_specs=(), out_specs=(PartitionSpec(),), check_vma=False)
    devices = list(mesh.devices.flat)
    together(devices, in_turn(jax.jit(program).lower().compile(), devices))


def _zeros(like: jax.ShapeDtypeStruct) -> jax.Array:
    def block(index: Any) -> Any:
        shape = [len(range(*part.indices(n))) for part, n in zip(index, like.shape, strict=True)]
        return np.zeros(shape, like.dtype)

    return jax.make_array_from_callback(like.shape, like.sharding, block)


MAX_BYTES = 1 << 16
"""Largest result, in bytes, that is delivered; larger ones stay on the devices that computed them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A result of the step, by its number, in its original sharding; `is_state`: it is an argument of the next step."""

    number: int
    array: jax.ShapeDtypeStruct
    is_state: bool

    @property
    def sharding(self) -> NamedSharding:
        """The sharding in which the result is computed."""
        sharding = self.array.sharding
        assert isinstance(sharding, NamedSharding)
        return sharding


def wanted(result: Result) -> bool:
    """Return True if the result is to be delivered."""
    shape, dtype = result.array.shape, result.array.dtype
    if jax.numpy.issubdtype(dtype, jax.dtypes.extended):
        return False
    small = prod(shape) * dtype.itemsize <= MAX_BYTES
    # All processes can read a result where it is only if each of them has a replica.
    readable = result.sharding.is_fully_replicated and _count(result) == jax.process_count()
    return small and not readable and (not result.is_state or not shape)


def _count(result: Result) -> int:
    return len(processes_of(devices_of(result.sharding.mesh)))


class Delivery:
    """The delivery of a step's results, compiled on all processes of the job; `devices`: of the job."""

    def __init__(self, results: Sequence[Result], devices: Sequence[Device], blanks: Blanks) -> None:
        """Compile the delivery. Collective: all processes must call this. `results`: the results to deliver."""
        self.results = tuple(results)
        if not self.results:
            return
        # Reversed, so that of each process its first device remains.
        first = {device.process_index: device for device in reversed(devices)}
        processes = sorted(first)
        mesh = Mesh(np.array([first[p] for p in processes]), (AXIS,))
        self.mine = first[jax.process_index()]
        self.owners = [devices_of(result.sharding.mesh)[0] for result in self.results]
        places = [processes.index(owner.process_index) for owner in self.owners]
        whole = NamedSharding(mesh, PartitionSpec())
        self._avals = [jax.ShapeDtypeStruct(r.array.shape, r.array.dtype, sharding=whole) for r in self.results]
        self._blanks = [blanks.get(aval.shape, aval.dtype, self.mine) for aval in self._avals]
        self._gather = [_gathering(result) for result in self.results]

        def deliver(*blocks: jax.Array) -> Any:
            return (*(lax.all_gather(x, AXIS)[at] for x, at in zip(blocks, places, strict=True)), token())

        # Each process contributes a different block of an array declared replicated; the program makes them equal.
        specs = (PartitionSpec(),) * len(self.results)
        program = jax.shard_map(
            deliver, mesh=mesh, in_specs=specs, out_specs=(*specs, PartitionSpec()), check_vma=False
        )
        self._deliver = in_turn(_jax.compiled(jax.jit(program).lower(*self._avals)), devices_of(mesh))
        together(devices_of(mesh), lambda: self._deliver(*map(self._shown, self._avals, self._blanks)))

    def __call__(self, leaves: Sequence[jax.Array]) -> tuple[list[jax.Array], Token]:
        """Return all results of a step, the small ones delivered, and the program's token."""
        found, shown = list(leaves), list[jax.Array]()
        for result, gather, owner, aval, blank in zip(
            self.results, self._gather, self.owners, self._avals, self._blanks, strict=True
        ):
            array = leaves[result.number]
            if gather is not None:
                array, _ = gather(array)
            shown.append(self._shown(aval, self._block(array, owner) if is_here(owner) else blank))
        *delivered, done = self._deliver(*shown)
        for result, array in zip(self.results, delivered, strict=True):
            found[result.number] = array
        return found, done

    def _block(self, array: jax.Array, owner: Device) -> jax.Array:
        """Return the block of one device of this process, on the device that it is delivered from."""
        (block,) = (block for block in _jax.blocks(array) if owner in block.devices())
        return block if owner == self.mine else jax.device_put(block, self.mine)

    @staticmethod
    def _shown(aval: jax.ShapeDtypeStruct, block: jax.Array) -> jax.Array:
        return joined(aval, [block])


def _gathering(result: Result) -> Callable[[jax.Array], tuple[jax.Array, jax.Array]] | None:
    """Return a function that replicates a result on its stage; None if it is replicated or not on this process."""
    sharding = result.sharding
    if sharding.is_fully_replicated or not any_here(devices_of(sharding.mesh)):
        return None
    whole = NamedSharding(sharding.mesh, PartitionSpec())
    gather = _jax.compiled(jax.jit(lambda x: (x, token()), out_shardings=(whole, whole)).lower(result.array))
    return in_turn(gather, devices_of(sharding.mesh))
