"""Move an array from one sharding to any other, across the processes of a job.

    boxes    the block of each device in the source and in the target sharding                 `_boxes`
    pieces   their intersections; a piece comes from the nearest device that has it            `course`
    windows  instead of all rows, several runs of equally many rows, one after the other: each device gets its share of
             every run, so that a run can then be sliced without communication                 `Windows`

Unlike the transfers of a plan, which are priced, these serve arrays that the caller has placed in other shardings than
the plan's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from alpa_lite.runtime.execute.crossing import Course, Crossing, Hand
from alpa_lite.runtime.execute.exchange import Blanks
from alpa_lite.runtime.job.processes import devices_of
from alpa_lite.sharding.transfer import Box


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Runs of rows along a dim: `count` runs of `size` rows, the first from row `start`."""

    dim: int
    start: int
    size: int
    count: int


def relocation(array: jax.ShapeDtypeStruct, wanted: NamedSharding, windows: Windows | None, blanks: Blanks) -> Crossing:
    """Compile a relocation. Collective: all processes that take part must call this. `array` carries its sharding."""
    return Crossing(course(array, wanted, windows), blanks)


def course(array: jax.ShapeDtypeStruct, wanted: NamedSharding, windows: Windows | None = None) -> Course:
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

    def __init__(self, held: Sequence[Box], devices: Sequence[Any]) -> None:
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

    def choose(self, owned: Box, part: Box, receiver: Any) -> int:
        """Return the sender: the receiver itself, a device of its process, or the device that has sent the fewest
        bytes.
        """

        def cost(place: int) -> tuple[bool, bool, int, int]:
            device = self.devices[place]
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
