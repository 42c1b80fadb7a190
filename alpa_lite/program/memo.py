"""Answers that are kept on what they are about, for as long as it lives."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

Subject = TypeVar("Subject")
Rest = ParamSpec("Rest")
Answer = TypeVar("Answer")


def memoized(
    function: Callable[Concatenate[Subject, Rest], Answer],
) -> Callable[Concatenate[Subject, Rest], Answer]:
    """Ask only once for equal further arguments, which must be hashable.

    The answers stand in the `__dict__` of the first argument, which must never change. A table of the function's own
    would keep every graph alive that was ever asked about, or, if it is bounded, forget those of a large step while
    they are needed.
    """
    name = f"_kept_{function.__module__}.{function.__qualname__}"

    @wraps(function)
    def answer(subject: Subject, *rest: Rest.args, **options: Rest.kwargs) -> Answer:
        key = (rest, *options.items()) if options else rest
        # Asked for millions of times: what is known is found at once.
        try:
            return subject.__dict__[name][key]
        except KeyError:
            pass
        known: dict[Any, Answer] = subject.__dict__.setdefault(name, {})
        known[key] = found = function(subject, *rest, **options)
        return found

    return answer
