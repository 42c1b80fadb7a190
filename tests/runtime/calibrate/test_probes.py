"""The programs that are timed do what the cost model is told."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from alpa_lite.runtime.calibrate.probes import (
    QUICK,
    ProbeSizes,
    device_probes,
    dispatch_program,
    link_probes,
    probe_groups,
    repeated,
    share_programs,
    thorough_sizes,
)
from cost_models import Group

SMALL = ProbeSizes(
    sides={"float32": (8, 16), "bfloat16": (8,)},
    elements=(64, 1 << 18),
    channels=(4,),
    link_elements=(10,),
    every_group=True,
)


def hosts(num_hosts, per_host):
    return [
        [SimpleNamespace(process_index=h, number=h * per_host + i) for i in range(per_host)] for h in range(num_hosts)
    ]


@pytest.fixture(scope="module")
def probes(devices):
    return [*device_probes(devices, SMALL), *link_probes(devices, SMALL)]


def test_every_probe_runs_any_number_of_times(devices, probes):
    for program in [*[p.program for p in probes], *share_programs(devices), dispatch_program(devices)]:
        program.run(1)
        program.run(3)


def test_probes_are_told_apart(probes):
    assert len({p.program.name for p in probes}) == len(probes)
    assert len({(p.series, p.size) for p in probes}) == len(probes)
    assert {p.num_active_devices for p in probes} == {8}


def test_work_is_counted(probes):
    by_name = {p.program.name: p for p in probes}
    (product,) = by_name["product float32, 16"].parts
    assert (product.flops, product.bytes, product.kind) == (2 * 16**3, 3 * 4 * 16**2, "matmul")
    assert by_name["product bfloat16, 8"].parts[0].bytes == 3 * 2 * 8**2
    (wide,) = by_name["pass, 262144"].parts
    assert wide.bytes == 3 * 4 * 2**18
    for stride, side in ((1, 32), (2, 16)):
        (convolution,) = by_name[f"convolution, stride {stride}, 4"].parts
        assert convolution.flops == 3 * 2 * 8 * side * side * 9 * 4 * 4


def test_collectives_are_counted(probes):
    """Ten elements are padded to what the group divides; every group has siblings on the other devices."""
    found = {p.series: p for p in probes if "over" in p.series}
    assert len(found) == 3 * 4
    both = found["reduce_scatter + all_gather over 4 devices"]
    assert [(c.kind, c.bytes) for c in both.parts] == [("reduce_scatter", 48), ("all_gather", 48)]
    assert both.parts[0].group == Group(num_devices=4, devices_per_host=4, num_concurrent=2)
    assert found["all_reduce over 8 devices"].parts[0].bytes == 64


def test_groups_of_several_hosts():
    groups = probe_groups(hosts(2, 4), every=True)
    numbers = [[[d.number for d in row] for row in grid] for grid, _ in groups]
    assert numbers == [
        [[0, 1], [2, 3], [4, 5], [6, 7]],
        [[0, 1, 2, 3], [4, 5, 6, 7]],
        [[0, 4], [1, 5], [2, 6], [3, 7]],
        [[0, 1, 2, 3, 4, 5, 6, 7]],
    ]
    assert [group for _, group in groups] == [
        Group(num_devices=2, devices_per_host=2, num_concurrent=2),
        Group(num_devices=4, devices_per_host=4),
        Group(num_devices=2, devices_per_host=1, num_concurrent=4),
        Group(num_devices=8, devices_per_host=4),
    ]


@pytest.mark.parametrize(
    ("num_hosts", "per_host", "sizes"), [(1, 1, []), (1, 6, [2, 6]), (3, 1, [3, 3]), (1, 8, [2, 4, 8])]
)
def test_group_sizes(num_hosts, per_host, sizes):
    assert [grid.shape[1] for grid, _ in probe_groups(hosts(num_hosts, per_host), every=True)] == sizes


def test_one_device_has_no_links(devices):
    assert link_probes(devices[:1], QUICK) == []
    assert [p.num_active_devices for p in device_probes(devices[:1], QUICK)] == [1] * len(
        device_probes(devices[:1], QUICK)
    )


def test_faster_devices_get_larger_sizes():
    small, large = thorough_sizes(2e9, 2e10), thorough_sizes(8e10, 5e14)
    assert max(small.sides["float32"]) == 512 and max(large.sides["float32"]) == 8192
    assert max(small.elements) < max(large.elements)
    assert max(small.link_elements) < max(large.link_elements)
    assert all(len(sides) > 1 for sides in small.sides.values())


def test_values_stay_ordinary(devices):
    """Denormals and infinities take other times than numbers do."""
    from alpa_lite.runtime.calibrate import probes as module

    row = np.full((8, 8), 1.0, np.float32)
    for function, y, w in (
        (module._product, row, row / 8),
        (module._pass, row * 0, row / 64),
        (module._arithmetic, row * 0, row),
    ):
        for _ in range(200):
            y = jax.jit(function)(y, w)
        assert np.isfinite(y).all() and (np.abs(y) > 1e-30).all()


@pytest.mark.parametrize("repeats", [1, 5])
def test_a_program_is_repeated(repeats):
    assert repeated(lambda y, w: 2 * y + w, repeats, jax.numpy.ones(()), jax.numpy.ones(())) == 2 ** (repeats + 1) - 1
