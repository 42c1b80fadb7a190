"""The error of predictions against measurements.

error(row)      = predicted / measured - 1
error(group)    = mean of |error| over its rows
score           = mean of error(group) over the groups: large groups do not dominate
left out (row)  = predicted * c / measured - 1, c the median of measured / predicted over the other groups of the
              row's hardware: the effect of one more constant per device, fitted without the group (left_out)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from cost_models.uncertainty import LikelyRange


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


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupScore:
    """The errors of one group: mean absolute, mean, largest absolute; `left_out_error` as the module defines it."""

    group: str
    num_rows: int
    num_failed: int
    error: float | None
    bias: float | None
    largest: float | None
    left_out_error: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The scores of all groups, and their mean."""

    groups: tuple[GroupScore, ...]
    error: float | None
    left_out_error: float | None


def score(outcomes: Sequence[Outcome]) -> Score:
    """Return the errors by group and in all."""
    names = dict.fromkeys(outcome.group for outcome in outcomes)
    groups = tuple(_group(name, outcomes) for name in names)
    found = [group.error for group in groups if group.error is not None]
    left_out = [group.left_out_error for group in groups if group.left_out_error is not None]
    return Score(
        groups=groups,
        error=fmean(found) if found else None,
        left_out_error=fmean(left_out) if left_out else None,
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
