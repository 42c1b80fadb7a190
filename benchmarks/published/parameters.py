"""The numbers of the cost model that were set on measured training steps, each with its provenance (`parameters`).

devices, links    values whose source begins with `FITTED`, each precision by itself; devices of one family that have a
                  value in common, and links of all generations, count once
programs          host seconds per kernel, read off one group of runs        `benchmarks.published.plan_of.CALL_SECONDS`
ranges            the three numbers of `cost_models.uncertainty`; they move no prediction

What data sheets, microbenchmarks and assumptions say is none of these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast

from benchmarks.published.cluster_of import family
from benchmarks.published.plan_of import CALL_SECONDS
from cost_models import uncertainty
from cost_models.catalogue import known_devices, known_links, read_shipped

FITTED = "set by hand on published"
"""The beginning of a source that is measured training steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A number that was set on measured steps.

    Attributes:
        name: the field, with the precision where there is one value for each.
        owners: devices or links that have the value, or the module.
        kind: "device", "link", "program" or "range".
        source: where the value is from, in the words of its file.
    """

    name: str
    value: float
    owners: tuple[str, ...]
    kind: str
    source: str


def parameters() -> tuple[Parameter, ...]:
    """Return all such numbers: of devices, of links, of programs, of ranges."""
    return (*_shared("device", known_devices(), "devices"), *_shared("link", known_links(), "links"), *_elsewhere())


def _shared(kind: str, names: tuple[str, ...], folder: str) -> Iterator[Parameter]:
    owners: dict[tuple[str, str, float, str], list[str]] = {}
    for name in names:
        data = read_shipped(folder, name)
        for key, source in cast(Mapping[str, str], data["sources"]).items():
            if source.startswith(FITTED):
                # What was set for one accelerator is another number for the next, even if it came out the same.
                own = family(name) if "this accelerator" in source else ""
                for field, value in _values(key, data[key]):
                    owners.setdefault((own, field, value, source), []).append(name)
    for (_, field, value, source), some in owners.items():
        yield Parameter(name=field, value=value, owners=tuple(some), kind=kind, source=source)


def _values(key: str, value: object) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for precision, number in cast(Mapping[str, float], value).items():
            yield f"{key}.{precision}", number
    else:
        yield key, cast(float, value)


def _elsewhere() -> Iterator[Parameter]:
    for fusion, seconds in CALL_SECONDS.items():
        yield Parameter(
            name=f"call_seconds of fusion {fusion!r}",
            value=seconds,
            owners=("benchmarks.published.plan_of",),
            kind="program",
            source="read off runs of VIA-Research/vTrain, hidden size 1024 on 8 A100",
        )
    for name in ("KERNELS", "NETWORK", "AT_SCALE"):
        yield Parameter(
            name=name,
            value=getattr(uncertainty, name),
            owners=("cost_models.uncertainty",),
            kind="range",
            source="156 published runs in 41 groups",
        )
