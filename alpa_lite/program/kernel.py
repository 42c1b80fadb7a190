"""The decorator of functions that numba compiles at their first use and caches on disk."""

# numba's decorators return objects whose types pyright cannot infer.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportPrivateUsage=false, reportUnknownParameterType=false, reportMissingParameterType=false

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FunctionType
from typing import Any, TypeVar, cast

from alpa_lite.program.memo import memoized

Function = TypeVar("Function", bound=Callable[..., object])

_compiling = threading.RLock()


class _Kernel:
    """A function that numba compiles at its first call.

    numba itself is imported only then, because that takes longer than importing JAX: `import alpa_lite` and commands
    that plan nothing must not pay for it.
    """

    def __init__(self, function: Callable[..., object]) -> None:
        functools.update_wrapper(self, function)
        self._function = cast(FunctionType, function)
        self._dispatcher: Any = None

    def __call__(self, *arguments: object) -> Any:
        return (self._dispatcher or self.dispatcher())(*arguments)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # copying and pickling ask for names like `__deepcopy__`, which must not compile
            raise AttributeError(name)
        return getattr(self.dispatcher(), name)  # `signatures` and `stats` of numba

    def dispatcher(self) -> Any:
        """Return numba's dispatcher, and replace every kernel among the function's globals by its dispatcher.

        numba resolves the names that a function uses in the globals of its module, and accepts dispatchers but not
        instances of this class. All kernels that this one may call are therefore replaced before it is compiled.
        """
        with _compiling:
            if self._dispatcher is None:
                self._dispatcher = _compiled(self._function)
                names = self._function.__globals__
                for name, value in list(names.items()):
                    if isinstance(value, _Kernel):
                        names[name] = value.dispatcher()
        return self._dispatcher


@memoized(entries=1)
def _cache_class() -> Any:
    """Return a subclass of numba's on-disk cache that discards an index it cannot read, and works on a full disk.

    numba unpickles the index of a cache before it compares the time stamp of the source file. An index whose signatures
    name a class that no longer exists would raise `AttributeError` at every call until the user deletes the file.
    """
    from numba.core.caching import FunctionCache

    class Cache(FunctionCache):
        def load_overload(self, sig: object, target_context: object) -> object:
            """Return the compiled function for a signature, or None, which makes numba compile and save it."""
            try:
                return super().load_overload(sig, target_context)
            except Exception:  # unpickling a stale index can raise almost any exception type
                self.flush()
                return None

        def save_overload(self, sig: Any, data: Any) -> None:
            """Save the compiled function for a signature, unless the disk is full or became read-only."""
            with suppress(OSError):
                super().save_overload(sig, data)

    return Cache


def _compiled(function: FunctionType) -> Any:
    from numba import njit

    compiled: Any = njit(nogil=True)(function)
    # numba refuses to cache a function where no folder can be written: a read-only package without a home, a zip file.
    with suppress(RuntimeError):
        compiled._cache = _cache_class()(function)
    return compiled


def kernel(function: Function) -> Function:
    """Return the function compiled by numba at its first call; the compiled code releases the GIL while it runs."""
    return cast(Function, _Kernel(function))
