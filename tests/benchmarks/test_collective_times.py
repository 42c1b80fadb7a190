from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks.collective_times import Comparison, Skipped, compare, main
from cost_models import Collective, Group, load_cluster
from cost_models.communication import collective_seconds

COLUMNS = "source kind hardware nodes gpus_per_node n_ranks inter_link collective size_bytes".split()
COLUMNS += "time_us algbw_GBps busbw_GBps latency_us efficiency notes".split()


def row(**values: object) -> Mapping[str, str]:
    given = {"source": "a", "hardware": "A100-SXM", "nodes": 1, "gpus_per_node": 8, "n_ranks": 8, **values}
    return {column: str(given.get(column, "")) for column in COLUMNS}


def predicted(name: str, kind: str, size: float, members: int, per_host: int) -> float:
    cluster = load_cluster(name, num_hosts=max(1, members // per_host))
    group = Group(num_devices=members, devices_per_host=per_host)
    return collective_seconds(Collective(kind=kind, bytes=size, group=group), cluster)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "measured",
    [
        {"time_us": 8193.0},
        {"algbw_GBps": 2**30 / 8193e-6 / 1e9},
        {"busbw_GBps": 2 * 7 / 8 * 2**30 / 8193e-6 / 1e9},
    ],
)
def test_times_and_both_bandwidths_mean_the_same(measured: dict[str, float]):
    found = compare(row(collective="all_reduce", size_bytes=2**30, **measured))
    assert isinstance(found, Comparison)
    assert found.ratio == pytest.approx(predicted("dgx-a100", "all_reduce", 2**30, 8, 8) / 8193e-6)


def test_networks_and_instances_are_read_from_their_texts():
    values = {"collective": "all_gather", "size_bytes": 1e9, "time_us": 1e6, "nodes": 2, "n_ranks": 16}
    named = compare(row(**values, inter_link="p4de 4x100 Gb/s EFA v1"))
    stated = compare(row(**values, inter_link="4x HDR 200 Gb/s"))
    assert isinstance(named, Comparison) and isinstance(stated, Comparison)
    assert named.ratio == pytest.approx(predicted("p4de.24xlarge", "all_gather", 1e9, 16, 8))
    # 15/16 of 1 GB through four cards of 25 GB/s at 0.92.
    assert stated.ratio == pytest.approx(15 / 16 / (0.92 * 100), rel=0.05)


def test_an_efficiency_is_compared_with_the_time_at_data_sheet_rates():
    values = {"hardware": "Hopper", "collective": "ring collectives over NIC", "size_bytes": 2**34, "efficiency": 0.8}
    found = compare(row(**values))
    assert isinstance(found, Comparison)
    ideal = 7 / 8 * 2**34 / 450e9
    assert found.ratio == pytest.approx(0.8 * predicted("dgx-h100", "all_gather", 2**34, 8, 8) / ideal)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"notes": "slow: likely misconfigured"}, "misconfigured"),
        ({"collective": "compute/communication overlap slowdown"}, "no collective of ours"),
        ({"size_bytes": ""}, "no size"),
        ({"hardware": "abacus"}, "hardware or network not stated"),
        ({"nodes": 2, "n_ranks": 16}, "hardware or network not stated"),
        ({"time_us": ""}, "no time"),
    ],
)
def test_rows_that_say_too_little_are_skipped(values: dict[str, object], why: str):
    assert compare(row(**{"collective": "all_reduce", "size_bytes": 1e6, "time_us": 100, **values})) == Skipped(why)


def test_the_table_has_a_line_for_each_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rows = [
        row(source=source, collective="all_reduce", size_bytes=size, time_us=100)
        for source, size in (("first", 1e6), ("first", 2e6), ("second", "large"))
    ]
    rows.append(row(collective="all_reduce", notes="misconfigured"))
    path = tmp_path / "measured.csv"
    path.write_text("\n".join(",".join(each.values()) for each in [dict(zip(COLUMNS, COLUMNS, strict=True)), *rows]))
    main(["--measurements", str(path), "--rows"])
    printed = capsys.readouterr().out
    assert "first" in printed and "second" in printed
    assert "1 rows skipped: 1 misconfigured" in printed
