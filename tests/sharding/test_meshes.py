import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alpa_lite.errors import PlanError
from alpa_lite.sharding.meshes import (
    LogicalMesh,
    Submesh,
    SubmeshKind,
    axis_group,
    cluster_kinds,
    first_submesh,
    logical_shapes,
    place,
    place_in_groups,
    sharing,
    submesh_kinds,
)


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
        (1, 5, ((1, 1), (1, 2), (1, 3), (1, 4), (1, 5))),
        (1, 6, ((1, 1), (1, 2), (1, 3), (1, 4), (1, 6))),
        (2, 5, ((1, 1), (1, 5), (2, 5))),
        (2, 6, ((1, 1), (1, 2), (1, 3), (1, 6), (2, 6))),
        (2, 12, ((1, 1), (1, 2), (1, 3), (1, 4), (1, 6), (1, 12), (2, 12))),
        (2, 30, ((1, 1), (1, 5), (1, 15), (1, 30), (2, 30))),
    ],
)
def test_submesh_kinds(hosts, devices, kinds):
    assert submesh_kinds(hosts, devices) == kinds


@pytest.mark.parametrize("num_hosts", [17, 64, 100, 128, 360, 512, 720, 1000, 4096])
def test_many_hosts_have_few_kinds(num_hosts):
    kinds = submesh_kinds(num_hosts, 8)
    hosts = [hosts for hosts, devices in kinds if devices == 8]
    assert len(kinds) <= 36
    assert kinds[-1] == (num_hosts, 8)
    assert kinds[0][0] * kinds[0][1] >= num_hosts * 8 / 512
    # A pipeline of up to eight stages gets nearly equal ones.
    for stages in range(2, 9):
        low, high = num_hosts // stages, -(-num_hosts // stages)
        assert {low, high} <= set(hosts)


def test_small_clusters_have_all_numbers_of_hosts():
    assert [hosts for hosts, devices in submesh_kinds(16, 8) if devices == 8] == list(range(1, 17))


def test_groups_of_hosts_have_kinds_of_their_own():
    kinds = cluster_kinds([2, 1], 4)
    assert [(kind.num_hosts, kind.devices_per_host) for kind in kinds if kind.group == 0] == list(submesh_kinds(2, 4))
    assert [(kind.num_hosts, kind.devices_per_host) for kind in kinds if kind.group == 1] == list(submesh_kinds(1, 4))
    assert kinds[-1] == SubmeshKind(num_hosts=3, devices_per_host=4, group=None) and kinds[-1].num_devices == 12
    assert all(kind.group == 0 for kind in cluster_kinds([3], 4))
    second = SubmeshKind(num_hosts=1, devices_per_host=2, group=1)
    assert first_submesh(second, [2, 1], 4) == Submesh(first_device=8, num_hosts=1, devices_per_host=2)
    assert first_submesh(kinds[-1], [2, 1], 4) == Submesh(first_device=0, num_hosts=3, devices_per_host=4)


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


