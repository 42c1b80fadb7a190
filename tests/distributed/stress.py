"""A process of a job in which many programs over overlapping groups of devices are launched, none of them awaited.

All processes launch in one order, but each is held up at other places, and programs have inputs that are ready at once
or late. What shares a device must run in the order of the launches, or pieces get mixed up, or nothing moves.
`python -m tests.distributed.stress SEED` under `alpa-lite launch`.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import alpa_lite as al
from alpa_lite.runtime.execute.crossing import Blanks, Exchange, Sent, token
from alpa_lite.runtime.job.processes import devices_of, in_turn, is_here

NUM_LAUNCHES, IN_FLIGHT, SIZE = 300, 14, 3000


@jax.jit
def late(array: jax.Array, matrix: jax.Array) -> jax.Array:
    """The array, after a while."""
    for _ in range(30):
        matrix = jnp.tanh(matrix @ matrix)
    return array + 0 * jnp.sum(matrix)


def check(pieces: list[Sent], found: dict[int, Any], value: int) -> None:
    for piece in pieces:
        if is_here(piece.target):
            np.testing.assert_array_equal(found[piece.number], np.full(SIZE, value + piece.number, np.float32))


def rings_arrive(seed: int) -> None:
    """Rings over random groups of devices, in a random order that all processes draw alike."""
    random = np.random.default_rng(seed)
    devices, blanks = jax.devices(), Blanks()
    matrices = {d: jax.device_put(random.normal(size=(200, 200)).astype(np.float32), d) for d in jax.local_devices()}
    rings: list[tuple[list[Sent], Exchange]] = []
    for _ in range(6):
        chosen = [devices[i] for i in random.permutation(len(devices))[: random.integers(2, len(devices) + 1)]]
        pairs = enumerate(zip(chosen, [*chosen[1:], chosen[0]], strict=True))
        pieces = [Sent(number=n, shape=(SIZE,), source=a, target=b) for n, (a, b) in pairs]
        rings.append((pieces, Exchange(pieces, np.float32, blanks)))
    flying: list[tuple[list[Sent], dict[int, Any], int]] = []
    for number in range(NUM_LAUNCHES):
        pieces, exchange = rings[random.integers(len(rings))]
        slow = random.integers(0, 4, len(pieces)) == 0
        if not exchange.is_here:
            continue
        sent: dict[int, Any] = {}
        for piece, waits in zip(pieces, slow, strict=True):
            if is_here(piece.source):
                array = jax.device_put(np.full(SIZE, number + piece.number, np.float32), piece.source)
                sent[piece.number] = late(array, matrices[piece.source]) if waits else array
        flying.append((pieces, exchange(sent)[0], number))
        if len(flying) > IN_FLIGHT:
            check(*flying.pop(0))
    for each in flying:
        check(*each)
    print("all pieces arrived", flush=True)


def gathered(mesh: Mesh, size: int) -> Any:
    """Gathers an array along the first axis of a mesh, in every group; compiled, and run once."""

    def gather(x: jax.Array) -> Any:
        return lax.all_gather(x, mesh.axis_names[0], tiled=True), token()

    spec = PartitionSpec(mesh.axis_names)
    outs = (PartitionSpec(mesh.axis_names[1:]), PartitionSpec())
    program = jax.shard_map(gather, mesh=mesh, in_specs=spec, out_specs=outs, check_vma=False)
    like = jax.ShapeDtypeStruct((mesh.size * size,), np.float32, sharding=NamedSharding(mesh, spec))
    return in_turn(jax.jit(program).lower(like).compile(), devices_of(mesh)), like


def groups_agree(seed: int) -> None:
    """Programs on one device of each process and on all gather in the same groups, with inputs late or there."""
    random = np.random.default_rng(seed)
    rows = np.array(jax.devices()).reshape(jax.process_count(), -1)
    grid = gathered(Mesh(rows, ("process", "device")), 1000)
    column = gathered(Mesh(rows[:, 0], ("process",)), 10)
    matrices = {d: jax.device_put(random.normal(size=(200, 200)).astype(np.float32), d) for d in jax.local_devices()}
    flying: list[tuple[Any, np.ndarray[Any, Any]]] = []
    for number in range(NUM_LAUNCHES):
        (program, like), waits = (grid, True) if random.integers(3) else (column, False)
        whole = np.arange(like.shape[0], dtype=np.float32) + number
        blocks: list[Any] = []
        for device, index in like.sharding.addressable_devices_indices_map(like.shape).items():
            block = jax.device_put(whole[index], device)
            blocks.append(late(block, matrices[device]) if waits else block)
        array = jax.make_array_from_single_device_arrays(like.shape, like.sharding, blocks)
        sizes = (jax.process_count(), like.shape[0] // 1000 // jax.process_count() if waits else 1, -1)
        flying.append((program(array)[0], whole.reshape(sizes).swapaxes(0, 1).reshape(-1)))
        if len(flying) > IN_FLIGHT:
            gathers_to(*flying.pop(0))
    for each in flying:
        gathers_to(*each)
    print("all groups agree", flush=True)


def gathers_to(array: Any, whole: np.ndarray[Any, Any]) -> None:
    for shard in array.addressable_shards:
        np.testing.assert_array_equal(shard.data, whole[shard.index])


if __name__ == "__main__":
    al.initialize()
    rings_arrive(int(sys.argv[1]))
    groups_agree(int(sys.argv[1]))
