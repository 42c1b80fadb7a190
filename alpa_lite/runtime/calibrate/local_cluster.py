"""Describe this process's devices as a `Cluster`.

    1. the file that the caller names, if any;
    2. else the one that `alpa-lite calibrate` wrote for such devices (`device_fingerprint.path_for`), unless damaged;
    3. else measured now, in about three seconds, once per process.

In a job of several processes, the first one's files count, so that all describe the same cluster.

Virtual CPU devices share one processor and are described as such (`Cluster.shared_processor`): their times add up
instead of overlapping.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from alpa_lite import _jax
from alpa_lite.errors import ExecutionError, UnusableFileWarning
from alpa_lite.runtime.calibrate.calibrate import quick_cluster
from alpa_lite.runtime.calibrate.device_fingerprint import fingerprint, path_for
from alpa_lite.runtime.job.consensus import agreed_data
from cost_models.cluster import Cluster, cluster_sources, load_cluster
from cost_models.errors import ClusterError


def local_cluster(path: str | Path | None = None, *, devices: Sequence[Any] | None = None) -> Cluster:
    """Return the devices of this process as a cluster.

    Args:
        path: a file from `alpa-lite calibrate --out`, or written by hand; None looks for the one that
            `alpa-lite calibrate` stored for these devices, and measures quickly if there is none.
        devices: default `jax.devices()`.

    Raises:
        ExecutionError: the given file was measured on other devices, or describes another number of them.
        ClusterError: the given file cannot be read.
    """
    # The programs that are timed lie on the devices, whatever mesh the caller has set.
    with _jax.no_mesh():
        return _local_cluster(path, tuple(jax.devices() if devices is None else devices))


def _local_cluster(path: str | Path | None, found: tuple[Any, ...]) -> Cluster:
    several = jax.process_count() > 1
    cluster = _of_first_process(path, found) if several else _described(path, found)
    if cluster is not None:
        return cluster
    return Cluster.from_json(agreed_data(_measured(found).to_json())) if several else _measured(found)


def _of_first_process(path: str | Path | None, devices: tuple[Any, ...]) -> Cluster | None:
    """Return `_described` of the first process of the job on all processes, whose own files may differ."""
    answer: dict[str, Any] = {}
    if jax.process_index() == 0:
        try:
            cluster = _described(path, devices)
            answer = {"cluster": None if cluster is None else cluster.to_json()}
        except (ExecutionError, ClusterError) as error:
            answer = {"error": str(error)}
    answer = agreed_data(answer)
    if "error" in answer:
        raise ExecutionError(answer["error"])
    return None if answer["cluster"] is None else Cluster.from_json(answer["cluster"])


def _described(path: str | Path | None, found: tuple[Any, ...]) -> Cluster | None:
    """Return the cluster of the given file, or of the stored one if it is usable; else None.

    Raises:
        ExecutionError: see `local_cluster`.
        ClusterError: the given file cannot be read.
    """
    if path is not None:
        return _checked(load_cluster(str(path)), path, found)
    kept = path_for(fingerprint(found))
    if not kept.exists():
        return None
    try:
        return _checked(load_cluster(str(kept)), kept, found)
    except (ClusterError, ExecutionError) as error:
        sentence = (
            f"What was measured on these devices cannot be used, and they are measured quickly: {error} Run "
            "`alpa-lite calibrate` again, or delete the file."
        )
        warnings.warn(sentence, UnusableFileWarning, stacklevel=3)
        return None


def _checked(cluster: Cluster, path: str | Path, devices: tuple[Any, ...]) -> Cluster:
    """Return the cluster if it describes these devices, else raise `ExecutionError`."""
    belongs_to = cluster_sources(str(path)).get("fingerprint")
    here = fingerprint(devices)
    if belongs_to is not None and belongs_to != here:
        raise ExecutionError(
            f"The cluster file {str(path)!r} was measured on other devices ({belongs_to}) than these ({here}). Run "
            "`alpa-lite calibrate` here; to plan for the other devices, give the file as alpa_lite.cluster(path)."
        )
    if cluster.num_devices != len(devices):
        raise ExecutionError(
            f"The cluster file {str(path)!r} describes {cluster.num_devices} devices, but there are {len(devices)} "
            "here. Run `alpa-lite calibrate` here; to plan for the other devices, give the file as "
            "alpa_lite.cluster(path)."
        )
    return cluster


@functools.cache
def _measured(devices: tuple[Any, ...]) -> Cluster:
    return quick_cluster(devices)
