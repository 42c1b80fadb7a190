"""Memoisation: results of pure functions, stored until their subject is gone, they are pushed out, or `clear_caches`.

    @memoized                  in the `__dict__` of the first argument (a graph, a step, a problem), as long as it lives
    @memoized(entries=1_000)   by all arguments (immutable values), until as many newer results are there

A result depends on nothing but the arguments, so that emptying costs time and changes nothing else. Threads that
compute one result at once are all given the same object, since some results are compared by identity. State of the
process (the jobs that it belongs to, the rules that are registered) is not memoised by these.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from threading import Lock
from typing import Any, ParamSpec, TypeVar, overload
from weakref import WeakValueDictionary

Given = ParamSpec("Given")
Answer = TypeVar("Answer")


class _Table(dict[object, Any]):
    """The results of one function for one subject; unlike a plain dict, it can be referred to weakly."""

    __slots__ = ("__weakref__",)


_bounded: list[dict[object, Any]] = []
_of_subjects: WeakValueDictionary[int, _Table] = WeakValueDictionary()
_filling = Lock()


def clear_caches() -> None:
    """Forget all memoised results of this process; a search that runs meanwhile may take longer."""
    for table in (*_bounded, *_of_subjects.values()):
        table.clear()


@overload
def memoized(function: Callable[Given, Answer], /) -> Callable[Given, Answer]: ...
@overload
def memoized(*, entries: int) -> Callable[[Callable[Given, Answer]], Callable[Given, Answer]]: ...
def memoized(function: Callable[..., Any] | None = None, /, *, entries: int = 0) -> Callable[..., Any]:
    """Memoise a pure function; see the module docstring.

    Without `entries`, the first argument must be immutable and have a `__dict__` (no slots). A bounded table is no
    alternative for what is derived from a graph: it would keep graphs alive, and it would push out results of a large
    step while they are still needed. All other arguments must be hashable.
    """
    return _by_arguments(entries) if function is None else _in_subject(function)


def _by_arguments(entries: int) -> Callable[[Callable[Given, Answer]], Callable[Given, Answer]]:
    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        table: dict[object, Any] = {}
        _bounded.append(table)

        @wraps(function)
        def answer(*given: Any, **options: Any) -> Any:
            key = (given, *options.items()) if options else given
            try:
                return table[key]
            except KeyError:
                pass
            found = function(*given, **options)
            with _filling:
                while len(table) >= entries:
                    # The oldest result: a hit changes nothing, so that it needs no lock.
                    del table[next(iter(table))]
                return table.setdefault(key, found)

        return answer

    return decorate


def _in_subject(function: Callable[..., Any]) -> Callable[..., Any]:
    # The name is unique per function, since functions of all modules store their results in the same `__dict__`.
    name = f"_memo_{function.__module__}.{function.__qualname__}"

    @wraps(function)
    def answer(subject: Any, *rest: Any, **options: Any) -> Any:
        key = (rest, *options.items()) if options else rest
        # This is called millions of times per plan: the cache hit is one dictionary look-up inside a `try`.
        try:
            return subject.__dict__[name][key]
        except KeyError:
            pass
        found = function(subject, *rest, **options)
        # Frozen dataclasses refuse `setattr`, but their `__dict__` is an ordinary dict.
        table = subject.__dict__.setdefault(name, _Table())
        _of_subjects[id(table)] = table
        return table.setdefault(key, found)

    return answer
