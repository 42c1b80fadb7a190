"""Which devices belong to this process, and arrays of which it holds nothing.

Of a job of several processes, each knows all devices and describes every array, but holds the blocks on its own devices
only. An array none of whose blocks it holds is a handle: shape, dtype and sharding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding


def is_here(device: Any) -> bool:
    """Whether a device belongs to this process."""
    return device.process_index == jax.process_index()


def any_here(devices: Iterable[Any]) -> bool:
    """Whether this process takes part in what runs on these devices."""
    return any(map(is_here, devices))


def all_here(devices: Iterable[Any]) -> bool:
    """Whether no other process takes part."""
    return all(map(is_here, devices))


def devices_of(mesh: Mesh | AbstractMesh) -> tuple[Any, ...]:
    """The devices of a mesh, row-major."""
    assert isinstance(mesh, Mesh), "an array that exists lies on devices"
    return tuple(mesh.devices.flat)


def processes_of(devices: Iterable[Any]) -> tuple[int, ...]:
    """The processes that devices belong to, by number."""
    return tuple(sorted({device.process_index for device in devices}))


def host_rows(devices: Sequence[Any]) -> list[list[Any]]:
    """The devices of each host (process), hosts in the order of their first device."""
    rows: dict[int, list[Any]] = {}
    for device in devices:
        rows.setdefault(device.process_index, []).append(device)
    return list(rows.values())


def host_by_host(devices: Sequence[Any]) -> list[Any]:
    """Devices as plans number them."""
    return [device for row in host_rows(devices) for device in row]


def handle(shape: Sequence[int], dtype: Any, sharding: Sharding) -> jax.Array:
    """An array that lies on devices of other processes."""
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, [], dtype=dtype)


def batch_sharding() -> NamedSharding:
    """How a batch lies of which each process of the job gives its rows: those of the first process come first.

    `jax.make_array_from_process_local_data(alpa_lite.batch_sharding(), rows)` makes the batch of the job, whatever the
    plan. Each process gives equally many rows. In a job of one process that is the whole batch on one device.
    """
    first = [row[0] for row in host_rows(sorted(jax.devices(), key=lambda device: (device.process_index, device.id)))]
    return NamedSharding(Mesh(np.array(first), ("process",)), PartitionSpec("process"))
