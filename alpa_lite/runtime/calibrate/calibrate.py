"""Describe this process's devices as a `Cluster`: the programs of `probes`, timed and explained by `measurements`.

    dispatch_seconds = median time of a program that does next to nothing, awaited
    device_share     = seconds of a block divided over all devices / seconds of the whole block on one, on a shared
                       processor only
    the rest         = the constants under which the cost model predicts the measurements          (fit_cluster)

`local_cluster` reads or makes such a description:

    1. the file that the caller names, if any;
    2. else the one stored for such devices (`path_for`) by `alpa-lite calibrate` or by step 3, unless damaged;
    3. else measured now, in about three seconds, and stored, so that later processes describe the same cluster and find
       their plans in the cache.

In a job of several processes, all of them take part and the first one's times and files count, so that all describe the
same cluster.

Virtual CPU devices share one processor and are described as such (`Cluster.shared_processor`): their times add up
instead of overlapping.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import json
import logging
import os
import platform
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax

from alpa_lite import _jax
from alpa_lite.errors import ExecutionError, UnusableFileWarning
from alpa_lite.runtime.calibrate.measurements import (
    Measurement,
    Stopwatch,
    TimedProgram,
    Timing,
    fit_cluster,
    measured_constants,
    num_samples,
    predicted_seconds,
    time_programs,
)
from alpa_lite.runtime.calibrate.probes import (
    QUICK,
    Probe,
    ProbeSizes,
    device_probes,
    dispatch_program,
    link_probes,
    share_programs,
    thorough_sizes,
)
from alpa_lite.runtime.job.consensus import agreed_data, agreed_number
from alpa_lite.runtime.job.processes import host_rows
from cost_models.checks import ClusterError
from cost_models.cluster import Cluster, cluster_sources, load_cluster
from cost_models.hardware import Device, Link

_logger = logging.getLogger("alpa_lite")

#: Raised when the measured constants come to mean something else.
_VERSION = 1

CACHE_VARIABLE = "ALPA_LITE_CACHE"
"""The environment variable with the folder of the plan cache; "off" stores neither plans nor quick measurements."""


def fingerprint(devices: Sequence[_jax.Device]) -> str:
    """Return the kinds and numbers of devices and hosts, and all else that affects times; equal text, equal times.

    CPU devices of all machines look the same to JAX, so the machine's name and its number of processors count there.
    """
    kinds = Counter(f"{device.platform} {device.device_kind}" for device in devices)
    hosts = len({device.process_index for device in devices})
    parts = [f"{count} × {kind}" for kind, count in sorted(kinds.items())]
    # Another version of JAX may compile the same programs to other kernels.
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


def is_cache_off() -> bool:
    """Return whether the user's environment says that nothing is to be cached."""
    return os.environ.get(CACHE_VARIABLE, "").lower() in ("off", "0", "no", "false")


def make_private(folder: Path) -> None:
    """Create a folder, and missing ones above it, readable by this user only. An existing folder stays as it is."""
    if not folder.is_dir():
        make_private(folder.parent)
        # Another process of the user may make it at the same time.
        folder.mkdir(mode=0o700, exist_ok=True)


def path_for(devices_fingerprint: str) -> Path:
    """Return the file that `alpa-lite calibrate` and a quick measurement write, and `local_cluster` reads, for devices
    with this fingerprint.
    """
    digest = hashlib.sha256(devices_fingerprint.encode()).hexdigest()[:16]
    return cache_folder() / f"{digest}.json"


Progress = Callable[[str, int, int], None]
"""Callback: the current activity, the number of steps done and the number of steps."""

QUICK_KEY = "quick measurement"
"""The entry in the sources of a cluster file that was measured quickly, which `alpa-lite calibrate` replaces."""

