"""The decorator of functions that numba compiles at their first use and caches on disk."""

# What numba makes of functions pyright cannot know.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportPrivateUsage=false, reportUnknownParameterType=false, reportMissingParameterType=false

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])

_compiling = threading.RLock()


class _Kernel:
    """A function that numba compiles when it is first called.

    numba itself is imported then, since that takes longer than importing JAX: neither `import alpa_lite` nor a command
    that plans nothing should wait for it.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self._function = cast(FunctionType, function)
        self._dispatcher: Any = None

    def __call__(self, *arguments: Any) -> Any:
        return (self._dispatcher or self.dispatcher())(*arguments)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # copying and pickling ask for names like `__deepcopy__`, which must not compile
            raise AttributeError(name)
        return getattr(self.dispatcher(), name)  # `signatures` and `stats` of numba

    def dispatcher(self) -> Any:
        """Return the dispatcher of numba, which is also put into the module in place of this object.

        numba looks up the names that a function uses among the globals of its module, and knows dispatchers but not
        this class: all kernels that this one may call are therefore replaced before it is compiled.
        """
        with _compiling:
            if self._dispatcher is None:
                self._dispatcher = _compiled(self._function)
                names = self._function.__globals__
                for name, value in list(names.items()):
                    if isinstance(value, _Kernel):
                        names[name] = value.dispatcher()
        return self._dispatcher


@functools.cache
def _cache_class() -> Any:
    """Return the class of numba's cache on disk that survives a change of the types that signatures name.

    numba unpickles the index of a cache before it compares the stamp of the source file: an index that names a class
    of an older version would raise `AttributeError` on every use, and nobody would know which file to delete.
    """
    from numba.core.caching import FunctionCache

    class Cache(FunctionCache):
        def load_overload(self, sig: Any, target_context: Any) -> Any:
            """Return the compiled function for a signature, or None, after which numba compiles and saves it."""
            try:
                return super().load_overload(sig, target_context)
            except Exception:  # unpickling may fail in any way
                self.flush()
                return None

    return Cache


def _compiled(function: FunctionType) -> Any:
    from numba import njit

    compiled: Any = njit(nogil=True)(function)
    compiled._cache = _cache_class()(function)
    return compiled


def kernel(function: Function) -> Function:
    """Compile a function by numba at its first use; it holds no lock of Python's while it runs."""
    return cast(Function, _Kernel(function))
