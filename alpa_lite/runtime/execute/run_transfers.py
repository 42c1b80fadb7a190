"""Carry out a planned transfer on devices: at most one program on each mesh, and copies between devices.

    resolve   on the source mesh: a partial sum, before pieces are cut         `_crossing`
    cross     pieces, from device to device or between processes               `crossing`
    gather    on the receiving mesh: the chunks of the receivers of one block  `_crossing`

Both programs are compiled ahead of time. In a job of several processes each process compiles and launches the programs
in which its devices take part; a transfer inside one process is the same as in a job of one process.

Small results of a step are delivered to every process, so that `float(loss)` works on all of them (`Delivery`):

    which     results of at most `MAX_BYTES` that some process could not read, except arrays of the state   `wanted`
    gather    on the stage that has a result, if it is split there
    deliver   one program over one device of each process, for all results of a step

Scalars of the state (a step counter) are delivered too; the next step takes them from the process's own device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from alpa_lite import _jax
from alpa_lite._jax import Device
from alpa_lite.lower.emission import boundary_shape, boundary_spec
from alpa_lite.lower.local_machine import move
from alpa_lite.plan.instructions import Buffer, Program
from alpa_lite.program.phases import StepGraph
from alpa_lite.runtime.execute.crossing import (
    AXIS,
    Blanks,
    Course,
    Crossing,
    Hand,
    LaunchObserver,
    Message,
    Transfer,
    compiled,
    joined,
    together,
    token,
)
from alpa_lite.runtime.job.activity import Token
from alpa_lite.runtime.job.processes import Launchable, all_here, any_here, devices_of, in_turn, is_here, processes_of
from alpa_lite.sharding.specs import Spec, local_shape
from alpa_lite.sharding.transfer import PlannedTransfer


def compile_transfers(
    program: Program, step: StepGraph, meshes: Sequence[Mesh], blanks: Blanks | None = None
) -> dict[Buffer, Transfer]:
    """Return, by the buffer that it writes, the transfer of each SEND in which devices of this process take part.

    Equal transfers are compiled once. All processes of a job compile in the order of the program.
    """
    made, by_buffer = dict[object, Transfer](), dict[Buffer, Transfer]()
    shared = Blanks() if blanks is None else blanks
    for instruction in program.instructions:
        planned = instruction.transfer
        if planned is None:
            continue
        dtype = step.graph.values[instruction.writes[0].value].dtype
        source, target = meshes[instruction.source_stage], meshes[instruction.stage]
        if not any_here((*devices_of(source), *devices_of(target))):
            continue
        # Micro-batches repeat the same transfer, which then shares its programs.
        key = (planned, dtype, source, target)
        if key not in made:
            made[key] = compile_transfer(planned, dtype, source, target, shared)
        by_buffer[instruction.writes[0]] = made[key]
    return by_buffer


def compile_transfer(
    planned: PlannedTransfer, dtype: str, source: Mesh, target: Mesh, blanks: Blanks | None = None
) -> Transfer:
    """Return a transfer of arrays of a dtype (by name) between the JAX meshes of its two placements.

    A transfer of typed PRNG keys is planned for the words that store them (`plan.program_builder.planned_transfer`).
    """
    # The cheapest form that fits: copies by JAX, the collectives of one mesh, or pieces between two meshes.
    is_key = dtype.startswith("key<")
    outside, inside = planned.source.spec, planned.target.spec
    shared = Blanks() if blanks is None else blanks
    if _keeps_form(planned) and all_here((*devices_of(source), *devices_of(target))):
        return _Whole(source, target, Spec(inside.dims[:-1]) if is_key else inside, is_key=is_key)
    if is_key:
        return _OfKeys(planned, dtype, source, target, shared)
    shape = boundary_shape(planned.array.shape, outside, dict(source.shape))
    array = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=NamedSharding(source, boundary_spec(outside)))
    return _InPlace(planned, source, array) if planned.in_place else _crossing(planned, target, array, shared)


class _Whole(Transfer):
    """A transfer of each device's block to the device of the same number, in one spec: JAX copies device by device."""

    def __init__(self, source: Mesh, target: Mesh, spec: Spec, *, is_key: bool) -> None:
        self.pairs = list(zip(source.devices.flat, target.devices.flat, strict=True))
        wanted = [NamedSharding(target, boundary_spec(spec))]
        # Typed keys wrap another array, and only JAX unwraps it: their blocks are not accessible here.
        self.copy = partial(jax.device_put, device=wanted) if is_key else _jax.copying_to(wanted)

    @property
    def num_programs(self) -> int:
        return 0

    def __call__(
        self, array: jax.Array | None, sent: list[Message] | None = None, launched: LaunchObserver | None = None
    ) -> jax.Array | None:
        assert array is not None, "all devices of both meshes belong to this process"
        if sent is not None:
            for block, (source, target) in zip(_jax.blocks(array), self.pairs, strict=True):
                _note(sent, block, source, target)
        return self.copy([array])[0]


