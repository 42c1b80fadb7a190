"""Rests for Python's garbage collector, which walks over everything that lives again and again while much is made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage is collected within: for work of a few seconds that makes many objects which stay.

    Traces and graphs are hundreds of thousands of objects, beside those of JAX: collecting takes a third of the time.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
