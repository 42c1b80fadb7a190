"""Tracing, splitting and planning make millions of objects that stay: the collector of cycles need not look at them all
along. With Python's own thresholds that takes an eighth of the time to plan, and a third of the time to split a step.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_THRESHOLDS = (5_000_000, 10, 10)
"""New objects before a collection, and how many of each generation lead to one of the next."""


_FROZEN_BY_PYTHON = 1000
"""Python 3.12 starts with some hundreds of frozen objects; a user who freezes has at least those of JAX, 100,000."""


@contextmanager
def rare_collection() -> Iterator[None]:
    """Let the collector of cycles run rarely meanwhile; one that is off, or is rarer still, is left as it is."""
    before = gc.get_threshold()
    if before[0] == 0 or all(old >= new for old, new in zip(before, _THRESHOLDS, strict=True)):
        yield
        return
    gc.set_threshold(*(max(old, new) for old, new in zip(before, _THRESHOLDS, strict=True)))
    try:
        yield
    finally:
        _let_new_objects_be_old()
        gc.set_threshold(*before)


def _let_new_objects_be_old() -> None:
    """Without it the next ordinary collection looks at all that was made, young as it still is.

    Objects that are frozen go into the oldest generation when they are no longer; what the user froze stays frozen.
    """
    if gc.get_freeze_count() <= _FROZEN_BY_PYTHON:
        gc.freeze()
        gc.unfreeze()
