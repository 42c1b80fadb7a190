"""How far a predicted step may be off: a range that holds in four of five cases.

    u       =  sqrt(KERNELS² + (NETWORK · share)²)      share: of the step, by collectives, hidden ones included
    range   =  step · exp(-u)   to   step · exp(u + AT_SCALE · log2(devices / 8))

Errors of the rates that kernels and links reach go both ways. What a prediction leaves out goes one way: hosts that are
late, traffic of others, links that fail and are retried, all of which grow with the number of devices.

The three numbers are from 156 published runs in 41 groups, on up to some thousands of devices: their ratio is set by
hand, and their size so that 80 % of the rows lie in their range, in the mean over groups. Set without a group, the
range holds for 79 % of the rows of that group. Some runs were chosen because an earlier model was far off on them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

KERNELS = 0.11
"""Deviation of the time of kernels, as the logarithm of a factor."""
NETWORK = 0.28
"""The same for collectives."""
AT_SCALE = 0.045
"""By how much a step takes longer each time that the devices double from eight on, as the logarithm of a factor."""

_FEW_DEVICES = 8


class LikelyRange(NamedTuple):
    """The seconds between which a step lies in four of five cases."""

    low: float
    high: float

    def contains(self, seconds: float) -> bool:
        """Return whether a time lies in the range."""
        return self.low <= seconds <= self.high


def indistinguishable(
    seconds: float, likely: LikelyRange | None, other: float, other_likely: LikelyRange | None
) -> bool:
    """Return whether each of two predicted steps lies in the range of the other; False where a range is unknown."""
    if likely is None or other_likely is None:
        return False
    return likely.contains(other) and other_likely.contains(seconds)


def likely_range(step_seconds: float, *, collective_seconds: float, num_devices: int) -> LikelyRange:
    """Return the range of a predicted step.

    Args:
        step_seconds: the predicted seconds.
        collective_seconds: those of them in which a device takes part in collectives, hidden ones included.
        num_devices: the devices that run the step.
    """
    share = min(1.0, collective_seconds / step_seconds) if step_seconds > 0 else 0.0
    either_way = math.hypot(KERNELS, NETWORK * share)
    at_scale = AT_SCALE * max(0.0, math.log2(num_devices / _FEW_DEVICES))
    return LikelyRange(step_seconds * math.exp(-either_way), step_seconds * math.exp(either_way + at_scale))