_QUICK_STOPWATCH = Stopwatch(run_seconds=0.005, num_rounds=5, limit_seconds=2.0)
_GUESSED_FLOPS = 1e11
#: Blocks of matrix products; a processor's vectors and registers, and the kernels of a GPU (assumptions).
_TILES: dict[str, tuple[tuple[int, int], ...]] = {
    "cpu": ((8, 8),),
    "gpu": ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A cluster and the measurements that it was fitted to.

    Attributes:
        cluster: as fitted.
        measurements: products, passes and collectives, as timed.
        dispatch, alone, together: times of an empty program; of a block on one device, and divided over all.
        fingerprint: of the devices.
        date: of the measurement, as YYYY-MM-DD.
        quick: whether few small programs were timed, in about three seconds.
    """

    cluster: Cluster
    measurements: tuple[Measurement, ...]
    dispatch: Timing
    alone: Timing | None
    together: Timing | None
    fingerprint: str
    date: str
    quick: bool = False

    def __repr__(self) -> str:
        """Return one line; `cluster` and `measurements` have all values."""
        return f"<Calibration of {self.cluster!r} by {len(self.measurements)} measurements on {self.date}>"

    def ratio(self, measurement: Measurement) -> float:
        """Return predicted over measured seconds."""
        return predicted_seconds(measurement, self.cluster) / measurement.seconds

    @property
    def errors(self) -> tuple[float, ...]:
        """The error of each prediction, as a factor of at least 1; sorted."""
        # Too long and too short by the same factor are equally wrong.
        return tuple(sorted(max(r, 1 / r) for r in map(self.ratio, self.measurements)))

    def to_json(self) -> dict[str, object]:
        """Return the cluster as `Cluster.from_json` reads it, with the origin of each value and a fit summary."""
        kind, count = self.cluster.device.name, min(m.num_samples for m in self.measurements)
        origin = f"measured on {self.date}, {kind}, median of {count} or more"
        data = self.cluster.to_json()
        keys = [f"{part}.{key}" for part in ("device", "intra_host", "inter_host") for key in data[part]]
        measured = {*measured_constants(self.cluster, self.measurements), "device.dispatch_seconds"}
        measured |= {"device_share"} if self.alone is not None else set()
        sources = {key: origin if key in measured else "assumed, not measured" for key in [*keys, "device_share"]}
        sources |= {"device.memory_bytes": f"reported on {self.date}, {kind}", "fingerprint": self.fingerprint}
        sources |= {QUICK_KEY: origin} if self.quick else {}
        # Quantiles of the sorted errors.
        errors = self.errors
        half, most = errors[len(errors) // 2], errors[int(0.9 * (len(errors) - 1))]
        notes = (
            f"Constants of a fit, not of a data sheet. Of {len(errors)} programs, half are predicted within a factor "
            f"of {half:.2f}, nine in ten within {most:.2f}, all within {errors[-1]:.2f}."
        )
        return {**data, "sources": sources, "notes": notes}

    def save(self, path: str | Path | None = None) -> Path:
        """Write the cluster file; None: where `local_cluster` looks. Of several processes, only the first one writes.

        Raises:
            ExecutionError: the file cannot be written.
        """
        target = Path(path) if path is not None else path_for(self.fingerprint)
        if jax.process_index() > 0:
            return target
        try:
            make_private(target.parent)
            # Another process may read the file, or write it at the same time.
            number, name = tempfile.mkstemp(dir=target.parent, prefix=f"{target.stem}.", suffix=".tmp")
            with os.fdopen(number, "w", encoding="utf-8") as file:
                file.write(json.dumps(self.to_json(), indent=2) + "\n")
            os.replace(name, target)
        except OSError as error:
            raise ExecutionError(
                f"The cluster file {str(target)!r} cannot be written ({error}): choose another with --out."
            ) from error
        return target


def calibrate(
    devices: Sequence[_jax.Device] | None = None,
    *,
    limit_seconds: float = 60.0,
    progress: Progress = lambda *_: None,
) -> Calibration:
    """Measure devices (default: `jax.devices()`) thoroughly: many sizes, dtypes, collectives and groups.

    Args:
        devices: equal numbers of each host's.
        limit_seconds: for the timing; compiling comes on top. Each program is timed three times at least.
        progress: see `Progress`.

    Raises:
        ExecutionError: the hosts have different numbers of devices.
    """
    chosen = tuple(jax.devices() if devices is None else devices)
    progress("a first look", 0, 1)
    first = quick_calibration(chosen).cluster
    # All devices compute at the same time, and then each gets its share of a shared processor.
    rate = first.device.peak("float32") / (len(chosen) if first.shared_processor else 1)
    sizes = thorough_sizes(first.device.memory_bytes, rate)
    guess = replace(first.device, peak_flops={**first.device.peaks, **_peaks(sizes.sides, first.device)})
    progress("compiling", 0, 1)
    programs = _programs(chosen, sizes, shared_processor=first.shared_processor)
    stopwatch = Stopwatch(limit_seconds=limit_seconds, agree=agreed_number)
    return conclude(replace(first, device=guess), programs, stopwatch, fingerprint(chosen), progress)


def quick_calibration(devices: Sequence[_jax.Device]) -> Calibration:
    """Measure devices in about three seconds."""
    chosen = tuple(devices)
    guess = _guess(chosen)
    programs = _programs(chosen, QUICK, shared_processor=guess.shared_processor)
    found = conclude(guess, programs, replace(_QUICK_STOPWATCH, agree=agreed_number), fingerprint(chosen))
    return replace(found, quick=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationPrograms:
    """The programs that describe devices.

    Attributes:
        dispatch: a nearly empty program.
        blocks: for a shared processor, a block on one device of each host, and the same divided over all; else none.
        probes: products, passes and collectives.
    """

    dispatch: TimedProgram
    blocks: Sequence[TimedProgram]
    probes: Sequence[Probe]


def _programs(devices: tuple[_jax.Device, ...], sizes: ProbeSizes, *, shared_processor: bool) -> CalibrationPrograms:
    return CalibrationPrograms(
        probes=[*device_probes(devices, sizes), *link_probes(devices, sizes)],
        dispatch=dispatch_program(devices),
        blocks=share_programs(devices) if shared_processor else (),
    )


def conclude(
    guess: Cluster,
    programs: CalibrationPrograms,
    stopwatch: Stopwatch,
    devices_fingerprint: str,
    progress: Progress = lambda *_: None,
) -> Calibration:
    """Time the programs and return the cluster like `guess` that explains them."""
    # In this order, in which the timings are taken apart below.
    timed = [programs.dispatch, *programs.blocks, *[probe.program for probe in programs.probes]]
    total, done = num_samples(len(timed), stopwatch), 0

    def step(name: str) -> None:
        nonlocal done
        progress(name, done, total)
        done += 1

    timings = time_programs(timed, stopwatch, step)
    progress("fitting", total, total)
    dispatch, *others = timings
    shares, timings = others[: len(programs.blocks)], others[len(programs.blocks) :]
    measurements = [_measurement(probe, timing) for probe, timing in zip(programs.probes, timings, strict=True)]
    # Measured directly, and known before the fit of the rest.
    guess = replace(guess, device=replace(guess.device, dispatch_seconds=dispatch.seconds))
    if shares:
        guess = replace(guess, device_share=_device_share(shares[0].seconds, shares[1].seconds, guess.devices_per_host))
    return Calibration(
        cluster=fit_cluster(guess, measurements),
        measurements=tuple(measurements),
        dispatch=dispatch,
        alone=shares[0] if shares else None,
        together=shares[1] if shares else None,
        fingerprint=devices_fingerprint,
        date=datetime.date.today().isoformat(),
    )


def _measurement(probe: Probe, timing: Timing) -> Measurement:
    return Measurement(
        name=probe.program.name,
        series=probe.series,
        size=probe.size,
        parts=probe.parts,
        num_active_devices=probe.num_active_devices,
        seconds=timing.seconds,
        num_samples=timing.num_samples,
    )


def _device_share(alone_seconds: float, together_seconds: float, num_devices: int) -> float:
    """Return the throughput of one device alone as a fraction of the throughput of all devices together."""
    # Noise may put the ratio outside of what is possible: between an equal share and the whole processor.
    return min(1.0, max(1.0 / num_devices, together_seconds / alone_seconds))


def _guess(devices: tuple[_jax.Device, ...]) -> Cluster:
    """Return the start of the fit; only counts and the memory are right."""
    rows, first = host_rows(devices), devices[0]
    if len({len(row) for row in rows}) > 1:
        raise ExecutionError(
            f"The hosts have {', '.join(str(len(row)) for row in rows)} of the devices, but a cluster has equal hosts: "
            "give as many devices of each host."
        )
    per_host = len(rows[0])
    memory = _memory(first, per_host)
    # Virtual devices of a CPU are threads on the same cores.
    shared = first.platform == "cpu" and per_host > 1
    return Cluster(
        name=f"local ({len(devices)} × {first.device_kind})",
        device=Device(
            name=first.device_kind,
            memory_bytes=memory.bytes,
            memory_reserve=memory.reserve,
            # Starting points within a few orders of magnitude: the fit tries several shifts of them.
            memory_bandwidth=1e11,
            peak_flops={"float32": _GUESSED_FLOPS, "tensorfloat32": _GUESSED_FLOPS},
            launch_seconds=1e-6,
            dispatch_seconds=1e-4,
            num_units=_num_units(first),
            tiles=_TILES.get(first.platform, ((128, 128),)),
            fill_depth=8.0,
            # The fitted rates are achieved rates, not data-sheet values, so no further efficiency applies.
            matrix_efficiency=1.0,
            convolution_efficiency=0.5,
            memory_efficiency=1.0,
        ),
        num_hosts=len(rows),
        devices_per_host=per_host,
        intra_host=Link(bandwidth_bytes_per_second=1e10, latency_seconds=1e-5),
        inter_host=Link(bandwidth_bytes_per_second=1e10, latency_seconds=1e-5),
        shared_processor=shared,
    )


def _peaks(dtypes: Sequence[str] | dict[str, tuple[int, ...]], device: Device) -> dict[str, float]:
    """Return separate peak rates (flops per second) for each timed dtype; float32 products have tensorfloat32's."""
    return {dtype: device.peak("float32") for dtype in dtypes if dtype != "float32"}


def _num_units(device: _jax.Device) -> int:
    """Return the streaming multiprocessors of a GPU; 1 for a device that does not report them."""
    return int(getattr(device, "core_count", None) or 1) if device.platform == "gpu" else 1


class _Memory(NamedTuple):
    bytes: float
    reserve: float


def _memory(device: _jax.Device, sharers: int) -> _Memory:
    """Return the bytes of a device, and the part of them that is kept for the allocator."""
    limit = _jax.allocatable_bytes(device)
    if limit is not None:
        # The limit is what the allocator has for programs, so that only fragmentation has to be provided for.
        return _Memory(limit, 0.05)
    # XLA's CPU devices allocate from the system, which needs a part for itself and for the process's own arrays.
    return _Memory(float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) / sharers, 0.2)


