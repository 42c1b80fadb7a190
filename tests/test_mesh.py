import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alpa_lite.errors import PlanError
from alpa_lite.mesh import AxisGroup, LogicalMesh, Submesh, axis_group, logical_shapes, place, sharing, submesh_kinds


def mesh(**axes: int) -> LogicalMesh:
    return LogicalMesh(axis_names=tuple(axes), shape=tuple(axes.values()))


def test_submesh_lists_its_devices_in_cluster_order():
    submesh = Submesh(first_device=8, num_hosts=2, devices_per_host=4)
    assert submesh.devices == (8, 9, 10, 11, 12, 13, 14, 15)
    assert submesh.num_devices == 8
    assert str(submesh) == "devices 8..15"
    with pytest.raises(PlanError, match="not a submesh"):
        Submesh(first_device=0, num_hosts=0, devices_per_host=4)


def test_equal_submeshes_are_found_together():
    first, second, third = (Submesh(first_device=d, num_hosts=1, devices_per_host=2) for d in (0, 2, 4))
    assert sharing([first, second, third]) == ((0,), (1,), (2,))
    assert sharing([second, first, second, third, first]) == ((0, 2), (1, 4), (3,))
    assert sharing([]) == ()


def test_logical_mesh_names_its_axes():
    logical = mesh(data=4, model=2)
    assert str(logical) == "data=4 × model=2"
    assert logical.axis_sizes == {"data": 4, "model": 2}
    assert (logical.size("data"), logical.size("model"), logical.num_devices) == (4, 2, 8)
    assert logical.groups("model") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert logical.groups("data") == ((0, 2, 4, 6), (1, 3, 5, 7))
    with pytest.raises(PlanError, match="no axis 'expert'"):
        logical.size("expert")
    with pytest.raises(PlanError, match="one distinct name per axis"):
        LogicalMesh(axis_names=("a", "a"), shape=(2, 2))
    with pytest.raises(PlanError, match="at least one device"):
        mesh(data=0)


@pytest.mark.parametrize(
    ("hosts", "devices", "kinds"),
    [
        (1, 1, ((1, 1),)),
        (1, 8, ((1, 1), (1, 2), (1, 4), (1, 8))),
        (3, 4, ((1, 1), (1, 2), (1, 4), (2, 4), (3, 4))),
        (2, 6, ((1, 1), (1, 2), (1, 4), (1, 6), (2, 6))),
    ],
)
def test_submesh_kinds(hosts, devices, kinds):
    assert submesh_kinds(hosts, devices) == kinds


@pytest.mark.parametrize(
    ("hosts", "devices", "shapes"),
    [
        (1, 1, ((1,),)),
        (1, 2, ((2,),)),
        (1, 7, ((7,),)),
        (2, 4, ((8,), (2, 4), (4, 2))),
        (1, 12, ((12,), (2, 6), (3, 4), (4, 3), (6, 2))),
    ],
)
def test_logical_shapes(hosts, devices, shapes):
    assert logical_shapes(hosts, devices) == shapes


