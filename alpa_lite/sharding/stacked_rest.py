"""The layout of a stacked array between steps, when its stages read different numbers of rows or in different specs.

A stacked array has one row per layer. All shards of a JAX array have the same shape, so the rows are grouped into row
blocks of equal size, each on a device group of equal size, which may split one dim after the row dim:

    holders   a block is on devices of a stage that reads its rows; if several stages do, on one of them
    choice    among the layouts that take at most `ENOUGH` times the bytes per device of a step in which every stage
              splits its rows over all its devices, the one with the fewest rows on a stage that does not read them; if
              there is none, the one with the fewest bytes per device
    moved     before and after a step, rows move between the devices of a block and those of its stage; only rows whose
              block is held by another stage cross between stages
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from alpa_lite.program.memo import memoized

ENOUGH = 1.5
"""The largest ratio of the bytes per device between steps to those during a step that costs nothing in the choice of a
layout: below it, fewer rows on other stages are preferred to fewer bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resting:
    """A layout of a stacked array between steps: equal row blocks, in the order of the rows.

    rows_per_block    number of consecutive rows in each block
    split_dim         the tensor dim that the devices of a group split; None if each device has the whole block
    group_size        number of devices in each group
    holders           for each block the stage that holds it
    first_devices     for each block the index of its first device among the devices of this stage
    """

    rows_per_block: int
    split_dim: int | None
    group_size: int
    holders: tuple[int, ...]
    first_devices: tuple[int, ...]

    def holder_of(self, row: int) -> int:
        """Return the stage that holds a row."""
        return self.holders[row // self.rows_per_block]


@memoized(entries=4096)
def resting(shape: tuple[int, ...], readers: tuple[int, ...], num_devices: tuple[int, ...]) -> Resting:
    """Return the layout between steps of a stacked array of shape [rows, ...].

    `readers[row]` is the stage that reads a row, and `num_devices[stage]` the number of devices of a stage.
    """
    ways = (
        found
        for rows in range(1, len(readers) + 1)
        # Only equal blocks, because all shards of a JAX array have one shape.
        if len(readers) % rows == 0
        for size, dim in _splits(shape, max(num_devices))
        if (found := _placed(readers, num_devices, rows, size, dim)) is not None
    )

    # During a step a stage holds the rows that it reads, split over all of its devices.
    counts = Counter(readers)
    enough = ENOUGH * max(counts[reader] / num_devices[reader] for reader in counts)

    def order(way: Resting) -> tuple[float, ...]:
        away = sum(way.holder_of(row) != reader for row, reader in enumerate(readers))
        # In rows per device, which bytes are proportional to.
        held = way.rows_per_block / way.group_size
        return max(held, enough), away, held, len(way.holders)

    return min(ways, key=order)


def _splits(shape: Sequence[int], most: int) -> list[tuple[int, int | None]]:
    """Return the (number of pieces, dim) into which a dim after the row dim can be split, at most `most` pieces.

    If several dims can be split into a number of pieces, the largest is chosen. A dim of None means no split.
    """
    found: list[tuple[int, int | None]] = [(1, None)]
    for size in range(2, most + 1):
        dims = [d for d, n in enumerate(shape) if d > 0 and n % size == 0 and n > 0]
        if dims:
            found.append((size, max(dims, key=lambda d: shape[d])))
    return found


def _placed(
    readers: Sequence[int], num_devices: Sequence[int], rows: int, group_size: int, split_dim: int | None
) -> Resting | None:
    """Return the layout with `rows` rows per block and `group_size` devices per group.

    Return None if the stages that read a block have no free device group for it.
    """
    blocks = [Counter(readers[i : i + rows]) for i in range(0, len(readers), rows)]
    room = [count // group_size for count in num_devices]
    holders = [-1] * len(blocks)
    # Blocks with a single reader have only one possible holder, so they choose before the blocks with several.
    for block in sorted(range(len(blocks)), key=lambda b: len(blocks[b])):
        # The stage that reads most rows of the block comes first: then the fewest rows cross between stages.
        able = [reader for reader, _ in blocks[block].most_common() if room[reader] > 0]
        if not able:
            return None
        holders[block] = able[0]
        room[able[0]] -= 1
    taken = Counter[int]()
    first_devices: list[int] = []
    for holder in holders:
        first_devices.append(taken[holder] * group_size)
        taken[holder] += 1
    return Resting(
        rows_per_block=rows,
        split_dim=split_dim,
        group_size=group_size,
        holders=tuple(holders),
        first_devices=tuple(first_devices),
    )
