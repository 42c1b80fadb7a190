"""Less frequent garbage collection while millions of long-lived objects are created.

Tracing, splitting and planning allocate objects that nearly all survive, so Python's cyclic collector scans them again
and again and frees almost nothing. With Python's default thresholds, collection takes one eighth of the planning time
and one third of the time to split a step into micro-batches.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_THRESHOLDS = (5_000_000, 10, 10)
"""Thresholds for `gc.set_threshold`: new objects before a collection of generation 0, and collections of generations 0
and 1 before the next older generation is collected too."""


_FROZEN_BY_PYTHON = 1000
"""Upper bound on the number of objects that Python freezes by itself: Python 3.12 starts with a few hundred. A user who
calls `gc.freeze` after importing JAX has at least 100,000 frozen objects, so the two cases are easy to tell apart."""


@contextmanager
def rare_collection() -> Iterator[None]:
    """Raise the thresholds of the cyclic garbage collector inside the `with` block, and restore them afterwards.

    A collector that the user disabled, or whose thresholds are already higher, is left unchanged.
    """
    before = gc.get_threshold()
    if before[0] == 0 or all(old >= new for old, new in zip(before, _THRESHOLDS, strict=True)):
        yield
        return
    # A threshold that the user has raised further is not lowered.
    gc.set_threshold(*(max(old, new) for old, new in zip(before, _THRESHOLDS, strict=True)))
    try:
        yield
    finally:
        # Before the thresholds fall, since the next allocation could start the collection that this avoids.
        _let_new_objects_be_old()
        gc.set_threshold(*before)


def _let_new_objects_be_old() -> None:
    """Promote all live objects to the oldest generation of the garbage collector.

    Otherwise the next ordinary collection would scan everything that the `with` block created, because those objects
    are still in the youngest generation. `gc.unfreeze` moves every frozen object to the oldest generation, including
    those that the user froze; the promotion is therefore skipped if the user has called `gc.freeze`.
    """
    if gc.get_freeze_count() <= _FROZEN_BY_PYTHON:
        gc.freeze()
        gc.unfreeze()