def local_cluster(path: str | Path | None = None, *, devices: Sequence[_jax.Device] | None = None) -> Cluster:
    """Return the devices of this process as a cluster.

    Args:
        path: a file from `alpa-lite calibrate --out`, or written by hand; None looks for the one that was stored for
            these devices, by `alpa-lite calibrate` or an earlier process, and measures quickly if there is none.
        devices: default `jax.devices()`.

    Raises:
        ExecutionError: the given file was measured on other devices, or describes another number of them.
        ClusterError: the given file cannot be read.
    """
    # The programs that are timed lie on the devices, whatever mesh the caller has set.
    with _jax.no_mesh():
        return _local_cluster(path, tuple(jax.devices() if devices is None else devices))


def _local_cluster(path: str | Path | None, devices: tuple[_jax.Device, ...]) -> Cluster:
    several = jax.process_count() > 1
    # The first process alone decides: others may have another file, or none.
    cluster = _of_first_process(path, devices) if several else _described(path, devices)
    if cluster is not None:
        return cluster
    return Cluster.from_json(agreed_data(_measured(devices).to_json())) if several else _measured(devices)


def _of_first_process(path: str | Path | None, devices: tuple[_jax.Device, ...]) -> Cluster | None:
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


def _described(path: str | Path | None, devices: tuple[_jax.Device, ...]) -> Cluster | None:
    """Return the cluster of the given file, or of the stored one if it is usable; else None.

    Raises:
        ExecutionError: see `local_cluster`.
        ClusterError: the given file cannot be read.
    """
    if path is not None:
        return _checked(load_cluster(str(path)), path, devices)
    stored = path_for(fingerprint(devices))
    # Without a warning: mostly nobody has calibrated.
    if not stored.exists():
        return None
    try:
        # The name of the file is a hash of the fingerprint, but a file may have been copied or edited.
        return _checked(load_cluster(str(stored)), stored, devices)
    except (ClusterError, ExecutionError) as error:
        sentence = (
            f"What was measured on these devices cannot be used, and they are measured quickly: {error} Run "
            "`alpa-lite calibrate` again, or delete the file."
        )
        warnings.warn(sentence, UnusableFileWarning, stacklevel=3)
        return None


def _checked(cluster: Cluster, path: str | Path, devices: tuple[_jax.Device, ...]) -> Cluster:
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
def _measured(devices: tuple[_jax.Device, ...]) -> Cluster:
    # Cached, so that all plans of a process are made for the same cluster even if nothing can be stored.
    found = quick_calibration(devices)
    path = path_for(found.fingerprint)
    # A file that cannot be used was warned about, and may be one that the user has edited.
    if not is_cache_off() and not path.exists():
        with suppress(ExecutionError):
            found.save()
            _logger.info("the devices were measured quickly; kept in %s, which `alpa-lite calibrate` improves on", path)
    return found.cluster
