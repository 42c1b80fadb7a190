"""Small clusters with round numbers, so that expected times can be worked out by hand."""

from dataclasses import replace

import pytest

from cost_models import Cluster, Device, Link


@pytest.fixture(scope="session")
def cluster() -> Cluster:
    """Four hosts of eight devices; 100 GB/s and 1 us inside, 10 GB/s and 10 us between hosts."""
    device = Device(
        name="toy",
        memory_bytes=16e9,
        memory_bandwidth=1e12,
        peak_flops={"float32": 10e12, "float16": 100e12},
        launch_seconds=5e-6,
        dispatch_seconds=1e-4,
    )
    return Cluster(
        name="toy",
        device=device,
        num_hosts=4,
        devices_per_host=8,
        intra_host=Link(bandwidth_bytes_per_second=100e9, latency_seconds=1e-6),
        inter_host=Link(bandwidth_bytes_per_second=10e9, latency_seconds=10e-6),
    )


@pytest.fixture(scope="session")
def shared_cluster(cluster: Cluster) -> Cluster:
    """One host whose eight devices are run by one processor."""
    return replace(cluster, num_hosts=1, shared_processor=True)
