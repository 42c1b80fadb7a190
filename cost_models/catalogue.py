"""Look up devices and links by name, and validate descriptions of hardware.

`devices/*.json` holds one accelerator each, `links/*.json` one generation of links each, both with a source for every
value. A cluster names them or spells them out:

    "device": "a100-sxm-40gb"                 or an object with the fields of `Device`
    "intra_host": "nvlink3"                   or an object with the fields of `Link`
    "inter_host": {"link": "infiniband", "bandwidth_bytes_per_second": 50e9}      a named link with other values
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, cast

from cost_models.checks import ClusterError, JsonObject, parse_json
from cost_models.hardware import Device, HostMemory, Link

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_MAX_BYTES, _MAX_VALUES = 2**20, 100_000

#: Keys that document the origin of values; they are ignored.
COMMENT_KEYS = ("sources", "notes")

#: Plausible range of each quantity: values outside are almost certainly in another unit.
_PLAUSIBLE: Mapping[str, tuple[float, float, str]] = {
    "memory_bytes": (1e6, 1e14, "bytes: 16 GB is 16e9"),
    "memory_bandwidth": (1e8, 1e15, "bytes per second: 900 GB/s is 900e9"),
    "bandwidth_bytes_per_second": (1e6, 1e14, "bytes per second: 25 Gb/s is 25e9 / 8"),
    "latency_seconds": (0.0, 0.5, "seconds: 7 us is 7e-6"),
    "ramp_seconds": (0.0, 0.5, "seconds: 50 us is 50e-6"),
    "skew_seconds": (0.0, 0.5, "seconds: 6 ms is 6e-3"),
    "launch_seconds": (0.0, 0.5, "seconds: 5 us is 5e-6"),
    "dispatch_seconds": (0.0, 10.0, "seconds: 100 us is 100e-6"),
}
_PLAUSIBLE_FLOPS = (1e8, 1e18, "FLOP per second: 125 TFLOP/s is 125e12")


def known_clusters() -> tuple[str, ...]:
    """Return the names of the clusters that ship with this package, sorted."""
    return _names("clusters")


def known_devices() -> tuple[str, ...]:
    """Return the names of the devices that ship with this package, sorted."""
    return _names("devices")


def known_links() -> tuple[str, ...]:
    """Return the names of the link generations that ship with this package, sorted."""
    return _names("links")


def load_device(name: str) -> Device:
    """Load a device by name ("h100-sxm-80gb", case-insensitive). Raises `ClusterError` for an unknown name."""
    return device_from_json(name)


def device_sources(name: str) -> dict[str, str]:
    """Return the source of each value of a device, by dotted key; assumptions start with "assumption"."""
    return dict(read_shipped("devices", name).get("sources", {}))


def link_sources(name: str) -> dict[str, str]:
    """Return the source of each value of a link, by key; assumptions start with "assumption"."""
    return dict(read_shipped("links", name).get("sources", {}))


def device_from_json(value: object, where: str = "'device'") -> Device:
    """Build a device from its name or from an object with its fields.

    Raises:
        ClusterError: an unknown name or key, a missing key, or an invalid value.
    """
    values = read_shipped("devices", value) if isinstance(value, str) else require_object(where, value)
    values = without_comments(values)
    check_keys(where, values, Device)
    for key in ("peak_flops", "matrix_efficiency"):
        part = values.get(key, {})
        # The efficiency may also be one number for all formats.
        if key == "peak_flops" or not isinstance(part, (int, float)):
            require_object(f"{key} of the device", part)
    _check_magnitudes(where, values)
    for dtype, rate in cast("Mapping[str, object]", values["peak_flops"]).items():
        _check_magnitude(f"peak_flops[{dtype!r}] of {where}", rate, _PLAUSIBLE_FLOPS)
    return Device(**values)


def link_from_json(value: object, where: str) -> Link:
    """Build a link from its name, from an object with its fields, or from a name ("link") with overrides.

    Raises:
        ClusterError: an unknown name or key, a missing key, or an invalid value.
    """
    values = {"link": value} if isinstance(value, str) else dict(require_object(where, value))
    values = without_comments(values)
    if "link" in values:
        name = values.pop("link")
        values = {**without_comments(read_shipped("links", name)), **values}
    check_keys(where, values, Link)
    _check_magnitudes(where, values)
    return Link(**values)


def host_memory_from_json(value: object, where: str) -> HostMemory:
    """Build the memory of a host from an object with its fields, whose link may be a name.

    Raises:
        ClusterError: an unknown name or key, a missing key, or an invalid value.
    """
    values = without_comments(require_object(where, value))
    check_keys(where, values, HostMemory)
    _check_magnitudes(where, values)
    return HostMemory(memory_bytes=values["memory_bytes"], link=link_from_json(values["link"], f"'link' of {where}"))


def check_keys(
    where: str, values: Mapping[str, object], cls: type[DataclassInstance], optional: Collection[str] = ()
) -> None:
    """Raise ClusterError unless the keys of `values` match the fields of `cls`; those in `optional` may be missing."""
    known = {field.name for field in fields(cls)}
    needed = {each.name for each in fields(cls) if each.default is MISSING and each.default_factory is MISSING}
    missing, unknown = sorted(needed - set(values) - set(optional)), sorted(set(values) - known)
    # A misspelt key is unknown and missing at once; its own spelling helps more than the name of the missing key.
    if unknown:
        raise ClusterError(
            f"{where} has the unknown keys {', '.join(unknown)}: known are {', '.join(sorted(known))}."
            f"{_meant(unknown, known)} Correct or remove them."
        )
    if missing:
        raise ClusterError(f"{where} lacks {', '.join(missing)}: add them (every quantity is in bytes and seconds).")


def require_object(where: str, value: object) -> JsonObject:
    """Return the value as a mapping. Raises `ClusterError` if it is none."""
    if isinstance(value, Mapping):
        return cast("JsonObject", value)
    raise ClusterError(f"{where} is {value!r}, but a JSON object is needed: give one key for each quantity.")


def without_comments(values: Mapping[str, object]) -> JsonObject:
    """Return the values without the keys in `COMMENT_KEYS`."""
    return {key: value for key, value in values.items() if key not in COMMENT_KEYS}


def read_shipped(folder: str, name: object) -> JsonObject:
    """Read the shipped JSON object of a name in `clusters`, `devices` or `links`.

    Raises:
        ClusterError: an unknown name (the message lists the valid ones and the closest).
    """
    known, what = _names(folder), folder.removesuffix("s")
    # Only listed names are opened, so that a name from a file can never be a path.
    if not isinstance(name, str) or name.lower() not in known:
        instead = (
            "spell it out as an object" if folder != "clusters" else "the path of a .json file that describes yours"
        )
        raise ClusterError(
            f"There is no {what} named {name!r}.{_closest(str(name), known)} Known {folder}: {', '.join(known)}. "
            f"Give one of these names, or {instead}."
        )
    text = (resources.files("cost_models") / folder / f"{name.lower()}.json").read_bytes()
    return parse_object(f"{folder}/{name.lower()}.json", text)


def read_file(path: Path) -> JsonObject:
    """Read the JSON object of a cluster file. Raises `ClusterError` if it cannot be read, or holds no JSON object."""
    try:
        with path.open("rb") as file:
            # One byte more than the limit suffices for `parse_json` to report a file that is too large.
            text = file.read(_MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        sentence = f"The cluster file {str(path)!r} cannot be read ({error}): give the path of a file."
        raise ClusterError(sentence) from error
    return parse_object(str(path), text)


def parse_object(name: str, text: bytes) -> JsonObject:
    """Parse `text` as a JSON object; raise ClusterError, which names the file `name`, if it is not one."""
    try:
        data = parse_json(text, max_bytes=_MAX_BYTES, max_values=_MAX_VALUES)
    except ValueError as error:
        raise ClusterError(f"The cluster file {name!r} is not JSON that can be used ({error}): correct it.") from error
    if not isinstance(data, dict):
        raise ClusterError(f"The cluster file {name!r} holds no JSON object: start from Cluster.to_json().")
    return cast("JsonObject", data)


def _names(folder: str) -> tuple[str, ...]:
    files = (resources.files("cost_models") / folder).iterdir()
    return tuple(sorted(item.name.removesuffix(".json") for item in files if item.name.endswith(".json")))


def _closest(name: str, known: Collection[str]) -> str:
    # A prefix is more likely meant than a similar name: "h100" for "h100-sxm-80gb".
    longer = [each for each in known if name and each.startswith(name.lower())]
    close = longer[:4] or difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.4)
    return f" Did you mean {' or '.join(map(repr, close))}?" if close else ""


def _meant(unknown: Collection[str], known: Collection[str]) -> str:
    pairs = [(key, difflib.get_close_matches(key, known, n=1, cutoff=0.6)) for key in unknown]
    hints = [f"{close[0]!r} for {key!r}" for key, close in pairs if close]
    return f" Did you mean {', '.join(hints)}?" if hints else ""


def _check_magnitudes(where: str, values: Mapping[str, object]) -> None:
    for key, plausible in _PLAUSIBLE.items():
        if key in values:
            _check_magnitude(f"{key} of {where}", values[key], plausible)


def _check_magnitude(what: str, value: object, plausible: tuple[float, float, str]) -> None:
    low, high, unit = plausible
    # The field checks of Device and Link reject values that are not numbers or not positive.
    if isinstance(value, (int, float)) and 0 < value and not low <= value <= high:
        raise ClusterError(f"{what} is {value!r}, which no hardware has: is it in another unit? Give it in {unit}.")
