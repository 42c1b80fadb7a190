"""The error of predictions against measurements.

error(row)      = predicted / measured - 1
error(group)    = mean of |error| over its rows
score           = mean of error(group) over the groups: large groups do not dominate
left out (row)  = predicted * c / measured - 1, c the median of measured / predicted over the other groups of the
              row's hardware: the effect of one more constant per device, fitted without the group (left_out)
covered         = share of a group's rows that lie in the range of their prediction, which claims 80 % (`covered`)
left out        = the same, if the ranges are as wide as holds for 80 % of the rows of the other groups
              (left_out_covered): all are stretched by one factor, on a scale of logarithms (`stretch`)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from cost_models.uncertainty import LikelyRange

CLAIMED = 0.8
"""The share of steps that the range of a prediction claims to hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The prediction for a row; without seconds, `reason` says why."""

    id: str
    group: str
    hardware: str
    predicted_seconds: float | None
    measured_seconds: float | None
    likely_seconds: LikelyRange | None = None
    reason: str = ""

    @property
    def error(self) -> float | None:
        """Predicted over measured seconds, minus one; None where one of them is missing."""
        if self.predicted_seconds is None or not self.measured_seconds:
            return None
        return self.predicted_seconds / self.measured_seconds - 1

    @property
    def stretch(self) -> float | None:
        """The factor by which the range must be stretched to end at the measurement; at most 1 if it holds that."""
        if self.error is None or self.likely_seconds is None:
            return None
        end = self.likely_seconds.low if self.error > 0 else self.likely_seconds.high
        predicted = self.predicted_seconds or 0.0
        return abs(math.log1p(self.error) / math.log(end / predicted))


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupScore:
    """The errors of one group: mean absolute, mean, largest absolute; the others as the module defines them."""

    group: str
    num_rows: int
    num_failed: int
    error: float | None
    bias: float | None
    largest: float | None
    left_out_error: float | None
    covered: float | None
    left_out_covered: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The scores of all groups, and their means."""

    groups: tuple[GroupScore, ...]
    error: float | None
    left_out_error: float | None
    covered: float | None
    left_out_covered: float | None


def score(outcomes: Sequence[Outcome]) -> Score:
    """Return the errors by group and in all."""
    names = dict.fromkeys(outcome.group for outcome in outcomes)
    groups = tuple(_group(name, outcomes) for name in names)

    def mean(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return fmean(known) if known else None

    return Score(
        groups=groups,
        error=mean([group.error for group in groups]),
        left_out_error=mean([group.left_out_error for group in groups]),
        covered=mean([group.covered for group in groups]),
        left_out_covered=mean([group.left_out_covered for group in groups]),
    )


def _group(name: str, outcomes: Sequence[Outcome]) -> GroupScore:
    rows = [outcome for outcome in outcomes if outcome.group == name]
    errors = [row.error for row in rows if row.error is not None]
    absolute = [abs(error) for error in errors]
    return GroupScore(
        group=name,
        num_rows=len(rows),
        num_failed=sum(row.predicted_seconds is None for row in rows),
        error=fmean(absolute) if absolute else None,
        bias=fmean(errors) if errors else None,
        largest=max(absolute) if absolute else None,
        left_out_error=left_out(name, outcomes),
        covered=covered(rows, 1.0),
        left_out_covered=covered(rows, width([row for row in outcomes if row.group != name])),
    )


def left_out(name: str, outcomes: Sequence[Outcome]) -> float | None:
    """Return a group's mean absolute error after the correction that the module defines; None without rows."""
    errors: list[float] = []
    for row in outcomes:
        if row.group != name or row.error is None:
            continue
        others = [
            1 / (1 + other.error)
            for other in outcomes
            if other.group != name and other.hardware == row.hardware and other.error is not None
        ]
        errors.append(abs((1 + row.error) * (median(others) if others else 1.0) - 1))
    return fmean(errors) if errors else None


def covered(rows: Sequence[Outcome], stretched: float | None) -> float | None:
    """Return the share of rows within their ranges if these are stretched so; None without ranges."""
    known = [row.stretch for row in rows if row.stretch is not None]
    return fmean(stretch <= stretched for stretch in known) if known and stretched is not None else None


def width(outcomes: Sequence[Outcome]) -> float | None:
    """Return the least factor by which ranges hold `CLAIMED` of the rows in the mean over groups; None without rows."""
    groups = dict.fromkeys(outcome.group for outcome in outcomes)
    each = [[row.stretch for row in outcomes if row.group == name and row.stretch is not None] for name in groups]
    weighted = sorted((stretch, 1 / len(some)) for some in each for stretch in some)
    wanted = CLAIMED * sum(weight for _, weight in weighted)
    reached = 0.0
    for stretch, weight in weighted:
        reached += weight
        # A sum of weights is rounded.
        if reached >= wanted * (1 - 1e-12):
            return stretch
    return None
