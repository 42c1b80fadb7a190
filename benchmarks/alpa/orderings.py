"""Which of several plans is faster, and which runs out of memory: what Alpa's ablations measured, and what we predict.

Sharding within one host, one micro-batch (Zheng et al., OSDI 2022, figure 8): the logical meshes of one model, and data
parallelism and ZeRO beside the search. Its integer program knew no limit of memory, so runs are planned without one,
and those whose predicted peak exceeds the memory of a device are said to run out. Pipelines (figure 9): stages of
equally many layers beside the stages that the search found. Figures as in alpa-projects/alpa, branch osdi22_artifact;
None: out of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import alpa_lite as al
from benchmarks.alpa.cases import CASES
from benchmarks.alpa.fixed_plans import FixedPlan, alpa_plan, given, num_layers
from benchmarks.alpa.price import BACKEND, Desk, best
from benchmarks.published import peaks
from benchmarks.requests import request_of

Mesh = tuple[int, int]

#: Seconds of a step by logical mesh.
MESHES: Mapping[peaks.Family, Mapping[int, Mapping[Mesh, float | None]]] = {
    "GPT": {2: {(2, 1): 0.537, (1, 2): 0.575}, 8: {(1, 8): 0.454, (2, 4): 0.503, (4, 2): 0.580, (8, 1): None}},
    "Wide-ResNet": {4: {(4, 1): 0.972, (2, 2): 1.19}},
}
#: TFLOPS per device on 2, 4 and 8 devices; the first is the search on its best logical mesh.
SHARDINGS: Mapping[peaks.Family, Mapping[peaks.Sharding, tuple[float | None, ...]]] = {
    "GPT": {
        "auto": (61.99, 66.44, 61.19),
        "data": (None, None, None),
        "zero-2": (61.95, 66.41, None),
        "zero-3": (52.35, 57.83, 53.21),
    },
    "MoE": {
        "auto": (38.89, 42.61, 35.10),
        "data": (None, None, None),
        "zero-2": (24.90, 26.49, None),
        "zero-3": (20.85, 22.19, 10.36),
    },
    "Wide-ResNet": {
        "auto": (7.90, 7.87, 8.00),
        "data": (6.50, None, None),
        "zero-2": (7.58, 6.95, None),
        "zero-3": (7.36, 7.06, 5.97),
    },
}
#: TFLOPS per device of stages of equally many layers, and of the stages that were searched.
EQUAL_LAYERS: Mapping[str, tuple[float, float]] = {
    "gpt-2.6B": (61.0, 61.0),
    "gpt-15B": (60.0, 60.0),
    "wrn-2B": (6.6, 8.04),
    "wrn-6.8B": (4.1, 6.6),
}
#: What measurements that are rounded to a whole number may differ by and be called equal.
_TIE = 0.05
_ROUNDING = 1 + 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A statement about what was measured, whether the predictions agree, and the figures."""

    text: str
    holds: bool
    figures: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Predicted:
    seconds: float
    peak_bytes: float

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= al.cluster("p3.16xlarge").device.memory_bytes


def orderings(say: Callable[[str], None]) -> Iterator[Claim]:
    """All of them, one after the other."""
    yield from _meshes(say)
    yield from _shardings(say)
    yield from _equal_layers(say)


def _meshes(say: Callable[[str], None]) -> Iterator[Claim]:
    for family, by_devices in MESHES.items():
        for devices, measured in by_devices.items():
            found = {mesh: _predict(family, "auto", mesh, say) for mesh in measured}
            known = sorted((seconds, mesh) for mesh, seconds in measured.items() if seconds is not None)
            order = " < ".join(str(mesh) for _, mesh in known)
            yield Claim(
                text=f"{family} on {devices} devices, time by logical mesh: {order}",
                holds=all(found[a].seconds < found[b].seconds for (_, a), (_, b) in pairwise(known)),
                figures=", ".join(
                    f"{mesh} {found[mesh].seconds:.3f} s predicted, {seconds:.3f} s measured" for seconds, mesh in known
                ),
            )
            for mesh in (mesh for mesh, seconds in measured.items() if seconds is None):
                yield _runs_out(f"{family} on {devices} devices, logical mesh {mesh}", found[mesh], measured=True)


