"""What this package raises.

ValueError
└── CostModelError          a quantity that cannot be priced (negative bytes, an empty group, an unknown kind)
    └── ClusterError        a description of hardware that is incomplete, contradictory or unknown
"""

from __future__ import annotations


class CostModelError(ValueError):
    """A quantity was given that has no cost; the sentence says what was given, what is needed and what to do."""


class ClusterError(CostModelError):
    """A cluster description cannot be used; the sentence says what was given, what is needed and what to do."""
