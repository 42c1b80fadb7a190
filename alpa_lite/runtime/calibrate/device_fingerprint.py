"""Identify the devices of a measurement, and the file in which it is stored for them."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections import Counter
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

#: Raised when the measured constants come to mean something else.
_VERSION = 1


def fingerprint(devices: Sequence[Any]) -> str:
    """Return the kinds and numbers of devices and hosts, and everything else that affects times; equal text, equal
    times.

    CPU devices of all machines look the same to JAX, so the machine's name and its number of processors count there.
    """
    kinds = Counter(f"{device.platform} {device.device_kind}" for device in devices)
    hosts = len({device.process_index for device in devices})
    parts = [f"{count} × {kind}" for kind, count in sorted(kinds.items())]
    parts += [f"{hosts} host{'s' if hosts > 1 else ''}", f"jax {metadata.version('jax')}"]
    if any(device.platform == "cpu" for device in devices):
        parts.append(f"{platform.node()} with {os.cpu_count()} processors")
    return ", ".join([*parts, f"calibration {_VERSION}"])


def cache_folder() -> Path:
    """Return the folder for the user's caches."""
    home = Path.home()
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "alpa_lite"
    if sys.platform == "win32":
        return home / "AppData" / "Local" / "alpa_lite"
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "alpa_lite"


def make_private(folder: Path) -> None:
    """Create a folder, and missing ones above it, readable by this user only. An existing folder stays as it is."""
    if not folder.is_dir():
        make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def path_for(devices_fingerprint: str) -> Path:
    """Return the file that `alpa-lite calibrate` writes and `local_cluster` reads for devices with this fingerprint."""
    digest = hashlib.sha256(devices_fingerprint.encode()).hexdigest()[:16]
    return cache_folder() / f"{digest}.json"
