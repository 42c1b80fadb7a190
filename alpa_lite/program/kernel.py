"""The decorator of functions that numba compiles at their first use and caches on disk."""

# What numba makes of functions pyright cannot know.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportPrivateUsage=false, reportUnknownParameterType=false, reportMissingParameterType=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from numba import njit
from numba.core.caching import FunctionCache

Function = TypeVar("Function", bound=Callable[..., Any])


class _Cache(FunctionCache):
    """numba's cache of one function on disk, which survives a change of the types that its signatures name.

    numba unpickles the index of a cache before it compares the stamp of the source file: an index that names a class
    of an older version would raise `AttributeError` on every use, and nobody would know which file to delete.
    """

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the compiled function for a signature, or None, after which numba compiles and saves it."""
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # unpickling may fail in any way
            self.flush()
            return None


def kernel(function: Function) -> Function:
    """Compile a function by numba at its first use; it holds no lock of Python's while it runs."""
    compiled: Any = njit(nogil=True)(function)
    compiled._cache = _Cache(function)
    return compiled
