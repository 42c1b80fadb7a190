"""Where the rows of a stacked array lie between steps, if stages hold different numbers of them or in other forms.

An array of JAX has blocks of one shape. So its rows are put into blocks of equally many, each on a group of equally
many devices, which split a dim behind the rows:

    holders   a block lies on devices of the stage that reads its rows; if several do, of one of them
    size      of the ways that take hardly more bytes per device than the stages, where all split their rows, the one
              that leaves the most rows on their own stage; else the one with the least bytes per device
    moved     between a block and the devices of its own stage before a step and after it; between stages only the
              rows of blocks that lie on another one
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

ENOUGH = 1.5
"""How many times as much as during a step a device may well hold of an array between steps, when it holds no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resting:
    """Blocks of equally many rows of an array, in order.

    rows_per_block    consecutive rows of each
    split_dim         the dim that the devices of a group split; None where each has all of a block
    group_size        devices of each group
    holders           of each block the stage on whose devices it lies
    first_devices     of each block the place of its first device among those of this stage
    """

    rows_per_block: int
    split_dim: int | None
    group_size: int
    holders: tuple[int, ...]
    first_devices: tuple[int, ...]

    def holder_of(self, row: int) -> int:
        """The stage on whose devices a row lies."""
        return self.holders[row // self.rows_per_block]


@lru_cache(maxsize=4096)
def resting(shape: tuple[int, ...], readers: tuple[int, ...], num_devices: tuple[int, ...]) -> Resting:
    """How an array [rows, ...] lies.

    `readers`: of each row, the stage that reads it; `num_devices`: of each stage.
    """
    ways = (
        found
        for rows in range(1, len(readers) + 1)
        if len(readers) % rows == 0
        for size, dim in _splits(shape, max(num_devices))
        if (found := _placed(readers, num_devices, rows, size, dim)) is not None
    )

    counts = Counter(readers)
    enough = ENOUGH * max(counts[reader] / num_devices[reader] for reader in counts)

    def order(way: Resting) -> tuple[float, ...]:
        away = sum(way.holder_of(row) != reader for row, reader in enumerate(readers))
        held = way.rows_per_block / way.group_size
        return max(held, enough), away, held, len(way.holders)

    return min(ways, key=order)


def _splits(shape: Sequence[int], most: int) -> list[tuple[int, int | None]]:
    """In how many pieces some dim behind the rows can be cut, with the largest such dim."""
    found: list[tuple[int, int | None]] = [(1, None)]
    for size in range(2, most + 1):
        dims = [d for d, n in enumerate(shape) if d > 0 and n % size == 0 and n > 0]
        if dims:
            found.append((size, max(dims, key=lambda d: shape[d])))
    return found


def _placed(
    readers: Sequence[int], num_devices: Sequence[int], rows: int, group_size: int, split_dim: int | None
) -> Resting | None:
    """Blocks of so many rows on groups of so many devices; None where there are too few of these."""
    blocks = [Counter(readers[i : i + rows]) for i in range(0, len(readers), rows)]
    room = [count // group_size for count in num_devices]
    holders = [-1] * len(blocks)
    # Where all rows have one reader there is no choice.
    for block in sorted(range(len(blocks)), key=lambda b: len(blocks[b])):
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
