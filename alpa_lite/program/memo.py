"""A decorator that caches results on the object they describe, for the lifetime of that object."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

Subject = TypeVar("Subject")
Rest = ParamSpec("Rest")
Answer = TypeVar("Answer")


def memoized(
    function: Callable[Concatenate[Subject, Rest], Answer],
) -> Callable[Concatenate[Subject, Rest], Answer]:
    """Cache the results of a function in the `__dict__` of its first argument, keyed by the other arguments.

    The first argument must be immutable and have a `__dict__` (no slots); the others must be hashable. An `lru_cache`
    is no alternative: unbounded, it would keep every graph alive, and bounded, it would evict results of a large step
    while they are still needed.
    """
    # The name is unique per function, since functions of all modules store their results in the same `__dict__`.
    name = f"_kept_{function.__module__}.{function.__qualname__}"

    @wraps(function)
    def answer(subject: Subject, *rest: Rest.args, **options: Rest.kwargs) -> Answer:
        key = (rest, *options.items()) if options else rest
        # This is called millions of times per plan: the cache hit is one dictionary look-up inside a `try`.
        try:
            return subject.__dict__[name][key]
        except KeyError:
            pass
        known: dict[object, Answer] = subject.__dict__.setdefault(name, {})
        known[key] = found = function(subject, *rest, **options)
        return found

    return answer