def assert_tiles(kinds, num_hosts, devices_per_host):
    submeshes = place(kinds, num_hosts, devices_per_host)
    assert [(submesh.num_hosts, submesh.devices_per_host) for submesh in submeshes] == list(kinds)
    assert sorted(itertools.chain.from_iterable(submesh.devices for submesh in submeshes)) == list(
        range(num_hosts * devices_per_host)
    )
    for submesh in submeshes:
        hosts = {device // devices_per_host for device in submesh.devices}
        assert len(hosts) == submesh.num_hosts


@given(st.data(), st.integers(1, 4), st.sampled_from([1, 2, 4, 8]))
def test_power_of_two_hosts_are_tiled_by_any_kinds_that_add_up(data, num_hosts, devices_per_host):
    left, kinds = num_hosts * devices_per_host, []
    while left:
        fitting = [kind for kind in submesh_kinds(num_hosts, devices_per_host) if kind[0] * kind[1] <= left]
        kinds.append(data.draw(st.sampled_from(fitting)))
        left -= kinds[-1][0] * kinds[-1][1]
    assert_tiles(kinds, num_hosts, devices_per_host)


def test_larger_submeshes_are_placed_first_and_stage_order_is_kept():
    assert [submesh.first_device for submesh in place([(1, 1), (1, 2), (2, 4), (1, 1)], 3, 4)] == [10, 8, 0, 11]
    assert [submesh.first_device for submesh in place([(1, 2)] * 4, 2, 4)] == [0, 2, 4, 6]


def test_other_host_sizes_are_tiled_where_possible():
    assert_tiles([(1, 4), (1, 1), (1, 1), (1, 2), (1, 4)], 2, 6)
    # First fit by falling size puts 5+5 on the first host, which nothing can fill up.
    assert_tiles([(1, 3), (1, 5), (1, 4), (1, 4), (1, 5), (1, 3)], 2, 12)
    with pytest.raises(PlanError, match="no arrangement keeps each part within one host"):
        place([(1, 4)] * 3, 2, 6)


def test_impossible_tilings_are_refused():
    with pytest.raises(PlanError, match=r"\(1×2, 1×1\) have 3 devices, but the 1×4 cluster has 4"):
        place([(1, 2), (1, 1)], 1, 4)
    with pytest.raises(PlanError, match="neither part of one host nor whole hosts"):
        place([(2, 2)], 2, 4)
    with pytest.raises(PlanError, match="neither part of one host nor whole hosts"):
        place([(1, 8)], 2, 4)
    with pytest.raises(PlanError, match="at least 1×1"):
        submesh_kinds(0, 4)


@pytest.mark.parametrize(
    ("hosts", "devices", "axes", "axis", "expected"),
    [
        (1, 8, {"data": 8}, "data", (8, 8, 1)),
        (2, 4, {"data": 8}, "data", (8, 4, 1)),
        (2, 4, {"data": 2, "model": 4}, "data", (2, 1, 4)),
        (2, 4, {"data": 2, "model": 4}, "model", (4, 4, 1)),
        (2, 4, {"data": 4, "model": 2}, "data", (4, 2, 2)),
        (2, 4, {"data": 4, "model": 2}, "model", (2, 2, 2)),
        (1, 8, {"data": 2, "model": 4}, "model", (4, 4, 2)),
        (1, 4, {"data": 4, "model": 1}, "model", (1, 1, 4)),
        (2, 3, {"data": 3, "model": 2}, "model", (2, 1, 2)),
        (2, 4, {"a": 2, "b": 2, "c": 2}, "b", (2, 2, 2)),
    ],
)
def test_axis_groups_on_hosts(hosts, devices, axes, axis, expected):
    submesh = Submesh(first_device=16, num_hosts=hosts, devices_per_host=devices)
    num_devices, devices_per_host, num_concurrent = expected
    assert axis_group(submesh, mesh(**axes), axis) == AxisGroup(
        num_devices=num_devices, devices_per_host=devices_per_host, num_concurrent=num_concurrent
    )


@pytest.mark.parametrize(
    ("first_host", "axes", "axis", "expected"),
    [
        (0, {"data": 4, "model": 4}, "data", 2),  # one member on each of four hosts, two hosts in a domain
        (0, {"data": 4, "model": 4}, "model", 4),  # a host each
        (0, {"data": 2, "model": 8}, "model", 8),  # two hosts that are one domain
        (0, {"data": 2, "model": 8}, "data", 1),  # one member in each domain
        (1, {"data": 2, "model": 8}, "model", 4),  # hosts 1 and 2 are of two domains
        (1, {"all": 16}, "all", 8),  # hosts 1 to 4: the middle two are one domain
    ],
)
def test_axis_groups_in_domains_of_two_hosts(first_host, axes, axis, expected):
    submesh = Submesh(first_device=4 * first_host, num_hosts=4, devices_per_host=4)
    assert axis_group(submesh, mesh(**axes), axis, hosts_per_domain=2).devices_per_domain == expected


def test_without_domains_groups_know_none():
    submesh = Submesh(first_device=0, num_hosts=2, devices_per_host=4)
    assert axis_group(submesh, mesh(data=8), "data").devices_per_domain is None
    part = Submesh(first_device=6, num_hosts=1, devices_per_host=2)
    assert axis_group(part, mesh(data=2), "data", hosts_per_domain=2).devices_per_domain == 2


def test_a_mesh_of_another_size_is_refused():
    with pytest.raises(PlanError, match="has 4 devices, but its submesh has 8"):
        axis_group(Submesh(first_device=0, num_hosts=2, devices_per_host=4), mesh(data=4), "data")
