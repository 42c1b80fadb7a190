from dataclasses import FrozenInstanceError, replace

import pytest

from cost_models import (
    Backend,
    Cluster,
    ClusterError,
    Collective,
    ComposedCostModel,
    CostModel,
    CostModelError,
    Group,
    Product,
    Work,
)
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


def test_attention_kernels_of_an_earlier_generation(cluster: Cluster):
    """Only they change, and only on devices that say how fast these are."""
    device = replace(cluster.device, attention_efficiency=0.8, ported_attention_efficiency=0.4)
    stated = replace(cluster, device=device)
    attention = replace(WORK, kind="attention", product=Product(rows=1 << 20, columns=1 << 10, depth=512, count=1))
    ported = Backend(ported_attention=True)
    usual, slow = (
        ComposedCostModel(stated, b).compute_seconds(attention) - device.launch_seconds for b in (Backend(), ported)
    )
    assert slow == pytest.approx(2 * usual)
    assert ComposedCostModel(stated, ported).compute_seconds(WORK) == ComposedCostModel(stated).compute_seconds(WORK)
    unstated = ComposedCostModel(cluster, ported).compute_seconds(attention)
    assert unstated == ComposedCostModel(cluster).compute_seconds(attention)
    with pytest.raises(ClusterError, match=r"ported_attention_efficiency is 1\.5, but it is a part of at most 1"):
        replace(device, ported_attention_efficiency=1.5)


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