def _shardings(say: Callable[[str], None]) -> Iterator[Claim]:
    for family, by_sharding in SHARDINGS.items():
        for place, devices in enumerate((2, 4, 8)):
            measured: dict[peaks.Sharding, float | None]
            measured = {name: rates[place] for name, rates in by_sharding.items() if name != "auto"}
            found = {name: _predict(family, name, (devices, 1), say) for name in measured}
            searched = min(_predict(family, "auto", mesh, say).seconds for mesh in _meshes_of(devices))
            ran = {name: found[name].seconds for name, rate in measured.items() if rate is not None}
            if ran:
                yield Claim(
                    text=f"{family} on {devices} devices: the search is at least as fast as {', '.join(ran)}",
                    holds=searched <= min(ran.values()) * _ROUNDING,
                    figures=f"{searched:.3f} s; "
                    + ", ".join(f"{name} {seconds:.3f} s" for name, seconds in ran.items()),
                )
            for name, rate in measured.items():
                yield _runs_out(f"{family} on {devices} devices, {name}", found[name], measured=rate is None)


def _runs_out(subject: str, found: _Predicted, *, measured: bool) -> Claim:
    memory = al.cluster("p3.16xlarge").device.memory_bytes
    return Claim(
        text=f"{subject}: {'runs out of memory' if measured else 'fits into memory'}",
        holds=found.fits != measured,
        figures=f"{found.peak_bytes / 2**30:.1f} GiB of {memory / 2**30:.1f} predicted",
    )


def _equal_layers(say: Callable[[str], None]) -> Iterator[Claim]:
    for name, (equal_tflops, searched_tflops) in EQUAL_LAYERS.items():
        case, desk = CASES[name], Desk()
        say(f"{name}: stages of equally many layers")
        searched = alpa_plan(case)
        equal = best([desk.price(plan) for plan in _equal_stages(searched, num_layers(name))])
        theirs = desk.price(searched)
        if theirs.tflops is None or equal is None or equal.tflops is None:
            continue
        measured = searched_tflops / equal_tflops
        wanted = "gains nothing over" if measured < 1 + _TIE else "is faster than"
        predicted = theirs.tflops / equal.tflops
        yield Claim(
            text=f"{name}: Alpa's search for stages {wanted} equally many layers in each",
            holds=(measured < 1 + _TIE) == (predicted < 1 + _TIE),
            figures=f"{predicted:.2f} times as fast as {equal.plan} predicted, {measured:.2f} times measured",
        )


def _equal_stages(like: FixedPlan, layers: int) -> Iterator[FixedPlan]:
    cluster = like.case.cluster
    for number in (n for n in (1, 2, 4, 8, 16) if layers % n == 0 and cluster.num_devices % n == 0):
        hosts = max(1, cluster.num_hosts // number)
        each = cluster.num_devices // number
        stage = (layers // number, (hosts, each // hosts), (each, 1))
        yield given("equal layers", CASES[like.case.id], [stage] * number, like.num_microbatches, None)


def _meshes_of(devices: int) -> Iterator[Mesh]:
    return ((devices // model, model) for model in range(1, devices + 1) if devices % model == 0)


def _predict(family: peaks.Family, sharding: peaks.Sharding, mesh: Mesh, say: Callable[[str], None]) -> _Predicted:
    run = peaks.Run(family=family, sharding=sharding, data=mesh[0], model=mesh[1], measured_gib=0.0)
    say(f"{family}, {sharding}, {mesh[0]} × {mesh[1]}")
    request = request_of(peaks.traced(run), peaks.cluster_of(run), backend=BACKEND, num_microbatches=1)
    prediction = peaks.planner_of(run).plan(request).prediction
    return _Predicted(seconds=prediction.step_seconds, peak_bytes=max(prediction.peak_bytes))
