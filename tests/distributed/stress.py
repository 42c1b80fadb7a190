"""A process of a job in which many programs over overlapping groups of devices are launched, none of them awaited.

All processes launch in one order, but each is held up at other places, and programs have inputs that are ready at once or
late. XLA's CPU client must run what shares a device in the order of the launches, or pieces get mixed up or nothing moves.
`python -m tests.distributed.stress SEED` under `alpa-lite launch`.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import alpa_lite as al
from alpa_lite.runtime.exchange import Blanks, Exchange, Sent
from alpa_lite.runtime.processes import is_here

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


def main(seed: int) -> None:
    """Rings over random groups of devices, in a random order that all processes draw alike."""
    al.initialize()
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


if __name__ == "__main__":
    main(int(sys.argv[1]))
