"""Explanations in tests price every value, however busy the machine is."""

import math

import pytest


@pytest.fixture(autouse=True)
def time_enough(monkeypatch):
    """No limit of time for pricing."""
    monkeypatch.setattr("alpa_lite.inspection.why.explain.PRICING_SECONDS", math.inf)