class _InPlace(Transfer):
    """A transfer by the collectives between two specs on one mesh."""

    def __init__(self, planned: PlannedTransfer, mesh: Mesh, array: jax.ShapeDtypeStruct) -> None:
        self.walk = compiled(moves_on_source(planned, mesh), [array])
        self._launch = in_turn(self.walk, devices_of(mesh))

    @property
    def num_programs(self) -> int:
        return 1

    def __call__(
        self, array: jax.Array | None, sent: list[Message] | None = None, launched: LaunchObserver | None = None
    ) -> jax.Array | None:
        assert array is not None, "this process has a device of the mesh"
        # Source and target are one mesh, so the program counts once.
        moved, done = self._launch(array)
        if launched is not None:
            launched(done, at_source=True)
        return moved


class _OfKeys(Transfer):
    """A transfer of typed PRNG keys as the words that store them."""

    def __init__(self, planned: PlannedTransfer, dtype: str, source: Mesh, target: Mesh, blanks: Blanks) -> None:
        # Blocks of typed keys cannot be reached, while their words are an array as any other.
        self.words = compile_transfer(planned, "uint32", source, target, blanks)
        (outside, sent), (wanted, landed) = (
            [NamedSharding(mesh, boundary_spec(spec)) for spec in (Spec(layout.spec.dims[:-1]), layout.spec)]
            for layout, mesh in ((planned.source, source), (planned.target, target))
        )
        keys = _jax.struct(planned.array.shape[:-1], dtype)
        held = jax.ShapeDtypeStruct(keys.shape, keys.dtype, sharding=outside)
        words = jax.ShapeDtypeStruct(planned.array.shape, jnp.uint32, sharding=landed)
        impl = _jax.key_implementation(dtype)
        unwrap = jax.jit(jax.random.key_data, out_shardings=sent)
        wrap = jax.jit(lambda x: jax.random.wrap_key_data(x, impl=impl), out_shardings=wanted)
        self.unwrap = unwrap.lower(held).compile() if any_here(devices_of(source)) else None
        self.wrap = wrap.lower(words).compile() if any_here(devices_of(target)) else None

    @property
    def num_programs(self) -> int:
        return (self.unwrap is not None) + self.words.num_programs + (self.wrap is not None)

    def __call__(
        self, array: jax.Array | None, sent: list[Message] | None = None, launched: LaunchObserver | None = None
    ) -> jax.Array | None:
        words = self.words(None if self.unwrap is None else self.unwrap(array), sent, launched)
        return None if self.wrap is None else self.wrap(words)


def _crossing(planned: PlannedTransfer, target: Mesh, array: jax.ShapeDtypeStruct, blanks: Blanks) -> Crossing:
    """Return a transfer from one mesh to another."""
    held, landed = planned.source_blocks(), planned.landing_blocks()
    hands = tuple(
        Hand(
            source=piece.source,
            target=piece.target,
            shape=piece.shape,
            start=tuple(a - first for (a, _), (first, _) in zip(piece.box, held[piece.source], strict=True)),
            landing=tuple(a - first for (a, _), (first, _) in zip(piece.box, landed[piece.target], strict=True)),
        )
        for piece in planned.pieces
    )
    course = Course(
        array=array,
        hands=hands,
        held=tuple(stop - start for start, stop in held[0]),
        # Programs have one shape on all devices: a smaller chunk at the end of a dim is padded to the largest.
        chunk=tuple(max((b - a for a, b in ends), default=0) for ends in zip(*landed, strict=True)),
        shape=planned.array.shape,
        wanted=NamedSharding(target, boundary_spec(planned.target.spec)),
        resolve=partial(_local, planned) if planned.resolve else None,
        gather=partial(_gathered, planned) if planned.gathers else None,
    )
    return Crossing(course, blanks)


def _keeps_form(planned: PlannedTransfer) -> bool:
    """Return True if each device sends its block to the device of the same number: one `device_put`.

    JAX copies from device to device where both shardings split alike; otherwise it would go through the host.
    """
    if planned.resolve or planned.gathers:
        return False
    held = planned.source_blocks()
    pairs = [(p.source, p.target) for p in planned.pieces if p.box == held[p.source]]
    return planned.in_place or (held == planned.landing_blocks() and pairs == [(i, i) for i in range(len(held))])


def _note(sent: list[Message], array: jax.Array, source: Device, target: Device) -> None:
    if source != target:
        sent.append(Message(source=source, target=target, bytes=array.nbytes))


def _local(planned: PlannedTransfer, x: jax.Array) -> jax.Array:
    sizes = planned.source.mesh.axis_sizes
    # Outside of programs a partial sum has one more dim in front, over the devices that hold its terms.
    x = x[0] if planned.source.spec.partial else x
    for step in planned.resolve:
        x = move(x, step, sizes)
    return x


def _gathered(planned: PlannedTransfer, x: jax.Array) -> jax.Array:
    """Return the chunks of all receivers of a block, gathered and without padding."""
    block = local_shape(planned.target.spec, planned.array.shape, planned.target.mesh.axis_sizes)
    for step in planned.gathers:
        x = lax.all_gather(x, step.axes, axis=step.dim, tiled=True)
        # The last chunk was padded to the size of the others.
        x = lax.slice_in_dim(x, 0, block[step.dim], axis=step.dim)
    return x


