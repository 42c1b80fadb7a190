"""Which of several plans is faster, and which runs out of memory: Alpa's ablations against our predictions.

Sharding within one host, one micro-batch (Zheng et al., OSDI 2022, figure 8): the logical meshes of one model, data
parallelism, ZeRO, and the search. Alpa's integer program had no memory limit, so runs are planned without one, and
those whose predicted peak exceeds the memory of a device are predicted to run out. Pipelines (figure 9): the loss of
the search if stages must have equally many layers or devices, or layers equally many operators. Figures as in
alpa-projects/alpa, branch osdi22_artifact; None: out of memory.

Pipelines are searched as Alpa did: with as many layers, 1F1B, and only the model's own recomputation. Layers of equally
many operators are layers of the model without loops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from alpa_lite.cli.models.alpa_cases import CASES, Case
from alpa_lite.planners import Auto
from alpa_lite.schedule import OneFOneB
from benchmarks.alpa.fixed_plans import XLA, FixedPlan, in_loops, num_layers
from benchmarks.alpa.price import Desk, Price
from benchmarks.published import peaks

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
Way = Literal["the search", "equal devices", "equal layers", "equal operators"]

#: TFLOPS per device by what the search for stages is restricted to.
STAGES: Mapping[str, Mapping[Way, float]] = {
    "gpt-2.6B": {"the search": 61, "equal devices": 61, "equal layers": 61, "equal operators": 40},
    "gpt-15B": {"the search": 60, "equal devices": 60, "equal layers": 60, "equal operators": 40},
    "wrn-2B": {"the search": 8.04, "equal devices": 7.2, "equal layers": 6.6, "equal operators": 7.3},
    "wrn-4B": {"equal layers": 6.3, "equal devices": 6.1, "equal operators": 3.3},
    "wrn-6.8B": {"the search": 6.6, "equal devices": 6.6, "equal layers": 4.1, "equal operators": 2.5},
}
_EQUAL: Mapping[Way, tuple[Literal["layers", "devices"], ...]] = {
    "equal layers": ("layers",),
    "equal devices": ("devices",),
}
#: More loops than any model has layers: each layer stands for itself.
_EVERY_LAYER = 1 << 20
#: Of the 16160 MiB of a V100, what Alpa let XLA have (`xla_client_mem_fraction`).
_MEMORY_BYTES = 0.9 * 16160 * 2**20
#: What measurements that are rounded to a whole number may differ by and be called equal.
_TIE = 0.05
_ROUNDING = 1 + 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A statement about the measurements, whether the predictions agree, and the figures."""

    text: str
    holds: bool
    figures: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Predicted:
    seconds: float
    peak_bytes: float

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= _MEMORY_BYTES


def orderings(say: Callable[[str], None]) -> Iterator[Claim]:
    """Yield all claims, one after the other."""
    yield from _meshes(say)
    yield from _shardings(say)
    yield from _stages(say)


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
    return Claim(
        text=f"{subject}: {'runs out of memory' if measured else 'fits into memory'}",
        holds=found.fits != measured,
        figures=f"{found.peak_bytes / 2**30:.2f} GiB of {_MEMORY_BYTES / 2**30:.2f} predicted",
    )


def _stages(say: Callable[[str], None]) -> Iterator[Claim]:
    for name, measured in STAGES.items():
        found: dict[Way, Price] = {}
        for way in measured:
            say(f"{name}: {way}")
            found[way] = Desk().price(restricted(CASES[name], way))
        yield from claims_of_stages(name, measured, found)


def restricted(case: Case, way: Way) -> FixedPlan:
    """Return the search of a case under a restriction."""
    layers = num_layers(case.id)
    by_operators = way == "equal operators"
    planner = Auto(
        num_layers=layers,
        layers="operators" if by_operators else "flops",
        equal=_EQUAL.get(way, ()),
        remat="none",
        schedule=OneFOneB(),
        manual=(),
    )
    written = in_loops(case, _EVERY_LAYER if by_operators else layers)
    return FixedPlan(system=way, case=written, planner=planner, num_microbatches=case.num_microbatches)


def claims_of_stages(name: str, measured: Mapping[Way, float], found: Mapping[Way, Price]) -> Iterator[Claim]:
    """Compare the first variant with each of the others: whether it gains anything, and how much."""
    first, *others = measured
    for way in others:
        gain = measured[first] / measured[way]
        wanted = "gains nothing over" if gain < 1 + _TIE else "is faster than"
        ours, theirs = found[first], found[way]
        if ours.seconds is None or theirs.seconds is None:
            holds = ours.seconds is not None and gain >= 1 + _TIE
            figures = next(price.problem for price in (ours, theirs) if price.seconds is None)
        else:
            predicted = theirs.seconds / ours.seconds
            holds = (gain < 1 + _TIE) == (predicted < 1 + _TIE)
            figures = f"{predicted:.2f} times as fast predicted ({ours.plan}; {theirs.plan}), {gain:.2f} times measured"
        yield Claim(text=f"{name}: {_subject(first)} {wanted} {way}", holds=holds, figures=figures)


def _subject(way: Way) -> str:
    return "the search for stages" if way == "the search" else f"a pipeline of {way}"


def _meshes_of(devices: int) -> Iterator[Mesh]:
    return ((devices // model, model) for model in range(1, devices + 1) if devices % model == 0)


def _predict(family: peaks.Family, sharding: peaks.Sharding, mesh: Mesh, say: Callable[[str], None]) -> _Predicted:
    run = peaks.Run(family=family, sharding=sharding, data=mesh[0], model=mesh[1], measured_gib=0.0)
    say(f"{family}, {sharding}, {mesh[0]} × {mesh[1]}")
    request = peaks.traced(run).request(peaks.cluster_of(run), backend=XLA.backend, num_microbatches=1)
    prediction = peaks.planner_of(run).plan(request).prediction
    return _Predicted(seconds=prediction.step_seconds, peak_bytes=max(prediction.peak_bytes))
