"""The search against the best manual plan: predicted, and measured round by round.

    ratio          seconds of auto / seconds of the best manual plan, of the same model and cluster       `verdict`
    measured       the median over rounds of the ratio of the two steps of a round, with its quartiles    `Ratio.of`

The best manual plan is the one whose median is least: of many plans that are equally good this picks one that had
luck, so that the ratio of two equal plans lies a little above one.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from alpa_lite.cli.bench.row import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """A ratio of seconds, auto over another, with the quartiles over the rounds where both were measured."""

    value: float
    quartiles: tuple[float, float] | None = None

    @staticmethod
    def of(one: Row, other: Row) -> Ratio | None:
        """Return the measured ratio if both were measured, else the predicted one; None where one has no plan."""
        if one.measured_samples and other.measured_samples:
            ratios = [a / b for a, b in zip(one.measured_samples, other.measured_samples, strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
            return Ratio(value=middle, quartiles=(low, high))
        if one.predicted_step_seconds is None or other.predicted_step_seconds is None:
            return None
        return Ratio(value=one.predicted_step_seconds / other.predicted_step_seconds)

    def __str__(self) -> str:
        spread = "" if self.quartiles is None else f" ({self.quartiles[0]:.3f}–{self.quartiles[1]:.3f})"
        return f"{self.value:.3f}{spread}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The comparison for one model on one cluster.

    Attributes:
        auto, manual: the best row of the search and the best manual one; None where none has a plan.
        ratio: of their seconds, measured if they were.
        predicted: the ratio of the smallest predicted seconds of either.
    """

    model: str
    cluster: str
    auto: Row | None
    manual: Row | None
    ratio: Ratio | None
    predicted: float | None

    def __str__(self) -> str:
        if self.auto is None:
            return f"{self.model}: the search has no plan."
        if self.manual is None or self.ratio is None:
            return f"{self.model}: no manual plan to compare with; the search has one."
        return f"{self.model}: auto takes {self.ratio} of the time of the best manual plan, {self.manual.planner}."


def verdict(rows: Sequence[Row]) -> Verdict:
    """Return the verdict on the rows of one model and cluster, of which there is at least one."""
    auto, manual = best([row for row in rows if row.auto]), best([row for row in rows if not row.searched])
    least = [
        min((r.predicted_step_seconds for r in some if r.predicted_step_seconds is not None), default=None)
        for some in ([row for row in rows if row.auto], [row for row in rows if not row.searched])
    ]
    return Verdict(
        model=rows[0].model,
        cluster=rows[0].cluster,
        auto=auto,
        manual=manual,
        ratio=None if auto is None or manual is None else Ratio.of(auto, manual),
        predicted=None if least[0] is None or least[1] is None else least[0] / least[1],
    )


def best(rows: Sequence[Row]) -> Row | None:
    """Return the fastest row with a plan; measured seconds decide if there are any."""
    with_plan = [row for row in rows if not row.reason and row.step_seconds is not None]
    measured = [row for row in with_plan if row.measured_step_seconds is not None]
    return min(measured or with_plan, key=lambda row: row.step_seconds or 0.0, default=None)
