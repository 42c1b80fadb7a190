"""Rows of stacked arrays lie between steps on devices of their own, mostly on those of the stage that reads them."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_lite.sharding.stacked_rest import Resting, resting


def _spread(counts: list[int]) -> tuple[int, ...]:
    """The reader of each part, given how many parts each reads."""
    return tuple(reader for reader, count in enumerate(counts) for _ in range(count))


def _devices(at: Resting, num_devices: tuple[int, ...]) -> list[set[tuple[int, int]]]:
    """Of each block, its devices: (stage, place)."""
    found: list[set[tuple[int, int]]] = []
    for holder, first in zip(at.holders, at.first_devices, strict=True):
        assert first + at.group_size <= num_devices[holder]
        found.append({(holder, first + i) for i in range(at.group_size)})
    return found


@settings(deadline=None)
@given(
    counts=st.lists(st.integers(0, 6), min_size=1, max_size=4).filter(any),
    devices=st.lists(st.integers(1, 8), min_size=4, max_size=4),
    row=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    order=st.randoms(use_true_random=False),
)
def test_every_device_has_one_block_at_most(
    counts: list[int], devices: list[int], row: tuple[int, int], order: Random
) -> None:
    readers, num_devices = [*_spread(counts)], tuple(devices[: len(counts)])
    order.shuffle(readers)
    at = resting((len(readers), *row), tuple(readers), num_devices)
    blocks = _devices(at, num_devices)
    assert len(set[tuple[int, int]]().union(*blocks)) == at.group_size * len(blocks)
    assert len(blocks) * at.rows_per_block == len(readers)
    assert at.group_size == 1 or (at.split_dim and row[at.split_dim - 1] % at.group_size == 0)
    for part, reader in enumerate(readers):
        among = readers[part - part % at.rows_per_block :][: at.rows_per_block]
        assert at.holder_of(part) in among
        assert len({*among}) > 1 or at.holder_of(part) == reader


@settings(deadline=None)
@given(
    counts=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    devices=st.lists(st.integers(1, 6), min_size=3, max_size=3),
    width=st.integers(1, 12),
)
def test_no_way_takes_fewer_bytes_or_leaves_more_rows_with_their_stage(
    counts: list[int], devices: list[int], width: int
) -> None:
    """All ways of giving each block to one of its readers, one by one."""
    readers, num_devices = _spread(counts), devices[: len(counts)]
    at = resting((len(readers), width), readers, tuple(num_devices))
    enough = 1.5 * max(count / n for count, n in zip(counts, num_devices, strict=False))
    held = at.rows_per_block / at.group_size
    away = sum(at.holder_of(part) != reader for part, reader in enumerate(readers))
    for parts in range(1, len(readers) + 1):
        for size in range(1, max(num_devices) + 1):
            if len(readers) % parts or width % size:
                continue
            blocks = [readers[i : i + parts] for i in range(0, len(readers), parts)]
            for holders in product(*(sorted({*block}) for block in blocks)):
                if all(holders.count(s) * size <= count for s, count in enumerate(num_devices)):
                    elsewhere = sum(parts - block.count(h) for block, h in zip(blocks, holders, strict=True))
                    assert (max(held, enough), away) <= (max(parts / size, enough), elsewhere)


@pytest.mark.parametrize(
    ("counts", "devices", "parts", "size", "away"),
    [
        ([11, 11, 10], (8, 8, 8), 2, 1, 1),  # 16 blocks of two rows, one of them read by two stages
        ([4, 4, 4, 3, 4, 4, 4, 3], (8,) * 8, 1, 2, 0),
        ([3, 1], (4, 4), 1, 1, 0),
        ([1, 1], (8, 4), 1, 4, 0),
        ([5, 3], (4, 4), 4, 4, 1),  # of blocks of one row there are more than devices
    ],
)
def test_known_cases(counts: list[int], devices: tuple[int, ...], parts: int, size: int, away: int) -> None:
    readers = _spread(counts)
    at = resting((len(readers), 2560, 4), readers, devices)
    assert (at.rows_per_block, at.group_size) == (parts, size)
    assert sum(at.holder_of(part) != reader for part, reader in enumerate(readers)) == away
