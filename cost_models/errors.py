"""Exceptions that this package raises.

ValueError
└── CostModelError          a quantity that cannot be priced (negative bytes, an empty group, an unknown kind)
    └── ClusterError        a description of hardware that is incomplete, contradictory or unknown
"""

from __future__ import annotations

from cost_models.untrusted_text import message


class CostModelError(ValueError):
    """Raised for a quantity that has no cost; the message states the given value, the requirement and a remedy."""

    def __init__(self, *args: object) -> None:
        """Escape control characters in messages and truncate them, since they quote values from untrusted input."""
        super().__init__(*(message(each) if isinstance(each, str) else each for each in args))


class ClusterError(CostModelError):
    """Raised for an unusable cluster description; the message states the value, the requirement and a remedy."""
