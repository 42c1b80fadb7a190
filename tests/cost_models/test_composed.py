from dataclasses import FrozenInstanceError

import pytest

from cost_models import Cluster, Collective, ComposedCostModel, CostModel, CostModelError, Group, Work
from cost_models.communication import collective_seconds, transfer_seconds
from cost_models.compute import compute_seconds

WORK = Work(flops=1e12, bytes=1e9, kind="matmul")


def test_it_composes_the_formulas(cluster: Cluster):
    model: CostModel = ComposedCostModel(cluster)
    collective = Collective(kind="all_reduce", bytes=1e6, group=Group(num_devices=16, devices_per_host=8))
    assert model.cluster is cluster
    assert model.compute_seconds(WORK) == compute_seconds(WORK, cluster.device)
    assert model.collective_seconds(collective) == collective_seconds(collective, cluster)
    expected = transfer_seconds(1e6, cluster, crosses_hosts=True, num_links=2)
    assert model.transfer_seconds(1e6, crosses_hosts=True, num_links=2) == expected
    assert model.launch_seconds() == 1e-4


@pytest.mark.parametrize("num_devices", [1, 3, 8])
def test_devices_overlap_unless_they_share_a_processor(cluster: Cluster, shared_cluster: Cluster, num_devices: int):
    alone = compute_seconds(WORK, cluster.device)
    assert ComposedCostModel(cluster).compute_seconds(WORK, num_active_devices=num_devices) == alone
    shared = ComposedCostModel(shared_cluster).compute_seconds(WORK, num_active_devices=num_devices)
    assert shared == pytest.approx(num_devices * alone)


def test_no_active_device_is_refused_and_models_do_not_change(cluster: Cluster):
    model = ComposedCostModel(cluster)
    with pytest.raises(CostModelError, match="num_active_devices is 0"):
        model.compute_seconds(WORK, num_active_devices=0)
    with pytest.raises(FrozenInstanceError):
        model.cluster = cluster  # pyright: ignore[reportAttributeAccessIssue]
    assert hash(model) == hash(ComposedCostModel(cluster))