def moves_on_source(planned: PlannedTransfer, mesh: Mesh | AbstractMesh) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Return the function that reshards an array on its mesh before it is sent, or instead: also returns a token."""
    wanted = planned.sent_spec

    def walk(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = _local(planned, x)
        # Outside of programs a partial sum has its terms along a leading dim.
        return x[None] if wanted.partial else x, token()

    return jax.shard_map(
        walk,
        mesh=mesh,
        in_specs=boundary_spec(planned.source.spec),
        out_specs=(boundary_spec(wanted), PartitionSpec()),
        check_vma=False,
    )


def warm(mesh: Mesh) -> None:
    """Connect the devices of a mesh of several processes, in every group that collectives may use."""
    axes = [axis for axis, size in mesh.shape.items() if size > 1]
    # Every set of axes is a group of its own to the collectives, with connections of its own.
    groups = [tuple(a for i, a in enumerate(axes) if chosen >> i & 1) for chosen in range(1, 1 << len(axes))]

    # Scalars suffice, as only the connections are wanted.
    def reduce() -> tuple[jax.Array]:
        return (jax.numpy.stack([lax.psum(jnp.ones(()), group) for group in groups]),)

    program = jax.shard_map(reduce, mesh=mesh, in_specs=(), out_specs=(PartitionSpec(),), check_vma=False)
    devices = list(mesh.devices.flat)
    together(devices, in_turn(jax.jit(program).lower().compile(), devices))


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
    # Typed keys would have to be unwrapped for the program, and are rarely read on the host.
    if jax.numpy.issubdtype(dtype, jax.dtypes.extended):
        return False
    small = prod(shape) * dtype.itemsize <= MAX_BYTES
    # All processes can read a result where it is only if each of them has a replica.
    readable = result.sharding.is_fully_replicated and _count(result) == jax.process_count()
    return small and not readable and (not result.is_state or not shape)


def _count(result: Result) -> int:
    return len(processes_of(devices_of(result.sharding.mesh)))


def over_processes(devices: Sequence[Device]) -> tuple[Mesh, Device]:
    """Return a mesh of the first device of each process, and the one of this process."""
    # Reversed, so that of each process its first device remains.
    first = {device.process_index: device for device in reversed(devices)}
    return Mesh(np.array([first[p] for p in sorted(first)]), (AXIS,)), first[jax.process_index()]


class Delivery:
    """The delivery of a step's results, compiled on all processes of the job; `devices`: of the job."""

    def __init__(self, results: Sequence[Result], devices: Sequence[Device], blanks: Blanks) -> None:
        """Compile the delivery. Collective: all processes must call this. `results`: the results to deliver."""
        self.results = tuple(results)
        if not self.results:
            return
        mesh, self.mine = over_processes(devices)
        self.owners = [devices_of(result.sharding.mesh)[0] for result in self.results]
        processes = [device.process_index for device in devices_of(mesh)]
        places = [processes.index(owner.process_index) for owner in self.owners]
        whole = NamedSharding(mesh, PartitionSpec())
        self._avals = [jax.ShapeDtypeStruct(r.array.shape, r.array.dtype, sharding=whole) for r in self.results]
        self._blanks = [blanks.get(aval.shape, aval.dtype, self.mine) for aval in self._avals]
        self._gather = [_gathering(result) for result in self.results]

        def deliver(*blocks: jax.Array) -> tuple[jax.Array, ...]:
            # Of the blocks of all processes the owner's is taken; they are small, so that gathering all costs little
            # more.
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
        results, shown = list(leaves), list[jax.Array]()
        for result, gather, owner, aval, blank in zip(
            self.results, self._gather, self.owners, self._avals, self._blanks, strict=True
        ):
            array = leaves[result.number]
            if gather is not None:
                array, _ = gather(array)
            shown.append(self._shown(aval, self._block(array, owner) if is_here(owner) else blank))
        *delivered, done = self._deliver(*shown)
        for result, array in zip(self.results, delivered, strict=True):
            results[result.number] = array
        return results, done

    def _block(self, array: jax.Array, owner: Device) -> jax.Array:
        """Return the block of one device of this process, on the device that it is delivered from."""
        (block,) = (block for block in _jax.blocks(array) if owner in block.devices())
        return block if owner == self.mine else jax.device_put(block, self.mine)

    @staticmethod
    def _shown(aval: jax.ShapeDtypeStruct, block: jax.Array) -> jax.Array:
        return joined(aval, [block])


def _gathering(result: Result) -> Launchable | None:
    """Return a function that replicates a result on its stage; None if it is replicated or not on this process."""
    sharding = result.sharding
    if sharding.is_fully_replicated or not any_here(devices_of(sharding.mesh)):
        return None
    whole = NamedSharding(sharding.mesh, PartitionSpec())
    gather = _jax.compiled(jax.jit(lambda x: (x, token()), out_shardings=(whole, whole)).lower(result.array))
    return in_turn(gather, devices_of(sharding.mesh))
