"""Determine which devices belong to this process, and represent arrays of which it holds no block.

In a job of several processes, each process knows all devices and describes every array, but holds only the blocks on
its own devices. An array without a block on this process is a handle: shape, dtype and sharding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding
from jax.typing import DTypeLike

from alpa_lite._jax import Device


def is_here(device: Device) -> bool:
    """Return True if a device belongs to this process."""
    return device.process_index == jax.process_index()


def any_here(devices: Iterable[Device]) -> bool:
    """Return True if this process takes part in what runs on these devices."""
    return any(map(is_here, devices))


def all_here(devices: Iterable[Device]) -> bool:
    """Return True if no other process takes part."""
    return all(map(is_here, devices))


def devices_of(mesh: Mesh | AbstractMesh) -> tuple[Device, ...]:
    """Return the devices of a mesh, row-major."""
    assert isinstance(mesh, Mesh), "an array that exists lies on devices"
    return tuple(mesh.devices.flat)


def processes_of(devices: Iterable[Device]) -> tuple[int, ...]:
    """Return the numbers of the processes that devices belong to."""
    return tuple(sorted({device.process_index for device in devices}))


def host_rows(devices: Sequence[Device]) -> list[list[Device]]:
    """Return the devices of each host (process), hosts in the order of their first device."""
    rows: dict[int, list[Device]] = {}
    for device in devices:
        rows.setdefault(device.process_index, []).append(device)
    return list(rows.values())


def host_by_host(devices: Sequence[Device]) -> list[Device]:
    """Return the devices in the order in which plans number them."""
    return [device for row in host_rows(devices) for device in row]


def handle(shape: Sequence[int], dtype: DTypeLike, sharding: Sharding) -> jax.Array:
    """Return an array without blocks on this process, which lies on devices of other processes."""
    # The dtype has to be given, as there is no block to take it from.
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, [], dtype=dtype)


def batch_sharding() -> NamedSharding:
    """Return the sharding of a batch of which each process of the job provides its rows, the first process the first
    ones.

    `jax.make_array_from_process_local_data(alpa_lite.batch_sharding(), rows)` makes the batch of the job, whatever the
    plan. Each process provides equally many rows. In a job of one process that is the whole batch on one device.
    """
    # One device per process, since each provides one part; sorted, so that all make the same mesh.
    first = [row[0] for row in host_rows(sorted(jax.devices(), key=lambda device: (device.process_index, device.id)))]
    return NamedSharding(Mesh(np.array(first), ("process",)), PartitionSpec("process"))
