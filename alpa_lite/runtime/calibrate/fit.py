"""Fit the constants of a cluster, so that the cost model predicts the measurements.

    minimise over θ   Σ_i ρ(log(predicted_i(θ) / measured_i)),   ρ(r) = 2 (sqrt(1 + r²) - 1)            (fit_cluster)
    predicted_i       = price of the parts of i by a ComposedCostModel of the cluster θ, added up    (predicted_seconds)
    measured_i        is first made non-decreasing in the size within each series                (monotone)

θ are the logarithms of the rates, the launch time and the links, so that each stays above 0 and more bytes are never
predicted to be faster. The fit calls the cost model itself, whatever its formulas are. ρ is the soft L1 loss, which
grows only linearly with |r|: a few bad timings do not spoil the rest (Huber, Annals of Mathematical Statistics 35(1),
1964). Non-decreasing: isotonic least squares on the logarithms (scipy.optimize.isotonic_regression).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from cost_models.cluster import Cluster
from cost_models.composed import ComposedCostModel
from cost_models.work import Collective, Work

_CONVOLUTION = "device.convolution_efficiency"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """A timing and the work that it corresponds to in the cost model.

    Attributes:
        name: for display.
        series: measurements of one series differ in their size only.
        size: position within the series.
        parts: work and collectives that run one after the other, together `seconds`.
        num_active_devices: how many devices do this at the same time.
        seconds: measured.
        num_samples: number of samples of which `seconds` is the median.
    """

    name: str
    series: str
    size: float
    parts: tuple[Work | Collective, ...]
    num_active_devices: int
    seconds: float
    num_samples: int


def predicted_seconds(measurement: Measurement, cluster: Cluster) -> float:
    """Return the time of a measurement as the cost model of a cluster predicts it, in seconds."""
    model, active = ComposedCostModel(cluster), measurement.num_active_devices
    return sum(
        model.compute_seconds(part, num_active_devices=active)
        if isinstance(part, Work)
        else model.collective_seconds(part)
        for part in measurement.parts
    )


def monotone(measurements: Sequence[Measurement]) -> list[Measurement]:
    """Return the measurements with seconds that never fall while the size grows; sorted by series and size."""
    from scipy.optimize import isotonic_regression

    series: dict[str, list[Measurement]] = {}
    for measurement in measurements:
        series.setdefault(measurement.series, []).append(measurement)
    result: list[Measurement] = []
    for members in series.values():
        members.sort(key=lambda m: m.size)
        logs = isotonic_regression(np.log([max(m.seconds, 1e-12) for m in members])).x
        result += [replace(m, seconds=float(np.exp(log))) for m, log in zip(members, logs, strict=True)]
    return result


def fit_cluster(guess: Cluster, measurements: Sequence[Measurement]) -> Cluster:
    """Return the cluster like `guess` whose constants best explain the measurements.

    Constants that no measurement depends on stay as in `guess`.
    """
    raised = monotone(measurements)
    of_devices = [m for m in raised if all(isinstance(part, Work) for part in m.parts)]
    cluster = _fit(guess, _device_constants(guess), of_devices)
    # After the devices, whose constants are fixed then.
    of_links = [m for m in raised if any(isinstance(part, Collective) for part in m.parts)]
    for link in ("intra_host", "inter_host"):
        # A group across hosts uses both links, so the link inside a host is fitted first.
        mine = [m for m in of_links if _crosses_hosts(m) == (link == "inter_host")]
        cluster = _fit(cluster, (f"{link}.bandwidth_bytes_per_second", f"{link}.latency_seconds"), mine)
    return cluster


def measured_constants(cluster: Cluster, measurements: Sequence[Measurement]) -> frozenset[str]:
    """Return the constants of a cluster that `fit_cluster` takes from measurements, as `part.field`."""
    links = {
        "inter_host" if _crosses_hosts(m) else "intra_host"
        for m in measurements
        if any(isinstance(part, Collective) for part in m.parts)
    }
    of_links = {f"{link}.{field}" for link in links for field in ("bandwidth_bytes_per_second", "latency_seconds")}
    return frozenset({".".join(name.split(".")[:2]) for name in _device_constants(cluster)} | of_links)


def _fit(guess: Cluster, names: Sequence[str], measurements: Sequence[Measurement]) -> Cluster:
    """Return the cluster with the best values of the constants `names`, the others fixed."""
    from scipy.optimize import least_squares

    if not measurements:
        return guess
    measured = np.log([m.seconds for m in measurements])

    def residuals(shifts: np.ndarray) -> np.ndarray:
        cluster = _shifted(guess, dict(zip(names, np.exp(shifts), strict=True)))
        # A price may be zero, whose logarithm would end the fit.
        predicted = np.log([max(predicted_seconds(m, cluster), 1e-15) for m in measurements])
        # The last terms pull very weakly towards the guess: they determine constants that no measurement depends on.
        return np.concatenate([predicted - measured, 1e-2 * shifts])

    found = min(
        (least_squares(residuals, start, loss="soft_l1", diff_step=1e-3) for start in _starts(len(names))),
        key=lambda result: result.cost,
    )
    return _shifted(guess, dict(zip(names, np.exp(found.x), strict=True)))


def _starts(num_constants: int) -> list[np.ndarray]:
    """Return several starting points: minima and maxima in the formulas have flat regions without a gradient."""
    if num_constants == 2:
        return [np.array(pair) for pair in product((-3.0, 0.0, 3.0), repeat=2)]
    return [np.full(num_constants, shift) for shift in (-1.5, 0.0, 1.5)]


def _crosses_hosts(measurement: Measurement) -> bool:
    return any(isinstance(part, Collective) and part.group.num_hosts > 1 for part in measurement.parts)


def _device_constants(cluster: Cluster) -> tuple[str, ...]:
    peaks = tuple(f"device.peak_flops.{dtype}" for dtype in cluster.device.peaks)
    return ("device.memory_bandwidth", "device.launch_seconds", "device.fill_depth", *peaks, _CONVOLUTION)


def _shifted(cluster: Cluster, factors: Mapping[str, float]) -> Cluster:
    """Return a cluster with some constants multiplied by factors."""

    def of(part: str) -> dict[str, float]:
        owner = getattr(cluster, part)
        prefix = f"{part}."
        keys = [name.removeprefix(prefix) for name in factors if name.startswith(prefix) and name.count(".") == 1]
        return {key: float(getattr(owner, key) * factors[prefix + key]) for key in keys}

    peaks = {
        dtype: float(rate * factors.get(f"device.peak_flops.{dtype}", 1.0))
        for dtype, rate in cluster.device.peaks.items()
    }
    device = of("device")
    if _CONVOLUTION in factors:
        # A share of the matrix rate, which the fit moves like a rate, without a bound.
        device["convolution_efficiency"] = min(1.0, device["convolution_efficiency"])
    return replace(
        cluster,
        device=replace(cluster.device, **device, peak_flops=peaks),
        intra_host=replace(cluster.intra_host, **of("intra_host")),
        inter_host=replace(cluster.inter_host, **of("inter_host")),
    )
