"""A cluster as data: equal hosts, equal devices, one link inside a host and one between hosts.

    num_devices = num_hosts * devices_per_host        (Cluster.num_devices)

`load_cluster` reads the descriptions that ship in `clusters/*.json` (each value with its source) or a file like them.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any, cast

from cost_models.checks import require_count
from cost_models.errors import ClusterError
from cost_models.hardware import Device as Device
from cost_models.hardware import Link as Link

_NOT_CLUSTER_KEYS = ("sources", "notes")
_OPTIONAL_KEYS = (
    "efficiency",
    "shared_processor",
    "device_share",
    "num_units",
    "tiles",
    "fill_depth",
    "matrix_efficiency",
    "convolution_efficiency",
    "memory_efficiency",
    "contention",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Hosts with equal devices.

    Attributes:
        name: for people.
        device: what each of the devices is.
        num_hosts, devices_per_host: counts of at least 1.
        intra_host: link between devices of a host; its bandwidth is that of one device, in one direction.
        inter_host: link between hosts; its bandwidth is that of one host, in one direction, shared by the devices of
            the host that communicate at once.
        shared_processor: the devices of a host are virtual and one processor runs them all (CPU virtual devices). Then
            the rates of `device` and `intra_host` are those of the whole processor, and the work and the traffic of
            different devices add up in time instead of overlapping.
        device_share: of a shared processor, the part that one device alone can keep busy, above 0 and at most 1: one
            device's program may run on fewer cores than there are.

    Raises:
        ClusterError: a count below 1, a share outside its range (the device and the links check themselves).
    """

    name: str
    device: Device
    num_hosts: int
    devices_per_host: int
    intra_host: Link
    inter_host: Link
    shared_processor: bool = False
    device_share: float = 1.0

    def __post_init__(self) -> None:
        for what in ("num_hosts", "devices_per_host"):
            advice = "describe at least one host with one device"
            require_count(f"Cluster.{what}", getattr(self, what), advice=advice, error=ClusterError)
        if self.shared_processor not in (True, False):
            raise ClusterError(f"Cluster.shared_processor is {self.shared_processor!r}, but true or false is needed.")
        if not 0 < self.device_share <= 1:
            raise ClusterError(
                f"Cluster.device_share is {self.device_share!r}, but a part above 0, up to 1, is needed."
            )

    @property
    def num_devices(self) -> int:
        """Devices of all hosts."""
        return self.num_hosts * self.devices_per_host

    def to_json(self) -> dict[str, Any]:
        """A dict of JSON values; `from_json` gives the same cluster back."""
        data = asdict(self)
        data["device"]["peak_flops"] = self.device.peaks
        data["device"]["tiles"] = [list(tile) for tile in self.device.tiles]
        if not isinstance(self.device.matrix_efficiency, (int, float)):
            data["device"]["matrix_efficiency"] = self.device.efficiencies
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Cluster:
        """The cluster that `to_json` (or a file in `clusters/`) describes; "sources" and "notes" are passed over.

        Raises:
            ClusterError: a key is missing or unknown, or a value cannot be.
        """
        values = {key: value for key, value in data.items() if key not in _NOT_CLUSTER_KEYS}
        _check_keys("The cluster", values, cls)
        parts = {key: values[key] for key in ("device", "intra_host", "inter_host")}
        for key, part in parts.items():
            _check_keys(f"{key!r} of the cluster {values['name']!r}", part, Device if key == "device" else Link)
        _check_keys("peak_flops of the device", parts["device"]["peak_flops"], None)
        built: dict[str, Any] = {
            "device": Device(**parts["device"]),
            "intra_host": Link(**parts["intra_host"]),
            "inter_host": Link(**parts["inter_host"]),
        }
        return cls(**{**values, **built})


def _check_keys(where: str, values: object, cls: type[Any] | None) -> None:
    """Refuse anything but an object with the keys of the dataclass `cls` (None: any keys)."""
    if not isinstance(values, Mapping):
        raise ClusterError(f"{where} is {values!r}, but a JSON object is needed: give one key for each quantity.")
    if cls is None:
        return
    given = {str(key) for key in cast("Mapping[object, object]", values)}
    known = {field.name for field in fields(cls)}
    missing = sorted(known - given - set(_OPTIONAL_KEYS))
    unknown = sorted(given - known)
    if missing:
        raise ClusterError(f"{where} lacks {', '.join(missing)}: add them (every quantity is in bytes and seconds).")
    if unknown:
        raise ClusterError(f"{where} has the unknown keys {', '.join(unknown)}: known are {', '.join(sorted(known))}.")


def known_clusters() -> tuple[str, ...]:
    """Names of the descriptions that ship with this package, sorted."""
    folder = resources.files("cost_models") / "clusters"
    return tuple(sorted(item.name.removesuffix(".json") for item in folder.iterdir() if item.name.endswith(".json")))


def load_cluster(name_or_path: str, *, num_hosts: int | None = None) -> Cluster:
    """The cluster of a known name ("p3.16xlarge", in any case) or of a JSON file of the same form.

    Args:
        name_or_path: one of `known_clusters()`, or a path that ends in ".json".
        num_hosts: how many hosts; None keeps what the description says (1 in all that ship).

    Raises:
        ClusterError: an unknown name (the sentence lists the known ones), an unreadable file, an impossible value.
    """
    cluster = Cluster.from_json(_read(name_or_path))
    return cluster if num_hosts is None else replace(cluster, num_hosts=num_hosts)


def cluster_sources(name: str) -> dict[str, str]:
    """Where each value of a shipped description comes from, by dotted key; assumptions start with "assumption"."""
    return dict(_read(name).get("sources", {}))


def _read(name_or_path: str) -> dict[str, Any]:
    name = name_or_path.lower()
    if name in known_clusters():
        text = (resources.files("cost_models") / "clusters" / f"{name}.json").read_text(encoding="utf-8")
    elif name.endswith(".json"):
        text = _read_file(Path(name_or_path))
    else:
        raise ClusterError(_unknown_name(name_or_path))
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ClusterError(f"The cluster file {name_or_path!r} is not JSON ({error}): correct that line.") from error
    if not isinstance(data, dict):
        raise ClusterError(f"The cluster file {name_or_path!r} holds no JSON object: start from Cluster.to_json().")
    return cast("dict[str, Any]", data)


def _read_file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        sentence = f"The cluster file {str(path)!r} cannot be read ({error}): give the path of a file."
        raise ClusterError(sentence) from error


def _unknown_name(name: str) -> str:
    known = known_clusters()
    close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.4)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return (
        f"There is no cluster named {name!r}.{hint} Known clusters: {', '.join(known)}. "
        "Give one of these names, or the path of a .json file that describes yours."
    )
