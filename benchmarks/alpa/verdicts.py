"""What holds of the prices of a case, and what does not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.alpa.orderings import Claim
from benchmarks.alpa.price import Price, best

#: By how much a predicted rate may differ from a measured one.
TOLERANCE = 0.15
_ROUNDING = 1 + 1e-6
OURS, ALPA, MANUAL = "alpa_lite", "Alpa", "best manual"


def verdicts(prices: Sequence[Price]) -> Iterator[Claim]:
    """Of the plans of one case."""
    by_system = {price.system: price for price in prices}
    ours = by_system.get(OURS)
    others = {ALPA: by_system.get(ALPA), MANUAL: best([p for p in prices if p.system not in (OURS, ALPA)])}
    for system, other in others.items() if ours is not None else ():
        if other is not None and other.seconds is not None:
            yield _never_worse(ours, other, system)
    for price in prices:
        if price.measured_tflops is not None:
            yield _as_measured(price)


def _never_worse(ours: Price | None, other: Price, system: str) -> Claim:
    assert ours is not None and other.seconds is not None
    return Claim(
        text=f"{other.case}: our plan is priced no worse than {'Alpa' if system == ALPA else 'the best manual'}'s",
        holds=ours.seconds is not None and ours.seconds <= other.seconds * _ROUNDING,
        figures=f"{_seconds(ours)}, theirs {_seconds(other)} ({other.system}: {other.plan})",
    )


def _as_measured(price: Price) -> Claim:
    ratio = price.ratio
    return Claim(
        text=f"{price.case}, {price.system}: predicted within {TOLERANCE:.0%} of what was measured",
        holds=ratio is not None and abs(ratio - 1) <= TOLERANCE,
        figures=f"{ratio - 1:+.1%}" if ratio is not None else price.problem,
    )


def _seconds(price: Price) -> str:
    return "no plan" if price.seconds is None else f"{price.seconds:.2f} s"