def multisets(kinds, total):
    """Every choice of kinds that adds up to so many devices."""
    if not kinds or not total:
        return [] if total else [()]
    *others, (hosts, devices) = kinds
    size = hosts * devices
    return [
        ((hosts, devices),) * count + rest
        for count in range(total // size + 1)
        for rest in multisets(others, total - count * size)
    ]


@pytest.mark.parametrize("devices_per_host", range(1, 17))
@pytest.mark.parametrize("num_hosts", [1, 2, 3])
def test_all_kinds_that_add_up_tile_the_cluster(num_hosts, devices_per_host):
    for kinds in multisets(submesh_kinds(num_hosts, devices_per_host), num_hosts * devices_per_host):
        assert_tiles(kinds, num_hosts, devices_per_host)


def fill_no_host(sizes, host):
    """Parts, as (size, how many), that add up to whole hosts, and no choice of which fills one; None if there are none.

    As many parts of one size as fill a host are such a choice, so fewer of each size are to be tried.
    """
    within, tried = (1 << host + 1) - 1, set()

    def search(index, total, sums):
        # Bit n of `sums`: some of the parts add up to n.
        if sums >> host & 1 or (index, total % host, sums) in tried:
            return None
        if index == len(sizes):
            return () if total and total % host == 0 else None
        found_sums = sums
        for count in range(host // sizes[index]):
            rest = search(index + 1, total + count * sizes[index], found_sums)
            if rest is not None:
                return ((sizes[index], count), *rest)
            found_sums = (found_sums | found_sums << sizes[index]) & within
        tried.add((index, total % host, sums))
        return None

    return search(0, 0, 1)


def test_parts_of_hosts_of_any_size_fill_hosts_one_by_one():
    assert fill_no_host([15, 10, 6, 1], 30) == ((15, 1), (10, 2), (6, 4), (1, 1))
    for host in range(1, 129):
        parts = [devices for hosts, devices in submesh_kinds(2, host) if hosts == 1 and devices < host]
        assert fill_no_host(parts[::-1], host) is None
        assert all(host % part == 0 for part in parts)
        if host & (host - 1) == 0:
            assert parts == [2**exponent for exponent in range(host.bit_length() - 1)]


@given(st.data(), st.integers(1, 3), st.integers(1, 7))
def test_a_tiling_is_found_where_there_is_one(data, num_hosts, devices_per_host):
    left, kinds = num_hosts * devices_per_host, []
    while left:
        parts = [(1, part) for part in range(1, min(left, devices_per_host) + 1)]
        hosts = [(hosts, devices_per_host) for hosts in range(2, left // devices_per_host + 1)]
        kinds.append(data.draw(st.sampled_from(parts + hosts)))
        left -= kinds[-1][0] * kinds[-1][1]
    try:
        assert_tiles(kinds, num_hosts, devices_per_host)
    except PlanError:
        assert not can_tile(sorted(kinds, reverse=True), (devices_per_host,) * num_hosts, devices_per_host)


def can_tile(kinds, room, devices_per_host):
    """True if the kinds, whole hosts first, fill the room on hosts."""
    if not kinds:
        return not any(room)
    (hosts, devices), *rest = kinds
    if hosts > 1:
        return room[:hosts] == (devices_per_host,) * hosts and can_tile(rest, (0,) * hosts + room[hosts:], devices)
    return any(
        can_tile(rest, (*room[:host], left - devices, *room[host + 1 :]), devices_per_host)
        for host, left in enumerate(room)
        if left >= devices
    )


def test_submeshes_lie_within_their_groups():
    hosts_of_groups = [2, 1, 3]
    sizes = [(1, 2, 2), (1, 4, 1), (2, 4, 0), (1, 1, 2), (2, 4, 2), (1, 1, 2)]
    kinds = [SubmeshKind(num_hosts=hosts, devices_per_host=devices, group=group) for hosts, devices, group in sizes]
    submeshes = place_in_groups(kinds, hosts_of_groups, 4)
    assert [(submesh.num_hosts, submesh.devices_per_host) for submesh in submeshes] == [size[:2] for size in sizes]
    assert [submesh.first_device for submesh in submeshes] == [20, 8, 0, 22, 12, 23]
    whole = SubmeshKind(num_hosts=6, devices_per_host=4, group=None)
    assert place_in_groups([whole], hosts_of_groups, 4) == (Submesh(first_device=0, num_hosts=6, devices_per_host=4),)
    with pytest.raises(PlanError, match=r"In group 1 of 3 groups of hosts: The submeshes \(none\) have 0 devices"):
        place_in_groups([kinds[2]], hosts_of_groups, 4)
    with pytest.raises(PlanError, match="a group of its own, or must be the only one"):
        place_in_groups([whole, kinds[0]], hosts_of_groups, 4)
    with pytest.raises(PlanError, match="a group of its own, or must be the only one"):
        place_in_groups([SubmeshKind(num_hosts=1, devices_per_host=4, group=3)], hosts_of_groups, 4)


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
    group = axis_group(submesh, mesh(**axes), axis)
    assert (group.num_devices, group.devices_per_host, group.num_concurrent) == expected


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


@pytest.mark.parametrize(
    ("shape", "axis", "stride"),
    [((2, 4), "data", 4), ((2, 4), "model", 1), ((4, 2), "data", 2), ((4, 2), "model", 1), ((8, 1), "data", 1)],
)
def test_members_of_an_outer_axis_lie_apart(shape: tuple[int, int], axis: str, stride: int) -> None:
    host = Submesh(first_device=0, num_hosts=1, devices_per_host=8)
    assert axis_group(host, mesh(data=shape[0], model=shape[1]), axis).stride == stride


def test_members_on_different_hosts_lie_apart_by_no_stride() -> None:
    hosts = Submesh(first_device=0, num_hosts=2, devices_per_host=8)
    assert axis_group(hosts, mesh(data=2, model=8), "data").stride == 1
    assert axis_group(hosts, mesh(data=2, model=8), "model").stride == 1
