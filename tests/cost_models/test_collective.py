import pytest

from cost_models import Collective, CostModelError, Group


@pytest.mark.parametrize(("members", "per_host", "hosts"), [(1, 1, 1), (8, 8, 1), (9, 8, 2), (16, 8, 2), (4, 1, 4)])
def test_hosts_that_a_group_spans(members: int, per_host: int, hosts: int):
    assert Group(num_devices=members, devices_per_host=per_host).num_hosts == hosts


@pytest.mark.parametrize("counts", [(0, 1, 1), (2, 0, 1), (2, 2, 0), (2.0, 1, 1), (True, 1, 1)])
def test_counts_are_whole_and_at_least_one(counts: tuple[int, int, int]):
    members, per_host, concurrent = counts
    with pytest.raises(CostModelError, match="a whole number of at least 1 is needed"):
        Group(num_devices=members, devices_per_host=per_host, num_concurrent=concurrent)


def test_a_stride_of_nothing_is_refused():
    with pytest.raises(CostModelError, match=r"Group\.stride is 0"):
        Group(num_devices=4, devices_per_host=4, stride=0)


def test_more_members_on_a_host_than_members_is_refused():
    with pytest.raises(CostModelError, match="the group has only 2 members: count the members"):
        Group(num_devices=2, devices_per_host=8)


@pytest.mark.parametrize("domain", [4, 17])
def test_members_in_a_domain_lie_between_those_of_a_host_and_all(domain: int):
    with pytest.raises(
        CostModelError, match=f"devices_per_domain is {domain}, but .* 8 members on a host and 16 in all"
    ):
        Group(num_devices=16, devices_per_host=8, devices_per_domain=domain)
    with pytest.raises(CostModelError, match="devices_per_domain is 0, but a whole number"):
        Group(num_devices=16, devices_per_host=8, devices_per_domain=0)
    assert Group(num_devices=16, devices_per_host=8, devices_per_domain=8).num_hosts == 2


def test_unknown_kinds_and_negative_sizes_are_refused():
    group = Group(num_devices=2, devices_per_host=2)
    with pytest.raises(CostModelError, match="'gossip', but only these are priced: all_reduce, all_gather"):
        Collective(kind="gossip", bytes=1, group=group)  # pyright: ignore[reportArgumentType]
    with pytest.raises(CostModelError, match=r"Collective\.bytes is -1"):
        Collective(kind="send", bytes=-1, group=group)
