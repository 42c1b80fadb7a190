"""What this package raises.

ValueError
└── CostModelError          a quantity that cannot be priced (negative bytes, an empty group, an unknown kind)
    └── ClusterError        a description of hardware that is incomplete, contradictory or unknown
"""

from __future__ import annotations

from cost_models.text import message


class CostModelError(ValueError):
    """A quantity was given that has no cost; the sentence says what was given, what is needed and what to do."""

    def __init__(self, *args: object) -> None:
        """Messages quote what was given: none fills more than a screen, or says anything to a terminal."""
        super().__init__(*(message(each) if isinstance(each, str) else each for each in args))


class ClusterError(CostModelError):
    """A cluster description cannot be used; the sentence says what was given, what is needed and what to do."""
