"""The claims of the paper on the plans of a case, checked against predicted prices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from alpa_lite.cli.models.alpa_cases import Case
from benchmarks.alpa.orderings import Claim
from benchmarks.alpa.price import Price, best, seconds_per_sample

#: By how much a predicted rate may differ from a measured one.
TOLERANCE = 0.15
#: Loops over layers that are written in another number of parts change a step by less than this.
_ROUNDING = 1 + 1e-4
_SAME_WORK = 1e-6
OURS, ALPA = "alpa_lite", "Alpa"
MANUAL = ("Megatron-LM", "DeepSpeed", "PP-DP", "best manual")
#: Whom our plans are held against, and the systems whose plans these are.
RIVALS: Mapping[str, Sequence[str]] = {
    "Alpa's": (ALPA,),
    "the best manual plan": MANUAL,
    "Alpa's searches with one level alone": ("intra-op only", "inter-op only"),
}


def verdicts(prices: Sequence[Price]) -> Iterator[Claim]:
    """Yield the claims on the plans of one case."""
    ours = next((price for price in prices if price.system == OURS), None)
    for rival, systems in RIVALS.items() if ours is not None else ():
        other = best([price for price in prices if price.system in systems and _same_program(price, ours)])
        if ours is not None and other is not None:
            yield _never_worse(ours, other, rival)
    for price in prices:
        if price.measured_tflops is not None:
            yield _as_measured(price)


def no_manual_plan(case: Case, prices: Sequence[Price]) -> Claim:
    """Return the claim for a case whose manual baseline ran out of memory."""
    manual = best([price for price in prices if price.system in MANUAL])
    return Claim(
        text=f"{case.id}: every manual plan runs out of memory",
        holds=manual is None,
        figures="none fits" if manual is None else f"{manual.plan} fits",
    )


def _never_worse(ours: Price, other: Price, rival: str) -> Claim:
    return Claim(
        text=f"{other.case}: our plan is priced no worse than {rival}",
        holds=seconds_per_sample(ours) <= seconds_per_sample(other) * _ROUNDING,
        figures=f"{_seconds(ours)}, theirs {_seconds(other)} ({other.system}: {other.plan})",
    )


def _same_program(price: Price, ours: Price | None) -> bool:
    """Whether the measured step has the same recomputation as ours; without any, it has less to compute."""
    if ours is None or price.flops_per_sample is None or ours.flops_per_sample is None:
        return True
    return abs(price.flops_per_sample / ours.flops_per_sample - 1) < _SAME_WORK


def _as_measured(price: Price) -> Claim:
    ratio = price.ratio
    return Claim(
        text=f"{price.case}, {price.system}: predicted within {TOLERANCE:.0%} of what was measured",
        holds=ratio is not None and abs(ratio - 1) <= TOLERANCE,
        figures=f"{ratio - 1:+.1%}" if ratio is not None else price.problem,
    )


def _seconds(price: Price) -> str:
    return "no plan" if price.seconds is None else f"{1e3 * seconds_per_sample(price):.2f} ms per sample"
