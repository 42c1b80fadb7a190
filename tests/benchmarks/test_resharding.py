"""The benchmark of transfers between submeshes: the nine pairs, and that what fits on eight devices runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import resharding
from benchmarks.resharding import PAIRS, Pair, executed, hosts_of_the_paper, planned

GIB = 1 << 30


@pytest.fixture(scope="module")
def rows(devices) -> list[resharding.Row]:
    return [resharding.row(pair, hosts_of_the_paper(), 128) for pair in PAIRS]


def test_every_byte_crosses_once(rows):
    assert [row.once_bytes for row in rows] == [row.array_bytes for row in rows]
    assert {row.array_bytes for row in rows} == {2 * GIB, 3072 * 1024 * 170 * 4}


def test_the_naive_way_sends_a_copy_to_every_receiver(rows):
    assert [row.saving for row in rows] == [4, 4, 4, 1, 4, 4, 8, 8, 4]


def test_sending_once_is_predicted_to_be_no_slower(rows):
    """2 GiB leave two hosts at 8 Gbit/s each; the naive way sends four times as much."""
    assert all(row.once_seconds <= row.naive_seconds * (1 + 1e-9) for row in rows)
    assert rows[0].once_seconds == pytest.approx(GIB / 1e9, rel=0.02)
    assert rows[0].naive_seconds == pytest.approx(4 * GIB / 1e9, rel=0.02)


def test_without_the_devices_nothing_is_run(rows):
    assert all(row.executed_once is None for row in rows)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_smaller_meshes_run_as_planned(pair: Pair, devices):
    """Two devices per host instead of four."""
    fewer = [(hosts, 2) for hosts, _ in (pair.senders, pair.receivers)]
    small = replace(pair, senders=fewer[0], receivers=fewer[1], shape=(24, 32, 16))
    if 2 * (fewer[0][0] + fewer[1][0]) > len(devices):
        small = replace(small, receivers=(fewer[1][0], 1))
    for naive in (False, True):
        transfer = planned(small, naive=naive)
        assert executed(transfer) == transfer.sent_bytes


def test_the_table_and_the_json(rows, capsys, devices):
    console = Console(width=200)
    with console.capture() as captured:
        console.print(resharding.rendered(rows))
    assert "(2, 4) [-, x·y, -]" in captured.get() and "8.00×" in captured.get()
    assert resharding.main(["--devices", "0", "--scale", "128", "--json"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert [row["name"] for row in json.loads(last)["rows"]] == [pair.name for pair in PAIRS]


def test_the_kept_figures_are_those_of_today(rows):
    path = Path(__file__).parents[2] / "benchmarks" / "results" / "resharding.json"
    kept = json.loads(path.read_text(encoding="utf-8"))["rows"]
    for row, old in zip(rows, kept, strict=True):
        assert (row.naive_bytes, row.once_bytes) == (old["naive_bytes"], old["once_bytes"])
        assert (old["executed_naive"], old["executed_once"]) == (row.naive_bytes / row.array_bytes, 1.0)
